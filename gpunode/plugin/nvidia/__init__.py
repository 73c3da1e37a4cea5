"""NVIDIA GPUs: the resources that they are advertised as, and what a container gets to use them."""
