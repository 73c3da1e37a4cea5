"""Fixtures of tests/gpu_node.py."""

from tests.gpu_node import make_node

__all__ = ["make_node"]
