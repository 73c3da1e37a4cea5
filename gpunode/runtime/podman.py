"""Podman: CDI works without configuration; a drop-in adds the nvidia runtime on request; no restart."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from gpunode.errors import ConfigError, DaemonError, UsageError, ValidationError
from gpunode.facts.cdi import reads_none
from gpunode.facts.podman import CONFIG, DROP_INS, PodmanConfig, load_podman
from gpunode.facts.toml import Tree, dig, parse_toml, prune
from gpunode.facts.toolkit import SYSTEM_DIRECTORIES, nvidia_hooks
from gpunode.host.journal import FileEdit
from gpunode.host.process import Completed
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
)
from gpunode.runtime.toml_edit import document

# Plans for podman's files. Pure functions over their text; `PodmanEngine` reads, validates and queries.

DROP_IN = f"{DROP_INS}/99-nvidia.conf"


def configured(config: PodmanConfig, handlers: tuple[Handler, ...], default: str) -> PlannedFiles:
    """The drop-in with the runtimes that the files don't have yet."""
    runtimes = config.runtimes
    new = {
        handler.name: [handler.path] for handler in handlers if runtimes.get(handler.name) != [handler.path]
    }
    before = config.setting("runtime") or ""
    changes_default = default not in ("", before)
    if not new and not changes_default:
        return PlannedFiles({})
    for file in config.files:
        beaten = [name for name in new if name in file.runtimes]
        if changes_default and dig(file.tree, "engine", "runtime") is not None:
            beaten.append("runtime")
        if file.path > DROP_IN and file.path.startswith(DROP_INS) and beaten:
            raise ConfigError(
                f"{file.path} sets {beaten[0]} otherwise, and podman reads it after {DROP_IN}",
                hint=f"take it out there: ${{EDITOR:-vi}} {file.path}",
            )

    def mutate(tree: Tree) -> None:
        engine = tree.setdefault("engine", {})
        if new:
            engine.setdefault("runtimes", {}).update(new)
        if changes_default:
            engine["runtime"] = default

    own = next((file.text for file in config.files if file.path == DROP_IN), "")
    texts = {DROP_IN: toml_edit.edit(own, mutate, DROP_IN)}
    return PlannedFiles(texts, previous_default=str(before) if changes_default else "")


def removed(config: PodmanConfig, unwanted: UnwantedConfig) -> PlannedFiles:
    """The administrator's files without the runtimes; a drop-in that is then empty is removed."""

    def mutate(tree: Tree) -> None:
        engine = tree["engine"]
        if engine.get("runtime") in unwanted.names:
            del engine["runtime"]
        for name in [name for name in unwanted.names if name in engine.get("runtimes", {})]:
            del engine["runtimes"][name]
        prune(tree, ("engine", "runtimes"))

    texts: dict[str, str | None] = {}
    for file in config.files:
        is_default = dig(file.tree, "engine", "runtime") in unwanted.names
        if not file.path.startswith("/etc/") or not (is_default or set(unwanted.names) & set(file.runtimes)):
            continue
        take_out = toml_edit.edit_or_remove if file.path == DROP_IN else toml_edit.edit
        texts[file.path] = take_out(file.text, mutate, file.path)
    return PlannedFiles(texts)


_SECONDS = 30.0
_NO_REASON = "it gives no reason"
_WHY = "podman reads its files each time it runs, so gpunode queries podman itself"


@dataclass(frozen=True)
class PodmanEngine(Engine):
    """Podman and the system's containers.conf files; those of ordinary users are never changed."""

    # --- planning --------------------------------------------------------------------------------------

    def plan(self, desired: DesiredConfig, active: Active | None) -> Plan:
        """Register the runtimes, or, for CDI, only remove what would inject GPUs a second time.

        With CDI a runtime is registered only as the default: ``--device`` doesn't need its name.
        """
        config = self._config()
        hooks = self._hooks(config)
        handlers = desired.handlers if desired.default or not desired.cdi else ()
        draft = configured(config, handlers, desired.default)
        edits = (*edits_to(self.host, draft.texts, DROP_IN), *(hooks if desired.cdi else ()))
        # undoing the runtime does not restore a hook that is removed here
        had = any(name in config.runtimes for name in desired.names) or bool(hooks and desired.cdi)
        notes = self._notes(config, desired, handlers, hooks)
        verb = "wait" if draft.texts else "none"
        reason = _WHY if draft.texts else ""
        return Plan("podman", edits, verb, reason, notes, None, draft.previous_default, had)

    def plan_removal(self, unwanted: UnwantedConfig, active: Active | None) -> Plan:
        """Remove the runtimes from the administrator's files, and NVIDIA's old hook."""
        config = self._config()
        draft = removed(config, unwanted)
        edits = edits_to(self.host, draft.texts, DROP_IN)
        return self.plan_edits((*edits, *self._hooks(config)), unwanted.names, active)

    def plan_edits(self, edits: tuple[FileEdit, ...], names: tuple[str, ...], active: Active | None) -> Plan:
        """The plan around edits that restore files."""
        read = any(edit.action != "unchanged" and edit.path.endswith(".conf") for edit in edits)
        return Plan("podman", edits, "wait" if read else "none", _WHY if read else "")

    def _config(self) -> PodmanConfig:
        if self.daemon.config_path != CONFIG:
            raise UsageError(
                f"podman reads {CONFIG}, not {self.daemon.config_path}", hint="leave out --config"
            )
        config = load_podman(self.host)
        for file in config.files:
            decode(self.host.read_bytes(file.path), file.path)  # a file that isn't UTF-8 isn't edited
        return config

    def _hooks(self, config: PodmanConfig) -> tuple[FileEdit, ...]:
        """Edits that remove NVIDIA's hooks from the directories where podman looks for hooks."""
        hooks = nvidia_hooks(self.host, (*SYSTEM_DIRECTORIES, *config.strings("hooks_dir")))
        return edits_to(self.host, dict.fromkeys(hook.path for hook in hooks))

    def _notes(
        self,
        config: PodmanConfig,
        desired: DesiredConfig,
        handlers: tuple[Handler, ...],
        hooks: tuple[FileEdit, ...],
    ) -> tuple[str, ...]:
        desired.refuse_without_cdi(self.daemon)
        notes = [injects_twice(hooks[0].path)] if hooks and not desired.cdi else []
        directories = config.strings("cdi_spec_dirs")
        if desired.cdi and directories:
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

    def validate(self, plan: Plan, expected: DesiredConfig | None) -> tuple[str, ...]:
        """``podman info`` with the new runtimes, in a store of its own."""
        edit = next((edit for edit in plan.changed if edit.path == DROP_IN and edit.after is not None), None)
        if edit is None or expected is None:
            return ()
        if not self.host.live or self.daemon.binary is None:
            return (f"{DROP_IN} was not checked: podman can't be run here",)
        with self.host.temporary_directory() as directory:
            staged = f"{directory}/containers.conf"
            self.host.write_atomic(staged, self._staged(edit).encode(), mode=0o600)
            places = ("--root", f"{directory}/root", "--runroot", f"{directory}/run")
            store = (*places, "--storage-driver", "vfs")
            for handler in expected.handlers:
                answer = self._info("--runtime", handler.name, *store, containers_conf=staged)
                if not answer.ok:
                    raise ValidationError(
                        f"podman refuses the new {DROP_IN}: {answer.reason or _NO_REASON}",
                        hint="nothing was written; correct the file and run this again",
                    )
        return ()

    def _staged(self, edit: FileEdit) -> str:
        """All runtimes of the new files in one file, because CONTAINERS_CONF names a single one."""
        engine = dict(parse_toml(decode(edit.after, edit.path), edit.path)["engine"])
        engine["runtimes"] = {**load_podman(self.host).runtimes, **engine.get("runtimes", {})}
        return document({"engine": engine}, "containers.conf")

    def query(self) -> Active:
        """The default and those runtimes of the files that podman accepts; `DaemonError` if it fails."""
        default, path = self._runtime()
        paths = {default: path}
        for name in load_podman(self.host).runtimes:
            try:
                actual_name, program = self._runtime("--runtime", name)
            except DaemonError:
                continue  # podman has it in its file, but not its program
            paths[actual_name] = program
        return Active(tuple(paths), default, paths, live_restore=True)

    def _runtime(self, *flags: str) -> tuple[str, str]:
        """Name and program of the runtime that podman would use with these flags."""
        answer = self._info(*flags)
        if not answer.ok:
            raise DaemonError(f"podman info fails: {answer.reason or _NO_REASON}", hint="see it: podman info")
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
