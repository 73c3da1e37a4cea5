"""Engine checks close to false alarms, and the container that --deep starts."""

import pytest

from fixtures.machines import machine, recorded_host
from gpunode.checks.catalogue import BY_ID
from gpunode.checks.finding import FindingStatus
from gpunode.checks.runner import Selection, run_checks
from gpunode.commands.demo import build_machine
from gpunode.facts.containerd import lost_settings
from gpunode.facts.node import Node, Questions, Trial
from gpunode.host import Host
from tests.required import required

PASS, FAIL, SKIP, WARN = FindingStatus.PASS, FindingStatus.FAIL, FindingStatus.SKIP, FindingStatus.WARN
SOCKET = "/run/containerd/containerd.sock"
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
        assert found.fixes[0].command == "gpunode verify --on docker"


def test_no_container_is_started_if_it_cannot_run(tmp_path):
    assert deep("healthy-docker-rocky9", tmp_path / "a")[0].skipped == "nothing-to-judge"
    trial = Trial(True, "")
    for name in ("docker-not-running", "toolkit-missing", "docker-default-runtime", "healthy-crio"):
        found, tried = deep(name, tmp_path / name, trial)
        assert found.status is SKIP and tried == [], name
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


def pasted(text, lines):
    """A file after the changes of a finding, made one after the other from the first to the last."""
    whole = text.splitlines()
    at = len(whole)
    for line in lines:
        if line.startswith("# at the end"):
            at = len(whole)
        elif line.startswith("# below line "):
            at = int(line.removeprefix("# below line ").partition(",")[0])
        else:
            whole.insert(at, line)
            at += 1
    return "\n".join(whole) + "\n"


@pytest.mark.parametrize("name", ["containerd-imports-clobber", "containerd-imports-clobber-suse"])
def test_settings_pasted_from_the_finding_are_no_longer_lost(name, tmp_path):
    host = recorded_host(name, tmp_path)
    main = next(tmp_path.rglob("containerd/config.toml"))
    more = '\n[plugins."io.containerd.grpc.v1.cri".registry.mirrors."docker.io"]\n  endpoint = ["https://m.example"]\n'
    main.write_text(main.read_text() + more)
    finding = judged(Node(host), "containerd-imports-clobber")
    change, *lines = finding.fixes[0].change.split("\n")
    assert change.startswith("In /etc/containerd/conf.d/99-nvidia.toml: add these settings in this order")
    assert "SystemdCgroup = true" in lines and "True" not in "".join(lines)
    drop_in = next(tmp_path.rglob("conf.d/99-nvidia.toml"))
    drop_in.write_text(pasted(drop_in.read_text(), lines))
    config = required(Node(host).containerd_config)
    assert lost_settings(config) == ()
    assert config.runtimes["runc"]["options"]["SystemdCgroup"] is True


def test_password_in_a_lost_setting_is_not_printed(tmp_path):
    spec = machine("containerd-imports-clobber")
    status = spec["recording"]["daemons"]["/run/containerd/containerd.sock"]["status"]
    status["config"]["registry"]["headers"] = {"X-Token": ["other"]}
    spec["files"]["/etc/containerd/config.toml"] += (
        '[plugins."io.containerd.grpc.v1.cri".registry.headers]\n  X-Token = ["hunter2"]\n'
    )
    host = Host(build_machine(spec, tmp_path), environ={})
    finding = judged(Node(host), "containerd-imports-clobber")
    lines = finding.fixes[0].change.split("\n")
    assert lines[lines.index('[plugins."io.containerd.grpc.v1.cri".registry.headers]') + 1] == (
        "# X-Token: copy it from /etc/containerd/config.toml"
    )
    assert "hunter2" not in repr(finding)


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
    assert "+1 /etc/crio/crio.conf.d/README" in found.fixes[0].command


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
    podman = required(node.podman)._replace(version=tuple(map(int, release.split("."))) if release else ())
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
    node.__dict__["cri"] = node.cri._replace(handlers=("runc",))
    found = BY_ID["containerd-runtime-missing"].run(node)
    assert found.status is PASS and "through CDI" in found.summary


def with_release(spec, release):
    spec["recording"]["daemons"][SOCKET]["version"] = ["containerd", release]
    spec["recording"]["commands"]["/usr/bin/containerd --version"] = {"stdout": f"containerd v{release}"}
    return spec


@pytest.mark.parametrize(
    ("code", "release", "status"),
    [("cri-disabled", "1.7.2", FAIL), ("cri-disabled", "1.5.9", SKIP), ("timeout", "1.7.2", FAIL)],
)
def test_containerd_that_does_not_serve_its_cri_is_reported(code, release, status, tmp_path):
    spec = with_release(machine("healthy-h100"), release)
    spec["recording"]["daemons"][SOCKET] = {"problem": {"code": code, "message": "no CRI"}}
    found = judged(Node(Host(build_machine(spec, tmp_path), environ={})), "containerd-not-restarted")
    assert (found.status, "no CRI" in str((found.summary, found.evidence))) == (status, True)


@pytest.mark.parametrize(
    ("setting", "status"), [("", WARN), ("disable = false", PASS), ("disable = true", WARN)]
)
def test_nri_of_containerd_1_is_off_unless_its_file_enables_it(setting, status, tmp_path):
    spec = with_release(machine("containerd-nri"), "1.7.30")
    if setting:
        main = "/etc/containerd/config.toml"
        spec["files"][main] += f'\n[plugins."io.containerd.nri.v1.nri"]\n{setting}\n'
    found = judged(Node(Host(build_machine(spec, tmp_path), environ={})), "containerd-nri")
    assert found.status is status
    if not setting:
        assert found.fixes[0].change.endswith('[plugins."io.containerd.nri.v1.nri"]\ndisable = false')


def test_crio_without_the_handler_and_with_a_broken_file_names_the_file(tmp_path):
    spec = machine("crio-runtime-missing")
    spec["files"]["/etc/crio/crio.conf.d/50-x.conf"] = "[crio\n"
    found = judged(Node(Host(build_machine(spec, tmp_path), environ={})), "crio-runtime-missing")
    assert (found.status, found.evidence[0].line) == (FAIL, 1)
    assert found.fixes[0].command.startswith("${EDITOR:-vi} +1 /etc/crio/crio.conf.d/50-x.conf")
