"""Podman: ready for CDI as it is; a drop-in for those who want the nvidia runtime; nothing to restart."""

from __future__ import annotations

from typing import Any

from gpunode.dataclass import dataclass
from gpunode.errors import DaemonError, PreconditionError, UsageError, ValidationError
from gpunode.facts.containerd import dig, parse_toml
from gpunode.facts.daemons import Daemon
from gpunode.facts.oci_hooks import SYSTEM_DIRECTORIES
from gpunode.facts.podman import CONFIG, PodmanConfig, load_podman
from gpunode.host import Completed, Host
from gpunode.runtime import podman_plan
from gpunode.runtime.cdi_ready import hook_removals, injects_twice, reads_none
from gpunode.runtime.engine import Active, FileEdit, Handler, Plan, Unwanted, Wanted, decode
from gpunode.runtime.podman_plan import DROP_IN, Draft
from gpunode.runtime.toml_edit import document

_HAS_CDI = (4, 1)
_SECONDS = 30.0
_WHY = "podman reads its files each time it runs: it is asked what it has now"


@dataclass(frozen=True)
class PodmanEngine:
    """Podman and the system's containers.conf files; a user's own are never touched."""

    host: Host
    daemon: Daemon

    @property
    def program(self) -> str:
        return "/usr/bin/nvidia-container-runtime"

    # --- planning --------------------------------------------------------------------------------------

    def plan(self, wanted: Wanted, active: Active | None) -> Plan:
        """Register the runtimes, or, for CDI, only take away what would inject GPUs a second time.

        With CDI a runtime is registered only as the default: beside ``--device`` nobody needs its name.
        """
        config = self._config()
        hooks = self._hooks(config)
        handlers = wanted.handlers if wanted.default or not wanted.cdi else ()
        draft = podman_plan.configured(config, handlers, wanted.default)
        edits = (*self._edits(draft), *(hooks if wanted.cdi else ()))
        # a hook that goes here is not put back by an undoing of the runtime
        had = any(name in config.runtimes for name in wanted.names) or bool(hooks and wanted.cdi)
        notes = self._notes(config, wanted, handlers, hooks)
        verb = "wait" if draft.texts else "none"
        reason = _WHY if draft.texts else ""
        return Plan("podman", edits, verb, reason, notes, None, draft.previous_default, had)

    def plan_removal(self, unwanted: Unwanted, active: Active | None) -> Plan:
        """Take the runtimes out of the administrator's files, and NVIDIA's old hook away."""
        config = self._config()
        draft = podman_plan.removed(config, unwanted)
        return self.restoring((*self._edits(draft), *self._hooks(config)), unwanted.names, active)

    def restoring(self, edits: tuple[FileEdit, ...], names: tuple[str, ...], active: Active | None) -> Plan:
        """The plan around edits that put files back."""
        read = any(edit.action != "unchanged" and edit.path.endswith(".conf") for edit in edits)
        return Plan("podman", edits, "wait" if read else "none", _WHY if read else "")

    def _config(self) -> PodmanConfig:
        if self.daemon.config_path != CONFIG:
            raise UsageError(
                f"podman reads {CONFIG}, not {self.daemon.config_path}", hint="leave out --config"
            )
        config = load_podman(self.host)
        for file in config.files:
            decode(self.host.read_bytes(file.path), file.path)  # what isn't UTF-8 isn't edited
        return config

    def _edits(self, draft: Draft) -> tuple[FileEdit, ...]:
        if not draft.texts:
            content = self.host.read_bytes(DROP_IN)
            return (FileEdit(DROP_IN, content, content),)
        return tuple(
            FileEdit(path, self.host.read_bytes(path), None if text is None else text.encode())
            for path, text in draft.texts.items()
        )

    def _hooks(self, config: PodmanConfig) -> tuple[FileEdit, ...]:
        """Edits that remove NVIDIA's hooks from where podman looks for some."""
        return hook_removals(self.host, (*SYSTEM_DIRECTORIES, *config.strings("hooks_dir")))

    def _notes(
        self,
        config: PodmanConfig,
        wanted: Wanted,
        handlers: tuple[Handler, ...],
        hooks: tuple[FileEdit, ...],
    ) -> tuple[str, ...]:
        version = self.daemon.version
        if wanted.cdi and version and version < _HAS_CDI:
            raise PreconditionError(
                f"podman {'.'.join(map(str, version))} has no CDI, which came with 4.1",
                hint="leave out --cdi or upgrade podman",
            )
        notes = [injects_twice(hooks[0].path)] if hooks and not wanted.cdi else []
        directories = config.strings("cdi_spec_dirs")
        if wanted.cdi and directories:
            notes.append(reads_none("podman", "in containers.conf", directories))
        if handlers and self.host.environ.get("CONTAINERS_CONF") and self.host.live:
            notes.append("CONTAINERS_CONF is set here: with it podman reads that file and no other")
        if (self.host.read_text("/sys/fs/selinux/enforce") or "").strip() == "1":
            notes.append(
                "SELinux is enforcing: containers reach GPUs after setsebool -P container_use_devices on,"
                " or one by one with podman run --security-opt label=disable"
            )
        return tuple(filter(None, notes))

    # --- podman itself ---------------------------------------------------------------------------------

    def validate(self, plan: Plan, expected: Wanted | None) -> tuple[str, ...]:
        """``podman info`` with what the files will say of runtimes, in a store of its own."""
        edit = next((edit for edit in plan.changed if edit.path == DROP_IN and edit.after is not None), None)
        if edit is None or expected is None:
            return ()
        if not self.host.live or self.daemon.binary is None:
            return (f"{DROP_IN} was not checked: podman can't be asked here",)
        with self.host.temporary_directory() as directory:
            staged = f"{directory}/containers.conf"
            self.host.write_atomic(staged, self._staged(edit).encode(), mode=0o600)
            store = [
                "--root",
                f"{directory}/root",
                "--runroot",
                f"{directory}/run",
                "--storage-driver",
                "vfs",
            ]
            for handler in expected.handlers:
                answer = self._info("--runtime", handler.name, *store, containers_conf=staged)
                if not answer.ok:
                    raise ValidationError(
                        f"podman refuses the new {DROP_IN}: {_last_line(answer)}",
                        hint="nothing was written; correct the file and run this again",
                    )
        return ()

    def _staged(self, edit: FileEdit) -> str:
        """Everything that the files will say of runtimes, in one: CONTAINERS_CONF names a single file."""
        engine = dict(parse_toml(decode(edit.after, edit.path), edit.path)["engine"])
        engine["runtimes"] = {**load_podman(self.host).runtimes, **engine.get("runtimes", {})}
        return document({"engine": engine}, "containers.conf")

    def ask(self) -> Active:
        """The default and those runtimes of the files that podman accepts; `DaemonError` if it fails."""
        default, path = self._runtime()
        paths = {default: path}
        for name in load_podman(self.host).runtimes:
            try:
                found, program = self._runtime("--runtime", name)
            except DaemonError:
                continue  # podman has it in its file and no program for it
            paths[found] = program
        return Active(tuple(paths), default, tuple(paths.items()), live_restore=True)

    def _runtime(self, *flags: str) -> tuple[str, str]:
        """Name and program of the runtime that podman would use with these flags."""
        import json

        answer = self._info(*flags)
        if not answer.ok:
            raise DaemonError(f"podman info fails: {_last_line(answer)}", hint="see it: podman info")
        try:
            tree: Any = json.loads(answer.stdout)
        except (ValueError, RecursionError):
            tree = None
        name, path = (dig(tree, "host", "ociRuntime", key) for key in ("name", "path"))
        if not isinstance(name, str) or not isinstance(path, str):
            raise DaemonError("podman info names no OCI runtime", hint="see it: podman info")
        return name, path

    def _info(self, *flags: str, containers_conf: str = "") -> Completed:
        environment = {"CONTAINERS_CONF": containers_conf} if containers_conf else {}
        argv = [self.daemon.binary or "podman", *flags, "info", "--format", "json"]
        return self.host.run(argv, timeout=_SECONDS, env=environment)


def _last_line(answer: Completed) -> str:
    lines = (answer.stderr or answer.stdout).strip().splitlines()
    return lines[-1] if lines else "it gives no reason"
