"""CDI files and units written with an engine's configuration: readable by the oldest engine."""

import pytest
import yaml

from fixtures.machines import machine, recorded_host
from gpunode.cdi import refresh
from gpunode.cdi.engines import engine_files, kept_elsewhere
from gpunode.cdi.locations import STANDARD
from gpunode.cdi.spec import MARKER, made_by_gpunode
from gpunode.commands.demo import build_machine
from gpunode.errors import PreconditionError
from gpunode.facts.daemons import Daemon
from gpunode.host import Host


def daemon(name, *release):
    return Daemon(name, None, release, "", "", "", None)


NEW = (daemon("docker", 28, 5, 2), daemon("podman", 5, 5, 0))


@pytest.fixture
def host(tmp_path):
    return recorded_host("healthy-h100", tmp_path)


def nvidia_refreshes(host, text):
    """NVIDIA's service is enabled and has written this."""
    units = host.root / "etc/systemd/system"
    (units / "multi-user.target.wants").mkdir(parents=True)
    (units / "nvidia-cdi-refresh.service").write_text(
        "[Service]\nExecStart=/usr/bin/nvidia-ctk cdi generate\n"
    )
    link = units / "multi-user.target.wants/nvidia-cdi-refresh.service"
    link.symlink_to("/etc/systemd/system/nvidia-cdi-refresh.service")
    path = host.path(STANDARD)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_specification_is_installed_with_units_if_systemd_runs(host):
    made = engine_files(host, NEW, units=True)
    assert [path for path, _ in made.files] == [
        STANDARD, refresh.SERVICE_FILE, refresh.PATH_FILE, refresh.RULES_FILE,
    ]  # fmt: skip
    assert (made.generated, made.units, made.notes) == (frozenset({STANDARD}), refresh.UNITS, ())
    assert made_by_gpunode(dict(made.files)[STANDARD])


def test_units_are_left_out_if_not_requested_and_noted_if_systemd_is_not_running(host):
    made = engine_files(host, NEW, units=False)
    assert ([path for path, _ in made.files], made.units, made.notes) == ([STANDARD], (), ())
    (host.root / "run/systemd/system").rmdir()
    made = engine_files(host, NEW, units=True)
    assert made.units == ()
    assert made.notes == (
        f"systemd doesn't run here: after a reboot, write {STANDARD} again: gpunode cdi refresh",
    )


def test_oldest_engine_decides_the_specification_version(host):
    tree = yaml.safe_load(
        dict(engine_files(host, (*NEW, daemon("crio", 1, 24, 1)), units=False).files)[STANDARD]
    )
    assert tree["cdiVersion"] == "0.3.0"
    assert all(device["name"][0].isalpha() for device in tree["devices"])
    tree = yaml.safe_load(dict(engine_files(host, NEW, units=False).files)[STANDARD])
    assert (tree["cdiVersion"], tree["devices"][0]["name"]) == ("0.5.0", "0")


def test_nvidia_refresh_service_is_kept_if_all_engines_read_its_file(host):
    text = dict(engine_files(host, NEW, units=False).files)[STANDARD].decode().partition("---\n")[2]
    nvidia_refreshes(host, text)
    made = engine_files(host, NEW, units=True)
    assert (made.files, made.units) == ((), ())
    assert made.notes == (f"nvidia-cdi-refresh.service keeps {STANDARD}, which has all devices",)


@pytest.mark.parametrize("change", [('"0.5.0"', '"0.7.0"'), ('"GPU-', '"CPU-'), ("kind:", "kind")])
def test_nvidia_refresh_file_is_replaced_if_an_engine_cannot_read_it(change, host):
    text = dict(engine_files(host, NEW, units=False).files)[STANDARD].decode().partition("---\n")[2]
    nvidia_refreshes(host, text.replace(*change))
    made = engine_files(host, (daemon("podman", 4, 3, 1),), units=True)
    assert [path for path, _ in made.files] == [STANDARD]
    (note,) = made.notes
    assert "systemctl disable --now nvidia-cdi-refresh.path nvidia-cdi-refresh.service" in note


def test_node_without_a_driver_is_refused_with_a_hint(tmp_path):
    spec = machine("module-not-loaded")
    spec["recording"]["nvml"] = {"error": {"code": 9, "message": "Driver Not Loaded"}}
    with pytest.raises(PreconditionError) as caught:
        engine_files(Host(build_machine(spec, tmp_path), environ={}), NEW, units=True)
    assert (caught.value.code, "modprobe nvidia" in caught.value.hint) == ("no-driver", True)


def test_specification_for_podman_alone_is_known_without_starting_podman(tmp_path, monkeypatch):
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/podman").write_text("x")
    (tmp_path / "usr/bin/podman").chmod(0o755)
    (tmp_path / "etc/containers").mkdir(parents=True)
    (tmp_path / "etc/containers/containers.conf").write_text('[engine]\ncdi_spec_dirs = ["/opt/cdi"]\n')
    (tmp_path / "opt/cdi").mkdir(parents=True)
    monkeypatch.setattr(Host, "run", lambda _host, argv, **_: pytest.fail(f"{argv} is started"))
    host = Host(tmp_path, environ={})
    assert kept_elsewhere(host) == ()
    (tmp_path / "opt/cdi/nvidia.yaml").write_text(f"{MARKER}\n")
    assert kept_elsewhere(host) == ("/opt/cdi/nvidia.yaml",)
