"""CRI-O: one drop-in with the nvidia handlers, checked by ``crio config``, and ``/config`` afterwards.

Why it is restarted and not reloaded: on SIGHUP CRI-O (1.25 and up) rereads its handlers into the
configuration that it *shows*, in ``/config`` and in the CRI's status, but pods are started with the one from
its start (server.New copies the structure; cri-o issue 10202, the same up to 1.37). Pods fail with "failed to
find runtime handler" while every query reports that it exists. Before 1.25 SIGHUP did not reload handlers at
all. A restart leaves containers running, because their parent is conmon.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

from gpunode.errors import (
    ConfigError,
    DaemonError,
    GpunodeError,
    UsageError,
    ValidationError,
)
from gpunode.facts.cdi import reads_none
from gpunode.facts.crio import (
    NVIDIA_NAMES,
    RUNTIMES_KEY,
    CrioConfig,
    CrioFile,
    compiled_default,
    drop_in_directory,
    is_low_level,
    is_nvidias,
    load_crio,
    load_file,
    low_level_paths,
    running_crio,
    toolkit_runtimes,
)
from gpunode.facts.daemons import same_file
from gpunode.facts.processes import option_value, option_values
from gpunode.facts.toml import Tree, dig, parse_toml, prune, same
from gpunode.facts.toolkit import DEFAULT_PATH, nvidia_hooks
from gpunode.host import Host
from gpunode.host.journal import FileEdit
from gpunode.host.process import COMMAND_NOT_FOUND
from gpunode.output.typed import as_dict
from gpunode.runtime import toml_edit
from gpunode.runtime.engine import (
    Active,
    DesiredConfig,
    Engine,
    Handler,
    Plan,
    PlannedFiles,
    UnwantedConfig,
    decode,
    edits_to,
    injects_twice,
    refuse_untrusted,
    unchanged,
)
from gpunode.runtime.toml_edit import Changes
from gpunode.runtime.toolkit_file import with_settings

# The base of an nvidia handler: which of CRI-O's own low-level handlers it copies.

# keys with a handler's path or program, which must not be copied to another handler. inherit_default_runtime
# (1.31 and up) copies the default's runtime_path over the handler's own, so it can't be used here
_OWN = (
    "runtime_path",
    "runtime_type",
    "runtime_config_path",
    "runtime_pull_image",
    "inherit_default_runtime",
    "platform_runtime_paths",
)


def base_handler(config: CrioConfig, version: tuple[int, ...], new: Collection[str]) -> Tree:
    """The table to inherit from: the default's if it is crun's or runc's, else theirs; {} without either.

    Never that of a virtual machine or a sandbox, where monitor and root mean something else; nor one of the
    handlers to write (`new`) or with one of NVIDIA's names.
    """
    compiled = compiled_default(version)
    for name in (config.named_default, compiled, "crun", "runc", *sorted(config.handlers)):
        table = config.handlers.get(name)
        if table is not None and name not in (*new, *NVIDIA_NAMES) and is_low_level(name, table):
            return dict(table)
    return {}


def handler_table(base: Tree, existing: Tree, handler: Handler, missing: Collection[str]) -> Tree:
    """The handler's table: `base`, then the keys of the `existing` one, then the program.

    A monitor_path among `missing` was copied from a machine or a release that had it there.
    """
    inherited = {key: value for key, value in base.items() if key not in _OWN}
    settings = {key: value for key, value in existing.items() if key not in _OWN}
    if settings.get("monitor_path") in missing and "monitor_path" in inherited:
        del settings["monitor_path"]
    program = {"runtime_path": handler.path, "runtime_type": "oci"}
    return copy.deepcopy({**program, **inherited, **settings})


def means(existing: Any, table: Tree) -> bool:
    """Whether an existing table means the same; without a type a handler is CRI-O's ``oci``."""
    return isinstance(existing, dict) and same({**existing, **_type(existing)}, {**table, **_type(table)})


def _type(table: Tree) -> Tree:
    return {"runtime_type": table.get("runtime_type") or "oci"}


def only_nvidias(file: CrioFile) -> bool:
    """Whether a file has only NVIDIA's handlers, and possibly one of them as the default."""
    runtime = dict(file.runtime)
    default = runtime.pop("default_runtime", None)
    runtime.pop("runtimes", None)
    alone = set(file.tree) <= {"crio"} and set(file.tree.get("crio", {})) <= {"runtime"} and not runtime
    handlers = file.handlers
    is_known = default is None or default in handlers or default in NVIDIA_NAMES
    return bool(handlers or default) and alone and is_known and all(starmap(is_nvidias, handlers.items()))


# Plans for CRI-O's files. Pure functions over their text; `CrioEngine` reads, validates and queries.
#
# Handlers are written to one drop-in that has nothing else. Other files are edited only if they would
# override it: a later one that defines the same handler, and NVIDIA's own leftovers, which CRI-O loads
# regardless of their names (``99-nvidia.conf`` of the GPU operator, ``99-nvidia.toml.bak``).

DROP_IN_NAME = "99-nvidia.toml"
_LEFTOVER = "99-nvidia"


class CrioState(NamedTuple):
    """The files before planning. `drop_in` is the path of gpunode's own file, existing or not.

    `unread` are files in places that CRI-O ignores. `missing` are monitor paths that don't exist; `conmon` is
    the monitor to name if neither a handler nor CRI-O's PATH has one.
    """

    config: CrioConfig
    drop_in: str
    version: tuple[int, ...] = ()
    unread: tuple[CrioFile, ...] = ()
    missing: Collection[str] = ()
    conmon: str = ""


@dataclass(frozen=True)
class _DraftWork:
    """The new files, changed step by step."""

    state: CrioState
    gone: tuple[CrioFile, ...]
    changes: Changes = field(default_factory=Changes)
    notes: list[str] = field(default_factory=list)

    @property
    def left(self) -> CrioConfig:
        """CRI-O's configuration without the leftovers."""
        config = self.state.config
        deleted = {file.path for file in self.gone}
        return replace(config, files=tuple(file for file in config.files if file.path not in deleted))

    def later(self) -> tuple[CrioFile, ...]:
        """The files that CRI-O reads after the drop-in."""
        config, own = self.left, order(self.state.drop_in)
        return tuple(file for file in config.files if file.path != config.path and order(file.path) > own)

    def texts(self) -> dict[str, str | None]:
        """New text of every file that changes; None for a leftover."""
        known = {file.path: file.text for file in self.state.config.files}
        return {file.path: None for file in self.gone} | self.changes.texts(known)


def order(path: str) -> tuple[str, ...]:
    """Sorts paths below one directory as CRI-O reads them: by name in each directory, in place."""
    return tuple(path.split("/"))


def is_leftover(path: str, drop_in: str) -> bool:
    """Whether a file has one of the names that NVIDIA's tools, or a copy of theirs, have left.

    A hidden one is left by an editor or by a killed write of such a file; CRI-O reads it too.
    """
    return path != drop_in and path.rpartition("/")[2].lstrip(".").startswith(_LEFTOVER)


def configured(state: CrioState, desired: DesiredConfig) -> PlannedFiles:
    """The files with the handlers; unchanged if there are none to register."""
    if not desired.handlers:
        return PlannedFiles({})
    work = _DraftWork(state, _leftovers(state))
    base = base_handler(state.config, state.version, desired.names)
    for handler in desired.handlers:
        existing = {} if desired.replace else as_dict(state.config.handlers.get(handler.name))
        table = handler_table(base, existing, handler, state.missing)
        if state.conmon and not table.get("monitor_path"):
            table["monitor_path"] = state.conmon
        _put(work, handler.name, table)
    _carry_over(work, desired)
    previous = _set_default(work, desired)
    return PlannedFiles(work.texts(), tuple(work.notes), previous_default=previous)


def _leftovers(state: CrioState) -> tuple[CrioFile, ...]:
    leftovers = (file for file in state.config.files if is_leftover(file.path, state.drop_in))
    return tuple(file for file in (*leftovers, *state.unread) if only_nvidias(file))


def _carry_over(work: _DraftWork, desired: DesiredConfig) -> None:
    """Move to the drop-in what only a leftover has defined, unless its removal was requested."""
    for file in work.gone:
        read = file not in work.state.unread
        where = "CRI-O reads it as well" if read else "CRI-O never reads it there"
        work.notes.append(f"{file.path} is left from NVIDIA's tools and is removed: {where}")
        for name in file.handlers if read else ():
            if name not in desired.names:
                _put(work, name, work.state.config.handlers[name])


def _put(work: _DraftWork, name: str, table: Tree) -> None:
    """Set the handler's table, unless the other files already have it."""
    if means(work.left.handlers.get(name), table):
        return
    for file in work.later():
        if name in file.handlers:  # a handler in a later file replaces ours as a whole
            place = f"{file.path}:{file.line_of_handler(name)}"
            work.notes.append(
                f"{place} has a handler {name} that would replace this one; it is taken out there"
            )
            work.changes.add(file.path, lambda tree: _take_out_handlers(tree, (name,)))
    work.changes.add(
        work.state.drop_in, lambda tree: _runtime_of(tree).setdefault("runtimes", {}).update({name: table})
    )


def _runtime_of(tree: Tree) -> Tree:
    """CRI-O's table of a file, created if it is missing."""
    table: Tree = tree.setdefault("crio", {}).setdefault("runtime", {})
    return table


def _set_default(work: _DraftWork, desired: DesiredConfig) -> str:
    """Make the handler the default, or keep a leftover's; return the default that was replaced."""
    before = work.state.config.named_default
    now = desired.default or before
    if now == work.left.named_default:
        return ""
    for file in work.later():
        if "default_runtime" in file.runtime:
            line = file.line_of("crio", "runtime", "default_runtime")
            raise ConfigError(
                f"{file.path}:{line} names another default runtime,"
                f" and CRI-O reads it after {work.state.drop_in}",
                hint=f"take default_runtime out: ${{EDITOR:-vi}} +{line} {file.path}",
            )
    work.changes.add(work.state.drop_in, lambda tree: _runtime_of(tree).update(default_runtime=now))
    return before if before != now else ""


def removed(state: CrioState, unwanted: UnwantedConfig) -> PlannedFiles:
    """The files without the handlers, from any author; gpunode's file is removed if it is then empty."""
    config = state.config
    left = {name for name in config.handlers if name not in unwanted.names}
    known = {*left, compiled_default(state.version)}
    previous = unwanted.previous_default if unwanted.previous_default in known else ""
    texts: dict[str, str | None] = {}
    for file in (*config.files, *state.unread):
        default = file.runtime.get("default_runtime")
        is_affected = default in unwanted.names or any(name in file.handlers for name in unwanted.names)
        if not is_affected:
            continue
        own = file.path == state.drop_in or is_leftover(file.path, state.drop_in)
        back = "" if own else previous
        take_out = toml_edit.edit_or_remove if own else toml_edit.edit
        texts[file.path] = take_out(file.text, partial(_take_out, unwanted.names, back), file.path)
    return PlannedFiles(texts)


def _take_out(names: Collection[str], previous_default: str, tree: Tree) -> None:
    """Remove handlers, a default that is one of them, and tables that become empty."""
    runtime = tree["crio"]["runtime"]
    if runtime.get("default_runtime") in names:
        del runtime["default_runtime"]
        if previous_default:
            runtime["default_runtime"] = previous_default
    _take_out_handlers(tree, names)


def _take_out_handlers(tree: Tree, names: Collection[str]) -> None:
    handlers = dig(tree, "crio", "runtime", "runtimes")
    for name in [name for name in names if isinstance(handlers, dict) and name in handlers]:
        del handlers[name]
    prune(tree, ("crio", "runtime", "runtimes"))


# Validation of CRI-O's new files: read by ``crio config``, and checked for known fatal errors.

_SECONDS = 20.0


def after_restart(config: CrioConfig, edits: Iterable[FileEdit], directory: str) -> CrioConfig:
    """The new configuration; edits of files that CRI-O doesn't read don't change it."""
    files = {file.path: file for file in config.files}
    for edit in edits:
        if edit.path != config.path and not edit.path.startswith(f"{directory}/"):
            continue
        files.pop(edit.path, None)
        if edit.after is not None:
            content = (edit.after or b"").decode(errors="replace")
            files[edit.path] = CrioFile(edit.path, content, parse_toml(content, edit.path))
    drop_ins = sorted(
        (file for path, file in files.items() if path != config.path), key=lambda f: order(f.path)
    )
    main = [files[config.path]] if config.path in files else []
    return replace(config, files=(*main, *drop_ins))


def _compare(printed: str, expected: DesiredConfig | None) -> tuple[str, ...]:
    """Compare with the output of ``crio config``, where values equal to the default are comments."""
    if expected is None:
        return ()
    try:
        tree = parse_toml(printed, "the output of crio config")
    except ConfigError as error:
        return (f"CRI-O accepts the new files, and what it prints of them can't be read: {error.message}",)
    for handler in expected.handlers:
        path = dig(tree, "crio", "runtime", "runtimes", handler.name, "runtime_path")
        if path != handler.path:
            raise ValidationError(
                f"CRI-O would read the handler {handler.name} as {path or 'absent'}, not {handler.path}",
                hint="nothing was written; see what it reads: crio config",
            )
    default = dig(tree, "crio", "runtime", "default_runtime")
    if expected.default and default != expected.default:
        raise ValidationError(
            f"CRI-O would take {default or 'its own'} as default, not {expected.default}",
            hint="nothing was written; see what it reads: crio config",
        )
    return ()


# The toolkit's list of low-level runtimes, because CRI-O keeps its own outside every PATH.


def toolkit_edit(
    host: Host, config: CrioConfig, version: tuple[int, ...]
) -> tuple[FileEdit | None, tuple[str, ...]]:
    """The edit that names CRI-O's real runtimes, and notes; None if a listed one is found already."""
    content = host.read_bytes(DEFAULT_PATH)
    text = decode(content, DEFAULT_PATH)
    names = toolkit_runtimes(text)
    real = low_level_paths(host, config, version)
    if not real or any(host.which(name) for name in names):
        return None, ()
    desired = [*real, *(name for name in names if name not in real)]
    if content is None:
        command = f"gpunode toolkit config set --create {'.'.join(RUNTIMES_KEY)}={','.join(desired)}"
        return None, (f"nvidia-container-runtime won't find {real[0]} by itself; configure it:  {command}",)
    after = with_settings(text, DEFAULT_PATH, {RUNTIMES_KEY: desired})
    return FileEdit(DEFAULT_PATH, content, after.encode()), ()


_PACKAGED_CONMON = "/usr/libexec/crio/conmon"  # outside every PATH
_CLOCK_SECONDS = (
    2.0  # the kernel reports its boot time, from which a process's start is counted, in whole seconds
)
_RESTART = "CRI-O starts pods with the handlers that it read at its start; containers go on running"


@dataclass(frozen=True)
class CrioEngine(Engine):
    """One CRI-O and its files. `drop_in` is gpunode's file, empty for 99-nvidia.toml in its directory."""

    @property
    def directory(self) -> str:
        """The directory of this CRI-O's drop-ins."""
        return drop_in_directory(self.daemon)

    @property
    def own_path(self) -> str:
        """Path of gpunode's drop-in; `UsageError` if the user named one that CRI-O doesn't read."""
        path = self.drop_in or f"{self.directory}/{DROP_IN_NAME}"
        if not path.startswith(f"{self.directory}/"):
            raise UsageError(
                f"CRI-O reads drop-ins from {self.directory}, not {path}",
                hint=f"--drop-in-config {self.directory}/{DROP_IN_NAME}, or leave it out",
            )
        return path

    # --- planning --------------------------------------------------------------------------------------

    def plan(self, desired: DesiredConfig, active: Active | None) -> Plan:
        """The drop-in, the toolkit's low-level runtimes, and with CDI the removal of NVIDIA's old hook."""
        state = self._state()
        self._refuse(desired)
        draft = configured(state, desired)
        hooks = self._hooks(state.config)
        edits = [*edits_to(self.host, draft.texts, self.own_path), *(hooks if desired.cdi else ())]
        toolkit, notes = (
            toolkit_edit(self.host, state.config, self.daemon.version) if desired.handlers else (None, ())
        )
        notes = (*draft.notes, *notes, *self._notes(state.config, desired, hooks))
        # removed for good: undoing the runtime does not restore it
        removes = any(edit.action == "removed" for edit in edits)
        had = removes or any(name in state.config.handlers for name in desired.names)
        verb, reason = self._verb(
            state.config, edits, active, None if active is None else active.has(desired)
        )
        edits += [toolkit] if toolkit else []
        return Plan("crio", tuple(edits), verb, reason, notes, None, draft.previous_default, had)

    def plan_removal(self, unwanted: UnwantedConfig, active: Active | None) -> Plan:
        """Remove the handlers from every file that names them, and NVIDIA's old hook."""
        state = self._state()
        draft = removed(state, unwanted)
        edits = (*edits_to(self.host, draft.texts, self.own_path), *self._hooks(state.config))
        return self._removal(state.config, edits, unwanted.names, active)

    def plan_edits(self, edits: tuple[FileEdit, ...], names: tuple[str, ...], active: Active | None) -> Plan:
        """The plan around edits that restore files."""
        return self._removal(self._state().config, edits, names, active)

    def _removal(
        self, config: CrioConfig, edits: tuple[FileEdit, ...], names: tuple[str, ...], active: Active | None
    ) -> Plan:
        gone = None if active is None else active.lacks(names)
        verb, reason = self._verb(config, edits, active, gone)
        return Plan("crio", edits or (unchanged(self.host, self.own_path),), verb, reason)

    def _verb(
        self, config: CrioConfig, edits: Iterable[FileEdit], active: Active | None, in_force: bool | None
    ) -> tuple[str, str]:
        """A restart if the meaning of CRI-O's files changes, or the daemon hasn't read them yet."""
        changed = {edit.path: edit for edit in edits if edit.action != "unchanged"}
        after = after_restart(config, changed.values(), self.directory)
        meaning = (config.handlers, config.named_default)
        if not same(list(meaning), [after.handlers, after.named_default]) or any(
            path.endswith(".json") for path in changed
        ):
            return "restart", _RESTART
        if in_force is False:
            return "restart", "the running CRI-O has not loaded its current files"
        if active is not None and self.newer_than_daemon(config):
            return (
                "restart",
                "CRI-O was started before its files changed: it shows them, and runs pods without",
            )
        return "none", ""

    def newer_than_daemon(self, config: CrioConfig) -> bool:
        """Whether a file with an nvidia handler changed after the start: a reload would hide that."""
        process = self.daemon.process
        if process is None or not self.host.live:
            return False  # the mtime of a recorded file is that of the recording
        files = [file for file in config.files if any(starmap(is_nvidias, file.handlers.items()))]
        times = [status.st_ctime for file in files if (status := self.host.stat(file.path)) is not None]
        return any(time > process.started + _CLOCK_SECONDS for time in times)

    # --- the files ---------------------------------------------------------------------------------------

    def _state(self) -> CrioState:
        path = self.own_path
        config = load_crio(self.host, self.daemon.config_path, self.directory)
        for file in config.files:
            decode(self.host.read_bytes(file.path), file.path)  # a file that CRI-O can't read isn't edited
        monitors = {str(table.get("monitor_path", "")) for table in config.handlers.values()} - {""}
        missing = tuple(monitor for monitor in monitors if not self.host.exists(monitor))
        return CrioState(
            config, path, self.daemon.version, self._unread(config), missing, self._conmon(config)
        )

    def _unread(self, config: CrioConfig) -> tuple[CrioFile, ...]:
        """NVIDIA's file in the place where nvidia-ctk wrote it until 1.19, which CRI-O ignores."""
        path = f"{self.daemon.config_path.rpartition('/')[0]}/conf.d/{DROP_IN_NAME}"
        if any(same_file(self.host, path, file.path) for file in config.files):
            return ()
        try:
            file = load_file(self.host, path)
        except GpunodeError:
            return ()  # invalid, and CRI-O doesn't read it
        return (file,) if file is not None else ()

    def _conmon(self, config: CrioConfig) -> str:
        """The monitor for a handler that inherits none; empty where CRI-O finds one by itself."""
        if config.setting("runtime", "conmon") or option_value(self.daemon.argv[1:], "--conmon"):
            return ""
        is_packaged = self.host.which("conmon") is None and self.host.executable(_PACKAGED_CONMON)
        return _PACKAGED_CONMON if is_packaged else ""

    def _hooks(self, config: CrioConfig) -> tuple[FileEdit, ...]:
        """Edits that remove NVIDIA's hooks from the directories where this CRI-O looks for hooks."""
        hooks = nvidia_hooks(self.host, config.hook_directories)
        return edits_to(self.host, dict.fromkeys(hook.path for hook in hooks))

    def _refuse(self, desired: DesiredConfig) -> None:
        desired.refuse_without_cdi(self.daemon)
        default = option_value(self.daemon.argv[1:], "--default-runtime")
        if desired.default and default not in (None, desired.default):
            raise self._outdone(f"--default-runtime {default}")
        flags = ",".join(option_values(self.daemon.argv[1:], "--runtimes"))
        for flag in filter(None, flags.split(",")):
            if flag.partition(":")[0] in desired.names:
                raise self._outdone(f"--runtimes {flag}")

    def _outdone(self, flag: str) -> ConfigError:
        where = f"systemctl edit --full {self.daemon.unit}" if self.daemon.unit else "its command line"
        return ConfigError(
            f"CRI-O is started with {flag}, or with a variable for it, which counts more than any file",
            hint=f"take that out: {where}",
        )

    def _notes(
        self, config: CrioConfig, desired: DesiredConfig, hooks: tuple[FileEdit, ...]
    ) -> tuple[str, ...]:
        notes = [injects_twice(hooks[0].path)] if hooks and not desired.cdi else []
        directories = config.setting("runtime", "cdi_spec_dirs")
        if desired.cdi and isinstance(directories, list):
            notes.append(reads_none("it", "of CRI-O", map(str, directories)))
        return tuple(filter(None, notes))

    # --- the daemon ------------------------------------------------------------------------------------

    def validate(self, plan: Plan, expected: DesiredConfig | None) -> tuple[str, ...]:
        """``crio config`` on staged copies, else the refusals that are known."""
        config = load_crio(self.host, self.daemon.config_path, self.directory)
        planned = after_restart(config, plan.changed, self.directory)
        default = planned.named_default
        if default and default not in (*planned.handlers, compiled_default(self.daemon.version)):
            raise ValidationError(
                f"CRI-O would not start: default_runtime is {default}, and no file defines it",
                hint="nothing was written; name another default: grep -rn default_runtime " + self.directory,
            )
        if self.host.live and expected is not None:
            self._refuse_without_monitor(planned, expected)
        if self.daemon.binary is None or not self.host.live:
            return ("CRI-O's files were checked for known mistakes only: its program can't be run here",)
        with self.host.temporary_directory() as staging:
            self._stage(planned, staging)
            files = ("--config", f"{staging}/crio.conf", "--config-dir", f"{staging}/drop-ins")
            answer = self.host.run([self.daemon.binary, *files, "config"], timeout=_SECONDS)
        if answer.code == COMMAND_NOT_FOUND:
            return (f"CRI-O's files were checked for known mistakes only: {self.daemon.binary} can't be run",)
        refuse_untrusted(answer)
        if not answer.ok:
            reason = (answer.reason or "no reason given").replace(f"{staging}/crio.conf", config.path)
            reason = reason.replace(f"{staging}/drop-ins", self.directory)
            raise ValidationError(
                f"CRI-O refuses the new files: {reason}",
                hint="nothing was written; correct the file and run this again",
            )
        return _compare(answer.stdout, expected)

    def _refuse_without_monitor(self, planned: CrioConfig, expected: DesiredConfig) -> None:
        """Check for a handler's monitor: ``crio config`` doesn't, and CRI-O exits at start without it."""
        host = self.host
        monitor = planned.setting("runtime", "conmon") or option_value(self.daemon.argv[1:], "--conmon")
        for handler in expected.handlers:
            path = monitor or planned.handlers.get(handler.name, {}).get("monitor_path")
            if host.exists(path) if path else host.which("conmon") or host.unsafe_program("conmon"):
                continue
            raise ValidationError(
                f"CRI-O would not start: the handler {handler.name} has no monitor,"
                f" {path or 'conmon in PATH'} isn't there",
                hint="nothing was written; install conmon, or name it:"
                " monitor_path in [crio.runtime.runtimes]",
            )

    def _stage(self, planned: CrioConfig, staging: Path) -> None:
        """Write copies under the same names, so that they are read in the same order."""
        # a missing file is fatal if it is named
        self.host.write_atomic(f"{staging}/crio.conf", b"", mode=0o600)
        self.host.make_dirs(f"{staging}/drop-ins")
        for file in planned.files:
            drop_in = f"{staging}/drop-ins{file.path.removeprefix(self.directory)}"
            place = f"{staging}/crio.conf" if file.path == planned.path else drop_in
            self.host.make_dirs(place.rpartition("/")[0])
            self.host.write_atomic(place, file.text.encode("utf-8", "surrogateescape"), mode=0o600)

    def query(self) -> Active:
        """Handlers and default from the running configuration; `DaemonError` if CRI-O doesn't answer."""
        config = running_crio(self.host, self.daemon.socket)
        if not config.handlers:
            raise DaemonError(f"CRI-O's /config at {self.daemon.socket} lists no runtimes")
        return Active(
            handlers=tuple(config.handlers),
            default=config.named_default or compiled_default(self.daemon.version),
            paths={
                name: str(table["runtime_path"])
                for name, table in config.handlers.items()
                if table.get("runtime_path")
            },
            live_restore=True,  # the parent of containers is conmon, so they outlive the daemon
        )
