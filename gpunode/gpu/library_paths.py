"""Directories that hold the driver's libraries and programs, on every kind of node."""

from __future__ import annotations

from contextlib import suppress

from gpunode.errors import Unreadable
from gpunode.host import Host

DRIVER_ROOT = "/run/nvidia/driver"
"""Root directory of the GPU operator's driver container, as the operator mounts it on the node."""

NVML = "libnvidia-ml.so.1"
CUDA = "libcuda.so.1"

SYSTEM = (
    *("/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"),
    *("/lib64", "/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu"),
)
"""Searched by the dynamic loader without a cache entry (ld.so(8), and Debian's multiarch directories), in the
order of NVIDIA's device plugin."""

PLATFORM = (
    "/usr/lib/wsl/lib",
    "/run/opengl-driver/lib",  # NixOS
    "/home/kubernetes/bin/nvidia/lib64",  # Container-Optimized OS on GKE
    "/var/lib/nvidia/lib64",  # Container-Optimized OS
    "/usr/local/nvidia/lib64",  # the same, as a container sees it
    "/usr/local/glibc/usr/lib",  # Talos, where the host's own C library is musl
    "/opt/nvidia/current/usr/lib64",  # Flatcar
    "/opt/nvidia/current/lib64",
    "/opt/drivers/nvidia/lib64",
    "/usr/lib/nvidia/tesla",  # Bottlerocket
    "/usr/lib/aarch64-linux-gnu/nvidia",  # JetPack 6 and later
    "/usr/lib/aarch64-linux-gnu/tegra",
    "/var/lib/snapd/lib/gl",  # Ubuntu Core
    "/var/lib/snapd/lib/gl/nvidia",
    "/var/lib/snapd/lib/gl64",
)
"""Where a platform keeps them outside the loader's search path, for GPU containers to use."""

ALTERNATIVES = ("/usr/lib/x86_64-linux-gnu/nvidia/current", "/usr/lib/aarch64-linux-gnu/nvidia/current")
"""Where Debian's own packages keep a driver of which its alternatives system links only some files."""

STRAY = ("/usr/lib/nvidia", "/usr/lib64/nvidia", "/opt/nvidia/lib64")
"""Where a package puts them that only work once ldconfig has run."""

IN_DRIVER_ROOT = tuple(f"{DRIVER_ROOT}{directory}" for directory in SYSTEM)

PROGRAM_DIRECTORIES = (
    *("/usr/bin", "/usr/sbin", "/bin", "/sbin", "/usr/local/bin", "/opt/bin", "/usr/lib/wsl/lib"),
    *("/usr/lib/nvidia/bin", "/run/current-system/sw/bin", "/home/kubernetes/bin/nvidia/bin"),
    *("/var/lib/nvidia/bin", "/usr/local/nvidia/bin", "/opt/nvidia/bin", "/opt/nvidia/current/bin"),
    *("/opt/nvidia/current/usr/bin", "/opt/drivers/nvidia/bin"),
    *("/usr/libexec/nvidia/tesla/bin", f"{DRIVER_ROOT}/usr/bin"),
)
"""Where nvidia-smi and the driver's other programs are, whatever PATH is."""


def library_directories(architecture: str) -> tuple[str, ...]:
    """Directories of 64-bit libraries for x86_64 or aarch64, in the order of a search."""
    every = (*SYSTEM, *ALTERNATIVES, *PLATFORM)
    return tuple(
        directory
        for directory in every
        if "-linux-gnu" not in directory or f"/{architecture}-linux-gnu" in directory
    )


def nvml_outside_loader(host: Host, root: str = "") -> str:
    """Path of NVML on a node where the dynamic loader doesn't find it; "" if there is none. With `root` the
    path in the driver container that has this root directory."""
    for directory in (*PLATFORM, *IN_DRIVER_ROOT):
        path = f"{root}{directory}/{NVML}"
        with suppress(Unreadable):  # the plugin's unit has no access to /home (ProtectHome=)
            if host.is_file(path) and not host.refusal(path):
                return path.removeprefix(root)
    return ""


def nvml_options(host: Host, library: str = "", root: str = "") -> dict[str, str]:
    """Options of a child that opens NVML (`nvml.Nvml.for_parent`); `library` is its path if it is known."""
    fallback = "" if library else nvml_outside_loader(host, root)
    return {"library": library, "fallback": fallback, "root": root}
