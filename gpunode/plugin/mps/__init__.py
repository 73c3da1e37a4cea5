"""CUDA MPS: which control daemons run where, their limits, and what a container needs to be a client."""
