"""`plugin check-config --from gke|gpu-operator`: what becomes of their configurations, and what doesn't."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpunode.plugin.config import translate_gke, translate_operator
from gpunode.plugin.config.settle import settled
from gpunode.plugin.config.translate import Translation, WrongInput, documents
from tests.cli import Ran, clean_environment, command, gpunode
from tests.plugin.config.resolving import resolve_text

RESOURCE = "nvidia.com/gpu"


def translate(source: str, file: Path, *argv: str) -> Ran:
    return gpunode("plugin", "check-config", "--from", source, str(file), *argv)


def from_gke(tree: Any) -> Translation:
    return settled(translate_gke.translate(documents(json.dumps(tree).encode()), ""))[0]


def from_operator(text: str, name: str = "") -> Translation:
    return settled(translate_operator.translate(documents(text.encode()), name))[0]


def told(found: Translation) -> dict[str, str]:
    return {one.key: one.text for one in found.left}


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
    ],
)
def test_what_gkes_file_becomes(theirs: dict[str, Any], ours: dict[str, Any], left: set[str]) -> None:
    found = from_gke(theirs)
    assert found.config == {"version": "v1", **ours}
    assert (set(told(found)), found.problems) == (left, ())


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"GPUSharingConfig": {"GPUSharingStrategy": "mps"}}, "mps without a MaxSharedClientsPerGPU"),
        ({"GPUSharingConfig": {"MaxSharedClientsPerGPU": 3}}, "without a GPUSharingStrategy"),
        ({"GPUSharingConfig": {"GPUSharingStrategy": "magic", "MaxSharedClientsPerGPU": 3}}, "'magic'"),
        ({"GPUSharingConfig": {"MaxSharedClientsPerGPU": "many"}}, "expected a number"),
        ({"GPUPartitionSize": "half"}, "no MIG profile"),
        ({"GPUPartitionSize": ["1g.5gb"]}, "expected a text"),
        ({"HealthCriticalXid": "48"}, "no list of XIDs"),
        ({"HealthCriticalXid": [48, "x"]}, "no list of XIDs"),
        ([1], "no gpu_config.json"),
    ],
)
def test_what_gkes_plugin_refuses_too(theirs: Any, said: str) -> None:
    with pytest.raises(WrongInput, match=said):
        from_gke(theirs)


@given(
    size=st.sampled_from(["", "1g.5gb", "3g.40gb", "7g.80gb", "1g.10gb+me"]),
    strategy=st.sampled_from(["time-sharing", "mps"]),
    clients=st.integers(1, 48),
    older=st.integers(0, 48),
    xids=st.lists(st.integers(1, 200), max_size=4),
)
def test_every_valid_file_of_gkes_becomes_one_that_the_plugin_takes(
    size: str, strategy: str, clients: int, older: int, xids: list[int]
) -> None:
    shared = {"GPUSharingStrategy": strategy, "MaxSharedClientsPerGPU": clients}
    theirs = {"GPUPartitionSize": size, "GPUSharingConfig": shared, "HealthCriticalXid": xids}
    found = from_gke(theirs | {"MaxTimeSharedClientsPerGPU": older})
    assert found.problems == ()
    if older < 2 and strategy == "mps" and older == 0:
        assert found.config["sharing"]["mps"]["resources"][0]["replicas"] == clients


# --- the GPU operator -----------------------------------------------------------------------------------

CONFIG_MAP = """
apiVersion: v1
kind: ConfigMap
metadata: {name: plugin-configs, namespace: gpu-operator}
data:
  a100: |
    version: v1
    flags:
      migStrategy: none
    sharing:
      timeSlicing:
        resources:
        - {name: nvidia.com/gpu, replicas: 4}
  t4: |
    version: v1
    sharing:
      mps: {resources: [{name: nvidia.com/gpu, replicas: 8}]}
"""
POLICY = """
apiVersion: nvidia.com/v1
kind: ClusterPolicy
metadata: {name: cluster-policy}
spec:
  devicePlugin:
    enabled: true
    image: k8s-device-plugin
    config: {name: plugin-configs, default: a100}
"""


def policy(text: str) -> Translation:
    return from_operator(text)


def test_the_policys_default_is_taken_and_the_others_named() -> None:
    found = from_operator(f"{CONFIG_MAP}---\n{POLICY}")
    assert found.name == "a100"
    assert found.config == {
        "version": "v1",
        "flags": {"migStrategy": "none"},
        "sharing": {"timeSlicing": {"resources": [{"name": RESOURCE, "replicas": 4}]}},
    }
    assert set(told(found)) == {"t4", "devicePlugin.image"}
    assert "nvidia.com/device-plugin.config" in told(found)["t4"]


def test_another_is_taken_by_name_and_mps_gets_its_daemons() -> None:
    found = from_operator(CONFIG_MAP, "t4")
    assert found.config["flags"] == {"gpunode": {"mps": True}}
    assert "here the plugin does" in told(found)["sharing.mps"]


def test_of_several_without_a_default_one_must_be_named() -> None:
    with pytest.raises(WrongInput, match="2 configurations: a100, t4"):
        from_operator(CONFIG_MAP)
    with pytest.raises(WrongInput, match="no configuration 'h100'"):
        from_operator(CONFIG_MAP, "h100")


@pytest.mark.parametrize(
    "text",
    [
        yaml.safe_load(CONFIG_MAP)["data"]
        and yaml.safe_dump({"a100": yaml.safe_load(CONFIG_MAP)["data"]["a100"]}),
        yaml.safe_load(CONFIG_MAP)["data"]["a100"],
        yaml.safe_dump(
            {"devicePlugin": {"config": {"data": yaml.safe_load(CONFIG_MAP)["data"], "default": "a100"}}}
        ),
        yaml.safe_dump(
            {"apiVersion": "v1", "kind": "List", "items": [*yaml.safe_load_all(f"{CONFIG_MAP}---{POLICY}")]}
        ),
        json.dumps({"config": {"map": {"only": yaml.safe_load(CONFIG_MAP)["data"]["a100"]}}}),
    ],
    ids=["a ConfigMap's data", "a configuration", "the chart's values", "a List", "the plugin's own chart"],
)
def test_it_is_found_in_whatever_it_lies(text: str) -> None:
    assert from_operator(text).config["sharing"]["timeSlicing"]["resources"][0]["replicas"] == 4


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("mig: {strategy: mixed}", {"migStrategy": "mixed"}),
        (
            "cdi: {enabled: true}",
            {
                "plugin": {
                    "deviceListStrategy": ["cdi-annotations", "cdi-cri"],
                    "cdiAnnotationPrefix": "cdi.k8s.io/",
                }
            },
        ),
        (
            "{cdi: {enabled: true}, toolkit: {enabled: true, installDir: /opt/toolkit}}",
            {
                "plugin": {
                    "deviceListStrategy": ["cdi-annotations", "cdi-cri"],
                    "cdiAnnotationPrefix": "cdi.k8s.io/",
                    "nvidiaCTKPath": "/opt/toolkit/toolkit/nvidia-cdi-hook",
                }
            },
        ),
        ("gds: {enabled: true}", {"gdsEnabled": True, "mofedEnabled": True}),
        ("gdrcopy: {enabled: true}", {"gdrcopyEnabled": True}),
        ("driver: {enabled: true}", {"nvidiaDriverRoot": "/run/nvidia/driver"}),
        (
            "{driver: {enabled: true}, hostPaths: {driverInstallDir: /run/d}}",
            {"nvidiaDriverRoot": "/run/d"},
        ),
        ("driver: {enabled: false}", None),
        ("devicePlugin: {mps: {root: /run/mps}}", {"mpsRoot": "/run/mps"}),
        (
            "devicePlugin: {env: [{name: PASS_DEVICE_SPECS, value: 'true'}]}",
            {"plugin": {"passDeviceSpecs": True}},
        ),
        (
            "devicePlugin: {args: ['--device-list-strategy=envvar,cdi-cri', -mig-strategy, single,"
            " --gds-enabled]}",
            {
                "plugin": {"deviceListStrategy": ["envvar", "cdi-cri"]},
                "migStrategy": "single",
                "gdsEnabled": True,
            },
        ),
        # arguments beat variables, as on a command line
        (
            "devicePlugin: {args: [--mig-strategy=single], env: [{name: MIG_STRATEGY, value: mixed}]}",
            {"migStrategy": "single"},
        ),
        (
            "{mig: {strategy: single}, devicePlugin: {env: [{name: MIG_STRATEGY, value: mixed}]}}",
            {"migStrategy": "mixed"},
        ),
    ],
)
def test_what_a_part_of_a_policy_becomes(text: str, flags: dict[str, Any] | None) -> None:
    found = from_operator(text)
    assert found.problems == ()
    assert found.config == {"version": "v1", **({"flags": flags} if flags else {})}


def test_the_operators_variables_beat_the_configuration_and_say_so() -> None:
    found = from_operator(f"{CONFIG_MAP}---\n{POLICY}  mig: {{strategy: single}}\n")
    assert found.config["flags"]["migStrategy"] == "single"
    assert (
        "mig.strategy says single, and beats the configuration, which says none"
        in told(found)["flags.migStrategy"]
    )


def test_a_key_in_another_case_is_the_same_key() -> None:
    found = from_operator("flags: {MIGSTRATEGY: none}\n---\nmig: {strategy: single}\n")
    assert found.config["flags"] == {"MIGSTRATEGY": "single"} and found.problems == ()


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ("dcgmExporter: {enabled: true}", "dcgmExporter", "--listen"),
        ("migManager: {enabled: true, config: {name: x}}", "migManager", "gpunode mig apply"),
        ("gfd: {enabled: true}", "gfd", "gpunode labels"),
        ("driver: {enabled: true}", "driver", "gpunode driver plan"),
        ("vgpuManager: {enabled: true}", "vgpuManager", "virtual machines"),
        ("{mig: {strategy: none}, somethingNew: {enabled: true}}", "somethingNew", "no such section"),
        ("devicePlugin: {enabled: false}", "devicePlugin.enabled", "shouldn't gpunode"),
        ("devicePlugin: {env: [{name: FOO, value: x}]}", "devicePlugin.env FOO", "nothing of that name"),
        ("devicePlugin: {args: [--foo]}", "devicePlugin.args --foo", "nothing of that name"),
        ("devicePlugin: {config: {name: there}}", "devicePlugin.config", "kubectl get configmap there"),
        ("cdi: {enabled: true, nriPluginEnabled: true}", "cdi.nriPluginEnabled", "configure-runtime --cdi"),
        ("flags: {nonsense: 1}", "flags.nonsense", "no device plugin knows this key"),
        ("resources: {gpus: [{pattern: '*', name: x}]}", "resources", "gpunode does what it says"),
        (
            "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2, rename: a.b/c}]}}",
            "sharing.timeSlicing.resources[0].rename",
            "gpunode does what it says",
        ),
        ("{apiVersion: nvidia.com/v1alpha1, kind: NVIDIADriver}", "NVIDIADriver", "gpunode driver plan"),
    ],
)
def test_what_has_no_counterpart_is_named(text: str, key: str, said: str) -> None:
    found = from_operator(text)
    assert found.problems == ()
    assert said in told(found)[key]


def test_what_is_switched_off_is_not_worth_a_word() -> None:
    off = "{mig: {strategy: none}, gfd: {enabled: false}, vgpuManager: {enabled: false}, nfd: {}}"
    assert from_operator(off).left == ()


@pytest.mark.parametrize(
    "text", ["", "# only a comment\n", "[1, 2]", "just text", "a: {b: c}", "{", "a: !!python/x {}"]
)
def test_what_is_nothing_of_theirs_is_refused(text: str) -> None:
    with pytest.raises(WrongInput):
        from_operator(text)


def test_a_wrong_value_is_a_problem_of_the_file() -> None:
    found = from_operator("sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: many}]}}")
    assert found.problems and "sharing.timeSlicing.resources[0].replicas" in found.problems[0]


keys = st.sampled_from(
    ["devicePlugin", "mig", "cdi", "kind", "data", "env", "args", "config", "flags", "sharing"]
)
trees = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["x", "a\nb", "true", "ClusterPolicy"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=15,
)


@given(trees)
def test_no_file_is_too_strange(tree: Any) -> None:
    for translator in (translate_gke.translate, translate_operator.translate):
        try:
            found, text = settled(translator(documents(yaml.safe_dump(tree).encode()), ""))
        except WrongInput:
            continue
        assert yaml.safe_load(text) == found.config


# --- as a user meets it ---------------------------------------------------------------------------------


def test_the_outcome_is_a_file_that_plugin_serve_takes(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "gpu_config.json", tmp_path / "plugin.yaml"
    config = {"GPUPartitionSize": "1g.10gb", "MaxTimeSharedClientsPerGPU": 3, "HealthCriticalXid": [79]}
    theirs.write_text(json.dumps(config))
    ran = translate("gke", theirs)
    assert ran.code == 0
    assert "left: GPUPartitionSize: " in ran.err and "gpunode mig apply" in ran.err
    resolved = resolve_text(ran.out, ours)
    assert resolved.problems == () and resolved.warnings == ()
    assert resolved.settings.mig_strategy == "single"
    assert resolved.settings.sharing is not None and resolved.settings.sharing.resources[0].replicas == 3
    assert resolved.settings.health.enabled == frozenset({48, 79})


def test_json_holds_the_tree_the_text_and_what_is_left(tmp_path: Path) -> None:
    file = tmp_path / "operator.yaml"
    file.write_text(f"{CONFIG_MAP}---\n{POLICY}")
    ran = translate("gpu-operator", file, "-o", "json")
    assert (ran.code, ran.document["kind"], ran.document["status"]) == (0, "PluginConfigTranslation", "warn")
    data = ran.document["data"]
    assert (data["source"], data["name"], data["file"]) == ("gpu-operator", "a100", str(file))
    assert yaml.safe_load(data["text"]) == data["config"]
    assert {one["key"] for one in data["left"]} == {"t4", "devicePlugin.image"}


def test_a_stream_from_kubectl_is_taken_from_stdin() -> None:
    done = subprocess.run(
        command("plugin", "check-config", "--from", "gpu-operator", "-", "--name", "a100"),
        input=CONFIG_MAP,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and "replicas: 4" in done.stdout


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (("--from", "gke"), 2, "--from needs a file"),
        (("--from", "aws", "FILE"), 2, "aws"),
        (("--from", "gke", "FILE", "--mig-strategy", "single"), 2, "options of the plugin have no place"),
        (("--name", "x", "FILE"), 2, "give --from"),
        (("--from", "gke", "FILE", "--name", "x"), 1, "leave out --name"),
        (("--from", "gke", "/nowhere/gpu_config.json"), 1, "is no file"),
        (("--from", "gpu-operator", "FILE"), 1, "nothing of the GPU operator's"),
    ],
)
def test_what_cant_be_meant(argv: tuple[str, ...], code: int, said: str, tmp_path: Path) -> None:
    file = tmp_path / "gpu_config.json"
    file.write_text('{"Other": {}}')
    ran = gpunode("plugin", "check-config", *(str(file) if word == "FILE" else word for word in argv))
    assert (ran.code, ran.out) == (code, ""), ran.err
    assert said in ran.err
