"""containerd as the judge of a new configuration: its own merged view before and after, compared."""

from __future__ import annotations

import copy
from pathlib import Path

from gpunode.errors import ValidationError
from gpunode.facts.containerd import CRI_IDS, CRI_PLUGINS, ContainerdConfig, dig, parse_toml
from gpunode.facts.daemons import Daemon
from gpunode.host import Completed, Host
from gpunode.runtime import toml_edit
from gpunode.runtime.engine import Plan, Wanted, decode
from gpunode.runtime.trees import Tree, same


def dump(host: Host, binary: str, config: str | None) -> Tree | None:
    """containerd's merged view of a file and its imports, or its defaults; None if it refuses the file."""
    arguments = ["--config", config, "config", "dump"] if config else ["config", "default"]
    answer = host.run([binary, *arguments], timeout=20.0)
    return parse_toml(answer.stdout, f"{binary} {' '.join(arguments)}") if answer.ok else None


def check(
    host: Host, daemon: Daemon, config: ContainerdConfig, plan: Plan, expected: Wanted | None
) -> tuple[str, ...]:
    """`ValidationError` if containerd refuses the staged files or takes them otherwise than wanted."""
    binary = daemon.binary or "containerd"
    after = {name: host.read_bytes(name) for name in config.files}
    after |= {edit.path: edit.after for edit in plan.edits}
    contents = {name: decode(data, name) for name, data in after.items() if data is not None}
    before = dump(host, binary, config.path if config.exists else None)
    with host.temporary_directory() as directory:
        main = _stage(host, directory, config.path, contents)
        answer = host.run([binary, "--config", str(main), "config", "dump"], timeout=20.0)
        if not answer.ok:
            raise ValidationError(
                f"containerd refuses the new {config.path}: {_reason(answer, main, config.path)}",
                hint="nothing was written; see the change with --dry-run",
            )
        merged = parse_toml(answer.stdout, "containerd config dump")
    if expected is not None:
        _must_have(merged, expected, config.path)
        if before is not None:
            _must_keep(before, merged, expected, config)
    return ()


def _stage(host: Host, directory: Path, main: str, contents: dict[str, str]) -> Path:
    """Copies whose imports lead to each other instead of to the files in force."""
    copies = {}
    for number, name in enumerate(name for name in contents if name != main):
        copies[name] = directory / f"{number:03}.toml"

    def no_imports(tree: Tree) -> None:
        tree.pop("imports", None)

    for name, copy_path in copies.items():
        text = toml_edit.edit(contents[name], no_imports, name)
        host.write_atomic(str(copy_path), text.encode(), mode=0o600)

    def redirect(tree: Tree) -> None:
        tree.pop("imports", None)
        if copies:
            tree["imports"] = [str(path) for path in copies.values()]

    staged = directory / "config.toml"
    text = toml_edit.edit(contents.get(main, ""), redirect, main)
    host.write_atomic(str(staged), text.encode(), mode=0o600)
    return staged


def _reason(answer: Completed, staged: Path, path: str) -> str:
    lines = [line for line in answer.stderr.splitlines() if line.strip()]
    return (lines[-1] if lines else f"exit status {answer.code}").replace(str(staged), path)


def _containerd_table(tree: Tree) -> Tree:
    for plugin in (CRI_PLUGINS[3], CRI_PLUGINS[2]):
        found = dig(tree, "plugins", plugin, "containerd")
        if isinstance(found, dict):
            return found
    return {}


def _must_have(merged: Tree, expected: Wanted, path: str) -> None:
    table = _containerd_table(merged)
    for handler in expected.handlers:
        if dig(table, "runtimes", handler.name, "options", "BinaryName") != handler.path:
            raise ValidationError(
                f"containerd does not find the runtime {handler.name} in the new {path}:"
                " another file or the file's version hides it",
                hint="see what it reads: containerd config dump",
            )
    if expected.default and table.get("default_runtime_name") != expected.default:
        raise ValidationError(
            f"containerd would still use {table.get('default_runtime_name')!r} as default runtime",
            hint=f"another imported file sets default_runtime_name: grep -r default_runtime_name {path}",
        )


def _must_keep(before: Tree, merged: Tree, expected: Wanted, config: ContainerdConfig) -> None:
    """Everything but our keys must mean the same to containerd as before."""
    if config.disabled or not config.exists:
        return  # the CRI was off, so all of its table is new
    one, other = (_without_ours(tree, expected) for tree in (before, merged))
    if not same(one, other):
        raise ValidationError(
            f"containerd would read more than {', '.join(expected.names) or 'CDI'} differently:"
            f" {_first(one, other)}",
            hint="nothing was written; compare: containerd config dump",
        )


def _without_ours(tree: Tree, expected: Wanted) -> Tree:
    result = copy.deepcopy(tree)
    for key in ("imports", "version"):
        result.pop(key, None)
    disabled = result.get("disabled_plugins")
    if isinstance(disabled, list):
        result["disabled_plugins"] = [one for one in disabled if one not in CRI_IDS]
    for plugin in CRI_PLUGINS.values():
        cri = dig(result, "plugins", plugin)
        containerd = dig(cri, "containerd")
        if isinstance(containerd, dict):
            runtimes = containerd.get("runtimes", {})
            for name in expected.names:
                runtimes.pop(name, None)
            for entry in runtimes.values():
                options = entry.get("options") or {}  # an unset option and an empty one are the same to runc
                entry["options"] = {key: value for key, value in options.items() if value}
            if expected.default:
                containerd.pop("default_runtime_name", None)
            if expected.cdi:
                cri.pop("enable_cdi", None)
    return result


def _first(one: object, other: object, path: str = "") -> str:
    """The first key at which two trees differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            if key not in one or key not in other or not same(one[key], other[key]):
                return _first(one.get(key), other.get(key), f"{path}.{key}" if path else str(key))
    return path
