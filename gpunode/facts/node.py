"""`Node`: everything the checks may know of one machine, each topic read once, when first asked for.

The topics lie in rooms: the machine (about_machine.py), the driver and its GPUs (about_driver.py), the
services beside it (about_services.py), the container engines (about_engines.py), Kubernetes
(about_kubernetes.py) and what runs (about_workloads.py). A topic raises `Unreadable` if this user may not
look, and `ConfigError` for a file that can't be parsed; a check that needs it is skipped or says so.
"""

from __future__ import annotations

from gpunode.dataclass import dataclass
from gpunode.facts.about import Questions
from gpunode.facts.about_images import AboutImages
from gpunode.facts.about_services import AboutServices
from gpunode.facts.about_workloads import AboutWorkloads

__all__ = ["Node", "Questions"]


@dataclass(frozen=True)
class Node(AboutImages, AboutWorkloads, AboutServices):
    """A lazily read snapshot of `host`."""
