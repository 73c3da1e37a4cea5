"""Topics of `Node`: the kernel module, its libraries, device files and what NVML says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpunode.facts import devices, driver, libraries
from gpunode.facts.about import NVML_SECONDS
from gpunode.facts.about_machine import AboutMachine
from gpunode.facts.topic import topic
from gpunode.host import DeviceNode

if TYPE_CHECKING:
    from gpunode.gpu.condition import Condition
    from gpunode.gpu.isolated import NvmlProbe


class AboutDriver(AboutMachine):
    """See `Node`."""

    @topic
    def module(self) -> driver.LoadedModule | None:
        return driver.loaded_module(self.host)

    @topic
    def module_file(self) -> driver.ModuleFile | None:
        return driver.module_file(self.host)

    @topic
    def kernels(self) -> tuple[driver.Kernel, ...]:
        return driver.installed_kernels(self.host)

    @topic
    def module_built(self) -> bool:
        """Whether the running kernel has an NVIDIA module on disk."""
        return driver.module_for(self.host, self.kernel)

    @topic
    def dkms(self) -> tuple[str, ...]:
        return driver.dkms_versions(self.host)

    @topic
    def nvml_library(self) -> libraries.Library | None:
        return libraries.find_library(self.host, libraries.NVML)

    @topic
    def cuda_library(self) -> libraries.Library | None:
        return libraries.find_library(self.host, libraries.CUDA)

    @topic
    def driver_gpus(self) -> tuple[devices.DriverGpu, ...]:
        return devices.driver_gpus(self.host)

    @topic
    def device_nodes(self) -> tuple[DeviceNode, ...]:
        return devices.nvidia_nodes(self.host)

    @topic
    def majors(self) -> dict[str, int]:
        return devices.character_majors(self.host.read_text("/proc/devices") or "")

    @topic
    def nvml(self) -> NvmlProbe:
        """What NVML says, asked in a child process. Ask only when module and library are there."""
        from gpunode.gpu.isolated import probe

        return probe(self.host, NVML_SECONDS, condition=True)

    @topic
    def conditions(self) -> tuple[Condition, ...]:
        """How each GPU is, as NVML tells; () where NVML isn't there or doesn't answer."""
        if self.module is None or self.nvml_library is None:
            return ()
        return self.nvml.conditions
