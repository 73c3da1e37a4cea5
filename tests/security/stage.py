"""A node full of hostile processes: another user's, and a container's that shares the node's PID namespace.

The node is a PID and mount namespace of its own, with NVIDIA's driver as stubs (driver_namespace.py) and
writable copies of /etc, /root and /var/lib that are forgotten with it. Every planted process names files that
it may not read itself; they hold `CANARY`. Every planted program leaves a marker when it is executed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli import Ran
from tests.integration import driver_namespace
from tests.integration.conftest import refuse_for
from tests.integration.forked_cli import ForkedCli, every_module
from tests.waiting import eventually

CANARY = "kanarienvogel4711"
MALLORY, VICTIM = 61001, 61002
NAMES = (
    *("crio", "dockerd", "containerd", "kubelet", "k3s", "kubelite", "cri-dockerd", "nvidia-device-plugin"),
    *("nvidia-toolkit", "com.docker.backend", "gpunode", "nv-fabricmanager", "nvidia-persistenced"),
)
# programs that gpunode searches by name; planted in a directory of PATH that others may write
LURES = (
    *(
        "containerd",
        "dockerd",
        "crio",
        "podman",
        "nvidia-smi",
        "modinfo",
        "mokutil",
        "systemctl",
        "rpm",
        "runc",
    ),
    *("nvidia-ctk", "nvidia-container-cli", "nvidia-cdi-hook", "nvidia-cuda-mps-control", "apt-cache", "ctr"),
    *("apt-config", "dpkg", "kubelet", "skopeo", "nerdctl", "dpkg-query", "journalctl", "udevadm", "ibstat"),
)
_BOOT = """\
set -e
for place in /etc /root /var/lib; do
  mkdir -p "/run/stage$place/upper" "/run/stage$place/work"
  options="lowerdir=$place,upperdir=/run/stage$place/upper,workdir=/run/stage$place/work"
  mount -t overlay -o "$options" overlay "$place"
done
chmod 0711 /root
mount -t tmpfs tmpfs /usr/lib/systemd/system
mount --bind "$1" /sys/bus/pci/devices
shift
exec "$@"
"""
_GPU = {"vendor": "0x10de", "device": "0x2330", "class": "0x030200", "subsystem_device": "0x16c1"}


@dataclass(frozen=True)
class Stage:
    """The node, and gpunode on it. `directory` is visible to all users."""

    directory: Path
    cli: ForkedCli

    @property
    def secret(self) -> Path:
        """A directory of root's, closed to all other users."""
        return self.directory / "private"

    @property
    def open(self) -> Path:
        """A world-writable directory."""
        return self.directory / "open"

    def as_root(self, *argv: str, env: Mapping[str, str] | None = None) -> Ran:
        """Run gpunode as root, with a PATH that begins with a directory writable by others."""
        return self.cli.run(*argv, env={**self._environ(), **(env or {})})

    def services(self) -> Ran:
        """Run services.py as root, with the same PATH."""
        place = self.secret / "services"
        place.mkdir()
        program = (sys.executable, "-m", "tests.security.services", str(place))
        return self.cli.program(*program, env=self._environ(), seconds=300)

    def _environ(self) -> dict[str, str]:
        path = f"{self.open}:{os.environ['PATH']}"
        return {"PATH": path, "GPUNODE_STATE_DIR": str(self.secret / "state"), "NO_COLOR": "1"}

    def as_victim(self, *argv: str) -> Ran:
        """Run gpunode as an ordinary user."""
        ids = ("--reuid", str(VICTIM), "--regid", str(VICTIM), "--clear-groups")
        path = f"PATH={self.open}:/usr/local/bin:/usr/bin:/bin:/usr/sbin"
        own = (f"HOME={self.directory}/home/victim", f"XDG_RUNTIME_DIR={self.directory}/run/victim", path)
        gpunode = (sys.executable, "-m", "gpunode", *argv)
        return self.cli.program("setpriv", *ids, "env", *own, "NO_COLOR=1", *gpunode, env={})

    def executed(self, markers: str = "markers") -> list[str]:
        """The argument lists with which planted programs were executed, genuine ones from `asked`."""
        return [path.read_text() for path in sorted((self.directory / markers).iterdir())]


@contextmanager
def stage(cast: str) -> Iterator[Stage]:
    """Build and enter it, with the processes of one of `CASTS`; skips where no such namespace can be made."""
    if os.geteuid() != 0:
        refuse_for(["root"])
    with tempfile.TemporaryDirectory(prefix="gpunode-stage-", dir="/tmp") as name:
        directory = Path(name)
        directory.chmod(0o755)
        driver = directory / "driver"
        driver.mkdir()
        prefix = driver_namespace.enter(driver)
        problem = driver_namespace.problem(prefix)
        refuse_for([f"a mount namespace with overlayfs ({problem})"] if problem else [])
        _prepare(directory)
        boot = ("sh", "-c", _BOOT, "sh", f"{name}/pci", sys.executable, "-m", "tests.security.stage")
        with ForkedCli((*prefix, *boot, name, cast), modules=every_module()) as cli:
            assert cli.program("true", env={}).code == 0
            yield Stage(directory, cli)


def _prepare(directory: Path) -> None:
    """The files; `_plant` gives them their owners, in the namespace."""
    for place in (
        "private/out",
        "markers",
        "asked",
        "open",
        "run/victim",
        "run/mallory",
        "rootfs",
        "genuine",
    ):
        (directory / place).mkdir(parents=True)
    for path, markers in (("evil", "markers"), ("genuine/containerd", "asked")):
        program = str(directory / path)
        source = str(Path(__file__).with_name("program.c"))
        macro = f'-DMARKERS="{directory / markers}"'
        subprocess.run(["gcc", "-static", "-O1", macro, "-o", program, source], check=True)
    shutil.copy(directory / "evil", directory / "suid")
    shutil.copy(directory / "evil", directory / "rootfs/evil")
    for name in LURES:
        shutil.copy(directory / "evil", directory / "open" / name)
    gpu = directory / "pci/0000:01:00.0"
    gpu.mkdir(parents=True)
    for name, text in _GPU.items():
        (gpu / name).write_text(text + "\n")
    secrets = {
        "private/secret.json": f'{{"runtimes": {{"{CANARY}": {{"path": "/{CANARY}"}}}}, "x": "{CANARY}"}}',
        "private/secret.toml": f'version = 2\nroot = "{CANARY}"\n[nvidia-container-cli]\nuser = "{CANARY}"\n',
        "private/secret.conf": f"[Service]\nExecStart=/usr/bin/dockerd {CANARY}\nEnvironment=A={CANARY}\n",
        "home/victim/secret.json": f'{{"runtimes": {{"{CANARY}": {{"path": "/{CANARY}"}}}}}}',
    }
    mallory = directory / "home/mallory"
    files = {
        **secrets,
        "home/mallory/imports.toml": f'version = 2\nimports = ["/etc/shadow", "{directory}/private/*"]\n',
        "home/mallory/.config/nvidia-container-runtime/x": "",
        "home/mallory/.config/systemd/user/docker.service": (
            "[Service]\nEnvironmentFile=/etc/shadow\nExecStart=/usr/bin/dockerd $root\n"
        ),
        "home/mallory/.docker/x": "",
        "home/mallory/.config/docker/x": "",
    }
    for path, text in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    os.mkfifo(mallory / "fifo")
    private = directory / "private"
    (mallory / ".config/docker/daemon.json").symlink_to(private / "secret.json")
    (mallory / ".docker/config.json").symlink_to(private / "secret.json")
    (mallory / ".config/nvidia-container-runtime/config.toml").symlink_to(private / "secret.toml")
    (mallory / ".config/systemd/user/docker.service.d").mkdir()
    (mallory / ".config/systemd/user/docker.service.d/a.conf").symlink_to(private / "secret.conf")
    (directory / "rootfs/leak").symlink_to("/etc/shadow")


def _plant(directory: Path, cast: str) -> None:
    """Give the files their owners, and start the processes."""
    for top, uid in (("home/mallory", MALLORY), ("home/victim", VICTIM), ("run/mallory", MALLORY)):
        for path in ((directory / top), *(directory / top).rglob("*")):
            os.chown(path, uid, uid, follow_symlinks=False)
    os.chown(directory / "run/victim", VICTIM, VICTIM)
    for name, mode in (("private", 0o700), ("open", 0o777), ("markers", 0o777), ("asked", 0o777)):
        (directory / name).chmod(mode)
    (directory / "suid").chmod(0o4755)
    (directory / "home/victim/secret.json").chmod(0o600)
    homes = (
        (name, uid, f"{directory}/home/{name}") for name, uid in (("mallory", MALLORY), ("victim", VICTIM))
    )
    with Path("/etc/passwd").open("a") as users:
        users.writelines(f"{name}:x:{uid}:{uid}::{home}:/bin/sh\n" for name, uid, home in homes)
    with Path("/etc/shadow").open("a") as shadow:
        shadow.write(f"root:{CANARY}:1:0:99999:7:::\n")
    Path("/etc/shadow").chmod(0o600)
    CASTS[cast](directory)


def _one_user(directory: Path, secret: str = "/etc/shadow", program: str = "evil") -> None:
    """One process of each name."""
    for name in NAMES:
        words = ("plugin", "serve", "--config-file", secret) if name == "gpunode" else _naming(secret)
        _user(directory, name, *words, "--listen", f"{directory}/run/mallory/s", program=program)


def _naming(secret: str) -> tuple[str, ...]:
    return ("--config", secret, "--config-file", secret, f"--config-file={secret}", "-c", secret)


def _setuid(directory: Path) -> None:
    """Processes with root's effective user id and arguments of the user."""
    _one_user(directory, program="suid")


def _container(directory: Path) -> None:
    """Processes of root in a container that shares the node's PID namespace."""
    for name in NAMES:
        environ = {"PLANTED": "1", "PLANTED_AS": name, "CONFIG_FILE": "/leak", "PATH": os.environ["PATH"]}
        words = ("plugin", "serve", *_naming("/leak")) if name == "gpunode" else _naming("/leak")
        subprocess.Popen(["unshare", "--mount", "chroot", directory / "rootfs", "/evil", *words], env=environ)


def _crowd(directory: Path) -> None:
    """Many of each name, with every other file and way to name one."""
    _container(directory)
    _setuid(directory)
    private, home = directory / "private", directory / "home/mallory"
    own = tuple(f"{private}/secret.{ending}" for ending in ("json", "toml", "conf"))
    others = (f"{directory}/home/victim/secret.json", "/proc/self/environ", "/dev/zero", f"{home}/fifo")
    for secret in (*own, *others, f"/proc/1/root{private}/secret.json"):
        _one_user(directory, secret)
    _user(directory, "crio", "--config-dir", str(private))
    _user(directory, "dockerd")
    _user(directory, "dockerd", "-H", "unix:///run/docker.sock")
    _user(directory, f"{directory}/evil", "--config-file=/etc/shadow")
    _user(directory, f"{directory}/open/dockerd", program="open/dockerd")
    _user(directory, "containerd", "--config", f"{home}/imports.toml")
    k3s = f"{home}/agent/etc/containerd/config.toml"
    _user(directory, "containerd", "-c", k3s, "--address", "/run/k3s/containerd/containerd.sock")
    _user(directory, "nvidia-toolkit", "--enable-nri-plugin")


def _user(directory: Path, *argv: str, program: str = "evil") -> None:
    environ = {
        "PLANTED": "1",
        "HOME": f"{directory}/home/mallory",
        "XDG_RUNTIME_DIR": f"{directory}/run/mallory",
        "NVIDIA_CTK_CONFIG_FILE_PATH": f"{directory}/private/secret.toml",
        "CONFIG_FILE": "/etc/shadow",
        "CONTAINER_CONFIG": "/etc/shadow",
    }
    who: Any = {"user": MALLORY, "group": MALLORY, "extra_groups": []}
    subprocess.Popen(argv, executable=directory / program, env=environ, cwd="/", **who)


def _healthy(directory: Path) -> None:
    """root's containerd, and a rootless Docker of an ordinary user."""
    Path("/etc/containerd").mkdir(exist_ok=True)
    Path("/etc/containerd/config.toml").write_text("version = 2\n")
    genuine = directory / "genuine/containerd"
    subprocess.Popen(["containerd"], executable=genuine, env={"PLANTED": "1"})
    runtime = directory / "run/victim"
    who: Any = {"user": VICTIM, "group": VICTIM, "extra_groups": []}
    environ = {"PLANTED": "1", "HOME": f"{directory}/home/victim", "XDG_RUNTIME_DIR": str(runtime)}
    server = str(Path(__file__).with_name("healthy.py"))
    subprocess.Popen([sys.executable, server, str(runtime / "docker.sock")], env=environ, **who)
    subprocess.Popen(["dockerd"], executable=directory / "evil", env=environ, **who)
    assert eventually((runtime / "docker.sock").is_socket)


def _stopped(directory: Path) -> None:
    """The system's Docker is installed and stopped; an ordinary user's processes have the engines' names."""
    Path("/etc/systemd/system").mkdir(parents=True, exist_ok=True)
    Path("/etc/systemd/system/docker.service").write_text("[Service]\nExecStart=/usr/bin/dockerd -H fd://\n")
    _user(directory, "dockerd")
    _user(directory, "dockerd", "--config-file", "/etc/docker/daemon.json")
    _user(directory, "containerd")
    _user(directory, "crio")


CASTS = {
    **{"user": _one_user, "setuid": _setuid, "container": _container, "crowd": _crowd},
    **{"healthy": _healthy, "stopped": _stopped},
}


if __name__ == "__main__":
    _plant(Path(sys.argv[1]), sys.argv[2])
    os.execvp(sys.argv[3], sys.argv[3:])
