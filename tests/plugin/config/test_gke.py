"""`plugin check-config --from gke`: translated and untranslated parts of GKE's configuration."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpunode.errors import ConfigError
from gpunode.plugin.config.gke import Translation, as_config_file, documents, translate
from tests.cli import Ran, clean_environment, command, gpunode
from tests.plugin.config.resolving import resolve_text

RESOURCE = "nvidia.com/gpu"


def check_config(file: Path, *argv: str) -> Ran:
    return gpunode("plugin", "check-config", "--from", "gke", str(file), *argv)


def from_gke(tree: Any) -> Translation:
    return as_config_file(translate(documents(json.dumps(tree).encode())))[0]


# --- GKE ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours", "left"),
    [
        ({}, {}, set()),
        ({"GPUPartitionSize": ""}, {}, set()),
        ({"GPUPartitionSize": "1g.5gb"}, {"flags": {"migStrategy": "single"}}, {"GPUPartitionSize"}),
        (
            {"GPUSharingConfig": {"GPUSharingStrategy": "time-sharing", "MaxSharedClientsPerGPU": 8}},
            {
                "sharing": {
                    "timeSlicing": {
                        "failRequestsGreaterThanOne": True,
                        "resources": [{"name": RESOURCE, "replicas": 8}],
                    }
                }
            },
            set(),
        ),
        (
            {"gpusharingconfig": {"gpusharingstrategy": "mps", "maxsharedclientspergpu": 4}},
            {
                "flags": {"gpunode": {"mps": True}},
                "sharing": {
                    "mps": {
                        "failRequestsGreaterThanOne": True,
                        "resources": [{"name": RESOURCE, "replicas": 4}],
                    }
                },
            },
            {"GPUSharingConfig.GPUSharingStrategy", "GPUSharingConfig"},
        ),
        (
            {"MaxTimeSharedClientsPerGPU": 2, "GPUSharingConfig": {"GPUSharingStrategy": "mps"}},
            {
                "sharing": {
                    "timeSlicing": {
                        "failRequestsGreaterThanOne": True,
                        "resources": [{"name": RESOURCE, "replicas": 2}],
                    }
                }
            },
            {"GPUSharingConfig"},
        ),
        (
            {"GPUSharingConfig": {"GPUSharingStrategy": "time-sharing", "MaxSharedClientsPerGPU": 1}},
            {},
            {"GPUSharingConfig"},
        ),
        (
            {"HealthCriticalXid": [79, 61]},
            {"health": {"disable": ["all"], "enable": [48, 61, 79]}},
            {"HealthCriticalXid"},
        ),
        ({"Surprise": 1}, {}, {"Surprise"}),
        ({"GPUFractionDivisor": 2}, {}, {"GPUFractionDivisor"}),
    ],
)
def test_gke_file_is_translated(theirs: dict[str, Any], ours: dict[str, Any], left: set[str]) -> None:
    found = from_gke(theirs)
    assert found.config == {"version": "v1", **ours}
    assert ({one.key for one in found.left}, found.problems) == (left, ())


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"GPUSharingConfig": {"GPUSharingStrategy": "mps"}}, "mps without a MaxSharedClientsPerGPU"),
        ({"GPUSharingConfig": {"MaxSharedClientsPerGPU": 3}}, "without a GPUSharingStrategy"),
        ({"GPUSharingConfig": {"GPUSharingStrategy": "magic", "MaxSharedClientsPerGPU": 3}}, "'magic'"),
        ({"GPUSharingConfig": {"MaxSharedClientsPerGPU": "many"}}, "expected a number"),
        ({"GPUPartitionSize": "half"}, "is not a MIG profile"),
        ({"GPUPartitionSize": ["1g.5gb"]}, "expected a string"),
        ({"HealthCriticalXid": "48"}, "is not a list of XIDs"),
        ({"HealthCriticalXid": [48, "x"]}, "is not a list of XIDs"),
        ([1], "not a gpu_config.json"),
    ],
)
def test_invalid_gke_file_is_refused(theirs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_gke(theirs)


def xid_map(xids: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "data": {"HealthCriticalXid": xids}}


def test_xids_of_the_gke_config_map_override_the_file() -> None:
    stream = (json.dumps({"HealthCriticalXid": [61]}), json.dumps(xid_map("32, 79,74")))
    found = as_config_file(translate(documents("\n---\n".join(stream).encode())))[0]
    assert found.config["health"] == {"disable": ["all"], "enable": [32, 48, 74, 79]}
    assert from_gke(xid_map("31")).config["health"]["enable"] == [31, 48]
    for wrong, message in ((xid_map("31,x"), "'x' is not an XID"), ({"kind": "ConfigMap"}, "isn't of GKE's")):
        with pytest.raises(ConfigError, match=message):
            from_gke(wrong)


@given(
    size=st.sampled_from(["", "1g.5gb", "3g.40gb", "7g.80gb", "1g.10gb+me"]),
    strategy=st.sampled_from(["time-sharing", "mps"]),
    clients=st.integers(1, 48),
    older=st.integers(0, 48),
    xids=st.lists(st.integers(1, 200), max_size=4),
)
def test_every_valid_gke_file_becomes_a_valid_plugin_file(
    size: str, strategy: str, clients: int, older: int, xids: list[int]
) -> None:
    shared = {"GPUSharingStrategy": strategy, "MaxSharedClientsPerGPU": clients}
    theirs = {"GPUPartitionSize": size, "GPUSharingConfig": shared, "HealthCriticalXid": xids}
    found = from_gke(theirs | {"MaxTimeSharedClientsPerGPU": older})
    assert found.problems == ()
    if older < 2 and strategy == "mps" and older == 0:
        assert found.config["sharing"]["mps"]["resources"][0]["replicas"] == clients


keys = st.sampled_from(
    ["GPUPartitionSize", "GPUSharingConfig", "HealthCriticalXid", "kind", "data", "flags", "sharing"]
)
trees = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["x", "a\nb", "true", "ConfigMap"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=15,
)


@given(trees)
def test_any_gke_file_is_translated_or_refused(tree: Any) -> None:
    try:
        found, text = as_config_file(translate(documents(yaml.safe_dump(tree).encode())))
    except ConfigError:
        return
    assert yaml.safe_load(text) == found.config


# --- as a user runs it ----------------------------------------------------------------------------------


def test_translated_file_is_accepted_by_plugin_serve(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "gpu_config.json", tmp_path / "plugin.yaml"
    config = {"GPUPartitionSize": "1g.10gb", "MaxTimeSharedClientsPerGPU": 3, "HealthCriticalXid": [79]}
    theirs.write_text(json.dumps(config))
    ran = check_config(theirs)
    assert ran.code == 0
    assert "left: GPUPartitionSize: " in ran.err and "gpunode mig apply" in ran.err
    resolved = resolve_text(ran.out, ours)
    assert resolved.problems == () and resolved.warnings == ()
    assert resolved.settings.mig_strategy == "single"
    assert resolved.settings.sharing is not None and resolved.settings.sharing.resources[0].replicas == 3
    assert resolved.settings.health.enabled == frozenset({48, 79})


def test_json_has_the_tree_the_text_and_what_is_left(tmp_path: Path) -> None:
    file = tmp_path / "gpu_config.json"
    file.write_text('{"GPUPartitionSize": "1g.5gb"}')
    ran = check_config(file, "-o", "json")
    assert (ran.code, ran.document["kind"], ran.document["status"]) == (0, "PluginConfigTranslation", "warn")
    data = ran.document["data"]
    assert (data["source"], data["file"]) == ("gke", str(file))
    assert yaml.safe_load(data["text"]) == data["config"]
    assert {one["key"] for one in data["left"]} == {"GPUPartitionSize"}


def test_stream_from_kubectl_is_read_from_stdin() -> None:
    done = subprocess.run(
        command("plugin", "check-config", "--from", "gke", "-"),
        input=json.dumps(xid_map("79")),
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and "- 79" in done.stdout


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (("--from", "gke"), 2, "--from needs a file"),
        (("--from", "aws", "FILE"), 2, "aws"),
        (("--from", "gke", "FILE", "--mig-strategy", "single"), 2, "options of the plugin have no place"),
        (("--from", "gpu-operator", "FILE"), 2, "gpu-operator"),
        (("--from", "gke", "FILE", "--name", "x"), 2, "no such option"),
        (("--from", "gke", "/nowhere/gpu_config.json"), 1, "doesn't exist or isn't a file"),
    ],
)
def test_contradicting_options_are_refused(
    argv: tuple[str, ...], code: int, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "gpu_config.json"
    file.write_text('{"Other": {}}')
    ran = gpunode("plugin", "check-config", *(str(file) if word == "FILE" else word for word in argv))
    assert (ran.code, ran.out) == (code, ""), ran.err
    assert message in ran.err


def test_translation_that_plugin_serve_would_refuse_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "gpu_config.json"
    file.write_text('{"MaxTimeSharedClientsPerGPU": 10001}')
    ran = check_config(file)
    assert (ran.code, ran.out) == (1, "")
    assert "sharing.timeSlicing.resources[0].replicas: '10001' is not a whole number from 2 to" in ran.err


def test_oversized_stream_is_refused_instead_of_truncated(tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    file.write_text(f"{json.dumps(xid_map('79'))}\n{'#' * (4 << 20)}\n")
    ran = check_config(file)
    assert (ran.code, ran.out) == (1, "") and "exceed the limit" in ran.err


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00"], ids=["empty", "binary"])
def test_invalid_file_hints_at_its_expected_content(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config"
    file.write_bytes(content)
    ran = check_config(file)
    assert (ran.code, ran.out) == (1, "")
    error, hint = ran.err.splitlines()
    assert error.startswith(f"error: {file}: ")
    assert hint.startswith("hint: it is ")
