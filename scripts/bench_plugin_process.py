"""Device plugins as processes with a stub of NVML: started, measured from outside, ended."""

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fixtures.scenario import Scenario
from fixtures.stubs import StubNode, stub_node
from scripts.bench_plugin_kubelet import Kubelet
from scripts.bench_timing import ENVIRONMENT, GPUNODE

_START_SECONDS = 20.0
OURS = (
    f"{GPUNODE} plugin serve --kubelet-socket {{kubelet_socket}} --state-dir {{scratch}}/state"
    " --config-file={config}"
)


@dataclass(frozen=True)
class Memory:
    """MiB: resident of the process that was started, proportional of all its processes."""

    resident: float
    tree: float


class Plugin:
    """One plugin on one machine, with a kubelet of its own. `template` has {socket_dir}, {kubelet_socket},
    {config} (an NVIDIA config file, empty if none is needed) and {scratch} (a directory of its own).
    """

    def __init__(
        self,
        template: str,
        directory: Path,
        scenario: Scenario,
        config: str = "",
        environ: Mapping[str, str] = {},
    ) -> None:
        self.place = directory
        self.scenario = scenario
        for name in ("dp", "scratch"):
            (directory / name).mkdir(parents=True)
        config_path = ""
        if config:
            config_path = str(directory / "config.yaml")
            Path(config_path).write_text(config)
        self.kubelet = Kubelet(directory / "dp")
        self.node: StubNode = stub_node(directory, scenario, libraries="nvml")
        words = {
            "socket_dir": str(directory / "dp"),
            "kubelet_socket": str(self.kubelet.socket),
            "config": config_path,
            "scratch": str(directory / "scratch"),
        }
        own = {"KUBELET_SOCKET": words["kubelet_socket"], "CONFIG_FILE": config_path}
        argv = [*_ended_with_us(), *(part.format(**words) for part in shlex.split(template))]
        self.log = directory / "log"
        with self.log.open("w") as log:
            self.started = time.monotonic()
            self.process = subprocess.Popen(
                argv,
                env={**ENVIRONMENT, **own, **self.node.env, **environ},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_ready(self, count: int) -> None:
        """Wait until all devices are listed; fails with the end of the log if they never are."""
        until = time.monotonic() + _START_SECONDS
        while not (listed := self.kubelet.wait_listed(count, 0.2)):
            code = self.process.poll()
            if code is not None or time.monotonic() > until:
                break
        if not listed:
            self.end()
            raise SystemExit(
                f"{count} devices weren't listed within {_START_SECONDS:g} s"
                f"{f': it ended with {code}' if code is not None else ''}\n{self.log.read_text()[-2000:]}"
            )

    @property
    def start_seconds(self) -> float:
        """From its start to the Register call."""
        return self.kubelet.seen.registered - self.started

    def inject(self, scenario: Scenario) -> float:
        """Change the machine; the moment when that was done."""
        self.scenario = scenario
        self.node.write(scenario)
        return time.monotonic()

    # --- measured from outside -------------------------------------------------------------------------

    def tree(self) -> list[int]:
        """The process and all below it."""
        parents: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                parents.setdefault(_parent(entry), []).append(int(entry.name))
        pids = [self.process.pid]
        for pid in pids:
            pids += parents.get(pid, [])
        return pids

    def memory(self) -> Memory:
        tree = sum(_kib(pid, "smaps_rollup", "Pss:") for pid in self.tree())
        return Memory(_kib(self.process.pid, "status", "VmRSS:") / 1024, tree / 1024)

    def processor_seconds(self) -> float:
        """Processor time used by all threads of all its processes so far, in ns (proc(5), schedstat)."""
        total = 0
        for pid in self.tree():
            for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                try:
                    total += int(task.read_text().split()[0])
                except (OSError, ValueError, IndexError):
                    continue  # a thread that has ended
        return total / 1e9

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # resources left behind by a peer
        self.kubelet.close()


def _ended_with_us() -> tuple[str, ...]:
    """A prefix: the kernel ends the plugin when this process is killed. It costs a millisecond."""
    program = shutil.which("setpriv")  # util-linux
    return (program, "--pdeathsig", "TERM", "--") if program else ()


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _kib(pid: int, name: str, key: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/{name}").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(key)), 0)
