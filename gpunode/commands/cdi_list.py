"""`gpunode cdi list`: which CDI devices there are, from which file, and which of them an engine can use."""

from __future__ import annotations

from dataclasses import dataclass

from gpunode.cdi.engines import installed
from gpunode.cdi.locations import FileState, ListedDevice, files, listed
from gpunode.facts.cdi import DIRECTORIES, vendor_specs
from gpunode.facts.driver import loaded_module
from gpunode.host import Host
from gpunode.output.result import Block, Cell, Progress, Result, Style, Table, Text

_STYLES = {"usable": Style.GOOD, "hidden": Style.DIM}


@dataclass(frozen=True)
class Options:
    """`directories` in the engines' order."""

    directories: tuple[str, ...] = DIRECTORIES


@dataclass(frozen=True)
class CdiDevices:
    """`data` of the envelope. `devices` are in the engines' order; a later directory wins."""

    directories: tuple[str, ...]
    files: tuple[FileState, ...]
    devices: tuple[ListedDevice, ...]


def run(host: Host, options: Options, _progress: Progress) -> Result:
    """List NVIDIA's devices; kind CdiDevices. Status warn if one of them can't be used."""
    specs, module = vendor_specs(host, options.directories), loaded_module(host)
    devices = listed(host, specs, module.version if module else "", options.directories)
    data = CdiDevices(options.directories, files(host, specs, installed(host)), devices)
    wrong = any(device.state not in _STYLES for device in data.devices)
    bad = wrong or any(file.problem for file in data.files)
    return Result("CdiDevices", data, "warn" if bad else "ok", blocks=_blocks(data))


def _blocks(data: CdiDevices) -> tuple[Block, ...]:
    if not data.files:
        empty = f"no CDI specification of NVIDIA's in {' or '.join(data.directories)}"
        return Text(empty, Style.WARN), Text("make one: gpunode cdi refresh", Style.COMMAND)
    found: list[Block] = []
    if data.devices:
        rows = tuple(
            (one.name, one.path, Cell(one.state, _STYLES.get(one.state, Style.BAD)), one.reason)
            for one in data.devices
        )
        found.append(Table(("DEVICE", "FILE", "STATE", ""), rows))
    found += [Text(f"{file.path}: {file.problem}", Style.BAD) for file in data.files if file.problem]
    if any(one.state == "stale" for one in data.devices):
        found.append(Text("describe the node as it is now: gpunode cdi refresh", Style.COMMAND))
    return tuple(found)
