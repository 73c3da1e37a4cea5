"""`gpunode schema`: each kind of result has a JSON Schema, and what commands print matches it.

tests/cli.py checks every envelope that any test prints.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema_rs import Draft202012Validator, ValidationError, meta

from gpunode.commands.demo import build_machine
from gpunode.commands.schema import ALL, KINDS, schema_of
from tests.cli import REPOSITORY, check_envelope, gpunode

# Results of steps: `setup` puts their data into its own result and prints them as text.
INSIDE = {"ClusterObjects", "FilesReset", "PluginService", "Restart"}


@pytest.fixture(scope="module")
def envelope(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A doctor's report."""
    from fixtures.machines import machine

    root = build_machine(machine("healthy-docker-rocky9"), tmp_path_factory.mktemp("m") / "root")
    return gpunode("--root", str(root), "doctor", "-o", "json").document


def kinds_in(path: Path) -> set[str]:
    """The kinds that a module names where it makes a result or registers a command."""
    text = path.read_text()
    if not re.search(r"\b(Result|refused|verb|replace)\(", text):
        return set()
    tree = ast.parse(text)
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        name = node.func.id
        place = {"Result": 0, "refused": 0, "verb": 2}.get(name)
        given = (
            [one.value for one in node.keywords if one.arg == "kind"] if name in ("Result", "replace") else []
        )
        given += node.args[place : place + 1] if place is not None else []
        for value in given:
            value = value.value if isinstance(value, ast.Starred) else value
            known = constants.get(value.id) if isinstance(value, ast.Name) else getattr(value, "value", None)
            found |= {known} if isinstance(known, str) else set()
    return found


def test_every_kind_that_the_code_names_has_a_schema() -> None:
    paths = (REPOSITORY / "gpunode").rglob("*.py")
    assert set().union(*map(kinds_in, paths)) - INSIDE == set(KINDS)


@pytest.mark.parametrize("kind", [*KINDS, ALL])
def test_each_schema_is_one(kind: str) -> None:
    schema = schema_of(KINDS if kind == ALL else [kind])
    meta.validate(schema)
    text = json.dumps(schema)
    assert set(re.findall(r'"#/\$defs/([^"]+)"', text)) == set(schema["$defs"])


def test_the_list_names_every_kind_and_its_command() -> None:
    shown = gpunode("schema")
    assert (shown.code, shown.err) == (0, "")
    assert [line.split()[0] for line in shown.out.splitlines()] == ["KIND", *KINDS]
    assert "DoctorReport" in shown.out and "doctor --compare" in shown.out
    data = gpunode("schema", "-o", "json").document["data"]
    assert [one["kind"] for one in data["kinds"]] == list(KINDS)


def test_the_printed_schema_accepts_what_the_command_prints(envelope: dict[str, Any]) -> None:
    shown = gpunode("schema", "DoctorReport")
    schema = json.loads(shown.out)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert gpunode("schema", "DoctorReport", "-o", "json").document["data"]["schema"] == schema
    validator = Draft202012Validator(schema)
    validator.validate(envelope)
    validator.validate({**envelope, "status": "error", "exitCode": 2, "data": {}})
    validator.validate({**envelope, "data": {**envelope["data"], "later": 1}})  # a field of a later release
    described = schema["$defs"]["Finding"]["description"]
    assert "severity" in described and "  " not in described


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "GpuInventory"},
        {"status": "fine"},
        {"data": {"node": None}},
        {"data": None},
        {"errors": [{"code": "x"}]},
    ],
    ids=str,
)
def test_the_schema_refuses_anything_else(envelope: dict[str, Any], change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Draft202012Validator(schema_of(["DoctorReport"])).validate({**envelope, **change})


def test_the_schema_of_all_kinds_accepts_each(envelope: dict[str, Any]) -> None:
    validator = Draft202012Validator(json.loads(gpunode("schema", "all").out))
    for document in (
        envelope,
        gpunode("version", "-o", "json").document,
        gpunode("schema", "Version", "-o", "json").document,
        gpunode("no-such-command", "-o", "json").document,
    ):
        validator.validate(document)
    with pytest.raises(ValidationError):
        validator.validate({**envelope, "kind": "Other"})


def test_an_unknown_kind_is_a_usage_error() -> None:
    ran = gpunode("schema", "doctor")
    assert (ran.code, ran.out) == (2, "")
    assert "unknown kind 'doctor'" in ran.err and "hint: list all kinds: gpunode schema" in ran.err
    assert gpunode("schema", "x", "-o", "json").document["errors"][0]["code"] == "usage"


def test_tests_refuse_a_field_that_no_schema_has(envelope: dict[str, Any]) -> None:
    check_envelope(envelope)
    for changed in (
        {**envelope, "later": 1},
        {**envelope, "data": {**envelope["data"], "later": 1}},
        {**envelope, "kind": "NoSuchKind"},
    ):
        with pytest.raises(AssertionError):
            check_envelope(changed)


def test_the_page_on_json_has_every_kind_and_its_fields() -> None:
    """The fields of `data`; those further down are in the schema, whatever the page says of them."""
    text = (REPOSITORY / "docs/json.md").read_text()
    rows = {match[1]: match[0] for match in re.finditer(r"^\| `(\w+)` \|.*$", text, re.MULTILINE)}
    assert set(rows) == set(KINDS)
    missing = []
    for kind, row in rows.items():
        schema = schema_of([kind])
        for one in schema["properties"]["data"].get("anyOf", ()):
            for reference in (one, *one.get("anyOf", ())):
                name = reference.get("$ref", "").removeprefix("#/$defs/")
                fields = schema["$defs"][name]["properties"] if name else ()
                missing += [f"{kind}.{field}" for field in fields if not re.search(rf"\b{field}\b", row)]
    assert [one for one in missing if not one.startswith("Rollback.")] == []  # as RuntimeConfiguration
