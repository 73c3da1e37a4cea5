"""Docker: daemon.json, `dockerd --validate`, reload or restart, and ``/info`` afterwards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpunode.errors import (
    ConfigError,
    DaemonError,
    GpunodeError,
    PreconditionError,
    ValidationError,
)
from gpunode.facts.daemons import Daemon, parse_version
from gpunode.facts.docker import (
    FLAG_REASON,
    PROGRAMS,
    beyond_reload,
    flag_conflicts,
    flag_default,
    flag_features,
    flag_place,
    flag_runtimes,
    parse_daemon_json,
    programs,
    refused_by_20,
    wrong_types,
)
from gpunode.facts.kubelet import KUBELETS, find_kubelet
from gpunode.facts.processes import environment, running
from gpunode.facts.systemd import read_unit
from gpunode.facts.toml import Tree, prune
from gpunode.facts.toolkit import DEFAULT_PATH
from gpunode.host import Host
from gpunode.host.journal import FileEdit
from gpunode.host.process import COMMAND_NOT_FOUND
from gpunode.output.result import many, some_of
from gpunode.output.typed import as_dict
from gpunode.runtime import docker_rootless, json_edit
from gpunode.runtime.docker_rootless import beside_another_users
from gpunode.runtime.engine import (
    Active,
    DesiredConfig,
    Engine,
    Plan,
    UnwantedConfig,
    decode,
    refuse_untrusted,
)

# Notes about Docker on this node beyond its files: pods, containers, the snap.

_MOST_CONTAINERS = 200  # each takes one more request to dockerd
_NAMED = 5
_TAKES_RUNTIME_CLASSES = (0, 4)  # cri-dockerd; older ones refuse a pod that names any


def notes(host: Host, daemon: Daemon, desired: DesiredConfig, active: Active | None) -> tuple[str, ...]:
    """Notes on a desired configuration."""
    texts = [
        _pods(host, desired, active),
        _global_no_cgroups(host, daemon),
        beside_another_users(host, daemon),
    ]
    if daemon.manager == "snap":
        texts.append(
            "the docker snap registers the runtime by itself at every start: snap set docker"
            " nvidia-support.disabled=true ends that"
        )
    if daemon.manager == "snap" and desired.cdi:
        texts.append(
            "the docker snap keeps a CDI specification of its own in /var/snap/docker/current/etc/cdi, for"
            " its runtime; its confinement may hide the node's"
        )
    return tuple(filter(None, texts))


def survivors(active: Active | None, verb: str) -> tuple[str, ...]:
    """A note that containers survive a restart, where they do."""
    if verb != "restart" or active is None or not active.live_restore or not active.running_containers:
        return ()
    surviving = many(active.running_containers, "running container")
    return (f"live-restore keeps {surviving} during the restart",)


def _pods(host: Host, desired: DesiredConfig, active: Active | None) -> str:
    """Pods on Docker use its default runtime: the kubelet calls cri-dockerd, which calls Docker."""
    if not desired.handlers or desired.default or (active is not None and active.default in desired.names):
        return ""
    try:
        processes = running(host, *KUBELETS, "cri-dockerd")
        kubelet = find_kubelet(host, processes)
    except GpunodeError:
        return ""
    if kubelet is None or not kubelet.joined or kubelet.engine != "docker":
        return ""
    main = desired.names[0]
    if "dockershim" not in kubelet.endpoint:
        shim = next((process for process in processes if process.name == "cri-dockerd"), None)
        answer = host.run([shim.argv[0] if shim else "cri-dockerd", "--version"], timeout=5.0)
        version = parse_version(answer.stdout) if answer.ok else ()
        if version >= _TAKES_RUNTIME_CLASSES or not version:
            return (
                f"the kubelet uses Docker through cri-dockerd: a pod gets {main} only by a RuntimeClass with"
                f" handler {main} (cri-dockerd 0.4 and later; gpunode manifests runtime-class), or by running"
                " this with --set-as-default"
            )
    return (
        "the kubelet uses Docker through a shim that knows no RuntimeClass: pods get Docker's default"
        " runtime, so run this with --set-as-default"
    )


def _global_no_cgroups(host: Host, daemon: Daemon) -> str:
    if daemon.user:
        return ""
    text = host.text_or_empty(DEFAULT_PATH)
    match = re.search(r"^[ \t]*no-cgroups[ \t]*=[ \t]*true", text, re.MULTILINE)
    if match is None:
        return ""
    line = text.count("\n", 0, match.start()) + 1
    return (
        f"{DEFAULT_PATH}:{line} sets no-cgroups for the whole node, a setting for rootless engines: in mode"
        ' legacy containers fail with "NVML: Unknown Error"; to end that: gpunode toolkit config set'
        " nvidia-container-cli.no-cgroups=false"
    )


def require_snap_program(host: Host, daemon: Daemon, desired: DesiredConfig) -> None:
    """`PreconditionError` for a program of the host: the snap's dockerd sees only those in the snap."""
    if daemon.manager != "snap":
        return
    for handler in desired.handlers:
        if not handler.path.startswith("/snap/docker/") or host.which(handler.path) is None:
            raise PreconditionError(
                f"the docker snap can't start {handler.path}: it sees only the programs in {PROGRAMS}",
                hint="snap refresh docker brings NVIDIA's; or use Docker's own packages instead of the snap",
                code="toolkit-missing",
            )


def still_used(host: Host, daemon: Daemon, names: tuple[str, ...]) -> tuple[str, str]:
    """Containers that use one of these runtimes: a note about them, and a refusal.

    Without its runtime a container can't be started again, neither manually nor by its restart policy. Both
    are empty if there is none, or dockerd doesn't answer. Of more than 200 containers only the newest count.
    """
    if not host.live:
        return "", ""
    from gpunode.daemons.docker import DockerApi

    try:
        users = DockerApi(host, daemon.socket).containers_of(names, _MOST_CONTAINERS)
    except DaemonError:
        return "", ""
    if not users:
        return "", ""
    up = [name for name, is_running in users if is_running]
    listed = some_of([name for name, _ in users], _NAMED)
    note = f"made with this runtime, can't be started again without it: {listed}"
    if not up:
        return note, ""
    containers = many(len(up), "running container")
    return note, f"{containers} can't be restarted without this runtime: {some_of(up, _NAMED)}"


# Plans for daemon.json. Pure functions over its text; `DockerEngine` reads, validates and queries.

BUILT_IN = "runc"  # dockerd refuses a file that defines a runtime of this name
_BUILT_IN_SHIMS = ("io.containerd.runc.v2", "io.containerd.runtime.v1.linux")  # of dockerd 20.10
_PATH_XOR_TYPE = (25,)  # fatal at start from here on; 24 reports it itself
_SHIM_NAMES = (23,)  # from here on a default runtime may be a containerd shim that no file mentions
# moby 28.2 treated CDI as on unless features.cdi is false (seen with 28.5.2); 25.0 had it off without the key
_CDI_BY_DEFAULT = (28, 2)


def configured(content: str, path: str, desired: DesiredConfig) -> str:
    """The file with the runtimes, and keys for CDI and the default if requested; the rest unchanged."""

    def mutate(tree: Tree) -> None:
        _check_types(tree, content, path)
        for handler in desired.handlers:
            runtimes = _table(tree, "runtimes")
            if not _is_right(runtimes.get(handler.name), handler.path):
                runtimes[handler.name] = {"path": handler.path, "runtimeArgs": []}
        if desired.default:
            tree["default-runtime"] = desired.default
        if desired.cdi:
            _table(tree, "features")["cdi"] = True

    return json_edit.edit(content, mutate, path)


def removed(content: str, path: str, unwanted: UnwantedConfig) -> str:
    """The file without the runtimes; a default among them is replaced by the previous one, or removed."""

    def mutate(tree: Tree) -> None:
        _check_types(tree, content, path)
        for name in unwanted.names:
            _take_out(tree, "runtimes", name)
        if tree.get("default-runtime") in unwanted.names:
            _put_default_back(tree, unwanted.previous_default)
        if unwanted.cdi and (tree.get("features") or {}).get("cdi") is True:  # false was set by the user
            _take_out(tree, "features", "cdi")

    return json_edit.edit(content, mutate, path)


def _table(tree: Tree, key: str) -> Tree:
    """The object at `key`, created if it is absent, or null, which dockerd accepts too."""
    if tree.get(key) is None:
        tree[key] = {}
    result: Tree = tree[key]
    return result


def _take_out(tree: Tree, key: str, name: str) -> None:
    """Remove `name` from the object at `key`, and that object if it is then empty."""
    if name in (tree.get(key) or {}):
        del tree[key][name]
        prune(tree, (key,))


def _put_default_back(tree: Tree, previous: str) -> None:
    known = previous in (tree.get("runtimes") or {}) or previous == BUILT_IN or _is_shim(previous)
    if previous and known:
        tree["default-runtime"] = previous
    else:
        del tree["default-runtime"]


def for_reload(content: str, path: str) -> str:
    """`content` with explicit values for keys that a reload ignores if they are absent.

    dockerd keeps its runtimes and default runtime if the file it reloads doesn't name them, and 20.10 panics
    on a file without the present default in `runtimes` while `default-runtime` is absent.
    """

    def mutate(tree: Tree) -> None:
        for key in ("runtimes", "default-runtime"):
            if not tree.get(key):  # null and "" count as absent
                tree[key] = {} if key == "runtimes" else BUILT_IN

    return json_edit.edit(content, mutate, path)


def refused_by_dockerd(content: str, path: str, version: tuple[int, ...]) -> str:
    """What dockerd is known to refuse in a file, as ``LINE: REASON``; empty if nothing is.

    It is used where ``--validate`` is missing, and for what that skips: from 25.0 on it ignores the runtimes
    (seen on 26.1.5 and 28.5.2), although errors in them are fatal at start.
    """
    tree = parse_daemon_json(content, path)
    keys, reason = next(wrong_types(tree), ((), ""))
    if reason:
        return f"{json_edit.line_of(content, *keys)}: {reason}"
    runtimes = tree.get("runtimes") or {}
    default = tree.get("default-runtime") or BUILT_IN
    keys, reason = _refused_runtimes(runtimes, version)
    if not reason and not (default in (BUILT_IN, *runtimes) or _is_built_in(default, version)):
        keys, reason = ("default-runtime",), f'default-runtime "{default}" is not among runtimes'
    if not reason and version and version < _HAS_VALIDATE:
        keys, reason = refused_by_20(tree)
        if not reason and content.startswith("\ufeff"):
            reason = "dockerd 20.10 can't read a byte order mark"
        if not reason and not content.strip():
            reason = "dockerd 20.10 takes {} for an empty file, but not an empty one"
    return f"{json_edit.line_of(content, *keys)}: {reason}" if reason else ""


def _refused_runtimes(runtimes: Tree, version: tuple[int, ...]) -> tuple[tuple[str, ...], str]:
    for name, entry in runtimes.items():
        if name == BUILT_IN:
            return ("runtimes", name), f'the runtime name "{BUILT_IN}" is reserved'
        of_path, of_type = (bool(as_dict(entry).get(key)) for key in ("path", "runtimeType"))
        if version >= _PATH_XOR_TYPE and of_path == of_type:
            return ("runtimes", name), f'the runtime "{name}" needs either a path or a runtimeType'
    return (), ""


def _is_built_in(name: str, version: tuple[int, ...]) -> bool:
    return _is_shim(name) if version >= _SHIM_NAMES else name in _BUILT_IN_SHIMS


def _is_shim(name: str) -> bool:
    """Whether dockerd (23.0 and up) reads a name as a containerd shim: PREFIX.NAME, without a slash."""
    return "/" not in name and bool(name.partition(".")[0]) and "." in name


def _is_right(entry: Any, path: str) -> bool:
    """Whether an existing entry already means the same; dockerd ignores nvidia-ctk's key `args`."""
    if not isinstance(entry, dict) or entry.get("path") != path:
        return False
    return not entry.get("runtimeArgs") and not entry.get("args") and "runtimeType" not in entry


def _check_types(tree: Tree, content: str, path: str) -> None:
    """Refuse types that dockerd refuses, of the settings that an edit here changes."""
    for keys, reason in wrong_types(tree):
        if keys in (("runtimes",), ("features",), ("default-runtime",)):
            line = json_edit.line_of(content, *keys)
            raise ConfigError(
                f"{path}:{line}: {reason}, so dockerd can't start with it",
                hint=f"correct that line: ${{EDITOR:-vi}} +{line} {path}",
            )


def cdi_is_on(tree: Mapping[str, Any], argv: tuple[str, ...], version: tuple[int, ...]) -> bool:
    """Whether a dockerd of this release has CDI with this file and these flags."""
    features = tree.get("features")
    values = flag_features(argv) | (features if isinstance(features, dict) else {})
    return bool(values.get("cdi", version >= _CDI_BY_DEFAULT))


# Validation of a new daemon.json: dockerd's own flags, and dockerd's check of a staged copy.

_HAS_VALIDATE = (23,)


def refuse_conflicts(host: Host, daemon: Daemon, after: str) -> None:
    """dockerd refuses to start with a key that is both a flag and in its file; don't write one.

    The flags of the running process count, and those of its unit, which may have changed since.
    """
    tree = parse_daemon_json(after, daemon.config_path)
    conflicts = [key for argv in _command_lines(host, daemon) for key in flag_conflicts(argv, tree)]
    if conflicts:
        raise ConfigError(
            f"dockerd is started with a flag for {', '.join(dict.fromkeys(conflicts))}, and refuses to start"
            f" with the same setting in {daemon.config_path}",
            hint=_without_keys(host, daemon, conflicts[0]),
        )


def refuse_flagged(host: Host, daemon: Daemon, names: tuple[str, ...]) -> None:
    """`ConfigError` if a runtime to remove is one of dockerd's flags: no file can remove it."""
    for argv in _command_lines(host, daemon):
        flags = {"runtimes": flag_runtimes(argv), "default-runtime": (flag_default(argv),)}
        for key, flag_names in flags.items():
            name = next((flag_name for flag_name in flag_names if flag_name in names), "")
            if name:
                flag = "--add-runtime" if key == "runtimes" else "--default-runtime"
                raise ConfigError(
                    f"dockerd is started with {flag} for the runtime {name}, which a change "
                    f"of {daemon.config_path} cannot remove",
                    hint=_without_keys(host, daemon, key),
                )


def _command_lines(host: Host, daemon: Daemon) -> tuple[tuple[str, ...], ...]:
    unit = read_unit(host, daemon.unit) if daemon.unit and not daemon.user else None
    own = unit.argv if unit is not None and unit.program == "dockerd" else daemon.argv
    return tuple(dict.fromkeys((daemon.argv, own)))


def _without_keys(host: Host, daemon: Daemon, key: str) -> str:
    place = flag_place(host, daemon.unit, key)
    if place:
        path, _, line = place.rpartition(":")
        return f"take the flag out of {place}: ${{EDITOR:-vi}} +{line} {path}; then systemctl daemon-reload"
    return (
        f"take the flag out: {f'systemctl edit --full {daemon.unit}' if daemon.unit else 'its command line'}"
    )


def validate_docker(host: Host, daemon: Daemon, edit: FileEdit) -> tuple[str, ...]:
    """`dockerd --validate` on a staged copy (23.0 and up), else the known refusals. Returns notes."""
    reason = refused_by_dockerd(decode(edit.after, edit.path), edit.path, daemon.version)
    if reason:
        there = edit.before is not None
        content = decode(edit.before, edit.path)
        before = refused_by_dockerd(content, edit.path, daemon.version) if there else ""
        raise _refused(edit, reason, before)
    if not host.live:
        return (f"{edit.path} was checked for known mistakes only: no program of that node is run here",)
    if daemon.version < _HAS_VALIDATE:
        return (f"{edit.path} was checked for known mistakes only: --validate came with dockerd 23.0",)
    if daemon.binary is None:
        return (f"{edit.path} was checked for known mistakes only: this dockerd can't be run by others",)
    reason = _refusal(host, daemon, edit.after or b"")
    if reason:
        raise _refused(edit, reason, _refusal(host, daemon, edit.before) if edit.before is not None else "")
    return ()


def _refused(edit: FileEdit, after: str, before: str) -> ValidationError:
    """The hint depends on whether the file was already broken."""
    if before:
        line = before.partition(":")[0]
        return ValidationError(
            f"dockerd refuses {edit.path} as it is: {_placed(edit.path, before)}",
            hint=f"correct it first: ${{EDITOR:-vi}} {f'+{line} ' if line.isdecimal() else ''}{edit.path}",
        )
    return ValidationError(
        f"dockerd would refuse the new {edit.path}: {_placed(edit.path, after)}",
        hint="nothing was written; see the change with --dry-run",
    )


def _placed(path: str, reason: str) -> str:
    line, _, text = reason.partition(": ")
    return f"{path}:{line}: {text}" if line.isdecimal() else reason


def _refusal(host: Host, daemon: Daemon, content: bytes) -> str:
    """The error of ``dockerd --validate`` for a file; empty if none."""
    with host.temporary_directory() as directory:
        staged = directory / "daemon.json"
        host.write_atomic(str(staged), content, mode=0o600)
        flags = _flags_without_config(daemon.argv)
        known = environment(host, daemon.process.pid) if daemon.process else {}
        answer = host.run(
            [daemon.binary or "dockerd", *flags, "--validate", f"--config-file={staged}"],
            timeout=20.0,
            env={"PATH": known["PATH"]} if "PATH" in known else {},  # where it looks for docker-proxy
        )
    if answer.ok or answer.code == COMMAND_NOT_FOUND:
        return ""
    refuse_untrusted(answer)
    return (answer.reason or "no reason given").replace(str(staged), daemon.config_path)


def _flags_without_config(argv: tuple[str, ...]) -> list[str]:
    """The daemon's own flags, so that a conflict between flag and file is detected."""
    flags: list[str] = []
    skip = False
    for argument in argv[1:]:
        if skip or argument.startswith("--config-file"):
            skip = argument == "--config-file"
            continue
        flags.append(argument)
    return flags


_PROGRAM = "nvidia-container-runtime"
_CDI_REASON = "features.cdi is read only when dockerd starts"


@dataclass(frozen=True)
class DockerEngine(Engine):
    """One dockerd and the daemon.json that it reads."""

    @property
    def program(self) -> str:
        """The file's program for ``nvidia`` if that is this node's runtime too, else a bare name.

        dockerd looks a bare name up in its own PATH; the snap's sees only its own programs.
        """
        known = self._known_program()
        if self.daemon.manager == "snap":
            return known if known.startswith("/snap/docker/") else f"{PROGRAMS}/{_PROGRAM}"
        return known if known.startswith("/") and known == self.host.which(_PROGRAM) else _PROGRAM

    def _known_program(self) -> str:
        try:
            text = self.host.read_text(self.daemon.config_path) or ""
            return programs(parse_daemon_json(text, self.daemon.config_path)).get("nvidia", "")
        except GpunodeError:
            return ""  # the plan reports what is wrong with the file

    def plan(self, desired: DesiredConfig, active: Active | None) -> Plan:
        """Merge the runtimes into daemon.json; a reload is enough unless CDI or ``--gpus`` needs a start."""
        path = self.daemon.config_path
        before = self.host.read_bytes(path)
        content = decode(before, path)
        desired.refuse_without_cdi(self.daemon)
        require_snap_program(self.host, self.daemon, desired)
        had_cdi = self._cdi_is_on(content)
        by_flag = flag_default(self.daemon.argv) == desired.default
        keys = desired._replace(
            cdi=desired.cdi and not had_cdi, set_as_default=desired.set_as_default and not by_flag
        )
        after = configured(content, path, keys)
        refuse_conflicts(self.host, self.daemon, after)
        user = docker_rootless.desired_files(self.host, self.daemon, desired)
        interim = for_reload(after, path).encode() if self._panics(after, active) else None
        undo = for_reload(content, path).encode()
        edit = FileEdit(path, before, before if after == content else after.encode(), interim, undo)
        verb, reason = self._verb(edit, desired, active, keys.cdi)
        if user.restart and verb != "restart":
            verb, reason = "restart", user.restart
        tree = parse_daemon_json(content, path)
        plan = Plan(
            "docker",
            (edit,),
            verb,
            reason,
            (
                *survivors(active, verb),
                *user.notes,
                *notes(self.host, self.daemon, desired, active),
            ),
            previous_default=desired.replaces(str(tree.get("default-runtime") or "")),
            had_runtime=any(name in (tree.get("runtimes") or {}) for name in desired.names),
            switched_cdi=keys.cdi,
        )
        return plan.with_beside(user.edits)

    def plan_removal(self, unwanted: UnwantedConfig, active: Active | None) -> Plan:
        """Remove the runtimes; the daemon reloads a text with explicit values where it needs them."""
        path = self.daemon.config_path
        before = self.host.read_bytes(path)
        content = decode(before, path)
        refuse_flagged(self.host, self.daemon, unwanted.names)
        after = removed(content, path, unwanted)
        edit = FileEdit(path, before, before if after == content else after.encode())
        plan = self.plan_edits((edit,), unwanted.names, active)
        return plan.with_beside(docker_rootless.unwanted_files(self.host, self.daemon, unwanted))

    def plan_edits(self, edits: tuple[FileEdit, ...], names: tuple[str, ...], active: Active | None) -> Plan:
        """The plan around the edit that removes `names` from daemon.json."""
        if not edits:
            return Plan("docker", ())
        plan = self._plan_own_edit(edits[0], names, active)
        if plan.verb == "none" and not plan.changed:
            return plan
        left = parse_daemon_json(decode(edits[0].after, edits[0].path), edits[0].path).get("runtimes") or {}
        going = tuple(name for name in names if name not in left)
        note, against = still_used(self.host, self.daemon, going) if going else ("", "")
        notes = (*plan.notes, *survivors(active, plan.verb), note)
        return plan._replace(notes=tuple(filter(None, notes)), confirm=against)

    def _plan_own_edit(self, edit: FileEdit, names: tuple[str, ...], active: Active | None) -> Plan:
        before, after = (decode(data, edit.path) for data in (edit.before, edit.after))
        stale = active is not None and not active.lacks(names)
        if edit.action == "unchanged":
            reason = "the running dockerd still has the runtime, and a reload would not take it out"
            return Plan("docker", (edit,), "restart", reason) if stale else Plan("docker", (edit,))
        if self._is_down(active):
            return Plan("docker", (edit,), notes=("dockerd doesn't run; it reads the file when it starts",))
        if self._cdi_is_on(before) != self._cdi_is_on(after):
            return Plan("docker", (edit,), "restart", _CDI_REASON)
        if flag_runtimes(self.daemon.argv):
            return Plan("docker", (edit,), "restart", FLAG_REASON)
        interim, undo = (for_reload(text, edit.path).encode() for text in (after, before))
        edit = FileEdit(edit.path, edit.before, edit.after, interim, undo)
        return Plan("docker", (edit,), "reload", "dockerd reloads its runtimes on SIGHUP")

    def _is_down(self, active: Active | None) -> bool:
        return self.host.live and self.daemon.process is None and active is None

    def _cdi_is_on(self, content: str) -> bool:
        tree = parse_daemon_json(content, self.daemon.config_path)
        return cdi_is_on(tree, self.daemon.argv, self.daemon.version)

    def _panics(self, after: str, active: Active | None) -> bool:
        """Whether a reload would crash dockerd 20.10: its default isn't in the file."""
        tree = parse_daemon_json(after, self.daemon.config_path)
        known = (BUILT_IN, *(tree.get("runtimes") or {}))
        return active is not None and not tree.get("default-runtime") and active.default not in known

    def _verb(
        self, edit: FileEdit, desired: DesiredConfig, active: Active | None, cdi_changes: bool
    ) -> tuple[str, str]:
        lacks_cdi = desired.cdi and active is not None and active.cdi is False
        if edit.action == "unchanged" and (active is None or active.has(desired)):
            return "none", ""
        if cdi_changes or lacks_cdi:
            return "restart", _CDI_REASON
        if self._is_down(active):
            return "restart", "dockerd doesn't run; it reads the file when it starts"
        if reason := beyond_reload(self.host, self.daemon):
            return "restart", reason
        if edit.action == "unchanged":
            return "reload", "daemon.json has the runtime already, the running dockerd has not"
        return "reload", "dockerd reloads its runtimes on SIGHUP"

    def validate(self, plan: Plan, expected: DesiredConfig | None) -> tuple[str, ...]:
        """`dockerd --validate` on a staged copy, or the known rules; `ValidationError` if it refuses."""
        edit = next(
            (candidate for candidate in plan.edits if candidate.path == self.daemon.config_path), None
        )
        if edit is None or edit.after is None:
            return ()
        return validate_docker(self.host, self.daemon, edit)

    def reload_edits(self) -> tuple[FileEdit, ...]:
        path = self.daemon.config_path
        content = self.host.read_bytes(path)
        undo = for_reload(decode(content, path), path).encode()
        return (FileEdit(path, content, content, undo=undo),)

    def query(self) -> Active:
        """Runtimes and default from ``GET /info``; `DaemonError` if dockerd doesn't answer."""
        from gpunode.daemons.docker import DockerApi

        info = DockerApi(self.host, self.daemon.socket).info()
        runtimes = info.get("Runtimes")
        if not isinstance(runtimes, dict):
            raise DaemonError(f"dockerd's /info at {self.daemon.socket} lists no runtimes")
        paths = {
            str(name): str(entry["path"])
            for name, entry in runtimes.items()
            if isinstance(entry, dict) and isinstance(entry.get("path"), str)
        }
        containers = info.get("ContainersRunning")
        return Active(
            handlers=tuple(map(str, runtimes)),
            default=str(info.get("DefaultRuntime") or ""),
            paths=paths,
            running_containers=containers if isinstance(containers, int) else 0,
            live_restore=info.get("LiveRestoreEnabled") is True,
            cdi=bool(info["CDISpecDirs"]) if "CDISpecDirs" in info else None,  # empty where CDI is off
        )
