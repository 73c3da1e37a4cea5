"""Validation of a new configuration by containerd itself: its merged view before and after, compared."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpunode.errors import ConfigError, ValidationError
from gpunode.facts.containerd import CRI_IDS, CRI_PLUGINS, ContainerdConfig
from gpunode.facts.toml import Tree, dig, parse_toml, same
from gpunode.host import Host
from gpunode.host.journal import FileEdit
from gpunode.host.process import Completed
from gpunode.runtime import toml_edit
from gpunode.runtime.containerd_files import Texts
from gpunode.runtime.engine import DesiredConfig, Handler, Plan, decode, refuse_untrusted


@dataclass(frozen=True)
class ConfigReader:
    """One containerd program that reads active or staged files. `main` is its main file's path.

    Each start of the program takes 30 to 85 ms. So `views` keeps what it printed, by what it read: planning,
    choosing between two plans and validating need the same views, and none may change one.
    """

    host: Host
    binary: str
    main: str
    views: dict[object, Tree | None] = field(default_factory=dict, repr=False, compare=False)

    def active(self, config: ContainerdConfig) -> Tree | None:
        """Its merged view of the active files, its defaults without any; None if it refuses them."""
        # what is in them now: they may have been edited while the user was asked to confirm
        now = tuple(self.host.read_bytes(path) for path in config.files) if config.exists else None
        if now not in self.views:
            self.views[now] = dump(self.host, self.binary, self.main if config.exists else None)
        return self.views[now]

    def staged(self, texts: Texts) -> Tree:
        """Its merged view of copies with these texts, in their order; `ValidationError` if it refuses."""
        known = self.views.get(tuple(texts.items()))
        if known is not None:
            return known
        with self.host.temporary_directory() as directory:
            places = _stage(self.host, directory, self.main, texts)
            answer = self.host.run(
                [self.binary, "--config", places[self.main], "config", "dump"], timeout=20.0
            )
            refuse_untrusted(answer)
            if not answer.ok:
                raise ValidationError(
                    f"containerd refuses the new {self.main}: {_reason(answer, places)}",
                    hint="nothing was written; see the change with --dry-run",
                )
            tree = parse_toml(answer.stdout, "containerd config dump")
        self.views[tuple(texts.items())] = tree
        return tree

    def refuse_as_it_is(self) -> None:
        """`ConfigError` if it refuses the active files."""
        answer = self.host.run([self.binary, "--config", self.main, "config", "dump"], timeout=20.0)
        if not answer.ok:
            raise ConfigError(
                f"containerd refuses {self.main} as it is: {_reason(answer, {})}",
                hint=f"see it with: {self.binary} --config {self.main} config dump",
            )


def check(
    reader: ConfigReader,
    config: ContainerdConfig,
    plan: Plan,
    expected: DesiredConfig | None,
    before: Tree | None = None,
) -> None:
    """`ValidationError` if containerd refuses the edited files, or reads them otherwise than planned.

    Everything else must mean what it meant in `before`, containerd's view of the present files if that is
    None. Without `expected` it is a removal. A plan that restores files byte for byte needs no comparison.
    """
    try:
        merged = reader.staged(laid_over(reader.host, config.files, plan.edits))
    except ValidationError:
        if config.exists:
            reader.refuse_as_it_is()
        raise
    if expected is not None:
        must_have(merged, expected, config.path)
    if plan.restores:
        return
    before = before or reader.active(config)
    if before is not None and not config.disabled:  # else there was no CRI, and all of its table is new
        must_keep(before, merged, expected or _removed_config(before, merged), config.path)


def _removed_config(before: Tree, merged: Tree) -> DesiredConfig:
    """What a removal removed, in the terms of the desired configuration."""
    lost = tuple(set(runtimes_in(before)) - set(runtimes_in(merged)))
    default = _containerd_table(before).get("default_runtime_name") in lost
    return DesiredConfig(tuple(Handler(name, "") for name in lost), set_as_default=default, cdi=True)


def laid_over(host: Host, files: Iterable[str], edits: Iterable[FileEdit]) -> dict[str, str | None]:
    """Texts of containerd's files once the edits are carried out, in the order of reading."""
    after = {name: host.read_bytes(name) for name in files}
    after |= {edit.path: edit.after for edit in edits if edit.path.endswith(".toml")}
    return {name: None if data is None else decode(data, name) for name, data in after.items()}


def dump(host: Host, binary: str, config: str | None) -> Tree | None:
    """containerd's merged view of a file and its imports, or its defaults; None if it refuses the file."""
    arguments = ["--config", config, "config", "dump"] if config else ["config", "default"]
    answer = host.run([binary, *arguments], timeout=20.0)
    return parse_toml(answer.stdout, f"{binary} {' '.join(arguments)}") if answer.ok else None


def _stage(host: Host, directory: Path, main: str, texts: Texts) -> dict[str, str]:
    """Write copies that import each other instead of the active files, in the order of `texts`.

    Returns the path of each file's copy.
    """
    contents = {name: text for name, text in texts.items() if text is not None}
    copies = {}
    for number, name in enumerate(name for name in contents if name != main):
        copies[name] = directory / f"{number:03}.toml"

    def no_imports(tree: Tree) -> None:
        tree.pop("imports", None)

    for name, copy_path in copies.items():
        text = toml_edit.edit(contents[name], no_imports, name, _plain_imports(name))
        host.write_atomic(str(copy_path), text.encode(), mode=0o600)

    def redirect(tree: Tree) -> None:
        tree.pop("imports", None)
        if copies:
            tree["imports"] = [str(path) for path in copies.values()]

    staged = directory / "config.toml"
    text = toml_edit.edit(contents.get(main, ""), redirect, main, _plain_imports(main))
    host.write_atomic(str(staged), text.encode(), mode=0o600)
    return {main: str(staged), **{name: str(copied) for name, copied in copies.items()}}


def _plain_imports(path: str) -> str:
    """The hint if no copy with other imports can be made of a file."""
    return f"write its imports on one line above the first table: ${{EDITOR:-vi}} {path}"


def _reason(answer: Completed, places: Mapping[str, str]) -> str:
    """containerd's last message, or a panic's first, with the real paths of the files."""
    lines = [line for line in answer.stderr.splitlines() if line.strip()]
    panic = next((line for line in lines if line.startswith("panic:")), "")
    reason = panic or (lines[-1] if lines else f"exit status {answer.code}")
    for name, place in places.items():
        reason = reason.replace(place, name)
    return reason.removeprefix("containerd: ")


def must_have(merged: Tree, expected: DesiredConfig, path: str) -> None:
    """`ValidationError` if containerd's merged view lacks the desired configuration."""
    table = _containerd_table(merged)
    for handler in expected.handlers:
        if dig(table, "runtimes", handler.name, "options", "BinaryName") != handler.path:
            raise ValidationError(
                f"containerd does not find the runtime {handler.name} in the new {path}:"
                " another file or the file's version hides it",
                hint=f"see what it reads: containerd --config {path} config dump",
            )
    if expected.default and table.get("default_runtime_name") != expected.default:
        raise ValidationError(
            f"with the new {path} containerd would still use {table.get('default_runtime_name')!r} as default"
            " runtime",
            hint="another imported file sets default_runtime_name: grep -r default_runtime_name"
            f" {path.rpartition('/')[0]}",
        )
    if expected.cdi and expected.handlers == () and not cdi_is_on(merged):
        raise ValidationError(
            f"with the new {path} containerd would still have CDI off",
            hint=f"another imported file sets enable_cdi: grep -r enable_cdi {path.rpartition('/')[0]}",
        )


def cdi_is_on(merged: Tree) -> bool:
    """Whether CDI is on in containerd's merged view; a disabled CRI doesn't appear there."""
    tables = [dig(merged, "plugins", plugin) for plugin in (CRI_PLUGINS[3], CRI_PLUGINS[2])]
    return any(dig(table, "enable_cdi") is True for table in tables) or not any(
        dig(table, "containerd") for table in tables
    )


def must_keep(before: Tree, merged: Tree, desired: DesiredConfig, path: str) -> None:
    """`ValidationError` unless everything but `desired` means the same to containerd as before."""
    old, new = (_without_ours(tree, desired) for tree in (before, merged))
    if "runc" not in runtimes_in(before):  # a table of runtimes without runc had hidden containerd 1's own
        (dig(_containerd_table(new), "runtimes") or {}).pop("runc", None)
    if not same(old, new):
        raise ValidationError(
            f"with the new {path} containerd would read more than {', '.join(desired.names) or 'CDI'}"
            f" differently: {_first(old, new)}",
            hint=f"nothing was written; compare: containerd --config {path} config dump",
        )


def runtimes_in(merged: Tree) -> tuple[str, ...]:
    """Names of the handlers in containerd's merged view."""
    runtimes = dig(_containerd_table(merged), "runtimes")
    return tuple(runtimes) if isinstance(runtimes, dict) else ()


def _containerd_table(tree: Tree) -> Tree:
    for plugin in (CRI_PLUGINS[3], CRI_PLUGINS[2]):
        table = dig(tree, "plugins", plugin, "containerd")
        if isinstance(table, dict):
            return table
    return {}


def _without_ours(tree: Tree, desired: DesiredConfig) -> Tree:
    result = copy.deepcopy(tree)
    for key in ("imports", "version"):
        result.pop(key, None)
    disabled = result.get("disabled_plugins")
    if isinstance(disabled, list):
        result["disabled_plugins"] = [plugin_id for plugin_id in disabled if plugin_id not in CRI_IDS]
    for plugin in CRI_PLUGINS.values():
        cri = dig(result, "plugins", plugin)
        containerd = dig(cri, "containerd")
        if isinstance(containerd, dict):
            runtimes = containerd.get("runtimes", {})
            for name in desired.names:
                runtimes.pop(name, None)
            for entry in runtimes.values():
                options = entry.get("options") or {}  # an unset option and an empty one are the same to runc
                entry["options"] = {key: value for key, value in options.items() if value}
            if desired.default:
                containerd.pop("default_runtime_name", None)
            if desired.cdi:
                cri.pop("enable_cdi", None)
    return result


def _first(old: object, new: object, path: str = "") -> str:
    """The first key at which two trees differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            if key not in old or key not in new or not same(old[key], new[key]):
                return _first(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    return path
