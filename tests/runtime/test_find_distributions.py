"""Plans for a distribution's containerd on recorded nodes, and which containerd a name or ``auto`` means."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gpunode.errors import ConfigError, GpunodeError, PreconditionError, UsageError
from gpunode.facts.toml import dig, parse_toml
from gpunode.host import Host
from gpunode.runtime import find
from gpunode.runtime.engine import Active, DesiredConfig, Engine, Handler, Plan, Request, UnwantedConfig
from gpunode.runtime.k0s import K0sEngine
from gpunode.runtime.k3s import K3sEngine
from tests.facts.test_daemons import Node

DIRECTORY = "/var/lib/rancher/k3s/agent/etc/containerd"
RENDERED = f"{DIRECTORY}/config.toml"
SOCKET = "/run/k3s/containerd/containerd.sock"
BINARY = "/var/lib/rancher/k3s/data/current/bin/containerd"
PROGRAM = "/usr/bin/nvidia-container-runtime"
OPERATORS = "/usr/local/nvidia/toolkit/nvidia-container-runtime"
CRI = "plugins.'io.containerd.cri.v1.runtime'"
RUNTIMES = f"{CRI}.containerd.runtimes"
IMPORTS = f'imports = ["{DIRECTORY}/config-v3.toml.d/*.toml"]\n'
RUNC = f"""\
[{RUNTIMES}.runc]
runtime_type = "io.containerd.runc.v2"
[{RUNTIMES}.runc.options]
SystemdCgroup = true
"""
TEMPLATE = "/var/snap/microk8s/current/args/containerd-template.toml"
NVIDIA = DesiredConfig((Handler("nvidia", PROGRAM),))


def detected_runtime(path: str) -> str:
    """The file that k3s renders for a detected program."""
    return RUNC.replace("runc]", "'nvidia']").replace("runc.opt", "'nvidia'.opt") + f'BinaryName = "{path}"\n'


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def k3s(
    node: Node, rendered: str, release: str = "v2.1.5-k3s1", name: str = "k3s", config: str = ""
) -> Engine:
    """The engine of a running k3s that has rendered this."""
    node.file("/etc/systemd/system/k3s.service", "[Service]\nExecStart=/usr/local/bin/k3s server\n")
    node.process(7, "containerd", "-c", RENDERED, "-a", SOCKET, cgroup="/system.slice/k3s.service")
    node.file(BINARY, "x", 0o755)
    node.file(RENDERED, rendered)
    answer = {"code": 0, "stdout": f"containerd github.com/k3s-io/containerd {release}\n", "stderr": ""}
    node.file("/.gpunode/recording.json", json.dumps({"commands": {f"{BINARY} --version": answer}}))
    return find.engine(Host(node.root), name, config)


def only(plan: Plan) -> tuple[str, str]:
    """Path and new text of the plan's only edit."""
    (edit,) = plan.changed
    return edit.path, (edit.after or b"").decode()


def test_runtime_already_detected_by_k3s_needs_no_change(node: Node) -> None:
    node.file(PROGRAM, "x", 0o755)
    plan = k3s(node, "version = 3\n" + RUNC + detected_runtime(PROGRAM)).plan(NVIDIA, None)
    assert (plan.changed, plan.verb, plan.engine) == ((), "none", "k3s")


def test_runtime_that_k3s_will_detect_needs_a_restart(node: Node) -> None:
    node.file(PROGRAM, "x", 0o755)
    plan = k3s(node, "version = 3\n" + RUNC).plan(NVIDIA, None)
    assert (plan.changed, plan.verb) == ((), "restart")
    assert "only when it starts" in plan.reason
    assert plan.reason.endswith("pods keep running, this server's API is unavailable during the restart")


def test_runtime_not_detected_at_the_last_start_needs_a_drop_in(node: Node) -> None:
    """k3s before October 2024 looks in /usr/bin and not in all of its PATH."""
    node.file("/usr/local/bin/nvidia-container-runtime", "x", 0o755)
    engine = k3s(node, "version = 3\n" + IMPORTS + RUNC)
    assert engine.program == "/usr/local/bin/nvidia-container-runtime"
    node.file("/proc/stat", f"btime {int(time.time()) + 60}\n")
    engine = find.engine(Host(node.root), "k3s")
    assert engine.program == PROGRAM
    desired = DesiredConfig((Handler("nvidia", "/usr/local/bin/nvidia-container-runtime"),))
    assert only(engine.plan(desired, None))[0].endswith("config-v3.toml.d/99-nvidia.toml")


def test_older_operator_copy_detected_first_is_overridden_by_a_drop_in(node: Node) -> None:
    node.file(PROGRAM, "x", 0o755)
    node.file(OPERATORS, "x", 0o755)
    engine = k3s(node, "version = 3\n" + IMPORTS + RUNC + detected_runtime(OPERATORS))
    assert engine.program == OPERATORS
    path, text = only(engine.plan(NVIDIA, None))
    assert path == f"{DIRECTORY}/config-v3.toml.d/99-nvidia.toml"
    table = dig(
        parse_toml(text, path), "plugins", "io.containerd.cri.v1.runtime", "containerd", "runtimes", "nvidia"
    )
    assert table["options"] == {"BinaryName": PROGRAM, "SystemdCgroup": True}


def test_older_operator_copy_is_refused_if_only_a_template_is_possible(node: Node) -> None:
    node.file(PROGRAM, "x", 0o755)
    node.file(OPERATORS, "x", 0o755)
    engine = k3s(node, "version = 3\n" + RUNC + detected_runtime(OPERATORS))
    with pytest.raises(ConfigError) as caught:
        engine.plan(NVIDIA, None)
    assert OPERATORS in caught.value.message and f"--nvidia-runtime-path {OPERATORS}" in caught.value.hint


@pytest.mark.parametrize(
    ("release", "existing", "expected", "plugin"),
    [
        ("v2.1.5", (), "config-v3.toml.tmpl", "io.containerd.cri.v1.runtime"),
        ("v2.1.5", ("config.toml.tmpl",), "config.toml.tmpl", "io.containerd.grpc.v1.cri"),
        (
            "v2.1.5",
            ("config.toml.tmpl", "config-v3.toml.tmpl"),
            "config-v3.toml.tmpl",
            "io.containerd.cri.v1.runtime",
        ),
        ("v1.7.23", (), "config.toml.tmpl", "io.containerd.grpc.v1.cri"),
        ("v1.7.23", ("config-v3.toml.tmpl",), "config.toml.tmpl", "io.containerd.grpc.v1.cri"),
    ],
)
def test_template_is_the_one_that_this_release_uses(
    node: Node, release: str, existing: tuple[str, ...], expected: str, plugin: str
) -> None:
    for name in existing:
        node.file(f"{DIRECTORY}/{name}", '{{ template "base" . }}\n')
    path, text = only(k3s(node, "version = 2\n", release).plan(NVIDIA, None))
    assert path == f"{DIRECTORY}/{expected}" and f'"{plugin}".containerd.runtimes.nvidia]' in text


def test_drop_in_is_not_used_if_the_next_rendering_does_not_import_it(node: Node) -> None:
    node.file(f"{DIRECTORY}/config-v3.toml.tmpl", "version = 3\n" + RUNC)
    path, text = only(k3s(node, "version = 3\n" + IMPORTS + RUNC).plan(NVIDIA, None))
    assert path.endswith(".tmpl") and text.startswith("version = 3\n")


def test_default_in_the_settings_of_k3s_suffices(node: Node) -> None:
    node.file(PROGRAM, "x", 0o755)
    rendered = (
        f'version = 3\n[{CRI}.containerd]\ndefault_runtime_name = "nvidia"\n'
        + RUNC
        + detected_runtime(PROGRAM)
    )
    desired = DesiredConfig(NVIDIA.handlers, set_as_default=True)
    assert k3s(node, rendered).plan(desired, None).changed == ()


def test_k3s_that_never_ran_must_be_started_first(node: Node) -> None:
    node.file("/etc/systemd/system/k3s.service", "[Service]\nExecStart=/usr/local/bin/k3s server\n")
    engine = find.engine(Host(node.root), "k3s")
    with pytest.raises(PreconditionError, match="has not rendered") as caught:
        engine.plan(NVIDIA, None)
    assert "systemctl start k3s.service" in caught.value.hint
    node.file(PROGRAM, "x", 0o755)
    assert engine.host.exists(PROGRAM)
    assert find.engine(Host(node.root), "k3s").plan(NVIDIA, None).verb == "none"  # it will detect it


def test_removal_keeps_runtimes_registered_by_k3s_and_says_so(node: Node) -> None:
    node.file(PROGRAM, "x", 0o755)
    node.file(
        f"{DIRECTORY}/config-v3.toml.d/nvidia.toml",
        f'version = 3\n[{CRI}.containerd]\ndefault_runtime_name = "nvidia"\n',
    )
    engine = k3s(node, "version = 3\n" + IMPORTS + RUNC + detected_runtime(PROGRAM))
    plan = engine.plan_removal(UnwantedConfig(("nvidia",), "runc"), Active(("runc", "nvidia"), "nvidia"))
    (edit,) = plan.changed
    assert (edit.path, edit.after) == (f"{DIRECTORY}/config-v3.toml.d/nvidia.toml", None)
    assert plan.remaining == ("nvidia",) and PROGRAM in plan.notes[0]
    assert Active(("runc", "nvidia"), "runc").without(plan.remaining).handlers == ("runc",)


def test_copy_left_by_nvidia_tools_is_replaced_on_request(node: Node) -> None:
    node.file(PROGRAM, "x", 0o755)
    drop_in = f"{DIRECTORY}/config-v3.toml.d/99-nvidia.toml"
    copy = f"version = 3\n[{CRI}]\nenable_selinux = true\n" + RUNC + detected_runtime(OPERATORS)
    node.file(drop_in, copy + detected_runtime(OPERATORS).replace("'nvidia'", "nvidia-legacy"))
    rendered = "version = 3\n" + IMPORTS + RUNC + detected_runtime(PROGRAM)
    assert PROGRAM in only(k3s(node, rendered).plan(NVIDIA, None))[1]  # the copy overrides what k3s detects
    desired = DesiredConfig(NVIDIA.handlers, replace=True)
    path, text = only(k3s(node, rendered).plan(desired, None))
    cri = parse_toml(text, path)["plugins"]["io.containerd.cri.v1.runtime"]
    assert path == drop_in and cri.keys() == {"containerd"}
    assert cri["containerd"]["runtimes"].keys() == {"nvidia", "nvidia-legacy"}
    node.file(drop_in, text)
    assert k3s(node, rendered).plan(desired, None).changed == ()


def test_own_variant_is_not_mistaken_for_one_detected_by_k3s(node: Node) -> None:
    node.file(PROGRAM, "x", 0o755)
    node.file(f"{PROGRAM}.cdi", "x", 0o755)
    ours = detected_runtime(f"{PROGRAM}.cdi").replace("'nvidia'", "'nvidia-cdi'")
    node.file(f"{DIRECTORY}/config-v3.toml.d/99-nvidia.toml", "version = 3\n" + ours)
    engine = k3s(node, "version = 3\n" + IMPORTS + RUNC + detected_runtime(PROGRAM))
    assert engine.plan_removal(UnwantedConfig(("nvidia", "nvidia-cdi")), None).remaining == ("nvidia",)


def test_rendered_file_that_is_invalid_toml_can_still_be_undone(node: Node) -> None:
    twice = "version = 3\n" + RUNC + RUNC
    engine = k3s(node, twice)
    with pytest.raises(ConfigError, match="k3s has rendered it") as caught:
        engine.plan(NVIDIA, None)
    assert f"{DIRECTORY}/config-v3.toml.tmpl" in caught.value.hint
    assert engine.plan_removal(UnwantedConfig(("nvidia",)), None).changed == ()


def test_containerd_without_cdi_cannot_get_it_by_a_template(node: Node) -> None:
    engine = k3s(node, "version = 2\n", "v1.7.23")
    with pytest.raises(ConfigError, match="without CDI"):
        engine.plan(DesiredConfig(NVIDIA.handlers, cdi=True), None)
    assert k3s(node, "version = 3\n" + IMPORTS).plan(DesiredConfig(cdi=True), None).changed == ()


def k0s(node: Node, text: str) -> Engine:
    node.file("/etc/systemd/system/k0sworker.service", "[Service]\nExecStart=/usr/local/bin/k0s worker\n")
    node.process(
        7,
        "/var/lib/k0s/bin/containerd",
        "--root=/var/lib/k0s/containerd",
        "--config=/etc/k0s/containerd.toml",
    )
    node.file("/etc/k0s/containerd.toml", text)
    return find.engine(Host(node.root), "k0s")


def microk8s(node: Node, template: str) -> Engine:
    unit = "/etc/systemd/system/snap.microk8s.daemon-containerd.service"
    node.file(unit, "[Service]\nExecStart=/usr/bin/snap run microk8s.daemon-containerd\n")
    node.file(TEMPLATE, template)
    return find.engine(Host(node.root), "microk8s")


def test_k0s_gets_a_drop_in_of_its_files_version(node: Node) -> None:
    plan = k0s(node, "# k0s_managed=true\nversion = 2\n").plan(NVIDIA, None)
    path, text = only(plan)
    assert path == "/etc/k0s/containerd.d/99-nvidia.toml" and plan.verb == "wait"
    assert "version = 2" in text and "io.containerd.grpc.v1.cri" in text and "v1.runtime" not in text
    assert "k0s 1.36 does not start with this drop-in" in plan.notes[0]
    node.file(path, text)  # after the upgrade
    plan = k0s(node, "# k0s_managed=true\nversion = 3\n").plan(NVIDIA, None)
    assert "version = 3" in only(plan)[1] and "grpc.v1.cri" not in only(plan)[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version = 2\n", "50-other.toml is in the form of containerd 1"),
        ('[plugins."io.containerd.grpc.v1.cri"]\n', "in the form of containerd 1"),
        ("version = \n", "50-other.toml:1:"),
    ],
)
def test_drop_in_that_k0s_refuses_is_named_before_ours_is_written(
    node: Node, text: str, message: str
) -> None:
    node.file("/etc/k0s/containerd.d/50-other.toml", text)
    with pytest.raises(ConfigError, match=message):
        k0s(node, "# k0s_managed=true\nversion = 3\n").plan(NVIDIA, None)


WRONG = ("plugins = 3\n", f"[{RUNTIMES}.nvidia]\noptions = true\n", f"[{CRI}]\nenable_cdi = 'yes'\n")


@pytest.mark.parametrize("text", WRONG)
@pytest.mark.parametrize("name", ["k3s", "k0s", "microk8s"])
def test_value_of_another_type_is_named_with_its_line(node: Node, name: str, text: str) -> None:
    if name == "k3s":
        broken = k3s(node, "version = 3\n" + text)
    elif name == "k0s":
        broken = k0s(node, "# k0s_managed=true\nversion = 3\n" + text)
    else:
        broken = microk8s(node, "version = 3\n" + text)
    with pytest.raises(ConfigError, match=r"toml:\d: plugins.* is not (a table|true or false)"):
        broken.plan(NVIDIA, None)


@pytest.mark.parametrize("text", WRONG)
def test_value_of_another_type_in_a_k0s_drop_in_is_named(node: Node, text: str) -> None:
    node.file("/etc/k0s/containerd.d/50-other.toml", text)
    with pytest.raises(ConfigError, match=r"50-other\.toml:\d: plugins.* is not"):
        k0s(node, "# k0s_managed=true\nversion = 3\n").plan(NVIDIA, None)


def test_stopped_k0s_applies_a_drop_in_when_it_starts(node: Node) -> None:
    engine = k0s(node, "# k0s_managed=true\nversion = 3\n")
    assert isinstance(engine, K0sEngine)
    stopped = replace(engine, daemon=engine.daemon._replace(process=None))
    assert stopped.plan(NVIDIA, None).verb == "none"


def test_file_not_managed_by_k0s_belongs_to_the_administrator(node: Node) -> None:
    plan = k0s(node, "version = 2\n").plan(NVIDIA, None)
    assert (plan.engine, plan.verb) == ("k0s", "restart")
    assert all(edit.path.startswith("/etc/k0s/") for edit in plan.changed)
    assert any("not managed by k0s" in note for note in plan.notes)


@pytest.mark.parametrize("managed", [True, False])
def test_runtime_of_another_author_is_removed_from_k0s(node: Node, managed: bool) -> None:
    table, mark = detected_runtime(PROGRAM), "# k0s_managed=true\n"
    path = "/etc/k0s/containerd.d/other.toml" if managed else "/etc/k0s/containerd.toml"
    main = f"version = 3\n{RUNC}"
    node.file("/etc/k0s/containerd.d/other.toml", f"version = 3\n{table}")
    plan = k0s(node, mark + main if managed else main + table).plan_removal(UnwantedConfig(("nvidia",)), None)
    (edit,) = plan.changed
    assert (edit.path, edit.after, plan.engine) == (path, None if managed else main.encode(), "k0s")
    assert any("not managed by k0s" in note for note in plan.notes) is not managed


def test_runtime_of_another_author_is_removed_from_the_template_of_microk8s(node: Node) -> None:
    default = f'[{CRI}.containerd]\ndefault_runtime_name = "%s"\n'
    engine = microk8s(node, f"version = 3\n{default % 'nvidia'}{RUNC}{detected_runtime(PROGRAM)}")
    plan = engine.plan_removal(UnwantedConfig(("nvidia",), "runc"), None)
    assert only(plan) == (TEMPLATE, f"version = 3\n{default % 'runc'}{RUNC}")
    assert (plan.engine, plan.verb) == ("microk8s", "restart")


@pytest.mark.parametrize("name", ["k0s", "microk8s"])
def test_cdi_is_switched_on_in_the_containerd_of_a_distribution(node: Node, name: str) -> None:
    text = f"# k0s_managed=true\nversion = 2\n[{CRI.replace('cri.v1.runtime', 'grpc.v1.cri')}]\n"
    engine = k0s(node, text) if name == "k0s" else microk8s(node, text)
    plan = engine.plan(DesiredConfig(cdi=True), None)
    tree = parse_toml(only(plan)[1], name)
    assert dig(tree, "plugins", "io.containerd.grpc.v1.cri", "enable_cdi") is True and plan.switched_cdi


def test_auto_selects_the_containerd_that_the_kubelet_uses(node: Node) -> None:
    node.file("/etc/systemd/system/containerd.service", "[Service]\nExecStart=/usr/bin/containerd\n")
    node.process(8, "/usr/bin/containerd", cgroup="/system.slice/containerd.service")
    node.file("/usr/bin/containerd", "x", 0o755)
    k3s(node, "version = 3\n")
    with pytest.raises(
        UsageError, match="several engines are installed on this node: containerd, k3s"
    ) as raised:
        find.engine(Host(node.root), "auto")
    choices = "--runtime containerd or --runtime k3s"
    several = "configure-runtime and unconfigure-runtime accept several: --runtime containerd,k3s"
    assert raised.value.hint == f"choose one: {choices}; {several}"
    node.process(9, "/usr/local/bin/k3s server")
    assert find.engine(Host(node.root), "auto").daemon.manager == "k3s"
    assert find.engine(Host(node.root), "containerd").daemon.manager == ""


@pytest.mark.parametrize("path", [RENDERED, f"{DIRECTORY}/config-v3.toml.tmpl"])
@pytest.mark.parametrize("name", ["auto", "containerd", "k3s"])
def test_file_of_a_distribution_selects_the_distribution(node: Node, name: str, path: str) -> None:
    assert isinstance(k3s(node, "version = 3\n", name=name, config=path), K3sEngine)


def test_k3s_named_twice_is_one_engine(node: Node) -> None:
    assert isinstance(k3s(node, "version = 3\n", name="containerd"), K3sEngine)
    with pytest.raises(UsageError, match="one engine"):
        find.engines(Host(node.root), Request(runtimes=("containerd", "k3s")))


@pytest.mark.parametrize(
    ("name", "config", "drop_in"),
    [("k3s", "/etc/other/config.toml", ""), ("k3s", "", "/etc/x.toml"), ("rke2", "", "")],
)
def test_impossible_selection_is_refused_with_a_hint(
    node: Node, name: str, config: str, drop_in: str
) -> None:
    k3s(node, "version = 3\n")
    with pytest.raises(GpunodeError) as caught:
        find.engine(Host(node.root), name, config, drop_in)
    assert caught.value.hint


def test_containerd_of_docker_is_left_to_docker(node: Node) -> None:
    path = "/var/run/docker/containerd/containerd.toml"
    node.file("/usr/bin/containerd", "x", 0o755)
    node.file(path, "version = 2\n")
    engine = find.engine(Host(node.root), "containerd", path)
    with pytest.raises(PreconditionError, match="belongs to docker") as caught:
        engine.plan(NVIDIA, None)
    assert "--runtime docker" in caught.value.hint


@pytest.mark.parametrize("name", ["auto", "crio"])
def test_without_any_engine_the_installable_ones_are_listed(node: Node, name: str) -> None:
    with pytest.raises(PreconditionError, match="installed on this node") as caught:
        find.engine(Host(node.root), name)
    assert "docker, containerd, crio, podman" in caught.value.hint


@pytest.mark.parametrize(("name", "program"), [("docker", "dockerd"), ("podman", "podman")])
def test_auto_selects_the_only_engine(node: Node, name: str, program: str) -> None:
    node.file(f"/usr/bin/{program}", "x", 0o755)
    assert find.engine(Host(node.root), "auto").daemon.name == name
