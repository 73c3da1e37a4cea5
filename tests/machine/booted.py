"""A whole Debian machine with systemd as process 1: systemd-nspawn over an overlay of a base directory.

It has its own processes, network, /run, /dev, cgroups and host name, and shares this machine's kernel. The
driver is the C stubs of libnvidia-ml and libcuda, and the kernel's files about a loaded driver are in
fixtures/driver_tree.py; the toolkit's runtime is a stub (fixtures/stub_runtime.py). The rest is real.

The process that is started here ends with the test run, however that ends; the machine's processes and
mounts are in namespaces that end with it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fixtures.debian_base import wheels
from fixtures.driver_tree import device_numbers, kernel_files, put_libraries, write_files
from fixtures.scenario import Scenario
from fixtures.stub_runtime import build_stub_runtime
from fixtures.stubs import SCENARIO_IN_CONTAINER, build
from gpunode.host import Host
from tests.cli import REPOSITORY, Ran
from tests.integration.forked_cli import ForkedCli, every_module
from tests.integration.verify_support import GPUS

SCENARIO = replace(GPUS, driver="580.173.02", cuda=13000)
"""Two H100 with a driver that has no known faults."""
PATIENCE = 300.0
"""Seconds after which a test takes a machine, or a command on it, as hanging: five may boot at once."""
SPACE = 4 << 30
"""Bytes that the files of a few machines need at most; see tests/memory.py."""
SHARED = "/srv/machine"
"""Where the machine has what `Machine.shared` holds here."""
PACKAGES = "/srv/dist"
"""What `make dist` makes, on a machine that was installed without gpunode."""
CHECKOUT, WHEELS = "/srv/gpunode", "/srv/wheels"
_FORKS = (
    *("/opt/gpunode/bin/python3", "-I", "-c"),
    "import runpy, sys; sys.path.append(sys.argv.pop(1));"
    " runpy.run_module('tests.integration.forked_cli', run_name='__main__')",
    CHECKOUT,
)
"""Runs that module with gpunode as it is installed: the checkout's is later in the path."""
_RESTART = 133
"""Exit code of systemd-nspawn with --keep-unit where the machine reboots itself."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# runc needs the keyring and bpf, which nspawn forbids otherwise
_FILTER = "@keyring bpf @mount @module perf_event_open"

# Process 1 until it becomes systemd. nspawn has mounted /sys as a tmpfs with some directories of the real
# one, and version 1 cgroups read-only, which are the machine's own here. The machine's own boot_id goes:
# services with ProtectKernelTunables= would see another one.
_INIT = """\
#!/bin/sh
set -e
for one in /sys/fs/cgroup/*/; do mount -o remount,bind,rw "$one"; done
mount -o remount,rw /sys && mkdir /sys/module && mount -o remount,ro /sys
umount /proc/sys/kernel/random/boot_id
mount --bind {shared}/pci /sys/bus/pci/devices
mount --bind {shared}/module /sys/module
mount --bind {shared}/driver-files /proc/driver
mount --bind {shared}/devices /proc/devices
ldconfig
umask 0
{nodes}
umask 022
exec /lib/systemd/systemd
"""

# In the namespaces that end with the machine; its cgroups are new ones below the root of each hierarchy.
_START = """\
set -e
name=$1 layers=$2 place=$3
shift 3
for hierarchy in $(awk '$3 ~ /^cgroup2?$/ {print $2}' /proc/mounts); do
    mkdir -p $hierarchy/$name
    if [ -e $hierarchy/tasks ] && [ -e $hierarchy/cpuset.cpus ]; then # version 1: empty in a new cgroup
        for file in cpuset.cpus cpuset.mems; do cat $hierarchy/$file > $hierarchy/$name/$file; done
    fi
    echo $$ > $hierarchy/$name/cgroup.procs
done
mkdir -p /run/systemd/nspawn && mount -t tmpfs tmpfs /run/systemd/nspawn # nspawn leaves directories there
mount -t overlay -o lowerdir=$layers,upperdir=$place/upper,workdir=$place/work overlay $place/root
exec "$@"
"""


@dataclass
class Machine:
    """One machine. `layers` are the root directories below it, the uppermost first; its own writes go
    into `place`/upper, which can be a layer of another machine after `power_off`."""

    suite: str
    layers: Sequence[Path]
    place: Path
    mounts: Mapping[str, Path] = field(default_factory=dict)
    """Directories here that it may read, by their paths there."""
    scenario: Scenario = SCENARIO
    name: str = field(default_factory=lambda: f"gpunode-test-{uuid.uuid4().hex[:12]}")
    hostname: str = "gpu1"
    _process: subprocess.Popen[bytes] | None = None
    leader: int = 0

    @property
    def upper(self) -> Path:
        return self.place / "upper"

    @property
    def shared(self) -> Path:
        """A directory that the test and the machine both write to."""
        return self.place / "shared"

    def __post_init__(self) -> None:
        for name in ("upper", "work", "root", "shared", "docker", "containerd"):
            (self.place / name).mkdir(parents=True)
        kernel_files(self.shared, self.scenario)
        self.scenario.write(self.shared / "scenario.txt")
        numbers = device_numbers(self.scenario).items()
        nodes = "\n".join(f"mknod /dev/{name} c {major} {minor}" for name, (major, minor) in numbers)
        init = self.shared / "init"
        init.write_text(_INIT.format(shared=SHARED, nodes=nodes))
        init.chmod(0o755)

    def prepare(self) -> None:
        """Write its name, the driver and the toolkit's programs, for a machine without a layer that has
        them."""
        root = self.upper
        put_libraries(root / "usr/lib/x86_64-linux-gnu", self.scenario.driver)
        pip = f"[global]\nno-index = true\nfind-links = {WHEELS}\ndisable-pip-version-check = true\n"
        write_files({root / "etc/hostname": "gpu1", root / "etc/hosts": "127.0.0.1 localhost gpu1"})
        write_files({root / "etc/pip.conf": pip})
        # Debian's file; without CAP_SYS_RESOURCE a pod's first process may not lower its score
        config = (self.layers[-1] / "etc/containerd/config.toml").read_text()
        table = '[plugins."io.containerd.grpc.v1.cri"]\n'
        assert table in config, config
        containerd = config.replace(table, f"{table}    restrict_oom_score_adj = true\n")
        write_files({root / "etc/containerd/config.toml": containerd})
        (root / SCENARIO_IN_CONTAINER[1:]).symlink_to(f"{SHARED}/scenario.txt")
        # systemd runs them at each boot and each daemon-reload; here they would make only a console's getty
        generators = root / "etc/systemd/system-generators"
        generators.mkdir(parents=True)
        for path in (self.layers[-1] / "usr/lib/systemd/system-generators").iterdir():
            (generators / path.name).symlink_to("/dev/null")
        programs = root / "usr/bin"
        programs.mkdir()
        build_stub_runtime(
            programs / "nvidia-container-runtime",
            libraries=Path("/usr/lib/x86_64-linux-gnu"),
            scenario=Path(SHARED) / "scenario.txt",
            scenario_target=SCENARIO_IN_CONTAINER,
            python="/usr/bin/python3",
        )
        shutil.copy(build() / "bin/nvidia-smi", programs)
        for name in ("nvidia-container-runtime-hook", "nvidia-cdi-hook", "nvidia-ctk"):
            path = programs / name
            path.write_text(f"#!/bin/sh\necho NVIDIA Container Toolkit version 1.20.0 # {name}\n")
            path.chmod(0o755)

    def boot(self) -> None:
        """Start it and wait until systemd has started everything; fails with its console otherwise."""
        assert self._process is None, "it is running"
        layers = ":".join(map(str, self.layers))
        argv = [
            *("setpriv", "--pdeathsig", "KILL"),
            *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *("sh", "-c", _START, "sh", self.name, layers, str(self.place)),
            *(
                "systemd-nspawn",
                "-D",
                str(self.place / "root"),
                f"--machine={self.name}",
                f"--hostname={self.hostname}",
            ),
            *("--register=no", "--keep-unit", "--private-network", "--resolv-conf=off", "--timezone=off"),
            *("--capability=all", f"--system-call-filter={_FILTER}", "--kill-signal=SIGRTMIN+3"),
            *(f"--bind={self.shared}:{SHARED}", f"--bind-ro={REPOSITORY}:{CHECKOUT}"),
            # images are unpacked here: an overlay can't be mounted on an overlay
            *(f"--bind={self.place / name}:/var/lib/{name}" for name in ("docker", "containerd")),
            *(f"--bind-ro={path}:{target}" for target, path in self.mounts.items()),
            *(f"--bind-ro={wheels(self.suite)}:{WHEELS}", f"{SHARED}/init"),
        ]
        with (self.place / "console").open("ab") as console:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True
            )
        self.leader = 0
        try:
            booted = Host().wait_until(self._is_up, PATIENCE, 0.1)
            assert booted and self.leader, f"{self.suite} did not boot:\n{self.console()}"
            # by which gpunode, like systemd-detect-virt, detects a container
            self.sh("rm /run/systemd/container")
        except BaseException:
            self.kill()
            raise

    def _is_up(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            return True
        self.leader = self.leader or _systemd_below(self._process.pid)
        return bool(self.leader) and self._system_state() in ("running", "degraded")

    def _system_state(self) -> str:
        """systemd's own answer once it has started everything, instead of a hundred queries meanwhile."""
        return self.run("timeout", "30", "systemctl", "is-system-running", "--wait").out.strip()

    def power_off(self) -> None:
        """Shut it down as a user does. Its files stay."""
        assert self._process is not None
        self.run("systemctl", "poweroff")
        try:
            self._process.wait(PATIENCE)
        finally:
            self.kill()

    def reboot(self) -> None:
        """Shut it down and start it again: /run, /dev and every process are new."""
        self.power_off()
        self.boot()

    def is_restarting(self) -> bool:
        """Whether it has shut down to boot again, by a reboot inside. Fails if it ended otherwise."""
        assert self._process is not None
        code = self._process.poll()
        assert code in (None, _RESTART), f"{self.name} ended with {code}:\n{self.console()}"
        return code is not None

    def kill(self) -> None:
        """Power it off; nothing that runs or is mounted is left."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for hierarchy in Path("/proc/mounts").read_text().splitlines():
            _, directory, kind, *_ = hierarchy.split()
            if kind in ("cgroup", "cgroup2"):
                _remove_cgroups(Path(directory) / self.name)

    def console(self) -> str:
        return (self.place / "console").read_text(errors="replace")[-4000:]

    # --- inside --------------------------------------------------------------------------------------------

    def inside(self, *argv: str, user: str = "", env: Mapping[str, str] | None = None) -> list[str]:
        """The command line that runs `argv` in the machine, as root unless a user is named."""
        home = f"/home/{user}" if user else "/root"
        environ = {"HOME": home, "PATH": _PATH, "LANG": "C.UTF-8", "TERM": "dumb", **(env or {})}
        words = [f"{name}={value}" for name, value in environ.items()]
        rights = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"] if user else []
        enter = ["nsenter", "--target", str(self.leader), "--all"]
        return [*enter, "env", "--ignore-environment", *words, *rights, *argv]

    def run(
        self, *argv: str, user: str = "", env: Mapping[str, str] | None = None, timeout: float = PATIENCE
    ) -> Ran:
        """Run a program in the machine to its end."""
        done = subprocess.run(
            self.inside(*argv, user=user, env=env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    def sh(self, script: str, user: str = "") -> str:
        """Output of a shell script that must succeed."""
        done = self.run("sh", "-ec", script, user=user)
        assert done.code == 0, f"{script}\n{done.err}{done.out}"
        return done.out

    def read(self, path: str) -> str:
        """Text of a file in the machine, without a process in it; empty if the file doesn't exist."""
        try:
            return Path(f"/proc/{self.leader}/root{path}").read_text()
        except FileNotFoundError:
            return ""

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Give a file in the machine this text."""
        (self.shared / "file").write_text(text)
        self.sh(f"install -D -m {mode:o} {SHARED}/file {shlex.quote(path)}")

    def gpunode(self, *argv: str, user: str = "", timeout: float = PATIENCE) -> Ran:
        """gpunode installed in the machine."""
        return self.run("gpunode", *argv, user=user, timeout=timeout)

    def forks(self) -> ForkedCli:
        """gpunode installed in the machine, without a new interpreter for each run."""
        return ForkedCli(self.inside(), modules=every_module(), program=_FORKS)

    def start(self, *argv: str) -> subprocess.Popen[str]:
        """A program in the machine that continues while the test does something else."""
        return subprocess.Popen(
            self.inside(*argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self, ready: Callable[[], bool], problem: Callable[[], str], seconds: float = PATIENCE) -> None:
        """Wait until a condition holds; fails with the text of `problem` otherwise."""
        assert Host().wait_until(ready, seconds, 0.1), problem()

    # --- systemd -------------------------------------------------------------------------------------------

    def show(self, unit: str) -> dict[str, str]:
        """Properties of a unit."""
        lines = self.sh(f"systemctl show {unit}").splitlines()
        return dict(line.partition("=")[::2] for line in lines)

    def is_active(self, unit: str) -> bool:
        return self.show(unit)["ActiveState"] == "active"

    def journal(self, unit: str) -> str:
        return self.sh(f"journalctl -u {unit} --no-pager -o cat | tail -n 40")


def apt(machine: Machine, *words: str) -> str:
    """Output of apt-get, which must succeed."""
    return machine.sh(f"DEBIAN_FRONTEND=noninteractive apt-get -y -q {' '.join(words)}")


def _systemd_below(process: int) -> int:
    """Process 1 of the machine that `process` has started, once it is systemd; else 0."""
    for child in _children(process):
        for leader in _children(child):
            try:
                if Path(f"/proc/{leader}/cmdline").read_bytes().startswith(b"/lib/systemd/systemd"):
                    return leader
            except OSError:
                return 0
    return 0


def _children(process: int) -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def _remove_cgroups(top: Path) -> None:
    """cgroups of a killed machine; the kernel takes a moment to empty them."""

    def removed() -> bool:
        for directory, _, _ in os.walk(top, topdown=False):
            try:
                os.rmdir(directory)
            except OSError:
                return False
        return True

    assert Host().wait_until(removed, 30.0, 0.05), f"{top} is in use"
