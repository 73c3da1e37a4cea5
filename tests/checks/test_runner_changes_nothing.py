"""The doctor changes nothing: no file, no device file, no module, no request to a daemon beyond a query."""

import hashlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.machines import machine, recorded_host
from gpunode.checks.finding import FindingStatus
from gpunode.checks.runner import run_checks
from gpunode.commands import doctor, explain
from gpunode.commands.demo import build_machine
from gpunode.facts import node as node_module
from gpunode.facts.node import Node
from gpunode.host import Host
from tests.checks import untouched
from tests.cli import gpunode
from tests.silent import SilentProgress, silent_session

MACHINES = (
    *("healthy-h100", "healthy-k3s", "healthy-crio", "healthy-wsl2", "healthy-jetson-orin"),
    *("dev-nodes-missing", "module-not-loaded", "cdi-spec-stale", "docker-not-restarted"),
)
# methods that change a machine; every other method of Host reads
WRITING = {
    *("write_atomic", "make_dirs", "remove", "remove_empty_directory", "set_owner", "rename", "remove_tree"),
    *("lock", "signal", "listen_unix", "listen_tcp", "notify", "temporary_directory"),
    *("set_mode", "restrict_umask", "use_one_heap", "remove_leftovers", "make_link"),
}
# programs that only report something, and their arguments for that
QUESTIONS = (
    r".+ (--version|-V|version)",
    r"modinfo( -k \S+)? -F \w+ [\w-]+",
    r"mokutil --(list-enrolled|list-new|sb-state)",
    r"systemctl show .*",
    r"rpm -qa .*",
    r"\S*ldconfig -p",
    r"\S*dockerd --validate --config-file=\S+",
    r"\S*nvidia-container-cli info",
    r"podman image inspect .*",
    r"\S*python\S* -P -m gpunode\.gpu\.probe.*",
)


def state(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything below: kind, mode, owner, size, times of change, contents or the target of a link."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (root, *sorted(root.rglob("*"))):
        about = path.lstat()
        inside = str(path.readlink()) if path.is_symlink() else ""
        if path.is_file() and not path.is_symlink():
            inside = hashlib.sha256(path.read_bytes()).hexdigest()
        times = (about.st_mtime_ns, about.st_ctime_ns)
        found[str(path)] = (about.st_mode, about.st_uid, about.st_gid, about.st_ino, *times, inside)
    return found


@pytest.mark.parametrize("name", MACHINES)
def test_doctor_leaves_the_machine_unchanged(name, tmp_path):
    host = recorded_host(name, tmp_path / "machine")
    before = state(host.root)
    doctor.run(host, SilentProgress())
    planned = gpunode("--root", str(host.root), "doctor", "--fix", "-o", "json")
    assert planned.code in (0, 1) and planned.document["kind"] == "DoctorFixes", planned.err
    explain.explain(silent_session(host), "dev-nodes-missing")
    assert state(host.root) == before


def forbidden(*_args: object, **_named: object) -> None:
    raise AssertionError("the doctor changes the machine")


@pytest.mark.parametrize("name", ["", *MACHINES])
def test_doctor_calls_no_writing_method(name, tmp_path, monkeypatch):
    """Without a name the machine on which the tests run, which has nothing recorded."""
    host = recorded_host(name, tmp_path) if name else Host()
    for method in WRITING:
        monkeypatch.setattr(Host, method, forbidden)
    findings = run_checks(Node(host))
    assert not [one for one in findings if "changes the machine" in one.summary]


def test_every_host_method_is_listed_as_reading_or_writing() -> None:
    """A new method that writes has to be listed above."""
    reading = {
        *(
            "run",
            "start_child",
            "connect_unix",
            "socket_path",
            "socket_state",
            "listener",
            "now",
            "monotonic",
            "sleep",
        ),
        *("wait_until", "writable", "is_dead_socket"),
        *("as_user", "refuse_output", "refuse_unsafe"),
    }
    own = {
        name
        for name, _ in inspect.getmembers(Host, inspect.isfunction)
        if name in vars(Host) and not name.startswith("_")
    }
    assert own == reading | WRITING


@pytest.mark.parametrize("name", ["", *MACHINES])
def test_audit_hook_sees_only_reads(name, tmp_path):
    root = str(recorded_host(name, tmp_path).root) if name else "/"
    done = subprocess.run(
        [sys.executable, "-m", untouched.__name__, root],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    events = json.loads(done.stdout)
    programs = [" ".join(one["what"]) for one in events if one["event"] == "run"]
    assert [one for one in events if one["event"] not in ("run", "connect")] == []
    assert [one for one in programs if not any(re.fullmatch(known, one) for known in QUESTIONS)] == []
    if name:
        assert events == [], "a recorded machine is only read"


def test_audit_hook_recognizes_a_write() -> None:
    assert untouched.change_of("open", ("/etc/x", None, 0o1101)) == {"event": "write", "what": "/etc/x"}
    assert untouched.change_of("os.remove", ("/etc/x", -1)) is not None
    assert untouched.change_of("subprocess.Popen", ("a", ["nvidia-smi"], None, None)) is not None
    assert untouched.change_of("open", ("/etc/x", None, 0)) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [("dev-nodes-missing", "create /dev/nvidia"), ("module-not-loaded", "load the module")],
)
def test_nvml_is_not_queried_if_that_would_fix_the_fault(name, why, tmp_path, monkeypatch):
    """Its library creates device files and loads the module: the fault would be gone unreported."""
    monkeypatch.setattr(node_module, "probe", forbidden)
    node = Node(recorded_host(name, tmp_path))
    assert not node.nvml.asked and why in node.nvml.message
    findings = {one.id: one for one in run_checks(node)}
    assert findings[name].status is FindingStatus.FAIL


def test_container_queries_nvml_for_its_own_gpus(tmp_path):
    spec = machine("lxc-unprivileged")
    del spec["recording"]["devices"]["/dev/nvidia3"]
    node = Node(Host(build_machine(spec, tmp_path), environ={}))
    assert node.kind == "container" and node.nvml.asked
