"""k0s: drop-ins in /etc/k0s/containerd.d, which it watches and applies by itself.

k0s waits for three seconds without a change, stops containerd and starts it again five seconds later; pods
keep running. Up to 1.35 it merges the CRI settings of drop-ins into a file of its own, in the tables of
version 2; from 1.36 on containerd imports them, and k0s accepts only version 3. A containerd.toml without the
first line that marks it as managed by k0s is the administrator's, and k0s leaves it unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gpunode.errors import ConfigError, PreconditionError
from gpunode.facts.containerd import CRI_PLUGINS, ContainerdConfig
from gpunode.facts.distributions import K0S_MARK, k0s_manages
from gpunode.facts.toml import dig, parse_toml
from gpunode.host.journal import FileEdit
from gpunode.runtime.containerd import ContainerdEngine
from gpunode.runtime.containerd_files import refuse_wrong_types
from gpunode.runtime.engine import Active, DesiredConfig, Plan, UnwantedConfig, decode, verb_for
from gpunode.runtime.rendered import DROP_IN_NAME, DistributionEngine, with_history, with_patch

_UPGRADE = (
    "k0s 1.36 does not start with this drop-in: before that upgrade take it out (gpunode unconfigure-runtime"
    " --runtime k0s), and configure again after it"
)
_CRI_FILE = "containerd-cri.toml"  # the file into which k0s up to 1.35 merges drop-ins


@dataclass(frozen=True)
class K0sEngine(DistributionEngine):
    """The containerd of a k0s node."""

    def plan(self, desired: DesiredConfig, active: Active | None) -> Plan:
        """A drop-in that k0s applies, or the file itself if the administrator manages it."""
        if not self._managed:
            return self._renamed(self._plain.plan(desired, active))
        config = self._config
        self._refuse_unusable()
        edits = self._edited(config, self._own, desired)
        plan = self._acting(edits, active is None or active.has(desired))
        plan = with_history(plan, config, desired)
        return plan._replace(notes=(_UPGRADE,) if edits and config.version < 3 else ())

    def plan_removal(self, unwanted: UnwantedConfig, active: Active | None) -> Plan:
        """Remove the runtimes from every drop-in that names them."""
        if not self._managed:
            return self._renamed(self._plain.plan_removal(unwanted, active))
        edits = self._taken_out(self._drop_ins(), unwanted)
        return self.plan_edits(edits, unwanted.names, active)

    def plan_edits(self, edits: tuple[FileEdit, ...], names: tuple[str, ...], active: Active | None) -> Plan:
        """The plan around edits that are known to remove `names`."""
        if not self._managed:
            return self._renamed(self._plain.plan_edits(edits, names, active))
        return self._acting(edits, active is None or active.lacks(names))

    def validate(self, plan: Plan, expected: DesiredConfig | None) -> tuple[str, ...]:
        """Let containerd read what k0s would generate from the drop-ins."""
        if not self._managed:
            return self._plain.validate(plan, expected)
        config = self._config
        edits = plan.edits
        merged = next((path for path in config.files if path.endswith(f"/{_CRI_FILE}")), None)
        if merged is not None:
            edits = tuple(self._merged(merged, edit, expected) for edit in plan.edits)
        return self._let_read(config, edits, expected)

    @cached_property
    def _managed(self) -> bool:
        return k0s_manages(self.host, self.daemon.config_path)

    @cached_property
    def _plain(self) -> ContainerdEngine:
        return ContainerdEngine(self.host, self.daemon._replace(manager=""))

    def _renamed(self, plan: Plan) -> Plan:
        note = f"{self.daemon.config_path} is not managed by k0s (its first line isn't '{K0S_MARK}')"
        return plan._replace(engine=self.daemon.manager, notes=(*plan.notes, note))

    @cached_property
    def _config(self) -> ContainerdConfig:
        config = self._load(self.daemon.config_path)
        if not config.exists:
            raise PreconditionError(
                f"k0s has not written {self.daemon.config_path} yet, so its version isn't known",
                hint=f"start it once: systemctl start {self.daemon.unit or 'k0sworker'}",
            )
        return config

    @property
    def _drop_in_directory(self) -> str:
        return f"{self.daemon.config_path.rpartition('/')[0]}/containerd.d"

    @property
    def _own(self) -> str:
        return f"{self._drop_in_directory}/{DROP_IN_NAME}"

    def _drop_ins(self) -> tuple[str, ...]:
        return self.host.glob(self._drop_in_directory, "*.toml")

    def _refuse_unusable(self) -> None:
        """Refuse a foreign drop-in with which k0s would apply none, or from 1.36 on not even start."""
        for path in self._drop_ins():
            text = self._text(path)
            tree = parse_toml(text, path)
            refuse_wrong_types(tree, path, text)
            old = tree.get("version", 3) != 3 or CRI_PLUGINS[2] in (tree.get("plugins") or {})
            afresh = path == self._own and tree.get("version", 3) != 3
            if self._config.version >= 3 and old and not afresh:
                raise ConfigError(
                    f"{path} is in the form of containerd 1 (version 2), which this k0s refuses",
                    hint=f"bring it to version 3 or remove it: ${{EDITOR:-vi}} {path}",
                )

    def _merged(self, path: str, edit: FileEdit, expected: DesiredConfig | None) -> FileEdit:
        """The edit that k0s makes of its CRI file for this drop-in's; the same edit if it adds nothing."""
        before = self.host.read_bytes(path)
        drop_in = parse_toml(decode(edit.after, edit.path), edit.path)
        cri = dig(drop_in, "plugins", CRI_PLUGINS[2])
        if expected is None or not isinstance(cri, dict):
            return FileEdit(path, before, before)
        after = with_patch(decode(before, path), {"plugins": {CRI_PLUGINS[2]: cri}}, path)
        return FileEdit(path, before, after.encode())

    def _acting(self, edits: tuple[FileEdit, ...], in_force: bool) -> Plan:
        change = ("wait", "k0s sees the change and restarts its containerd itself; pods keep running")
        verb = verb_for(edits, in_force, change if self.daemon.process is not None else ("none", ""))
        return self._plan(edits, self._config, verb)
