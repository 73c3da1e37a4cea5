"""dnf and zypper for real: Debian has both, and here each finds a machine of its own kind.

A mount namespace mounts directories of the test over /etc, /var and /run, so that the programs run with their
own paths and options and nothing outside the test's directory is written. The packages' files are in /var.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli import Ran, gpunode
from tests.packages.apt_root import Signer

NEEDED = ("unshare", "rpm", "rpmbuild", "createrepo_c", "gpg")
OTHERS = "somebody-elses"
# each place of the machine is a directory of the test
_ENTER = (
    *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"),
    *("sh", "-c", 'for at in etc var run; do mount --bind "$0/$at" "/$at" || exit 99; done; exec "$@"'),
)
_KEPT = ("ld.so.cache", "passwd", "group", "rpm", "dnf", "zypp", "alternatives", "localtime")
_OS_RELEASE = {
    "dnf": 'ID="rhel"\nVERSION_ID="9.4"\nPRETTY_NAME="Red Hat Enterprise Linux 9.4"\n',
    "dnf5": 'ID="fedora"\nVERSION_ID="41"\nPRETTY_NAME="Fedora Linux 41"\n',
    "zypper": 'ID="sles"\nVERSION_ID="15.6"\nPRETTY_NAME="SUSE Linux Enterprise Server 15 SP6"\n',
}
_SPEC = """\
Name: libnvidia-container1
Version: {version}
Release: 1
Summary: stands in for NVIDIA's
License: none
%define empty %nil
%package -n libnvidia-container-tools
Summary: stands in
Requires: libnvidia-container1 = {version}-1
%package -n nvidia-container-toolkit-base
Summary: stands in
%package -n nvidia-container-toolkit
Summary: stands in
Requires: libnvidia-container-tools = {version}-1, nvidia-container-toolkit-base = {version}-1
%package -n {others}
Summary: of somebody else
%description
%description -n libnvidia-container-tools
%description -n nvidia-container-toolkit-base
%description -n nvidia-container-toolkit
%description -n {others}
%install
for name in {names}; do
  mkdir -p %{{buildroot}}/var/lib/$name
  echo "$name {version}" >%{{buildroot}}/var/lib/$name/version
done
"""


def _spec(version: str) -> str:
    names = (
        *("libnvidia-container1", "libnvidia-container-tools", "nvidia-container-toolkit-base"),
        *("nvidia-container-toolkit", OTHERS),
    )
    files = "".join(f"%files -n {name}\n/var/lib/{name}\n" for name in names)
    return _SPEC.format(version=version, others=OTHERS, names=" ".join(names)) + files


@dataclass(frozen=True)
class RpmRepository:
    """A directory with NVIDIA's layout: `base` holds ``stable/rpm/ARCH`` with a signed index."""

    base: Path
    key: Path

    @property
    def flat(self) -> Path:
        return self.base / "stable/rpm" / platform.machine()

    @property
    def url(self) -> str:
        return f"file://{self.base}"


def make_rpm_repository(base: Path, signer: Signer, *versions: str) -> RpmRepository:
    made = RpmRepository(base, base / "key.asc")
    made.flat.mkdir(parents=True)
    for version in versions:
        spec = base / f"{version}.spec"
        spec.write_text(_spec(version))
        defined = {
            "_topdir": str(base / "build"),
            "_rpmdir": str(base / "stable/rpm"),
            "_dbpath": str(base / "db"),
        }
        options = [word for name, value in defined.items() for word in ("--define", f"{name} {value}")]
        _run(["rpmbuild", "-bb", "--quiet", *options, "--target", platform.machine(), str(spec)])
    for path in made.flat.glob(f"{OTHERS}-*"):  # it was installed differently
        path.rename(base / path.name)
    _run(["createrepo_c", "--quiet", str(made.flat)])
    index = made.flat / "repodata/repomd.xml"
    index.with_suffix(".xml.asc").write_bytes(signer.detached(index))
    made.key.write_bytes(signer.key)
    return made


def _run(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"


@dataclass(frozen=True)
class RpmRoot:
    """One machine, whose /etc, /var and /run are below `root`."""

    root: Path

    @property
    def _enter(self) -> tuple[str, ...]:
        return (*_ENTER, str(self.root))

    @property
    def _env(self) -> dict[str, str]:
        return {"HOME": str(self.root / "home"), "PATH": f"/usr/sbin:/sbin:{os.environ['PATH']}"}

    def gpunode(self, *argv: str) -> Ran:
        return gpunode(*argv, env=self._env, prefix=self._enter)

    def json(self, *argv: str) -> dict[str, Any]:
        return self.gpunode(*argv, "-o", "json").document

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **self._env}
        return subprocess.run([*self._enter, *argv], env=env, capture_output=True, text=True, check=False)

    def installed(self) -> dict[str, str]:
        """rpm's list, without gpunode; keys left out."""
        lines = self.run("rpm", "-qa", "--qf", r"%{NAME} %{EVR}\n").stdout.splitlines()
        return {name: version for name, version in map(str.split, lines) if name != "gpg-pubkey"}

    def settings(self) -> dict[str, bytes]:
        """Everything in /etc."""
        files = (path for path in (self.root / "etc").rglob("*") if path.is_file() and not path.is_symlink())
        return {str(path): path.read_bytes() for path in files}


def make_rpm_root(root: Path, manager: str, others: Path) -> RpmRoot:
    """With one foreign package: zypper can't describe a machine that has none."""
    for name in ("etc", "var/lib/rpm", "var/tmp", "var/log", "var/cache", "run/lock", "home"):
        (root / name).mkdir(parents=True)
    for name in _KEPT:
        path = Path("/etc") / name
        if path.is_dir():
            unasked = shutil.ignore_patterns("local.conf")  # Debian's plugin that offers what was downloaded
            shutil.copytree(path, root / "etc" / name, symlinks=True, ignore=unasked)
        elif path.exists():
            shutil.copy(path, root / "etc" / name)
    (root / "etc/os-release").write_text(_OS_RELEASE[manager])
    (root / "home/.rpmmacros").write_text(
        "%_dbpath /var/lib/rpm\n"
    )  # Debian's rpm has a user's own by default
    made = RpmRoot(root)
    done = made.run("rpm", "-i", "--nodeps", str(others))
    assert done.returncode == 0, done.stderr
    return made
