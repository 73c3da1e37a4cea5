"""The common part of k3s, rke2, k0s and microk8s: plans around the containerd files that they render.

None of their rendered files is ever edited; each distribution has its own place for additions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpunode.facts.containerd import ContainerdConfig, load_config, merge
from gpunode.facts.toml import Tree, dig, parse_toml
from gpunode.facts.writers import nvidia_handlers, nvidia_writer
from gpunode.host.journal import FileEdit
from gpunode.runtime import toml_edit
from gpunode.runtime.containerd import ContainerdEngine, allowed_for, laid_over, must_have, must_keep
from gpunode.runtime.containerd_files import refuse_wrong_types
from gpunode.runtime.containerd_plan import runtime_table
from gpunode.runtime.containerd_removal import take_out
from gpunode.runtime.engine import DesiredConfig, Plan, UnwantedConfig, edits_to

DROP_IN_NAME = "99-nvidia.toml"


@dataclass(frozen=True)
class DistributionEngine(ContainerdEngine):
    """The common part of the engines: a distribution's containerd."""

    def _load(self, path: str) -> ContainerdConfig:
        """A file with its imports; `ConfigError` for what that containerd can't load either."""
        config = load_config(self.host, path, self.daemon.version)
        for name in config.files:
            refuse_wrong_types(config.trees[name], name, self._text(name))
        return config

    def _edited(self, config: ContainerdConfig, path: str, desired: DesiredConfig) -> tuple[FileEdit, ...]:
        """The edit that adds `desired` to the one file `path`; none if `config` means the same already."""
        tables = {handler.name: runtime_table(config, None, handler, False) for handler in desired.handlers}
        default = desired.default in ("", config.default_runtime)
        cdi = config.has_cdi or not desired.cdi
        old = self._text(path)
        copied = _of_a_copy(old, path, config.plugin) if desired.replace and path != config.path else None
        there = all(config.runtimes.get(name) == table for name, table in tables.items())
        if default and cdi and there and copied is None:
            return ()
        tables = {**(copied or {}), **tables}
        containerd: Tree = {"runtimes": tables} if tables else {}
        if desired.default:
            containerd["default_runtime_name"] = desired.default
        cri: Tree = {"containerd": containerd} if containerd else {}
        if not cdi:
            cri["enable_cdi"] = True
        version = None if path == config.path else config.version
        text = with_patch(old if copied is None else "", {"plugins": {config.plugin: cri}}, path, version)
        return edits_to(self.host, {path: text})

    def _taken_out(self, paths: Iterable[str], unwanted: UnwantedConfig) -> tuple[FileEdit, ...]:
        """Edits that remove the runtimes from these drop-ins, from any author; emptied ones are removed.

        A default that one of them set needs no replacement: the file below it names its own.
        """
        texts: dict[str, str | None] = {}
        plain = unwanted._replace(previous_default="")
        for path in paths:
            text = self._text(path)
            after = toml_edit.edit_or_remove(text, lambda tree: take_out(tree, plain), path)
            if after != text:
                texts[path] = after
        return edits_to(self.host, texts)

    def _plan(self, edits: tuple[FileEdit, ...], config: ContainerdConfig, verb: tuple[str, str]) -> Plan:
        """A plan that shows the active file as unchanged if there is nothing to write."""
        content = config.main_text.encode() if config.exists else None
        untouched = FileEdit(config.path, content, content)
        return Plan(self.daemon.manager, edits or (untouched,), *verb, config_version=config.version)

    def _let_read(
        self,
        config: ContainerdConfig,
        rendered: tuple[FileEdit, ...],
        expected: DesiredConfig | None,
        programs: Iterable[str] = (),
    ) -> tuple[str, ...]:
        """Let containerd read `rendered`, the distribution's result of a plan; returns notes.

        `programs` are the runtimes that the distribution will register by itself.
        """
        reader = self._validator
        if reader is None:
            name = self.daemon.manager
            return (f"{name}'s containerd did not validate the new configuration: no program was found",)
        before = reader.active(config)
        merged = reader.staged(laid_over(self.host, config.files, rendered))
        if expected is not None:
            must_have(merged, expected, config.path)
            if before is not None and not expected.replace:  # what a copy hid becomes active
                allowed = allowed_for(expected)
                must_keep(before, merged, allowed._replace(names=(*allowed.names, *programs)), config.path)
        return ()


def _of_a_copy(text: str, path: str, plugin: str) -> Tree | None:
    """NVIDIA's runtimes in a copy of the whole section that NVIDIA's tools generated; else None."""
    tree = parse_toml(text, path)
    section = dig(tree, "plugins", plugin)
    if not nvidia_writer(text, tree) or not isinstance(section, dict):
        return None
    return {name: dig(section, "containerd", "runtimes", name) for name in nvidia_handlers(section)}


def with_patch(text: str, patch: Tree, path: str, version: int | None = None) -> str:
    """A TOML text with the patch merged into it key by key.

    With `version` it is a drop-in that must have this exact version: one of another version is replaced.
    """

    def mutate(tree: Tree) -> None:
        old = {} if version is not None and tree.get("version", version) != version else dict(tree)
        tree.clear()
        tree.update({"version": version} if version is not None else {})
        tree.update(merge(old, patch, deep=True))

    return toml_edit.edit(text, mutate, path)


def with_history(plan: Plan, config: ContainerdConfig, desired: DesiredConfig) -> Plan:
    """The plan with what a removal must know: the earlier default and runtimes, and whether CDI was off."""
    return plan._replace(
        previous_default=desired.replaces(config.named_default),
        had_runtime=any(name in config.runtimes for name in desired.names),
        switched_cdi=desired.cdi and not config.has_cdi,
    )
