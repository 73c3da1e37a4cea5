"""From a configuration to what each GPU of this node is to be, and every reason why that can't be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpunode.dataclass import dataclass
from gpunode.errors import PreconditionError
from gpunode.mig.config import Entry
from gpunode.mig.layout import GpuLayout, Layouts
from gpunode.mig.placement import offered, unknown_profiles

_VGPU_GUEST = 2  # NVML_GPU_VIRTUALIZATION_MODE_VGPU


@dataclass(frozen=True)
class Wish:
    """What one GPU is to be: MIG on or off, and devices by name. `line` is the configuration's."""

    gpu: GpuLayout
    enabled: bool
    profiles: Mapping[str, int]
    line: int


@dataclass(frozen=True)
class Wishes:
    """All of them, in NVML's order, and what a person should know. `unnamed` are GPUs with MIG of which no
    entry says anything."""

    all: tuple[Wish, ...]
    notes: tuple[str, ...] = ()
    unnamed: tuple[GpuLayout, ...] = ()


class CannotBe(PreconditionError):
    """The configuration is sound, and this node can't have it; nothing was changed."""

    default_code = "mig-impossible"

    def __init__(self, faults: Sequence[str], hint: str = "") -> None:
        super().__init__(
            "; ".join(faults), hint=hint or "see what the GPUs offer: gpunode mig list --profiles"
        )
        self.faults = tuple(faults)


def wishes(
    path: str, label: str, entries: Sequence[Entry], layouts: Layouts, *, mode_only: bool = False
) -> Wishes:
    """What the entries of one label mean here. `CannotBe` with everything that stands against it.

    With `mode_only` nobody asks for instances, and so not for the right to see them.

    As mig-parted has it entries are walked in the file's order, and of two for one GPU the later one holds
    for its instances; where they differ about the mode there is no answer. Unlike there, an index that this
    node doesn't have, entries that match no GPU at all and MIG for a GPU without it are faults.
    """
    faults: list[str] = []
    notes: list[str] = []
    found: dict[int, Wish] = {}
    for entry in entries:
        place = f"{path}:{entry.line}"
        faults += _missing(place, entry, layouts)
        for gpu in _chosen(entry, layouts, place, notes, faults):
            before = found.get(gpu.index)
            if gpu.error and before is not None:
                continue  # once is enough to say so
            if before is not None and before.enabled != entry.enabled:
                one, other = ("on", "off") if entry.enabled else ("off", "on")
                faults.append(
                    f"{place}: GPU {gpu.index} is to have MIG {one} and, by line {before.line}, {other}"
                )
            elif before is not None and dict(before.profiles) != dict(entry.profiles):
                notes.append(f"{place}: holds for GPU {gpu.index}, and not line {before.line}")
            found[gpu.index] = Wish(gpu, entry.enabled, entry.profiles, entry.line)
    if not found and not faults:
        seen = ", ".join(f"GPU {gpu.index} is 0x{gpu.device_id:08X}" for gpu in layouts.gpus) or "it has none"
        faults.append(f"{path}: no entry of {label!r} matches a GPU of this node ({seen})")
    faults += _impossible(path, found, mode_only)
    if faults:
        raise CannotBe(tuple(dict.fromkeys(faults)))
    unnamed = tuple(gpu for gpu in layouts.gpus if gpu.capable and gpu.index not in found)
    return Wishes(tuple(found[index] for index in sorted(found)), tuple(notes), unnamed)


def _missing(place: str, entry: Entry, layouts: Layouts) -> list[str]:
    here = {gpu.index for gpu in layouts.gpus}
    count = len(here)
    have = f"this node has {count} GPU{'s' if count != 1 else ''}, from 0 on" if count else "it has no GPU"
    return [f"{place}: there is no GPU {index}: {have}" for index in entry.devices or () if index not in here]


def _chosen(
    entry: Entry, layouts: Layouts, place: str, notes: list[str], faults: list[str]
) -> list[GpuLayout]:
    """The GPUs that an entry means. With `devices: all` those without MIG are left out, if others have it.

    A GPU that doesn't even tell what it is may be what a filter means: it is not left out in silence.
    """
    found = [gpu for gpu in layouts.gpus if _selects(entry, gpu)]
    if entry.enabled and entry.devices is None:
        able = [gpu for gpu in found if gpu.capable or gpu.error]
        if able:
            notes += [
                f"{place}: GPU {gpu.index} ({gpu.name}) knows no MIG and is left out"
                for gpu in found
                if gpu not in able
            ]
            found = able
    if not found and entry.devices is not None and not _missing(place, entry, layouts):
        faults.append(f"{place}: its device-filter matches none of its devices")
    return found


def _selects(entry: Entry, gpu: GpuLayout) -> bool:
    if gpu.error and not gpu.device_id:
        return entry.devices is None or gpu.index in entry.devices
    return entry.selects(gpu.index, gpu.device_id, gpu.subsystem_id)


def _impossible(path: str, found: Mapping[int, Wish], mode_only: bool) -> list[str]:
    """What stands against the wishes; GPUs of which the same is to be said are named together."""
    faults: dict[tuple[str, int, str], list[str]] = {}
    for wish in found.values():
        reason = _against(wish, mode_only)
        if reason:
            faults.setdefault((wish.gpu.name, wish.line, reason), []).append(str(wish.gpu.index))
    return [
        f"{path}:{line}: GPU {', '.join(numbers)}{f' ({name})' if name else ''} {reason}"
        for (name, line, reason), numbers in faults.items()
    ]


def _against(wish: Wish, mode_only: bool) -> str:
    gpu = wish.gpu
    if gpu.error:
        return f"can't be asked: {gpu.error}"
    if not gpu.capable:
        return "knows no MIG" if wish.enabled else ""
    changes = wish.enabled != gpu.current or bool(wish.profiles) or bool(gpu.instances)
    if gpu.virtualization == _VGPU_GUEST and changes:
        return "is a virtual GPU, whose host decides about MIG"
    if mode_only:
        return ""
    if gpu.untold:
        return f"doesn't tell its instances: {gpu.untold} (root may ask)"
    unknown = unknown_profiles(gpu, wish.profiles) if gpu.profiles else ()
    return f"has no profile {' or '.join(unknown)}; it has {offered(gpu)}" if unknown else ""
