"""NVIDIA GPUs: what they are advertised as, and what a container gets to use them."""
