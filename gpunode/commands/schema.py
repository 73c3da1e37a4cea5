"""`gpunode schema`: the JSON Schema of what each command prints with -o json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import reduce
from importlib import import_module
from operator import or_
from typing import Annotated, Any, NamedTuple

import typer

from gpunode.commands.options import one_of
from gpunode.commands.session import Session, verb
from gpunode.errors import UsageError
from gpunode.output.result import Cell, Result, Style, Table, Text
from gpunode.output.schema import document

ALL = "all"
KINDS = {
    "DoctorReport": ("doctor", "commands.doctor:DoctorReport"),
    "DoctorFixes": ("doctor --fix", "commands.doctor_fix:Fixes"),
    "DoctorComparison": ("doctor --compare", "commands.doctor_compare:DoctorComparison"),
    "CheckExplanation": ("explain ID", "commands.explain:CheckExplanation"),
    "CheckList": ("explain", "commands.explain:CheckList"),
    "GpuInventory": ("gpus", "gpu.model:Inventory"),
    "Verification": ("verify", "runtime.verify.container:Verification"),
    "RuntimeStatus": ("status runtime", "commands.status:RuntimeStatus"),
    "SupportBundle": ("report", "commands.report:SupportBundle"),
    "SetupReport": ("setup", "commands.setup:SetupReport"),
    "KubernetesSetup": ("setup --kubernetes", "commands.setup:KubernetesSetup"),
    "Reset": ("reset", "commands.reset:Reset"),
    "DriverPlan": ("driver plan", "commands.driver:PlanData"),
    "DriverInstallation": ("driver install", "commands.driver:DriverInstallation"),
    "ToolkitInstallation": ("toolkit install", "commands.toolkit:ToolkitInstallation"),
    "ToolkitStatus": ("toolkit status", "commands.toolkit:ToolkitStatus"),
    "ToolkitRemoval": ("toolkit remove", "commands.toolkit:ToolkitRemoval"),
    "ToolkitConfig": ("toolkit config", "commands.toolkit_config:ToolkitConfig"),
    "RuntimeConfiguration": (
        "configure-runtime, unconfigure-runtime",
        "runtime.workflow:RuntimeConfiguration",
    ),
    "RuntimeConfigurations": (
        "configure-runtime for several engines",
        "runtime.workflow:RuntimeConfigurations",
    ),
    "CdiSpec": ("cdi generate", "commands.cdi:CdiSpec"),
    "CdiDevices": ("cdi list", "commands.cdi:CdiDevices"),
    "CdiRefresh": ("cdi refresh", "commands.cdi:CdiRefresh"),
    "MigLayout": ("mig list", "mig.model:Layouts"),
    "MigExport": ("mig export", "commands.mig:Exported"),
    "MigPlan": ("mig plan", "commands.mig_plan:MigPlan"),
    "MigApplication": ("mig apply", "commands.mig_apply:MigApplication commands.mig_follow:MigWatch"),
    "MigAssertion": ("mig assert", "commands.mig:MigAssertion"),
    "Journal": ("journal list", "commands.journal:JournalList"),
    "JournalEntry": ("journal show", "commands.journal:JournalEntry"),
    "Rollback": ("rollback", "runtime.workflow:RuntimeConfiguration"),
    "PluginRun": ("plugin serve", "commands.plugin:PluginRun"),
    "PluginConfig": ("plugin check-config", "commands.plugin:PluginConfig"),
    "PluginConfigTranslation": (
        "plugin check-config --from",
        "plugin.config.gke:PluginConfigTranslation",
    ),
    "PluginStatus": ("plugin status", "commands.plugin_status:PluginStatus"),
    "InjectedFault": ("plugin inject", "plugin.simulate.faults:InjectedFault"),
    "NodeLabels": ("labels", "commands.labels:NodeLabels commands.labels:LabelWatch"),
    "NodeChange": ("node advertise", "commands.node:NodeChange"),
    "Manifests": ("manifests", "commands.manifests:Manifests"),
    "Demo": ("demo", "commands.demo:DemoReport"),
    "Completion": ("completion", "commands.completion:Completion"),
    "Schema": ("schema KIND", "commands.schema:SchemaDocument"),
    "SchemaList": ("schema", "commands.schema:SchemaList"),
    "Version": ("version", "commands.help:Version"),
    "Error": ("a command line that can't be parsed", ""),
}
"""By kind of envelope: the command that prints it, and the types of its `data` (``module:class``)."""


class ListedKind(NamedTuple):
    """A kind of result and the command that prints it."""

    kind: str
    command: str


class SchemaList(NamedTuple):
    """`data` of the envelope: all kinds."""

    kinds: tuple[ListedKind, ...]


class SchemaDocument(NamedTuple):
    """`data` of the envelope: the JSON Schema of one kind; of every kind if `kind` is all."""

    kind: str
    schema: dict[str, Any]


def schema_of(kinds: Iterable[str]) -> dict[str, Any]:
    """The JSON Schema of the envelopes of these kinds."""
    return document({kind: data_type(kind) for kind in kinds})


def data_type(kind: str) -> Any:
    """The type of a kind's `data`, a union of several types; None where it is always empty."""
    types = []
    for place in KINDS[kind][1].split():
        module, _, name = place.partition(":")
        types.append(getattr(import_module(f"gpunode.{module}"), name))
    return reduce(or_, types) if types else None


# `gpunode schema`.

schema_app = typer.Typer(rich_markup_mode=None)


@verb(schema_app, "schema", "Schema")
def schema(
    session: Session,
    kind: Annotated[
        str,
        typer.Argument(
            metavar="[KIND]",
            help="Kind of result; all for every kind in one schema. Without it, the kinds are listed.",
            autocompletion=one_of(*KINDS, ALL),
        ),
    ] = "",
) -> Result:
    """Print the JSON Schema of the results. Without KIND, the kinds are listed.

    gpunode schema DoctorReport > doctor-report.schema.json
    """
    if not kind:
        kinds = tuple(ListedKind(name, command) for name, (command, _) in KINDS.items())
        rows = tuple((Cell(listed_kind.kind, Style.COMMAND), listed_kind.command) for listed_kind in kinds)
        return Result("SchemaList", SchemaList(kinds), blocks=(Table(("KIND", "PRINTED BY"), rows),))
    if kind not in (*KINDS, ALL):
        near = [name for name in KINDS if name.lower() == kind.lower()]
        hint = f"did you mean {near[0]}?" if near else "list all kinds: gpunode schema"
        raise UsageError(f"unknown kind {kind!r}", hint=hint)
    whole = schema_of(KINDS if kind == ALL else [kind])
    lines = json.dumps(whole, indent=2, ensure_ascii=False).splitlines()
    blocks = tuple(Text(line, Style.COMMAND) for line in lines)  # a terminal wraps other text
    return Result("Schema", SchemaDocument(kind, whole), blocks=blocks)
