"""Fixtures of tests/memory.py, tests/cluster.py and tests/gpu_node.py."""

from tests.cluster import api, certificates, run
from tests.gpu_node import make_node
from tests.memory import tmp_path

__all__ = ["api", "certificates", "make_node", "run", "tmp_path"]
