"""k3s, rke2, k0s and microk8s through the command line: stubs of them, a real containerd in each."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest

from fixtures.distributions import RUNTIME, DistributionNode
from gpunode.facts.toml import parse_toml
from tests.integration.conftest import path_of, require
from tests.integration.systemd_stand_in import require_namespace

pytestmark = [pytest.mark.full, pytest.mark.containerd]
K3S = "/var/lib/rancher/k3s/agent/etc/containerd"
V3_TEMPLATE = f"{K3S}/config-v3.toml.tmpl"
AWAY = "/var/lib/away/nvidia-container-runtime"  # a path that no distribution searches
MICROK8S_TEMPLATE = "/var/snap/microk8s/current/args/containerd-template.toml"
# microk8s' own keys that matter here
MICROK8S = """\
version = 2
oom_score = 0

# the CRI
[plugins."io.containerd.grpc.v1.cri"]
  stream_server_port = "0"

  [plugins."io.containerd.grpc.v1.cri".containerd]
    # chosen by microk8s
    snapshotter = "${SNAPSHOTTER}"
    default_runtime_name = "${RUNTIME}"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "${RUNTIME_TYPE}"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia-container-runtime]
      runtime_type = "${RUNTIME_TYPE}"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia-container-runtime.options]
        BinaryName = "nvidia-container-runtime"
"""
# a complete template of an administrator; only its distribution can determine the result
INLINE = """\
version = 3
{{ if .IsRunningInUserNS }}# rootless{{ end }}
[plugins.'io.containerd.cri.v1.runtime'.containerd]
  runtimes = { runc = { runtime_type = "io.containerd.runc.v2" } }
"""
Make = Callable[..., DistributionNode]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes nodes: family, the suite that has containerd, the version of the rendered file."""
    require("unshare", "nsenter", "runc")
    require_namespace()
    made: list[DistributionNode] = []

    def one(family: str, suite: str, version: int, *, imports: bool = True) -> DistributionNode:
        binary = shutil.which("containerd", path=path_of(suite))
        assert binary is not None
        made.append(DistributionNode(family, binary, version, imports).made())
        return made[-1]

    yield one
    for node in made:
        node.end()


def configure(node: DistributionNode, *options: str, code: int = 0, verb: str = "configure") -> str:
    """Run it for the node's distribution; the output of both streams."""
    done = node.gpunode(f"{verb}-runtime", "--runtime", node.family, *options)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("family", ["k3s", "rke2"])
def test_runtime_detected_by_the_distribution_needs_only_a_restart(make: Make, family: str) -> None:
    node = make(family, "forky", 3)
    directory = f"/var/lib/rancher/{family}/agent/etc/containerd"
    node.start()
    node.program(RUNTIME)
    output = configure(node, "--dry-run")
    assert f"would run: systemctl restart {node.unit}" in output and "created" not in output
    assert "has the runtimes nvidia, runc; default: runc" in configure(node)
    assert sorted(file.name for file in node.path(directory).iterdir()) == ["config.toml"]
    restarts = len(node.calls())
    assert "config.toml unchanged" in configure(node, "--config", f"{directory}/config.toml")
    assert len(node.calls()) == restarts

    assert "99-nvidia.toml created" in configure(node, "--set-as-default")
    drop_in = f"{directory}/config-v3.toml.d/99-nvidia.toml"
    assert parse_toml(node.path(drop_in).read_text(), drop_in)["version"] == 3
    assert "unchanged" in configure(node, "--set-as-default")
    output = configure(node, verb="unconfigure")
    assert "99-nvidia.toml removed" in output and "default: runc" in output
    assert f"{family} registers nvidia by itself as long as {RUNTIME} is there" in output


def test_without_imports_our_tables_are_added_to_the_template_once(make: Make) -> None:
    node = make("k3s", "trixie", 2, imports=False)
    node.start()
    node.program(AWAY)
    template = f"{K3S}/config.toml.tmpl"
    assert "config.toml.tmpl created" in configure(node, "--nvidia-runtime-path", AWAY)
    assert "unchanged" in configure(node, "--nvidia-runtime-path", AWAY)
    output = configure(node, "--nvidia-runtime-path", AWAY, "--nvidia-runtime-name", "gpu")
    assert "has the runtimes gpu, nvidia, runc" in output
    assert node.path(template).read_text().count("gpunode: end") == 1
    output = configure(node, "--nvidia-runtime-path", AWAY, "--set-as-default", code=1)
    assert "default-runtime: nvidia" in output and "/etc/rancher/k3s/config.yaml" in output
    assert "default: runc" in configure(node, verb="unconfigure")
    configure(node, "--nvidia-runtime-name", "gpu", verb="unconfigure")
    assert not node.path(template).exists()


def test_own_template_stays_valid_if_the_toolkit_is_installed_later(make: Make) -> None:
    node = make("k3s", "forky", 3, imports=False)
    node.start()
    node.program(AWAY)
    configure(node, "--nvidia-runtime-path", AWAY)
    node.program(RUNTIME)
    node.start()  # with the same table twice containerd would not start
    output = configure(node, "--nvidia-runtime-path", AWAY, code=1)
    assert f"k3s finds {RUNTIME} first" in output
    assert "has the runtimes nvidia, runc" in configure(node)


def test_template_defining_a_detected_runtime_is_refused_with_its_line(make: Make) -> None:
    node = make("k3s", "forky", 3, imports=False)
    node.start()
    node.program(RUNTIME)
    header = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia]"
    text = f'{{{{ template "base" . }}}}\n{header}\n  runtime_type = "io.containerd.runc.v2"\n'
    node.write(V3_TEMPLATE, text)
    restarts = len(node.calls())
    output = configure(node, code=1)
    assert f"{V3_TEMPLATE}:2: nvidia is defined there" in output and f"+2 {V3_TEMPLATE}" in output
    assert node.path(V3_TEMPLATE).read_text() == text and len(node.calls()) == restarts


def test_rendered_file_that_containerd_refuses_is_rolled_back(make: Make) -> None:
    node = make("k3s", "forky", 3)
    node.write(V3_TEMPLATE, INLINE)
    node.program(AWAY)
    node.start()
    output = configure(node, "--nvidia-runtime-path", AWAY, code=4)
    assert "failed to unmarshal TOML" in output  # containerd's own last log line
    assert node.path(V3_TEMPLATE).read_text() == INLINE
    assert "nvidia" not in node.path(f"{K3S}/config.toml").read_text()
    assert "k3s has the runtimes runc" in configure(node, verb="unconfigure")  # it is running again


@pytest.mark.parametrize(("suite", "version"), [("trixie", 2), ("forky", 3)], ids=["1.35", "1.36"])
def test_drop_in_is_applied_by_k0s(make: Make, suite: str, version: int) -> None:
    node = make("k0s", suite, version)
    node.start()
    node.program(AWAY)
    restarts = node.calls()
    output = configure(node, "--nvidia-runtime-path", AWAY, "--set-as-default")
    assert "k0s has the runtimes nvidia, runc; default: nvidia" in output
    drop_in = "/etc/k0s/containerd.d/99-nvidia.toml"
    assert parse_toml(node.path(drop_in).read_text(), drop_in)["version"] == version
    assert "unchanged" in configure(node, "--nvidia-runtime-path", AWAY, "--set-as-default")
    assert "runtimes runc; default: runc" in configure(node, verb="unconfigure")
    assert node.calls() == restarts and not node.path(drop_in).exists()


def test_microk8s_renders_our_runtime_from_its_template(make: Make) -> None:
    node = make("microk8s", "forky", 2)
    node.write(MICROK8S_TEMPLATE, MICROK8S)
    node.path("/var/snap/microk8s/common/run").mkdir(parents=True)
    node.start()
    node.program(AWAY)
    output = configure(node, "--nvidia-runtime-path", AWAY, "--set-as-default")
    assert "runtimes nvidia, nvidia-container-runtime, runc; default: nvidia" in output
    edited = node.path(MICROK8S_TEMPLATE).read_text()
    assert set(MICROK8S.splitlines()) - set(edited.splitlines()) == {
        '    default_runtime_name = "${RUNTIME}"'
    }
    assert "unchanged" in configure(node, "--nvidia-runtime-path", AWAY, "--set-as-default")
    assert "default: runc" in configure(node, verb="unconfigure")
    assert node.path(MICROK8S_TEMPLATE).read_text() == MICROK8S
