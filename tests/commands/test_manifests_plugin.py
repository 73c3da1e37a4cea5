"""`gpunode manifests daemon-set|rbac|node|vector-add|all`: valid objects with minimal rights."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from fixtures.api_server import ApiServer, kubeconfig
from tests.cli import Ran, gpunode
from tests.kubernetes.kubectl import discovery, kubectl
from tests.kubernetes.schema import checked

IMAGE = ("--image", "registry.example.com/gpunode:1.0")
COMBINATIONS = [
    (),
    ("--mig", "none"),
    ("--mig", "single"),
    ("--mig", "mixed"),
    ("--mps", "4"),
    ("--cdi",),
    ("--mig", "single", "--cdi", "--mps", "2", "--metrics-port", "9400"),
    ("--vendor", "amd"),
    ("--vendor", "amd", "--metrics-port", "9400"),
    ("--namespace", "gpus", "--image-pull-secret", "registry", "--runtime-class", ""),
    ("--kubelet-root", "/data/kubelet", "--driver-root", "/run/nvidia/driver"),
    ("--labels", "node", "--labels", "node-feature", "--labels", "file"),
]


@cache  # the output is the same for the same arguments
def manifests(*argv: str) -> Ran:
    return gpunode("manifests", *argv)


def objects(*argv: str) -> list[dict[str, Any]]:
    ran = manifests(*argv)
    assert ran.code == 0, ran.err
    return list(yaml.safe_load_all(ran.out))


def pod(*argv: str) -> dict[str, Any]:
    found: dict[str, Any] = objects("daemon-set", *IMAGE, *argv)[-1]["spec"]["template"]["spec"]
    return found


def security(*argv: str) -> dict[str, Any]:
    found: dict[str, Any] = pod(*argv)["containers"][0]["securityContext"]
    return found


def volumes(*argv: str) -> dict[str, str]:
    return {one["name"]: one.get("hostPath", {}).get("path", "") for one in pod(*argv)["volumes"]}


# --- the schema -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", COMBINATIONS, ids=" ".join)
def test_every_object_matches_the_schema(options: tuple[str, ...]) -> None:
    found = objects("all", *IMAGE, "--node", "gpu-1", "--taint", *options)
    for one in found:
        checked(one)
    kinds = [one["kind"] for one in found]
    assert {"ServiceAccount", "Node", "DaemonSet"} <= set(kinds)
    assert kinds.index("ServiceAccount") < kinds.index("DaemonSet")
    assert ("Namespace" in kinds) == ("--namespace" in options)
    assert ("Pod" in kinds) == ("amd" not in options)


def test_schema_check_can_fail() -> None:
    found = objects("daemon-set", *IMAGE)[-1]
    for path, value in (("hostPid", True), ("hostPID", "yes"), ("containers", None)):
        wrong = json.loads(json.dumps(found))
        wrong["spec"]["template"]["spec"][path] = value
        with pytest.raises((AssertionError, ValueError)):
            checked(wrong)


def test_all_api_requests_match_the_schema() -> None:
    uses = ("plugin", "labels", "node-feature", "mig", "advertise", "verify")
    found = objects("rbac", *(word for use in uses for word in ("--for", use)))
    for one in found:
        checked(one)
    assert {one["kind"] for one in found} == {
        *("Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
    }


def test_output_with_a_node_warns_of_kubectl_delete() -> None:
    ran = manifests("all", *IMAGE, "--node", "gpu-1")
    warning = "kubectl delete of this output deletes Node gpu-1 too: leave out --node for that"
    assert ran.err.splitlines() == [warning] and ran.out.splitlines()[0] == f"# {warning}"
    ran = manifests("all", *IMAGE)
    assert (ran.code, ran.err) == (0, "") and "#" not in ran.out


@pytest.mark.parametrize("options", [(), COMBINATIONS[6], COMBINATIONS[9]], ids=" ".join)
def test_kubectl_accepts_the_stream(options: tuple[str, ...], tmp_path: Path) -> None:
    text = manifests("all", *IMAGE, "--node", "gpu-1", *options).out
    text += "---\n" + manifests("rbac", "--for", "verify", "--for", "mig").out
    want = ("apply", "--dry-run=client", "--validate=false", "-o", "name", "-f", "-")
    with discovery() as server:
        done = kubectl(*want, stdin=text, home=str(tmp_path), server=server)
    assert (done.returncode, done.stderr) == (0, "")
    named = done.stdout.split()
    assert len(named) == len(list(yaml.safe_load_all(text)))
    assert "daemonset.apps/gpunode-device-plugin" in named and "pod/gpunode-vector-add" in named
    assert "clusterrole.rbac.authorization.k8s.io/gpunode:mig-verify" in named


def test_kubectl_applies_the_stream_and_has_nothing_to_change_the_second_time(
    api: ApiServer, tmp_path: Path
) -> None:
    names = (
        *("runtimeclass.node.k8s.io/nvidia", "serviceaccount/gpunode-device-plugin"),
        *("daemonset.apps/gpunode-device-plugin", "pod/gpunode-vector-add"),
    )
    config = tmp_path / "config"
    config.write_text(kubeconfig(api))
    argv = (f"--kubeconfig={config}", "apply", "--validate=false", "-f", "-")
    for action in ("created", "unchanged"):
        done = kubectl(*argv, stdin=manifests("all", *IMAGE).out, home=str(tmp_path))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines() == [f"{name} {action}" for name in names]
    plugin = api.store.get("DaemonSet", "gpunode-device-plugin", "kube-system")
    assert plugin["spec"] == objects("daemon-set", *IMAGE)[-1]["spec"]


def test_a_ci_systems_color_does_not_get_into_the_stream() -> None:
    colored = gpunode("manifests", "all", *IMAGE, env={"FORCE_COLOR": "1"})
    assert colored.out == manifests("all", *IMAGE).out


def test_kubectl_decodes_the_pods_without_loss(tmp_path: Path) -> None:
    """`set env --local` decodes into Kubernetes' own types: fields that these lack are dropped."""
    for ran in (manifests("daemon-set", *IMAGE, *COMBINATIONS[6][:-4]), manifests("vector-add")):
        for text in ran.out.split("---\n"):
            if "containers:" in text:
                done = kubectl(
                    *("set", "env", "--local", "-f", "-", "-o", "json", "GPUNODE_X=1"),
                    stdin=text,
                    home=str(tmp_path),
                )
                assert done.returncode == 0, done.stderr
                assert missing(yaml.safe_load(text), json.loads(done.stdout)) == []


def missing(wanted: Any, found: Any, path: str = "") -> list[str]:
    """Where `found` lacks a field of `wanted`; it may have more."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        return [
            at
            for key, value in wanted.items()
            for at in ([f"{path}.{key}"] if key not in found else missing(value, found[key], f"{path}.{key}"))
        ]
    if isinstance(wanted, list) and isinstance(found, list):
        return [
            at
            for n, (one, two) in enumerate(zip(wanted, found, strict=False))
            for at in missing(one, two, f"{path}[{n}]")
        ]
    return [] if wanted == found else [path]


# --- least privilege ------------------------------------------------------------------------------------


def test_plain_plugin_has_no_privilege_beyond_root_files() -> None:
    found = security()
    assert found["capabilities"] == {"drop": ["ALL"]}
    assert found["seccompProfile"] == {"type": "RuntimeDefault"}
    assert found["allowPrivilegeEscalation"] is False and found["readOnlyRootFilesystem"] is True
    assert "privileged" not in found
    spec = pod()
    assert not {"hostPID", "hostNetwork", "hostIPC"} & spec.keys()
    assert spec["automountServiceAccountToken"] is False
    assert volumes() == {
        "device-plugins": "/var/lib/kubelet/device-plugins",
        "state": "/var/lib/gpunode/plugin",
        "tmp": "",
    }


def test_each_option_adds_only_what_it_needs() -> None:
    plain = volumes()
    assert security("--mig", "mixed")["capabilities"] == {"drop": ["ALL"], "add": ["SYS_ADMIN"]}
    assert security("--mig", "none") == security() == security("--cdi") == security("--metrics-port", "9400")
    assert volumes("--mig", "mixed") == plain
    assert volumes("--cdi").keys() - plain.keys() == {"cdi", "driver-root"}
    assert volumes("--metrics-port", "9400").keys() - plain.keys() == {"pod-resources"}
    assert volumes("--mps", "4").keys() - plain.keys() == {"mps", "mps-shm", "config"}
    assert pod("--mps", "4")["hostPID"] is True
    assert "SYS_ADMIN" in security("--mps", "4")["capabilities"]["add"]
    env = {one["name"] for one in pod("--mig", "single")["containers"][0]["env"]}
    assert "NVIDIA_MIG_MONITOR_DEVICES" in env
    assert "NVIDIA_MIG_MONITOR_DEVICES" not in {one["name"] for one in pod()["containers"][0]["env"]}


def test_labels_add_a_token_and_only_the_rights_of_each_target() -> None:
    assert pod("--labels", "file")["automountServiceAccountToken"] is False
    assert volumes("--labels", "file").keys() - volumes().keys() == {"features"}
    found = {one["kind"]: one for one in objects("all", *IMAGE, "--labels", "node")}
    spec = found["DaemonSet"]["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is True and "Role" not in found
    assert "--labels=node" in spec["containers"][0]["args"]
    env = {one["name"]: one.get("valueFrom") for one in spec["containers"][0]["env"]}
    assert env["NODE_NAME"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert found["ClusterRole"]["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]}
    ]
    of_features = {one["kind"] for one in objects("all", *IMAGE, "--labels", "node-feature")}
    assert "Role" in of_features and "ClusterRole" not in of_features
    assert "gpunode manifests rbac --for labels" in manifests("daemon-set", *IMAGE, "--labels", "node").err


def test_driver_root_is_read_only_and_sees_later_mounts() -> None:
    mounts = {one["name"]: one for one in pod("--cdi")["containers"][0]["volumeMounts"]}
    assert mounts["driver-root"]["readOnly"] is True
    assert mounts["driver-root"]["mountPropagation"] == "HostToContainer"


def test_amd_plugin_has_no_runtime_class_and_tolerates_its_own_taint() -> None:
    spec = pod("--vendor", "amd")
    assert "runtimeClassName" not in spec and "env" not in spec["containers"][0]
    assert spec["tolerations"] == [{"key": "amd.com/gpu", "operator": "Exists"}]
    assert "--vendor=amd" in spec["containers"][0]["args"]


def test_nodes_are_selected_by_any_nfd_label_or_a_manual_one() -> None:
    required = pod()["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    keys = {term["matchExpressions"][0]["key"] for term in required["nodeSelectorTerms"]}
    assert keys == {
        *(f"feature.node.kubernetes.io/pci-{one}.present" for one in ("10de", "0300_10de", "0302_10de")),
        "nvidia.com/gpu.present",
    }


def test_two_accounts_never_share_a_role_or_a_binding() -> None:
    """`kubectl apply` of the second would replace the rights of the first."""
    everywhere: dict[tuple[str, str], Any] = {}
    for options in (
        ("--for", "verify", "--namespace", "one"),
        ("--for", "advertise", "--namespace", "two"),
        ("--for", "advertise", "--namespace", "three"),
        ("--for", "advertise", "--namespace", "three", "--name", "other"),
        ("--for", "mig", "--namespace", "three", "--name", "other"),
        ("--for", "labels"),
    ):
        for one in objects("rbac", *options):
            if "Role" not in one["kind"]:
                continue
            key = one["kind"], one["metadata"].get("namespace", "") + "/" + one["metadata"]["name"]
            assert everywhere.setdefault(key, one) == one
    assert len([kind for kind, _ in everywhere if kind == "ClusterRoleBinding"]) == 6


def test_account_that_may_create_pods_has_its_own_namespace() -> None:
    found = objects("rbac", "--for", "verify")
    assert found[0]["kind"] == "Namespace" and found[0]["metadata"]["name"] == "gpunode-verify"
    assert found[0]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    namespaces = {one["metadata"]["namespace"] for one in found if one["kind"] in ("Role", "ServiceAccount")}
    assert namespaces == {"gpunode-verify"}
    assert (
        "gpunode verify --on kubernetes --namespace gpunode-verify"
        in manifests("rbac", "--for", "verify").err
    )
    named = objects("rbac", "--for", "verify", "--namespace", "tests")
    assert named[0]["kind"] == "ServiceAccount", "a namespace named in the options exists already"


def test_plugin_account_has_no_role_and_each_use_only_its_verbs() -> None:
    assert [one["kind"] for one in objects("rbac")] == ["ServiceAccount"]
    found = {one["kind"]: one for one in objects("rbac", "--for", "advertise")}
    assert found["ClusterRole"]["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
    ]
    assert "Role" not in found
    both = {one["kind"]: one for one in objects("rbac", "--for", "verify", "--for", "mig")}
    nodes = [rule for rule in both["ClusterRole"]["rules"] if rule["resources"] == ["nodes"]]
    assert [rule["verbs"] for rule in nodes] == [["get", "patch"]]
    pods = next(rule for rule in both["Role"]["rules"] if rule["resources"] == ["pods"])
    assert "watch" not in pods["verbs"] and "deletecollection" not in pods["verbs"]


def test_pod_fits_a_restricted_namespace() -> None:
    """Pod Security Standards, level restricted, rule by rule."""
    spec = objects("vector-add", "--node", "gpu-1", "--namespace", "tests")[0]["spec"]
    container = spec["containers"][0]
    assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] > 0
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert not {"hostPID", "hostNetwork", "hostIPC", "volumes"} & spec.keys()
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert spec["nodeSelector"] == {"kubernetes.io/hostname": "gpu-1"} and "nodeName" not in spec
    assert spec["restartPolicy"] == "Never" and spec["activeDeadlineSeconds"] > 0


# --- a config file --------------------------------------------------------------------------------------


def with_file(tmp_path: Path, text: str, *argv: str) -> list[dict[str, Any]]:
    manifests.cache_clear()
    file = tmp_path / "plugin.yaml"
    file.write_text(text)
    return objects("daemon-set", *IMAGE, "--config-file", str(file), *argv)


def test_config_file_is_copied_verbatim_into_the_config_map(tmp_path: Path) -> None:
    text = "# ours\nversion: v1\nflags:\n  migStrategy: mixed\n  plugin: {deviceListStrategy: [cdi-cri]}\n"
    configured, plugin = with_file(tmp_path, text)
    assert configured["data"] == {"config.yaml": text}
    container = plugin["spec"]["template"]["spec"]["containers"][0]
    assert "--config-file=/etc/gpunode/plugin/config.yaml" in container["args"]
    assert container["securityContext"]["capabilities"]["add"] == ["SYS_ADMIN"]
    assert "driver-root" in {one["name"] for one in container["volumeMounts"]}
    # or an edit of the file would have no effect
    assert not [one for one in container["args"] if "mig-strategy" in one or "device-list" in one]


def test_device_specs_and_external_mps_daemons_get_their_mounts(tmp_path: Path) -> None:
    plugin = with_file(tmp_path, "flags: {plugin: {passDeviceSpecs: true}}\n")[-1]
    assert plugin["spec"]["template"]["spec"]["containers"][0]["securityContext"]["privileged"] is True
    text = "flags: {mpsRoot: /run/mps}\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n"
    spec = with_file(tmp_path, text)[-1]["spec"]["template"]["spec"]
    assert "hostPID" not in spec
    assert {"name": "mps", "mountPath": "/run/mps"} in spec["containers"][0]["volumeMounts"]


def test_labels_in_a_config_file_add_the_token(tmp_path: Path) -> None:
    spec = with_file(tmp_path, "flags: {gpunode: {labels: [node]}}\n")[-1]["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is True
    assert not [one for one in spec["containers"][0]["args"] if "labels" in one]


def test_invalid_config_file_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "plugin.yaml"
    file.write_text("version: v1\nflags:\n  migStrategie: mixed\n")
    ran = manifests("daemon-set", *IMAGE, "--config-file", str(file))
    assert (ran.code, ran.out) == (1, "")
    assert f"{file}:3" in ran.err and "migStrategy" in ran.err


# --- bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("daemon-set", "--vendor", "amd", "--mig", "single"), "--mig-strategy is for NVIDIA's GPUs"),
        (("daemon-set", "--vendor", "amd", "--mps", "2"), "--mps is for NVIDIA's GPUs"),
        (("daemon-set", "--mps", "2", "--mig", "mixed"), "MPS can't serve"),
        (("daemon-set", "--image", "a b"), "can't be an image's name"),
        (("daemon-set", "--namespace", "Gpus"), "can't be a namespace"),
        (("daemon-set", "--kubelet-root", "kubelet"), "is not an absolute path"),
        (("daemon-set", "--mps", "2", "--config-file", "x"), "--config-file names one"),
        (("rbac", "--for", "everything"), "is not one of plugin, labels"),
        (("daemon-set", "--labels", "node,fille"), "--labels: 'fille' is not one of node, node-feature"),
        (("all", "--labels", "stdout"), "--labels: 'stdout' is not one of node, node-feature, file"),
        (("all", "--node", "gpu_1"), "can't be a node's name"),
        (("vector-add", "--resource", "gpu"), "DOMAIN/NAME"),
        (("all", "--taint"), "--taint needs a node"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_values_that_a_cluster_refuses_are_usage_errors(argv: tuple[str, ...], message: str) -> None:
    ran = manifests(*argv)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err and ran.err.splitlines()[-1].startswith("hint: ")


def test_image_without_registry_is_never_pulled() -> None:
    ran = manifests("daemon-set")
    plugin = list(yaml.safe_load_all(ran.out))[-1]["spec"]["template"]["spec"]["containers"][0]
    assert plugin["image"].startswith("gpunode:") and plugin["imagePullPolicy"] == "Never"
    assert "name yours with --image" in ran.err and "make image" in ran.err
    comments = [line for line in ran.out.splitlines() if line.startswith("#")]
    assert comments == [f"# {line}" for line in ran.err.splitlines()], "kept in the file that is applied"
    for own in (IMAGE, ("--image", "somebody/gpunode:1.0")):  # the second is Docker Hub's
        ran = manifests("daemon-set", *own)
        assert ran.err == "" and "imagePullPolicy: IfNotPresent" in ran.out and "#" not in ran.out


@pytest.mark.parametrize(
    ("argv", "same"),
    [
        (("daemon-set", "--labels", "node,file"), ("daemon-set", "--labels", "node", "--labels", "file")),
        (("rbac", "--for", "verify,mig"), ("rbac", "--for", "verify", "--for", "mig")),
        (("runtime-class", "--also", "cdi,legacy"), ("runtime-class", "--also", "cdi", "--also", "legacy")),
        (("daemon-set", "--mig", "mixed"), ("daemon-set", "--mig-strategy", "mixed")),
    ],
    ids=lambda argv: " ".join(argv),
)
def test_commas_and_repetition_and_both_names_give_the_same_objects(
    argv: tuple[str, ...], same: tuple[str, ...]
) -> None:
    assert objects(*argv) == objects(*same)


@pytest.mark.parametrize("name", ["MIG_STRATEGY", "MIG"])  # the second was released
def test_mig_strategy_is_set_by_its_variable(name: str) -> None:
    ran = gpunode("manifests", "daemon-set", *IMAGE, env={f"GPUNODE_MANIFESTS_DAEMON_SET_{name}": "mixed"})
    assert (ran.code, ran.err) == (0, "") and "- --mig-strategy=mixed" in ran.out


@pytest.mark.parametrize(
    ("image", "good"),
    [
        ("gpunode:0.1.0", True),
        ("registry.example.com:5000/gpu/gpunode:1.0_a-b", True),
        ("[fd00::1]:5000/gpunode", True),
        (f"registry.example.com/gpunode@sha256:{'0' * 64}", True),
        ("two:tags:x", False),
        ("registry.example.com/Upper:1", False),
        ("registry.example.com/gpunode:", False),
        ("registry.example.com//gpunode", False),
        ("https://registry.example.com/gpunode", False),
        ("gpunode:1 --privileged", False),
    ],
)
def test_invalid_image_name_is_refused(image: str, good: bool) -> None:
    ran = gpunode("manifests", "daemon-set", "--image", image)
    assert (ran.code, "can't be an image's name" in ran.err) == ((0, False) if good else (2, True))


def test_taint_is_printed_only_on_request() -> None:
    def node(*argv: str) -> dict[str, Any]:
        return next(one for one in objects("all", *IMAGE, "--node", "gpu-1", *argv) if one["kind"] == "Node")

    assert "spec" not in node()
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    assert node("--taint")["spec"] == {"taints": [taint]}
