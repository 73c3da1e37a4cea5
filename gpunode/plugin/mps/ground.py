"""The directories that a daemon and its clients meet in."""

from __future__ import annotations

from gpunode.errors import DaemonError
from gpunode.host import Host
from gpunode.plugin.logfmt import Log
from gpunode.plugin.mps.layout import DaemonSpec

_SHM = "/dev/shm"  # noqa: S108 - a mount of the node, nothing of ours lies there
_LABEL = "system_u:object_r:container_file_t:s0"


def prepare(host: Host, spec: DaemonSpec, root: str, log: Log) -> None:
    """Make what is missing. `DaemonError` or `Unreadable` says why a daemon couldn't serve there."""
    if spec.path_problem:
        raise DaemonError(spec.path_problem, hint="choose a shorter --mps-root, such as /run/mps")
    for directory in (spec.pipe, spec.log):
        host.make_dirs(directory)
    _share_memory(host, root)
    _label(host, spec.pipe, log)


def _share_memory(host: Host, root: str) -> None:
    """`root`/shm must be the daemon's own /dev/shm: clients and servers meet there, too.

    Without one it becomes a link to /dev/shm. One that is there, a file system of its own as NVIDIA's plugin
    has it, must be mounted on this process's /dev/shm: a daemon inherits that.
    """
    shm = f"{root}/shm"
    if not host.exists(shm) and not host.is_symlink(shm):
        if host.environ.get("KUBERNETES_SERVICE_HOST"):
            raise DaemonError(
                f"{shm} is missing, and this is a container: its {_SHM} is not the node's",
                hint=f"mount a tmpfs of the node at {shm}, and that at {_SHM} of this container",
            )
        host.make_dirs(root)
        try:
            host.make_link(shm, _SHM)
        except FileExistsError:
            pass  # another daemon's thread was faster
        except OSError as error:
            raise DaemonError(f"{shm} can't be made: {error.strerror}") from error
    theirs, ours = host.stat(shm), host.stat(_SHM)
    if theirs is None or ours is None or (theirs.st_dev, theirs.st_ino) != (ours.st_dev, ours.st_ino):
        raise DaemonError(
            f"{shm}, which containers get as {_SHM}, is not this process's own {_SHM}: "
            "clients would not find the server",
            hint=f"remove {shm}, or give this service BindPaths={shm}:{_SHM} (systemd.exec(5))",
        )


def _label(host: Host, pipe: str, log: Log) -> None:
    """Let confined containers use the sockets."""
    if not host.exists("/sys/fs/selinux/enforce"):
        return
    done = host.run(["chcon", "-R", _LABEL, pipe], timeout=10.0)
    if not done.ok:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.code}"])[-1]
        log.warning(
            "SELinux label not set: confined containers may not reach the MPS daemon",
            directory=pipe,
            reason=reason,
            hint=f"chcon -R {_LABEL} {pipe}",
        )
