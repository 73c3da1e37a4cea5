"""k3s and rke2: what they find by themselves first, then a drop-in, then their template.

Both look for NVIDIA's programs whenever they start, and render containerd's file from a base template with
what they found (k3s pkg/agent/containerd/config_linux.go and runtimes.go; rke2 embeds the same code). Since
February 2026 the base template imports ``config-v3.toml.d`` or, for version 2, ``config.toml.d`` beside it.
With containerd 2 a ``config-v3.toml.tmpl`` wins over a ``config.toml.tmpl``, which alone still works.
"""

from __future__ import annotations

from functools import cached_property

from gpunode.dataclass import dataclass, replace
from gpunode.errors import ConfigError, PreconditionError
from gpunode.facts.containerd import CRI_PLUGINS, dig, parse_toml
from gpunode.facts.daemons import Daemon
from gpunode.host import Host
from gpunode.runtime import distributions, k3s_template, toml_edit
from gpunode.runtime.containerd_tables import cri_of, runtime_table
from gpunode.runtime.engine import Active, FileEdit, Handler, Plan, Unwanted, Wanted, decode
from gpunode.runtime.k3s_files import K3sFiles
from gpunode.runtime.k3s_search import SEARCHED, registration
from gpunode.runtime.trees import Tree


@dataclass(frozen=True)
class K3sEngine:
    """The containerd of a k3s or rke2 node."""

    host: Host
    daemon: Daemon

    @property
    def program(self) -> str:
        """containerd wants an absolute path; where the distribution finds one, it is that one."""
        return self._files.found.get("nvidia", distributions.PROGRAM)

    def plan(self, wanted: Wanted, active: Active | None) -> Plan:
        """Nothing to write where the distribution registers the runtimes itself, else one file of ours."""
        config = self._files.config
        rest = tuple(handler for handler in wanted.handlers if not self._registers(handler))
        self._files.refuse_broken()
        self._refuse_clash()
        copied = wanted.replace and self._files.imports_drop_ins
        if copied or rest or wanted.default not in ("", config.default_runtime) or not self._has_cdi(wanted):
            self._require_rendered()
            edits = self._drop_in(wanted) if self._files.imports_drop_ins else self._template(wanted, rest)
        else:
            edits = ()
        plan = self._acting(edits, active is None or active.has(wanted), self._rendered_has(wanted))
        previous = config.named_default if wanted.default else ""
        known = any(self._files.defines(path, wanted.names) for path in self._files.own())
        return replace(
            plan,
            previous_default="" if previous == wanted.default else previous,
            had_runtime=known,
            switched_cdi=bool(edits) and not self._has_cdi(wanted),
        )

    def plan_removal(self, unwanted: Unwanted, active: Active | None) -> Plan:
        """Take the runtimes out of drop-ins and template; what the distribution finds itself stays."""
        edits = distributions.taken_out(self.host, self._files.drop_ins(), unwanted)
        path, text = self._files.template_path, self._files.template_text
        if text is not None and self._files.defines(path, unwanted.names):
            after = self._without_handlers(text, unwanted.names)
            edits += (distributions.edit_of(path, text.encode(), after),)
        return self.restoring(edits, unwanted.names, active)

    def restoring(self, edits: tuple[FileEdit, ...], names: tuple[str, ...], active: Active | None) -> Plan:
        """The plan around edits that are known to take `names` out."""
        own = tuple(name for name in names if name in self._files.found)
        there = active is not None and any(name in active.handlers for name in names if name not in own)
        plan = self._acting(edits, not there, rendered=True)
        notes = tuple(
            f"{self.daemon.manager} registers {name} by itself as long as {self._files.found[name]} is there"
            for name in own
        )
        return replace(plan, remaining=own, notes=notes)

    def validate(self, plan: Plan, expected: Wanted | None) -> tuple[str, ...]:
        """Let containerd read what the distribution would render; notes if that can't be foreseen."""
        config = self._files.config
        edits = tuple(edit for edit in plan.edits if edit.path != self._files.template_path)
        template = next((edit for edit in plan.changed if edit.path == self._files.template_path), None)
        if template is not None:
            after = None if template.after is None else decode(template.after, template.path)
            base = k3s_template.base_of(self._files.template_text, config.main_text)
            if base is not None:
                base += "".join(
                    registration(name, path, config.plugin)
                    for name, path in self._files.found.items()
                    if k3s_template.line_of_handler(base, name) is None
                )
            text = k3s_template.rendered(after, base) if base is not None else None
            if text is None:
                return (f"not validated: only {self.daemon.manager} can render {self._files.template_path}",)
            edits += (FileEdit(config.path, config.main_text.encode(), text.encode()),)
        found = tuple(Handler(name, program) for name, program in self._files.found.items())
        return distributions.validate(self.host, self.daemon, config, edits, expected, found)

    def ask(self) -> Active:
        """What the CRI at its socket says."""
        return distributions.ask(self.host, self.daemon)

    @cached_property
    def _files(self) -> K3sFiles:
        return K3sFiles(self.host, self.daemon)

    def _registers(self, handler: Handler) -> bool:
        """Whether the next start registers this very handler without our doing."""
        if self._files.found.get(handler.name) != handler.path:
            return False
        program = dig(self._files.config.runtimes, handler.name, "options", "BinaryName")
        overruled = any(self._files.defines(path, (handler.name,)) for path in self._files.drop_ins())
        return program == handler.path or not overruled

    def _has_cdi(self, wanted: Wanted) -> bool:
        return not wanted.cdi or distributions.has_cdi(self._files.config)

    def _rendered_has(self, wanted: Wanted) -> bool:
        options = (
            dig(self._files.config.runtimes, one.name, "options", "BinaryName") for one in wanted.handlers
        )
        return all(have == one.path for have, one in zip(options, wanted.handlers, strict=True))

    # --- what to write ---------------------------------------------------------------------------------

    def _require_rendered(self) -> None:
        if not self._files.config.exists:
            raise PreconditionError(
                f"{self.daemon.manager} has not rendered {self.daemon.config_path} yet:"
                " which version it wants isn't known",
                hint=f"start it once: systemctl start {self.daemon.unit or self.daemon.manager}",
            )

    def _drop_in(self, wanted: Wanted) -> tuple[FileEdit, ...]:
        path = f"{self._files.drop_in_directory}/{distributions.DROP_IN_NAME}"
        return distributions.edited(self.host, self._files.config, path, wanted)

    def _template(self, wanted: Wanted, rest: tuple[Handler, ...]) -> tuple[FileEdit, ...]:
        """Our tables at the template's end; what its base would render as well must not stand twice."""
        self._refuse_in_template(wanted)
        path, text = self._files.template_path, self._files.template_text
        todo = tuple(handler for handler in rest if not self._right_already(handler))
        if not todo:
            return ()
        for handler in todo:
            found = self._files.found.get(handler.name)
            if found:
                raise ConfigError(
                    f"{self.daemon.manager} finds {found} first and registers it as {handler.name}: the same"
                    f" table in {path} would keep its containerd from starting",
                    hint=f"remove {found}, or take it: --nvidia-runtime-path {found}",
                )
        self._refuse_foreign(text or "", tuple(handler.name for handler in todo))
        before = None if text is None else text.encode()
        return (distributions.edit_of(path, before, self._with_handlers(todo)),)

    def _own_tables(self) -> Tree:
        """What gpunode has in the template already."""
        text = k3s_template.tables_of(self._files.template_text or "")
        return parse_toml(text, self._files.template_path)

    def _with_handlers(self, handlers: tuple[Handler, ...]) -> str:
        """The template with these runtimes, in its version's tables, beside those that are ours already."""
        tree, path = self._own_tables(), self._files.template_path
        cri = cri_of(tree, CRI_PLUGINS[self._files.version])
        runtimes = cri.setdefault("containerd", {}).setdefault("runtimes", {})
        runtimes |= {one.name: runtime_table(self._files.config, None, one, False) for one in handlers}
        return k3s_template.with_tables(self._files.template_text, _as_text(tree, path))

    def _without_handlers(self, text: str, names: tuple[str, ...]) -> str | None:
        """The template without these runtimes; None for one that gpunode made and that is empty then."""
        self._refuse_foreign(text, names)
        tree = self._own_tables()
        tables = [dig(plugin, "containerd", "runtimes") for plugin in tree.get("plugins", {}).values()]
        for table in filter(None, tables):
            for name in names:
                table.pop(name, None)
        if not any(tables):
            return k3s_template.without_tables(text)
        return k3s_template.with_tables(text, _as_text(tree, self._files.template_path))

    def _right_already(self, handler: Handler) -> bool:
        """Whether the template defines the handler and the rendered file has it as wanted."""
        options = dig(self._files.config.runtimes, handler.name, "options", "BinaryName")
        return self._files.defines(self._files.template_path, (handler.name,)) and options == handler.path

    def _refuse_in_template(self, wanted: Wanted) -> None:
        """What needs a key in a table that the base template has already."""
        name = self.daemon.manager
        if wanted.default not in ("", self._files.config.default_runtime):
            raise ConfigError(
                f"{name}'s template {self._files.template_path} can't choose the default runtime:"
                " its base has that table already",
                hint=f"let {name} do it: with the toolkit in a directory of its PATH, put"
                f" 'default-runtime: {wanted.default}' into /etc/rancher/{name}/config.yaml",
            )
        if not self._has_cdi(wanted):
            raise ConfigError(
                f"this release of {name} runs containerd without CDI, and its template can't switch it on",
                hint=f"upgrade {name} to one with containerd 2, or leave out --cdi",
            )

    def _refuse_foreign(self, text: str, names: tuple[str, ...]) -> None:
        for name in names:
            line = k3s_template.line_of_handler(text, name)
            if line is not None:
                path = self._files.template_path
                raise ConfigError(
                    f"{path}:{line}: the runtime {name} is defined there already, not by gpunode",
                    hint=f"take those tables out, then run this again: ${{EDITOR:-vi}} +{line} {path}",
                )

    def _refuse_clash(self) -> None:
        """A template that can't be rendered any more since the toolkit lies where it is found."""
        path = self._files.template_path
        for name, program in self._files.found.items():
            line = k3s_template.line_of_handler(self._files.template_text or "", name)
            if line is not None:
                raise ConfigError(
                    f"{path}:{line}: {name} is defined there, and {self.daemon.manager} registers it by"
                    f" itself for {program}: with the same table twice its containerd can't start",
                    hint=f"take those tables out, then run this again: ${{EDITOR:-vi}} +{line} {path}",
                )

    def _acting(self, edits: tuple[FileEdit, ...], in_force: bool, rendered: bool) -> Plan:
        name = self.daemon.manager
        verb, reason = "none", ""
        if any(edit.action != "unchanged" for edit in edits):
            verb, reason = "restart", f"{name} renders containerd's file only when it starts"
        elif not rendered and self.daemon.process is not None:
            verb, reason = "restart", f"{name} looks for NVIDIA's runtimes only when it starts"
        elif not in_force:
            verb, reason = "restart", "the files are right already, the running containerd has not read them"
        reason += f"; {distributions.away(self.daemon)}" if reason else ""
        return distributions.plan_of(self.daemon, edits, self._files.config, verb, reason)


def _as_text(tree: Tree, path: str) -> str:
    """Our tables, each handler's by itself, guarded where the distribution may register it one day."""
    texts = []
    for plugin, cri in tree["plugins"].items():
        for name, table in cri["containerd"]["runtimes"].items():
            one = {"plugins": {plugin: {"containerd": {"runtimes": {name: table}}}}}
            text = toml_edit.document(one, path).strip() + "\n"
            texts.append(k3s_template.guarded(text, name) if name in SEARCHED else text)
    return "".join(texts)
