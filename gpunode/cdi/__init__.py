"""CDI specifications: what a node's GPUs need in a container, written as engines read it."""
