"""Sharing: units of a resource become several devices each. Pure, and the same for every vendor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from gpunode.errors import ConfigError
from gpunode.plugin.config.settings import SharedResource, Sharing, resource_name_problem
from gpunode.plugin.model import (
    SHARE_MARK,
    KubeletDevice,
    LeftOut,
    Resource,
    ResourcePlan,
    Unit,
    matcher,
    unmatched,
)

Refusal = Callable[[Unit, SharedResource], str]
"""Why a unit can't be shared as an entry says; empty if it can."""


def share(
    by_name: Mapping[str, Sequence[KubeletDevice]], sharing: Sharing | None, refusal: Refusal
) -> ResourcePlan:
    """Give each device that an entry of `sharing` names its shares, under the name in the entry.

    The plan has the resources in the order in which they were named, and what sharing leaves out of them.
    Devices without an entry stay unchanged. `ConfigError` if two entries name the same unit, or a rename
    isn't a valid resource name.
    """
    if sharing is None:
        return ResourcePlan(tuple(Resource(name, tuple(devices)) for name, devices in by_name.items()))
    warnings: list[str] = []
    entries = _assigned(by_name, sharing, warnings)
    left_out: list[LeftOut] = []
    result: dict[str, list[KubeletDevice]] = {}
    shares: dict[str, int] = {}
    for name, devices in by_name.items():
        for device in devices:
            entry = entries.get(device.id)
            if entry is None:
                result.setdefault(name, []).append(device)
                continue
            reason = refusal(device.unit, entry)
            if reason:
                left_out.append(LeftOut(device.unit.index, device.id, reason, unshareable=True))
                continue
            target = target_name(sharing, entry)
            result.setdefault(target, []).extend(_shares(device, entry.replicas))
            shares[target] = max(shares.get(target, 1), entry.replicas)
    return ResourcePlan(tuple(_resources(result, shares, sharing)), tuple(left_out), tuple(warnings))


def target_name(sharing: Sharing, entry: SharedResource) -> str:
    """The name under which the shares of this entry are advertised. `ConfigError` if it isn't valid."""
    if not entry.rename and not sharing.rename_by_default:
        return entry.name
    name = entry.rename or f"{entry.name}.shared"
    problem = resource_name_problem(name)
    if problem:
        raise ConfigError(
            f"sharing.{_section(sharing)}: {entry.name}: no resource can be called {name}: {problem}",
            hint="give it a shorter name with `rename`" if not entry.rename else "choose another `rename`",
        )
    return name


def _section(sharing: Sharing) -> str:
    return "mps" if sharing.strategy == "mps" else "timeSlicing"


# --- shared devices ------------------------------------------------------------------------------------


def _assigned(
    by_name: Mapping[str, Sequence[KubeletDevice]], sharing: Sharing, warnings: list[str]
) -> dict[str, SharedResource]:
    """The entry of each device that has one, by its id. Lists choose first, then numbers, then `all`."""
    by_id: dict[str, SharedResource] = {}
    for entry in sorted(_merged(sharing.resources, warnings), key=_generality):
        devices = by_name.get(entry.name, ())
        if not devices:
            warnings.append(f"sharing: this node has no {entry.name}: that entry has no effect")
            continue
        for device in _selected_devices(entry, devices, by_id, warnings):
            other_entry = by_id.setdefault(device.id, entry)
            if other_entry is not entry:
                raise _overlap(sharing, other_entry, entry, device)
    return by_id


def _generality(entry: SharedResource) -> int:
    return 2 if entry.devices is None else 1 if isinstance(entry.devices, int) else 0


def _merged(entries: Iterable[SharedResource], warnings: list[str]) -> list[SharedResource]:
    """Equal entries count once; of several for all devices of a name the largest number counts, as in
    NVIDIA's plugin."""
    merged: dict[object, SharedResource] = {}
    for number, entry in enumerate(entries):
        key: object = (entry.name, entry.rename)
        if isinstance(entry.devices, int):
            key = number  # each of these takes its own devices
        elif entry.devices is not None:
            key = entry
        earlier = merged.get(key)
        if earlier is not None and earlier.replicas != entry.replicas:
            most = max(earlier.replicas, entry.replicas)
            warnings.append(f"sharing: {entry.name} is shared twice: the larger number, {most}, counts")
            entry = entry._replace(replicas=most)
        merged[key] = entry
    return list(merged.values())


def _selected_devices(
    entry: SharedResource,
    devices: Sequence[KubeletDevice],
    by_id: Mapping[str, SharedResource],
    warnings: list[str],
) -> Sequence[KubeletDevice]:
    if entry.devices is None:
        return devices
    if isinstance(entry.devices, int):
        free = [device for device in devices if device.id not in by_id]
        if len(free) < entry.devices:
            warnings.append(
                f"sharing: {entry.name}: {entry.devices} devices are to be shared, there are {len(free)}"
            )
        return free[: entry.devices]
    units = [device.unit for device in devices]
    for selector in unmatched(entry.devices, units):
        warnings.append(f"sharing: {entry.name}: this node has no device {selector}")
    tests = [matcher(selector) for selector in entry.devices]
    return [device for device in devices if any(test(device.unit) for test in tests)]


def _overlap(
    sharing: Sharing, first: SharedResource, second: SharedResource, device: KubeletDevice
) -> ConfigError:
    return ConfigError(
        f"sharing.{_section(sharing)}: device {device.unit.index} ({device.id}) is shared by two entries: "
        f"{_described(first)}; and {_described(second)}",
        hint="let each device be in one entry: give `devices` as a list in both",
    )


def _described(entry: SharedResource) -> str:
    devices = "all" if entry.devices is None else entry.devices
    devices_text = f"[{', '.join(devices)}]" if isinstance(devices, tuple) else str(devices)
    rename = f", rename {entry.rename}" if entry.rename else ""
    return f"name {entry.name}, replicas {entry.replicas}, devices {devices_text}{rename}"


# --- the result -----------------------------------------------------------------------------------------


def _shares(device: KubeletDevice, count: int) -> list[KubeletDevice]:
    unit, problem = device.unit, device.problem
    return [KubeletDevice(f"{device.id}{SHARE_MARK}{number}", unit, problem) for number in range(count)]


def _resources(
    by_name: Mapping[str, Sequence[KubeletDevice]], shares: Mapping[str, int], sharing: Sharing
) -> Iterable[Resource]:
    for name, devices in by_name.items():
        order = {device.unit.id: device.unit.order for device in devices}
        ordered = tuple(sorted(devices, key=lambda device: order[device.unit.id]))
        if name in shares:
            single = sharing.fail_requests_greater_than_one
            yield Resource(name, ordered, sharing.strategy, shares[name], single)
        else:
            yield Resource(name, ordered)
