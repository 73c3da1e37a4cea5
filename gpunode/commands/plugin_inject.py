"""`gpunode plugin inject`: something happens to a GPU of a simulated node; nothing else can be told so."""

from __future__ import annotations

from dataclasses import dataclass

from gpunode.errors import ConfigError, UsageError
from gpunode.host import Host
from gpunode.output.result import Progress, Result, Text
from gpunode.plugin.simulate.faults import ALL, Client, Fault, make_fault, parse_script


@dataclass(frozen=True)
class Options:
    """A fault, or the file of a script."""

    fault: str = ""
    value: str = ""
    gpu: str = ""
    gi: int | None = None
    ci: int | None = None
    script: str = ""
    state_dir: str = "/var/lib/gpunode/plugin"


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Back when all of it has happened. `PreconditionError` where no simulated plugin listens."""
    faults = _faults(host, options)
    client = Client(host, options.state_dir)
    started = host.monotonic()
    try:
        for fault in faults:
            host.sleep(max(0.0, started + fault.at - host.monotonic()))
            client.send(fault)
            if options.script:
                progress.note(f"{host.monotonic() - started:.1f} s: {_words(fault)}")
    finally:
        client.close()
    told = [
        {key: getattr(fault, key) for key in ("name", "value", "gpu", "gi", "ci", "at")} for fault in faults
    ]
    return Result(
        "InjectedFault", {"faults": told}, blocks=tuple(Text(f"injected {_words(one)}") for one in faults)
    )


def _words(fault: Fault) -> str:
    """xid 79, GPU 3, GPU instance 1"""
    parts = [f"{fault.name} {fault.value}".strip()]
    parts += ["all GPUs" if fault.gpu == ALL else f"GPU {fault.gpu}"] if fault.gpu else []
    parts += [f"GPU instance {fault.gi}"] if fault.gi is not None else []
    parts += [f"compute instance {fault.ci}"] if fault.ci is not None else []
    return ", ".join(parts)


def _faults(host: Host, options: Options) -> tuple[Fault, ...]:
    if bool(options.script) == bool(options.fault):
        raise UsageError("give a fault or a --script", hint="gpunode plugin inject xid 79 --gpu 3")
    if not options.script:
        return (make_fault(options.fault, options.value, options.gpu, options.gi, options.ci),)
    text = host.read_text(options.script)
    if text is None:
        raise ConfigError(f"{options.script} is not there")
    return parse_script(text, options.script)
