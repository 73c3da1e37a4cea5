"""A Kubernetes node with two GPUs as one namespace: its own files, processes, containerd and kubelet.

The driver is stubs (driver_namespace.py) and the kernel's files about it are mounted over /sys and /proc;
systemctl is a stub that starts the program of a unit; the kubelet is gpunode's own stub under a
kubelet's name. containerd is real, with its files in its package's paths. The network is this machine's,
so that an API server of the test can be reached.
"""

from __future__ import annotations

import os
import site
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fixtures.driver_tree import device_numbers, kernel_files, write_files
from fixtures.stub_runtime import build_stub_runtime
from fixtures.stubs import SCENARIO_IN_CONTAINER, build
from tests.cli import REPOSITORY, Ran
from tests.integration import driver_namespace
from tests.integration.conftest import refuse_for
from tests.integration.forked_cli import ForkedCli, every_module
from tests.integration.verify_support import GPUS

UNIT = "gpunode-device-plugin.service"
_CONTAINERD = """\
version = 2
root = "/run/containerd-root"
disabled_plugins = ["io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.btrfs"]

[plugins."io.containerd.internal.v1.opt"]
  path = "/run/containerd-opt"

[plugins."io.containerd.grpc.v1.cri"]
  # without CAP_SYS_RESOURCE the pause process may not lower its oom score
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"""
_BOOT = """\
set -e
place=$1
mount --bind $place/pci /sys/bus/pci/devices
mount --bind $place/module /sys/module
mount --bind $place/driver-files /proc/driver
mount --bind $place/devices /proc/devices
mount --bind $place/hostname /proc/sys/kernel/hostname
mkdir -p /run/systemd/system /run/units
for tree in /etc /var/lib /usr/bin; do
    mkdir -p /run/over$tree/upper /run/over$tree/work
    mount -t overlay -o lowerdir=$tree,upperdir=/run/over$tree/upper,workdir=/run/over$tree/work overlay $tree
done
mount -t tmpfs -o mode=755 tmpfs /etc/systemd
mkdir -p /etc/systemd/system /etc/containerd /var/lib/kubelet/device-plugins
rm -rf /etc/docker /var/lib/gpunode
cp $place/config.toml /etc/containerd/config.toml
cp $place/config.yaml /var/lib/kubelet/config.yaml
cp $place/*.service /run/systemd/system/
for program in nvidia-container-runtime nvidia-container-runtime-hook nvidia-ctk nvidia-cdi-hook systemctl; do
    rm -f /usr/bin/$program
    cp $place/bin/$program /usr/bin/$program
done
mkdir /run/python && mount --bind "$2" /run/python
shift 3
exec $place/venv/bin/python "$@"
"""
_SYSTEMCTL = r"""#!/bin/sh
# stand-in: starts what the unit's ExecStart says, and remembers what is enabled
echo "systemctl $*" >> {place}/calls
runs() {{  # nobody reaps what ended
    pid=$(cat /run/units/$1.pid 2> /dev/null) || return 1
    grep -Eq '^State:[[:space:]]+[RSDT]' "/proc/$pid/status" 2> /dev/null
}}
stop() {{
    runs $1 || {{ rm -f /run/units/$1.pid; return 0; }}
    kill "$(cat /run/units/$1.pid)"
    while runs $1; do sleep 0.05; done
    rm /run/units/$1.pid
}}
start() {{
    runs $1 && return 0
    [ -e {place}/broken ] && {{ echo "Job for $1 failed." >&2; return 1; }}
    line=$(sed -n 's/^ExecStart=//p' /etc/systemd/system/$1 /run/systemd/system/$1 2> /dev/null | head -1)
    env $(cat {place}/environment) setsid $line > {place}/$1.log 2>&1 < /dev/null &
    echo $! > /run/units/$1.pid
}}
show() {{
    file=; load=not-found; active=inactive; enabled=
    for at in /etc/systemd/system /run/systemd/system; do [ -e $at/$1 ] && load=loaded; done
    [ $load = loaded ] && enabled=disabled && [ -e /run/units/$1.enabled ] && enabled=enabled
    case $1 in containerd.service|kubelet.service) active=active; enabled=enabled ;; esac
    runs $1 && active=active
    printf 'Id=%s\nNames=%s\nLoadState=%s\nActiveState=%s\nSubState=\nUnitFileState=%s\nResult=success\n\n' \
        $1 $1 $load $active $enabled
}}
case "$1 $2" in
"daemon-reload "*) exit 0 ;;
"--version "*) echo "systemd 252 (252)" ;;
"show "*) shift 2; for unit; do show $unit; done ;;
"enable --now") start $3 || exit 1; touch /run/units/$3.enabled ;;
"disable --now")
    rm -f /run/units/$3.enabled
    [ -e {place}/refuses ] && {{ echo "Job for $3 failed." >&2; exit 1; }}
    stop $3 ;;
"is-enabled "*) [ -e /run/units/$2.enabled ] && echo enabled || echo disabled ;;
"is-active "*) runs $2 && echo active || echo inactive ;;
"enable "*) touch /run/units/$2.enabled ;;
"start "*) start $2 ;;
"disable "*) rm -f /run/units/$2.enabled ;;
"stop "*) stop $2 ;;
"restart containerd.service") {place}/bin/containerd-again ;;
"restart "*) stop $2; start $2 ;;
*) exit 5 ;;
esac
"""
_AGAIN = r"""#!/bin/sh
if [ -e /run/containerd.pid ]; then
    pid=$(cat /run/containerd.pid)
    kill "$pid"
    while grep -Eq '^State:[[:space:]]+[RSDT]' "/proc/$pid/status" 2> /dev/null; do sleep 0.05; done
fi
setsid /usr/bin/containerd > {place}/containerd.log 2>&1 < /dev/null &
echo $! > /run/containerd.pid
for _ in $(seq 300); do ctr version > /dev/null 2>&1 && exit 0; sleep 0.1; done
exit 1
"""
_KUBELET = """\
import time
from gpunode.host import Host
from tests.plugin.kubelet_stub import KubeletStub

KubeletStub(Host()).start()
while True:
    time.sleep(1)
"""
_START_KUBELET = """\
PYTHONPATH={path} setsid {place}/bin/kubelet {place}/kubelet.py \
    --container-runtime-endpoint=unix:///run/containerd/containerd.sock \
    > {place}/kubelet.log 2>&1 < /dev/null &
for _ in $(seq 300); do
    [ -S /var/lib/kubelet/device-plugins/kubelet.sock ] && exit 0
    sleep 0.1
done
cat {place}/kubelet.log >&2
exit 1
"""


@dataclass
class KubernetesNode:
    """The node; `cli` runs command lines on it. `environ` is their environment."""

    place: Path
    cli: ForkedCli
    environ: dict[str, str] = field(default_factory=dict)

    def gpunode(self, *argv: str) -> Ran:
        return self.cli.run(*argv, env=self.environ)

    def sh(self, script: str) -> str:
        done = self.cli.program("sh", "-c", script, env={})
        assert done.code == 0, done.err + done.out
        return done.out

    def calls(self) -> list[str]:
        """Calls of systemctl that change something, in order."""
        file = self.place / "calls"
        asked = file.read_text().splitlines() if file.exists() else []
        return [one for one in asked if " show " not in one and "--version" not in one]

    def log(self) -> str:
        file = self.place / f"{UNIT}.log"
        return file.read_text() if file.exists() else "the plugin was never started"


@contextmanager
def kubernetes_node(place: Path, name: str) -> Iterator[KubernetesNode]:
    """Boot it: containerd and the kubelet run, nothing else is set up. `name` is the machine's."""
    prefix = driver_namespace.enter(place)
    _write(place, name)
    problem = driver_namespace.problem(prefix)
    refuse_for([f"a mount namespace with overlayfs ({problem})"] if problem else [])
    # a service can't see a Python in a home directory, so this one is in another path on the node
    boot = (*prefix, "sh", "-c", _BOOT, "sh", str(place), sys.base_prefix)
    with ForkedCli(boot, modules=every_module()) as cli:
        node = KubernetesNode(place, cli)
        node.sh(f"{place}/bin/containerd-again")
        node.sh(_START_KUBELET.format(place=place, path=":".join((str(REPOSITORY), *site.getsitepackages()))))
        yield node


def _write(place: Path, name: str) -> None:
    kernel_files(place, GPUS)
    for device, numbers in device_numbers(GPUS).items():
        _device(place, device, *numbers)
    write_files(
        {
            place / "hostname": name,
            place / "config.toml": _CONTAINERD,
            place / "config.yaml": "kind: KubeletConfiguration\ncgroupDriver: cgroupfs\n",
            place / "containerd.service": "[Service]\nExecStart=/usr/bin/containerd\n",
            place / "kubelet.service": "[Service]\nExecStart=/usr/bin/kubelet\n",
            place / "kubelet.py": _KUBELET,
            place / "environment": "",
        }
    )
    (place / "bin").mkdir()
    build_stub_runtime(
        place / "bin/nvidia-container-runtime",
        libraries=build() / "all",
        scenario=place / "scenario.txt",
        scenario_target=SCENARIO_IN_CONTAINER,
    )
    for program in ("nvidia-container-runtime-hook", "nvidia-cdi-hook"):
        _program(place, program, '#!/bin/sh\nexec runc "$@"\n')
    _program(place, "nvidia-ctk", "#!/bin/sh\necho NVIDIA Container Toolkit CLI version 1.20.0\n")
    _program(place, "systemctl", _SYSTEMCTL.format(place=place))
    _program(place, "containerd-again", _AGAIN.format(place=place))
    (place / "bin/kubelet").symlink_to("/run/python/bin/" + Path(sys.executable).resolve().name)
    (place / "venv/bin").mkdir(parents=True)
    (place / "venv/bin/python").symlink_to("/run/python/bin/" + Path(sys.executable).resolve().name)
    packages = place / f"venv/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    write_files(
        {
            place / "venv/pyvenv.cfg": "home = /run/python/bin\ninclude-system-site-packages = false\n",
            packages / "test.pth": "\n".join((str(REPOSITORY), *site.getsitepackages())),
        }
    )


def _device(place: Path, name: str, major: int, minor: int) -> None:
    """With the driver's own numbers, which the doctor compares with /proc/devices."""
    path = place / "node/dev" / name
    path.unlink(missing_ok=True)
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))


def _program(place: Path, name: str, text: str) -> None:
    path = place / "bin" / name
    path.write_text(text)
    path.chmod(0o755)
