"""What mends the hardware's findings, beside the shared remedies of fixes.py."""

from __future__ import annotations

import shlex

from gpunode.checks.fixes import Remedy, everywhere, per_family
from gpunode.result import Fix, Step

_PARAMETERS = "https://docs.kernel.org/admin-guide/kernel-parameters.html"
NOUVEAU_FILE = "/etc/modprobe.d/blacklist-nouveau.conf"
NOUVEAU_TEXT = "blacklist nouveau\noptions nouveau modeset=0\n"
_REBUILD = {
    "debian": ("update-initramfs", "-u", "-k", "all"),
    "rhel": ("dracut", "-f", "--regenerate-all"),
    "suse": ("dracut", "-f", "--regenerate-all"),
}


def kernel_argument(words: str) -> Remedy:
    """Words added to the kernel's command line, for good."""
    line = f'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX {words}"'
    name = words.partition(" ")[0].partition("=")[0].replace(".", "-").replace("_", "-")
    place = "/etc/default/grub.d"
    return per_family(
        f"mkdir -p {place} && echo '{line}' > {place}/90-{name}.cfg && update-grub && reboot",
        f'grubby --update-kernel=ALL --args="{words}" && reboot',
        f"echo '{line}' >> /etc/default/grub && grub2-mkconfig -o /boot/grub2/grub.cfg && reboot",
        f"follow {_PARAMETERS} to boot with {words}",
        "reboot",
    )


FIRMWARE_SETUP = everywhere("systemctl reboot --firmware-setup", "reboot")
_VSPHERE = (
    "https://blogs.vmware.com/apps/2018/10/how-to-enable-nvidia-v100-gpu-in-passthrough-mode-on-vsphere-"
    "for-machine-learning-and-other-hpc-workloads.html"
)


def more_address_space(vendor: str) -> Fix:
    """More room for windows in a virtual machine, which only its hypervisor can give: the guest's kernel has
    nothing to allocate again."""
    if vendor.startswith("VMware"):
        what = f"follow {_VSPHERE} to set pciPassthru.use64bitMMIO and pciPassthru.64bitMMIOSizeGB"
    else:
        what = (
            "give this virtual machine more 64-bit PCI address space on its host, with QEMU by "
            "-global q35-pcihost.pci-hole64-size=2048G"
        )
    return Fix(what, needs_root=False, disruptive="reboot")


NO_ASPM = kernel_argument("pcie_aspm=off")
IOMMU_PASSTHROUGH = kernel_argument("iommu=pt")
POWER_OFF = everywhere("systemctl poweroff", "drain")


def show_device(*addresses: str) -> Fix:
    """What a person reads before opening the machine: capability and state of the links."""
    commands = (f"lspci -vv -s {address} | grep -e LnkCap: -e LnkSta:" for address in addresses)
    return Fix(" && ".join(commands))


SHOW_LINK = everywhere("lspci -vv -d 10de: | grep -e ^[0-9a-f] -e LnkCap: -e LnkSta:")
SHOW_ERRORS = everywhere("dmesg | grep -i -e AER -e pcieport | tail -n 20")


def keep_out(family: str, path: str, text: str) -> Fix:
    """A blacklist file, in the initramfs as well; it counts from the next boot on."""
    quoted = text.replace("\n", "\\n")
    command = f"printf '{quoted}' > {path}"
    steps = [Step(path=path, content=text)]
    if family in _REBUILD:
        steps.append(Step(argv=_REBUILD[family]))
        command += f" && {shlex.join(_REBUILD[family])}"
    return Fix(command, safe=True, steps=tuple(steps))


KEEP_NOUVEAU_OUT = Remedy(
    *(keep_out(family, NOUVEAU_FILE, NOUVEAU_TEXT) for family in ("debian", "rhel", "suse", "other"))
)

_CDMM_FILE = "/etc/modprobe.d/nvidia-coherent-memory.conf"
_CDMM = f"echo 'options nvidia NVreg_CoherentGPUMemoryMode=driver' > {_CDMM_FILE}"
COHERENT_BY_DRIVER = per_family(
    f"{_CDMM} && update-initramfs -u -k all && reboot",
    f"{_CDMM} && dracut -f --regenerate-all && reboot",
    f"{_CDMM} && dracut -f --regenerate-all && reboot",
    f"{_CDMM} && reboot",
    "reboot",
)

DISABLE_HMM = everywhere(
    "echo 'options nvidia_uvm uvm_disable_hmm=1' > /etc/modprobe.d/nvidia-uvm-hmm.conf && "
    "rmmod nvidia_uvm && modprobe nvidia_uvm",
    "drain",
)
