"""Fixtures of tests/gpu_node.py and tests/ordinary_user.py."""

from tests.gpu_node import make_node
from tests.ordinary_user import place

__all__ = ["make_node", "place"]
