"""A mount namespace in which this machine appears to have NVIDIA's driver, for `--cdi` runs that write to
/run.

The libraries are the stubs and the device files have /dev/null's numbers (fixtures/driver_tree.py), mounted
over the machine's own directories; /run is empty and private, and no other process is visible.
"""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

from fixtures.driver_tree import driver_tree
from fixtures.stubs import build
from tests.integration.verify_support import GPUS

_ENTER = """\
set -e
mount -t tmpfs -o mode=755 tmpfs /run
mount -t overlay -o "lowerdir=$1/driver/lib:$2" overlay "$2"
mkdir -p "$1/shm" && mount --bind /dev/shm "$1/shm"
mount -t overlay -o "lowerdir=$1/node/dev:/dev" overlay /dev
mount --bind "$1/shm" /dev/shm
shift 2
exec "$@"
"""


def enter(directory: Path, *, alone: bool = True) -> tuple[str, ...]:
    """Prefix for a command line that must run there; needs root, gcc and overlayfs.

    `alone` hides the machine's other processes; a later nsenter into the namespace needs it to be false.
    """
    tree = driver_tree(directory, GPUS)
    environ = (f"LD_LIBRARY_PATH={build() / 'all'}", *(f"{name}={value}" for name, value in tree.env.items()))
    libraries = f"/usr/lib/{platform.machine()}-linux-gnu"
    unshare = ("unshare", "--mount", *(("--pid", "--fork", "--mount-proc") if alone else ()))
    return (*unshare, "env", *environ, "sh", "-c", _ENTER, "sh", str(directory), libraries)


def problem(prefix: tuple[str, ...]) -> str:
    """Why no such namespace can be made here; empty if it can."""
    done = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or "unshare failed"
