"""The sections of a config file that are more than options: `sharing`, and the rules in `resources`."""

from __future__ import annotations

import re
from functools import partial

from gpunode.facts.yaml_tree import Item
from gpunode.plugin.config.reader import Reader, joined
from gpunode.plugin.config.values import selector
from gpunode.plugin.settings import NameRule, SharedResource, Sharing, resource_name_problem

SECTIONS = {"timeSlicing": "time-slicing", "mps": "mps"}
SECTION_KEYS = ("renameByDefault", "failRequestsGreaterThanOne", "resources")
RESOURCE_KEYS = ("name", "rename", "devices", "replicas")
RULE_KEYS = ("pattern", "name")
RULE_LISTS = {"gpus": "gpu", "mig": "mig"}
_COUNT = re.compile(r"[0-9]{1,9}")
MAX_REPLICAS = 10_000
_LEAST_REPLICAS = {"timeSlicing": 2, "mps": 1}
"""One client alone under MPS makes sense (its limits hold); one time slice is no slice."""


def read_sharing(reader: Reader, item: Item, vendor: str) -> Sharing | None:
    """None without a section; an empty section is none. Of two MPS counts, as with NVIDIA's plugin."""
    found: dict[str, tuple[int, Sharing | None]] = {}
    for name, line, section in reader.fields(item, "sharing", SECTIONS):
        if section.kind != "null" and (section.kind != "map" or section.pairs):
            found[name] = line, _section(reader, name, section, vendor)
    if len(found) > 1:
        line = found["timeSlicing"][0]
        message = "a node shares in one way: sharing.mps counts, and this has no effect"
        reader.warn(line, "sharing.timeSlicing", message, "take one of the two out")
    return next((found[name][1] for name in ("mps", "timeSlicing") if name in found), None)


def _section(reader: Reader, name: str, item: Item, vendor: str) -> Sharing | None:
    path = f"sharing.{name}"
    rename, single = False, name == "mps"
    resources: list[SharedResource] | None = None
    fields = {key: value for key, _, value in reader.fields(item, path, SECTION_KEYS, exact=True)}
    for key, value in fields.items():
        if key == "renameByDefault":
            rename = bool(reader.boolean(value, joined(path, key)))
        elif key == "failRequestsGreaterThanOne":
            chosen = reader.boolean(value, joined(path, key))
            single = single if chosen is None else chosen
    listed = fields.get("resources", Item(item.line, "null"))
    entries = list(reader.entries(listed, joined(path, "resources")))
    if item.kind == "map" and not entries and listed.kind in ("null", "list"):
        reader.wrong(listed.line, joined(path, "resources"), "at least one {name, replicas} is needed")
    resources = [
        shared
        for entry_path, entry in entries
        if (shared := _resource(reader, name, entry, entry_path, vendor, rename)) is not None
    ]
    return Sharing(SECTIONS[name], tuple(resources), rename, single) if resources else None


def _resource(
    reader: Reader, section: str, item: Item, path: str, vendor: str, rename: bool
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
            line, joined(path, "name"), f"with .shared behind it, which renameByDefault adds: {problem}"
        )
    replicas = _replicas(reader, section, fields.get("replicas"), item, path)
    devices = _devices(reader, fields["devices"], joined(path, "devices")) if "devices" in fields else None
    if len(reader.problems) > before or name is None:
        return None
    return SharedResource(name, replicas, renamed or "", devices)


def _name(
    reader: Reader,
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
            reader.wrong((item or holder).line, joined(path, key), f"{key} is needed")
        return None
    if item.kind != "scalar":
        reader.wrong(item.line, joined(path, key), f"expected a resource's name; found {item.what}")
        return None
    name = item.text if "/" in item.text else f"{vendor}.com/{item.text}"
    if problem := resource_name_problem(name):
        reader.wrong(item.line, joined(path, key), f"{name!r}: {problem}")
        return None
    return name


def _replicas(reader: Reader, section: str, item: Item | None, holder: Item, path: str) -> int:
    least = _LEAST_REPLICAS[section]
    allowed = f"a whole number from {least} to {MAX_REPLICAS}"
    if item is None or item.kind == "null":
        if holder.kind == "map":
            reader.wrong((item or holder).line, joined(path, "replicas"), f"replicas is needed: {allowed}")
        return 0
    whole = item.kind == "scalar" and _COUNT.fullmatch(item.text) is not None
    if not whole or not least <= int(item.text) <= MAX_REPLICAS:
        hint = "leave the entry out for GPUs that aren't shared" if item.text == "1" else ""
        reader.wrong(item.line, joined(path, "replicas"), f"{item.what} is not {allowed}", hint)
        return 0
    return int(item.text)


def _devices(reader: Reader, item: Item, path: str) -> int | tuple[str, ...] | None:
    """``all`` or null is None, a number is itself, a list holds selectors."""
    if item.kind == "null" or (item.kind == "scalar" and item.text == "all"):
        return None
    if item.kind == "scalar" and _COUNT.fullmatch(item.text) and int(item.text):
        return int(item.text)
    if item.kind != "list" or not item.items:
        message = f"{item.what} is neither all, nor a number of devices from 1, nor a list of devices"
        reader.wrong(item.line, path, message)
        return None
    found = []
    for one_path, one in reader.entries(item, path):
        if one.kind != "scalar":
            reader.wrong(
                one.line, one_path, f"expected an index, UUID, PCI address or model; found {one.what}"
            )
        elif (chosen := reader.take(one, one_path, partial(selector, one.text))) is not None:
            found.append(chosen)
    return tuple(dict.fromkeys(found))


def read_rules(reader: Reader, item: Item, path: str, vendor: str) -> tuple[NameRule, ...]:
    """The naming rules of ``resources.gpus`` or ``resources.mig``."""
    rules = []
    for entry_path, entry in reader.entries(item, path):
        before = len(reader.problems)
        fields = {key: value for key, _, value in reader.fields(entry, entry_path, RULE_KEYS, exact=True)}
        pattern = fields.get("pattern")
        if entry.kind == "null":
            reader.wrong(entry.line, entry_path, "expected a mapping of pattern and name; found nothing")
        if entry.kind == "map" and (pattern is None or not pattern.text):
            reader.wrong((pattern or entry).line, joined(entry_path, "pattern"), "pattern is needed")
        name = _name(reader, fields, "name", entry, entry_path, vendor, required=True)
        if len(reader.problems) == before and pattern is not None and name is not None:
            rules.append(NameRule(RULE_LISTS[path.rpartition(".")[2]], pattern.text, name))
    return tuple(rules)
