"""`gpunode demo`: every step from driver to pod on a simulated node, each as a user would type it.

The commands are the real ones, on a recorded machine in a temporary directory. Simulated are the GPUs (the
vector-add is computed on the CPU), the daemons' restarts and the kubelet; the transcript says so.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import typer

from gpunode.commands import configure_runtime, doctor, gpus, verify
from gpunode.commands.session import Session, verb
from gpunode.errors import ConfigError, GpunodeError
from gpunode.facts.containerd import load_config
from gpunode.facts.docker import parse_daemon_json
from gpunode.facts.libraries import CachedLibrary, build_ld_cache
from gpunode.gpu.model import Gpu, Inventory
from gpunode.host import Host
from gpunode.host.recording import RECORDING
from gpunode.output.result import Block, ExitCode, Progress, Result, Style, Table, Text
from gpunode.output.typed import plain
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.logfmt import open_log
from gpunode.runtime.engine import Request

# A whole machine in one JSON object, and the function that writes it as a directory for ``--root``.
#
# ``{"files": {path: text}, "binary": {path: base64}, "links": {path: target}, "dirs": [path], "executables":
# [path], "libraries": {soname: path}, "recording": {...}}``. `libraries` become /etc/ld.so.cache. In `files`
# a null byte is written as ``\u0000``.


def build_machine(spec: Mapping[str, Any], root: Path) -> Path:
    """Write the machine into `root`, a new or empty directory, and return it; else `ConfigError`."""
    if root.exists() and any(root.iterdir()):
        raise ConfigError(f"{root} is not empty", hint="a machine is only built in a new directory")
    root.mkdir(parents=True, exist_ok=True)
    created = {root}
    for path in spec.get("dirs", ()):
        _make(_inside(root, path), created)
    for path, content in contents(spec).items():
        target = _inside(root, path)
        _make(target.parent, created)
        target.write_bytes(content)
    for path in spec.get("executables", ()):
        target = _inside(root, path)
        _make(target.parent, created)
        target.write_bytes(b"#!/bin/sh\n")
        target.chmod(0o755)
    # links last, so that no file is ever written through one
    links: set[Path] = set()
    for path, destination in spec.get("links", {}).items():
        link = _inside(root, path, links)
        _make(link.parent, created)
        link.symlink_to(destination)
        links.add(link)
    return root


def _make(directory: Path, created: set[Path]) -> None:
    if directory not in created:
        directory.mkdir(parents=True, exist_ok=True)
        created.add(directory)


def contents(spec: Mapping[str, Any]) -> dict[str, bytes]:
    """Every regular file of the machine, including those made from the other sections."""
    files = {path: text.encode("utf-8", "surrogateescape") for path, text in spec.get("files", {}).items()}
    files |= {path: base64.b64decode(text, validate=True) for path, text in spec.get("binary", {}).items()}
    libraries = spec.get("libraries", {})
    if libraries:
        entries = tuple(CachedLibrary(name, path) for name, path in libraries.items())
        files.setdefault("/etc/ld.so.cache", build_ld_cache(entries))
    if "recording" in spec:
        files["/" + RECORDING] = json.dumps(spec["recording"], indent=1).encode()
    return files


def _inside(root: Path, path: str, links: Collection[Path] = ()) -> Path:
    """Location of a path of the machine; `ConfigError` for one that leaves the root or leads through
    `links`."""
    pure = PurePosixPath(path)
    if not pure.is_absolute() or ".." in pure.parts:
        raise ConfigError(f"{path!r} is not an absolute path inside the machine")
    target = root.joinpath(*pure.parts[1:])
    for step in (target, *target.parents) if links else ():
        if step in links:
            raise ConfigError(f"{path!r} leads through the link {step.relative_to(root)}")
    return target


# The demo's machine: 8 x H100, Debian 12, docker and containerd as their packages leave them, a kubelet.
#
# It is a recorded machine like any other (docs/recorded-machines.md), only written manually. `restart`
# replaces the two engines when they are reloaded: no daemon listens on a recorded socket.

DRIVER = "580.173.02"
KERNEL = "6.1.0-37-amd64"
DOCKER_SOCKET = "/run/docker.sock"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
# PCI addresses of an HGX H100 board: four GPUs on each socket
_ADDRESSES = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
_LIBRARIES = "/usr/lib/x86_64-linux-gnu"
_MAJORS = {"nvidia": 195, "nvidia-caps": 237, "nvidia-uvm": 236}


def build_demo_node(root: Path) -> Host:
    """Write the machine below `root`, a new directory, and return a host for it."""
    build_machine(machine(), root)
    host = _exported(root)
    restart(host, "docker")
    restart(host, "containerd")
    return _exported(root)


def _exported(root: Path) -> Host:
    """The host of a command line after ``export GPUNODE_ROOT=``."""
    host = Host(root)
    return replace(host, environ={**host.environ, "GPUNODE_ROOT": str(root)})


def inventory() -> Inventory:
    """What NVML would report on this node."""
    gpus = (
        Gpu(
            index=index,
            uuid=f"GPU-{index:08x}-4a1d-4c6e-9b53-0d9a8f1e2c{index:02x}",
            name="NVIDIA H100 80GB HBM3",
            pci=f"0000:{bus}:00.0",
            minor=index,
            memory_bytes=81559 * 2**20,
            compute_capability="9.0",
            numa=index // 4,
            mig_capable=True,
        )
        for index, bus in enumerate(_ADDRESSES)
    )
    return Inventory(DRIVER, "13.0", tuple(gpus), simulated=True)


def machine() -> dict[str, Any]:
    """The whole machine as `build_machine` takes it."""
    return {
        "files": {**_system(), **_driver(), **_engines(), **_kubelet()},
        "links": {f"{_LIBRARIES}/{name}.so.1": f"{name}.so.{DRIVER}" for name in ("libcuda", "libnvidia-ml")}
        | {f"/sys/bus/pci/devices/{gpu.pci}/driver": "../../drivers/nvidia" for gpu in inventory().gpus},
        "libraries": {f"{name}.so.1": f"{_LIBRARIES}/{name}.so.1" for name in ("libcuda", "libnvidia-ml")},
        "dirs": [
            "/etc/docker",
            "/run/systemd/system",
            "/sys/module/nvidia_uvm",
            "/var/lib/kubelet/device-plugins",
        ],
        "executables": [
            *(f"/usr/bin/{name}" for name in ("nvidia-container-runtime", "nvidia-container-runtime-hook")),
            *(f"/usr/bin/{name}" for name in ("nvidia-ctk", "nvidia-cdi-hook", "nvidia-smi")),
            *(f"/usr/bin/{name}" for name in ("containerd", "kubelet")),
            "/usr/sbin/dockerd",
        ],
        "recording": _recording(),
    }


def _system() -> dict[str, str]:
    return {
        "/etc/os-release": 'ID=debian\nVERSION_ID="12"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n',
        "/proc/sys/kernel/osrelease": f"{KERNEL}\n",
        "/proc/cmdline": f"BOOT_IMAGE=/boot/vmlinuz-{KERNEL} root=/dev/md0 ro\n",
        "/proc/stat": "btime 1760000000\n",
        "/sys/class/dmi/id/sys_vendor": "Supermicro\n",
        f"/boot/vmlinuz-{KERNEL}": "",
        f"/lib/modules/{KERNEL}/modules.dep": "updates/dkms/nvidia.ko:\nupdates/dkms/nvidia-uvm.ko:\n",
    }


def _driver() -> dict[str, str]:
    files = {
        "/sys/module/nvidia/version": f"{DRIVER}\n",
        "/sys/module/nvidia/initstate": "live\n",
        "/proc/driver/nvidia/version": f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}\n",
        "/proc/devices": "Character devices:\n"
        + "".join(f"{major} {name}\n" for name, major in _MAJORS.items())
        + "\nBlock devices:\n",
        f"{_LIBRARIES}/libcuda.so.{DRIVER}": "",
        f"{_LIBRARIES}/libnvidia-ml.so.{DRIVER}": "",
    }
    for gpu in inventory().gpus:
        directory = f"/sys/bus/pci/devices/{gpu.pci}"
        files |= {
            f"{directory}/vendor": "0x10de\n",
            f"{directory}/device": "0x2330\n",
            f"{directory}/class": "0x030200\n",
        }
        files[f"{directory}/numa_node"] = f"{gpu.numa}\n"
        files[f"/proc/driver/nvidia/gpus/{gpu.pci}/information"] = (
            f"Model: \t\t {gpu.name}\nGPU UUID: \t {gpu.uuid}\nDevice Minor: \t {gpu.minor}\n"
        )
    return files


def _engines() -> dict[str, str]:
    unit = "[Unit]\nDescription={0}\n\n[Service]\nExecStart={1}\n\n[Install]\nWantedBy=multi-user.target\n"
    return {
        "/lib/systemd/system/docker.service": unit.format("Docker", "/usr/sbin/dockerd -H fd://"),
        "/lib/systemd/system/containerd.service": unit.format("containerd", "/usr/bin/containerd"),
        "/etc/containerd/config.toml": _CONTAINERD_CONFIG,
        **_process(801, "/usr/bin/containerd"),
        **_process(912, "/usr/sbin/dockerd", "-H", "fd://"),
    }


def _kubelet() -> dict[str, str]:
    endpoint = f"unix://{CONTAINERD_SOCKET}"
    return {
        "/lib/systemd/system/kubelet.service": "[Service]\nExecStart=/usr/bin/kubelet\n",
        "/var/lib/kubelet/config.yaml": "kind: KubeletConfiguration\ncgroupDriver: cgroupfs\n",
        **_process(1044, "/usr/bin/kubelet", f"--container-runtime-endpoint={endpoint}"),
    }


def _process(pid: int, *argv: str) -> dict[str, str]:
    """/proc files of a process that started 20 seconds after the machine (proc(5), field 22 of stat)."""
    name = argv[0].rpartition("/")[2]
    return {
        f"/proc/{pid}/cmdline": "\0".join(argv) + "\0",
        f"/proc/{pid}/stat": f"{pid} ({name}) S 1" + " 0" * 17 + " 2000 0\n",
    }


def _recording() -> dict[str, Any]:
    nodes = {f"/dev/nvidia{gpu.minor}": (_MAJORS["nvidia"], gpu.minor) for gpu in inventory().gpus}
    nodes |= {"/dev/nvidiactl": (_MAJORS["nvidia"], 255), "/dev/nvidia-modeset": (_MAJORS["nvidia"], 254)}
    nodes |= {f"/dev/nvidia-uvm{tail}": (_MAJORS["nvidia-uvm"], n) for n, tail in enumerate(("", "-tools"))}
    versions = {
        "modinfo -F version nvidia": f"{DRIVER}\n",
        "/usr/bin/nvidia-ctk --version": "NVIDIA Container Toolkit CLI version 1.19.1\n",
        "/usr/sbin/dockerd --version": "Docker version 20.10.24+dfsg1, build 5d6db84\n",
        "/usr/bin/containerd --version": "containerd github.com/containerd/containerd 1.6.20~ds1\n",
    }
    sockets = (DOCKER_SOCKET, CONTAINERD_SOCKET, "/var/lib/kubelet/device-plugins/kubelet.sock")
    return {
        "commands": {command: {"stdout": text} for command, text in versions.items()},
        "devices": {
            path: {"major": major, "minor": minor, "mode": "0666"} for path, (major, minor) in nodes.items()
        },
        "sockets": dict.fromkeys(sockets, "listening"),
        "daemons": {},
        "nvml": {"inventory": plain(inventory())},
    }


def restart(host: Host, engine: str) -> None:
    """What `systemctl restart` of the engine does on this node: it reads its file, and the recording gets
    what it would answer then."""
    answers = {"docker": (DOCKER_SOCKET, _docker), "containerd": (CONTAINERD_SOCKET, _containerd)}
    socket, answer = answers[engine]
    path = "/" + RECORDING
    recording = json.loads(host.read_text(path) or "{}")
    recording["daemons"][socket] = answer(host)
    host.write_atomic(path, json.dumps(recording, indent=1).encode())


def _docker(host: Host) -> dict[str, Any]:
    path = "/etc/docker/daemon.json"
    config = parse_daemon_json(host.read_text(path) or "", path)
    runtimes = {"runc": {"path": "runc"}, **config.get("runtimes", {})}
    default = config.get("default-runtime", "runc")
    info = {"Runtimes": runtimes, "DefaultRuntime": default, "CgroupDriver": "cgroupfs"}
    idle = {"ContainersRunning": 0, "LiveRestoreEnabled": False}
    return {"info": {**info, **idle}, "version": {"Version": "20.10.24", "ApiVersion": "1.41"}}


def _containerd(host: Host) -> dict[str, Any]:
    loaded = load_config(host, "/etc/containerd/config.toml", (1, 6, 20))
    runtimes = {"runc": {"options": {"SystemdCgroup": False}}, **loaded.runtimes}
    config = {"containerd": {"runtimes": runtimes, "defaultRuntimeName": loaded.default_runtime}}
    status = {"handlers": sorted(runtimes), "defaultHandler": loaded.default_runtime, "config": config}
    return {"status": status, "version": ["containerd", "1.6.20~ds1"]}


_CONTAINERD_CONFIG = """\
version = 2

[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    [plugins."io.containerd.grpc.v1.cri".cni]
      bin_dir = "/usr/lib/cni"
      conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.internal.v1.opt"]
    path = "/var/lib/containerd/opt"
"""


_KUBELET_SECONDS = 60.0  # it takes a tenth of a second; a busy machine may take many


class Step(NamedTuple):
    """One command line of the demo and its result."""

    command: str
    exit_code: int


class DemoReport(NamedTuple):
    """`data` of the envelope; `allocatable` is the simulated kubelet's count at the end."""

    steps: tuple[Step, ...]
    allocatable: int


@dataclass(frozen=True)
class Transcript:
    """The commands typed and the output printed so far."""

    steps: list[Step] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)

    def type(self, command: str, run: Callable[[], Result]) -> Result:
        """Show a command, run it, show what it prints."""
        try:
            result = run()
        except GpunodeError as error:
            result = Result("Error", status="error", exit_code=error.exit_code, errors=(error.info(),))
        self.steps.append(Step(command, int(result.exit_code)))
        self.blocks.extend([Text(f"$ {command}", Style.COMMAND), *result.blocks])
        for info in result.errors:
            self.blocks.append(Text(f"error: {info.message}", Style.BAD))
            self.blocks.extend([Text(f"hint: {info.hint}", Style.BAD)] if info.hint else [])
        self.blocks.append(Text(""))
        return result


def _configure(transcript: Transcript, node: Host, engine: str, action: str, progress: Progress) -> None:
    request = Request(runtimes=(engine,), configures=True)
    transcript.type(
        f"gpunode configure-runtime --runtime {engine}",
        lambda: configure_runtime.run(node, request, progress),
    )

    def read_again() -> Result:
        restart(node, engine)
        return Result("Restart", blocks=(Text(f"# simulated: {engine} has read its configuration again"),))

    transcript.type(f"systemctl {action} {engine}", read_again)


def _plugin(transcript: Transcript, node: Host) -> int:
    """Serve to the simulated kubelet until it counts the GPUs; return its allocatable count."""
    from gpunode.plugin.compose import make_service
    from gpunode.plugin.simulate.kubelet import DemoKubelet

    settings = Settings()
    kubelet = DemoKubelet(node, settings.directory)
    transcript.blocks.append(Text("$ gpunode plugin serve &", Style.COMMAND))
    service = make_service(node, settings, open_log(_LogLines(transcript.blocks), {}))
    kubelet.start()
    service.start()
    try:
        kubelet.wait_allocatable(settings.resource_name, len(inventory().gpus), _KUBELET_SECONDS)
        # the plugin detects a moment later that it is watched; the transcript ends with that log line
        node.wait_until(lambda: "the kubelet watches" in str(transcript.blocks[-10:]), _KUBELET_SECONDS)
        allocatable = kubelet.allocatable(settings.resource_name)
        capacity = kubelet.capacity(settings.resource_name)
    finally:
        service.stop()
        service.join()
        kubelet.stop()
    transcript.steps.append(Step("gpunode plugin serve", 0))
    rows = (("capacity", str(capacity)), ("allocatable", str(allocatable)))
    transcript.blocks.extend(
        [
            Text(""),
            Text(f"# what the kubelet's stand-in counts of {settings.resource_name}"),
            Table(("", ""), rows),
            Text(""),
        ]
    )
    return allocatable


class _LogLines(io.StringIO):
    """A stream that appends the plugin's log to the transcript in whole lines."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self._blocks = blocks

    def write(self, text: str) -> int:
        self._blocks += [Text(line, Style.DIM) for line in text.splitlines()]
        return len(text)


def _report(transcript: Transcript, allocatable: int, proven: bool) -> Result:
    desired = len(inventory().gpus)
    succeeded = proven and allocatable == desired
    closing = (
        Text(f"{allocatable} of {desired} GPUs are allocatable: pods can run on this node.", Style.GOOD)
        if succeeded
        else Text(
            f"{allocatable} of {desired} GPUs are allocatable; the demo did not come out right.", Style.BAD
        )
    )
    return Result(
        "Demo",
        DemoReport(tuple(transcript.steps), allocatable),
        status="ok" if succeeded else "fail",
        exit_code=ExitCode.OK if succeeded else ExitCode.FAILED,
        blocks=(*transcript.blocks, closing),
    )


# `gpunode demo`.

demo_app = typer.Typer(rich_markup_mode=None)


@verb(demo_app, "demo", "Demo")
def demo(session: Session) -> Result:
    """Run the whole set-up on a simulated node. It needs no GPU, and this machine isn't changed."""
    progress = session.progress
    with session.host.temporary_directory() as directory:
        root = directory / "node"
        node = build_demo_node(root)
        transcript = Transcript()
        transcript.blocks.append(Text(f"$ export GPUNODE_ROOT={root}", Style.COMMAND))
        transcript.blocks.append(
            Text("# a simulated node: 8 x H100, the driver installed, nothing configured; deleted at the end")
        )
        transcript.blocks.append(Text(""))
        transcript.type("gpunode doctor", lambda: doctor.run(node, progress))
        for engine, action in (("containerd", "restart"), ("docker", "reload")):
            _configure(transcript, node, engine, action, progress)
        configured = _exported(root)
        healthy = transcript.type("gpunode doctor", lambda: doctor.run(configured, progress))
        transcript.type("gpunode gpus", lambda: gpus.run(configured, progress))
        verified = transcript.type("gpunode verify", lambda: verify.run(configured, progress))
        allocatable = _plugin(transcript, configured)
        return _report(transcript, allocatable, healthy.exit_code == verified.exit_code == ExitCode.OK)
