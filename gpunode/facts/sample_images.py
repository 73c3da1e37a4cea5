"""Images that guides tell people to try their GPUs with, and the CUDA of each."""

from __future__ import annotations

from gpunode.tables import table

TABLE = "sample_images"


def sample_cuda(reference: str) -> str:
    """The CUDA release of a sample's image, empty for any other image. The tag may name the distribution
    that the image was built on (``vectoradd-cuda11.7.1-ubi8``), and a digest may follow it."""
    named = reference.removeprefix("docker.io/").partition("@")[0]
    rows = table(TABLE).rows if named else ()
    known = ((f"{row['image']}:{row['tag']}", row["cuda"]) for row in rows)
    return next((cuda for name, cuda in known if named == name or named.startswith(f"{name}-")), "")
