"""Docker: daemon.json, `dockerd --validate`, reload or restart, and what `/info` says afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpunode.errors import ConfigError, DaemonError, ValidationError
from gpunode.facts.daemons import Daemon
from gpunode.facts.docker_file import parse_daemon_json
from gpunode.facts.docker_flags import flag_conflicts
from gpunode.host import COMMAND_NOT_FOUND, Host
from gpunode.runtime import docker_plan
from gpunode.runtime.engine import Active, FileEdit, Plan, Unwanted, Wanted, decode

HOOK = "nvidia-container-runtime-hook"
_HAS_VALIDATE = (23,)
_HAS_CDI = (25,)


@dataclass(frozen=True)
class DockerEngine:
    """One dockerd and the daemon.json that it reads."""

    host: Host
    daemon: Daemon

    @property
    def program(self) -> str:
        """A bare name: dockerd looks it up in its own PATH."""
        return "nvidia-container-runtime"

    def plan(self, wanted: Wanted, active: Active | None) -> Plan:
        """Merge the runtime into daemon.json; a reload will do unless CDI or ``--gpus`` needs a start."""
        path = self.daemon.config_path
        before = self.host.read_bytes(path)
        content = decode(before, path)
        self._refuse_conflicts(content, wanted)
        after = docker_plan.configured(content, path, wanted)
        edit = FileEdit(path, before, before if after == content else after.encode())
        cdi_changes = docker_plan.features_cdi(content, path) != docker_plan.features_cdi(after, path)
        verb, reason = self._verb(edit, wanted, active, cdi_changes)
        previous = parse_daemon_json(content, path).get("default-runtime") or ""
        replaced = previous if wanted.default and previous != wanted.default else ""
        interim = docker_plan.for_reload(after, path).encode() if self._panics(after, active) else None
        edit = FileEdit(path, before, edit.after, interim, docker_plan.for_reload(content, path).encode())
        known = parse_daemon_json(content, path).get("runtimes") or {}
        had = any(name in known for name in wanted.names)
        return Plan("docker", (edit,), verb, reason, self._notes(wanted), None, str(replaced), had)

    def plan_removal(self, unwanted: Unwanted, active: Active | None) -> Plan:
        """Take the runtimes out; the daemon reloads a text that spells out what a reload would not undo."""
        path = self.daemon.config_path
        before = self.host.read_bytes(path)
        content = decode(before, path)
        after = docker_plan.removed(content, path, unwanted)
        edit = FileEdit(path, before, before if after == content else after.encode())
        return self.restoring((edit,), unwanted.names, active)

    def restoring(self, edits: tuple[FileEdit, ...], names: tuple[str, ...], active: Active | None) -> Plan:
        """The plan around the edit that takes `names` out of daemon.json."""
        if not edits:
            return Plan("docker", ())
        edit = edits[0]
        before, after = (decode(data, edit.path) for data in (edit.before, edit.after))
        stale = active is not None and any(name in active.handlers for name in names)
        if edit.action == "unchanged":
            reason = "the running dockerd still has the runtime, and a reload would not take it out"
            return Plan("docker", (edit,), "restart", reason) if stale else Plan("docker", (edit,))
        if docker_plan.features_cdi(before, edit.path) != docker_plan.features_cdi(after, edit.path):
            return Plan("docker", (edit,), "restart", "features.cdi is read only when dockerd starts")
        interim, undo = (docker_plan.for_reload(text, edit.path).encode() for text in (after, before))
        edit = FileEdit(edit.path, edit.before, edit.after, interim, undo)
        return Plan("docker", (edit,), "reload", "dockerd reloads its runtimes on SIGHUP")

    def _panics(self, after: str, active: Active | None) -> bool:
        """Whether dockerd 20.10 would die of reloading this: it has a default that the file doesn't know."""
        tree = parse_daemon_json(after, self.daemon.config_path)
        known = (docker_plan.BUILT_IN, *(tree.get("runtimes") or {}))
        return active is not None and not tree.get("default-runtime") and active.default not in known

    def _verb(
        self, edit: FileEdit, wanted: Wanted, active: Active | None, cdi_changes: bool
    ) -> tuple[str, str]:
        if edit.action == "unchanged" and (active is None or active.has(wanted)):
            return "none", ""
        if cdi_changes:
            return "restart", "features.cdi is read only when dockerd starts"
        if self._hook_is_news():
            return (
                "restart",
                f"{HOOK} is newer than the running dockerd, which looks for it only at start (--gpus)",
            )
        if edit.action == "unchanged":
            return "reload", "daemon.json has the runtime already, the running dockerd has not"
        return "reload", "dockerd reloads its runtimes on SIGHUP"

    def _hook_is_news(self) -> bool:
        if not self.host.live:
            return False  # when a recorded file was written says nothing about its machine
        process, hook = self.daemon.process, self.host.which(HOOK)
        found = self.host.stat(hook) if hook else None
        return bool(process and found and found.st_ctime > process.started)

    def _notes(self, wanted: Wanted) -> tuple[str, ...]:
        if wanted.cdi and self.daemon.version and self.daemon.version < _HAS_CDI:
            version = ".".join(map(str, self.daemon.version))
            raise ConfigError(
                f"Docker {version} has no CDI, which came with 25.0", hint="leave out --cdi or upgrade Docker"
            )
        return ()

    def _refuse_conflicts(self, content: str, wanted: Wanted) -> None:
        """dockerd refuses to start with a key that is both a flag and in its file; don't write one."""
        tree = parse_daemon_json(content, self.daemon.config_path)
        planned: dict[str, Any] = dict(tree)
        if wanted.default:
            planned["default-runtime"] = wanted.default
        if wanted.cdi:
            planned["features"] = {}
        conflicts = flag_conflicts(self.daemon.argv, planned)
        if conflicts:
            where = f"systemctl edit --full {self.daemon.unit}" if self.daemon.unit else "its command line"
            raise ConfigError(
                f"dockerd is started with a flag for {', '.join(conflicts)}, and refuses to start"
                f" with the same setting in {self.daemon.config_path}",
                hint=f"take the flag out: {where}",
            )

    def validate(self, plan: Plan, expected: Wanted | None) -> tuple[str, ...]:
        """`dockerd --validate` on a staged copy (23.0 and up), else the refusals that are known."""
        edit = next((one for one in plan.edits if one.path == self.daemon.config_path), None)
        if edit is None or edit.after is None:
            return ()
        tree = parse_daemon_json(decode(edit.after, edit.path), edit.path)
        reason = docker_plan.refused_by_dockerd(tree)
        if reason:
            raise ValidationError(f"dockerd would refuse the new {edit.path}: {reason}")
        if self.daemon.version < _HAS_VALIDATE or self.daemon.binary is None or not self.host.live:
            return (f"{edit.path} was checked for known mistakes only: --validate came with dockerd 23.0",)
        self._ask_dockerd(edit)
        return ()

    def _ask_dockerd(self, edit: FileEdit) -> None:
        with self.host.temporary_directory() as directory:
            staged = directory / "daemon.json"
            self.host.write_atomic(str(staged), edit.after or b"", mode=0o600)
            flags = _flags_without_config(self.daemon.argv)
            answer = self.host.run(
                [self.daemon.binary or "dockerd", *flags, "--validate", f"--config-file={staged}"],
                timeout=20.0,
            )
        if not answer.ok and answer.code != COMMAND_NOT_FOUND:
            said = (answer.stderr or answer.stdout).strip().splitlines()[-1:] or ["no reason given"]
            raise ValidationError(
                f"dockerd refuses the new {edit.path}: {said[0].replace(str(staged), edit.path)}",
                hint="nothing was written; correct the file and run this again",
            )

    def ask(self) -> Active:
        """Runtimes and default from ``GET /info``; `DaemonError` if dockerd doesn't answer."""
        from gpunode.daemons.docker_api import DockerApi

        info = DockerApi(self.host, self.daemon.socket).info()
        runtimes = info.get("Runtimes")
        if not isinstance(runtimes, dict):
            raise DaemonError(f"dockerd's /info at {self.daemon.socket} lists no runtimes")
        paths = tuple(
            (str(name), str(entry["path"]))
            for name, entry in runtimes.items()
            if isinstance(entry, dict) and isinstance(entry.get("path"), str)
        )
        containers = info.get("ContainersRunning")
        return Active(
            handlers=tuple(map(str, runtimes)),
            default=str(info.get("DefaultRuntime") or ""),
            paths=paths,
            running_containers=containers if isinstance(containers, int) else 0,
            live_restore=info.get("LiveRestoreEnabled") is True,
            cdi=bool(info["CDISpecDirs"]) if "CDISpecDirs" in info else None,  # empty where CDI is off
        )


def _flags_without_config(argv: tuple[str, ...]) -> list[str]:
    """The daemon's own flags, so that a conflict between flag and file shows."""
    flags: list[str] = []
    skip = False
    for argument in argv[1:]:
        if skip or argument.startswith("--config-file"):
            skip = argument == "--config-file"
            continue
        flags.append(argument)
    return flags
