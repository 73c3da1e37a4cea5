"""Steps after a new layout: CDI, the unit for the next boots, the node's labels."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from fixtures.api_server import ApiServer, Fault, kubeconfig
from fixtures.scenario import Fault as NvmlFault
from fixtures.scenario import mig_machine
from gpunode.cdi.locations import STANDARD
from gpunode.cdi.spec import MARKER
from gpunode.commands import mig_apply, mig_boot, mig_plan
from gpunode.commands.mig_plan import ConfigurationOptions, MigPlan
from gpunode.errors import ConfigError, PreconditionError, UsageError
from gpunode.host import Host
from gpunode.mig.model import Layouts
from gpunode.output.result import Result, Text
from tests.cli import REPOSITORY, gpunode
from tests.mig.conftest import EXAMPLES, MigMaker
from tests.silent import SilentProgress
from tests.waiting import eventually

pytestmark = pytest.mark.full

ALL_1G = ConfigurationOptions(EXAMPLES, "all-1g")
UNIT, CONFIG = "etc/systemd/system/gpunode-mig.service", "etc/gpunode/mig.yaml"


# --- CDI and device files ---------------------------------------------------------------------------------


def test_cdi_specification_is_updated_as_by_cdi_refresh(tmp_path: Path) -> None:
    host = Host(root=tmp_path)
    assert mig_apply.settle(host, SilentProgress()).cdi == "", "a node without a specification gets none"
    host.make_dirs("/var/run/cdi")
    host.write_atomic(STANDARD, f"{MARKER}\n---\n".encode())
    # this root has no driver, and then it is removed
    assert mig_apply.settle(host, SilentProgress()).cdi == f"{STANDARD} removed"


def test_outdated_specification_is_an_error(tmp_path: Path) -> None:
    class Refusing(Host):
        def write_atomic(self, path: str, data: bytes, **more: object) -> None:
            raise ConfigError(f"{path} can't be written: no space left on device")

        def remove(self, path: str) -> None:
            raise ConfigError(f"{path} can't be removed: read-only file system")

    host = Host(root=tmp_path)
    host.make_dirs("/var/run/cdi")
    host.write_atomic(STANDARD, f"{MARKER}\n---\n".encode())
    made = mig_apply.settle(Refusing(root=tmp_path), SilentProgress())
    (error,) = made.errors
    assert made.cdi == "failed" and error.code == "mig-cdi"
    assert "read-only file system" in error.message and "gpunode cdi refresh" in error.hint
    done = mig_apply.applied(MigPlan("", "a", True, (), ()), (), Layouts(), update=made)
    chosen = mig_plan.choose(ALL_1G)
    result = mig_apply.persist(host, chosen, done, False, SilentProgress())
    assert (result.status, result.exit_code, result.errors) == ("fail", 1, made.errors)


def test_missing_device_files_are_reported(tmp_path: Path) -> None:
    for path in ("gpu0/mig/gi1/access", "gpu0/mig/gi1/ci0/access"):
        place = tmp_path / "proc/driver/nvidia/capabilities" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    table = tmp_path / "proc/driver/nvidia-caps/mig-minors"
    table.parent.mkdir()
    table.write_text("config 1\ngpu0/gi1/access 30\ngpu0/gi1/ci0/access 31\ngpu0/gi2/access 39\n")
    (tmp_path / "dev/nvidia-caps").mkdir(parents=True)
    (tmp_path / "dev/nvidia-caps/nvidia-cap30").touch()
    (note,) = mig_apply.settle(Host(root=tmp_path), SilentProgress()).notes
    assert note == "/dev/nvidia-caps/nvidia-cap31 does not exist yet: nvidia-smi -L creates it"


# --- at boot ---------------------------------------------------------------------------------------------


def install(root: Path, label: str = "all-1g", boot: bool = True) -> Result:
    """Steps of --persist after the layout is applied, on another root; and steps of a run without it."""
    chosen = mig_plan.choose(ConfigurationOptions(EXAMPLES, label))
    done = mig_apply.applied(MigPlan(EXAMPLES, label, False, (), ()), (), Layouts())
    return mig_apply.persist(Host(root=root), chosen, done, boot, SilentProgress())


def test_unit_is_installed_and_rolled_back_by_the_journal(tmp_path: Path) -> None:
    data = install(tmp_path).data
    unit = (tmp_path / UNIT).read_text()
    assert 'mig apply --config-file /etc/gpunode/mig.yaml --selected-config "all-1g"\n' in unit
    assert (tmp_path / CONFIG).read_bytes() == Path(EXAMPLES).read_bytes()
    assert install(tmp_path).data.journal == "", "unchanged means no write"
    ran = gpunode("--root", str(tmp_path), "rollback", data.journal)
    assert ran.code == 0, ran.err
    assert not (tmp_path / UNIT).exists() and not (tmp_path / CONFIG).exists()


def test_systemd_accepts_the_unit_without_an_ordering_cycle(tmp_path: Path) -> None:
    """With our other units and those that order it, all of them enabled at boot."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze isn't installed")
    (tmp_path / mig_boot.UNIT).write_text(mig_boot.unit_text("/bin/true", "all $1g 100%"))
    lines = [line.partition("=") for line in (tmp_path / mig_boot.UNIT).read_text().splitlines()]
    named = {name for key, _, names in lines if key in ("After", "Before") for name in names.split()}
    assert {"kubelet.service", "docker.service", "gpunode-device-plugin.service"} <= named
    for own in (REPOSITORY / "packaging").glob("*.service"):
        shutil.copy(own, tmp_path)
    (tmp_path / "multi-user.target.wants").mkdir()
    for name in {*named, mig_boot.UNIT} - {"systemd-modules-load.service"}:
        if not (tmp_path / name).exists():
            after = "docker.service containerd.service" if name == "kubelet.service" else "network.target"
            (tmp_path / name).write_text(f"[Unit]\nAfter={after}\n[Service]\nExecStart=/bin/true\n")
        (tmp_path / "multi-user.target.wants" / name).symlink_to(tmp_path / name)
    asked = ["systemd-analyze", "verify", "multi-user.target", str(tmp_path / mig_boot.UNIT)]
    env = {**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    said = subprocess.run(asked, capture_output=True, text=True, env=env).stderr
    assert mig_boot.UNIT not in said and "cycle" not in said, said


def test_unit_command_restores_the_layout_after_a_reboot(mig_node: MigMaker, tmp_path: Path) -> None:
    """After a reboot Hopper has neither the mode nor the instances."""
    node = mig_node(mig_machine("h100", "h100"))
    assert node.apply("all-balanced").code == 0
    before = node.devices()
    install(tmp_path, "all-balanced")
    node.stub.reboot()
    assert node.devices() == {} and not node.gpu().current
    (start,) = [one for one in (tmp_path / UNIT).read_text().splitlines() if one.startswith("ExecStart=")]
    own, _, words = start.partition("=")[2].partition(" mig ")
    assert own == "/usr/local/bin/gpunode"
    ran = node.run(*(word.replace("/etc/", f"{tmp_path}/etc/") for word in shlex.split(words)))
    assert ran.code == 0, ran.err
    assert node.devices(0) == node.devices(1) == before


def test_label_is_one_quoted_word_in_the_unit() -> None:
    assert '--selected-config "a b$$c%%d\\"e"\n' in mig_boot.unit_text("/bin/x", 'a b$c%d"e')
    with pytest.raises(UsageError, match="a"):
        mig_boot.unit_text("/bin/x", "a\nExecStart=/bin/false")


def test_foreign_unit_is_kept(tmp_path: Path) -> None:
    (tmp_path / UNIT).parent.mkdir(parents=True)
    (tmp_path / UNIT).write_text("[Unit]\n")
    chosen = mig_plan.choose(ALL_1G)
    with pytest.raises(ConfigError, match="gpunode did not create it"):
        mig_boot.refuse_persist(Host(root=tmp_path), chosen)
    (error,) = install(tmp_path).errors
    assert error.code == "mig-persist" and "the layout was applied" in error.message
    assert (tmp_path / UNIT).read_text() == "[Unit]\n"


def test_dry_run_reports_that_persist_would_be_refused(tmp_path: Path) -> None:
    shown = list(mig_boot.persist_preview(Host(root=tmp_path), mig_plan.choose(ALL_1G)))
    first = shown[0]
    assert isinstance(first, Text) and first.text.startswith(
        "--persist would be refused: systemd doesn't run"
    )


def test_layout_that_the_next_boot_replaces_is_reported(tmp_path: Path) -> None:
    install(tmp_path)
    assert install(tmp_path, boot=False).messages == ()
    (note,) = install(tmp_path, "all-balanced", boot=False).messages
    assert "still applies an earlier layout at each boot" in note


def test_other_boot_unit_creating_instances_is_found(tmp_path: Path) -> None:
    install(tmp_path)
    other = tmp_path / "etc/systemd/system/zz-mig.service"
    other.write_text("[Service]\nExecStart=/usr/bin/nvidia-smi mig -cgi 9,9 -C\n")
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    with pytest.raises(PreconditionError, match=r"zz-mig\.service makes the instances at boot"):
        mig_boot.refuse_persist(Host(root=tmp_path), mig_plan.choose(ALL_1G))
    other.unlink()
    mig_boot.refuse_persist(Host(root=tmp_path), mig_plan.choose(ALL_1G))


def test_label_with_a_control_character_is_refused_first(tmp_path: Path) -> None:
    chosen = mig_plan.ConfigSelection("x", "a\tb", (), b"")
    with pytest.raises(UsageError):
        mig_boot.refuse_persist(Host(root=tmp_path), chosen)


def test_doctor_finds_the_unit_that_restores_the_layout(tmp_path: Path) -> None:
    from gpunode.facts.mig import keeper
    from gpunode.facts.node import Node

    install(tmp_path)
    assert keeper(Node(Host(root=tmp_path))).endswith(mig_boot.UNIT)


# --- the cluster's labels --------------------------------------------------------------------------------


def states(api: ApiServer) -> list[str]:
    """mig.config.state in the order in which it was set."""
    found = []
    for asked in api.changes():
        for step in asked.body:
            if step["op"] != "test" and step["path"].endswith("mig.config.state"):
                found.append(step["value"])
    return found


def test_pod_without_host_processes_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would take the GPUs for idle, whichever process uses them."""
    monkeypatch.setattr(mig_plan, "in_pod", lambda _host: True)
    for space, count in (("pid:[4026531836]", 0), ("pid:[4026532758]", 1)):
        monkeypatch.setattr(Host, "readlink", lambda _self, _path, space=space: space)
        notes = [one for one in mig_plan.remarks(Host(), ()) if "hostPID: true" in one]
        assert len(notes) == count


def words(tmp_path: Path, api: ApiServer) -> tuple[str, ...]:
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(api))
    return ("--kubeconfig", str(path), "--node", "gpu-1")


def test_state_labels_change_from_pending_to_success(
    mig_node: MigMaker, api: ApiServer, tmp_path: Path
) -> None:
    node = mig_node(mig_machine("h100"))
    ran = node.apply("all-1g", *words(tmp_path, api))
    assert ran.code == 0, ran.err
    assert states(api) == ["pending", "success"]
    labels = api.node("gpu-1")["metadata"]["labels"]
    assert labels["nvidia.com/mig.config"] == "all-1g" and labels["pool"] == "a"
    assert node.apply("all-1g", *words(tmp_path, api)).code == 0
    assert states(api) == ["pending", "success"], "nothing to do, nothing to report"


def test_failure_is_set_as_label(mig_node: MigMaker, api: ApiServer, tmp_path: Path) -> None:
    node = mig_node(mig_machine("h100").with_faults(NvmlFault("migChange", 23, after=3, times=1)))
    assert node.apply("all-1g", *words(tmp_path, api)).code == 4
    assert states(api) == ["pending", "failed"]


def test_node_label_selects_the_configuration(mig_node: MigMaker, api: ApiServer, tmp_path: Path) -> None:
    """As with mig-manager a user sets the label; -c is omitted."""
    node = mig_node(mig_machine("h100"))
    api.node("gpu-1")["metadata"]["labels"]["nvidia.com/mig.config"] = "all-balanced"
    ran = node.run("apply", "-f", EXAMPLES, *words(tmp_path, api))
    assert ran.code == 0, ran.err
    assert node.devices() == {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}
    assert states(api) == ["pending", "success"]


@pytest.mark.parametrize(
    ("label", "options", "expected"),
    [
        ("nonesuch", (), ["failed"]),  # no such configuration
        ("a30-all-2g", (), ["failed"]),  # impossible here
        ("a30-all-2g", ("-c", "a30-all-2g"), ["failed"]),
        # the labels are still correct
        ("all-1g", ("-c", "a30-all-2g"), []),
        ("all-1g", ("-c", "nonesuch"), []),
    ],
)
def test_impossible_configuration_of_the_label_has_failed(
    label: str,
    options: tuple[str, ...],
    expected: list[str],
    mig_node: MigMaker,
    api: ApiServer,
    tmp_path: Path,
) -> None:
    node = mig_node(mig_machine("h100"))
    api.node("gpu-1")["metadata"]["labels"]["nvidia.com/mig.config"] = label
    text = (
        "version: v1\nmig-configs:\n"
        "  all-1g: [{devices: all, mig-enabled: true, mig-devices: {1g.10gb: 7}}]\n"
        "  a30-all-2g: [{devices: all, mig-enabled: true, mig-devices: {2g.12gb: 2}}]\n"
    )
    ran = node.run("apply", "-f", node.config(text), *options, *words(tmp_path, api))
    assert ran.code in (2, 3), ran.err
    assert states(api) == expected
    assert api.node("gpu-1")["metadata"]["labels"]["nvidia.com/mig.config"] == label
    assert node.stub.mig_changes() == []


def test_mode_only_sets_no_success_label(mig_node: MigMaker, api: ApiServer, tmp_path: Path) -> None:
    node = mig_node(mig_machine("h100"))
    assert node.apply("all-1g", "--mode-only", *words(tmp_path, api)).code == 0
    assert states(api) == ["pending"], "the instances are still missing"
    assert node.apply("all-1g", *words(tmp_path, api)).code == 0
    assert states(api) == ["pending", "success"]
    assert node.apply("all-disabled", "--mode-only", *words(tmp_path, api)).code == 0
    assert states(api)[-1] == "success", "mode-only is complete then"


def _bytes(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""


def test_labels_are_left_to_mig_manager_beside_it(mig_node: MigMaker, api: ApiServer, tmp_path: Path) -> None:
    node = mig_node(mig_machine("h100"))
    manager = tmp_path / "nvidia-mig-manager"
    manager.symlink_to("/bin/sleep")
    with node.shared() as here, subprocess.Popen([*here.space, str(manager), "600"]) as other:
        try:
            first = str(manager).encode() + b"\0"

            def runs() -> bool:
                return any(_bytes(one).startswith(first) for one in Path("/proc").glob("[0-9]*/cmdline"))

            assert eventually(runs)
            ran = here.apply("all-1g", *words(tmp_path, api))
            assert "nvidia-mig-manager, acts on nvidia.com/mig.config itself" in ran.err
            assert states(api) == [] and node.stub.mig_changes() == []
        finally:
            other.terminate()


def test_refused_label_stops_apply_before_any_change(
    mig_node: MigMaker, api: ApiServer, tmp_path: Path
) -> None:
    node = mig_node(mig_machine("h100"))
    api.faults.append(Fault("PATCH", "nodes", "status", times=99, code=403, reason="Forbidden"))
    ran = node.apply("all-1g", *words(tmp_path, api))
    assert ran.code == 3 and node.stub.mig_changes() == []


def test_server_lost_meanwhile_does_not_roll_back(mig_node: MigMaker, api: ApiServer, tmp_path: Path) -> None:
    node = mig_node(mig_machine("h100"))
    api.faults.append(Fault("PATCH", "nodes", "status", times=99, code=403, reason="Forbidden", after=1))
    ran = node.apply("all-1g", *words(tmp_path, api))
    assert ran.code == 0 and "the node's labels don't say success" in ran.err
    assert node.devices() == {"1g.10gb": 7}


def test_label_that_kubernetes_refuses_is_a_usage_error(
    mig_node: MigMaker, api: ApiServer, tmp_path: Path
) -> None:
    node = mig_node(mig_machine("h100"))
    text = "version: v1\nmig-configs: {'a b': [{devices: all, mig-enabled: true, mig-devices: {}}]}\n"
    ran = node.apply("a b", *words(tmp_path, api), file=node.config(text))
    assert ran.code == 2 and "can't be the value of nvidia.com/mig.config" in ran.err
    assert node.stub.mig_changes() == []


def test_unit_is_enabled_and_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for the lock that the process enabling it holds."""
    from gpunode.host import transaction
    from gpunode.host.process import Completed

    ran: list[tuple[str, ...]] = []

    class Recording(Host):
        def run(self, argv: Sequence[str], **_: object) -> Completed:
            ran.append(tuple(argv))
            return Completed(tuple(argv), 0, "", "")

    monkeypatch.setattr(transaction, "_acts", lambda _host: True)
    transaction.UnitChanges(enable=("gpunode-mig.service", "a.service")).after_files(Recording())
    assert ran == [
        ("systemctl", "daemon-reload"),
        ("systemctl", "enable", "--now", "a.service"),
        ("systemctl", "enable", "gpunode-mig.service"),
    ]
