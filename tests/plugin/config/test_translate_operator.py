"""`plugin check-config --from gpu-operator`: whatever a cluster gives out, and what of it is the plugin's."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from gpunode.plugin.config import translate_operator
from gpunode.plugin.config.gke import Translation, WrongInput, documents
from gpunode.plugin.config.resolve import settled

RESOURCE = "nvidia.com/gpu"


def from_operator(text: str, name: str = "") -> Translation:
    return settled(translate_operator.translate(documents(text.encode()), name))[0]


def told(found: Translation) -> dict[str, str]:
    return {one.key: one.text for one in found.left}


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


# what `kubectl get configmaps` brings along
STRANGERS = """
apiVersion: v1
kind: List
items:
- {kind: ConfigMap, metadata: {name: kube-root-ca.crt}, data: {ca.crt: "-----BEGIN\\nMIIC\\n"}}
- {kind: ConfigMap, metadata: {name: coredns}, data: {Corefile: ".:53 {\\n  errors\\n}\\n"}}
- {kind: ConfigMap, metadata: {name: kubelet-config}, data: {kubelet: "kind: KubeletConfiguration\\n"}}
- kind: ConfigMap
  metadata: {name: default-mig-parted-config}
  data: {config.yaml: "version: v1\\nmig-configs: {all-disabled: []}\\n"}
- kind: ConfigMap
  metadata: {name: default-gpu-clients}
  data: {clients.yaml: "version: v1\\ngpu-clients: []\\n"}
"""


@pytest.mark.parametrize("before", [POLICY, ""], ids=["named by the policy", "known by what it says"])
def test_the_config_maps_of_others_are_not_taken_for_the_plugins(before: str) -> None:
    found = from_operator(f"{before}---\n{STRANGERS}---\n{CONFIG_MAP}", "t4")
    assert found.name == "t4" and found.problems == ()
    assert "gpunode mig apply -f" in told(found)["ConfigMap default-mig-parted-config"]
    assert "a100" in told(found)  # and no Corefile beside it
    with pytest.raises(WrongInput, match="there are 2 configurations: a100, t4"):
        from_operator(f"{STRANGERS}---\n{CONFIG_MAP}")


def test_a_file_for_mig_alone_is_refused_with_the_command_that_takes_it() -> None:
    for text in (STRANGERS, "version: v1\nmig-configs: {}\n"):
        with pytest.raises(WrongInput) as refused:
            from_operator(text)
        assert "gpunode mig apply -f" in refused.value.hint


def node(name: str, config: str) -> str:
    metadata = {"name": name, "labels": {"nvidia.com/device-plugin.config": config}}
    return f"---\n{json.dumps({'kind': 'Node', 'metadata': metadata})}\n"


def test_the_nodes_label_chooses_before_the_policys_default() -> None:
    stream = f"{CONFIG_MAP}---\n{POLICY}"
    assert from_operator(stream + node("gpu-1", "t4")).name == "t4"
    both = from_operator(stream + node("gpu-1", "t4") + node("gpu-2", "a100"))
    assert both.name == "a100"
    assert "gpu-1 t4, gpu-2 a100" in told(both)["nvidia.com/device-plugin.config"]
    with pytest.raises(WrongInput, match=r"gpu-1: the label .* says 'h100'"):
        from_operator(stream + node("gpu-1", "h100"))


def test_two_maps_with_one_name_are_not_mixed() -> None:
    other = CONFIG_MAP.replace("plugin-configs", "older").replace("replicas: 4", "replicas: 2")
    with pytest.raises(WrongInput, match="two ConfigMaps have a configuration 'a100'"):
        from_operator(f"{CONFIG_MAP}---\n{other}")
    assert from_operator(f"{other}---\n{CONFIG_MAP}---\n{POLICY}").name == "a100"


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
        ("hostPaths: {kubeletRootDir: /data/k}", "hostPaths.kubeletRootDir", "--kubelet-root /data/k"),
        (
            "devicePlugin: {env: [{name: NVIDIA_VISIBLE_DEVICES, value: all}]}",
            "devicePlugin.env NVIDIA_VISIBLE_DEVICES",
            "NVIDIA's runtime reads it",
        ),
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
