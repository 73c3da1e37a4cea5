"""Inventory of the node's GPUs from an open NVML. A GPU that cannot be read never hides the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpunode.gpu.model import Gpu, Inventory, MigDevice, MigSize, profile_name
from gpunode.gpu.nvml import NO_PERMISSION, NOT_SUPPORTED, Handle, Nvml, NvmlError, Queries


def discover(
    nvml: Nvml,
    root: str = "/",
    previous: Inventory | None = None,
    skip: Mapping[int, str] | None = None,
) -> Inventory:
    """All GPUs and MIG devices. `NvmlError` only if NVML as a whole fails.

    `root` is the root directory of the sysfs with the topology. A GPU in `skip` is not queried; its `error`
    is the text given there.

    A GPU with `error` keeps what could be read; the missing UUID or PCI address of a lost one is taken from
    `previous`, if that had a GPU of the same index that isn't at another index now.
    """
    left = skip or {}
    gpus = tuple(
        Gpu(index, "", "", "", error=left[index]) if index in left else _gpu(nvml, root, index)
        for index in range(nvml.device_count())
    )
    try:
        cuda = nvml.cuda_version()
    except NvmlError:
        cuda = ""  # the number is only informative; every other call reports NVML's own failures
    return Inventory(nvml.driver_version(), cuda, _remember(gpus, previous))


def _remember(gpus: tuple[Gpu, ...], previous: Inventory | None) -> tuple[Gpu, ...]:
    if previous is None:
        return gpus
    seen = {gpu.uuid for gpu in gpus if gpu.uuid}
    known = {gpu.index: gpu for gpu in previous.gpus if gpu.uuid and gpu.uuid not in seen}
    return tuple(
        replace(known[gpu.index], error=gpu.error, error_code=gpu.error_code)
        if not gpu.uuid and gpu.index in known
        else gpu
        for gpu in gpus
    )


def _gpu(nvml: Nvml, root: str, index: int) -> Gpu:
    queries = Queries(lambda code: True)
    query = queries.query
    device = query(lambda: nvml.handle(index))
    if device is None:
        return _with_error(Gpu(index, "", "", ""), queries.error)
    uuid = query(lambda: nvml.uuid(device)) or ""
    pci = query(lambda: nvml.pci(device)) or ""
    name = query(lambda: nvml.name(device)) or ""
    minor = query(lambda: nvml.minor(device), optional=True)
    memory = query(lambda: nvml.memory_bytes(device), optional=True) or 0
    capability = query(lambda: nvml.compute_capability(device), optional=True) or ""
    mig_mode = query(lambda: nvml.mig_mode(device))
    mig = None
    if mig_mode:
        mig = query(
            lambda: tuple(
                _mig_device(nvml, device, slot, mig, memory) for slot, mig in nvml.mig_handles(device)
            )
        )
    gpu = Gpu(
        index,
        uuid,
        name,
        pci,
        minor,
        memory,
        capability,
        _numa_node(root, pci) if pci else None,
        bool(mig_mode),
        mig or (),
        mig_capable=mig_mode is not None,
        clique="" if queries.error else _clique(nvml, device),
    )
    return _with_error(gpu, queries.error)


def _with_error(gpu: Gpu, error: NvmlError | None) -> Gpu:
    return replace(gpu, error=str(error), error_code=error.code) if error else gpu


def _mig_device(nvml: Nvml, gpu: Handle, slot: int, device: Handle, gpu_memory: int) -> MigDevice:
    gi, ci = nvml.mig_instances(device)
    seen = nvml.call("nvmlDeviceGetAttributes", device)
    memory_mib = int(seen.memorySizeMB)
    size = MigSize(
        *(int(seen.gpuInstanceSliceCount), int(seen.computeInstanceSliceCount)),
        multiprocessors=int(seen.multiprocessorCount),
        copy_engines=int(seen.sharedCopyEngineCount),
        decoders=int(seen.sharedDecoderCount),
        encoders=int(seen.sharedEncoderCount),
        jpeg=int(seen.sharedJpegCount),
        ofa=int(seen.sharedOfaCount),
    )
    try:
        profile = nvml.gpu_instance_profile(gpu, gi)
    except NvmlError as error:
        if error.code not in (NO_PERMISSION, NOT_SUPPORTED):
            raise
        profile = None
    # without the number of the profile, from the device's own name: NVIDIA A100-SXM4-40GB MIG 1g.5gb
    from_name = nvml.name(device).partition(" MIG ")[2].strip() if profile is None else ""
    computed = profile_name(size.gpu_slices, size.compute_slices, memory_mib, gpu_memory or 1, profile)
    return MigDevice(slot, nvml.uuid(device), from_name or computed, gi, ci, memory_mib << 20, size)


def _clique(nvml: Nvml, gpu: Handle) -> str:
    """The NVLink partition that a GPU has joined; "" for most, which have none. No caller needs it."""
    try:
        fabric = nvml.fabric(gpu)
    except NvmlError:
        return ""
    text = fabric.cluster or ""
    joined = fabric.state == "completed" and not fabric.status and text.strip("0")
    cluster = "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
    return f"{cluster}.{fabric.clique}" if joined else ""


def _numa_node(root: str, pci: str) -> int | None:
    """The GPU's NUMA node; where the platform reports none the kernel has -1 (ABI/testing/sysfs-bus-pci).

    It doesn't use `Host`, because importing it in NVML's child would take longer than all queries to NVML.
    """
    try:
        with open(f"{root}/sys/bus/pci/devices/{pci}/numa_node", "rb") as stream:  # noqa: PTH123
            node = int(stream.read(16) or b"-1")
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
