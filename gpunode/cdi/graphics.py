"""Files of the driver that OpenGL, Vulkan, OpenCL and Xorg look up by a fixed path: all of them optional."""

from __future__ import annotations

from collections.abc import Iterator

from gpunode.host import Host

# EGL and GLVND read /usr/share, Vulkan and OpenCL /etc as well as /usr/share: both are looked at for all
_ROOTS = ("/etc", "/usr/share")
_FILES = (
    "OpenCL/vendors/nvidia.icd",
    "X11/xorg.conf.d/10-nvidia.conf",
    "X11/xorg.conf.d/nvidia-drm-outputclass.conf",
    "egl/egl_external_platform.d/09_nvidia_wayland2.json",
    "egl/egl_external_platform.d/10_nvidia_wayland.json",
    "egl/egl_external_platform.d/15_nvidia_gbm.json",
    "egl/egl_external_platform.d/20_nvidia_xcb.json",
    "egl/egl_external_platform.d/20_nvidia_xlib.json",
    "glvnd/egl_vendor.d/10_nvidia.json",
    "nvidia/nvoptix.bin",
    "vulkan/icd.d/nvidia_icd.json",
    "vulkan/icd.d/nvidia_layers.json",
    "vulkan/implicit_layer.d/nvidia_layers.json",
)
_XORG = ("/usr/lib/xorg/modules", "/usr/lib64/xorg/modules")


def graphics_files(host: Host, architecture: str, version: str) -> Iterator[tuple[str, str]]:
    """Container path and real path of each file that is here."""
    icd = f"vulkan/icd.d/nvidia_icd.{architecture}.json"
    fixed = (f"{root}/{name}" for root in _ROOTS for name in (*_FILES, icd))
    modules = ("drivers/nvidia_drv.so", f"extensions/libglxserver_nvidia.so.{version}")
    xorg = (f"{place}/{name}" for place in _XORG for name in modules)
    program = ("/usr/bin/nvidia-xconfig",)
    for path in (*fixed, *xorg, *program):
        if host.is_file(path):
            yield path, host.realpath(path)
