"""For any GPUs and any request: nothing is advertised twice, nothing gets lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from gpunode.errors import ConfigError
from gpunode.gpu.model import Gpu
from gpunode.host import Host
from gpunode.plugin.config.settings import NameRule, Settings, SharedResource, Sharing, resource_name_problem
from gpunode.plugin.nvidia.resources import plan
from tests.plugin.gpus import cut, gpu, inventory, mig_uuid, uuid

NOWHERE = Host(Path("/nowhere"), {})
PROFILES = some.lists(some.sampled_from(["1g.10gb", "1g.10gb+me", "3g.40gb", "1c.3g.40gb", ""]), max_size=3)
SELECTORS = some.sampled_from(["0", "1", "1:0", "*H100*", uuid(0), mig_uuid(1, 0), "1g.*", "0000:19:00.0"])
NAMES = some.sampled_from(["nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "nvidia.com/a", "example.com/b"])


@some.composite
def nodes(draw: some.DrawFn) -> tuple[Gpu, ...]:
    """Whole GPUs, MIG ones, lost ones, ones with almost no data in NVML."""
    made = []
    for index in range(draw(some.integers(0, 4))):
        more: dict[str, Any] = {"error": draw(some.sampled_from(["", "", "GPU is lost"]))}
        if draw(some.booleans()):
            made.append(cut(index, *draw(PROFILES), **more))
        else:
            kinds: list[dict[str, Any]] = [{}, {}, {"name": ""}, {"uuid": ""}, {"minor": None}]
            made.append(gpu(index, **{**more, **draw(some.sampled_from(kinds))}))
    return tuple(made)


@some.composite
def wishes(draw: some.DrawFn) -> Settings:
    rules = some.builds(
        NameRule, some.sampled_from(["gpu", "mig"]), some.sampled_from(["*", "*H100*", "1g*"]), NAMES
    )
    devices = some.none() | some.integers(1, 3) | some.lists(SELECTORS, min_size=1, max_size=2).map(tuple)
    shared = some.builds(SharedResource, NAMES, some.integers(1, 3), some.just("") | NAMES, devices)
    entries = draw(some.lists(shared, max_size=2))
    strategy = draw(some.sampled_from(["time-slicing", "mps"]))
    return Settings(
        mig_strategy=draw(some.sampled_from(["none", "single", "mixed"])),
        rules=tuple(draw(some.lists(rules, max_size=2))),
        include=tuple(draw(some.lists(SELECTORS, max_size=1))),
        exclude=tuple(draw(some.lists(SELECTORS, max_size=1))),
        sharing=Sharing(strategy, tuple(entries), draw(some.booleans())) if entries else None,
        pass_device_specs=draw(some.booleans()),
    )


@pytest.mark.full
@settings(max_examples=400, deadline=None)
@given(nodes(), wishes())
def test_every_unit_is_advertised_once_or_left_out_with_a_reason(
    gpus: tuple[Gpu, ...], wanted: Settings
) -> None:
    try:
        made = plan(NOWHERE, wanted, inventory(*gpus))
    except ConfigError as error:
        assert wanted.sharing is not None
        assert error.message and error.hint
        return
    ids = [device.id for resource in made.resources for device in resource.devices]
    assert len(ids) == len(set(ids))
    there = Counter(unit.id for resource in made.resources for unit in resource.units)
    there.update(item.id for item in made.left_out if item.id)
    assert set(there.values()) <= {1}
    split = wanted.mig_strategy != "none"
    expected = {
        part
        for one in gpus
        for part in ([mig.uuid for mig in one.mig] or [one.uuid] if split and one.mig_enabled else [one.uuid])
        if part
    }
    assert set(there) == expected
    assert all(item.reason for item in made.left_out)
    assert all(resource.devices and not resource_name_problem(resource.name) for resource in made.resources)
    assert made == plan(NOWHERE, wanted, inventory(*gpus))
