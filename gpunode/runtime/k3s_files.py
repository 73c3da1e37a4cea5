"""The files of a k3s or rke2 node's containerd: the rendered one, its drop-ins and the template."""

from __future__ import annotations

from functools import cached_property

from gpunode.dataclass import dataclass
from gpunode.errors import ConfigError
from gpunode.facts.containerd import ContainerdConfig, dig, parse_toml
from gpunode.facts.daemons import Daemon
from gpunode.host import Host
from gpunode.runtime import distributions, k3s_template
from gpunode.runtime.engine import decode
from gpunode.runtime.k3s_search import found_at_start


@dataclass(frozen=True)
class K3sFiles:
    """What they hold now, and what the next start makes of them."""

    host: Host
    daemon: Daemon

    @cached_property
    def config(self) -> ContainerdConfig:
        """The rendered file with its drop-ins; one without settings if it is no TOML, see `refuse_broken`."""
        path = self.daemon.config_path
        try:
            return distributions.load(self.host, path, self.daemon.version)
        except ConfigError:
            text = decode(self.host.read_bytes(path), path)
            return ContainerdConfig(path, exists=True, main_text=text, main={}, merged={}, files=(path,))

    def refuse_broken(self) -> None:
        """`ConfigError` if the rendered file or a drop-in is no TOML."""
        name, path = self.daemon.manager, self.daemon.config_path
        try:
            distributions.load(self.host, path, self.daemon.version)
        except ConfigError as error:
            if not error.message.startswith(f"{path}:"):
                raise
            raise ConfigError(
                f"{error.message} ({name} has rendered it)",
                hint=f"correct {self.template_path} and restart {name}, which renders it anew",
            ) from error

    @property
    def directory(self) -> str:
        """Where all of them lie."""
        return self.daemon.config_path.rpartition("/")[0]

    @property
    def new_containerd(self) -> bool:
        """Whether this is containerd 2: by the program's version, else by the rendered file's."""
        version = self.daemon.version
        return version >= distributions.MERGES_DEEPLY if version else self.config.version >= 3

    @cached_property
    def template_path(self) -> str:
        """The template that the next start will use, or that should be made."""
        old, new = f"{self.directory}/config.toml.tmpl", f"{self.directory}/config-v3.toml.tmpl"
        only_old = self.host.exists(old) and not self.host.exists(new)
        return new if self.new_containerd and not only_old else old

    @cached_property
    def template_text(self) -> str | None:
        """The template; None if there is none."""
        data = self.host.read_bytes(self.template_path)
        return None if data is None else decode(data, self.template_path)

    @property
    def version(self) -> int:
        """The version of the file that the next start will render."""
        return 3 if self.template_path.endswith("-v3.toml.tmpl") else 2

    @property
    def drop_in_directory(self) -> str:
        """The directory that the base template imports."""
        return f"{self.directory}/{'config-v3' if self.version == 3 else 'config'}.toml.d"

    @property
    def imports_drop_ins(self) -> bool:
        """Whether the next rendered file reads drop-ins, and containerd merges them key by key."""
        pattern, text = f"{self.drop_in_directory}/*.toml", self.template_text
        rendered = self.new_containerd and pattern in self.config.imports
        return rendered and (text is None or pattern in text or k3s_template.registers_found(text))

    @cached_property
    def found(self) -> dict[str, str]:
        """NVIDIA's programs that the next start registers by itself, by the name of their handler."""
        if self.template_text is not None and not k3s_template.registers_found(self.template_text):
            return {}
        runtimes = dig(self.config.main, "plugins", self.config.plugin, "containerd", "runtimes") or {}
        template = self.template_text or ""
        ours = {
            name for name in runtimes if k3s_template.line_of_handler(k3s_template.tables_of(template), name)
        }
        return found_at_start(self.host, self.daemon, runtimes.keys() - ours)

    def drop_ins(self) -> tuple[str, ...]:
        """The drop-ins that are there, read by containerd or not."""
        read = (path for path in self.config.files if path != self.config.path)
        return tuple(dict.fromkeys((*read, *self.host.glob(self.drop_in_directory, "*.toml"))))

    def own(self) -> tuple[str, ...]:
        """The files in which a person or gpunode may have put something."""
        return (*self.drop_ins(), *([self.template_path] if self.template_text is not None else []))

    def defines(self, path: str, names: tuple[str, ...]) -> bool:
        """Whether one of these files defines one of the handlers."""
        if path == self.template_path:
            text = self.template_text or ""
            texts = (text, k3s_template.tables_of(text))
            return any(k3s_template.line_of_handler(one, name) for one in texts for name in names)
        plugins = parse_toml(decode(self.host.read_bytes(path), path), path).get("plugins")
        tables = plugins.values() if isinstance(plugins, dict) else ()
        return any(
            dig(table, "containerd", "runtimes", name) is not None for table in tables for name in names
        )
