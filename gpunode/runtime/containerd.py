"""containerd: its file and imports, `config dump` as judge, restart, and what the CRI says afterwards."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpunode.errors import ConfigError, GpunodeError, PreconditionError
from gpunode.facts.containerd import (
    ContainerdConfig,
    dig,
    expand_import,
    load_config,
    owner,
    parse_toml,
)
from gpunode.facts.daemons import Daemon, systemd_runs
from gpunode.facts.kubelet import CONFIG, setting
from gpunode.host import Host
from gpunode.runtime import containerd_check, containerd_removal
from gpunode.runtime.containerd_plan import DROP_IN_NAME, State, configured
from gpunode.runtime.engine import Active, FileEdit, Plan, Unwanted, Wanted, decode
from gpunode.runtime.trees import Tree

_HAS_CDI = (1, 7)


@dataclass(frozen=True)
class ContainerdEngine:
    """One containerd with its configuration. `drop_in` is a path that the user asked for, else empty."""

    host: Host
    daemon: Daemon
    drop_in: str = ""

    @property
    def program(self) -> str:
        """containerd wants an absolute path."""
        return "/usr/bin/nvidia-container-runtime"

    def plan(self, wanted: Wanted, active: Active | None) -> Plan:
        """Add the runtime where this containerd reads it; any change needs a restart."""
        self._refuse_managed()
        if wanted.cdi and self.daemon.version and self.daemon.version < _HAS_CDI:
            release = ".".join(map(str, self.daemon.version))
            raise ConfigError(
                f"containerd {release} has no CDI, which came with 1.7", hint="leave out --cdi or upgrade it"
            )
        state, before = self._state()
        texts, version, notes = configured(state, wanted)
        edits = tuple(_edit(path, before.get(path), text) for path, text in texts.items())
        verb, reason = _verb(edits, active is None or active.has(wanted))
        previous = state.config.named_default if wanted.default else ""
        replaced = "" if previous == wanted.default else previous
        had = any(name in state.config.runtimes for name in wanted.names)
        files = edits or self._untouched(before)
        return Plan("containerd", files, verb, reason, notes, version, replaced, had)

    def plan_removal(self, unwanted: Unwanted, active: Active | None) -> Plan:
        """Take the runtimes out of every file that names them."""
        self._refuse_managed()
        state, before = self._state()
        texts = containerd_removal.removed(state, unwanted)
        edits = tuple(_edit(path, before.get(path), text) for path, text in texts.items())
        files = edits or self._untouched(before)
        return self._removal(files, unwanted.names, active, state.config.version)

    def restoring(self, edits: tuple[FileEdit, ...], names: tuple[str, ...], active: Active | None) -> Plan:
        """The plan around edits that are known to take `names` out."""
        return self._removal(edits, names, active, None)

    def _removal(
        self, edits: tuple[FileEdit, ...], names: tuple[str, ...], active: Active | None, version: int | None
    ) -> Plan:
        gone = active is None or not any(name in active.handlers for name in names)
        verb, reason = _verb(edits, gone)
        return Plan("containerd", edits, verb, reason, (), version)

    def _untouched(self, before: dict[str, bytes | None]) -> tuple[FileEdit, ...]:
        path = self.daemon.config_path
        return (FileEdit(path, before.get(path), before.get(path)),)

    def _refuse_managed(self) -> None:
        manager = owner(self.daemon.config_path)
        if manager:
            raise PreconditionError(
                f"this containerd belongs to {manager}, which writes {self.daemon.config_path} itself",
                hint="gpunode configures the containerd of the system and Docker; name one: --runtime docker",
            )

    def _state(self) -> tuple[State, dict[str, bytes | None]]:
        path, release = self.daemon.config_path, self.daemon.version
        config = load_config(self.host, path, release)
        drop_in = self.drop_in or f"{path.rpartition('/')[0]}/{DROP_IN_NAME}"
        before = {name: self.host.read_bytes(name) for name in (path, *config.files, drop_in)}
        if release and release < (2,) and config.version == 2 and _disabled_short(config):
            effective = None  # containerd itself refuses this file: "cri" is no plugin id in version 2
        else:
            effective = self._effective(config)
        state = State(
            config=config,
            texts={name: decode(data, name) for name, data in before.items()},
            release=release,
            effective=effective,
            drop_in=drop_in,
            drop_in_forced=bool(self.drop_in),
            drop_in_imported=self._imports(config, drop_in),
            systemd_cgroup=self._wants_systemd_cgroup(),
        )
        return state, before

    def _effective(self, config: ContainerdConfig) -> Tree | None:
        """containerd's merged view, asked for only if the files don't spell out a runc to copy."""
        if "runc" in config.runtimes or self.daemon.binary is None:
            return None
        return containerd_check.dump(self.host, self.daemon.binary, config.path if config.exists else None)

    def _imports(self, config: ContainerdConfig, drop_in: str) -> bool:
        """Whether the main file's imports would read `drop_in` (it need not exist yet)."""
        for pattern in config.imports:
            base = pattern if pattern.startswith("/") else f"{config.path.rpartition('/')[0]}/{pattern}"
            if "*" not in base and base == drop_in:
                return True
            if "*" in base and re.fullmatch(re.escape(base).replace(r"\*", "[^/]*"), drop_in):
                return True
            if self.host.exists(drop_in) and drop_in in expand_import(self.host, config.path, pattern):
                return True
        return False

    def _wants_systemd_cgroup(self) -> bool:
        """The kubelet's cgroupDriver, else what kubeadm defaults to where systemd runs on cgroup v2."""
        try:
            driver = setting(self.host.read_text(CONFIG) or "", "cgroupDriver")
        except GpunodeError:
            driver = None
        if driver:
            return driver == "systemd"
        return systemd_runs(self.host) and self.host.exists("/sys/fs/cgroup/cgroup.controllers")

    def validate(self, plan: Plan, expected: Wanted | None) -> tuple[str, ...]:
        """Let containerd merge staged copies and compare with its view of the files as they are."""
        if self.daemon.binary is None or not self.host.live:
            return ("containerd itself did not check the new configuration: none is at hand here",)
        config = load_config(self.host, self.daemon.config_path, self.daemon.version)
        return containerd_check.check(self.host, self.daemon, config, plan, expected)

    def ask(self) -> Active:
        """Handlers and default from the CRI's Status; `DaemonError` if it doesn't answer."""
        from gpunode.daemons.cri import Cri

        with Cri(self.host, self.daemon.socket) as cri:
            status = cri.status()
        runtimes = dig(status.config, "containerd", "runtimes")
        paths = []
        for name, entry in runtimes.items() if isinstance(runtimes, dict) else ():
            binary = dig(entry, "options", "BinaryName")
            if isinstance(binary, str) and binary:
                paths.append((str(name), binary))
        cdi = status.config.get("enableCDI")
        known = cdi if isinstance(cdi, bool) else None
        return Active(status.handlers, status.default_handler, tuple(paths), cdi=known)


def _disabled_short(config: ContainerdConfig) -> bool:
    return "cri" in config.disabled


def _verb(edits: tuple[FileEdit, ...], in_force: bool) -> tuple[str, str]:
    if any(edit.action != "unchanged" for edit in edits):
        return "restart", "containerd reads its configuration only when it starts; containers keep running"
    if not in_force:
        return "restart", "the files are right already, the running containerd has not read them"
    return "none", ""


def _edit(path: str, before: bytes | None, after: str | None) -> FileEdit:
    if after is None:
        return FileEdit(path, before, None)
    same_text = before is not None and parse_toml(after, path) == parse_toml(before.decode(), path)
    return FileEdit(path, before, before if same_text else after.encode())
