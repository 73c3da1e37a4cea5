"""Lay out gpunode's files for the image: ``python3 -I image_root.py BUNDLE ROOT``, run by the Dockerfile.

BUNDLE is the unpacked offline bundle, ROOT the directory that becomes the image's last layer. The Python that
runs this is the image's own: ROOT/opt/gpunode becomes a virtual environment of it, as choose-python makes one
on a node.

Bytecode is made here, since the image is read-only when it runs: of gpunode, of what it imports, and of those
modules of the standard library too, of which Debian's packages have none. It isn't compared with its source,
and no file has a time: every build gives the same layer.
"""

import ast
import importlib
import os
import py_compile
import shutil
import subprocess
import sys
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path

_UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH


def install(bundle: Path, root: Path) -> None:
    """The virtual environment ROOT/opt/gpunode, the program and the licence."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    libraries, prefix = bundle / "opt/gpunode/lib", root / "opt/gpunode"
    if not (libraries / version).is_dir():
        supported = ", ".join(sorted(path.name for path in libraries.glob("python*")))
        sys.exit(f"error: the base image has {version}; gpunode needs one of {supported}")
    for name in (version, "shared"):
        shutil.copytree(libraries / name, prefix / "lib" / name)
    for directory in (prefix / "bin", root / "usr/local/bin", root / "usr/share/doc/gpunode"):
        directory.mkdir(parents=True)
    shutil.copy(bundle / "opt/gpunode/bin/gpunode", prefix / "bin")
    (prefix / "bin/python3").symlink_to(sys.executable)
    home = Path(sys.executable).parent
    (prefix / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\n")
    (root / "usr/local/bin/gpunode").symlink_to("/opt/gpunode/bin/gpunode")
    shutil.copy(bundle / "LICENSE", root / "usr/share/doc/gpunode/copyright")


def imported_files() -> list[str]:
    """Source files of all modules that gpunode and its dependencies import, gpunode in functions too."""
    import gpunode

    own, imported = set(), set()
    for package in gpunode.__path__:
        for file in Path(package).rglob("*.py"):
            module = ".".join(("gpunode", *file.relative_to(package).with_suffix("").parts))
            own.add(module.removesuffix(".__init__"))
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    for name in sorted(own):
        importlib.import_module(name)
    for name in sorted(imported):
        with suppress(ImportError):  # a name in a module, which is imported now
            importlib.import_module(name)
    modules = [module for name, module in sys.modules.items() if name != "__main__"]
    files = (getattr(module, "__file__", None) or "" for module in modules)
    return sorted({file for file in files if file.endswith(".py")})


def compile_imported(root: Path) -> None:
    """Bytecode in ROOT for what gpunode imports in its new environment."""
    argv = [str(root / "opt/gpunode/bin/python3"), "-IB", __file__]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit("error: gpunode does not run with the Python of the base image")
    for file in done.stdout.splitlines():
        installed = file.removeprefix(str(root))
        target = f"{root}{cache_from_source(installed)}"
        py_compile.compile(file, target, installed, doraise=True, invalidation_mode=_UNCHECKED)


def normalise(root: Path) -> None:
    """Give every file the time 0 and the mode of a system's file, whatever the umask was that unpacked it."""
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        os.utime(path, (0, 0), follow_symlinks=False)


def main() -> None:
    if len(sys.argv) == 1:
        print("\n".join(imported_files()))
        return
    os.umask(0o022)
    bundle, root = map(Path, sys.argv[1:])
    install(bundle, root)
    compile_imported(root)
    normalise(root)


if __name__ == "__main__":
    main()
