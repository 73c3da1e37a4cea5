"""Packages of NVIDIA's driver and container toolkit, through the distribution's own package manager."""
