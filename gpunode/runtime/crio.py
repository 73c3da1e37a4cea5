"""CRI-O: one drop-in with the nvidia handlers, checked by ``crio config``, and what ``/config`` says then.

Why a restart and not a reload: on SIGHUP CRI-O (1.25 and up) reads its handlers anew into the configuration
that it *shows*, in ``/config`` and in the CRI's status, but what starts pods keeps the one from its start
(server.New copies the structure; cri-o issue 10202, the same up to 1.37). Pods fail with "failed to find
runtime handler" while everything that can be asked says that it is there. Before 1.25 SIGHUP did not touch
handlers at all. A restart leaves containers running: they belong to conmon.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gpunode.dataclass import dataclass
from gpunode.errors import ConfigError, DaemonError, GpunodeError, PreconditionError, UsageError
from gpunode.facts.containerd import dig
from gpunode.facts.crio import CrioConfig, CrioFile, compiled_default, drop_in_directory, load_crio, load_file
from gpunode.facts.crio_programs import is_nvidias
from gpunode.facts.daemons import Daemon, same_file
from gpunode.facts.processes import option_value, option_values
from gpunode.host import Host
from gpunode.runtime import crio_check, crio_plan
from gpunode.runtime.cdi_ready import hook_removals, injects_twice, reads_none
from gpunode.runtime.crio_plan import DROP_IN_NAME, Draft, State
from gpunode.runtime.crio_toolkit import toolkit_edit
from gpunode.runtime.engine import Active, FileEdit, Plan, Unwanted, Wanted, decode
from gpunode.runtime.trees import same

_HAS_CDI = (1, 24)
_HOOK_DIRECTORIES = ("/usr/share/containers/oci/hooks.d",)  # CRI-O's own default
_PACKAGED_CONMON = "/usr/libexec/crio/conmon"  # outside every PATH
_CLOCK_SECONDS = (
    2.0  # the kernel tells its boot time, from which a process's start is counted, in whole seconds
)
_RESTART = "CRI-O starts pods with the handlers that it read at its start; containers go on running"


@dataclass(frozen=True)
class CrioEngine:
    """One CRI-O and its files. `drop_in` is where ours goes, empty for 99-nvidia.toml in its directory."""

    host: Host
    daemon: Daemon
    drop_in: str = ""

    @property
    def program(self) -> str:
        return "/usr/bin/nvidia-container-runtime"

    @property
    def directory(self) -> str:
        """The directory that this CRI-O reads its drop-ins from."""
        return drop_in_directory(self.daemon)

    @property
    def own_path(self) -> str:
        """Path of our drop-in; `UsageError` if it was named somewhere else than CRI-O reads."""
        path = self.drop_in or f"{self.directory}/{DROP_IN_NAME}"
        if not path.startswith(f"{self.directory}/"):
            raise UsageError(
                f"CRI-O reads drop-ins from {self.directory}, not {path}",
                hint=f"--drop-in-config {self.directory}/{DROP_IN_NAME}, or leave it out",
            )
        return path

    # --- planning --------------------------------------------------------------------------------------

    def plan(self, wanted: Wanted, active: Active | None) -> Plan:
        """The drop-in, the toolkit's low-level runtimes, and with CDI the end of NVIDIA's old hook."""
        state = self._state()
        self._refuse(wanted)
        draft = crio_plan.configured(state, wanted)
        hooks = self._hooks(state.config)
        edits = [*self._edits(state, draft), *(hooks if wanted.cdi else ())]
        toolkit, notes = self._toolkit(state.config, wanted)
        notes = (*draft.notes, *notes, *self._notes(state.config, wanted, hooks))
        # what goes here for good is not put back by an undoing of the runtime
        had = any(name in state.config.handlers for name in wanted.names) or _removes(edits)
        verb, reason = self._verb(state.config, edits, active, None if active is None else active.has(wanted))
        edits += [toolkit] if toolkit else []
        return Plan("crio", tuple(edits), verb, reason, notes, None, draft.previous_default, had)

    def _toolkit(self, config: CrioConfig, wanted: Wanted) -> tuple[FileEdit | None, tuple[str, ...]]:
        if not wanted.handlers:
            return None, ()
        return toolkit_edit(self.host, config, self.daemon.version)

    def plan_removal(self, unwanted: Unwanted, active: Active | None) -> Plan:
        """Take the handlers out of every file that names them, and NVIDIA's old hook with them."""
        state = self._state()
        draft = crio_plan.removed(state, unwanted)
        edits = (*self._edits(state, draft), *self._hooks(state.config))
        return self._removal(state.config, edits, unwanted.names, active)

    def restoring(self, edits: tuple[FileEdit, ...], names: tuple[str, ...], active: Active | None) -> Plan:
        """The plan around edits that put files back."""
        return self._removal(self._state().config, edits, names, active)

    def _removal(
        self, config: CrioConfig, edits: tuple[FileEdit, ...], names: tuple[str, ...], active: Active | None
    ) -> Plan:
        gone = None if active is None else not any(name in active.handlers for name in names)
        verb, reason = self._verb(config, edits, active, gone)
        return Plan("crio", edits or (self._untouched(),), verb, reason)

    def _verb(
        self, config: CrioConfig, edits: Iterable[FileEdit], active: Active | None, in_force: bool | None
    ) -> tuple[str, str]:
        """A restart if what CRI-O reads changes its meaning, or the running one lags behind its files."""
        changed = {edit.path: edit for edit in edits if edit.action != "unchanged"}
        after = crio_check.after(config, changed.values(), self.directory)
        meaning = (config.handlers, config.named_default)
        if not same(list(meaning), [after.handlers, after.named_default]) or any(
            path.endswith(".json") for path in changed
        ):
            return "restart", _RESTART
        if in_force is False:
            return "restart", "the running CRI-O has an older configuration than its files"
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
            return False  # when a recorded file was written says nothing about its machine
        files = [file for file in config.files if any(map(_ours, file.handlers.items()))]
        times = [found.st_ctime for file in files if (found := self.host.stat(file.path)) is not None]
        return any(time > process.started + _CLOCK_SECONDS for time in times)

    # --- what is there ---------------------------------------------------------------------------------

    def _state(self) -> State:
        path = self.own_path
        config = load_crio(self.host, self.daemon.config_path, self.directory)
        for file in config.files:
            decode(self.host.read_bytes(file.path), file.path)  # what CRI-O can't read isn't edited either
        monitors = {str(table.get("monitor_path", "")) for table in config.handlers.values()} - {""}
        missing = tuple(one for one in monitors if not self.host.exists(one))
        return State(config, path, self.daemon.version, self._unread(config), missing, self._conmon(config))

    def _unread(self, config: CrioConfig) -> tuple[CrioFile, ...]:
        """NVIDIA's file at the place where nvidia-ctk wrote it until 1.19: CRI-O never looks there."""
        path = f"{self.daemon.config_path.rpartition('/')[0]}/conf.d/{DROP_IN_NAME}"
        if any(same_file(self.host, path, file.path) for file in config.files):
            return ()
        try:
            file = load_file(self.host, path)
        except GpunodeError:
            return ()  # broken, and nobody reads it
        return (file,) if file is not None else ()

    def _conmon(self, config: CrioConfig) -> str:
        """The monitor to name in a handler that inherits none; empty where CRI-O finds one by itself."""
        if config.setting("runtime", "conmon") or option_value(self.daemon.argv[1:], "--conmon"):
            return ""
        found = self.host.which("conmon") is None and self.host.executable(_PACKAGED_CONMON)
        return _PACKAGED_CONMON if found else ""

    def _edits(self, state: State, draft: Draft) -> tuple[FileEdit, ...]:
        edits = tuple(
            FileEdit(path, before, None if text is None else text.encode())
            for path, text in draft.texts.items()
            for before in [self.host.read_bytes(path)]
        )
        return edits or (self._untouched(),)

    def _untouched(self) -> FileEdit:
        content = self.host.read_bytes(self.own_path)
        return FileEdit(self.own_path, content, content)

    def _hooks(self, config: CrioConfig) -> tuple[FileEdit, ...]:
        """Edits that remove NVIDIA's hooks from where this CRI-O looks for some."""
        listed = config.setting("runtime", "hooks_dir")
        named = [one for one in listed if isinstance(one, str)] if isinstance(listed, list) else []
        return hook_removals(self.host, named or _HOOK_DIRECTORIES)

    def _refuse(self, wanted: Wanted) -> None:
        version = self.daemon.version
        if wanted.cdi and version and version < _HAS_CDI:
            raise PreconditionError(
                f"CRI-O {'.'.join(map(str, version))} has no CDI, which came with 1.24",
                hint="leave out --cdi or upgrade CRI-O",
            )
        default = option_value(self.daemon.argv[1:], "--default-runtime")
        if wanted.default and default not in (None, wanted.default):
            raise self._outdone(f"--default-runtime {default}")
        flags = ",".join(option_values(self.daemon.argv[1:], "--runtimes"))
        for flag in filter(None, flags.split(",")):
            if flag.partition(":")[0] in wanted.names:
                raise self._outdone(f"--runtimes {flag}")

    def _outdone(self, flag: str) -> ConfigError:
        where = f"systemctl edit --full {self.daemon.unit}" if self.daemon.unit else "its command line"
        return ConfigError(
            f"CRI-O is started with {flag}, or with a variable for it, which counts more than any file",
            hint=f"take that out: {where}",
        )

    def _notes(self, config: CrioConfig, wanted: Wanted, hooks: tuple[FileEdit, ...]) -> tuple[str, ...]:
        notes = [injects_twice(hooks[0].path)] if hooks and not wanted.cdi else []
        directories = config.setting("runtime", "cdi_spec_dirs")
        if wanted.cdi and isinstance(directories, list):
            notes.append(reads_none("it", "of CRI-O", map(str, directories)))
        return tuple(filter(None, notes))

    # --- the daemon ------------------------------------------------------------------------------------

    def validate(self, plan: Plan, expected: Wanted | None) -> tuple[str, ...]:
        """``crio config`` on staged copies, else the refusals that are known."""
        config = load_crio(self.host, self.daemon.config_path, self.directory)
        return crio_check.validate(self.host, self.daemon, config, self.directory, plan.changed, expected)

    def ask(self) -> Active:
        """Handlers and default from the running configuration; `DaemonError` if CRI-O doesn't answer."""
        from gpunode.daemons.crio_api import CrioApi

        tree = CrioApi(self.host, self.daemon.socket).config()
        handlers = dig(tree, "crio", "runtime", "runtimes")
        if not isinstance(handlers, dict):
            raise DaemonError(f"CRI-O's /config at {self.daemon.socket} lists no runtimes")
        default: Any = dig(tree, "crio", "runtime", "default_runtime")
        return Active(
            handlers=tuple(handlers),
            default=str(default or compiled_default(self.daemon.version)),
            paths=tuple(
                (name, str(table["runtime_path"]))
                for name, table in handlers.items()
                if isinstance(table, dict) and table.get("runtime_path")
            ),
            live_restore=True,  # containers belong to conmon and outlive the daemon
        )


def _removes(edits: Iterable[FileEdit]) -> bool:
    return any(edit.action == "removed" for edit in edits)


def _ours(handler: tuple[str, Any]) -> bool:
    return is_nvidias(*handler)
