"""`gpunode setup --kubernetes` on recorded nodes: what each step finds, plans and writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fixtures.machines import recorded_host
from gpunode.plugin.service import MARKER, UNIT_FILE
from tests.cli import Ran, gpunode

CONTAINERD = "etc/containerd/config.toml"


def node(tmp_path: Path, machine: str = "fresh-node-with-driver") -> Path:
    root = tmp_path / "node"
    recorded_host(machine, root)
    return root


def setup(root: Path, *options: str) -> Ran:
    return gpunode("--root", str(root), "setup", "--kubernetes", *options)


def states(ran: Ran) -> dict[str, str]:
    return {step["name"]: step["state"] for step in ran.document["data"]["steps"]}


def step(ran: Ran, name: str) -> dict[str, Any]:
    (found,) = [one for one in ran.document["data"]["steps"] if one["name"] == name]
    assert isinstance(found, dict)
    return found


def files(root: Path) -> dict[str, bytes]:
    """All files except the lock, which names its last holder."""
    found = (path for path in root.rglob("*") if path.is_file() and path.parts[-2:] != ("gpunode", "lock"))
    return {str(path): path.read_bytes() for path in found}


def unit(root: Path) -> Path:
    return root / UNIT_FILE.lstrip("/")


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "var/lib/gpunode/journal").glob("*"))


def test_dry_run_shows_every_step_and_changes_nothing(tmp_path: Path) -> None:
    root = node(tmp_path)
    before = files(root)
    dry = setup(root, "--dry-run", "-o", "json")
    assert dry.code == 0, dry.err
    assert states(dry) == {
        "doctor": "planned",
        "toolkit": "right",
        "runtime": "planned",
        "runtime-class": "left",
        "plugin": "planned",
        "verify-host": "planned",
    }
    assert dry.document["kind"] == "KubernetesSetup"
    assert dry.document["data"]["engine"] == "containerd"
    assert dry.document["data"]["goOn"] == "gpunode setup --kubernetes"
    table = setup(root, "--dry-run")
    assert "+++ /etc/containerd/config.toml" in table.out
    assert f"+++ {UNIT_FILE}" in table.out
    assert "would run: systemctl enable --now gpunode-device-plugin.service" in table.out
    assert "would run: gpunode verify" in table.out
    assert files(root) == before


def test_run_makes_the_changes_that_the_dry_run_showed(tmp_path: Path) -> None:
    root = node(tmp_path)
    shown = {
        change["path"]: change["diff"]
        for name in ("runtime", "plugin")
        for change in step(setup(root, "--dry-run", "-o", "json"), name)["result"]["changes"]
    }
    done = setup(root, "-o", "json")
    assert done.code == 0, done.err
    assert states(done)["runtime"] == states(done)["plugin"] == states(done)["verify-host"] == "done"
    real = {
        change["path"]: change["diff"]
        for name in ("runtime", "plugin")
        for change in step(done, name)["result"]["changes"]
    }
    assert real == shown
    text = unit(root).read_text()
    assert text.startswith(MARKER)
    assert "\nExecStart=/usr/local/bin/gpunode plugin serve\n" in text
    assert "runtimes.nvidia]" in (root / CONTAINERD).read_text()


def test_second_run_is_unchanged_and_writes_nothing(tmp_path: Path) -> None:
    root = node(tmp_path)
    assert setup(root).code == 0
    before, journal = files(root), entries(root)
    again = setup(root, "-o", "json")
    assert again.code == 0, again.err
    assert states(again)["runtime"] == "right"
    assert step(again, "runtime")["result"] is None
    assert (files(root), entries(root)) == (before, journal)


@pytest.mark.full
def test_each_step_is_undone_by_the_journal(tmp_path: Path) -> None:
    root = node(tmp_path)
    before = (root / CONTAINERD).read_bytes()
    assert setup(root).code == 0
    for _ in range(2):
        back = gpunode("--root", str(root), "rollback")
        assert back.code == 0, back.err
    assert not unit(root).exists()
    assert (root / CONTAINERD).read_bytes() == before


@pytest.mark.full
def test_foreign_unit_is_kept(tmp_path: Path) -> None:
    root = node(tmp_path)
    unit(root).parent.mkdir(parents=True, exist_ok=True)
    unit(root).write_text("[Service]\nExecStart=/opt/mine plugin serve\n")
    done = setup(root, "-o", "json")
    assert done.code == 0, done.err
    assert unit(root).read_text() == "[Service]\nExecStart=/opt/mine plugin serve\n"
    assert step(done, "plugin")["result"]["changes"][0]["action"] == "unchanged"


@pytest.mark.full
def test_own_unit_of_another_release_is_updated(tmp_path: Path) -> None:
    root = node(tmp_path)
    assert setup(root).code == 0
    wanted = unit(root).read_text()
    unit(root).write_text(wanted.replace("WatchdogSec=30", "WatchdogSec=20"))
    done = setup(root, "-o", "json")
    assert (
        step(done, "plugin")["why"]
        == "gpunode-device-plugin.service is of another release or has other options"
    )
    assert unit(root).read_text() == wanted


@pytest.mark.parametrize("machine", ["driver-lib-mismatch", "nouveau-loaded", "kubelet-not-running"])
def test_fault_that_no_step_fixes_stops_setup_before_any_write(tmp_path: Path, machine: str) -> None:
    root = node(tmp_path, machine)
    before = files(root)
    ran = setup(root, "-o", "json")
    assert ran.code == 1
    found = states(ran)
    assert found.pop("doctor") == "failed"
    assert set(found.values()) == {"waiting"}
    assert machine in ran.document["errors"][0]["message"]
    assert f"gpunode explain {machine}" in ran.document["errors"][0]["hint"]
    assert ran.document["data"]["goOn"] == "gpunode setup --kubernetes"
    assert files(root) == before
    table = setup(root)
    assert f"Stopped at doctor: {machine}" in table.out
    assert "Not done: doctor, toolkit, runtime, runtime-class, plugin, verify-host" in table.out
    assert table.out.splitlines()[-1] == "Then continue with: gpunode setup --kubernetes"


@pytest.mark.parametrize("machine", ["k3s-runtime-missing", "rke2-nvidia-not-detected", "crio-not-restarted"])
def test_engine_that_needs_a_restart_is_restarted_by_the_runtime_step(tmp_path: Path, machine: str) -> None:
    """As on a k3s node whose toolkit was installed after k3s: the runtime step restarts it."""
    ran = setup(node(tmp_path, machine), "--dry-run", "-o", "json")
    assert (states(ran)["doctor"], states(ran)["runtime"]) == ("planned", "planned"), ran.err
    assert step(ran, "runtime")["result"]["restart"]["verb"] == "restart"


def test_engine_that_cannot_start_is_not_fixed_by_a_restart(tmp_path: Path) -> None:
    ran = setup(node(tmp_path, "crio-not-running"), "--dry-run", "-o", "json")
    assert states(ran)["doctor"] == "failed"


def test_missing_toolkit_is_a_step_and_no_fault_of_the_doctor_step(tmp_path: Path) -> None:
    """Packages are only installed on the node itself, so with another root setup stops at that step."""
    root = node(tmp_path, "toolkit-missing")
    before = files(root)
    ran = setup(root, "-o", "json")
    assert ran.code == 3
    assert states(ran) == {
        "doctor": "done",
        "toolkit": "failed",
        "runtime": "waiting",
        "runtime-class": "waiting",
        "plugin": "waiting",
        "verify-host": "waiting",
    }
    assert ran.document["errors"][0]["hint"]
    assert files(root) == before


@pytest.mark.full
def test_with_cdi_no_toolkit_is_needed_and_the_plugin_uses_cdi_devices(tmp_path: Path) -> None:
    root = node(tmp_path, "toolkit-missing")
    done = setup(root, "--cdi", "-o", "json")
    assert done.code == 0, done.err
    assert "toolkit" not in states(done)
    assert step(done, "runtime-class")["state"] == "right"
    assert "enable_cdi = true" in (root / CONTAINERD).read_text()
    assert " plugin serve --device-list-strategy=cdi-" in unit(root).read_text()


def test_plugin_that_already_serves_gpus_is_kept(tmp_path: Path) -> None:
    root = node(tmp_path, "plugins-two-and-static-cpus")
    ran = setup(root, "--dry-run", "-o", "json")
    plugin = step(ran, "plugin")
    assert plugin["state"] == "right", plugin
    assert "and stays (docs/device-plugin.md" in plugin["why"]


@pytest.mark.parametrize("way", ["systemd", "daemonset"])
def test_running_plugin_without_gpus_makes_the_plugin_step_fail(tmp_path: Path, way: str) -> None:
    root = node(tmp_path, "plugin-cannot-see-nvml")
    ran = setup(root, "--plugin", way, "--dry-run", "-o", "json")
    plugin = step(ran, "plugin")
    assert plugin["state"] == "failed"
    assert "has offered no GPU to the kubelet" in plugin["why"]


def test_daemon_set_needs_an_api_server(tmp_path: Path) -> None:
    root = node(tmp_path)
    ran = setup(
        root, "--plugin", "daemonset", "--image", "registry.test/gpunode:1", "--dry-run", "-o", "json"
    )
    assert ran.code == 3
    assert step(ran, "node-label")["state"] == "left"
    assert step(ran, "plugin")["state"] == "failed"
    assert "gpunode manifests daemon-set" in ran.document["errors"][0]["hint"]
    assert ran.document["data"]["goOn"] == (
        "gpunode setup --kubernetes --plugin daemonset --image registry.test/gpunode:1"
    )


@pytest.mark.parametrize(
    ("machine", "options", "code", "says"),
    [
        ("healthy-workstation", (), 3, "there is no kubelet on this node"),
        ("kubelet-not-joined", (), 3, "has joined no cluster yet"),
        ("fresh-node-with-driver", ("--runtime", "docker"), 2, "the kubelet's engine is containerd"),
        ("fresh-node-with-driver", ("--image", "a/b:1"), 2, "--image is the DaemonSet's"),
        ("fresh-node-with-driver", ("--plugin", "helm"), 2, "helm"),
    ],
)
def test_invalid_options_are_refused_before_the_first_step(
    tmp_path: Path, machine: str, options: tuple[str, ...], code: int, says: str
) -> None:
    root = node(tmp_path, machine)
    before = files(root)
    ran = setup(root, *options)
    assert (ran.code, says in ran.err) == (code, True), ran.err
    assert files(root) == before


@pytest.mark.parametrize(("option", "value"), [("--kubeconfig", "/tmp/none"), ("--plugin", "daemonset")])
def test_cluster_options_need_the_kubernetes_option(option: str, value: str) -> None:
    ran = gpunode("setup", option, value)
    assert ran.code == 2
    assert f"{option} goes with --kubernetes" in ran.err


def test_dry_run_for_containers_shows_only_the_configuration(tmp_path: Path) -> None:
    root = node(tmp_path)
    before = files(root)
    ran = gpunode("--root", str(root), "setup", "--dry-run")
    assert ran.code == 0, ran.err
    assert "+++ /etc/containerd/config.toml" in ran.out
    assert "nothing was changed" in ran.out.splitlines()[-1]
    assert files(root) == before
