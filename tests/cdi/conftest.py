"""See tests/memory.py."""

from tests.memory import tmp_path

__all__ = ["tmp_path"]
