"""CUDA MPS: which control daemons run where, what they limit, and what a container needs to be a client."""
