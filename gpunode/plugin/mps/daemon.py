"""Client of a control daemon: through its own program, which reads commands from stdin.

There is no other interface: the protocol of its socket isn't documented.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath

from gpunode.errors import DaemonError, GpunodeError
from gpunode.facts.daemons import exe_of
from gpunode.facts.processes import start_ticks
from gpunode.gpu.library_paths import PROGRAM_DIRECTORIES
from gpunode.host import Host
from gpunode.host.files import empty_file, read_from
from gpunode.host.process import ChildDaemon, Completed, start_daemon
from gpunode.output.typed import from_plain
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.logfmt import Log, Rarely
from gpunode.plugin.mps.compute_mode import FILE as MODES_FILE
from gpunode.plugin.mps.layout import DaemonSpec
from gpunode.plugin.nvidia.platform import find_roots

PROGRAM = "nvidia-cuda-mps-control"
_SECONDS = 3.0


def find_program(host: Host, settings: Settings) -> str:
    """Its path: PATH, the driver root, usual directories of node images. `DaemonError` says which package has
    it."""
    root = find_roots(host, settings).driver_here
    places = [f"{root}/usr/bin"] if root else []
    paths = (f"{place}/{PROGRAM}" for place in (*places, *PROGRAM_DIRECTORIES))
    path = host.which(PROGRAM) or next(
        (path for path in paths if host.executable(path) and not host.refusal(path)), None
    )
    if path is None:
        unsafe = host.unsafe_program(PROGRAM)
        if unsafe is not None:
            raise DaemonError(
                f"{PROGRAM} is at {unsafe[0]}, but {unsafe[1]}",
                code="no-program",
                hint=f"see who can write it: namei -l {unsafe[0]}",
            )
        raise DaemonError(
            f"{PROGRAM} is not on this node",
            code="no-program",
            hint="it comes with the driver: install nvidia-cuda-mps (Debian), nvidia-compute-utils (Ubuntu) "
            "or nvidia-driver-cuda (Fedora, RHEL)",
        )
    return path


class MpsControl:
    """The client of the daemon with the pipe directory `pipe`."""

    def __init__(self, host: Host, program: str, pipe: str) -> None:
        self._host = host
        self.program = program
        self._pipe = pipe
        self.deaf = False  # the last query was not answered in time

    def query(self, *commands: str) -> list[str]:
        """Send commands and return the answer's lines. `DaemonError` if the daemon doesn't answer in time."""
        done = self.send(*commands)
        if done.timed_out:
            raise DaemonError(f"the MPS control daemon did not answer within {_SECONDS:g} s", code="hangs")
        if not done.ok:
            output = (done.stdout + done.stderr).strip().splitlines() or [f"exit status {done.code}"]
            raise DaemonError(f"the MPS control daemon does not answer: {output[-1]}", code="silent")
        return done.stdout.split("\n")

    def send(self, *commands: str, seconds: float | None = None) -> Completed:
        """Like `query`, without checking the answer; `seconds` replaces the usual timeout."""
        text = "".join(f"{command}\n" for command in commands)
        done = self._host.run(
            [self.program],
            stdin=text,
            timeout=seconds or _SECONDS,
            env={"CUDA_MPS_PIPE_DIRECTORY": self._pipe},
        )
        self.deaf = done.timed_out
        return done

    def answers(self, seconds: float | None = None) -> bool:
        """Whether the daemon exists and listens."""
        return self.send("get_default_active_thread_percentage", seconds=seconds).ok


def has_listener(host: Host, pipe: str) -> bool:
    """Whether a daemon listens on the control socket (SOCK_SEQPACKET) in `pipe`; it isn't queried."""
    return host.socket_state(f"{pipe}/control") in ("other-type", "listening")


# Parser of a control daemon's log: which lines are worth a log line of ours. Pure.
#
# The formats are those of nvidia-cuda-mps-control 535 to 580: ``[2026-01-31 10:05:06.065 Control 13013]
# text``.

_LINE = re.compile(r"\[\S+ \S+ +(?P<who>[A-Za-z ]+?) +\d+\] ?(?P<text>.*)")
_EXITED = re.compile(r"Server (\d+) exited with status (-?\d+)")
_READY = re.compile(r"NEW SERVER \d+: Ready")
_CHATTER = re.compile(
    r"Accepting connection\.\.\.|NEW UI|UI closed|Cmd:.*|[\d.]+[MG]?|User did not send valid .*|"
    r"NEW CLIENT .*|Removed Shm file.*|No default pinned memory limit set.*|"
    r"Starting control daemon .*|To connect CUDA applications .*|quit command issued .*|Exit with status 0|"
    r"Using log directory: .*"
)
_BAD = re.compile(
    r"exited with status (?!0)|fatal|fail|warning|error|invalid|unable|cannot|already running", re.IGNORECASE
)


@dataclass(frozen=True)
class Line:
    """One line: `text` without the time and the process's number; `bad` lines deserve a warning.

    `server` is failed for a server that ended badly, ready for one that serves, else empty.
    """

    text: str
    bad: bool = False
    server: str = ""


def read_line(raw: str) -> Line | None:
    """None for routine lines: our own queries and actions, and every client that connects and disconnects."""
    match = _LINE.fullmatch(raw.strip())
    text = (match["text"] if match else raw).strip()
    if not text or _CHATTER.fullmatch(text):
        return None
    exited = _EXITED.search(text)
    if exited and exited[2] != "0":
        return Line(text, bad=True, server="failed")
    return Line(text, bool(_BAD.search(text)), "ready" if _READY.search(text) else "")


class ServerWatch:
    """Whether the daemon's MPS servers, which do the work, start. The daemon itself keeps running without
    them.
    """

    _MANY = 3  # a driver during a reset may refuse one

    def __init__(self) -> None:
        self.failures = 0
        self.last = ""

    def hear(self, line: Line) -> None:
        if line.server == "failed":
            self.failures += 1
            self.last = line.text
        elif line.server == "ready":
            self.failures = 0

    @property
    def failing(self) -> bool:
        return self.failures >= self._MANY


# Follows a daemon's control.log: new lines become log lines of ours, and the file stays small.

_MOST = 256 << 10  # bytes that the file may grow to, and that are read at once
_LINES = 20  # of ours at a time


class ControlLog:
    """Belongs to one thread. `servers` gets every line, logged or not; `last` is the last one's text."""

    def __init__(self, host: Host, spec: DaemonSpec, log: Log) -> None:
        self._path = host.path(f"{spec.log}/control.log")
        self._names = {"resource": spec.resource, "gpus": ",".join(spec.gpus)}
        self._log = log
        self._rarely = Rarely()
        self._offset = 0
        self._rest = b""
        self.last = ""
        self.servers = ServerWatch()

    def skip(self) -> None:
        """Skip the present content, which is an earlier daemon's."""
        self._offset, self._rest, self.last = self._size(), b"", ""
        self.servers = ServerWatch()

    def follow(self) -> None:
        """Log new lines."""
        size = self._size()
        if size == self._offset:
            return
        if size < self._offset:
            self._offset = 0
        try:
            data = read_from(self._path, self._offset, _MOST)
        except OSError:
            return  # the file is gone; a new daemon makes a new one
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        news = [line for raw in lines if (line := read_line(raw.decode("utf-8", "replace")))]
        for line in news:
            self.servers.hear(line)
            self.last = line.text
        for line in news[-_LINES:]:
            self._tell(line)
        if self._offset >= _MOST:
            empty_file(self._path)
            self._offset, self._rest = 0, b""

    def _tell(self, line: Line) -> None:
        times = self._rarely.times("".join(c for c in line.text if not c.isdecimal()))
        if times:
            say = self._log.warning if line.bad else self._log.info
            more = {"times": times} if times > 1 else {}
            say("MPS", **self._names, said=line.text, **more)

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0


# One control daemon as a process: started by us, or found alive after a plugin that was killed.
#
# It runs with ``-f``, so it stays our child and its output, the log, goes to control.log. That is a file and
# no pipe, so the daemon survives us, and its clients with it: the next plugin adopts it. It is identified by
# its recorded pid, start time and program; no process that isn't exactly that one is ever signalled.

FILE = "daemon.json"
_QUIT_SECONDS = 3.0
_TERM_SECONDS = 1.5


@dataclass(frozen=True)
class Identity:
    """Identity of a daemon's process. `started` is field 22 of /proc/PID/stat, ticks since boot; `gpus` are
    those passed to it."""

    pid: int
    started: int
    program: str
    gpus: tuple[str, ...]

    @classmethod
    def of(cls, host: Host, pid: int, gpus: tuple[str, ...]) -> Identity | None:
        """None if there is no such process, or no permission to read it."""
        try:
            started, program = start_ticks(host, pid), exe_of(host, pid)
        except GpunodeError:
            return None
        return cls(pid, started, program, gpus) if started is not None and program else None

    def alive(self, host: Host) -> bool:
        """Whether this very process still runs."""
        return Identity.of(host, self.pid, self.gpus) == self


class AdoptedDaemon:
    """A daemon that an earlier process started."""

    def __init__(self, host: Host, identity: Identity) -> None:
        self._host = host
        self._identity = identity
        self.pid = identity.pid

    def ended(self) -> int | None:
        return None if self._identity.alive(self._host) else 0

    def signal(self, name: str) -> None:
        if self.ended() is None:
            self._host.signal(self.pid, name)

    def end_children(self) -> None:
        """Does nothing: its process group may belong to another process by now."""


Running = ChildDaemon | AdoptedDaemon
"""A daemon's process."""


def start(host: Host, program: str, spec: DaemonSpec) -> ChildDaemon:
    """Start the daemon of `spec`; its directories exist. `DaemonError` says why it can't be started."""
    env = {
        "PATH": f"{PurePosixPath(program).parent}:{host.environ.get('PATH', '')}",  # it has the server
        "CUDA_MPS_PIPE_DIRECTORY": spec.pipe,
        "CUDA_MPS_LOG_DIRECTORY": spec.log,
        "CUDA_VISIBLE_DEVICES": ",".join(spec.gpus),
        **{name: host.environ[name] for name in ("LD_LIBRARY_PATH",) if name in host.environ},
    }
    try:
        daemon = start_daemon((program, "-f"), host.path(f"{spec.log}/control.log"), env)
    except OSError as error:
        raise DaemonError(f"{program} can't be started: {error.strerror or error}") from error
    identity = Identity.of(host, daemon.pid, spec.gpus)
    if identity is not None:
        host.write_atomic(f"{spec.directory}/{FILE}", (json.dumps(asdict(identity)) + "\n").encode())
    return daemon


def left_behind(host: Host, spec: DaemonSpec) -> Identity | None:
    """The daemon of this directory that an earlier process started and that still runs."""
    try:
        identity = from_plain(Identity, json.loads(host.read_text(f"{spec.directory}/{FILE}") or "{}"))
    except (ValueError, GpunodeError):
        return None
    return identity if identity.alive(host) else None


def end(host: Host, control: MpsControl, running: Running) -> None:
    """Send quit, which ends its servers; then SIGTERM, then SIGKILL. Takes six seconds at most.

    ``quit -t`` waits that long for clients before it ends their servers. It isn't sent to a daemon that
    doesn't respond.
    """
    if running.ended() is None and not control.deaf:
        control.send(f"quit -t {_QUIT_SECONDS - 1:.0f}", seconds=_QUIT_SECONDS)
    for name, seconds in (("", 0.0 if control.deaf else 0.3), ("TERM", _TERM_SECONDS), ("KILL", 0.5)):
        if name and running.ended() is None:
            running.signal(name)
        if host.wait_until(lambda: running.ended() is not None, seconds):
            break
    running.end_children()


def forget(host: Host, spec: DaemonSpec, root: str) -> None:
    """Remove our files and those of the ended daemon, and the directories if they contain nothing else."""
    for name in (FILE, ".started"):
        host.remove(f"{spec.directory}/{name}")
    if has_listener(host, spec.pipe):
        return  # a daemon that isn't ours
    for name in ("control", "control_lock", "control_privileged", "log"):  # the daemon leaves these
        host.remove(f"{spec.pipe}/{name}")
    host.remove(f"{spec.log}/control.log")
    for path in (spec.pipe, spec.log, spec.directory):
        host.remove_empty_directory(path)
    domain = f"{root}/{spec.resource.partition('/')[0]}"
    for path in (f"{root}/{spec.resource}", domain):
        host.remove_empty_directory(path)


def remains(host: Host, root: str) -> list[DaemonSpec]:
    """The records below `root`: in each a daemon to end, or compute modes to restore."""
    specs = []
    for domain in host.listdir(root):
        for name in host.listdir(f"{root}/{domain}"):
            resource = f"{root}/{domain}/{name}"
            inner = [f"{resource}/{gpu}" for gpu in host.listdir(resource)]
            for directory in (resource, *inner):
                if host.is_file(f"{directory}/{FILE}") or host.is_file(f"{directory}/{MODES_FILE}"):
                    specs.append(DaemonSpec(f"{domain}/{name}", (), directory))
    return specs
