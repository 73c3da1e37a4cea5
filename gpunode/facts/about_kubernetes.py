"""Topics of `Node`: the kubelet and what it has registered."""

from __future__ import annotations

from gpunode.facts import kubelet
from gpunode.facts.about_machine import AboutMachine
from gpunode.facts.topic import topic


class AboutKubernetes(AboutMachine):
    """See `Node`."""

    @topic
    def kubelet(self) -> kubelet.Kubelet | None:
        return kubelet.find_kubelet(self.host, self.processes)
