"""Fixtures of tests/cluster.py."""

from tests.cluster import api, certificates, run

__all__ = ["api", "certificates", "run"]
