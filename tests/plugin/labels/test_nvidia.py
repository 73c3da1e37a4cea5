"""NVIDIA's labels where the formulas leave something open; test_nvidia_table.py has the formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.errors import ConfigError
from gpunode.gpu.model import Gpu, Inventory, MigDevice, MigSize
from gpunode.host import Host
from gpunode.plugin.config.settings import LabelSettings, NameRule, Settings, SharedResource, Sharing
from gpunode.plugin.labels.make import planned
from gpunode.plugin.labels.model import (
    Labels,
    Machine,
    key_problem,
    label_value,
    sanitised,
    valid_labels,
    with_kept_timestamp,
)
from gpunode.plugin.labels.nvidia import family, nvidia_labels
from tests.plugin.labels.test_make_command import labels_below

NOW = 1_800_000_000.9
HOST = Host(Path("/nowhere"), {})


class Model:
    """A GPU as NVML reports it, and its one MIG profile here."""

    def __init__(self, name: str, mib: int, cc: str, product: str, family: str, part: str = "") -> None:
        self.name, self.mib, self.cc, self.product, self.family = name, mib, cc, product, family
        self.part = part

    def gpu(self, index: int, cut: int | None = None, **more) -> Gpu:
        """`cut` is the number of its MIG devices; None: MIG is off."""
        uuid = f"GPU-{index:08x}-0000-0000-0000-{sum(map(ord, self.name)):012x}"
        parts = tuple(
            MigDevice(n, f"MIG-{index}-{n}", self.part, n + 7, 0, 4864 << 20, SIZE) for n in range(cut or 0)
        )
        facts: dict[str, Any] = {
            "minor": index,
            "memory_bytes": (self.mib << 20) + 4095,
            "compute_capability": self.cc,
            "mig_capable": bool(self.part),
            "mig_enabled": cut is not None,
            "mig": parts,
        }
        return Gpu(index, uuid, self.name, f"0000:{index + 0x19:02x}:00.0", **(facts | more))


SIZE = MigSize(1, 1, multiprocessors=14, copy_engines=1, decoders=0, encoders=0, jpeg=0, ofa=0)
A100 = Model("NVIDIA A100-SXM4-40GB", 40960, "8.0", "NVIDIA-A100-SXM4-40GB", "ampere", "1g.5gb")
H100 = Model("NVIDIA H100 80GB HBM3", 81559, "9.0", "NVIDIA-H100-80GB-HBM3", "hopper", "1g.10gb")
L40S = Model("NVIDIA L40S", 46068, "8.9", "NVIDIA-L40S", "ada-lovelace")
T4 = Model("Tesla T4", 15360, "7.5", "Tesla-T4", "turing")


def sharing(way: str, name: str = "nvidia.com/gpu", rename: bool = False, **more) -> Sharing | None:
    if way == "none":
        return None
    return Sharing(way, (SharedResource(name, 4, **more),), rename_by_default=rename)


def labels(*gpus: Gpu, machine: Machine | None = None, **settings) -> Labels:
    """The labels with these settings; time and machine are left out unless the test sets a machine."""
    chosen = Settings(mps_root="/run/nvidia/mps", labels=LabelSettings(no_timestamp=not machine), **settings)
    seen = Inventory("550.54.15", "12.4", gpus)
    return nvidia_labels(chosen, seen, planned(HOST, chosen, seen), machine or Machine(), NOW)


def of_gpu(found: Labels) -> dict[str, str]:
    """Labels of nvidia.com/gpu as a resource."""
    return {
        k: v
        for k, v in labels_below(found.values, "nvidia.com/gpu").items()
        if k not in ("machine", "mode", "clique")
    }


def whole(model: Model, count: int, replicas: int, way: str, shared: bool) -> dict[str, str]:
    major, minor = model.cc.split(".")
    return {
        "product": model.product + ("-SHARED" if shared else ""),
        "count": str(count),
        "replicas": str(replicas),
        "sharing-strategy": way,
        "memory": str(model.mib),
        "family": model.family,
        "compute.major": major,
        "compute.minor": minor,
    }


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        ((A100.gpu(0, 7), A100.gpu(1, 0)), "GPU 1 is in MIG mode and holds no MIG device"),
        ((A100.gpu(0, 7), A100.gpu(1)), "only some GPUs are in MIG mode"),
        (
            (A100.gpu(0, 7), A100.gpu(1, 0, mig=(MigDevice(0, "MIG-x", "3g.20gb", 1, 0, 1),))),
            "there are MIG devices of 1g.5gb and 3g.20gb",
        ),
    ],
    ids=["empty", "some", "several"],
)
def test_single_strategy_with_mixed_mig_layouts_is_invalid(gpus: tuple[Gpu, ...], why: str) -> None:
    found = labels(*gpus, mig_strategy="single")
    assert of_gpu(found) == {
        "product": "NVIDIA-A100-SXM4-40GB-MIG-INVALID",
        "count": "0",
        "replicas": "0",
        "sharing-strategy": "",
        "memory": "0",
        "family": "ampere",
        "compute.major": "8",
        "compute.minor": "0",
    }
    assert found.warnings == (f"mig-strategy is single and {why}: nvidia.com/gpu.product is MIG-INVALID",)


def test_single_strategy_describes_the_partitioned_model() -> None:
    """Family and compute capability are those of the model that the product names."""
    found = of_gpu(labels(T4.gpu(0), T4.gpu(1), A100.gpu(2, 7), mig_strategy="single"))
    assert (found["product"], found["family"]) == ("NVIDIA-A100-SXM4-40GB-MIG-INVALID", "ampere")
    a100 = A100.gpu(2, 7)
    same = replace(a100, mig=tuple(replace(part, profile="1g.10gb") for part in a100.mig))
    found = of_gpu(labels(H100.gpu(0, 1), H100.gpu(1, 1), same, mig_strategy="single"))
    assert (found["product"], found["family"]) == ("NVIDIA-A100-SXM4-40GB-MIG-1g.10gb", "ampere")
    assert (found["count"], found["compute.major"]) == ("9", "8")


def test_plus_in_a_profile_name_becomes_a_dot() -> None:
    gpu = replace(H100.gpu(0), mig_enabled=True, mig=(MigDevice(0, "MIG-x", "1g.10gb+me", 9, 0, 9984 << 20),))
    found = labels(gpu, mig_strategy="mixed")
    assert labels_below(found.values, "nvidia.com/mig-1g.10gb.me") == {
        "product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb.me",
        "count": "1",
        "replicas": "1",
        "sharing-strategy": "none",
        "memory": "9984",
    }


def test_mps_on_a_gpu_in_mig_mode_is_not_capable() -> None:
    found = labels(A100.gpu(0, 7), A100.gpu(1), sharing=sharing("mps"))
    assert found.values["nvidia.com/mps.capable"] == "false"
    assert of_gpu(found) == whole(A100, 1, 4, "mps", True)  # the plugin doesn't advertise the other


@pytest.mark.parametrize("strategy", ["none", "single", "mixed"])
def test_labels_count_only_advertised_devices(strategy: str) -> None:
    """MPS can't share MIG devices, so the plugin leaves out those that sharing.mps names."""
    name = "nvidia.com/mig-1g.5gb" if strategy == "mixed" else "nvidia.com/gpu"
    found = labels(A100.gpu(0, 7), A100.gpu(1, 7), mig_strategy=strategy, sharing=sharing("mps", name))
    counts = labels_below(found.values, name)
    assert (counts["count"], counts["replicas"]) == ("0", "0")
    assert any("MPS can't share MIG devices" in warning for warning in found.warnings)


def test_node_without_gpus_gives_a_warning() -> None:
    found = labels(machine=Machine(vgpu=False))
    assert set(found.values) == {"nvidia.com/gfd.timestamp", "nvidia.com/vgpu.present"}
    assert found.warnings == ("no GPU was found on this node",)


def test_several_models_give_the_same_labels_each_time() -> None:
    """The model of most GPUs; of equals the first. Original: another one on each pass."""
    found = labels(T4.gpu(0), L40S.gpu(1), L40S.gpu(2))
    assert of_gpu(found) == whole(L40S, 2, 1, "none", False)
    assert found.warnings == (
        "there are 1 Tesla T4, 2 NVIDIA L40S: nvidia.com/gpu.* describes NVIDIA L40S; resources.gpus in a "
        "config file gives each model a name of its own",
    )
    assert of_gpu(labels(T4.gpu(0), L40S.gpu(1))) == whole(T4, 1, 1, "none", False)


def test_renamed_resources_have_their_own_labels() -> None:
    rules = (NameRule("gpu", "*L40S*", "nvidia.com/l40s"), NameRule("gpu", "Tesla T4", "nvidia.com/t4"))
    found = labels(
        T4.gpu(0),
        L40S.gpu(1),
        rules=rules,
        sharing=sharing("time-slicing", "nvidia.com/t4", rename=True),
    )
    assert labels_below(found.values, "nvidia.com/l40s") == whole(L40S, 1, 1, "none", False)
    assert labels_below(found.values, "nvidia.com/t4") == whole(T4, 1, 4, "time-slicing", False)


def test_resource_name_for_all_gpus_is_not_a_renaming() -> None:
    found = labels(
        T4.gpu(0), resource_name="example.com/gpu", sharing=sharing("time-slicing", "example.com/gpu")
    )
    assert of_gpu(found) == whole(T4, 1, 4, "time-slicing", True)


def test_some_gpus_are_shared() -> None:
    found = labels(T4.gpu(0), T4.gpu(1), sharing=sharing("time-slicing", devices=("1",)))
    assert of_gpu(found) == whole(T4, 2, 4, "time-slicing", True)


def test_excluded_gpus_are_not_counted() -> None:
    assert of_gpu(labels(T4.gpu(0), T4.gpu(1), exclude=("0",)))["count"] == "1"
    assert of_gpu(labels(T4.gpu(0), replace(T4.gpu(1), name="DGX Display")))["count"] == "1"
    found = labels(A100.gpu(0, 7), mig_strategy="mixed", exclude=("0:0", "0:1"))
    assert labels_below(found.values, "nvidia.com/mig-1g.5gb")["count"] == "5"


def test_lost_gpu_does_not_affect_the_others() -> None:
    found = labels(T4.gpu(0), Gpu(1, "", "", "", error="GPU is lost"), T4.gpu(2))
    assert of_gpu(found)["count"] == "2"
    assert found.warnings == ("GPU 1 isn't counted: GPU is lost",)
    nothing = labels(T4.gpu(0, error="GPU is lost"))
    assert of_gpu(nothing) == {}
    assert nothing.values["nvidia.com/cuda.driver-version.full"] == "550.54.15"


def test_unknown_memory_and_capability_are_left_out() -> None:
    found = of_gpu(labels(T4.gpu(0, memory_bytes=0, compute_capability="")))
    assert set(found) == {"product", "count", "replicas", "sharing-strategy"}


@pytest.mark.parametrize(
    ("capability", "word"),
    [
        *((("1.3"), "tesla"), ("2.0", "fermi"), ("3.7", "kepler"), ("4.0", "undefined"), ("5.2", "maxwell")),
        *(
            (("6.1"), "pascal"),
            ("7.2", "volta"),
            ("7.5", "turing"),
            ("8.6", "ampere"),
            ("8.9", "ada-lovelace"),
        ),
        *((("9.0"), "hopper"), ("10.3", "blackwell"), ("11.0", "undefined"), ("12.1", "blackwell")),
        *((("13.0"), "rubin"), ("14.0", "undefined")),
    ],
)
def test_families(capability: str, word: str) -> None:
    major, minor = capability.split(".")
    assert family(int(major), int(minor)) == word


# --- the node -------------------------------------------------------------------------------------------


def test_labels_of_the_node() -> None:
    gpu = H100.gpu(0, clique="a1b2c3d4-0000-0000-0000-000000000001.3")
    machine = Machine("PowerEdge R760xa\nrev. 2", {gpu.pci: 0x030200}, True, ("550.90.05", "r550_00"))
    found = labels(gpu, machine=machine).values
    assert {k: v for k, v in found.items() if not k.startswith("nvidia.com/gpu.c")} == {
        "nvidia.com/gfd.timestamp": "1800000000",
        "nvidia.com/gpu.machine": "PowerEdge-R760xa-rev.-2",
        "nvidia.com/cuda.driver-version.full": "550.54.15",
        "nvidia.com/cuda.driver-version.major": "550",
        "nvidia.com/cuda.driver-version.minor": "54",
        "nvidia.com/cuda.driver-version.revision": "15",
        "nvidia.com/cuda.driver.major": "550",
        "nvidia.com/cuda.driver.minor": "54",
        "nvidia.com/cuda.driver.rev": "15",
        "nvidia.com/cuda.runtime-version.full": "12.4",
        "nvidia.com/cuda.runtime-version.major": "12",
        "nvidia.com/cuda.runtime-version.minor": "4",
        "nvidia.com/cuda.runtime.major": "12",
        "nvidia.com/cuda.runtime.minor": "4",
        "nvidia.com/gpu.family": "hopper",
        "nvidia.com/gpu.memory": "81559",
        "nvidia.com/gpu.mode": "compute",
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.sharing-strategy": "none",
        "nvidia.com/mig.capable": "true",
        "nvidia.com/mps.capable": "false",
        "nvidia.com/vgpu.present": "true",
        "nvidia.com/vgpu.host-driver-version": "550.90.05",
        "nvidia.com/vgpu.host-driver-branch": "r550_00",
    }
    assert found["nvidia.com/gpu.clique"] == "a1b2c3d4-0000-0000-0000-000000000001.3"


@pytest.mark.parametrize(
    ("classes", "mode"),
    [
        ((0x030200, 0x030200), "compute"),
        ((0x030000, 0x030000), "graphics"),
        ((0x030000, 0x030200), "unknown"),
        ((0x038000, 0x038000), "unknown"),
        ((), "unknown"),
    ],
)
def test_modes(classes: tuple[int, ...], mode: str) -> None:
    gpus = (T4.gpu(0), T4.gpu(1))
    machine = Machine("x", dict(zip((gpu.pci for gpu in gpus), classes, strict=False)))
    assert labels(*gpus, machine=machine).values["nvidia.com/gpu.mode"] == mode


@pytest.mark.parametrize(
    ("cliques", "clique"),
    [(("", ""), None), (("a.1", ""), "a.1"), (("a.1", "a.1"), "a.1"), (("a.1", "a.2"), None)],
)
def test_cliques(cliques: tuple[str, str], clique: str | None) -> None:
    gpus = (H100.gpu(index, clique=one) for index, one in enumerate(cliques))
    assert labels(*gpus).values.get("nvidia.com/gpu.clique") == clique


def test_node_without_gpus_has_timestamp_and_vgpu_labels() -> None:
    machine = Machine("x", {}, False)
    assert labels(machine=machine).values == {
        "nvidia.com/gfd.timestamp": "1800000000",
        "nvidia.com/vgpu.present": "false",
    }
    assert labels(machine=Machine("x", {}, None)).values == {"nvidia.com/gfd.timestamp": "1800000000"}


def test_unusual_driver_versions_still_give_labels() -> None:
    for version, revision in (("550.54", ""), ("550.54.15.01", "15.01"), ("nightly", "")):
        seen = Inventory(version, "", (T4.gpu(0),))
        found = nvidia_labels(Settings(), seen, planned(HOST, Settings(), seen), Machine(), NOW).values
        assert found["nvidia.com/cuda.driver-version.full"] == version
        assert found["nvidia.com/cuda.driver.rev"] == revision
        assert "nvidia.com/cuda.runtime.major" not in found


def test_impossible_sharing_section_is_an_error() -> None:
    double = Sharing("time-slicing", (SharedResource("nvidia.com/gpu", 2, "a.com/x", ("0",)),) * 1)
    both = double._replace(resources=(*double.resources, SharedResource("nvidia.com/gpu", 3, "", ("0",))))
    with pytest.raises(ConfigError, match="shared by two entries"):
        labels(T4.gpu(0), sharing=both)


# --- values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA-H100-80GB-HBM3"),
        ("  PowerEdge\tR750xa \n", "PowerEdge-R750xa"),
        ("Standard PC (i440FX + PIIX, 1996)", "Standard-PC-i440FX-PIIX-1996"),
        ("A+ Server/4124_GO-NART.2", "A-Server4124_GO-NART.2"),
        ("機械", ""),
    ],
)
def test_values_are_sanitized(text: str, plain: str) -> None:
    assert sanitised(text) == plain


def test_value_that_kubernetes_refuses_is_shortened() -> None:
    assert label_value("-Default string-") == "Default-string"
    assert label_value("x" * 62 + "-yz") == "x" * 62


@given(st.text(max_size=100))
def test_every_value_is_valid_for_kubernetes(text: str) -> None:
    value = label_value(text)
    assert len(value) <= 63
    assert value == "" or not key_problem(value)


def test_key_that_kubernetes_refuses_is_reported() -> None:
    long = "nvidia.com/" + "x" * 60
    found = valid_labels({f"{long}.product": "a", "nvidia.com/gpu.count": "1"})
    assert found.values == {"nvidia.com/gpu.count": "1"}
    assert found.warnings[0].startswith(f"the label {long}.product is left out")


def test_timestamp_is_that_of_the_last_change() -> None:
    before = {"nvidia.com/gfd.timestamp": "1", "nvidia.com/gpu.count": "8"}
    assert with_kept_timestamp({**before, "nvidia.com/gfd.timestamp": "2"}, before) is before
    other = {"nvidia.com/gfd.timestamp": "2", "nvidia.com/gpu.count": "7"}
    assert with_kept_timestamp(other, before) is other
    assert with_kept_timestamp({"nvidia.com/gpu.count": "8"}, before) == {"nvidia.com/gpu.count": "8"}
