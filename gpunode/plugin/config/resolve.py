"""From flags, environment and file to one `Settings`, with the provenance of every value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gpunode.errors import ConfigError, GpunodeError
from gpunode.host import Host
from gpunode.plugin.config.options import BY_FIELD, LABELS_PREFIX, OPTIONS, Option
from gpunode.plugin.config.settings import MPS_ROOT, HealthSettings, LabelSettings, Settings
from gpunode.plugin.config.values import (
    TRUE,
    ConfigProblem,
    InvalidConfig,
    nearest,
    parse,
    split,
    valid_words,
)

# Checks of several values together: options that contradict each other. Pure.

_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/")


def check(
    settings: Settings, origins: Mapping[str, str], part: str = ""
) -> tuple[list[ConfigProblem], list[ConfigProblem]]:
    """(problems, warnings). Problems that depend on the node's GPUs are found when the GPUs are seen. `part`
    is labels for that command, and empty for those that serve."""

    def at(field: str) -> str:
        return origins.get(field, BY_FIELD[field].flags[0] if field in BY_FIELD else "")

    problems: list[ConfigProblem] = []
    warnings: list[ConfigProblem] = []

    def wrong(field: str, message: str, hint: str = "", key: str = "") -> None:
        problems.append(ConfigProblem(at(field), key, message, hint))

    def warn(field: str, message: str, hint: str = "") -> None:
        warnings.append(ConfigProblem(at(field), "", message, hint))

    mps, vendor = settings.shares_by_mps, settings.vendor
    if mps and settings.mig_strategy == "mixed":
        message = f"MPS can't serve MIG devices, which mig-strategy mixed ({at('mig_strategy')}) advertises"
        wrong("sharing", message, "take single or none, or timeSlicing", "sharing.mps")
    if mps and not settings.mps_root and part != "labels":
        hint = "use --mps to let gpunode run them, or --mps-root for daemons that run elsewhere"
        wrong("sharing", "nothing is configured to run the MPS daemons", hint, "sharing.mps")
    if vendor != "nvidia" and mps:
        wrong("sharing", f"MPS is NVIDIA's; the vendor is {vendor} ({at('vendor')})", key="sharing.mps")
    if vendor != "nvidia" and settings.mps:
        wrong("vendor", f"--mps is for NVIDIA's GPUs; the vendor is {vendor}")
    if settings.mps and not mps:
        warn("mps", "there is no sharing.mps in a config file: gpunode starts no daemon")
    key = settings.cdi_annotation_prefix
    if "cdi-annotations" in settings.device_list_strategy and not _PREFIX.fullmatch(key):
        message = f"{key!r} begins no annotation's key; engines look for cdi.k8s.io/ and pass others over"
        warn("cdi_annotation_prefix", message, "cdi.k8s.io/")
    if settings.imex_required and not settings.imex_channel_ids:
        warn("imex_required", "without channel IDs nothing is required", "--imex-channel-ids 0")
    if "stdout" in settings.labels.to and part != "labels":
        message = "a service has no stdout to show labels on"
        wrong("labels_to", message, "--labels file, node-feature or node")
    if settings.device_discovery_strategy == "vfio" and part != "labels":
        message = "GPUs that are kept for virtual machines can't be served to containers"
        hint = "gpunode labels --device-discovery-strategy vfio labels them"
        wrong("device_discovery_strategy", message, hint)
    vendors = {"mig_strategy": "nvidia", "resource_naming_strategy": "amd", "firmware": "amd"}
    for name, vendor_of_option in vendors.items():
        if name in origins and ":" not in at(name) and vendor != vendor_of_option:
            warn(name, f"ignored: the vendor is {vendor}")
    if settings.simulate and vendor != "nvidia":
        wrong("simulate", "simulated nodes have NVIDIA GPUs", "--vendor nvidia")
    return problems, warnings


DEFAULT = "default"
_SETS = ("health_disable", "health_enable")
Flags = Mapping[str, Sequence[str]]
"""By an option's field what stood on the command line: each time it was given, one text."""


@dataclass(frozen=True)
class ResolvedSettings:
    """`origins` has the source of the value for each option, and for `rules` and `sharing`.

    If `problems` has entries, `settings` is incomplete and must not be used.
    """

    settings: Settings
    origins: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[ConfigProblem, ...] = ()
    warnings: tuple[ConfigProblem, ...] = ()
    content: bytes = b""
    """What the file held."""

    def refused(self, error: GpunodeError) -> ConfigProblem:
        """Settings that this node's GPUs don't support, with the location of the section that sets them."""
        section = error.message.partition(".")[0]
        return ConfigProblem(self.origins.get(section, ""), "", error.message, error.hint)

    def valid_settings(self) -> Settings:
        """The settings. `InvalidConfig` lists every problem."""
        if self.problems:
            raise InvalidConfig(self.problems)
        return self.settings


@dataclass(frozen=True)
class OptionSources:
    """Options that can't change while the plugin runs; the file that they name is read each time."""

    host: Host
    flags: Flags
    part: str = ""
    """The command: labels has GPU feature discovery's own variables before those that both have."""
    command: str = "plugin serve"
    """The hints name its help."""

    def resolve(self, data: bytes | None = None) -> ResolvedSettings:
        """Everything merged and checked; never raises. `data` is the content of the file, if it was read;
        without a path it is a file that doesn't exist yet."""
        return _Merge(self).resolve(data)

    def lookup(self, option: Option) -> tuple[str, Sequence[str]] | None:
        """(origin, texts) from the command line or the environment. An empty variable counts as unset."""
        to = self.part == "labels" and option.field == "labels_to"  # --to of labels, --labels of the plugin
        if option.field in self.flags:
            return "--to" if to else option.flags[0], self.flags[option.field]
        own = [f"{LABELS_PREFIX}TO"] if to else []
        gfd_names = [f"GFD_{name}" for name in option.variables] if self.part == "labels" else []
        for name in (*own, option.variable, *gfd_names, *option.variables):
            if text := self.host.environ.get(name, ""):
                return name, [text]
        return None

    @property
    def file(self) -> str:
        """The config file's path, empty for none."""
        return str(Path(self._file_option).absolute()) if self._file_option else ""

    @property
    def _file_option(self) -> str:
        option = self.lookup(BY_FIELD["config_file"])
        return option[1][-1] if option else ""

    @property
    def reader(self) -> Host:
        """Path of the file: on the node, or relative to the caller's working directory."""
        return self.host if self._file_option.startswith("/") else Host(Path("/"), self.host.environ)

    def read(self) -> bytes:
        """The file's bytes. `GpunodeError` if they can't be read."""
        path = self.file
        # NVIDIA's config-manager uses this to say that there is no config
        if self.reader.realpath(path) == "/dev/null":
            return b""
        if self.reader.is_dir(path):
            raise ConfigError(f"{path} is a directory", hint=f"name a file in it: {path}/config.yaml")
        data = self.reader.read_bytes(path)
        if data is None:
            raise ConfigError(
                f"{path} does not exist",
                hint="check the path; a config file is optional: flags and variables set the same options",
            )
        return data


class _Merge:
    def __init__(self, sources: OptionSources) -> None:
        self._sources = sources
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}
        self._problems: list[ConfigProblem] = []
        self._warnings: list[ConfigProblem] = []
        self._content = b""
        self._lenient = self._is_lenient()

    def _is_lenient(self) -> bool:
        lenient = self._sources.lookup(BY_FIELD["lenient"])
        return lenient is not None and lenient[1][-1] in TRUE

    def resolve(self, data: bytes | None) -> ResolvedSettings:
        for option in OPTIONS:
            self._take_given(option)
        more = self._take_file(data) if self._sources.file or data is not None else {}
        settings = self._settings(more)
        if not self._sources.part and not settings.labels.to:
            # GPU feature discovery's part of the file is ignored here
            self._problems = [problem for problem in self._problems if not _of_labels(problem)]
            self._warnings = [warning for warning in self._warnings if not _of_labels(warning)]
        if not self._problems:
            problems, warnings = check(settings, self._origins, self._sources.part)
            self._problems += problems
            self._warnings += warnings
        self._unknown_words()
        return ResolvedSettings(
            settings, self._origins, tuple(self._problems), tuple(self._warnings), self._content
        )

    def _take_given(self, option: Option) -> None:
        origin_texts = self._sources.lookup(option)
        if origin_texts is None:
            return
        origin, texts = origin_texts
        if option.kind == "xids" and self._lenient:
            texts, warnings = valid_words(option, texts)
            self._warnings += [ConfigProblem(origin, "", warning) for warning in warnings]
        try:
            self._values[option.field] = parse(option, texts)
        except ValueError as error:
            hint = f"see gpunode {self._sources.command} --help"
            unknown = next((word for word in split(texts) if word not in option.allowed), "")
            if near := nearest(unknown, option.allowed):
                hint = f"did you mean {near}? S{hint[1:]}"
            if option.field == "output_file" and texts[-1] in ("table", "json", "yaml"):
                hint = f"for the result as {texts[-1]}: -o {texts[-1]}"
            elif option.kind == "path" and texts[-1].strip():
                import shlex

                hint = f"from here it is: {origin} {shlex.quote(str(Path(texts[-1].strip()).absolute()))}"
            self._problems.append(ConfigProblem(origin, "", str(error), hint, usage=True))
        self._origins[option.field] = origin

    def _take_file(self, data: bytes | None) -> dict[str, Any]:
        from gpunode.plugin.config.file import read_file

        path = self._sources.file
        self._values["config_file"] = path
        try:
            content = self._sources.read() if data is None else data
        except GpunodeError as error:
            self._problems.append(ConfigProblem(path, "", error.message.removeprefix(f"{path} "), error.hint))
            return {}
        self._content = content
        vendor = self._values.get("vendor", "")
        config = read_file(content, path, vendor=vendor, lenient=self._lenient)
        self._problems += config.problems
        self._warnings += config.warnings
        for name, (value, line) in config.values.items():
            if name not in self._origins:
                self._values[name] = value
                self._origins[name] = f"{path}:{line}"
        for name, line in config.lines.items():
            self._origins[name] = f"{path}:{line}"
        return {"rules": config.rules, "sharing": config.sharing}

    def _settings(self, more: Mapping[str, Any]) -> Settings:
        sections: dict[str, dict[str, Any]] = {"": {}, "health": {}, "labels": {}}
        for name, value in self._values.items():
            section, _, setting = BY_FIELD[name].path.rpartition(".")
            sections[section][setting] = frozenset(value) if name in _SETS else value
        known = {field.name for field in fields(Settings)}
        values = {name: value for name, value in sections[""].items() if name in known}
        health, labels = HealthSettings(**sections["health"]), LabelSettings(**sections["labels"])
        settings = replace(Settings(), **values, **more, health=health, labels=labels)
        if settings.vendor != "nvidia" and "resource_name" not in self._origins:
            settings = replace(settings, resource_name=f"{settings.vendor}.com/gpu")
        if settings.mps and not settings.mps_root:
            settings = replace(settings, mps_root=MPS_ROOT)
        return settings

    def _unknown_words(self) -> None:
        for option in OPTIONS:
            for word in self._values.get(option.field, ()) if option.known else ():
                if word not in option.known:
                    near = nearest(word, option.known)
                    message = f"{word!r} is not known" + (f"; did you mean {near}?" if near else "")
                    self._warnings.append(ConfigProblem(self._origins[option.field], "", message))


def _of_labels(problem: ConfigProblem) -> bool:
    rows = [option for option in OPTIONS if option.part]
    keys = {option.key for option in rows if option.key}
    names = {name for option in rows for name in (option.variable, *option.variables)}
    return problem.where in names or problem.key in keys or problem.key.startswith("flags.gfd")


def option_value(settings: Settings, option: Option) -> Any:
    """An option's effective value, as plain JSON; None for options that aren't in the settings."""
    value: Any = settings
    for name in option.path.split("."):
        value = getattr(value, name, None)
    if isinstance(value, frozenset):
        return ["all" if number < 0 else number for number in sorted(value)]
    if isinstance(value, float) and value == float("inf"):
        return "infinite"
    return list(value) if isinstance(value, tuple) else value
