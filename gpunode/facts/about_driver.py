"""Topics of `Node`: the kernel module, its libraries, device files and what NVML says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpunode.errors import GpunodeError
from gpunode.facts import devices, driver, libraries
from gpunode.facts.about import FEW_GPUS, NVML_SECONDS, NVML_SECONDS_MANY
from gpunode.facts.about_machine import AboutMachine
from gpunode.facts.system import BARE_METAL, VM
from gpunode.facts.topic import topic
from gpunode.gpu.library_paths import DRIVER_ROOT
from gpunode.host import DeviceNode

if TYPE_CHECKING:
    from gpunode.facts.auto_upgrades import Automatic
    from gpunode.facts.gpu_support import Unsuited
    from gpunode.facts.ld_cache import CachedLibrary
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
    def module_open(self) -> bool | None:
        """Whether the module, loaded or on disk, is the open one; None if that can't be told."""
        if self.module is not None:
            return self.module.open
        license_ = driver.module_license(self.host)
        return None if not license_ else "GPL" in license_

    @topic
    def driver_version(self) -> str:
        """Of the loaded module, else of the one on disk; empty if neither tells."""
        if self.module is not None:
            return self.module.version
        return self.module_file.version if self.module_file else ""

    @topic
    def unsuited_gpus(self) -> tuple[Unsuited, ...]:
        """GPUs that have no driver, or one that can't use them, because it doesn't support them."""
        from gpunode.facts.gpu_support import unsuited

        return tuple(unsuited(self.gpus, self.driver_version, self.module_open, self.refused_gpus))

    @topic
    def refused_gpus(self) -> tuple[str, ...]:
        """Addresses of GPUs that the driver owns and failed to initialise, by the kernel's log."""
        from gpunode.facts.kernel_log import failed_gpus

        try:
            found = failed_gpus(self.kernel_log)
        except GpunodeError:
            return ()
        return tuple(gpu.address for gpu in self.gpus if gpu.driver == "nvidia" and gpu.address in found)

    @topic
    def next_kernel(self) -> str:
        """The kernel that boots next: what somebody told GRUB to boot, else the newest of its kind."""
        from gpunode.facts.pending_reboot import chosen_release

        newer = driver.newer_kernels(self.kernels, self.kernel)
        if not newer:
            return self.kernel
        chosen = chosen_release(self.host, self.kernels)
        return chosen or max(newer, key=lambda one: driver.version_key(one.release)).release

    @topic
    def next_version(self) -> str:
        """Of the module that the next boot loads; empty if there is none, or if it doesn't tell."""
        if self.next_kernel == self.kernel:
            return self.module_file.version if self.module_file else ""
        return driver.next_version(self.host, self.next_kernel)

    @topic
    def automatic_upgrades(self) -> Automatic | None:
        """Who upgrades packages without being asked, None if nobody does."""
        from gpunode.facts.auto_upgrades import automatic_upgrades

        return automatic_upgrades(self.host, self.distribution.family)

    @topic
    def linked_libraries(self) -> tuple[CachedLibrary, ...]:
        """What the dynamic linker's cache holds for 64-bit programs."""
        return libraries.linked_libraries(self.host)

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
        return libraries.find_library(self.host, libraries.NVML, self.linked_libraries)

    @topic
    def cuda_library(self) -> libraries.Library | None:
        return libraries.find_library(self.host, libraries.CUDA, self.linked_libraries)

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
        """What NVML says, asked in a child process; not `asked` where its answer would cost a change: NVML
        has the module loaded and makes the device files that lack, which would hide the fault."""
        from gpunode.gpu.isolated import NvmlProbe, probe

        library = self.nvml_library
        if library is None and not self.host.is_dir(f"{DRIVER_ROOT}/usr"):
            return NvmlProbe(None, message="there is no libnvidia-ml.so.1 to ask NVML with", asked=False)
        change = self._nvml_would
        if change:
            return NvmlProbe(None, message=f"NVML isn't asked: it would {change}", asked=False)
        seconds = NVML_SECONDS_MANY if len(self.driver_gpus) > FEW_GPUS else NVML_SECONDS
        return probe(self.host, seconds, condition=True, root=self._driver_root)

    @property
    def _driver_root(self) -> str:
        """Root directory of the driver container in which NVML is queried, "" for the node's own. Only root
        may enter it."""
        library = self.nvml_library
        return library.root if library and (self.host.is_root or not self.host.live) else ""

    @property
    def _nvml_would(self) -> str:
        """What NVML would change to get what it needs; empty if everything is there."""
        if self.kind not in (BARE_METAL, VM):
            return ""  # a container has only what it was given, and WSL has neither module nor these files
        if self.module is None:
            return "load the module"
        there = {device.path for device in self.device_nodes}
        if self._driver_root:
            there = {
                device.path.removeprefix(DRIVER_ROOT) for device in self.host.devices(f"{DRIVER_ROOT}/dev")
            }
            # a toolkit container may make them in the node's own /dev instead
            there |= {device.path for device in self.device_nodes}
        minors = sorted(gpu.minor for gpu in self.driver_gpus if gpu.minor is not None and not gpu.excluded)
        wanted = (devices.CONTROL, *(f"/dev/nvidia{minor}" for minor in minors))
        return next((f"make {path}" for path in wanted if path not in there), "")

    @topic
    def conditions(self) -> tuple[Condition, ...]:
        """How each GPU is, as NVML tells; () where NVML isn't there or doesn't answer."""
        return () if self.module is None else self.nvml.conditions
