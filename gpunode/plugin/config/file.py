"""The config file, version v1: NVIDIA's format, plus `health`, `flags.gpunode` and selectors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from gpunode.host.documents import EMPTY, DocumentError, Item, Notes, read
from gpunode.plugin.config.options import OPTIONS, Option
from gpunode.plugin.config.settings import NameRule, SharedResource, Sharing, resource_name_problem
from gpunode.plugin.config.values import ConfigProblem, is_number, nearest, parse, selector, valid_words

# Walks a config file's tree: looks keys up, names what is unknown, collects every problem with its line.

# other words for true and false in YAML 1.1, all of which NVIDIA's plugin accepts in a file
_YAML_WORDS = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "on", "On", "ON"), "true"),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "off", "Off", "OFF"), "false"),
}


class SectionReader:
    """`problems` and `warnings` grow while the sections are read. `known` are all keys, for suggestions."""

    def __init__(self, name: str, known: Sequence[str], lenient: bool) -> None:
        self._name = name
        self._known = known
        self._lenient = lenient
        self.problems: list[ConfigProblem] = []
        self.warnings: list[ConfigProblem] = []

    def where(self, line: int) -> str:
        return f"{self._name}:{line}" if line else self._name

    def wrong(self, line: int, key: str, message: str, hint: str = "") -> None:
        self.problems.append(ConfigProblem(self.where(line), key, message, hint, line=line))

    def warn(self, line: int, key: str, message: str, hint: str = "") -> None:
        self.warnings.append(ConfigProblem(self.where(line), key, message, hint, line=line))

    # --- structure -------------------------------------------------------------------------------------

    def fields(
        self, item: Item, path: str, known: Iterable[str], *, exact: bool = False
    ) -> Iterator[tuple[str, int, Item]]:
        """The known keys of a mapping, in the spelling of `known`, with their line and value.

        NVIDIA's plugin ignores case, but not in what it decodes itself (`exact`). Nulls count as missing.
        """
        if item.kind == "null":
            return
        if item.kind != "map":
            self.wrong(item.line, path, f"expected a mapping of {_names(known)}; found {item.what}")
            return
        spelled = {name if exact else name.lower(): name for name in known}
        seen: dict[str, int] = {}
        for key, line, value in item.pairs:
            name = spelled.get(key if exact else key.lower())
            if name is None:
                self._unknown(line, path, key, spelled.values())
            elif name in seen:
                self.wrong(line, key_path(path, key), f"the same key as on line {seen[name]}, in other case")
            else:
                seen[name] = line
                yield name, line, value

    def entries(self, item: Item, path: str) -> Iterator[tuple[str, Item]]:
        """The items of a list with their paths; `null` is an empty one."""
        if item.kind == "list":
            yield from ((f"{path}[{number}]", entry) for number, entry in enumerate(item.items))
        elif item.kind != "null":
            self.wrong(item.line, path, f"expected a list; found {item.what}")

    def _unknown(self, line: int, path: str, key: str, siblings: Iterable[str]) -> None:
        message, hint = "unknown key", "--lenient makes a warning of it"
        near = nearest(key, siblings)
        elsewhere = [known for known in self._known if known.rpartition(".")[2].lower() == key.lower()]
        if elsewhere and near.lower() != key.lower():
            message += f"; its place is {' or '.join(elsewhere)}"
            hint = "move it there, or correct its indentation"
        elif near:
            message += f"; did you mean {near}?"
        elif far := nearest(key, (known.rpartition(".")[2] for known in self._known)):
            full = next(known for known in self._known if known.rpartition(".")[2] == far)
            message += f"; the nearest is {full}"
        message += (
            f" Known here: {_names(siblings)}" if message[-1] == "?" else f"; known here: {_names(siblings)}"
        )
        if self._lenient:
            self.warn(line, key_path(path, key), message.replace("unknown key", "unknown key, ignored", 1))
        else:
            self.wrong(line, key_path(path, key), message, hint)

    # --- values ----------------------------------------------------------------------------------------

    def option(self, option: Option, item: Item, path: str) -> Any:
        """The value of an option, None if it is invalid (reported) or null."""
        texts = self._texts(option, item, path)
        if texts is None:
            return None
        if option.kind == "xids" and self._lenient:
            texts, warnings = valid_words(option, texts)
            for warning in warnings:
                self.warn(item.line, path, warning)
        return self.take(item, path, lambda: parse(option, texts))

    def _texts(self, option: Option, item: Item, path: str) -> list[str] | None:
        if item.kind == "list" and option.takes_many:
            wrong = [entry for entry in item.items if entry.kind != "scalar"]
            for entry in wrong:
                self.wrong(entry.line, path, f"expected {expected_text(option)}; found {entry.what}")
            return None if wrong else [entry.text for entry in item.items]
        if item.kind == "null":
            return None
        if item.kind != "scalar":
            self.wrong(item.line, path, f"expected {expected_text(option)}; found {item.what}")
            return None
        text = _YAML_WORDS.get(item.text, item.text) if option.kind == "boolean" else item.text
        if option.kind in ("hold", "interval") and is_number(text):
            text += "ns"  # as in every duration of NVIDIA's format, not seconds as on the command line
        return [text]

    def take(self, item: Item, path: str, make: Callable[[], Any]) -> Any:
        """The result of `make`, None for a ValueError, which becomes a problem of this item."""
        try:
            return make()
        except ValueError as error:
            self.wrong(item.line, path, str(error))
            return None

    def boolean(self, item: Item, path: str) -> bool | None:
        value = self.option(_BOOLEAN, item, path)
        return value if isinstance(value, bool) else None


_BOOLEAN = Option("", "", "boolean")


def key_path(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def expected_text(option: Option) -> str:
    """For messages: the values that an option accepts."""
    if option.allowed:
        return ("one or more of " if option.takes_many else "one of ") + ", ".join(option.allowed)
    kinds: Mapping[str, str] = {
        **{"boolean": "true or false", "path": "a path", "socket": "a path", "resource": "a resource's name"},
        **{"seconds": "a duration", "hold": "a duration", "interval": "a duration"},
        **{"integers": "a list of numbers", "xids": "a list of XIDs", "selectors": "a list of GPUs"},
        **{"words": "a list of words", "address": "HOST:PORT"},
    }
    return kinds.get(option.kind, "a string")


def _names(known: Iterable[str]) -> str:
    return ", ".join(known)


# The sections of a config file that aren't single options: `sharing`, and the rules in `resources`.

SECTIONS = {"timeSlicing": "time-slicing", "mps": "mps"}
SECTION_KEYS = ("renameByDefault", "failRequestsGreaterThanOne", "resources")
RESOURCE_KEYS = ("name", "rename", "devices", "replicas")
RULE_KEYS = ("pattern", "name")
RULE_LISTS = {"gpus": "gpu", "mig": "mig"}
_COUNT = re.compile(r"[0-9]{1,9}")
MAX_REPLICAS = 10_000
_LEAST_REPLICAS = {"timeSlicing": 2, "mps": 1}
"""One client alone under MPS makes sense (its limits hold); one time slice is no slice."""


def read_sharing(reader: SectionReader, item: Item, vendor: str) -> Sharing | None:
    """None without a section or with an empty one. Of two MPS counts the same one is used as by NVIDIA's
    plugin."""
    sections: dict[str, tuple[int, Sharing | None]] = {}
    for name, line, section in reader.fields(item, "sharing", SECTIONS):
        if section.kind != "null" and (section.kind != "map" or section.pairs):
            sections[name] = line, _section(reader, name, section, vendor)
    if len(sections) > 1:
        line = sections["timeSlicing"][0]
        message = "a node shares in one way: sharing.mps counts, and this has no effect"
        reader.warn(line, "sharing.timeSlicing", message, "take one of the two out")
    return next((sections[name][1] for name in ("mps", "timeSlicing") if name in sections), None)


def _section(reader: SectionReader, name: str, item: Item, vendor: str) -> Sharing | None:
    path = f"sharing.{name}"
    rename, single = False, name == "mps"
    resources: list[SharedResource] | None = None
    fields = {key: value for key, _, value in reader.fields(item, path, SECTION_KEYS, exact=True)}
    for key, value in fields.items():
        if key == "renameByDefault":
            rename = bool(reader.boolean(value, key_path(path, key)))
        elif key == "failRequestsGreaterThanOne":
            flag = reader.boolean(value, key_path(path, key))
            single = single if flag is None else flag
    listed = fields.get("resources", Item(item.line, "null"))
    entries = list(reader.entries(listed, key_path(path, "resources")))
    if item.kind == "map" and not entries and listed.kind in ("null", "list"):
        reader.wrong(listed.line, key_path(path, "resources"), "at least one {name, replicas} is needed")
    resources = [
        shared
        for entry_path, entry in entries
        if (shared := _resource(reader, name, entry, entry_path, vendor, rename)) is not None
    ]
    return Sharing(SECTIONS[name], tuple(resources), rename, single) if resources else None


def _resource(
    reader: SectionReader, section: str, item: Item, path: str, vendor: str, rename: bool
) -> SharedResource | None:
    before = len(reader.problems)
    fields = {key: value for key, _, value in reader.fields(item, path, RESOURCE_KEYS, exact=True)}
    if item.kind == "null":
        reader.wrong(item.line, path, "expected a mapping of name and replicas; found nothing")
    name = _name(reader, fields, "name", item, path, vendor, required=True)
    renamed = _name(reader, fields, "rename", item, path, vendor)
    if name and rename and not renamed and (problem := resource_name_problem(f"{name}.shared")):
        line = fields["name"].line
        reader.wrong(
            line, key_path(path, "name"), f"with .shared behind it, which renameByDefault adds: {problem}"
        )
    replicas = _replicas(reader, section, fields.get("replicas"), item, path)
    devices = _devices(reader, fields["devices"], key_path(path, "devices")) if "devices" in fields else None
    if len(reader.problems) > before or name is None:
        return None
    return SharedResource(name, replicas, renamed or "", devices)


def _name(
    reader: SectionReader,
    fields: dict[str, Item],
    key: str,
    holder: Item,
    path: str,
    vendor: str,
    *,
    required: bool = False,
) -> str | None:
    item = fields.get(key)
    if item is None or item.kind == "null" or (item.kind == "scalar" and not item.text):
        if required and holder.kind == "map":
            reader.wrong((item or holder).line, key_path(path, key), f"{key} is needed")
        return None
    if item.kind != "scalar":
        reader.wrong(item.line, key_path(path, key), f"expected a resource's name; found {item.what}")
        return None
    name = item.text if "/" in item.text else f"{vendor}.com/{item.text}"
    if problem := resource_name_problem(name):
        reader.wrong(item.line, key_path(path, key), f"{name!r}: {problem}")
        return None
    return name


def _replicas(reader: SectionReader, section: str, item: Item | None, holder: Item, path: str) -> int:
    least = _LEAST_REPLICAS[section]
    allowed = f"a whole number from {least} to {MAX_REPLICAS}"
    if item is None or item.kind == "null":
        if holder.kind == "map":
            reader.wrong((item or holder).line, key_path(path, "replicas"), f"replicas is needed: {allowed}")
        return 0
    whole = item.kind == "scalar" and _COUNT.fullmatch(item.text) is not None
    if not whole or not least <= int(item.text) <= MAX_REPLICAS:
        hint = "leave the entry out for GPUs that aren't shared" if item.text == "1" else ""
        reader.wrong(item.line, key_path(path, "replicas"), f"{item.what} is not {allowed}", hint)
        return 0
    return int(item.text)


def _devices(reader: SectionReader, item: Item, path: str) -> int | tuple[str, ...] | None:
    """``all`` or null is None, a number is itself, a list holds selectors."""
    if item.kind == "null" or (item.kind == "scalar" and item.text == "all"):
        return None
    if item.kind == "scalar" and _COUNT.fullmatch(item.text) and int(item.text):
        return int(item.text)
    if item.kind != "list" or not item.items:
        message = f"{item.what} is neither all, nor a number of devices from 1, nor a list of devices"
        reader.wrong(item.line, path, message)
        return None
    selectors = []
    for one_path, entry in reader.entries(item, path):
        if entry.kind != "scalar":
            reader.wrong(
                entry.line, one_path, f"expected an index, UUID, PCI address or model; found {entry.what}"
            )
        elif (device_selector := reader.take(entry, one_path, partial(selector, entry.text))) is not None:
            selectors.append(device_selector)
    return tuple(dict.fromkeys(selectors))


def read_rules(reader: SectionReader, item: Item, path: str, vendor: str) -> tuple[NameRule, ...]:
    """The naming rules of ``resources.gpus`` or ``resources.mig``."""
    rules = []
    for entry_path, entry in reader.entries(item, path):
        before = len(reader.problems)
        fields = {key: value for key, _, value in reader.fields(entry, entry_path, RULE_KEYS, exact=True)}
        pattern = fields.get("pattern")
        if entry.kind == "null":
            reader.wrong(entry.line, entry_path, "expected a mapping of pattern and name; found nothing")
        if entry.kind == "map" and (pattern is None or not pattern.text):
            reader.wrong((pattern or entry).line, key_path(entry_path, "pattern"), "pattern is needed")
        name = _name(reader, fields, "name", entry, entry_path, vendor, required=True)
        if len(reader.problems) == before and pattern is not None and name is not None:
            rules.append(NameRule(RULE_LISTS[path.rpartition(".")[2]], pattern.text, name))
    return tuple(rules)


VERSION = "v1"
TOP = ("version", "flags", "resources", "sharing", "imex", "health")


@dataclass(frozen=True)
class FileConfig:
    """Contents of a file. `values` has (value, line) by the option's field; `lines` the lines of the
    sections."""

    values: dict[str, tuple[Any, int]] = field(default_factory=dict)
    rules: tuple[NameRule, ...] = ()
    sharing: Sharing | None = None
    lines: dict[str, int] = field(default_factory=dict)
    problems: tuple[ConfigProblem, ...] = ()
    warnings: tuple[ConfigProblem, ...] = ()


@cache
def by_key() -> dict[str, Option]:
    return {option.key: option for option in OPTIONS if option.key}


@cache
def known_keys() -> tuple[str, ...]:
    """Every key with its full path, for suggestions and docs."""
    shared = [
        *(f"sharing.{name}" for name in SECTIONS),
        *(f"sharing.{name}.{key}" for name in SECTIONS for key in SECTION_KEYS),
        *(f"sharing.{name}.resources[].{key}" for name in SECTIONS for key in RESOURCE_KEYS),
        *(f"resources.{name}" for name in RULE_LISTS),
        *(f"resources.{name}[].{key}" for name in RULE_LISTS for key in RULE_KEYS),
    ]
    return (*TOP, "flags.plugin", "flags.gpunode", "flags.gfd", *by_key(), *shared)


def read_file(data: bytes, name: str, *, vendor: str = "", lenient: bool = False) -> FileConfig:
    """Everything in the file, with every problem. `vendor` is the value of flag or variable, if set."""
    reader = SectionReader(name, known_keys(), lenient)
    notes: Notes = []
    try:
        tree = read(data, notes)
    except DocumentError as error:
        reader.wrong(error.line, "", error.message)
        return FileConfig(problems=tuple(reader.problems))
    for line, message in notes:
        reader.warn(line, "", message)
    if wrong_thing := _other_kind(tree):
        reader.wrong(1, "", *wrong_thing)
        return FileConfig(problems=tuple(reader.problems))
    return _read_top(reader, tree, vendor)


def _other_kind(tree: Item) -> tuple[str, str] | None:
    """A common mistake: the whole ConfigMap, its data, or the Helm chart's values, in the file."""
    keys = {key: value for key, _, value in tree.pairs}
    hint = "write what belongs into the file itself, beginning with: version: v1"
    if {"apiVersion", "kind"} <= keys.keys():
        return "this is a Kubernetes object, not what is inside of it", hint
    if keys.keys().isdisjoint(TOP):
        for key, value in keys.items():
            if key == "config" and value.kind == "map":
                return "these are the values of the Helm chart, not a config file", hint
            if value.kind == "scalar" and "\n" in value.text:
                return f"this is a ConfigMap's data: the config file is what {key} holds", hint
    return None


def _read_top(reader: SectionReader, tree: Item, vendor: str) -> FileConfig:
    values: dict[str, tuple[Any, int]] = {}
    lines: dict[str, int] = {}
    rules: tuple[NameRule, ...] = ()
    sharing: Sharing | None = None
    parts = {key: (line, item) for key, line, item in reader.fields(tree, "", TOP)}
    _version(reader, parts.get("version", (1, EMPTY))[1])
    for section in ("flags", "imex", "health"):
        for option, value, line in _options(reader, section, parts.get(section, (1, EMPTY))[1]):
            values[option.field] = value, line
    vendor = vendor or str(values.get("vendor", ("nvidia", 0))[0])
    for key, line, item in reader.fields(
        parts.get("resources", (1, EMPTY))[1], "resources", ("gpus", "mig", "include", "exclude")
    ):
        path = key_path("resources", key)
        if key in RULE_LISTS:
            rules += read_rules(reader, item, path, vendor)
            lines.setdefault("rules", line)
        elif (value := reader.option(by_key()[path], item, path)) is not None:
            values[by_key()[path].field] = value, item.line
    if "sharing" in parts:
        lines["sharing"], item = parts["sharing"]
        sharing = read_sharing(reader, item, vendor)
    problems, warnings = (
        tuple(sorted(messages, key=_line)) for messages in (reader.problems, reader.warnings)
    )
    return FileConfig(values, rules, sharing, lines, problems, warnings)


def _line(problem: ConfigProblem) -> int:
    return problem.line


def _version(reader: SectionReader, item: Item) -> None:
    if item.kind == "null" or (item.kind == "scalar" and item.text in ("", VERSION)):
        return
    reader.wrong(item.line, "version", f"unknown version {item.what}; the only one is {VERSION}")


def _options(reader: SectionReader, path: str, item: Item) -> Iterator[tuple[Option, Any, int]]:
    """The options under this path, and in the mappings below it."""
    below = [key for key in known_keys() if key.startswith(f"{path}.")]
    names = tuple(dict.fromkeys(key.removeprefix(f"{path}.").partition(".")[0] for key in below))
    for name, _, value in reader.fields(item, path, names):
        key = key_path(path, name)
        option = by_key().get(key)
        if option is None:
            yield from _options(reader, key, value)
        elif (parsed := reader.option(option, value, key)) is not None:
            yield option, parsed, value.line
