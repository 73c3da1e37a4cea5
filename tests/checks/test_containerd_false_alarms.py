"""Engine checks close to false alarms, and the container that --deep starts."""

from dataclasses import replace

import pytest

from fixtures.machines import recorded_host
from gpunode.checks.catalogue import BY_ID
from gpunode.checks.runner import Selection, run_checks
from gpunode.facts.node import Node, Questions, Trial
from gpunode.output.result import FindingStatus
from tests.required import required

PASS, FAIL, SKIP = FindingStatus.PASS, FindingStatus.FAIL, FindingStatus.SKIP
DEEP = "docker-gpus-run-probe"


def judged(node, identifier):
    """The finding of one check, with its blockers."""
    return next(one for one in run_checks(node, Selection(only=(identifier,))) if one.id == identifier)


def deep(machine, tmp_path, trial=None):
    seen = []

    def start(host, uuid):
        seen.append(uuid)
        return trial

    trials = {"docker": start} if trial else {}
    node = Node(recorded_host(machine, tmp_path), Questions(deep=True), trials)
    return judged(node, DEEP), seen


@pytest.mark.parametrize(
    ("passed", "status"), [(True, PASS), (False, FAIL), (None, SKIP)], ids=["computes", "fails", "can't try"]
)
def test_deep_check_starts_the_expected_container(passed, status, tmp_path):
    found, tried = deep("healthy-docker-rocky9", tmp_path, Trial(passed, "nvidia-container-cli: no device"))
    assert found.status is status and len(tried) == 1 and tried[0].startswith("GPU-")
    if status is FAIL:
        assert found.evidence[0].value == "nvidia-container-cli: no device"
        assert found.fix[0].command == "gpunode verify --on docker"


def test_no_container_is_started_if_it_cannot_run(tmp_path):
    assert deep("healthy-docker-rocky9", tmp_path / "a")[0].skipped == "nothing-to-judge"
    trial = Trial(True, "")
    for machine in ("docker-not-running", "toolkit-missing", "docker-default-runtime", "healthy-crio"):
        found, tried = deep(machine, tmp_path / machine, trial)
        assert found.status is SKIP and tried == [], machine
    host = recorded_host("healthy-docker-rocky9", tmp_path / "b")
    node = Node(host, Questions(), {"docker": lambda *_: trial})
    assert judged(node, DEEP).skipped == "left-out"


@pytest.mark.parametrize(
    ("kubelet", "status"),
    [((1, 30, 9), FAIL), ((1, 31, 0), SKIP), ((), SKIP)],
    ids=["keeps its own", "asks CRI-O", "doesn't say"],
)
def test_cgroup_driver_mismatch_is_ignored_if_the_kubelet_queries_crio(kubelet, status, tmp_path):
    node = Node(recorded_host("crio-cgroup-manager", tmp_path))
    node.__dict__["kubelet_version"] = kubelet
    assert judged(node, "crio-cgroup-manager").status is status


def test_kubelet_release_is_not_read_if_both_cgroup_drivers_agree(tmp_path):
    node = Node(recorded_host("healthy-crio", tmp_path / "a"))
    assert judged(node, "crio-cgroup-manager").status is PASS
    other = Node(recorded_host("healthy-suse-kubelet", tmp_path / "b"))
    assert judged(other, "containerd-systemdcgroup").status is PASS
    assert all("kubelet_version" not in one.__dict__ for one in (node, other))


@pytest.mark.parametrize("release", [(1, 30, 1), ()])
def test_containerd_2_reports_its_cgroup_driver_to_the_kubelet(release, tmp_path):
    node = Node(recorded_host("kubelet-asks-cgroup-driver", tmp_path))
    node.__dict__["kubelet_version"] = release
    assert judged(node, "containerd-systemdcgroup").status is (FAIL if release else PASS)


@pytest.mark.parametrize("setting", ["max_concurrent_downloads = 9", 'stream_server_port = "0"'])
def test_setting_missing_from_the_containerd_dump_is_not_called_lost(setting, tmp_path):
    host = recorded_host("containerd-imports-complete", tmp_path)
    main = next(tmp_path.rglob("containerd/config.toml"))
    main.write_text(main.read_text().replace("  sandbox_image", f"  {setting}\n  sandbox_image", 1))
    found = judged(Node(host), "containerd-imports-clobber")
    assert found.status is PASS and "no setting is lost" in found.summary


@pytest.mark.parametrize("name", [".99-nvidia.conf.swp", "README", "empty"])
def test_stray_crio_file_without_settings_passes(name, tmp_path):
    host = recorded_host("healthy-crio", tmp_path)
    directory = next(tmp_path.rglob("crio.conf.d"))
    (directory / name).write_text("# nothing\n")
    assert judged(Node(host), "crio-stray-dropin").status is PASS


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("00-default", PASS),
        ("01-ctrcfg-pidsLimit", PASS),
        ("50-ours.toml", PASS),
        ("99-nvidia.conf~", FindingStatus.WARN),
        ("99-nvidia.toml.20260101", FindingStatus.WARN),
        ("10-crio.conf.dpkg-dist", FindingStatus.WARN),
        (".99-nvidia.conf.swp", FindingStatus.WARN),
    ],
)
def test_openshift_drop_ins_without_extension_are_not_stray_copies(name, status, tmp_path):
    host = recorded_host("healthy-crio", tmp_path)
    directory = next(tmp_path.rglob("crio.conf.d"))
    (directory / name).write_text("[crio.runtime]\npids_limit = 4096\n")
    assert judged(Node(host), "crio-stray-dropin").status is status


def test_file_that_crio_cannot_parse_prevents_its_next_start(tmp_path):
    host = recorded_host("healthy-crio", tmp_path)
    directory = next(tmp_path.rglob("crio.conf.d"))
    (directory / "README").write_text("These files are ours.\n")
    found = judged(Node(host), "crio-stray-dropin")
    assert found.status is FindingStatus.WARN
    assert found.evidence[0].source.endswith("/README") and found.evidence[0].line == 1
    assert "+1 /etc/crio/crio.conf.d/README" in found.fix[0].command


def test_unused_engines_are_not_reported():
    """Installed but unused engines are the most common false alarm of doctors."""
    for check in BY_ID.values():
        if check.layer in ("docker", "containerd", "crio", "podman"):
            assert "pci-no-gpu" in check.blocked_by


@pytest.mark.parametrize(
    ("release", "named", "status"),
    [
        ("4.9.4", True, PASS),
        ("5.4.1", True, PASS),
        ("5.5.0", True, FAIL),
        ("5.5.2", False, FAIL),
        ("5.6.0", False, PASS),
        ("", True, PASS),
    ],
    ids=["old", "doesn't know the setting", "knows it", "looks in /etc/cdi alone", "in both", "unknown"],
)
def test_specification_directories_depend_on_the_podman_version(release, named, status, tmp_path):
    machine = "podman-cdi-directories" if named else "healthy-podman-fedora"
    node = Node(recorded_host(machine, tmp_path))
    podman = replace(required(node.podman), version=tuple(map(int, release.split("."))) if release else ())
    node.__dict__["podman"] = podman
    assert judged(node, "podman-cdi").status is status


def test_system_containerd_files_are_ignored_for_a_kubernetes_distribution(tmp_path):
    """k3s provides GPUs by CDI here; the earlier setup of nerdctl's containerd is irrelevant."""
    host = recorded_host("containerd-config-drift", tmp_path)
    rendered = next(tmp_path.rglob("k3s/agent/etc/containerd/config.toml"))
    rendered.write_text(
        rendered.read_text().partition('[plugins."io.containerd.cri.v1.runtime".containerd')[0]
    )
    node = Node(host)
    node.__dict__["cri"] = replace(node.cri, handlers=("runc",))
    found = BY_ID["containerd-runtime-missing"].run(node)
    assert found.status is PASS and "through CDI" in found.summary
