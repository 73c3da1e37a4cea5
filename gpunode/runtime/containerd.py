"""containerd: its file and imports, validation by `config dump`, restart, and the CRI's status afterwards."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from gpunode.errors import ConfigError, PreconditionError, ValidationError
from gpunode.facts.containerd import CRI_IDS, CRI_PLUGINS, ContainerdConfig, load_config
from gpunode.facts.kubelet import CONFIG, setting
from gpunode.facts.toml import Tree, dig, parse_toml, same
from gpunode.host import Host
from gpunode.host.journal import FileEdit
from gpunode.host.process import Completed
from gpunode.output.typed import as_dict, as_text
from gpunode.runtime import toml_edit
from gpunode.runtime.containerd_files import (
    DROP_IN_PATH,
    NVIDIA_DROP_INS,
    ContainerdState,
    Copies,
    Texts,
    drift,
    generated_copies,
)
from gpunode.runtime.containerd_plan import Replacement, configured, with_copied, without_copies
from gpunode.runtime.containerd_removal import removed
from gpunode.runtime.engine import (
    Active,
    DesiredConfig,
    Engine,
    Plan,
    PlannedFiles,
    UnwantedConfig,
    decode,
    edits_to,
    refuse_untrusted,
    verb_for,
)

_CHANGE = ("restart", "containerd reads its configuration only when it starts; containers keep running")


@dataclass(frozen=True)
class ContainerdEngine(Engine):
    """One containerd with its configuration."""

    def plan(self, desired: DesiredConfig, active: Active | None) -> Plan:
        """Add the runtime to a file that this containerd reads; any change needs a restart."""
        self._refuse_managed()
        desired.refuse_without_cdi(self.daemon)
        state = self._state()
        copies = generated_copies(state)
        if desired.replace and copies:
            replacement = self._replacement(desired, copies)
            desired, basis = replacement.desired, replacement.state
            outcome = without_copies(replacement)
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
        outcome = removed(state, unwanted, self._same_meaning, unread)
        edits = edits_to(self.host, outcome.texts, self.daemon.config_path)
        return self._removal(edits, unwanted.names, active, outcome.version, outcome.notes)

    def plan_edits(self, edits: tuple[FileEdit, ...], names: tuple[str, ...], active: Active | None) -> Plan:
        """The plan around edits that are known to remove `names`."""
        config = load_config(self.host, self.daemon.config_path, self.daemon.version)
        return self._removal(edits, names, active, config.version)._replace(restores=True)

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
            state = state._replace(drop_in=next(iter(copies)))
        texts = {path: text for path, text in state.texts.items() if path not in copies}
        return Replacement(state._replace(texts=texts), with_copied(desired, copies), copies)

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
        return (*drift(state, left), *stale)

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
        # the drop-in that `file_to_edit` may choose; with --replace see `_replacement`
        drop_in = self.drop_in or f"{path.rpartition('/')[0]}/{DROP_IN_PATH}"
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
        """TOML files in the directories of the files and of NVIDIA's drop-ins."""
        own = self.daemon.config_path.rpartition("/")[0]
        places = [path.rpartition("/")[0] for path in (*paths, *without)]
        places += [f"{own}/{name}".rpartition("/")[0] for name in NVIDIA_DROP_INS]
        listings = [self.host.glob(place, "*.toml") for place in dict.fromkeys(places)]
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
        copies = generated_copies(self._state()) if expected is not None and expected.replace else {}
        if expected is not None and copies:
            replacement = self._replacement(expected, copies)
            config, expected = replacement.state.config, replacement.desired
            before = reader.staged({path: replacement.state.texts[path] for path in config.files})
        check_config(reader, config, plan, expected, before)
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


# Validation of a new configuration by containerd itself: its merged view before and after, compared.


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


def check_config(
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
        allowed = _allowed_for_removal(before, merged) if expected is None else allowed_for(expected)
        must_keep(before, merged, allowed, config.path)


class Allowed(NamedTuple):
    """What may differ in containerd's view after a change: these runtimes, the default, the switch of CDI."""

    names: tuple[str, ...]
    default: bool
    cdi: bool


def allowed_for(desired: DesiredConfig) -> Allowed:
    """What differs once `desired` is configured."""
    return Allowed(desired.names, bool(desired.default), desired.cdi)


def _allowed_for_removal(before: Tree, merged: Tree) -> Allowed:
    """The runtimes that are gone, and the default if it was one of them."""
    lost = tuple(set(runtimes_in(before)) - set(runtimes_in(merged)))
    return Allowed(lost, _containerd_table(before).get("default_runtime_name") in lost, cdi=True)


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


def must_keep(before: Tree, merged: Tree, allowed: Allowed, path: str) -> None:
    """`ValidationError` unless everything else means the same to containerd as before."""
    old, new = (_without(tree, allowed) for tree in (before, merged))
    if "runc" not in runtimes_in(before):  # a table of runtimes without runc had hidden containerd 1's own
        (dig(_containerd_table(new), "runtimes") or {}).pop("runc", None)
    if not same(old, new):
        raise ValidationError(
            f"with the new {path} containerd would read more than {', '.join(allowed.names) or 'CDI'}"
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


def _without(tree: Tree, allowed: Allowed) -> Tree:
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
            for name in allowed.names:
                runtimes.pop(name, None)
            for entry in runtimes.values():
                options = entry.get("options") or {}  # an unset option and an empty one are the same to runc
                entry["options"] = {key: value for key, value in options.items() if value}
            if allowed.default:
                containerd.pop("default_runtime_name", None)
            if allowed.cdi:
                cri.pop("enable_cdi", None)
    return result


def _first(old: object, new: object, path: str = "") -> str:
    """The first key at which two trees differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            if key not in old or key not in new or not same(old[key], new[key]):
                return _first(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
    return path
