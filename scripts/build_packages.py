"""Distribution of gpunode: wheel and sdist, .deb, .rpm, offline bundle, Ansible collection, all into dist/.

``python scripts/build_packages.py [--output DIR] [--version VERSION]... [--fast] [KIND...]`` with the kinds
python, deb, rpm, bundle and ansible; without one, all of them.

The packages and the bundle hold the same tree, /opt/gpunode: the libraries for each supported Python, those
that are the same for all in lib/shared. packaging/choose-python makes it a virtual environment of the
system's own Python when it is installed, so one package fits every distribution.
"""

from __future__ import annotations

import argparse
import filecmp
import gzip
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from gpunode import __version__  # noqa: E402
from scripts import man_pages  # noqa: E402

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
KINDS = ("python", "deb", "rpm", "bundle", "ansible")
UNITS = ("gpunode-device-plugin.service", "gpunode-doctor.service", "gpunode-doctor.timer")
COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/gpunode",
    "zsh": "usr/share/zsh/vendor-completions/_gpunode",
    "fish": "usr/share/fish/vendor_completions.d/gpunode.fish",
}
_CONSTRAINTS = REPOSITORY / "constraints.txt"
_PACKAGING = REPOSITORY / "packaging"
_SUMMARY = "GPUs for containers and Kubernetes pods on one Linux node"
_DESCRIPTION = """\
gpunode configures container engines and Kubernetes for the GPUs of one node,
proves that they work, and reports the cause when they don't."""
# manylinux tags of which wheels for x86_64 are built; the newest needs glibc 2.28 (RHEL 8, Debian 10)
_PLATFORMS = tuple(f"manylinux{tag}_x86_64" for tag in ("_2_28", "_2_17", "2014", "_2_5"))


def run(*argv: str | Path, env: Mapping[str, str] | None = None) -> str:
    """Output of a program that must succeed, with `env` in addition to the environment."""
    words, environ = [str(word) for word in argv], {**os.environ, **(env or {})}
    done = subprocess.run(words, cwd=REPOSITORY, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, argv))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def wheel(output: Path) -> Path:
    """gpunode's own wheel."""
    run(sys.executable, "-m", "build", "--wheel", "--outdir", output)
    return next(output.glob("gpunode-*.whl"))


def libraries(wheel_file: Path, directory: Path) -> None:
    """Fill `place`/lib with gpunode and its dependencies for every Python of `PYTHONS`."""
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    sites = {version: directory / f"lib/python{version}/site-packages" for version in PYTHONS}
    for version, site in sites.items():
        constraints = directory / f"constraints-{version}.txt"
        write(constraints, constraints_for(version))
        target = ["--target", str(site), "--implementation", "cp", "--python-version", version, *platforms]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        pip += ["--no-compile", "--only-binary=:all:", "--constraint", str(constraints), *target]
        run(*pip, f"{wheel_file}[all]")
        while missing := left_out(site, version):
            run(*pip, "--no-deps", *missing)
        # scripts, and where the wheel was: with this machine's paths
        shutil.rmtree(site / "bin", ignore_errors=True)
        next(site.glob("gpunode-*.dist-info/direct_url.json")).unlink()
        constraints.unlink()
    share(list(sites.values()), directory / "lib/shared")


def constraints_for(version: str) -> str:
    """The lines of constraints.txt for this Python, without their markers (see `left_out`)."""
    python = {"python_version": version, "python_full_version": f"{version}.0"}
    lines = [line for line in _CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    pinned = map(Requirement, lines)
    return "".join(
        f"{requirement.name}{requirement.specifier}\n"
        for requirement in pinned
        if not requirement.marker or requirement.marker.evaluate(python)
    )


def left_out(site: Path, version: str) -> list[str]:
    """What the distributions in `site` require with this Python only, such as tomli with 3.10.

    pip evaluates markers for the Python that runs it, whatever its --python-version.
    """
    python = {"python_version": version, "python_full_version": f"{version}.0", "extra": ""}
    installed = {
        canonicalize_name(distribution.metadata["Name"]) for distribution in distributions(path=[str(site)])
    }
    needed = [
        Requirement(text)
        for distribution in distributions(path=[str(site)])
        for text in distribution.requires or ()
    ]
    return [
        f"{requirement.name}{requirement.specifier}"
        for requirement in needed
        if requirement.marker
        and requirement.marker.evaluate(python)
        and canonicalize_name(requirement.name) not in installed
    ]


def share(sites: list[Path], shared: Path) -> None:
    """Move files that are equal in all `sites` to one directory, which a .pth file adds to each of them."""
    shared.mkdir(parents=True)
    first, *others = sites
    for entry in sorted(first.iterdir()):
        if all(same(entry, other_site / entry.name) for other_site in others):
            shutil.move(str(entry), shared / entry.name)
            for other_site in others:
                remove(other_site / entry.name)
    for site in sites:
        (site / "shared.pth").write_text(f"{os.path.relpath(shared, site)}\n")


def same(path: Path, other_path: Path) -> bool:
    """Whether two files, or two directories with everything in them, are equal."""
    if not other_path.exists():
        return False
    if path.is_file():
        return other_path.is_file() and filecmp.cmp(path, other_path, shallow=False)
    names = {path.name for path in path.iterdir()}
    return names == {path.name for path in other_path.iterdir()} and all(
        same(path / name, other_path / name) for name in names
    )


def remove(path: Path) -> None:
    """Remove a file, or a directory with everything in it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def write(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write a file and the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)


def unit(name: str, program: str) -> str:
    """A systemd unit that runs this `program`."""
    text = (_PACKAGING / name).read_text()
    body = text[text.index("[Unit]") :]  # without the comment on installing it manually
    return body.replace("/usr/local/bin/gpunode", program)


def manual_pages() -> dict[str, bytes]:
    """Compressed manual pages by file name; no time in them, so that each build gives the same bytes."""
    return {f"{name}.gz": gzip.compress(text.encode(), mtime=0) for name, text in man_pages.pages().items()}


def opt_tree(root: Path, wheel_file: Path) -> None:
    """`root`/opt/gpunode."""
    libraries(wheel_file, root / "opt/gpunode")
    write(root / "opt/gpunode/bin/gpunode", (_PACKAGING / "gpunode").read_text(), 0o755)
    write(root / "opt/gpunode/warn-of-changes", (_PACKAGING / "warn-of-changes").read_text(), 0o755)


def system_tree(root: Path) -> None:
    """Everything outside /opt/gpunode that the deb and the rpm have."""
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/gpunode").symlink_to("../../opt/gpunode/bin/gpunode")
    write(root / "opt/gpunode/choose-python", (_PACKAGING / "choose-python").read_text(), 0o755)
    for name in UNITS:
        write(root / f"usr/lib/systemd/system/{name}", unit(name, "/usr/bin/gpunode"))
    for name, page in manual_pages().items():
        write(root / f"usr/share/man/man1/{name}", page)
    for shell, path in COMPLETIONS.items():
        write(root / path, run(sys.executable, "-m", "gpunode", "completion", shell))
    write(root / "etc/gpunode/env", (_PACKAGING / "env").read_text())
    write(root / "usr/share/doc/gpunode/copyright", (REPOSITORY / "LICENSE").read_text())
    write(root / "usr/share/doc/gpunode/gpunode-device-plugin-mps.conf", mps_drop_in())


def mps_drop_in() -> str:
    """The drop-in for `plugin serve --mps`."""
    return (_PACKAGING / "gpunode-device-plugin-mps.conf").read_text()


_ANY = [f"python{version}" for version in PYTHONS]
_NEXT = f"3.{int(PYTHONS[-1].partition('.')[2]) + 1}"  # the first Python that has no libraries here


# --- deb ------------------------------------------------------------------------------------------------

_CONTROL = """\
Package: gpunode
Version: {version}
Architecture: amd64
Maintainer: gpunode maintainers <gpunode@example.invalid>
Installed-Size: {size}
Depends: {depends}
Section: admin
Priority: optional
Description: {summary}
 {description}
"""
# a supported python3 or one of the others; python3 of jammy is 3.10.6-1, of a release candidate 3.15.0~rc1
DEPENDS = ", ".join(
    " | ".join((f"python3 ({bound})", *_ANY)) for bound in (f">= {PYTHONS[0]}", f"<< {_NEXT}~")
)
# try-restart: only a plugin that runs, so that the kubelet gets the new version's devices within seconds
_POSTINST = """\
#!/bin/sh
set -e
if [ "$1" = configure ]; then
    /opt/gpunode/choose-python
    if [ -d /run/systemd/system ]; then
        systemctl daemon-reload
        systemctl try-restart gpunode-device-plugin.service gpunode-doctor.timer || true
    fi
fi
"""
# a virtual environment there would be run instead of the package's files, and be removed with the package
_PREINST = """\
#!/bin/sh
set -e
if [ -e /opt/gpunode/pyvenv.cfg ] && ! grep -qsx /opt/gpunode /var/lib/dpkg/info/gpunode.list; then
    echo "error: /opt/gpunode exists and does not belong to this package" >&2
    echo "hint: move it away, then install the package again" >&2
    exit 1
fi
"""
_PRERM = """\
#!/bin/sh
set -e
if [ "$1" = remove ]; then
    if [ -d /run/systemd/system ]; then
        systemctl disable --now gpunode-device-plugin.service gpunode-doctor.timer || true
    fi
    /opt/gpunode/warn-of-changes || true
fi
"""
_POSTRM = """\
#!/bin/sh
set -e
if [ "$1" = remove ]; then
    rm -rf /opt/gpunode # choose-python's files and bytecode; dpkg has removed its own
    [ ! -d /run/systemd/system ] || systemctl daemon-reload
fi
# the journal and our settings, unless gpunode was installed otherwise since; what the engines read stays
if [ "$1" = purge ] && [ ! -e /opt/gpunode ]; then
    rm -rf /var/lib/gpunode /etc/gpunode
fi
"""


def deb(root: Path, output: Path, version: str, fast: bool = False) -> Path:
    """A Debian package of the tree; see deb-control(5)."""
    scripts = {"preinst": _PREINST, "postinst": _POSTINST, "prerm": _PRERM, "postrm": _POSTRM}
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) // 1024
    description = _DESCRIPTION.replace("\n", "\n ")
    control = _CONTROL.format(
        version=version, size=size, depends=DEPENDS, summary=_SUMMARY, description=description
    )
    write(root / "DEBIAN/control", control)
    write(root / "DEBIAN/conffiles", "/etc/gpunode/env\n")
    for name, text in scripts.items():
        write(root / f"DEBIAN/{name}", text, 0o755)
    package = output / f"gpunode_{version}_amd64.deb"
    # dpkg of Debian 12 and Ubuntu 22.04, the oldest with a supported Python, unpacks it
    run("dpkg-deb", "--root-owner-group", "-Zzstd", "-z1" if fast else "-z6", "--build", root, package)
    shutil.rmtree(root / "DEBIAN")
    return package


# --- rpm ------------------------------------------------------------------------------------------------

_SPEC = """\
Name: gpunode
Version: {version}
Release: 1
Summary: {summary}
License: Apache-2.0
AutoReqProv: no
Requires: ({requires})
%description
{description}
%install
cp -a {root}/. %{{buildroot}}/
%files
/opt/gpunode
%dir /usr/share/doc/gpunode
%config(noreplace) /etc/gpunode/env
{files}
%pre
if [ "$1" = 1 ] && [ -e /opt/gpunode/pyvenv.cfg ]; then
    echo "error: /opt/gpunode exists and does not belong to this package" >&2
    echo "hint: move it away, then install the package again" >&2
    exit 1
fi
%post
/opt/gpunode/choose-python
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    systemctl try-restart gpunode-device-plugin.service gpunode-doctor.timer || :
fi
%preun
if [ "$1" = 0 ]; then
    if [ -d /run/systemd/system ]; then
        systemctl disable --now gpunode-device-plugin.service gpunode-doctor.timer || :
    fi
    /opt/gpunode/warn-of-changes || :
fi
%postun
if [ "$1" = 0 ]; then
    rm -rf /opt/gpunode
    [ ! -d /run/systemd/system ] || systemctl daemon-reload
fi
"""


REQUIRES = " or ".join((f"(python3 >= {PYTHONS[0]} with python3 < {_NEXT})", *_ANY))


# libmagic(3) compares each file with all that it knows, which is half of the build, for nothing but the tag
# FILECLASS and the word size of programs
_MAGIC = "0\tstring\t\\177ELF\tELF\n>4\tbyte\t2\t64-bit\n"


def rpm(root: Path, output: Path, version: str, fast: bool = False) -> Path:
    """An rpm of the tree, built without the distribution's own post-processing."""
    listed = (path for path in (root / "usr").rglob("*") if not path.is_dir() or path.is_symlink())
    files = "\n".join(f"/{path.relative_to(root)}" for path in sorted(listed))
    with tempfile.TemporaryDirectory(prefix="gpunode-") as name:
        spec = Path(name) / "gpunode.spec"
        texts = {"summary": _SUMMARY, "requires": REQUIRES, "description": _DESCRIPTION}
        spec.write_text(_SPEC.format(version=version, root=root, files=files, **texts))
        macros = {
            "_topdir": name,
            "_rpmdir": str(output),
            "_build_name_fmt": f"gpunode-{version}-1.x86_64.rpm",
            "__os_install_post": "%{nil}",
            "_build_id_links": "none",
            "debug_package": "%{nil}",
            "_binary_payload": "w1.zstdio" if fast else "w3.zstdio",
        }
        magic = Path(name) / "magic"
        magic.write_text(_MAGIC)
        defined = [word for key, value in macros.items() for word in ("--define", f"{key} {value}")]
        env = {"MAGIC": str(magic)} if fast else {}
        run("rpmbuild", "-bb", "--target", "x86_64", *defined, spec, env=env)
    return output / f"gpunode-{version}-1.x86_64.rpm"


# --- offline bundle -------------------------------------------------------------------------------------


def bundle(opt: Path, output: Path, version: str, fast: bool = False) -> Path:
    """A tar archive with the tree and install.sh, which needs nothing but a supported Python. With its
    Dockerfile it is the context of the container image, too."""
    name = f"gpunode-{version}-linux-x86_64"
    with tempfile.TemporaryDirectory(prefix="gpunode-") as directory:
        top = Path(directory) / name
        shutil.copytree(opt / "opt/gpunode", top / "opt/gpunode", symlinks=True)
        for program in ("install.sh", "choose-python"):
            write(top / program, (_PACKAGING / program).read_text(), 0o755)
        for unit_name in UNITS:
            write(top / f"units/{unit_name}", unit(unit_name, "/usr/local/bin/gpunode"))
        for page, content in manual_pages().items():
            write(top / f"man/{page}", content)
        write(top / "env", (_PACKAGING / "env").read_text())
        write(top / "LICENSE", (REPOSITORY / "LICENSE").read_text())
        dockerfile = (_PACKAGING / "Dockerfile").read_text()
        write(top / "Dockerfile", dockerfile.replace("ARG VERSION=", f"ARG VERSION={version}"))
        write(top / "image_root.py", (_PACKAGING / "image_root.py").read_text())
        archive = output / f"{name}.tar.gz"
        with tarfile.open(archive, "w:gz", compresslevel=1 if fast else 6) as tar:
            tar.add(top, arcname=name, filter=_root_owned)
    return archive


def _root_owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def collection(output: Path) -> Path:
    """The Ansible collection gpunode.node, with the license that its files name."""
    with tempfile.TemporaryDirectory(prefix="gpunode-") as place:
        top = Path(place) / "collection"
        shutil.copytree(_PACKAGING / "ansible", top)
        write(top / "LICENSE", (REPOSITORY / "LICENSE").read_text())
        galaxy = Path(sys.executable).parent / "ansible-galaxy"
        run(galaxy, "collection", "build", top, "--output-path", output, "--force")
    return output / f"gpunode-node-{__version__}.tar.gz"


def build(kinds: Iterable[str], output: Path, versions: Iterable[str] = (), fast: bool = False) -> list[Path]:
    """Files made in `output`, which is created. `versions` are those of the deb and the rpm, else gpunode's
    own: a test of upgrades needs two. With `fast`, for tests, the same files are compressed less."""
    output.mkdir(parents=True, exist_ok=True)
    artifacts: list[Path] = []
    with tempfile.TemporaryDirectory(prefix="gpunode-") as name:
        directory = Path(name)
        if "python" in kinds:
            run(sys.executable, "-m", "build", "--outdir", output)
            artifacts += sorted(output.glob(f"gpunode-{__version__}[-.]*"))
        if "ansible" in kinds:
            artifacts.append(collection(output))
        if set(kinds) & {"deb", "rpm", "bundle"}:
            root = directory / "root"
            built = next(output.glob(f"gpunode-{__version__}-*.whl"), None) if "python" in kinds else None
            opt_tree(root, built or wheel(directory / "wheel"))
            if "bundle" in kinds:
                artifacts.append(bundle(root, output, __version__, fast))
            system_tree(root)
            for version in tuple(versions) or (__version__,):
                artifacts += [deb(root, output, version, fast)] if "deb" in kinds else []
                artifacts += [rpm(root, output, version, fast)] if "rpm" in kinds else []
    return artifacts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--output", type=Path, default=REPOSITORY / "dist")
    parser.add_argument("--version", action="append", help="of the deb and the rpm; can be repeated")
    parser.add_argument("--fast", action="store_true", help="compress little, for tests")
    options = parser.parse_args()
    os.umask(0o022)
    for path in build(options.kinds or KINDS, options.output.resolve(), options.version or (), options.fast):
        print(f"{path} ({path.stat().st_size / 2**20:.1f} MiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
