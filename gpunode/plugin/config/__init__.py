"""Flags, environment and config file of `plugin serve`, compatible with NVIDIA's plugin."""
