"""`plugin serve --listen` as Prometheus and the kubelet's probes use it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from gpunode.errors import PreconditionError
from gpunode.host import Host
from gpunode.plugin.compose import make_service
from gpunode.plugin.config.settings import Settings
from gpunode.plugin.observe import http
from gpunode.plugin.observe.metrics import FAMILIES
from tests.plugin.kubelet_stub import KubeletStub
from tests.plugin.nodes import MemoryLog, eventually
from tests.plugin.observe.node import (
    GPU,
    LISTEN,
    QUICK,
    Values,
    get,
    inject,
    parsed,
    port_of,
    scrape,
    scrape_when,
    value,
)
from tests.plugin.observe.test_status_report import SHARED
from tests.plugin.serving import Start, kubelet


@pytest.fixture
def node(short: Path) -> Iterator[tuple[Path, KubeletStub, Start]]:
    with kubelet(short) as (stub, start):
        yield short, stub, start


def test_advertised_allocated_and_unhealthy_devices_are_counted(node) -> None:
    _, stub, start = node
    serving = start("--simulate", "h100:4", *LISTEN, *QUICK)
    assert stub.wait_allocatable(GPU, 4, 60), serving.log()
    held = stub.admit("ml/train-0", "main", {GPU: 2})
    with pytest.raises(grpc.RpcError):
        serving.allocate(GPU, ["GPU-nobody"])
    inject(serving, "xid", "79", "--gpu", "3")
    assert stub.wait_allocatable(GPU, 3, 30), serving.log()
    port = port_of(serving)
    found = scrape_measured(port)
    assert {name for name, _ in found} >= {
        "gpunode_build_info",
        "gpunode_plugin_rpc_duration_seconds_bucket",
        "process_resident_memory_bytes",
    }
    assert value(found, "gpunode_plugin_ready") == 1
    assert value(found, "gpunode_plugin_watched", resource=GPU) == 1
    assert value(found, "gpunode_plugin_devices", resource=GPU, health="healthy", reason="") == 3
    assert value(found, "gpunode_plugin_devices", health="unhealthy", reason="xid-79") == 1
    ill = next(dict(labels)["uuid"] for (name, labels), one in found.items() if name == HEALTHY and not one)
    assert value(found, "gpunode_gpu_info", uuid=ill, gpu="3") == 1
    assert value(found, "gpunode_plugin_events_total", uuid=ill, xid="79") == 1
    since = value(found, "gpunode_gpu_problem_since_timestamp_seconds", uuid=ill, mend="reboot")
    assert since is not None
    assert since > (value(found, "gpunode_plugin_start_time_seconds") or 0)
    assert value(found, "gpunode_plugin_allocations_total", resource=GPU, outcome="ok") == 1
    assert value(found, "gpunode_plugin_allocations_total", outcome="not-found") == 1
    assert value(found, "gpunode_plugin_allocations_total", outcome="unhealthy") == 0  # for increase()
    assert value(found, "gpunode_plugin_preference_fallbacks_total", resource=GPU) == 0
    assert value(found, "gpunode_plugin_allocated_devices_total", resource=GPU) == 2
    assert value(found, "gpunode_plugin_rpc_duration_seconds_count", method="Allocate") == 2
    assert value(found, "gpunode_plugin_rpc_duration_seconds_bucket", method="Allocate", le="+Inf") == 2
    assert value(found, "gpunode_plugin_registrations_total", resource=GPU) == len(stub.registrations)
    train = {"namespace": "ml", "pod": "train-0", "container": "main"}
    assert value(found, "gpunode_container_devices", **train, resource=GPU) == 2
    for device in held.ids:
        labels = {**train, "make": "nvidia", "accelerator_id": device, "model": "NVIDIA H100 80GB HBM3"}
        assert value(found, "gpunode_container_gpu_memory_total_bytes", **labels) == 85520809984
        assert value(found, "gpunode_container_gpu_duty_cycle_ratio", **labels) == 0
    assert get(port, "/healthz") == (200, "ok\n")
    code, text = get(port, "/readyz")
    assert (code, "3 of 4 nvidia.com/gpu healthy" in text) == (200, True)
    assert "allocated" in serving.log() and held.ids[0] in serving.log()


HEALTHY = "gpunode_gpu_healthy"
USED = "gpunode_gpu_memory_used_bytes"


def scrape_measured(port: int) -> Values:
    """The metrics, once they are complete: memory is measured, the kubelet has listed its pods (on a busy
    machine it may miss the limit of one second), and the plugin is ready, which it is only after the kubelet
    has its devices."""

    def is_complete(found: Values) -> bool:
        conditions = ("gpunode_plugin_pod_resources_up", "gpunode_plugin_ready")
        return USED in {name for name, _ in found} and all(value(found, name) for name in conditions)

    return scrape_when(port, is_complete)


def test_every_metric_has_its_family_and_labels(node) -> None:
    _, stub, start = node
    serving = start("--simulate", "h100:2", *LISTEN, *QUICK)
    assert stub.wait_allocatable(GPU, 2, 60), serving.log()
    stub.admit("ml/train-0", "main", {GPU: 1})
    for (name, labels), _ in scrape(port_of(serving)).items():
        if name.startswith("process_"):
            continue
        plain = name
        for suffix in ("_bucket", "_sum", "_count"):
            plain = plain.removesuffix(suffix)
        assert set(dict(labels)) - {"le"} == set(FAMILIES[plain].labels), name


def test_shares_are_counted_and_their_utilization_is_left_out(node) -> None:
    place, stub, start = node
    config = place / "config.yaml"
    config.write_text(SHARED)
    serving = start("--simulate", "h100:1", "--config-file", str(config), *LISTEN, *QUICK)
    assert stub.wait_allocatable(f"{GPU}.shared", 4, 60), serving.log()
    stub.admit("ml/a", "main", {f"{GPU}.shared": 2})
    stub.admit("ml/b", "main", {f"{GPU}.shared": 1})
    found = scrape_measured(port_of(serving))
    assert value(found, "gpunode_container_gpu_shares", pod="a") == 2
    assert value(found, "gpunode_container_gpu_shares", pod="b") == 1
    names = {name for name, _ in found}
    assert not [name for name in names if name.startswith("gpunode_container_gpu_") and "shares" not in name]


def test_mig_device_has_memory_metrics_and_no_utilization(node) -> None:
    _, stub, start = node
    serving = start("--simulate", "a100:1,mig=3g.20gb*2", "--mig-strategy", "mixed", *LISTEN, *QUICK)
    assert stub.wait_allocatable("nvidia.com/mig-3g.20gb", 2, 60), serving.log()
    held = stub.admit("ml/a", "main", {"nvidia.com/mig-3g.20gb": 1})
    found = scrape_measured(port_of(serving))
    mine = {name for name, labels in found if ("accelerator_id", held.ids[0]) in labels}
    assert mine == {"gpunode_container_gpu_memory_total_bytes", "gpunode_container_gpu_memory_used_bytes"}


def test_without_pod_resources_the_other_metrics_remain(node) -> None:
    place, stub, start = node
    absent = ("--pod-resources-socket", str(place / "none.sock"))
    serving = start("--simulate", "h100:2", *LISTEN, *absent, *QUICK)
    assert stub.wait_allocatable(GPU, 2, 60), serving.log()
    found = scrape(port_of(serving))
    assert value(found, "gpunode_plugin_pod_resources_up") == 0
    assert value(found, "gpunode_plugin_devices", health="healthy") == 2
    scrape(port_of(serving))
    assert serving.log().count("no metrics per container") == 1


def test_missing_driver_and_kubelet_are_reported(node) -> None:
    _, stub, start = node
    serving = start("--simulate", "h100:2", *LISTEN, *QUICK)
    assert stub.wait_allocatable(GPU, 2, 60), serving.log()
    port = port_of(serving)
    inject(serving, "driver", "gone")
    assert stub.wait_allocatable(GPU, 0, 30), serving.log()
    found = scrape(port)
    assert value(found, "gpunode_plugin_driver_up") == 0
    assert get(port, "/healthz")[0] == 200
    inject(serving, "driver", "back")
    assert stub.wait_allocatable(GPU, 2, 30), serving.log()
    stub.stop()
    assert eventually(lambda: get(port, "/readyz")[0] == 503, 60)
    assert eventually(lambda: "waiting for the kubelet" in get(port, "/readyz")[1])
    assert value(scrape(port), "gpunode_plugin_watched", resource=GPU) == 0


def test_invalid_edit_of_the_config_file_is_reported(node) -> None:
    place, stub, start = node
    config = place / "config.yaml"
    config.write_text("version: v1\n")
    serving = start("--simulate", "h100:2", "--config-file", str(config), *LISTEN, *QUICK)
    assert stub.wait_allocatable(GPU, 2, 60), serving.log()
    port = port_of(serving)
    before = scrape(port)
    assert value(before, "gpunode_plugin_config_last_reload_successful") == 1
    config.write_text("version: v7\n")
    assert serving.says("was rejected"), serving.log()
    assert value(scrape(port), "gpunode_plugin_config_last_reload_successful") == 0
    config.write_text(SHARED)
    assert stub.wait_allocatable(f"{GPU}.shared", 8, 30), serving.log()
    stamp = "gpunode_plugin_config_last_reload_success_timestamp_seconds"
    assert eventually(lambda: (value(scrape(port), stamp) or 0) > (value(before, stamp) or 0))
    assert eventually(lambda: value(scrape(port), "gpunode_plugin_config_last_reload_successful") == 1)


def test_openmetrics_format_is_served_on_request(node) -> None:
    _, stub, start = node
    serving = start("--simulate", "h100:1", *LISTEN, *QUICK)
    assert stub.wait_allocatable(GPU, 1, 60), serving.log()
    accept = "application/openmetrics-text;version=1.0.0"
    code, text = get(port_of(serving), "/metrics", Accept=accept)
    assert (code, text.endswith("# EOF\n")) == (200, True)
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    names = {family.name for family in text_string_to_metric_families(text)}
    assert "gpunode_plugin_registrations" in names
    assert get(port_of(serving), "/nothing")[0] == 404


def serve(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpunode", "plugin", "serve", "--simulate", "h100:1", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_port_in_use_is_refused_at_the_start(short: Path) -> None:
    (short / "dp").mkdir()
    at = ("--kubelet-socket", f"{short}/dp/kubelet.sock", "--state-dir", f"{short}/state")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = serve("--listen", f"127.0.0.1:{port}", *at)
    assert done.returncode == 3, done.stderr
    assert f"can't listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert f"ss -ltnp sport = :{port}" in done.stderr
    done = serve("--listen", "192.0.2.1:9400", *at)
    assert (done.returncode, "ip -brief address" in done.stderr) == (3, True), done.stderr


def test_missing_library_gives_an_install_command(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "find_spec", lambda name: None)
    asked = Settings(simulate="h100:1", listen="127.0.0.1:0", state_dir=str(short))
    with pytest.raises(PreconditionError) as refused:
        make_service(Host(), asked, MemoryLog())
    assert f"{sys.executable} -m pip install 'prometheus-client" in refused.value.hint


def test_duplicate_sample_would_be_detected() -> None:
    with pytest.raises(AssertionError):
        parsed('a{b="c"} 1\na{b="c"} 2\n')
