"""All checks, in the order of the report: from the PCI bus to the device plugin."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches

from gpunode.checks import (
    cdi,
    containerd,
    containerd_config,
    crio,
    cuda,
    device_plugin,
    devices,
    docker,
    docker_variants,
    driver_libraries,
    driver_packages,
    fabric,
    gpu_operator,
    hardware,
    health,
    kernel_module,
    kubelet,
    kubernetes_distributions,
    mig,
    pcie,
    platform,
    podman,
    security,
    toolkit,
    toolkit_config,
    xids,
)
from gpunode.checks.model import Check
from gpunode.errors import UsageError

_MODULES = (
    *(cdi, containerd, containerd_config, crio, cuda, device_plugin, devices, docker, docker_variants),
    *(driver_libraries, driver_packages, fabric, gpu_operator, hardware, health, kernel_module, kubelet),
    *(kubernetes_distributions, mig, pcie, platform, podman, security, toolkit, toolkit_config, xids),
)
# the checks of each layer, both in the order of the report; a module may contain checks of several layers
LAYERS = {
    "hardware": """
        pci-no-gpu pci-gpu-count-mismatch gpu-bound-other-driver nouveau-loaded nova-core-loaded
        nouveau-not-blacklisted bar-too-small pcie-link-degraded pcie-aer-errors iommu-acs pcie-aspm
        numa-affinity-missing aux-power coherent-memory-mode uvm-hmm-kaslr
    """,
    "driver": """
        driver-not-installed dkms-not-built kernel-headers-missing secureboot-unsigned mok-pending
        driver-too-old gpu-arch-dropped kmod-flavour driver-eol module-not-loaded
        module-disabled-next-boot gsp-firmware driver-persist-modprobe-conf driver-oops
        driver-libs-mixed driver-lib-mismatch driver-upgrade-pending libnvidia-ml-missing
        libcuda-missing libcuda-stub nvidia-smi-missing unattended-upgrades-driver
        driver-two-installs
    """,
    "devices": """
        nvml-hang uvm-lost-at-reboot dev-char-lost-at-reboot dev-nodes-missing mig-caps-missing
        dev-node-major-stale uvm-not-loaded dev-perms dev-char-symlinks imex-channels
        cgroup-device-revoked persistenced-broken persistence-off
    """,
    "health": """
        gpu-lost gpu-reset-required inforom-corrupt ecc-uncorrectable row-remap-pending
        channel-repair-pending ecc-mode-pending xid-recent thermal-power-throttle power-cap-low
        nvlink-down compute-mode gpu-used-by-desktop zombie-gpu-memory bad-cuda-env
    """,
    "fabric": """
        fabricmanager-version fabric-topology fabricmanager-missing fabric-training mig-mode-pending
        mig-enabled-no-instances mig-config-lost mig-cdi-stale mig-nvml-regression
        mig-strategy-mismatch mps-mig-mixed vgpu-driver-mismatch vgpu-license cc-mode peermem
        gds-gdrcopy
    """,
    "toolkit": """
        toolkit-missing toolkit-too-old toolkit-versions-mixed toolkit-known-bad-version
        apt-signed-by toolkit-config-invalid ldconfig-fails no-cgroups-wrong runtime-mode
        toolkit-not-on-daemon-path hook-conflict toolkit-cli-probe
    """,
    "cdi": """
        cdi-spec-missing cdi-disabled cdi-perms cdi-refresh-inactive cdi-spec-stale
        cdi-uvm-absent-in-spec cdi-duplicate cdi-unsupported-version cdi-wsl-dxcore
        cdi-lost-at-reboot
    """,
    "docker": """
        docker-snap docker-desktop docker-rootless docker-version-old docker-unknown-key
        docker-default-runtime docker-cgroup-driver-mismatch docker-config-invalid-json
        docker-flag-file-conflict docker-not-running docker-not-restarted docker-runtime-missing
        docker-gpus-run-probe
    """,
    "containerd": """
        containerd-config-version containerd-cri-disabled containerd-not-restarted
        containerd-imports-clobber containerd-config-drift containerd-runtime-missing
        containerd-runtime-binary containerd-systemdcgroup containerd-nri containerd-deprecations
        containerd-memlock
    """,
    "crio": """
        crio-not-running crio-runtime-missing crio-runtime-path crio-cgroup-manager
        crio-stray-dropin crio-hooks-mode crio-not-selected
    """,
    "podman": "podman-cdi",
    "kubelet": """
        kubelet-not-running kubelet-device-plugin-dir plugin-socket-dead k3s-edited-generated
        k3s-wrong-template k3s-nvidia-wrong-root k3s-nvidia-not-detected microk8s-paths k0s-dropin
        cri-dockerd kind-nested operator-host-driver-conflict operator-validations
        operator-leftovers plugin-mount-mismatch plugin-strategy-mismatch plugin-device-specs
        gpus-offered-twice plugin-multiple plugin-cannot-see-nvml plugin-not-registered
        allocatable-zero hostusers-false runtimeclass-missing pod-driver-capabilities disk-pressure
        kubelet-swap-memlock-hugepages
    """,
    "cuda": """
        cuda-driver-version ptx-unsupported-toolchain no-kernel-image image-needs-newer-driver
        vectoradd-image-arch forward-compat-803-804 cuda-uninitialised
    """,
    "platform": """
        selinux-nvml apparmor-denied clock-skew reboot-required kernel-unsupported memory-cgroup-v1
        wsl2 jetson lxc-nested nixos-flatcar-immutable
    """,
    "security": """
        toolkit-cve driver-cve accept-envvar-unprivileged daemon-tcp docker-group cap-profiling
    """,
}
_LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names.split()}
_PLACES = {name: place for place, name in enumerate(_LAYER_OF)}
_DECLARED = (
    replace(check, layer=_LAYER_OF[check.id])  # KeyError for a check without a layer
    for module in _MODULES
    for check in vars(module).values()
    if isinstance(check, Check) and check.run.__module__ == module.__name__  # not an imported one
)
ALL_CHECKS: tuple[Check, ...] = tuple(sorted(_DECLARED, key=lambda check: _PLACES[check.id]))
BY_ID = {check.id: check for check in ALL_CHECKS}


def find_check(identifier: str) -> Check:
    """Return the check with this id; `UsageError` suggests similar ids."""
    check = BY_ID.get(identifier)
    if check is None:
        longer = [known for known in BY_ID if identifier and known.startswith(identifier)]
        near = (longer or get_close_matches(identifier, BY_ID, n=3))[:3]
        hint = f"did you mean {' or '.join(near)}?" if near else "run gpunode explain to list all checks"
        raise UsageError(f"unknown check {identifier!r}", hint=hint)
    return check
