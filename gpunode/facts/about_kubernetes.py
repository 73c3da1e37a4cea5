"""Topics of `Node`: the kubelet and what it has registered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpunode.facts import kubelet
from gpunode.facts.about_machine import AboutMachine
from gpunode.facts.topic import topic

if TYPE_CHECKING:
    from gpunode.facts.gpu_operator import Operator


class AboutKubernetes(AboutMachine):
    """See `Node`."""

    @topic
    def kubelet(self) -> kubelet.Kubelet | None:
        return kubelet.find_kubelet(self.host, self.processes)

    @topic
    def operator(self) -> Operator:
        """What is here of NVIDIA's GPU operator; nothing, where it isn't."""
        from gpunode.facts.gpu_operator import find_operator

        return find_operator(self.host)
