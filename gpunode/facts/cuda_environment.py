"""Variables that change every CUDA program, set for the whole node or for a container daemon.

The debuggers' and profilers' are those that DCGM's diagnostics refuse to run with
(https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/dcgm-error-codes.html); the other two hide GPUs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError
from gpunode.facts.units import read_unit
from gpunode.host import SMALL_BYTES, Host

DEBUGGING = (
    *("NSIGHT_CUDA_DEBUGGER", "CUDA_INJECTION32_PATH", "CUDA_INJECTION64_PATH", "CUDA_AUTO_BOOST"),
    *("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "CUDA_COREDUMP_FILE", "CUDA_DEVICE_WAITS_ON_EXCEPTION"),
    *("CUDA_PROFILE", "COMPUTE_PROFILE", "OPENCL_PROFILE"),
)
HIDING = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_NOTHING = {False: ("", "0"), True: ("", "all")}  # values that change nothing, by whether they hide GPUs
_ENVIRONMENT = "/etc/environment"
_SYSTEMD = ("/etc/systemd/system.conf", "/etc/systemd/system.conf.d")
# by the program that runs: a distribution's agent and server are one program, whichever of its units is here
_UNITS = {
    **{"dockerd": ("docker.service",), "containerd": ("containerd.service",), "crio": ("crio.service",)},
    **{"kubelet": ("kubelet.service",), "k3s": ("k3s.service", "k3s-agent.service")},
    **{"rke2": ("rke2-server.service", "rke2-agent.service")},
    **{"k0s": ("k0scontroller.service", "k0sworker.service")},
}


@dataclass(frozen=True)
class Setting:
    """One variable; `source` is the file, unit or environment that has it, `line` 1-based if it is a file."""

    name: str
    value: str
    source: str
    line: int | None = None


def settings(host: Host, programs: Collection[str]) -> tuple[Setting, ...]:
    """All of them that change CUDA; a value that changes nothing counts as none. Of container daemons those
    among `programs`, which run."""
    units = [unit for program, units in _UNITS.items() if program in programs for unit in units]
    found = (*_of_node(host), *_of_units(host, units), *_own(host.environ))
    return tuple(one for one in found if one.value not in _NOTHING[one.name in HIDING])


def _own(environ: Mapping[str, str]) -> Iterator[Setting]:
    """Of whoever calls gpunode, who may well choose GPUs for his own programs."""
    for name in DEBUGGING:
        if name in environ:
            yield Setting(name, environ[name], "the environment of gpunode itself")


def _of_node(host: Host) -> Iterator[Setting]:
    for path in (_ENVIRONMENT, _SYSTEMD[0], *host.glob(_SYSTEMD[1], "*.conf")):
        for number, line in enumerate(_text(host, path).splitlines(), 1):
            stripped = line.strip().removeprefix("export ")
            if path != _ENVIRONMENT:
                key, _, stripped = stripped.partition("=")
                if key.strip() != "DefaultEnvironment":
                    continue
            for name, value in _assignments(stripped, several=path != _ENVIRONMENT):
                yield Setting(name, value, path, number)


def _assignments(text: str, *, several: bool) -> Iterator[tuple[str, str]]:
    """pam_env(8) takes one a line, systemd-system.conf(5) any number of words, quoted if need be."""
    import shlex

    if not any(name in text for name in (*DEBUGGING, *HIDING)) or text.startswith("#"):
        return
    try:
        words = shlex.split(text) if several else [text.replace('"', "").replace("'", "")]
    except ValueError:
        return
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name.strip() in (*DEBUGGING, *HIDING):
            yield name.strip(), value.strip()


def _of_units(host: Host, units: Collection[str]) -> Iterator[Setting]:
    for unit in units:
        found = read_unit(host, unit)
        for name, value in found.environment.items() if found is not None else ():
            if name in DEBUGGING or name in HIDING:
                yield Setting(name, value, unit)


def _text(host: Host, path: str) -> str:
    try:
        return host.read_text(path, SMALL_BYTES) or ""
    except GpunodeError:
        return ""
