"""How `gpunode status runtime` reads for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpunode.result import Block, Cell, Style, Table, Text

if TYPE_CHECKING:
    from gpunode.commands.status_runtime import EngineStatus, RuntimeStatus, StatusHandler

_WRITERS = {"unknown": "(only root may read gpunode's journal)"}
_YES: dict[bool | None, Cell] = {
    True: Cell("yes", Style.GOOD),
    False: Cell("no", Style.WARN),
    None: Cell("?", Style.DIM),
}


def blocks(data: RuntimeStatus) -> tuple[Block, ...]:
    """An overview, then each engine with its files, its handlers and what to do."""
    found: list[Block] = [_overview(data)]
    if data.kubelet is not None and not any(one.kubelet for one in data.engines):
        where = f"{data.kubelet.engine} at {data.kubelet.endpoint} ({data.kubelet.source})"
        found.append(Text(f"the kubelet uses {where}", Style.DIM))
    for engine in data.engines:
        found += _engine(engine)
    found += _cdi(data)
    return tuple(found)


def _overview(data: RuntimeStatus) -> Table:
    columns = ("ENGINE", "VERSION", "STATE", "DEFAULT", "CDI", "AGREES", "USED BY")
    return Table(columns, tuple(_line(engine) for engine in data.engines))


def _line(engine: EngineStatus) -> tuple[Cell | str, ...]:
    states: dict[bool | None, Cell | str] = {
        True: Cell("running", Style.GOOD),
        False: Cell("stopped", Style.WARN),
        None: "no daemon",
    }
    cdi = {True: "on", False: "off", None: "-"}[engine.cdi]
    known = engine.active_default or ("?" if engine.silence else engine.configured_default)
    return (
        title(engine),
        engine.version or "?",
        states[engine.running],
        known or "-",
        cdi,
        _agrees(engine),
        "kubelet" if engine.kubelet else "",
    )


def _agrees(engine: EngineStatus) -> Cell:
    if engine.problem:
        return Cell("file is broken" if engine.readable else "only root knows", Style.WARN)
    if engine.drift:
        return Cell(f"no, {len(engine.drift)} difference{'s' if len(engine.drift) > 1 else ''}", Style.WARN)
    return Cell("not asked", Style.DIM) if engine.silence else Cell("yes", Style.GOOD)


def title(engine: EngineStatus) -> str:
    """docker, containerd of k3s, docker of user ann."""
    owner = f" of {engine.manager}" if engine.manager else f" of user {engine.user}" if engine.user else ""
    return f"{engine.name}{owner}"


def _engine(engine: EngineStatus) -> Iterator[Block]:
    yield Text("")
    yield Text(f"{title(engine)}: {engine.config} ({engine.config_source})", Style.HEADING)
    if engine.problem:
        yield Text(f"  {engine.problem}", Style.WARN)
    else:
        yield Table(("  FILE", "LAST WRITTEN BY"), tuple(_files(engine)))
    if engine.silence:
        who = "the daemon" if engine.running is not None else engine.name
        yield Text(f"  {who} tells nothing: {engine.silence}", Style.DIM)
    if engine.handlers:
        columns = ("  HANDLER", "PROGRAM", "IN FILE", "ACTIVE")
        yield Table(columns, tuple(_handler(one) for one in engine.handlers))
    for one in engine.drift:
        yield Text(f"  differs: {one.subject}: {one.detail}", Style.WARN)
    for fix in dict.fromkeys(one.fix for one in engine.drift):
        other = "restart it the way it was started: systemd doesn't run it on this node"
        yield Text(f"  do: {fix or other}", Style.COMMAND if fix else Style.PLAIN)


def _files(engine: EngineStatus) -> Iterator[tuple[Cell | str, ...]]:
    for file in engine.files:
        if not file.exists:
            yield f"  {file.path}", Cell("(not there)", Style.DIM)
            continue
        edited = ", edited since" if file.edited else ""
        copy = ", a copy of the whole section" if file.generated_copy else ""
        yield f"  {file.path}", f"{_WRITERS.get(file.writer, file.writer)}{edited}{copy}"


def _handler(one: StatusHandler) -> tuple[Cell | str, ...]:
    program: Cell | str = one.path or "-"
    if one.program_exists is False:
        program = Cell(f"{one.path} (not there)", Style.BAD)
    return f"  {one.name}", program, one.file or "-", _YES[one.active]


def _cdi(data: RuntimeStatus) -> Iterator[Block]:
    if not data.cdi:
        return
    yield Text("")
    yield Text("CDI specifications:", Style.HEADING)
    for spec in data.cdi:
        shown = spec.problem or f"{spec.kind}: {', '.join(spec.devices)}"
        yield Text(f"  {spec.path}  {shown}", Style.WARN if spec.problem else Style.PLAIN)
