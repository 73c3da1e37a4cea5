"""CDI specifications: what a node's GPUs need in a container, in the form that engines read."""
