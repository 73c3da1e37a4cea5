"""Topics of `Node`: the machine, its kernel and what is on the PCI bus."""

from __future__ import annotations

from gpunode.facts import kernel_log, module_options, packages, pci, processes, system, xid_log
from gpunode.facts.about import About
from gpunode.facts.topic import topic


class AboutMachine(About):
    """See `Node`."""

    @topic
    def distribution(self) -> system.Distribution:
        return system.read_distribution(self.host)

    @topic
    def kind(self) -> str:
        """bare-metal, vm, wsl2, tegra or container."""
        return system.node_class(self.host)

    @topic
    def kernel(self) -> str:
        return system.kernel_release(self.host)

    @topic
    def secure_boot(self) -> bool | None:
        return system.secure_boot(self.host)

    @topic
    def kernel_log(self) -> tuple[kernel_log.KernelLine, ...]:
        """`Unreadable` for an ordinary user where the kernel restricts it (kernel.dmesg_restrict)."""
        return kernel_log.read_kernel_log(self.host)

    @topic
    def xids(self) -> tuple[xid_log.XidLine, ...]:
        """Of this boot, oldest first; `Unreadable` as `kernel_log` is."""
        return xid_log.xid_lines(self.kernel_log)

    @topic
    def packages(self) -> packages.Packages:
        """Installed packages. Where rpm has to be asked it takes half a second: ask files first."""
        return packages.read_packages(self.host)

    @topic
    def module_options(self) -> module_options.ModuleOptions:
        """What modprobe.d and the command line say of modules. `Unreadable` if a file of it is closed."""
        return module_options.read_module_options(self.host)

    @topic
    def gpus(self) -> tuple[pci.PciGpu, ...]:
        return pci.read_gpus(self.host)

    @topic
    def processes(self) -> tuple[processes.Process, ...]:
        return processes.running(self.host)
