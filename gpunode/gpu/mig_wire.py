"""Reading back what `result.plain` made of `Layouts`. KeyError or TypeError if a document is none of its."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gpunode.gpu.mig_model import (
    ComputeInstance,
    ComputeProfile,
    GpuInstance,
    GpuLayout,
    Layouts,
    Placement,
    Profile,
)
from gpunode.output.result import camel


def layouts_from_json(data: Mapping[str, Any]) -> Layouts:
    """The layouts of a node."""
    return Layouts(str(data.get("driverVersion", "")), tuple(_gpu(one) for one in data["gpus"]))


def _gpu(data: Mapping[str, Any]) -> GpuLayout:
    return GpuLayout(
        **_scalars(GpuLayout, data),
        instances=tuple(_instance(one) for one in data.get("instances", ())),
        profiles=tuple(_profile(one) for one in data.get("profiles", ())),
    )


def _instance(data: Mapping[str, Any]) -> GpuInstance:
    return GpuInstance(
        **_scalars(GpuInstance, data),
        placement=_place(data["placement"]),
        compute=tuple(_compute(one) for one in data.get("compute", ())),
        aliases=tuple(data.get("aliases", ())),
    )


def _compute(data: Mapping[str, Any]) -> ComputeInstance:
    place = data.get("placement")
    return ComputeInstance(**_scalars(ComputeInstance, data), placement=_place(place) if place else None)


def _profile(data: Mapping[str, Any]) -> Profile:
    return Profile(
        **_scalars(Profile, data),
        placements=_places(data),
        aliases=tuple(data.get("aliases", ())),
        compute=tuple(
            ComputeProfile(**_scalars(ComputeProfile, one), placements=_places(one))
            for one in data.get("compute", ())
        ),
    )


def _places(data: Mapping[str, Any]) -> tuple[Placement, ...]:
    return tuple(_place(one) for one in data.get("placements", ()))


def _place(data: Mapping[str, Any]) -> Placement:
    return Placement(int(data["start"]), int(data["size"]))


_NESTED = frozenset(("instances", "profiles", "placement", "placements", "compute", "aliases"))


def _scalars(kind: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """The plain fields that the document has; a missing one falls to its default, or is a TypeError."""
    names = {field.name: camel(field.name) for field in fields(kind) if field.name not in _NESTED}
    return {name: data[shown] for name, shown in names.items() if shown in data}
