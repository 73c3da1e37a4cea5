"""microk8s: the template from which the snap's containerd service renders its file at each start.

``args/containerd-template.toml`` is TOML with ``${NAME}`` in strings, filled in by run-containerd-with-args.
It has a handler nvidia-container-runtime by default, which gpunode doesn't change.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gpunode.errors import PreconditionError
from gpunode.facts.containerd import ContainerdConfig
from gpunode.host.journal import FileEdit
from gpunode.runtime import toml_edit
from gpunode.runtime.containerd_removal import take_out
from gpunode.runtime.engine import Active, DesiredConfig, Plan, UnwantedConfig, decode, edits_to, verb_for
from gpunode.runtime.rendered import DistributionEngine, with_history

TEMPLATE = "containerd-template.toml"
# values that the service fills in; the snapshotter depends on the file system, and a parser accepts any
_VALUES = {
    "${SNAP}": "/snap/microk8s/current",
    "${SNAP_DATA}": "/var/snap/microk8s/current",
    "${SNAPSHOTTER}": "overlayfs",
    "${RUNTIME}": "runc",
    "${RUNTIME_TYPE}": "io.containerd.runc.v2",
}


@dataclass(frozen=True)
class Microk8sEngine(DistributionEngine):
    """The containerd of a microk8s node."""

    def plan(self, desired: DesiredConfig, active: Active | None) -> Plan:
        """Add the runtime to the template."""
        config = self._config
        edits = self._edited(config, config.path, desired)
        plan = self._acting(edits, active is None or active.has(desired))
        return with_history(plan, config, desired)

    def plan_removal(self, unwanted: UnwantedConfig, active: Active | None) -> Plan:
        """Remove the runtimes from the template, and restore its default."""
        path, text = self._config.path, self._text(self._config.path)
        after = toml_edit.edit(text, lambda tree: take_out(tree, unwanted), path)
        edits = edits_to(self.host, {path: after}) if after != text else ()
        return self.plan_edits(edits, unwanted.names, active)

    def plan_edits(self, edits: tuple[FileEdit, ...], names: tuple[str, ...], active: Active | None) -> Plan:
        """The plan around edits that are known to remove `names`."""
        return self._acting(edits, active is None or active.lacks(names))

    def validate(self, plan: Plan, expected: DesiredConfig | None) -> tuple[str, ...]:
        """Let containerd read what the service would render."""
        path = self.daemon.config_path
        now = self._load(path)
        rendered = tuple(
            FileEdit(path, self.host.read_bytes(path), fill_in(decode(edit.after, edit.path)).encode())
            for edit in plan.edits
            if edit.path == self._config.path
        )
        return self._let_read(now, rendered, expected)

    @cached_property
    def _config(self) -> ContainerdConfig:
        path = f"{self.daemon.config_path.rpartition('/')[0]}/{TEMPLATE}"
        config = self._load(path)
        if not config.exists:
            raise PreconditionError(
                f"{path} does not exist; microk8s renders containerd's file",
                hint="reinstall microk8s, or restore the file from its snap's default-args",
            )
        return config

    def _acting(self, edits: tuple[FileEdit, ...], in_force: bool) -> Plan:
        change = ("restart", "microk8s renders containerd's file when that starts; pods keep running")
        stale = "the template is correct, but the running containerd has not loaded it"
        verb = verb_for(edits, in_force, change, stale)
        return self._plan(edits, self._config, verb)


def fill_in(template: str) -> str:
    """The template as microk8s would render it."""
    for name, value in _VALUES.items():
        template = template.replace(name, value)
    return template
