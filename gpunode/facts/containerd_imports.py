"""Which files containerd's `imports` mean.

After containerd's own source, ``resolveImports``: a pattern is relative to the file that it stands in, only a
``*`` makes it a glob, and a glob is Go's (``[^a]`` negates, a backslash takes the next character as it is).
"""

from __future__ import annotations

import posixpath
import re

from gpunode.host import Host

Release = tuple[int, ...]
# before these a relative glob was relative to the daemon's working directory, which systemd makes /
_GLOB_BESIDE_FILE: dict[Release, Release] = {(1, 6): (1, 6, 29), (1, 7): (1, 7, 16)}


def import_base(importer: str, pattern: str, release: Release = ()) -> str:
    """An import as an absolute path or glob."""
    directory = importer.rpartition("/")[0]
    since = _GLOB_BESIDE_FILE.get(release[:2])
    if "*" in pattern and since is not None and release < since:
        directory = ""
    base = posixpath.normpath(pattern if pattern.startswith("/") else f"{directory}/{pattern}")
    return "/" + base.lstrip("/")


def expand_import(host: Host, importer: str, pattern: str, release: Release = ()) -> tuple[str, ...]:
    """Files that one import means; the one of a plain path need not exist."""
    base = import_base(importer, pattern, release)
    if "*" not in base:
        return (base,)
    found = [""]
    for part in base.strip("/").split("/"):
        if re.search(r"[*?\[\\]", part):
            found = [
                f"{parent}/{name}"
                for parent in found
                for name in host.listdir(parent or "/")
                if _matches(part, name)
            ]
        else:
            found = [f"{parent}/{part}" for parent in found]
    return tuple(path for path in found if host.is_file(path))


def covers(importer: str, pattern: str, path: str, release: Release = ()) -> bool:
    """Whether an import would read `path`, which need not exist."""
    base = import_base(importer, pattern, release)
    if "*" not in base:
        return base == posixpath.normpath(path)
    return _matches(base, posixpath.normpath(path))


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(_go_glob(pattern), name) is not None
    except re.error:  # a range backwards: containerd matches nothing with it either
        return False


def _go_glob(pattern: str) -> str:
    """A pattern of Go's filepath.Match as a regular expression; a broken class matches nothing."""
    out, rest = "", pattern
    while rest:
        char, rest = rest[0], rest[1:]
        if char == "*":
            out += "[^/]*"
        elif char == "?":
            out += "[^/]"
        elif char == "\\" and rest:
            out, rest = out + re.escape(rest[0]), rest[1:]
        elif char == "[":
            found = re.match(r"(\^?)((?:\\.|[^\]\\])+)\]", rest)
            if found is None:
                return r"(?!)"
            out += f"[{found[1]}{found[2].replace('[', chr(92) + '[')}]"
            rest = rest[found.end() :]
        else:
            out += re.escape(char)
    return out
