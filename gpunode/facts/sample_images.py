"""Images that guides tell people to try their GPUs with, and the CUDA of each."""

from __future__ import annotations

from gpunode.tables import table

TABLE = "sample_images"
VECTOR_ADD = "nvcr.io/nvidia/k8s/cuda-sample"


def sample_cuda(reference: str) -> str:
    """The CUDA release of a sample's image, empty for any other image. The tag may name the distribution
    that the image was built on (``vectoradd-cuda11.7.1-ubi8``), and a digest may follow it."""
    named = reference.removeprefix("docker.io/").partition("@")[0]
    rows = table(TABLE).rows if named else ()
    known = ((f"{row['image']}:{row['tag']}", row["cuda"]) for row in rows)
    return next((cuda for name, cuda in known if named == name or named.startswith(f"{name}-")), "")


def vector_add_image() -> str:
    """NVIDIA's newest vector-add sample for Kubernetes, with its tag."""
    from gpunode.tables import numbers

    rows = [row for row in table(TABLE).rows if row["image"] == VECTOR_ADD]
    newest = max(rows, key=lambda row: numbers(row["cuda"]))
    return f"{newest['image']}:{newest['tag']}"
