"""A GPU node in private namespaces: this machine's apt and dpkg on a copy of its root, with a GPU.

The root is an overlay that disappears with the namespaces; /sys is a directory with one PCI device; /proc,
/run and /dev show no container, daemon or GPU of this machine, and the only repository is a signed
directory of packages that a test creates. modprobe, systemctl and update-initramfs are programs that record
their calls.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from gpunode.facts.kernels import flavour
from tests.cli import REPOSITORY, Ran, gpunode
from tests.packages.apt_root import Repository, architecture

KERNEL = Path("/proc/sys/kernel/osrelease").read_text().strip()
MODULES = f"/usr/lib/modules/{KERNEL}"
LOG = "/var/log/called"
VERSION = "580.173.02-0ubuntu0.24.04.1"
OLDER = "580.159.03-0ubuntu0.24.04.1"
MIRRORED = "580.173.02-0ubuntu1"
MODULE_PACKAGE = f"linux-modules-nvidia-580-server-open-{KERNEL}"
DRIVER = ("nvidia-headless-no-dkms-580-server-open", "nvidia-utils-580-server")
_SBIN = "/usr/local/sbin"
_FAKES = ("modprobe", "systemctl", "update-initramfs", "dracut", "grubby")
_ROOT = """\
mount -t tmpfs -o mode=755 tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
rm -f "$1/root/.dockerenv"
mount -t tmpfs -o mode=755 tmpfs "$1/root/dev"
for name in null zero full random urandom; do
    : > "$1/root/dev/$name"
    mount --bind "/dev/$name" "$1/root/dev/$name"
done
ln -s /proc/self/fd "$1/root/dev/fd"
mount -t proc proc "$1/root/proc"
mount -t tmpfs -o mode=755 tmpfs "$1/root/run"
echo ready
exec cat
"""


class DriverNode:
    """One such node; `close` ends its namespace."""

    def __init__(self, directory: Path, repository: Repository | None) -> None:
        place = directory / "overlay"
        place.mkdir()
        new = ("--mount", "--propagation", "private", "--pid", "--fork")  # its first process ends all others
        argv = ["unshare", *new, "sh", "-ec", _ROOT, "sh", str(place)]
        self._keeper = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._keeper.stdout
        self.ready = self._keeper.stdout.readline().strip() == "ready"
        space = f"--pid=/proc/{self._keeper.pid}/ns/pid_for_children"
        target = ("--mount", "--target", str(self._keeper.pid))
        self.enter = ("nsenter", space, *target, "chroot", str(place / "root"))
        if self.ready:
            self._furnish()
            if repository:
                self._ubuntu(repository)

    def _furnish(self) -> None:
        device = "/sys/bus/pci/devices/0000:18:00.0"
        files = {
            f"{device}/vendor": "0x10de\n",
            f"{device}/device": "0x2330\n",
            f"{device}/class": "0x030200\n",
            f"{MODULES}/modules.dep": "kernel/drivers/gpu/drm/nouveau/nouveau.ko:\n",
            f"{MODULES}/vmlinuz": "",
        }
        self.write_all({**files, **{f"{_SBIN}/{name}": _fake(name) for name in _FAKES}})

    def _ubuntu(self, repository: Repository) -> None:
        self.sh("rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* /var/lib/apt/lists/* /etc/os-release")
        source = f"deb [signed-by=/etc/apt/keyrings/test.asc] file:{repository.flat} ./\n"
        files = {
            "/etc/os-release": 'ID=ubuntu\nVERSION_ID="24.04"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n',
            "/etc/apt/keyrings/test.asc": repository.signer.key.decode(),
            "/etc/apt/sources.list.d/test.list": source,
            "/etc/apt/apt.conf.d/99test": 'APT::Sandbox::User "root";\nDPkg::Use-Pty "false";\n',
        }
        self.write_all(files)
        self.sh("apt-get update -q")

    def become_rocky(self, programs: Mapping[str, str]) -> None:
        """Rocky Linux 9 with these programs for dnf and rpm, and no apt."""
        self.sh("rm -rf /etc/os-release /var/lib/dpkg /usr/bin/apt-get")
        text = 'ID="rocky"\nVERSION_ID="9.4"\nID_LIKE="rhel centos fedora"\nNAME="Rocky Linux"\n'
        self.write("/etc/os-release", text)
        self.write(f"{MODULES}/build/include/generated/autoconf.h", "")
        self.write_all({f"{_SBIN}/{name}": text for name, text in programs.items()})

    def fake(self, name: str, code: int = 0) -> None:
        """A program that records its calls and ends with `code`."""
        self.write(f"{_SBIN}/{name}", _fake(name, code))

    def sh(self, script: str) -> str:
        done = subprocess.run(
            [*self.enter, "sh", "-ec", script],
            capture_output=True,
            text=True,
            check=False,
            env=_environment(),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def write(self, path: str, text: str) -> None:
        self.write_all({path: text})

    def write_all(self, files: Mapping[str, str]) -> None:
        """With their directories, by one program; those in `_SBIN` can be run."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for path, text in files.items():
                entry = tarfile.TarInfo(path.lstrip("/"))
                entry.size, entry.mode = len(text.encode()), 0o755 if path.startswith(_SBIN) else 0o644
                archive.addfile(entry, io.BytesIO(text.encode()))
        argv = [*self.enter, "tar", "-x", "-C", "/", "--keep-directory-symlink", "--no-same-owner"]
        subprocess.run(argv, input=packed.getvalue(), check=True, capture_output=True)

    def exists(self, path: str) -> bool:
        return subprocess.run([*self.enter, "test", "-e", path], check=False).returncode == 0

    def gpunode(self, *argv: str) -> Ran:
        return gpunode(*argv, env=_environment(), prefix=self.enter, timeout=120)

    def installed(self) -> dict[str, str]:
        """NVIDIA's packages as dpkg has them."""
        form = r"${db:Status-Abbrev} ${Package} ${Version}\n"
        lines = self.sh(f"dpkg-query -W -f '{form}' '*nvidia*' 2>&1 || true").splitlines()
        words = [line.split() for line in lines if line[1:3] == "i "]  # a held one is "hi"
        return {name: version for _, name, version in words}

    def called(self) -> list[str]:
        """Calls of the stubs, in order."""
        return self.sh(f"cat {LOG} 2>&1 || true").splitlines() if self.exists(LOG) else []

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Another running package manager."""
        program = (
            "import fcntl, sys; file = open('/var/lib/dpkg/lock-frontend', 'w'); "
            "fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
        )
        argv = [*self.enter, "python3", "-c", program]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdin and child.stdout
            child.stdout.readline()
            try:
                yield
            finally:
                child.stdin.close()

    def close(self) -> None:
        self._keeper.communicate("")


def _fake(name: str, code: int = 0) -> str:
    return f'#!/bin/sh\necho "{name} $*" >> {LOG}\nexit {code}\n'


def _environment() -> dict[str, str]:
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": str(REPOSITORY),
        "GPUNODE_STATE_DIR": "/var/lib/gpunode",
    }


def make_packages(repository: Repository, *, module: str, depends: str = "") -> None:
    """The archive's driver in two versions; `module` is the script of its module package."""
    repository.flat.mkdir(parents=True)
    for name in DRIVER:
        for version in (OLDER, VERSION):
            _deb(repository.flat, name, version)
    _deb(repository.flat, f"linux-modules-nvidia-580-server-open-{flavour(KERNEL)}", "6.8.0-90.91+1")
    _deb(repository.flat, MODULE_PACKAGE, "6.8.0-90.91+1", module)
    for name in ("nvidia-headless-no-dkms-570-server-open", "nvidia-utils-570-server"):
        _deb(repository.flat, name, VERSION)
    _deb(repository.flat, f"linux-modules-nvidia-570-server-open-{flavour(KERNEL)}", "6.8.0-90.91+1")
    repository.index()


def make_mirror(repository: Repository) -> None:
    """The same directory as a mirror of NVIDIA's repository, with its package names."""
    repository.flat.mkdir(parents=True)
    for name in ("libnvidia-compute-580", "nvidia-utils-580"):
        _deb(repository.flat, name, MIRRORED)
    built = f"echo updates/dkms/nvidia.ko: >> {MODULES}/modules.dep\n"
    _deb(repository.flat, "nvidia-dkms-580-open", MIRRORED, built)
    repository.index()
    (repository.base / "ubuntu2404").mkdir()
    (repository.base / "ubuntu2404/x86_64").symlink_to(repository.flat)


def _deb(directory: Path, name: str, version: str, script: str = "") -> None:
    tree = directory / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    share = tree / f"usr/share/{name}/version"
    share.parent.mkdir(parents=True)
    share.write_text(version)
    control = f"Package: {name}\nVersion: {version}\nArchitecture: {architecture()}\n"
    (tree / "DEBIAN/control").write_text(f"{control}Maintainer: T <t@example.com>\nDescription: stands in\n")
    if script:
        for kind, text in (("postinst", script), ("prerm", f"sed -i /nvidia/d {MODULES}/modules.dep\n")):
            (tree / f"DEBIAN/{kind}").write_text(f"#!/bin/sh\nset -e\n{text}")
            (tree / f"DEBIAN/{kind}").chmod(0o755)
    argv: Sequence[str] = ("dpkg-deb", "--root-owner-group", "-Znone", "--build", str(tree))
    subprocess.run([*argv, str(directory / f"{name}_{version}.deb")], check=True, capture_output=True)
    shutil.rmtree(tree)
