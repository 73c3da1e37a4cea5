"""Checks of podman, which has no daemon and gets GPUs only through CDI specifications."""

from __future__ import annotations

from gpunode.checks.finding import Evidence, Fix
from gpunode.checks.fixes import package_fix
from gpunode.checks.model import Verdict, check, fail, if_used, ok, seen, skip
from gpunode.errors import ConfigError
from gpunode.facts import tables
from gpunode.facts.cdi import DIRECTORIES
from gpunode.facts.daemons import Daemon
from gpunode.facts.node import Node
from gpunode.facts.podman import PodmanConfig
from gpunode.facts.toolkit import SYSTEM_DIRECTORIES, nvidia_hooks

_KEY = "cdi_spec_dirs"
_DROP_IN = "/etc/containers/containers.conf.d/99-cdi.conf"


@check(
    "podman-cdi",
    title="Podman reads the CDI specification",
    looks_at=f"podman's release and {_KEY} in containers.conf against the directories of the "
    "specifications, if podman is the only engine.",
    fix=package_fix("upgrade", ["podman"] * 3, "follow https://podman.io/docs/installation"),
    blocked_by=("pci-no-gpu", "toolkit-missing", "cdi-spec-missing"),
    preflight=("podman",),
    refs=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/cdi-support.html",),
    table=tables.TABLE,
)
@if_used("podman")
def podman_cdi(node: Node, daemon: Daemon) -> Verdict:
    """Podman gets GPUs through CDI: without it containers fail with 'unresolvable CDI devices'."""
    release = daemon.release
    if tables.can("podman", "cdi", daemon.version) is False:
        if nvidia_hooks(node.host, (*SYSTEM_DIRECTORIES, *hooks_dir(node))):
            return ok(f"podman {release} doesn't support CDI and gets GPUs through an OCI hook")
        text = f"podman {release} doesn't support CDI, which was added in {tables.first('podman', 'cdi')}"
        return fail(text, seen(daemon.binary or "podman", release))
    specs = [spec.path for spec in node.gpu_specs]
    try:
        directories = _directories(node.podman_files, daemon.version)
    except ConfigError:
        return skip("podman's files can't be parsed, so podman ignores them")
    here = {node.host.realpath(directory) for directory in directories}
    unread = [path for path in specs if node.host.realpath(path.rpartition("/")[0]) not in here]
    if not unread or len(unread) < len(specs):
        return ok(f"podman reads specifications in {', '.join(directories)}")
    evidence = (
        _place(node.podman_files, release),
        *(seen(path, "podman doesn't read this directory") for path in unread),
    )
    every_directory = tuple(dict.fromkeys((*directories, *(path.rpartition("/")[0] for path in unread))))
    listed = ", ".join(f'"{directory}"' for directory in every_directory)
    text = f"[engine]\\n{_KEY} = [{listed}]\\n"
    fix = Fix(f"mkdir -p {_DROP_IN.rpartition('/')[0]} && printf '{text}' > {_DROP_IN}")
    return fail(f"podman {release} doesn't read the directory of the CDI specification", *evidence, fix=fix)


def _directories(files: PodmanConfig, version: tuple[int, ...]) -> tuple[str, ...]:
    """Directories that this release reads: only newer ones use the setting, and 5.5 forgot one of the two."""
    settable = tables.can("podman", "cdi-spec-dirs", version)
    directories = tuple(string.rstrip("/") for string in files.strings(_KEY))
    if settable and directories:
        return directories
    forgot = settable and not tables.can("podman", "cdi-both-directories", version)
    return DIRECTORIES[:1] if forgot else DIRECTORIES


def hooks_dir(node: Node) -> tuple[str, ...]:
    """Directories where podman looks for OCI hooks; it ignores a file that it can't parse."""
    try:
        return node.podman_files.strings("hooks_dir")
    except ConfigError:
        return ()


def _place(files: PodmanConfig, release: str) -> Evidence:
    """Position in the last file that names the directories."""
    for file in reversed(files.files):
        lines = enumerate(file.text.splitlines(), start=1)
        number = next((number for number, line in lines if line.strip().startswith(_KEY)), None)
        if number:
            return seen(file.path, f"{_KEY} = {list(files.strings(_KEY))}", number)
    return seen(f"podman {release}", f"reads only {DIRECTORIES[0]}")
