"""Names of MIG profiles, as NVIDIA's tools and resource names spell them: ``1c.3g.20gb+me``."""

from __future__ import annotations

# by NVML_GPU_INSTANCE_PROFILE_*: media extensions, all of them, graphics, none of them; plain has no suffix
_SUFFIXES = {
    7: "+me",
    8: "+me",
    10: "+gfx",
    11: "+gfx",
    12: "+gfx",
    13: "-me",
    14: "-me",
    15: "+me.all",
    16: "+me.all",
    17: "+gfx",
}


def profile_name(
    gpu_slices: int, compute_slices: int, memory_mib: int, gpu_memory_bytes: int, profile: int | None
) -> str:
    """The profile of a MIG device, from NVML's attributes.

    The memory in the name is not the device's own: it is its share of the GPU in eighths, rounded up, of the
    GPU's memory in whole GiB, rounded up, and that product rounded to whole GiB with halves going up.
    `profile` is the GPU instance's profile number, None if it may not be read.
    """
    share = _divide_up(8 * (memory_mib << 20), gpu_memory_bytes)
    gib = (share * _divide_up(gpu_memory_bytes, 1 << 30) + 4) // 8
    compute = "" if compute_slices == gpu_slices else f"{compute_slices}c."
    suffix = _SUFFIXES.get(profile, "") if profile is not None else ""
    return f"{compute}{gpu_slices}g.{gib}gb{suffix}"


def _divide_up(number: int, by: int) -> int:
    return -(-number // by)
