"""Response to a container with every combination of strategies, and the error of a refusal."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest

from gpunode.plugin.config.settings import Settings, SharedResource, Sharing
from gpunode.plugin.model import AllocationError, Common, ContainerDevice, ContainerMount, Problem, Resource
from gpunode.plugin.nvidia.response import annotation_key, answer
from tests.plugin.gpus import GPU_RESOURCE, bare_host, cut, gpu, mig_uuid, only, planned, snapshot, uuid

STRATEGIES = ("envvar", "volume-mounts", "cdi-annotations", "cdi-cri")
COMBINATIONS = [chosen for count in range(1, 5) for chosen in itertools.combinations(STRATEGIES, count)]
KEY = "cdi.k8s.io/nvidia-device-plugin_nvidia.com_gpu"
MOUNTED = "/var/run/nvidia-container-devices"


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return bare_host(tmp_path_factory.mktemp("node") / "root")


@pytest.fixture(scope="module")
def four(host):
    return snapshot(only(planned(host, *(gpu(index) for index in range(4)))))


def shares(host, single=False, count=2):
    sharing = Sharing("time-slicing", (SharedResource(GPU_RESOURCE, count),), False, single)
    return snapshot(only(planned(host, gpu(0), gpu(1), sharing=sharing)))


def with_common(given, **common):
    return snapshot(replace(given.resource, common=Common(**common)))


# --- the table ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["uuid", "index"])
@pytest.mark.parametrize("specs", [False, True], ids=["", "specs"])
@pytest.mark.parametrize("channels", [(), (0,)], ids=["", "imex"])
@pytest.mark.parametrize("chosen", COMBINATIONS, ids=",".join)
def test_combined_strategies_give_the_union_of_their_responses(four, chosen, channels, specs, by):
    """NVIDIA's plugin's response row by row; requested are GPUs 3 and 1, in this order."""
    nodes = ("/dev/nvidiactl", *(f"/dev/nvidia-caps-imex-channels/channel{one}" for one in channels))
    table = with_common(four, nodes=nodes, channels=channels, cdi=("gdrcopy",))
    settings = Settings(
        device_list_strategy=chosen, device_id_strategy=by, pass_device_specs=specs, gdrcopy_enabled=True
    )
    got = answer(settings, table, [uuid(3), uuid(1)])
    names = ["3", "1"] if by == "index" else [uuid(3), uuid(1)]

    envs = {"NVIDIA_GDRCOPY": "enabled"}
    if "envvar" in chosen:
        envs["NVIDIA_VISIBLE_DEVICES"] = ",".join(names)
        envs |= {"NVIDIA_IMEX_CHANNELS": "0"} if channels else {}
    if "volume-mounts" in chosen:
        envs["NVIDIA_VISIBLE_DEVICES"] = MOUNTED
    assert got.envs == envs

    targets = [*names, *(f"imex/{one}" for one in channels)] if "volume-mounts" in chosen else []
    assert got.mounts == tuple(ContainerMount("/dev/null", f"{MOUNTED}/{target}") for target in targets)

    cdi = [f"k8s.device-plugin.nvidia.com/gpu={name}" for name in names]
    cdi += [f"k8s.device-plugin.nvidia.com/imex-channel={one}" for one in channels]
    cdi += ["k8s.device-plugin.nvidia.com/gdrcopy=all"]
    assert got.cdi == (tuple(cdi) if "cdi-cri" in chosen else ())
    assert got.annotations == ({KEY: ",".join(cdi)} if "cdi-annotations" in chosen else {})

    passed = [*nodes, "/dev/nvidia3", "/dev/nvidia1"]
    by_runtime = {"envvar", "volume-mounts"} & set(chosen)
    expected = [ContainerDevice(path, path) for path in passed] if specs and by_runtime else []
    assert sorted(got.nodes, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize(
    ("field", "variable"),
    [
        ("gdrcopy_enabled", "NVIDIA_GDRCOPY"),
        ("gds_enabled", "NVIDIA_GDS"),
        ("mofed_enabled", "NVIDIA_MOFED"),
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_feature_variable_is_set_with_every_strategy(four, field, variable, strategy):
    settings = Settings(device_list_strategy=(strategy,), **{field: True})  # type: ignore[arg-type]
    assert answer(settings, four, [uuid(0)]).envs[variable] == "enabled"


# --- devices --------------------------------------------------------------------------------------------


def test_shares_of_one_gpu_are_one_gpu(host):
    table = shares(host)
    strategies = ("envvar", "volume-mounts", "cdi-cri")
    settings = Settings(device_list_strategy=strategies, pass_device_specs=True)
    got = answer(settings, table, [f"{uuid(1)}::1", f"{uuid(0)}::0", f"{uuid(1)}::0"])
    assert [name.rpartition("=")[2] for name in got.cdi] == [uuid(1), uuid(0)]
    assert [mount.container.rpartition("/")[2] for mount in got.mounts] == [uuid(1), uuid(0)]
    assert [node.container for node in got.nodes] == ["/dev/nvidia1", "/dev/nvidia0"]


def test_mig_device_is_named_by_uuid_or_by_both_indices(host):
    resource = only(planned(host, cut(0, "1g.10gb", "1g.10gb"), mig_strategy="single"))
    for by, value in (("uuid", mig_uuid(0, 1)), ("index", "0:1")):
        got = answer(Settings(device_id_strategy=by), snapshot(resource), [mig_uuid(0, 1)])
        assert got.envs == {"NVIDIA_VISIBLE_DEVICES": value}


def test_mig_devices_add_their_parents_node_once(tmp_path):
    lines = "".join(f"gpu0/gi{gi}/access {gi}1\ngpu0/gi{gi}/ci0/access {gi}2\n" for gi in (1, 2))
    host = bare_host(tmp_path / "n", files={"/proc/driver/nvidia-caps/mig-minors": lines})
    settings = Settings(mig_strategy="single", pass_device_specs=True)
    resource = only(
        planned(host, cut(0, "1g.10gb", "1g.10gb"), mig_strategy="single", pass_device_specs=True)
    )
    got = answer(settings, snapshot(resource), [mig_uuid(0, 1), mig_uuid(0, 0)])
    assert [node.container for node in got.nodes] == [
        "/dev/nvidia0",
        *(f"/dev/nvidia-caps/nvidia-cap{number}" for number in (21, 22, 11, 12)),
    ]


@pytest.mark.parametrize(
    ("roots", "prefix"),
    [
        ({}, ""),
        ({"driver_root": "/run/nvidia/driver"}, "/run/nvidia/driver"),
        ({"driver_root": "/run/nvidia/driver", "dev_root": "/"}, ""),
        ({"dev_root": "/other/"}, "/other"),
    ],
)
def test_device_spec_paths_start_with_the_device_root(four, roots, prefix):
    got = answer(Settings(pass_device_specs=True, **roots), four, [uuid(2)])
    assert got.nodes == (ContainerDevice(f"{prefix}/dev/nvidia2", "/dev/nvidia2", "rw"),)


@pytest.mark.parametrize(
    ("prefix", "resource", "key"),
    [
        ("cdi.k8s.io/", GPU_RESOURCE, KEY),
        ("example.com/", "nvidia.com/mig-1g.10gb", "example.com/nvidia-device-plugin_nvidia.com_mig-1g.10gb"),
    ],
)
def test_annotation_is_named_after_the_resource(prefix, resource, key):
    assert annotation_key(prefix, resource) == key


def test_long_names_give_valid_distinct_keys():
    names = [f"nvidia.com/{'x' * 50}{end}" for end in "ab"]
    keys = {annotation_key("cdi.k8s.io/", name).partition("/")[2] for name in names}
    assert len(keys) == 2
    assert all(len(key) <= 63 and key[-1].isalnum() for key in keys)


def test_mps_settings_are_only_for_shares(host):
    sharing = Sharing("mps", (SharedResource(GPU_RESOURCE, 2, "", ("0",)),), False, True)
    settings = Settings(sharing=sharing, mps_root="/run/nvidia/mps")
    table = snapshot(only(planned(host, gpu(0), gpu(1), sharing=sharing)))
    whole = answer(settings, table, [uuid(1)])
    assert (whole.mounts, set(whole.envs)) == ((), {"NVIDIA_VISIBLE_DEVICES"})
    share = answer(settings, table, [f"{uuid(0)}::1"])
    assert share.envs["CUDA_MPS_PIPE_DIRECTORY"] == "/mps/nvidia.com/gpu/pipe"
    assert share.envs["NVIDIA_VISIBLE_DEVICES"] == uuid(0)
    assert {mount.container for mount in share.mounts} == {"/mps/nvidia.com/gpu/pipe", "/dev/shm"}


# --- refusals -------------------------------------------------------------------------------------------


def refused(table, ids, settings=None) -> AllocationError:
    with pytest.raises(AllocationError) as caught:
        answer(settings or Settings(), table, ids)
    return caught.value


def test_unknown_device_error_lists_the_known_ones(four):
    error = refused(four, [uuid(0), "GPU-nope"])
    assert error.code == "not-found"
    known = ", ".join(uuid(index) for index in range(4))
    assert error.message == f"invalid request: unknown device 'GPU-nope'; nvidia.com/gpu has {known}"


def test_list_of_many_known_devices_is_shortened(host):
    error = refused(shares(host, count=500), ["x" * 10_000])
    assert error.message.endswith("::7 and 992 more")
    assert len(error.message) < 800


def test_resource_that_became_empty_is_named():
    assert refused(snapshot(Resource(GPU_RESOURCE)), ["GPU-1"]).message.endswith("nvidia.com/gpu has none")


def test_request_for_nothing_is_invalid(four):
    assert refused(four, []).code == "invalid"


@pytest.mark.parametrize(
    ("mend", "hint"),
    [
        ("", ""),
        ("reset", "(closes NVML for 2 min), then nvidia-smi --gpu-reset -i 1"),
        ("reboot", "reboot the node"),
    ],
)
def test_unhealthy_device_is_refused_with_the_reason_and_the_fix(four, mend, hint):
    problem = Problem("xid-79", "XID 79: the GPU has fallen off the bus", mend=mend)
    devices = [one._replace(problem=problem if one.unit.index == "1" else None) for one in four.devices]
    error = refused(snapshot(replace(four.resource, devices=tuple(devices))), [uuid(0), uuid(1)])
    assert error.code == "unhealthy"
    assert error.message.startswith(f"device {uuid(1)} is unhealthy: XID 79: the GPU has fallen off the bus")
    assert hint in error.message


def test_more_than_one_share_is_refused_if_the_limit_is_one(host):
    ids = [f"{uuid(0)}::0", f"{uuid(1)}::0"]
    error = refused(shares(host, single=True), ids)
    assert error.message.startswith("maximum request size for shared resources is 1; found 2")
    assert "sharing.timeSlicing" in error.message
    assert answer(Settings(), shares(host, single=True), ids[:1]).envs
    assert answer(Settings(), shares(host), ids).envs


def test_whole_devices_of_a_shared_resource_are_not_limited(host):
    sharing = Sharing("time-slicing", (SharedResource(GPU_RESOURCE, 2, "", ("2",)),), False, True)
    table = snapshot(only(planned(host, *(gpu(index) for index in range(3)), sharing=sharing)))
    assert answer(Settings(), table, [uuid(0), uuid(1)]).envs
    assert "found 2" in refused(table, [uuid(0), f"{uuid(2)}::0"]).message


# --- size and speed -------------------------------------------------------------------------------------


def test_ten_thousand_ids_are_answered_or_refused_at_once(host):
    table = shares(host, count=5000)
    ids = [device.id for device in table.devices]
    start = time.thread_time()
    assert answer(Settings(), table, ids).envs == {"NVIDIA_VISIBLE_DEVICES": f"{uuid(0)},{uuid(1)}"}
    assert len(refused(table, [*ids, "GPU-nope"]).message) < 800
    assert time.thread_time() - start < 0.5


def test_single_id_is_answered_in_thirty_microseconds(host):
    table = shares(host, count=500)
    asked = [f"{uuid(1)}::499"]
    settings = Settings(device_list_strategy=STRATEGIES, pass_device_specs=True)
    best = 1.0
    for _ in range(50):
        start = time.thread_time()
        for _ in range(20):
            answer(settings, table, asked)
        best = min(best, (time.thread_time() - start) / 20)
    assert best < 30e-6
