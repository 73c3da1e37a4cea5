"""Docker: daemon.json, `dockerd --validate`, reload or restart, and what `/info` says afterwards."""

from __future__ import annotations

from gpunode.dataclass import dataclass, replace
from gpunode.errors import DaemonError, GpunodeError, PreconditionError
from gpunode.facts.daemons import Daemon
from gpunode.facts.docker_file import parse_daemon_json
from gpunode.facts.docker_flags import flag_default, flag_runtimes
from gpunode.facts.docker_snap import PROGRAMS
from gpunode.host import Host
from gpunode.runtime import docker_check, docker_notes, docker_plan, docker_user
from gpunode.runtime.engine import Active, FileEdit, Plan, Unwanted, Wanted, decode

HOOK = "nvidia-container-runtime-hook"
_PROGRAM = "nvidia-container-runtime"
_HAS_CDI = (25,)
_CDI_REASON = "features.cdi is read only when dockerd starts"
_FLAG_REASON = "a reload would forget the runtimes that --add-runtime gave dockerd"


@dataclass(frozen=True)
class DockerEngine:
    """One dockerd and the daemon.json that it reads."""

    host: Host
    daemon: Daemon

    @property
    def program(self) -> str:
        """What the file has for ``nvidia`` if that is this node's runtime too, else a bare name.

        dockerd looks a bare name up in its own PATH; the snap's sees only its own programs.
        """
        known = self._known_program()
        if self.daemon.manager == "snap":
            return known if known.startswith("/snap/docker/") else f"{PROGRAMS}/{_PROGRAM}"
        return known if known.startswith("/") and known == self.host.which(_PROGRAM) else _PROGRAM

    def _known_program(self) -> str:
        try:
            text = self.host.read_text(self.daemon.config_path) or ""
            runtimes = parse_daemon_json(text, self.daemon.config_path).get("runtimes")
        except GpunodeError:
            return ""  # the plan says what is wrong with the file
        entry = runtimes.get("nvidia") if isinstance(runtimes, dict) else None
        path = entry.get("path") if isinstance(entry, dict) else None
        return path if isinstance(path, str) else ""

    def plan(self, wanted: Wanted, active: Active | None) -> Plan:
        """Merge the runtimes into daemon.json; a reload will do unless CDI or ``--gpus`` needs a start."""
        path = self.daemon.config_path
        before = self.host.read_bytes(path)
        content = decode(before, path)
        self._refuse_cdi(wanted)
        docker_notes.require_snap_program(self.host, self.daemon, wanted)
        had_cdi = self._cdi_is_on(content)
        by_flag = flag_default(self.daemon.argv) == wanted.default
        keys = replace(
            wanted, cdi=wanted.cdi and not had_cdi, set_as_default=wanted.set_as_default and not by_flag
        )
        after = docker_plan.configured(content, path, keys)
        docker_check.refuse_conflicts(self.host, self.daemon, after)
        user = docker_user.wanted_files(self.host, self.daemon, wanted)
        interim = docker_plan.for_reload(after, path).encode() if self._panics(after, active) else None
        undo = docker_plan.for_reload(content, path).encode()
        edit = FileEdit(path, before, before if after == content else after.encode(), interim, undo)
        verb, reason = self._verb(edit, wanted, active, keys.cdi)
        if user.restart and verb != "restart":
            verb, reason = "restart", user.restart
        tree = parse_daemon_json(content, path)
        previous = str(tree.get("default-runtime") or "")
        plan = Plan(
            "docker",
            (edit,),
            verb,
            reason,
            (
                *docker_notes.survivors(active, verb),
                *user.notes,
                *docker_notes.notes(self.host, self.daemon, wanted, active),
            ),
            previous_default=previous if wanted.default and previous != wanted.default else "",
            had_runtime=any(name in (tree.get("runtimes") or {}) for name in wanted.names),
            switched_cdi=keys.cdi,
        )
        return plan.with_beside(user.edits)

    def plan_removal(self, unwanted: Unwanted, active: Active | None) -> Plan:
        """Take the runtimes out; the daemon reloads a text that spells out what a reload would not undo."""
        path = self.daemon.config_path
        before = self.host.read_bytes(path)
        content = decode(before, path)
        docker_check.refuse_flagged(self.host, self.daemon, unwanted.names)
        after = docker_plan.removed(content, path, unwanted)
        edit = FileEdit(path, before, before if after == content else after.encode())
        plan = self.restoring((edit,), unwanted.names, active)
        return plan.with_beside(docker_user.unwanted_files(self.host, self.daemon, unwanted))

    def restoring(self, edits: tuple[FileEdit, ...], names: tuple[str, ...], active: Active | None) -> Plan:
        """The plan around the edit that takes `names` out of daemon.json."""
        if not edits:
            return Plan("docker", ())
        plan = self._restoring_own(edits[0], names, active)
        if plan.verb == "none" and not plan.changed:
            return plan
        going = self._going(edits[0], names)
        note, against = docker_notes.still_used(self.host, self.daemon, going) if going else ("", "")
        notes = (*plan.notes, *docker_notes.survivors(active, plan.verb), note)
        return replace(plan, notes=tuple(filter(None, notes)), confirm=against)

    def _going(self, edit: FileEdit, names: tuple[str, ...]) -> tuple[str, ...]:
        """Those of `names` that the edited file no longer has."""
        left = parse_daemon_json(decode(edit.after, edit.path), edit.path).get("runtimes") or {}
        return tuple(name for name in names if name not in left)

    def _restoring_own(self, edit: FileEdit, names: tuple[str, ...], active: Active | None) -> Plan:
        before, after = (decode(data, edit.path) for data in (edit.before, edit.after))
        stale = active is not None and any(name in active.handlers for name in names)
        if edit.action == "unchanged":
            reason = "the running dockerd still has the runtime, and a reload would not take it out"
            return Plan("docker", (edit,), "restart", reason) if stale else Plan("docker", (edit,))
        if self._is_down(active):
            return Plan("docker", (edit,), notes=("dockerd doesn't run; it reads the file when it starts",))
        if self._cdi_is_on(before) != self._cdi_is_on(after):
            return Plan("docker", (edit,), "restart", _CDI_REASON)
        if flag_runtimes(self.daemon.argv):
            return Plan("docker", (edit,), "restart", _FLAG_REASON)
        interim, undo = (docker_plan.for_reload(text, edit.path).encode() for text in (after, before))
        edit = FileEdit(edit.path, edit.before, edit.after, interim, undo)
        return Plan("docker", (edit,), "reload", "dockerd reloads its runtimes on SIGHUP")

    def _is_down(self, active: Active | None) -> bool:
        return self.host.live and self.daemon.process is None and active is None

    def _cdi_is_on(self, content: str) -> bool:
        tree = parse_daemon_json(content, self.daemon.config_path)
        return docker_plan.cdi_is_on(tree, self.daemon.argv, self.daemon.version)

    def _panics(self, after: str, active: Active | None) -> bool:
        """Whether dockerd 20.10 would die of reloading this: it has a default that the file doesn't know."""
        tree = parse_daemon_json(after, self.daemon.config_path)
        known = (docker_plan.BUILT_IN, *(tree.get("runtimes") or {}))
        return active is not None and not tree.get("default-runtime") and active.default not in known

    def _verb(
        self, edit: FileEdit, wanted: Wanted, active: Active | None, cdi_changes: bool
    ) -> tuple[str, str]:
        lacks_cdi = wanted.cdi and active is not None and active.cdi is False
        if edit.action == "unchanged" and (active is None or (active.has(wanted) and not lacks_cdi)):
            return "none", ""
        if cdi_changes or lacks_cdi:
            return "restart", _CDI_REASON
        if self._is_down(active):
            return "restart", "dockerd doesn't run; it reads the file when it starts"
        if flag_runtimes(self.daemon.argv):
            return "restart", _FLAG_REASON
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

    def _refuse_cdi(self, wanted: Wanted) -> None:
        if wanted.cdi and self.daemon.version and self.daemon.version < _HAS_CDI:
            version = ".".join(map(str, self.daemon.version))
            raise PreconditionError(
                f"Docker {version} has no CDI, which came with 25.0", hint="leave out --cdi or upgrade Docker"
            )

    def validate(self, plan: Plan, expected: Wanted | None) -> tuple[str, ...]:
        """`dockerd --validate` on a staged copy, or what is known of it; `ValidationError` if it refuses."""
        edit = next((one for one in plan.edits if one.path == self.daemon.config_path), None)
        if edit is None or edit.after is None:
            return ()
        return docker_check.validate(self.host, self.daemon, edit)

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
