"""The demo's machine: 8 x H100, Debian 12, docker and containerd as their packages leave them, a kubelet.

It is a recorded machine like any other (docs/recorded-machines.md), only written by hand. `Daemons` stands in
for the two engines when they are told to read their files again: nothing runs behind a recorded socket.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpunode.dataclass import dataclass
from gpunode.facts.containerd import load_config
from gpunode.facts.docker_file import parse_daemon_json
from gpunode.facts.machine_file import build_machine
from gpunode.gpu.model import Gpu, Inventory
from gpunode.host import RECORDING, Host
from gpunode.result import plain

DRIVER = "580.173.02"
KERNEL = "6.1.0-37-amd64"
DOCKER_SOCKET = "/run/docker.sock"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
# PCI addresses of an HGX H100 board: four GPUs on each socket
_ADDRESSES = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
_LIBRARIES = "/usr/lib/x86_64-linux-gnu"
_MAJORS = {"nvidia": 195, "nvidia-caps": 237, "nvidia-uvm": 236}


def build_demo_node(root: Path) -> Host:
    """Write the machine below `root`, a new directory, and return the host that sees it."""
    build_machine(machine(), root)
    host = Host(root)
    Daemons(host).restart("docker")
    Daemons(host).restart("containerd")
    return Host(root)


def inventory() -> Inventory:
    """What NVML would say on this node."""
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
        place = f"/sys/bus/pci/devices/{gpu.pci}"
        files |= {
            f"{place}/vendor": "0x10de\n",
            f"{place}/device": "0x2330\n",
            f"{place}/class": "0x030200\n",
        }
        files[f"{place}/numa_node"] = f"{gpu.numa}\n"
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


@dataclass(frozen=True)
class Daemons:
    """Stands in for the two engines: reads the file as each would and records what it would answer then."""

    host: Host

    def restart(self, engine: str) -> None:
        """What `systemctl restart` of the engine comes to on this node."""
        answers = {
            "docker": (DOCKER_SOCKET, self._docker),
            "containerd": (CONTAINERD_SOCKET, self._containerd),
        }
        socket, answer = answers[engine]
        path = "/" + RECORDING
        recording = json.loads(self.host.read_text(path) or "{}")
        recording["daemons"][socket] = answer()
        self.host.write_atomic(path, json.dumps(recording, indent=1).encode())

    def _docker(self) -> dict[str, Any]:
        path = "/etc/docker/daemon.json"
        config = parse_daemon_json(self.host.read_text(path) or "", path)
        runtimes = {"runc": {"path": "runc"}, **config.get("runtimes", {})}
        default = config.get("default-runtime", "runc")
        info = {"Runtimes": runtimes, "DefaultRuntime": default, "CgroupDriver": "cgroupfs"}
        idle = {"ContainersRunning": 0, "LiveRestoreEnabled": False}
        return {"info": {**info, **idle}, "version": {"Version": "20.10.24", "ApiVersion": "1.41"}}

    def _containerd(self) -> dict[str, Any]:
        loaded = load_config(self.host, "/etc/containerd/config.toml", (1, 6, 20))
        runtimes = {"runc": {"options": {"SystemdCgroup": False}}, **loaded.runtimes}
        config = {"containerd": {"runtimes": runtimes, "defaultRuntimeName": loaded.default_runtime}}
        status = {
            "handlers": sorted(runtimes),
            "defaultHandler": loaded.default_runtime,
            "config": config,
        }
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
