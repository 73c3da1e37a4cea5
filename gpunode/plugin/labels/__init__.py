"""The node's labels, as NVIDIA's GPU feature discovery and AMD's node labeller make them."""
