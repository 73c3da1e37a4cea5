"""Talking to a control daemon: through its own program, which reads commands from stdin.

There is no other interface: the protocol of its socket isn't documented.
"""

from __future__ import annotations

from gpunode.errors import DaemonError
from gpunode.gpu.library_paths import PROGRAM_DIRECTORIES
from gpunode.host import Completed, Host
from gpunode.plugin.nvidia.site import find_roots
from gpunode.plugin.settings import Settings

PROGRAM = "nvidia-cuda-mps-control"
_SECONDS = 3.0


def find_program(host: Host, settings: Settings) -> str:
    """Its path: PATH, the driver root, usual places of node images. `DaemonError` says who brings it."""
    root = find_roots(host, settings).driver_here
    places = [f"{root}/usr/bin"] if root else []
    paths = (f"{place}/{PROGRAM}" for place in (*places, *PROGRAM_DIRECTORIES))
    found = host.which(PROGRAM) or next(
        (path for path in paths if host.executable(path) and not host.refusal(path)), None
    )
    if found is None:
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
    return found


class Control:
    """The client of the daemon whose pipe directory is `pipe`."""

    def __init__(self, host: Host, program: str, pipe: str) -> None:
        self._host = host
        self.program = program
        self._pipe = pipe
        self.deaf = False  # the last question was not answered in time

    def ask(self, *commands: str) -> list[str]:
        """Send commands and give back the lines of the answer. `DaemonError` if nobody answers in time."""
        done = self.send(*commands)
        if done.timed_out:
            raise DaemonError(f"the MPS control daemon did not answer within {_SECONDS:g} s", code="hangs")
        if not done.ok:
            said = (done.stdout + done.stderr).strip().splitlines() or [f"exit status {done.code}"]
            raise DaemonError(f"the MPS control daemon does not answer: {said[-1]}", code="silent")
        return done.stdout.split("\n")

    def send(self, *commands: str, seconds: float | None = None) -> Completed:
        """Like `ask`, without judging the answer; other limits than the usual one in `seconds`."""
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
        """Whether the daemon is there and listens."""
        return self.send("get_default_active_thread_percentage", seconds=seconds).ok


def taken(host: Host, pipe: str) -> bool:
    """Whether a daemon is behind the control socket in `pipe`; it isn't asked. Its type is SOCK_SEQPACKET."""
    return host.socket_state(f"{pipe}/control") in ("other-type", "listening")
