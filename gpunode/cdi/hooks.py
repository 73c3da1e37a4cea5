"""NVIDIA's hook program: whether it is installed, and the hooks of this release."""

from __future__ import annotations

import re
from collections.abc import Iterable
from posixpath import dirname, relpath
from typing import NamedTuple

from gpunode.cdi.driver_files import DriverFiles
from gpunode.cdi.spec import Hook
from gpunode.facts.toolkit import hook_program
from gpunode.host import Host

HOOK_NAMES = (
    *("create-symlinks", "enable-cuda-compat", "update-ldcache", "disable-device-node-modification"),
    "update-application-profile",
)
_SECONDS = 5.0
# an Ubuntu /sbin/ldconfig is a script around this one, which can't run in a container
_LDCONFIG_REAL = "/sbin/ldconfig.real"


class HookProgram(NamedTuple):
    """`argv` is how a specification calls a hook, such as ``nvidia-cdi-hook`` or ``nvidia-ctk hook``; `path`
    is absolute.

    `known` are the hooks that this release has. `ldconfig` is the program for update-ldcache, "" for its own
    default.
    """

    path: str
    argv: tuple[str, ...]
    known: frozenset[str]
    ldconfig: str = ""


def find_hooks(host: Host) -> HookProgram | None:
    """Query the installed program for its hooks; None if there is none, or if it lacks a hook without which a
    container finds no library.

    nvidia-cdi-hook exists since toolkit 1.16; before, its function was ``nvidia-ctk hook``.
    """
    for name in ("nvidia-cdi-hook", "nvidia-ctk"):
        path = hook_program(host, name)
        program = query_hooks(host, path) if path else None
        if program is not None:
            return program
    return None


def query_hooks(host: Host, path: str, root: str = "") -> HookProgram | None:
    """The hooks of the program at `path`, which this process sees below `root`; None as above.

    A program with nvidia-ctk's name has them as subcommands of ``hook``.
    """
    name = path.rpartition("/")[2]
    words = ("hook",) if name == "nvidia-ctk" else ()
    if not host.executable(f"{root}{path}"):
        return None
    answer = host.run([f"{root}{path}", *words, "--help"], timeout=_SECONDS)
    known = commands_in(answer.stdout) if answer.ok else frozenset()
    if "update-ldcache" not in known:
        return None
    ldconfig = _LDCONFIG_REAL if host.executable(f"{root}{_LDCONFIG_REAL}") else ""
    return HookProgram(path, (name, *words), known, ldconfig)


def commands_in(text: str) -> frozenset[str]:
    """Sub-commands in a help text: the first word of each line in its section COMMANDS, aliases included."""
    _, _, section = text.partition("COMMANDS:")
    section = re.split(r"\n(?=\S)", section, maxsplit=1)[0]
    lines = (
        re.match(r"\s+([a-z][\w-]*(?:, [a-z][\w-]*)*)(?:\s{2,}|\s*$)", line) for line in section.splitlines()
    )
    return frozenset(word for line in lines if line for word in line[1].split(", "))


def hooks_for(program: HookProgram, files: DriverFiles, folders: tuple[str, ...]) -> tuple[Hook, ...]:
    """NVIDIA's hooks in NVIDIA's order, limited to those that the program has."""
    desired: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("enable-cuda-compat", (f"--host-driver-version={files.version}",)),
        (
            "update-ldcache",
            (
                *(("--ldconfig-path", program.ldconfig) if program.ldconfig else ()),
                *(word for folder in folders for word in ("--folder", folder)),
            ),
        ),
        ("disable-device-node-modification", ()),
        ("update-application-profile", ()),
    )
    rest = (_hook(program, name, arguments) for name, arguments in desired if name in program.known)
    return (*link_hook(program, _links(files)), *rest)


def link_hook(program: HookProgram, links: Iterable[str]) -> tuple[Hook, ...]:
    """The hook that makes these links (``target::link``) in the container; none without links."""
    words = tuple(word for link in links for word in ("--link", link))
    known = "create-symlinks" in program.known
    return (_hook(program, "create-symlinks", words),) if words and known else ()


def _hook(program: HookProgram, name: str, arguments: tuple[str, ...]) -> Hook:
    return Hook(program.path, (*program.argv, name, *arguments), ("NVIDIA_CTK_DEBUG=false",))


def _links(files: DriverFiles) -> list[str]:
    """``target::link`` for every other name of a library, in the form that create-symlinks reads."""
    links = []
    for library in files.libraries:
        for link in (f"{library.directory}/{name}" for name in library.links):
            if link != library.path:
                links.append(f"{relpath(library.path, dirname(link))}::{link}")
    return sorted(links)
