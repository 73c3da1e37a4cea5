"""CRI-O's files: what it reads without anybody meaning it, hooks, and a CRI-O that nobody uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpunode.checks.crio import remedies
from gpunode.checks.crio.handlers import hook_directories, nvidia_handlers, running_runtime, unreadable
from gpunode.checks.model import Check, Verdict, fail, note, ok, seen, skip, warn
from gpunode.errors import ConfigError, DaemonError
from gpunode.facts.engines import crio_role
from gpunode.facts.gpu_ways import taken_way
from gpunode.facts.node import Node
from gpunode.facts.oci_hooks import SYSTEM_DIRECTORIES, nvidia_hooks
from gpunode.result import Fix
from gpunode.support.redact import shown_arguments

if TYPE_CHECKING:
    from gpunode.facts.crio import CrioConfig, CrioFile

# what editors, package managers and people call a copy; OpenShift's own files have no ending at all
_COPIES = (
    ".bak",
    ".backup",
    ".orig",
    ".old",
    ".save",
    ".disabled",
    ".swp",
    ".rpmsave",
    ".rpmnew",
    ".rpmorig",
    "~",
)
_IN_THE_MIDDLE = (".conf.", ".toml.", ".dpkg-")


def crio_stray_dropin(node: Node) -> Verdict:
    role = crio_role(node)
    if node.crio is None or not role.used:
        return skip(role.reason)
    try:
        files = node.crio_files
    except ConfigError as error:
        place, edit = unreadable(error)
        return warn("CRI-O can't read its files and won't start again", place, fix=edit)
    if files is None:
        return skip("CRI-O has no files")
    return _stray(files) or _twice(files) or ok(f"CRI-O reads {len(files.files)} files, all of them meant")


def _stray(files: CrioConfig) -> Verdict | None:
    """A file in the directory counts whatever its name is; one that sets nothing does no harm."""
    stray = [
        file
        for file in files.files
        if file.path != files.path and _copy(file.path.rpartition("/")[2]) and file.tree.get("crio")
    ]
    if not stray:
        return None
    evidence = (seen(file.path, _settings(file)) for file in stray)
    fix = remedies.move(tuple(file.path for file in stray), f"{files.directory}.unused")
    names = ", ".join(file.path.rpartition("/")[2] for file in stray)
    return warn(f"CRI-O reads {names}: a file of any name in its directory counts", *evidence, fix=fix)


def _copy(name: str) -> bool:
    if name.startswith((".", "#")) or name.endswith(_COPIES):
        return True
    return any(part in name for part in _IN_THE_MIDDLE)


def _settings(file: CrioFile) -> str:
    handlers = ", ".join(file.handlers)
    others = ", ".join(key for key in file.runtime if key != "runtimes")
    return f"handlers {handlers}" if handlers else f"sets {others or 'settings outside crio.runtime'}"


def _twice(files: CrioConfig) -> Verdict | None:
    from gpunode.facts.crio_programs import is_nvidias

    for name, table in files.handlers.items():
        defining = files.defines(name)
        differ = any(file.handlers[name] != table for file in defining)
        if is_nvidias(name, table) and len(defining) > 1 and differ:
            evidence = (seen(file.path, f'handler "{name}"', file.line_of(name)) for file in defining)
            older = tuple(file.path for file in defining[:-1] if file.path != files.path)
            fix = remedies.move(older, f"{files.directory}.unused") if older else None
            return warn(
                f'{len(defining)} files define "{name}" differently; the last counts', *evidence, fix=fix
            )
    return None


def crio_hooks_mode(node: Node) -> Verdict:
    role = crio_role(node)
    if node.crio is None or not role.used:
        return skip(role.reason)
    hooks = nvidia_hooks(node.host, SYSTEM_DIRECTORIES)
    if not hooks:
        return ok("no OCI hook of NVIDIA's is here")
    try:
        directories = hook_directories(running_runtime(node))
    except DaemonError as error:
        return skip(f"CRI-O doesn't say what it runs with: {error.message}")
    evidence = [seen(hook.path, f"runs {hook.program}") for hook in hooks]
    if any(spec.serves_gpus for spec in node.cdi_specs):
        return ok("GPUs come by CDI; whether a hook stands in the way is hook-conflict's to tell", *evidence)
    if any(hook.path.rpartition("/")[0] in directories for hook in hooks):
        fix = Fix("gpunode configure-runtime --runtime crio", disruptive="restart")
        return note(
            "GPUs come by an OCI hook, which the toolkit gives up in favour of CDI", *evidence, fix=fix
        )
    if nvidia_handlers(running_runtime(node)):
        return ok("CRI-O has the nvidia handler, and doesn't look for hooks where NVIDIA's is", *evidence)
    way = taken_way(node, cdi=True)
    if way is not None:
        return ok(f"no hook is needed: {way.summary}", seen(way.source, way.value), *evidence)
    told = seen(f"{node.crio.socket} /config", f"hooks_dir {', '.join(directories)}")
    return fail("CRI-O doesn't look for hooks where NVIDIA's is", *evidence, told)


def crio_not_selected(node: Node) -> Verdict:
    crio = node.crio
    if crio is None or crio.process is None:
        return skip("CRI-O doesn't run here")
    role = crio_role(node)
    if role.used or node.kubelet is None or not node.kubelet.joined:
        return ok(role.reason)
    return note(
        f"CRI-O runs, but {role.reason}: what is set up in CRI-O reaches no pod",
        seen(f"/proc/{crio.process.pid}", " ".join(shown_arguments(crio.process.argv))),
        seen(node.kubelet.endpoint_source, node.kubelet.endpoint),
        fix=Fix("systemctl disable --now crio", disruptive="restart"),
    )


CHECKS = (
    Check(
        id="crio-stray-dropin",
        title="CRI-O reads no file that nobody means",
        layer="crio",
        severity="warning",
        looks_at=(
            "every file in CRI-O's drop-in directory and below: names of copies (*.bak, *.rpmsave, *~), "
            "files that can't be parsed, and several that define the nvidia handler differently."
        ),
        why=(
            "CRI-O takes every file there for its own, 99-nvidia.toml.bak and *.rpmsave included, and a "
            "later one replaces an earlier one's handler. One that it can't parse keeps it from starting."
        ),
        remedy=remedies.EDIT,
        run=crio_stray_dropin,
        blocked_by=("pci-no-gpu", "crio-runtime-missing"),
        preflight=("crio",),
        refs=("https://github.com/cri-o/cri-o/blob/main/docs/crio.conf.d.5.md",),
    ),
    Check(
        id="crio-hooks-mode",
        title="GPUs don't hang on an OCI hook in CRI-O",
        layer="crio",
        severity="error",
        looks_at=(
            f"NVIDIA's hooks in {', '.join(SYSTEM_DIRECTORIES)} and hooks_dir of the running CRI-O, "
            "where GPUs don't come by CDI."
        ),
        why=(
            "The hook is the toolkit's oldest way, which it has marked as going away, and it only works in "
            "a directory that CRI-O looks into."
        ),
        remedy=remedies.CONFIGURE,
        run=crio_hooks_mode,
        blocked_by=("pci-no-gpu", "toolkit-missing"),
        refs=("https://github.com/NVIDIA/nvidia-container-toolkit/blob/main/CHANGELOG.md",),
    ),
    Check(
        id="crio-not-selected",
        title="A CRI-O that runs is the one that the kubelet uses",
        layer="crio",
        severity="info",
        looks_at="the running CRI-O and the kubelet's engine. A CRI-O that is only installed is fine.",
        why="Two engines on one node are easily mixed up: only the kubelet's own gives pods their GPUs.",
        remedy=remedies.RESTART,
        run=crio_not_selected,
        blocked_by=("pci-no-gpu",),
        refs=("https://kubernetes.io/docs/setup/production-environment/container-runtimes/",),
    ),
)
