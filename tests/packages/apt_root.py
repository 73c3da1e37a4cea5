"""A real apt with its own root, and a signed flat repository in a directory.

apt and dpkg of this machine do the work; APT_CONFIG directs them, and with them gpunode, to other
directories. Nothing outside those is touched.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli import Ran, gpunode

PACKAGES = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)
NEEDED = ("apt-get", "dpkg", "dpkg-deb", "gpg")


_HIDE = (
    'for name in dockerd containerd podman crio; do program=$(PATH="$PATH:/usr/sbin:/sbin" command -v $name)'
    ' || continue; mount --bind /dev/null "$(readlink -f "$program")" || exit; done;'
    " for place in /etc/docker /etc/containerd /etc/crio /etc/cdi /etc/nvidia-container-runtime; do"
    ' [ ! -d "$place" ] || mount -t tmpfs -o mode=755 tmpfs "$place" || exit; done'
)
# removing queries every engine of the machine, and other tests run some; here are none
_ALONE = (
    *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("sh", "-c", f'mount -t tmpfs -o mode=755 tmpfs /run && {_HIDE} && exec "$@"', "sh"),
)


@functools.cache
def alone() -> tuple[str, ...]:
    """Prefix for a program that sees no other processes; empty if that is not permitted."""
    done = subprocess.run([*_ALONE, "true"], capture_output=True, check=False)
    return () if done.returncode else _ALONE


def architecture() -> str:
    """As dpkg calls it."""
    return subprocess.run(
        ["dpkg", "--print-architecture"], capture_output=True, text=True, check=True
    ).stdout.strip()


class Signer:
    """A key made for a test. `expired` makes one that was valid for a day, a month ago."""

    def __init__(self, *, expired: bool = False) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="gpunode-gpg-", dir="/tmp"))  # sockets have short paths
        self._time = ("--faked-system-time", "20260101T000000!") if expired else ()
        expiry = "1d" if expired else "never"
        self._gpg(
            "--passphrase", "", "--quick-generate-key", "Test <test@example.com>", "ed25519", "sign", expiry
        )
        self.key = self._gpg("--armor", "--export")

    def clearsign(self, path: Path, target: Path) -> None:
        target.write_bytes(self._gpg("--clearsign", "--output", "-", str(path)))

    def detached(self, path: Path) -> bytes:
        return self._gpg("--armor", "--detach-sign", "--output", "-", str(path))

    @property
    def secret(self) -> bytes:
        """The secret key, binary."""
        return self._gpg("--export-secret-keys")

    def _gpg(self, *argv: str) -> bytes:
        command = ["gpg", "--homedir", str(self._home), "--batch", "--quiet", "--no-tty", *self._time, *argv]
        return subprocess.run(command, capture_output=True, check=True).stdout

    def close(self) -> None:
        subprocess.run(
            ["gpgconf", "--homedir", str(self._home), "--kill", "all"], check=False, capture_output=True
        )
        shutil.rmtree(self._home, ignore_errors=True)


def build(
    directory: Path,
    name: str,
    version: str,
    *,
    arch: str = "",
    files: Sequence[str] = (),
    extra: str = "",
    postinst: str = "",
) -> Path:
    """One .deb with its own file and those of `files` (relative to the root)."""
    arch = arch or architecture()
    tree = directory / f"tree-{name}-{version}-{arch}"
    for path in (f"usr/share/{name}/version", *files):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(f"{name} {version}\n")
    (tree / "DEBIAN").mkdir()
    control = (
        f"Package: {name}\nVersion: {version}\nArchitecture: {arch}\nMaintainer: Test <test@example.com>\n"
        f"Description: stands in for {name}\n{extra}"
    )
    (tree / "DEBIAN/control").write_text(control)
    if postinst:
        (tree / "DEBIAN/postinst").write_text(f"#!/bin/sh\n{postinst}\n")
        (tree / "DEBIAN/postinst").chmod(0o755)
    target = directory / f"{name}_{version}_{arch}.deb"
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(tree), str(target)],
        check=True,
        capture_output=True,
    )
    shutil.rmtree(tree)
    return target


def four(directory: Path, version: str, *, postinst: str = "") -> None:
    """The toolkit's packages of one release, with exact dependencies as NVIDIA's; the library's script."""
    needs = {
        "nvidia-container-toolkit": ("nvidia-container-toolkit-base", "libnvidia-container-tools"),
        "libnvidia-container-tools": ("libnvidia-container1",),
    }
    for name in PACKAGES:
        depends = ", ".join(f"{one} (= {version})" for one in needs.get(name, ()))
        files = ("usr/bin/nvidia-ctk",) if name.endswith("-base") else ()
        extra = f"Depends: {depends}\n" if depends else ""
        script = postinst if name == "libnvidia-container1" else ""
        build(directory, name, version, files=files, extra=extra, postinst=script)


@dataclass(frozen=True)
class Repository:
    """A directory with NVIDIA's layout: `base` holds ``stable/deb/ARCH``."""

    base: Path
    signer: Signer

    @property
    def flat(self) -> Path:
        return self.base / "stable/deb" / architecture()

    @property
    def url(self) -> str:
        return f"file:{self.base}"

    @property
    def key(self) -> Path:
        path = self.base / "key.asc"
        path.write_bytes(self.signer.key)
        return path

    def index(self) -> None:
        """Write Packages and a signed InRelease for its packages."""
        stanzas = []
        for deb in sorted(self.flat.glob("*.deb")):
            fields = subprocess.run(
                ["dpkg-deb", "-f", str(deb)], capture_output=True, text=True, check=True
            ).stdout
            data = deb.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            stanzas.append(f"{fields}Filename: ./{deb.name}\nSize: {len(data)}\nSHA256: {digest}\n")
        packages = self.flat / "Packages"
        packages.write_text("\n".join(stanzas))
        data = packages.read_bytes()
        release = self.flat / "Release"
        release.write_text(
            "Origin: test\nLabel: test\nDate: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n"
            f" {hashlib.sha256(data).hexdigest()} {len(data)} Packages\n"
        )
        self.signer.clearsign(release, self.flat / "InRelease")


def make_repository(base: Path, signer: Signer, *versions: str) -> Repository:
    made = Repository(base, signer)
    made.flat.mkdir(parents=True)
    for version in versions:
        four(made.flat, version)
    made.index()
    return made


@dataclass(frozen=True)
class AptRoot:
    """One machine's package manager, below `root`."""

    root: Path

    @property
    def env(self) -> dict[str, str]:
        return {"APT_CONFIG": str(self.root / "apt.conf"), "GPUNODE_STATE_DIR": str(self.root / "state")}

    @property
    def sources(self) -> Path:
        return self.root / "etc/apt/sources.list.d"

    @property
    def ours(self) -> Path:
        return self.sources / "nvidia-container-toolkit.list"

    @property
    def key(self) -> Path:
        return self.root / "etc/apt/keyrings/nvidia-container-toolkit.asc"

    def gpunode(
        self,
        *argv: str,
        prefix: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
    ) -> Ran:
        environ = {**self.env, **(env or {})}
        space = alone() if {"remove", "reset"} & set(argv) and not prefix else ()
        return gpunode(*argv, env=environ, timeout=timeout, space=space, prefix=prefix)

    def json(self, *argv: str) -> dict[str, Any]:
        return self.gpunode(*argv, "-o", "json").document

    def installed(self) -> dict[str, str]:
        """dpkg's list, without gpunode."""
        form = r"${Package} ${Version} ${db:Status-Abbrev}\n"
        done = subprocess.run(
            ["dpkg-query", f"--admindir={self.root}/var/lib/dpkg", "-W", "-f", form],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        lines = (line.split() for line in done.stdout.splitlines())
        return {name: version for name, version, status in lines if status[1:] == "i"}

    def apt(self, *argv: str) -> str:
        env = {"APT_CONFIG": self.env["APT_CONFIG"], "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        return subprocess.run(["apt-get", *argv], env=env, capture_output=True, text=True, check=True).stdout

    def tree(self) -> dict[str, str]:
        """Files that a user would miss or find unexpected: apt's own files and those of packages."""
        digests = {}
        for place in ("etc", "usr"):
            for path in sorted((self.root / place).rglob("*")):
                if path.is_file():
                    digests[str(path.relative_to(self.root))] = hashlib.sha256(path.read_bytes()).hexdigest()
        return digests

    @contextmanager
    def locked(self, name: str = "lock-frontend") -> Iterator[subprocess.Popen[bytes]]:
        """Another running process: it holds dpkg's lock until its stdin ends."""
        path = self.root / "var/lib/dpkg" / name
        program = (
            "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); "
            "print(flush=True); sys.stdin.read()"
        )
        child = subprocess.Popen(
            ["python3", "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert child.stdin and child.stdout
        child.stdout.readline()
        try:
            yield child
        finally:
            child.stdin.close()
            child.wait()
            child.stdout.close()


def from_mirror(repository: Repository) -> tuple[str, ...]:
    """Options of `toolkit install`."""
    return ("--repository", repository.url, "--key", str(repository.key))


def make_root(root: Path) -> AptRoot:
    for directory in (
        *("etc/apt/sources.list.d", "etc/apt/preferences.d", "etc/apt/trusted.gpg.d", "etc/apt/apt.conf.d"),
        *("var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "var/log/apt"),
        *("var/lib/dpkg/info", "var/lib/dpkg/updates", "var/lib/dpkg/triggers", "usr"),
    ):
        (root / directory).mkdir(parents=True)
    (root / "var/lib/dpkg/status").touch()
    (root / "apt.conf").write_text(
        f'Dir "{root}";\nDir::State::status "{root}/var/lib/dpkg/status";\nDir::Log "{root}/var/log/apt";\n'
        f'DPkg::Options {{ "--root={root}"; "--log={root}/var/log/dpkg.log"; "--force-bad-path"; }};\n'
        'DPkg::Options { "--force-script-chrootless"; "--force-unsafe-io"; };\n'
        'APT::Sandbox::User "root";\nDPkg::Lock::Timeout "0";\nDPkg::Use-Pty "false";\n'
    )
    return AptRoot(root)


def journal(root: AptRoot) -> list[dict[str, Any]]:
    """The manifests, oldest first."""
    manifests = [
        json.loads(path.read_text()) for path in (root.root / "state/journal").glob("*/manifest.json")
    ]
    return sorted(manifests, key=lambda one: one["sequence"])
