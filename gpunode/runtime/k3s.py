"""k3s and rke2: runtimes that they register by themselves, else a drop-in, else their template.

Both look for NVIDIA's programs whenever they start, and render containerd's file from a base template with
what they found (k3s pkg/agent/containerd/config_linux.go and runtimes.go; rke2 embeds the same code). Since
February 2026 the base template imports ``config-v3.toml.d`` or, for version 2, ``config.toml.d`` in its
directory. With containerd 2 a ``config-v3.toml.tmpl`` takes precedence over a ``config.toml.tmpl``, which
still works alone.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property

from gpunode.errors import ConfigError, PreconditionError
from gpunode.facts.containerd import CRI_PLUGINS, ContainerdConfig
from gpunode.facts.daemons import Daemon
from gpunode.facts.processes import environment
from gpunode.facts.systemd import read_unit
from gpunode.facts.toml import Tree, dig, parse_toml
from gpunode.host import Host
from gpunode.host.journal import FileEdit
from gpunode.runtime import toml_edit
from gpunode.runtime.containerd_files import cri_of
from gpunode.runtime.containerd_plan import runtime_table
from gpunode.runtime.engine import (
    PROGRAM,
    Active,
    DesiredConfig,
    Handler,
    Plan,
    UnwantedConfig,
    decode,
    edits_to,
    verb_for,
)
from gpunode.runtime.rendered import DROP_IN_NAME, DistributionEngine

# NVIDIA's programs that k3s and rke2 find when they start, and so register by themselves.

# what both prepend to their PATH for the search, and the names under which they register what they find
_FIRST = ("/usr/local/nvidia/toolkit", "/opt/kwasm/bin")
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROGRAMS = {
    "nvidia": "nvidia-container-runtime",
    "nvidia-cdi": "nvidia-container-runtime.cdi",
    "nvidia-experimental": "nvidia-container-runtime-experimental",
}
SEARCHED = tuple(_PROGRAMS)


def programs_at_start(host: Host, daemon: Daemon, rendered: Container[str]) -> dict[str, str]:
    """Programs that a start would find, by the name of their handler.

    The variants that releases look for differ, so only those count that the rendered file has too. All look
    for `nvidia`, though before October 2024 not in all of PATH: if the last start could have found a program
    and didn't render it, the next one doesn't either.
    """
    places = (*_FIRST, *filter(None, _path(host, daemon).split(":")))
    programs = {
        name: next((path for place in places if host.executable(path := f"{place}/{program}")), "")
        for name, program in _PROGRAMS.items()
    }
    missed = programs["nvidia"] and "nvidia" not in rendered and _was_there(host, daemon, programs["nvidia"])
    sure = () if missed else ("nvidia",)
    return {name: path for name, path in programs.items() if path and (name in sure or name in rendered)}


def _was_there(host: Host, daemon: Daemon, path: str) -> bool:
    """Whether a program was installed before the running containerd was started."""
    status = host.stat(path)
    # a package keeps the build time of its files: only the inode's change time shows the installation
    return status is not None and daemon.process is not None and status.st_ctime < daemon.process.started


def registration(name: str, path: str, plugin: str) -> str:
    """Approximately what the base template adds to the rendered file for a program that is found."""
    table = f"plugins.'{plugin}'.containerd.runtimes.'{name}'"
    kind = 'runtime_type = "io.containerd.runc.v2"'
    return f"[{table}]\n  {kind}\n[{table}.options]\n  BinaryName = '{path}'\n"


def _path(host: Host, daemon: Daemon) -> str:
    """The PATH of the service: its unit's, else that of its running containerd, else systemd's own."""
    unit = read_unit(host, daemon.unit) if daemon.unit else None
    path = unit.environment.get("PATH", "") if unit else ""
    if path or daemon.process is None:
        return path or _DEFAULT_PATH
    return environment(host, daemon.process.pid).get("PATH") or _DEFAULT_PATH


# The Go template from which k3s and rke2 render containerd's file, as text. Pure functions.
#
# It isn't TOML, so it isn't parsed: gpunode's tables are at its end between two comment lines. Those of a
# handler that the distribution may later find by itself are rendered only if it doesn't: a duplicate table
# would keep its containerd from starting, however long afterwards the toolkit is installed. The conditions
# are in comments, so that gpunode's part is TOML before and after rendering.

BEGIN = "# gpunode: what follows is written by gpunode configure-runtime"
END = "# gpunode: end"
_MADE = """\
# made by gpunode configure-runtime
{{ template "base" . }}"""
_BASE = re.compile(r'\{\{-?\s*template\s+"base"\s+\.\s*-?\}\}')
_GUARD = '# {{{{ if not (index .ExtraRuntimes "{name}").BinaryName }}}}'
_UNGUARD = "# {{ end }}"
_GUARDED = re.compile(
    r'# \{\{ if not \(index \.ExtraRuntimes "([^"]+)"\)\.BinaryName \}\}\n(.*?)# \{\{ end \}\}', re.DOTALL
)
_BLOCK = re.compile(rf"\n*^{re.escape(BEGIN)}$.*?^{re.escape(END)}$\n?", re.MULTILINE | re.DOTALL)


def registers_found(text: str) -> bool:
    """Whether what the distribution finds by itself is in the rendered file."""
    foreign = _BLOCK.sub("", text)
    return bool(_BASE.search(foreign)) or ".ExtraRuntimes" in foreign


def line_of_handler(text: str, name: str) -> int | None:
    """The line, from 1, that defines the handler outside of gpunode's own tables."""
    header = rf"""^[ \t]*\[[^\]\n]*\bruntimes["']?\.["']?{re.escape(name)}["']?(?:\]|\.)"""
    own = _BLOCK.search(text)
    for match in re.finditer(header, text, re.MULTILINE):
        if own is None or not own.start() <= match.start() < own.end():
            return text.count("\n", 0, match.start()) + 1
    return None


def with_tables(text: str | None, tables: str) -> str:
    """The template with these tables as gpunode's own; a missing one is created around the base template."""
    base = _BLOCK.sub("\n", text).rstrip() if text is not None else _MADE
    return f"{base}\n\n{BEGIN}\n{tables.strip()}\n{END}\n"


def tables_of(text: str) -> str:
    """gpunode's own tables; empty if there are none."""
    match = _BLOCK.search(text)
    return match[0].strip().removeprefix(BEGIN).removesuffix(END).strip() if match else ""


def _program(runtime: object) -> object:
    return dig(runtime, "options", "BinaryName")


def without_tables(text: str) -> str | None:
    """The template without gpunode's own tables; None for one that gpunode made and that is then empty."""
    if not _BLOCK.search(text):
        return text
    left = _BLOCK.sub("\n", text)
    return None if left.strip() == _MADE else left


def guarded(tables: str, name: str) -> str:
    """The tables of a handler, omitted where the distribution registers one of this name itself."""
    return f"{_GUARD.format(name=name)}\n{tables.strip()}\n{_UNGUARD}\n"


def rendered(text: str | None, base: str) -> str | None:
    """The rendered template; None if it has directives that gpunode can't follow."""
    if text is None:
        return base
    plain = _GUARDED.sub(lambda match: "" if line_of_handler(base, match[1]) else match[2], text)
    return None if "{{" in _BASE.sub("", plain) else _BASE.sub(lambda _: base, plain)


def base_of(text: str | None, now: str) -> str | None:
    """What the base template gave when `now` was rendered from this template; None if unknown."""
    if text is None:
        return now
    end = now.find(BEGIN)
    parts = _BASE.split(_BLOCK.sub("\n", text) if end >= 0 else text)
    now = now[:end].rstrip() + "\n" if end >= 0 else now
    if len(parts) != 2 or any("{{" in part for part in parts):
        return None
    before, after = parts
    after = f"{after.rstrip()}\n" if end >= 0 else after
    fits = now.startswith(before) and now.endswith(after)
    return now[len(before) : len(now) - len(after)].rstrip() + "\n" if fits else None


@dataclass(frozen=True)
class K3sEngine(DistributionEngine):
    """The containerd of a k3s or rke2 node."""

    @property
    def program(self) -> str:
        """containerd needs an absolute path; if the distribution finds a program, it is that one."""
        return self._programs.get("nvidia", PROGRAM)

    def plan(self, desired: DesiredConfig, active: Active | None) -> Plan:
        """Nothing to write if the distribution registers the runtimes itself, else one file."""
        config = self._config
        rest = tuple(handler for handler in desired.handlers if not self._registers(handler))
        self._refuse_broken()
        self._refuse_clash()
        copied = desired.replace and self._imports_drop_ins
        if (
            copied
            or rest
            or desired.default not in ("", config.default_runtime)
            or not self._has_cdi(desired)
        ):
            self._require_rendered()
            path = f"{self._drop_in_directory}/{DROP_IN_NAME}"
            edits = (
                self._edited(config, path, desired)
                if self._imports_drop_ins
                else self._template(desired, rest)
            )
        else:
            edits = ()
        is_rendered = all(map(self._renders, desired.handlers))
        plan = self._acting(edits, active is None or active.has(desired), is_rendered)
        known = any(self._defines(path, desired.names) for path in self._own())
        return plan._replace(
            previous_default=desired.replaces(config.named_default),
            had_runtime=known,
            switched_cdi=bool(edits) and not self._has_cdi(desired),
        )

    def plan_removal(self, unwanted: UnwantedConfig, active: Active | None) -> Plan:
        """Remove the runtimes from drop-ins and template; what the distribution finds itself stays."""
        edits = self._taken_out(self._drop_ins(), unwanted)
        path, text = self._template_path, self._template_text
        if text is not None and self._defines(path, unwanted.names):
            edits += edits_to(self.host, {path: self._without_handlers(text, unwanted.names)})
        return self.plan_edits(edits, unwanted.names, active)

    def plan_edits(self, edits: tuple[FileEdit, ...], names: tuple[str, ...], active: Active | None) -> Plan:
        """The plan around edits that are known to remove `names`."""
        own = tuple(name for name in names if name in self._programs)
        there = active is not None and any(name in active.handlers for name in names if name not in own)
        plan = self._acting(edits, not there, rendered=True)
        notes = tuple(
            f"{self.daemon.manager} registers {name} by itself as long as {self._programs[name]} is there"
            for name in own
        )
        return plan._replace(remaining=own, notes=notes)

    def validate(self, plan: Plan, expected: DesiredConfig | None) -> tuple[str, ...]:
        """Let containerd read what the distribution would render; notes if that can't be predicted."""
        config = self._config
        edits = tuple(edit for edit in plan.edits if edit.path != self._template_path)
        template = next((edit for edit in plan.changed if edit.path == self._template_path), None)
        if template is not None:
            after = None if template.after is None else decode(template.after, template.path)
            base = base_of(self._template_text, config.main_text)
            if base is not None:
                base += "".join(
                    registration(name, path, config.plugin)
                    for name, path in self._programs.items()
                    if line_of_handler(base, name) is None
                )
            text = rendered(after, base) if base is not None else None
            if text is None:
                return (f"{self._template_path} wasn't validated: only {self.daemon.manager} renders it",)
            edits += (FileEdit(config.path, config.main_text.encode(), text.encode()),)
        return self._let_read(config, edits, expected, self._programs)

    def _registers(self, handler: Handler) -> bool:
        """Whether the next start registers exactly this handler by itself."""
        if self._programs.get(handler.name) != handler.path:
            return False
        overruled = any(self._defines(path, (handler.name,)) for path in self._drop_ins())
        return self._renders(handler) or not overruled

    def _has_cdi(self, desired: DesiredConfig) -> bool:
        return not desired.cdi or self._config.has_cdi

    def _renders(self, handler: Handler) -> bool:
        """Whether the rendered file has this handler."""
        return _program(self._config.runtimes.get(handler.name)) == handler.path

    # --- the files: the rendered one, its drop-ins and the template, now and after the next start --------

    @cached_property
    def _config(self) -> ContainerdConfig:
        """The rendered file with its drop-ins; empty if it isn't TOML, see `_refuse_broken`."""
        path = self.daemon.config_path
        try:
            return self._load(path)
        except ConfigError:
            text = decode(self.host.read_bytes(path), path)
            release = self.daemon.version
            return ContainerdConfig(path, True, text, main={}, merged={}, files=(path,), release=release)

    def _refuse_broken(self) -> None:
        """`ConfigError` if the rendered file or a drop-in isn't TOML."""
        name, path = self.daemon.manager, self.daemon.config_path
        try:
            self._load(path)
        except ConfigError as error:
            if not error.message.startswith(f"{path}:"):
                raise
            raise ConfigError(
                f"{error.message} ({name} has rendered it)",
                hint=f"correct {self._template_path} and restart {name}, which renders it again",
            ) from error

    @property
    def _directory(self) -> str:
        """The directory of all of them."""
        return self.daemon.config_path.rpartition("/")[0]

    @cached_property
    def _template_path(self) -> str:
        """The template that the next start will use, or that must be created."""
        old, new = f"{self._directory}/config.toml.tmpl", f"{self._directory}/config-v3.toml.tmpl"
        only_old = self.host.exists(old) and not self.host.exists(new)
        return new if self._config.deep and not only_old else old

    @cached_property
    def _template_text(self) -> str | None:
        """The template; None if there is none."""
        data = self.host.read_bytes(self._template_path)
        return None if data is None else decode(data, self._template_path)

    @property
    def _version(self) -> int:
        """The version of the file that the next start will render."""
        return 3 if self._template_path.endswith("-v3.toml.tmpl") else 2

    @property
    def _drop_in_directory(self) -> str:
        """The directory that the base template imports."""
        return f"{self._directory}/{'config-v3' if self._version == 3 else 'config'}.toml.d"

    @property
    def _imports_drop_ins(self) -> bool:
        """Whether the next rendered file reads drop-ins, and containerd merges them key by key."""
        pattern, text = f"{self._drop_in_directory}/*.toml", self._template_text
        rendered = self._config.deep and pattern in self._config.imports
        return rendered and (text is None or pattern in text or registers_found(text))

    @cached_property
    def _programs(self) -> dict[str, str]:
        """NVIDIA's programs that the next start registers by itself, by the name of their handler."""
        if self._template_text is not None and not registers_found(self._template_text):
            return {}
        runtimes = dig(self._config.main, "plugins", self._config.plugin, "containerd", "runtimes") or {}
        own = dig(self._own_tables(), "plugins", CRI_PLUGINS[self._version], "containerd", "runtimes") or {}
        own_names = {
            name for name in runtimes if name in own and _program(own[name]) == _program(runtimes[name])
        }  # the base template renders another program under this name instead of gpunode's
        return programs_at_start(self.host, self.daemon, runtimes.keys() - own_names)

    def _drop_ins(self) -> tuple[str, ...]:
        """The existing drop-ins, whether containerd reads them or not."""
        read = (path for path in self._config.files if path != self._config.path)
        return tuple(dict.fromkeys((*read, *self.host.glob(self._drop_in_directory, "*.toml"))))

    def _own(self) -> tuple[str, ...]:
        """The files that the administrator or gpunode may have edited."""
        return (*self._drop_ins(), *([self._template_path] if self._template_text is not None else []))

    def _defines(self, path: str, names: tuple[str, ...]) -> bool:
        """Whether one of these files defines one of the handlers."""
        if path == self._template_path:
            text = self._template_text or ""
            texts = (text, tables_of(text))
            return any(line_of_handler(entry, name) for entry in texts for name in names)
        plugins = parse_toml(decode(self.host.read_bytes(path), path), path).get("plugins")
        tables = plugins.values() if isinstance(plugins, dict) else ()
        return any(
            dig(table, "containerd", "runtimes", name) is not None for table in tables for name in names
        )

    # --- what to write ---------------------------------------------------------------------------------

    def _require_rendered(self) -> None:
        if not self._config.exists:
            raise PreconditionError(
                f"{self.daemon.manager} has not rendered {self.daemon.config_path} yet:"
                " which version it wants isn't known",
                hint=f"start it once: systemctl start {self.daemon.unit or self.daemon.manager}",
            )

    def _template(self, desired: DesiredConfig, rest: tuple[Handler, ...]) -> tuple[FileEdit, ...]:
        """gpunode's tables at the template's end; none may duplicate one that the base renders."""
        self._refuse_in_template(desired)
        path, text = self._template_path, self._template_text
        todo = tuple(
            handler
            for handler in rest
            if not (self._defines(path, (handler.name,)) and self._renders(handler))
        )
        if not todo:
            return ()
        for handler in todo:
            file = self._programs.get(handler.name)
            if file:
                raise ConfigError(
                    f"{self.daemon.manager} finds {file} first and registers it as {handler.name}: the same"
                    f" table in {path} would keep its containerd from starting",
                    hint=f"remove {file}, or take it: --nvidia-runtime-path {file}",
                )
        self._refuse_foreign(text or "", tuple(handler.name for handler in todo))
        return edits_to(self.host, {path: self._with_handlers(todo)})

    def _own_tables(self) -> Tree:
        """gpunode's tables in the present template."""
        text = tables_of(self._template_text or "")
        return parse_toml(text, self._template_path)

    def _with_handlers(self, handlers: tuple[Handler, ...]) -> str:
        """The template with these runtimes, in its version's tables, and gpunode's earlier ones."""
        tree, path = self._own_tables(), self._template_path
        cri = cri_of(tree, CRI_PLUGINS[self._version])
        runtimes = cri.setdefault("containerd", {}).setdefault("runtimes", {})
        runtimes |= {handler.name: runtime_table(self._config, None, handler, False) for handler in handlers}
        return with_tables(self._template_text, _as_text(tree, path))

    def _without_handlers(self, text: str, names: tuple[str, ...]) -> str | None:
        """The template without these runtimes; None for one that gpunode made and that is then empty."""
        self._refuse_foreign(text, names)
        tree = self._own_tables()
        tables = [dig(plugin, "containerd", "runtimes") for plugin in tree.get("plugins", {}).values()]
        for table in filter(None, tables):
            for name in names:
                table.pop(name, None)
        if not any(tables):
            return without_tables(text)
        return with_tables(text, _as_text(tree, self._template_path))

    def _refuse_in_template(self, desired: DesiredConfig) -> None:
        """Refuse what needs a key in a table that the base template has already."""
        name = self.daemon.manager
        if desired.default not in ("", self._config.default_runtime):
            raise ConfigError(
                f"{name}'s template {self._template_path} can't choose the default runtime:"
                " its base has that table already",
                hint=f"let {name} do it: with the toolkit in a directory of its PATH, put"
                f" 'default-runtime: {desired.default}' into /etc/rancher/{name}/config.yaml",
            )
        if not self._has_cdi(desired):
            raise ConfigError(
                f"this release of {name} runs containerd without CDI, and its template can't switch it on",
                hint=f"upgrade {name} to one with containerd 2, or leave out --cdi",
            )

    def _refuse_foreign(self, text: str, names: tuple[str, ...]) -> None:
        for name in names:
            line = line_of_handler(text, name)
            if line is not None:
                path = self._template_path
                raise ConfigError(
                    f"{path}:{line}: the runtime {name} is defined there already, not by gpunode",
                    hint=f"take those tables out, then run this again: ${{EDITOR:-vi}} +{line} {path}",
                )

    def _refuse_clash(self) -> None:
        """Refuse a template that can't be rendered any more since the distribution finds the toolkit."""
        path = self._template_path
        for name, program in self._programs.items():
            line = line_of_handler(self._template_text or "", name)
            if line is not None:
                raise ConfigError(
                    f"{path}:{line}: {name} is defined there, and {self.daemon.manager} registers it by"
                    f" itself for {program}: with the same table twice its containerd can't start",
                    hint=f"take those tables out, then run this again: ${{EDITOR:-vi}} +{line} {path}",
                )

    @property
    def _away(self) -> str:
        """What users lose when the distribution's service restarts."""
        servers = ("k3s.service", "rke2-server.service")
        return "pods keep running" + (
            ", this server's API is unavailable during the restart" if self.daemon.unit in servers else ""
        )

    def _acting(self, edits: tuple[FileEdit, ...], in_force: bool, rendered: bool) -> Plan:
        name = self.daemon.manager
        change = ("restart", f"{name} renders containerd's file only when it starts")
        unseen = not rendered and self.daemon.process is not None
        stale = f"{name} looks for NVIDIA's runtimes only when it starts" if unseen else ""
        verb, reason = verb_for(edits, in_force and not unseen, change, stale)
        reason += f"; {self._away}" if reason else ""
        return self._plan(edits, self._config, (verb, reason))


def _as_text(tree: Tree, path: str) -> str:
    """gpunode's tables, one per handler, guarded where the distribution may register it later."""
    texts = []
    for plugin, cri in tree["plugins"].items():
        for name, table in cri["containerd"]["runtimes"].items():
            runtime_tree = {"plugins": {plugin: {"containerd": {"runtimes": {name: table}}}}}
            text = toml_edit.document(runtime_tree, path).strip() + "\n"
            texts.append(guarded(text, name) if name in SEARCHED else text)
    return "".join(texts)
