"""containerd: its file and imports, validation by `config dump`, restart, and the CRI's status afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from gpunode.errors import PreconditionError, ValidationError
from gpunode.facts.containerd import ContainerdConfig, load_config
from gpunode.facts.daemons import Daemon
from gpunode.facts.kubelet import CONFIG, setting
from gpunode.facts.toml import Tree, dig, same
from gpunode.host import Host
from gpunode.host.journal import FileEdit
from gpunode.output.typed import as_dict, as_text
from gpunode.runtime import containerd_check, containerd_plan
from gpunode.runtime.containerd_check import ConfigReader
from gpunode.runtime.containerd_files import (
    DROP_IN_NAME,
    NVIDIA_DROP_INS,
    ContainerdState,
    Texts,
    refuse_missing_import,
)
from gpunode.runtime.containerd_plan import Copies, PlannedFiles, Replacement, configured
from gpunode.runtime.engine import (
    PROGRAM,
    Active,
    DesiredConfig,
    Plan,
    UnwantedConfig,
    decode,
    edits_to,
    verb_for,
)

_CHANGE = ("restart", "containerd reads its configuration only when it starts; containers keep running")


@dataclass(frozen=True)
class ContainerdEngine:
    """One containerd with its configuration. `drop_in` is a path that the user named, else empty."""

    host: Host
    daemon: Daemon
    drop_in: str = ""

    @property
    def program(self) -> str:
        """containerd needs an absolute path."""
        return PROGRAM

    def plan(self, desired: DesiredConfig, active: Active | None) -> Plan:
        """Add the runtime to a file that this containerd reads; any change needs a restart."""
        self._refuse_managed()
        desired.refuse_without_cdi(self.daemon)
        state = self._state()
        copies = containerd_plan.copies(state)
        if desired.replace and copies:
            replacement = self._replacement(desired, copies)
            desired, basis = replacement.desired, replacement.state
            outcome = containerd_plan.without_copies(replacement)
        else:
            basis, outcome = state, configured(state, desired)
        edits = edits_to(self.host, outcome.texts, self.daemon.config_path)
        verb, reason = verb_for(edits, active is None or active.has(desired), _CHANGE)
        return Plan(
            "containerd",
            edits,
            verb,
            reason,
            (*outcome.notes, *self._about_drop_ins(state, copies, outcome)),
            outcome.version,
            previous_default=desired.replaces(basis.config.named_default),
            had_runtime=any(name in state.config.runtimes for name in desired.names),
            switched_cdi=outcome.switched_cdi,
        )

    def plan_removal(self, unwanted: UnwantedConfig, active: Active | None) -> Plan:
        """Remove the runtimes from every file that names them."""
        self._refuse_managed()
        state = self._state()
        unread = {path: self._text(path) for path in self._unread_drop_ins(state.config)}
        outcome = containerd_plan.removed(state, unwanted, self._same_meaning, unread)
        refuse_missing_import(state, outcome.texts)
        edits = edits_to(self.host, outcome.texts, self.daemon.config_path)
        return self._removal(edits, unwanted.names, active, outcome.version, outcome.notes)

    def restoring(self, edits: tuple[FileEdit, ...], names: tuple[str, ...], active: Active | None) -> Plan:
        """The plan around edits that are known to remove `names`."""
        config = load_config(self.host, self.daemon.config_path, self.daemon.version)
        plan = replace(self._removal(edits, names, active, config.version), restores=True)
        if self._validator is not None:
            try:
                self._validator.staged(containerd_check.laid_over(self.host, config.files, plan.edits))
            except ValidationError as error:
                note = f"cannot restore the previous files, so only the runtimes are removed: {error.message}"
                removal = self.plan_removal(UnwantedConfig(names), active)
                return replace(removal, notes=(*removal.notes, note))
        return plan

    def _removal(
        self,
        edits: tuple[FileEdit, ...],
        names: tuple[str, ...],
        active: Active | None,
        version: int | None,
        notes: tuple[str, ...] = (),
    ) -> Plan:
        verb, reason = verb_for(edits, active is None or active.lacks(names), _CHANGE)
        return Plan("containerd", edits, verb, reason, notes, version)

    def _replacement(self, desired: DesiredConfig, copies: Copies) -> Replacement:
        """The state without the generated copies. The new drop-in takes the path of the first copy."""
        state = self._state(without=frozenset(copies))
        if state.deep and not self.drop_in:
            state = replace(state, drop_in=next(iter(copies)))
        texts = {path: text for path, text in state.texts.items() if path not in copies}
        return Replacement(replace(state, texts=texts), containerd_plan.with_copied(desired, copies), copies)

    def _about_drop_ins(
        self, state: ContainerdState, copies: Copies, outcome: PlannedFiles
    ) -> tuple[str, ...]:
        """What generated copies hide, and NVIDIA's drop-ins that containerd does not read."""
        left = {path: copied for path, copied in copies.items() if path not in outcome.texts}
        unread = [path for path in self._unread_drop_ins(state.config) if path not in outcome.texts]
        stale = tuple(
            f"{path} is not imported by {state.config.path}: containerd does not read it;"
            " gpunode unconfigure-runtime removes it if it is NVIDIA's"
            for path in unread
        )
        return (*containerd_plan.drift(state, left), *stale)

    def _unread_drop_ins(self, config: ContainerdConfig) -> tuple[str, ...]:
        """Drop-ins in the places that NVIDIA's tools use or used, which no file imports."""
        directory = config.path.rpartition("/")[0]
        places = [f"{directory}/{name}" for name in NVIDIA_DROP_INS]
        return tuple(path for path in places if path not in config.files and self.host.is_file(path))

    def _same_meaning(self, before: Texts, after: Texts) -> bool | None:
        """Whether two sets of files mean the same to containerd; None if it can't be run."""
        if self._validator is None:
            return None
        try:
            trees = [dict(self._validator.staged(texts)) for texts in (before, after)]
        except ValidationError:
            return False
        for tree in trees:
            tree.pop("imports", None)
        return same(*trees)

    @cached_property
    def _reader(self) -> ConfigReader | None:
        """This containerd's program, or on a recorded machine its recorded answers; None without either."""
        binary = self.daemon.binary
        return None if binary is None else ConfigReader(self.host, binary, self.daemon.config_path)

    @property
    def _validator(self) -> ConfigReader | None:
        """The program if it can be run here, to read files that are only staged."""
        return self._reader if self.host.live else None

    def _text(self, path: str) -> str:
        return decode(self.host.read_bytes(path), path)

    def _refuse_managed(self) -> None:
        manager = self.daemon.manager
        if manager:
            raise PreconditionError(
                f"this containerd belongs to {manager}, which writes {self.daemon.config_path} itself",
                hint=f"configure {manager}: gpunode configure-runtime --runtime {manager}",
            )

    def _state(self, without: frozenset[str] = frozenset()) -> ContainerdState:
        """What is known of the files, without those in `without`."""
        path = self.daemon.config_path
        config = load_config(self.host, path, self.daemon.version, without)
        drop_in = self.drop_in or f"{path.rpartition('/')[0]}/{DROP_IN_NAME}"
        texts = {name: self._text(name) for name in dict.fromkeys((path, *config.files, drop_in))}
        return ContainerdState(
            config=config,
            texts=texts,
            effective=self._effective(config, texts, partly=bool(without)),
            drop_in=drop_in,
            drop_in_forced=bool(self.drop_in),
            systemd_cgroup=(not config.exists or bool(config.disabled)) and self._wants_systemd_cgroup(),
            neighbours=self._neighbours((path, *config.files, drop_in), without),
        )

    def _neighbours(self, paths: Iterable[str], without: frozenset[str]) -> tuple[str, ...]:
        """TOML files in the directories of the files and of NVIDIA's drop-ins, except the main file's."""
        own = self.daemon.config_path.rpartition("/")[0]
        places = [path.rpartition("/")[0] for path in (*paths, *without)]
        places += [f"{own}/{name}".rpartition("/")[0] for name in NVIDIA_DROP_INS]
        listings = [self.host.glob(place, "*.toml") for place in dict.fromkeys(places) if place != own]
        return tuple(path for listed in listings for path in listed if path not in without)

    def _effective(self, config: ContainerdConfig, texts: Texts, *, partly: bool) -> Tree | None:
        """containerd's merged view, read only if the files don't define a runc to copy."""
        if "runc" in config.runtimes or self._reader is None:
            return None
        if (
            self.daemon.version
            and self.daemon.version < (2,)
            and config.version == 2
            and "cri" in config.disabled
        ):
            return None  # containerd itself refuses this file: "cri" is no plugin id in version 2
        if not partly:
            return self._reader.active(config)
        if self._validator is None:
            return None
        try:
            return self._validator.staged({path: texts[path] for path in config.files})
        except ValidationError:
            return None

    def _wants_systemd_cgroup(self) -> bool:
        """The kubelet's cgroupDriver, else kubeadm's default where systemd uses cgroup v2."""
        driver = setting(self.host.text_or_empty(CONFIG), "cgroupDriver")
        if driver:
            return driver == "systemd"
        return self.host.systemd_runs() and self.host.exists("/sys/fs/cgroup/cgroup.controllers")

    def validate(self, plan: Plan, expected: DesiredConfig | None) -> tuple[str, ...]:
        """Let containerd merge staged copies, and compare the result with its view of the present files."""
        reader = self._validator
        if reader is None:
            return ("the new configuration was not validated: no containerd program was found",)
        config = load_config(self.host, self.daemon.config_path, self.daemon.version)
        before: Tree | None = None
        copies = containerd_plan.copies(self._state()) if expected is not None and expected.replace else {}
        if expected is not None and copies:
            replacement = self._replacement(expected, copies)
            config, expected = replacement.state.config, replacement.desired
            before = reader.staged({path: replacement.state.texts[path] for path in config.files})
        containerd_check.check(reader, config, plan, expected, before)
        return ()

    def reload_edits(self) -> tuple[FileEdit, ...]:
        return ()

    def query(self) -> Active:
        """Handlers and default from the CRI's Status; `DaemonError` if it doesn't answer."""
        from gpunode.daemons.cri import Cri

        with Cri(self.host, self.daemon.socket) as cri:
            status = cri.status()
        runtimes = dig(status.config, "containerd", "runtimes")
        paths = {}
        for name, entry in as_dict(runtimes).items():
            binary = as_text(dig(entry, "options", "BinaryName"))
            if binary:
                paths[name] = binary
        cdi = status.config.get("enableCDI")
        known = cdi if isinstance(cdi, bool) else None
        return Active(status.handlers, status.default_handler, paths, cdi=known)
