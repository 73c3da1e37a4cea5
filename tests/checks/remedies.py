"""Requirements for every command that the doctor prints: ready to be copied, and safe for the node."""

import re

# uppercase words that are part of a command: settings, modes, variables
_CAPITALS = {
    *("ACTION", "DEVPATH", "RUN", "DEFAULT", "PERFORMANCE", "TEMPERATURE", "POWER", "EDITOR", "PATH"),
    *("NVIDIA_DRIVER_CAPABILITIES", "DEVICE_LIST_STRATEGY", "PASS_DEVICE_SPECS", "MIG_STRATEGY", "AER"),
    *("GRUB_CMDLINE_LINUX", "IGNORE_PREEMPT_RT_PRESENCE", "XDG_RUNTIME_DIR", "ALL", "MOK", "ECAP_ACS"),
    "GPUNODE_PLUGIN_SERVE_MIG_STRATEGY",
    *("NVIDIA", "CUDA", "PCI", "QEMU"),  # names
}
_HOLES = (
    *(
        "setenforce",
        "selinux=0",
        "SELINUX=",
        "label=disable",
        "disable-validation",
        "apparmor=0",
        "aa-disable",
    ),
    *("--privileged", "unconfined", "trusted=yes", "nogpgcheck", "no-gpg", "allow-unauthenticated"),
    *("--insecure", "curl -k", "chmod 777", "chmod a+rwx", "tcp://0.0.0.0", "--allow-downgrades"),
)


def placeholders(command: str) -> list[str]:
    """Placeholders that a user would have to fill in before the command works."""
    words = re.findall(r"(?<![\w./$-])[A-Z][A-Z_]{2,}(?![\w./])", command)
    return [word for word in words if word not in _CAPITALS] + re.findall(r"<[a-z][\w -]*>", command)


def holes(command: str) -> list[str]:
    """Security features that a command disables."""
    return [word for word in _HOLES if word in command]
