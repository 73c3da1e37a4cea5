"""The engines' checks where a false alarm would be near, and the container that --deep starts."""

from dataclasses import replace

import pytest

from fixtures.machines import recorded_host
from gpunode.checks.catalogue import BY_ID
from gpunode.checks.runner import Selection, run_checks
from gpunode.facts.node import Node, Questions, Trial
from gpunode.output.result import FindingStatus
from tests.sure import sure

PASS, FAIL, SKIP = FindingStatus.PASS, FindingStatus.FAIL, FindingStatus.SKIP
DEEP = "docker-gpus-run-probe"


def judged(node, identifier):
    """The finding of one check, its blockers asked too."""
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
def test_the_container_that_deep_starts(passed, status, tmp_path):
    found, tried = deep("healthy-docker-rocky9", tmp_path, Trial(passed, "nvidia-container-cli: no device"))
    assert found.status is status and len(tried) == 1 and tried[0].startswith("GPU-")
    if status is FAIL:
        assert found.evidence[0].value == "nvidia-container-cli: no device"
        assert found.fix[0].command == "gpunode verify --on docker"


def test_no_container_is_started_where_it_could_not_be(tmp_path):
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
def test_a_kubelet_that_asks_crio_for_its_cgroup_driver(kubelet, status, tmp_path):
    node = Node(recorded_host("crio-cgroup-manager", tmp_path))
    node.__dict__["kubelet_version"] = kubelet
    assert judged(node, "crio-cgroup-manager").status is status


def test_the_kubelets_release_is_not_asked_for_where_both_agree(tmp_path):
    node = Node(recorded_host("healthy-crio", tmp_path / "a"))
    assert judged(node, "crio-cgroup-manager").status is PASS
    other = Node(recorded_host("healthy-suse-kubelet", tmp_path / "b"))
    assert judged(other, "containerd-systemdcgroup").status is PASS
    assert all("kubelet_version" not in one.__dict__ for one in (node, other))


@pytest.mark.parametrize("release", [(1, 30, 1), ()])
def test_containerd_2_tells_the_kubelet(release, tmp_path):
    node = Node(recorded_host("kubelet-asks-cgroup-driver", tmp_path))
    node.__dict__["kubelet_version"] = release
    assert judged(node, "containerd-systemdcgroup").status is (FAIL if release else PASS)


@pytest.mark.parametrize("setting", ["max_concurrent_downloads = 9", 'stream_server_port = "0"'])
def test_what_the_running_containerd_does_not_tell_is_not_called_lost(setting, tmp_path):
    host = recorded_host("containerd-imports-complete", tmp_path)
    main = next(tmp_path.rglob("containerd/config.toml"))
    main.write_text(main.read_text().replace("  sandbox_image", f"  {setting}\n  sandbox_image", 1))
    found = judged(Node(host), "containerd-imports-clobber")
    assert found.status is PASS and "no setting is lost" in found.summary


@pytest.mark.parametrize("name", [".99-nvidia.conf.swp", "README", "empty"])
def test_a_file_that_sets_nothing_does_crio_no_harm(name, tmp_path):
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
def test_openshifts_files_have_no_ending_and_are_no_copies(name, status, tmp_path):
    host = recorded_host("healthy-crio", tmp_path)
    directory = next(tmp_path.rglob("crio.conf.d"))
    (directory / name).write_text("[crio.runtime]\npids_limit = 4096\n")
    assert judged(Node(host), "crio-stray-dropin").status is status


def test_a_file_that_crio_cannot_parse_keeps_it_from_starting_again(tmp_path):
    host = recorded_host("healthy-crio", tmp_path)
    directory = next(tmp_path.rglob("crio.conf.d"))
    (directory / "README").write_text("These files are ours.\n")
    found = judged(Node(host), "crio-stray-dropin")
    assert found.status is FindingStatus.WARN
    assert found.evidence[0].source.endswith("/README") and found.evidence[0].line == 1
    assert "+1 /etc/crio/crio.conf.d/README" in found.fix[0].command


def test_every_engine_that_is_not_used_is_left_alone():
    """Engines that merely lie there are the commonest false alarm of doctors."""
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
def test_where_each_podman_looks_for_specifications(release, named, status, tmp_path):
    machine = "podman-cdi-directories" if named else "healthy-podman-fedora"
    node = Node(recorded_host(machine, tmp_path))
    podman = replace(sure(node.podman), version=tuple(map(int, release.split("."))) if release else ())
    node.__dict__["podman"] = podman
    assert judged(node, "podman-cdi").status is status


def test_the_systems_files_do_not_count_for_a_distributions_containerd(tmp_path):
    """k3s gives GPUs by CDI here; what nerdctl's containerd was once set up with is another matter."""
    host = recorded_host("containerd-config-drift", tmp_path)
    rendered = next(tmp_path.rglob("k3s/agent/etc/containerd/config.toml"))
    rendered.write_text(
        rendered.read_text().partition('[plugins."io.containerd.cri.v1.runtime".containerd')[0]
    )
    node = Node(host)
    node.__dict__["cri"] = replace(node.cri, handlers=("runc",))
    found = BY_ID["containerd-runtime-missing"].run(node)
    assert found.status is PASS and "through CDI" in found.summary
