"""Files that a test gives a machine."""

from __future__ import annotations

from pathlib import Path


def write(root: Path, path: str, text: str, mode: int = 0o644) -> Path:
    """Write a file, with its directories, of the machine in this directory; its path here."""
    real = root / path.lstrip("/")
    real.parent.mkdir(parents=True, exist_ok=True)
    real.write_text(text)
    real.chmod(mode)
    return real
