"""The config file, version v1: NVIDIA's format, with `health`, `flags.gpunode` and selectors besides."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from gpunode.dataclass import dataclass, field
from gpunode.facts.yaml_tree import EMPTY, DocumentError, Item, Notes, read
from gpunode.plugin.config import sharing as sections
from gpunode.plugin.config.options import OPTIONS, Option
from gpunode.plugin.config.problems import Problem
from gpunode.plugin.config.reader import Reader, joined
from gpunode.plugin.settings import NameRule, Sharing

VERSION = "v1"
TOP = ("version", "flags", "resources", "sharing", "imex", "health")


@dataclass(frozen=True)
class FileConfig:
    """What a file says. `values` has (value, line) by the option's field; `lines` where sections stand."""

    values: dict[str, tuple[Any, int]] = field(default_factory=dict)
    rules: tuple[NameRule, ...] = ()
    sharing: Sharing | None = None
    lines: dict[str, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()


@cache
def by_key() -> dict[str, Option]:
    return {option.key: option for option in OPTIONS if option.key}


@cache
def known_keys() -> tuple[str, ...]:
    """Every key with its full path, for suggestions and docs."""
    shared = [
        *(f"sharing.{name}" for name in sections.SECTIONS),
        *(f"sharing.{name}.{key}" for name in sections.SECTIONS for key in sections.SECTION_KEYS),
        *(
            f"sharing.{name}.resources[].{key}"
            for name in sections.SECTIONS
            for key in sections.RESOURCE_KEYS
        ),
        *(f"resources.{name}" for name in sections.RULE_LISTS),
        *(f"resources.{name}[].{key}" for name in sections.RULE_LISTS for key in sections.RULE_KEYS),
    ]
    return (*TOP, "flags.plugin", "flags.gpunode", "flags.gfd", *by_key(), *shared)


def read_file(data: bytes, name: str, *, vendor: str = "", lenient: bool = False) -> FileConfig:
    """Everything in the file, with every problem. `vendor` is what flag or variable say, if they do."""
    reader = Reader(name, known_keys(), lenient)
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
    """A mistake that many make: the whole ConfigMap, its data, or the Helm chart's values, in the file."""
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


def _read_top(reader: Reader, tree: Item, vendor: str) -> FileConfig:
    found: dict[str, tuple[Any, int]] = {}
    lines: dict[str, int] = {}
    rules: tuple[NameRule, ...] = ()
    sharing: Sharing | None = None
    parts = {key: (line, item) for key, line, item in reader.fields(tree, "", TOP)}
    _version(reader, parts.get("version", (1, EMPTY))[1])
    for section in ("flags", "imex", "health"):
        for option, value, line in _options(reader, section, parts.get(section, (1, EMPTY))[1]):
            found[option.field] = value, line
    vendor = vendor or str(found.get("vendor", ("nvidia", 0))[0])
    for key, line, item in reader.fields(
        parts.get("resources", (1, EMPTY))[1], "resources", ("gpus", "mig", "include", "exclude")
    ):
        path = joined("resources", key)
        if key in sections.RULE_LISTS:
            rules += sections.read_rules(reader, item, path, vendor)
            lines.setdefault("rules", line)
        elif (value := reader.option(by_key()[path], item, path)) is not None:
            found[by_key()[path].field] = value, item.line
    if "sharing" in parts:
        lines["sharing"], item = parts["sharing"]
        sharing = sections.read_sharing(reader, item, vendor)
    problems, warnings = (tuple(sorted(one, key=_line)) for one in (reader.problems, reader.warnings))
    return FileConfig(found, rules, sharing, lines, problems, warnings)


def _line(problem: Problem) -> int:
    return problem.line


def _version(reader: Reader, item: Item) -> None:
    if item.kind == "null" or (item.kind == "scalar" and item.text in ("", VERSION)):
        return
    reader.wrong(item.line, "version", f"unknown version {item.what}; the only one is {VERSION}")


def _options(reader: Reader, path: str, item: Item) -> Iterator[tuple[Option, Any, int]]:
    """The options under this path, and in the mappings below it."""
    below = [key for key in known_keys() if key.startswith(f"{path}.")]
    names = tuple(dict.fromkeys(key.removeprefix(f"{path}.").partition(".")[0] for key in below))
    for name, _, value in reader.fields(item, path, names):
        key = joined(path, name)
        option = by_key().get(key)
        if option is None:
            yield from _options(reader, key, value)
        elif (found := reader.option(option, value, key)) is not None:
            yield option, found, value.line
