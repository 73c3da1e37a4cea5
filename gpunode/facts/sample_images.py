"""Images that guides tell people to try their GPUs with, and the CUDA of each."""

from __future__ import annotations

from gpunode.tables import table

TABLE = "sample_images"


def sample_cuda(reference: str) -> str:
    """The CUDA release of a sample's image, empty for any other image."""
    named = reference.removeprefix("docker.io/")
    rows = table(TABLE).rows if named else ()
    return next((row["cuda"] for row in rows if named == f"{row['image']}:{row['tag']}"), "")
