"""MPS: the control daemons that let processes share a GPU at the same time."""
