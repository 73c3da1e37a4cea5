"""What follows a new layout: CDI, the unit for the next boots, the node's labels."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fixtures.api_server import ApiServer, Fault, Listening, kubeconfig, make_certificates
from fixtures.scenario import Fault as NvmlFault
from fixtures.scenario import mig_machine
from gpunode.cdi.document import MARKER
from gpunode.cdi.places import STANDARD
from gpunode.commands import mig_after, mig_wanted
from gpunode.commands.mig_show import MigPlan
from gpunode.errors import ConfigError, UsageError
from gpunode.host import Host
from gpunode.mig import persist
from gpunode.mig.layout import Layouts
from gpunode.render import SilentProgress
from gpunode.result import Result
from tests.cli import gpunode
from tests.mig.conftest import EXAMPLES, MigMaker

UNIT, CONFIG = "etc/systemd/system/gpunode-mig.service", "etc/gpunode/mig.yaml"


# --- what is there beside it ------------------------------------------------------------------------------


def test_the_cdi_specification_goes_the_way_of_cdi_refresh(tmp_path: Path) -> None:
    host = Host(root=tmp_path)
    assert mig_after.settle(host, SilentProgress()).cdi == "", "a node without one gets none"
    host.make_dirs("/var/run/cdi")
    host.write_atomic(STANDARD, f"{MARKER}\n---\n".encode())
    # this root has no driver, and then it is taken away
    assert mig_after.settle(host, SilentProgress()).cdi == f"{STANDARD} removed"


def test_device_files_that_are_missing_are_told(tmp_path: Path) -> None:
    for path in ("gpu0/mig/gi1/access", "gpu0/mig/gi1/ci0/access"):
        place = tmp_path / "proc/driver/nvidia/capabilities" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    table = tmp_path / "proc/driver/nvidia-caps/mig-minors"
    table.parent.mkdir()
    table.write_text("config 1\ngpu0/gi1/access 30\ngpu0/gi1/ci0/access 31\ngpu0/gi2/access 39\n")
    (tmp_path / "dev/nvidia-caps").mkdir(parents=True)
    (tmp_path / "dev/nvidia-caps/nvidia-cap30").touch()
    (note,) = mig_after.settle(Host(root=tmp_path), SilentProgress()).notes
    assert note == "/dev/nvidia-caps/nvidia-cap31 is not there yet: nvidia-smi -L makes it"


# --- at boot ---------------------------------------------------------------------------------------------


def install(root: Path, label: str = "all-1g") -> Result:
    """What --persist does once the layout is there, on another root."""
    chosen = mig_wanted.choose(EXAMPLES, label)
    done = mig_after.Done(MigPlan(EXAMPLES, label, False, (), ()), (), Layouts(), changed=False)
    return mig_after.finish(Host(root=root), chosen, done, True, SilentProgress())


def test_the_unit_comes_and_goes_by_the_journal(tmp_path: Path) -> None:
    data = install(tmp_path).data
    unit = (tmp_path / UNIT).read_text()
    assert 'mig apply --config-file /etc/gpunode/mig.yaml --selected-config "all-1g"\n' in unit
    assert (tmp_path / CONFIG).read_bytes() == Path(EXAMPLES).read_bytes()
    assert install(tmp_path).data.journal == "", "unchanged means no write"
    ran = gpunode("--root", str(tmp_path), "rollback", data.journal)
    assert ran.code == 0, ran.err
    assert not (tmp_path / UNIT).exists() and not (tmp_path / CONFIG).exists()


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze isn't installed")
    path = tmp_path / persist.UNIT
    path.write_text(persist.unit("/bin/true", "all $1g 100%"))
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True)
    assert persist.UNIT not in done.stderr, done.stderr


def test_a_label_stays_one_word() -> None:
    assert '--selected-config "a b$$c%%d\\"e"\n' in persist.unit("/bin/x", 'a b$c%d"e')
    with pytest.raises(ValueError, match="a"):
        persist.unit("/bin/x", "a\nExecStart=/bin/false")


def test_a_strangers_unit_stays(tmp_path: Path) -> None:
    (tmp_path / UNIT).parent.mkdir(parents=True)
    (tmp_path / UNIT).write_text("[Unit]\n")
    with pytest.raises(ConfigError, match="gpunode didn't make it"):
        install(tmp_path)
    assert (tmp_path / UNIT).read_text() == "[Unit]\n"


def test_a_label_with_a_control_character_is_refused_before_anything(tmp_path: Path) -> None:
    chosen = mig_wanted.Chosen("x", "a\tb", (), b"")
    with pytest.raises(UsageError):
        mig_after.refuse_persist(Host(root=tmp_path), chosen)


def test_the_doctor_knows_who_makes_the_instances_again(tmp_path: Path) -> None:
    from gpunode.facts.mig_layout import keeper
    from gpunode.facts.node import Node

    install(tmp_path)
    assert keeper(Node(Host(root=tmp_path))).endswith(persist.UNIT)


# --- the cluster's labels --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def api(certificates: Path) -> Iterator[ApiServer]:
    server = ApiServer()
    server.add_node("gpu-1", labels={"pool": "a"})
    with Listening(server, certificates):
        yield server


def states(api: ApiServer) -> list[str]:
    """mig.config.state in the order in which it was set."""
    found = []
    for asked in api.changes():
        for step in asked.body:
            if step["op"] != "test" and step["path"].endswith("mig.config.state"):
                found.append(step["value"])
    return found


def words(tmp_path: Path, api: ApiServer) -> tuple[str, ...]:
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(api))
    return ("--kubeconfig", str(path), "--node", "gpu-1")


def test_the_labels_go_from_pending_to_success(mig_node: MigMaker, api: ApiServer, tmp_path: Path) -> None:
    node = mig_node(mig_machine("h100"))
    ran = node.apply("all-1g", *words(tmp_path, api))
    assert ran.code == 0, ran.err
    assert states(api) == ["pending", "success"]
    labels = api.node("gpu-1")["metadata"]["labels"]
    assert labels["nvidia.com/mig.config"] == "all-1g" and labels["pool"] == "a"
    assert node.apply("all-1g", *words(tmp_path, api)).code == 0
    assert states(api) == ["pending", "success"], "nothing to do, nothing to tell"


def test_a_failure_is_told(mig_node: MigMaker, api: ApiServer, tmp_path: Path) -> None:
    node = mig_node(mig_machine("h100").with_faults(NvmlFault("migChange", 23, after=3, times=1)))
    assert node.apply("all-1g", *words(tmp_path, api)).code == 4
    assert states(api) == ["pending", "failed"]


def test_a_server_that_says_no_stops_it_before_anything(
    mig_node: MigMaker, api: ApiServer, tmp_path: Path
) -> None:
    node = mig_node(mig_machine("h100"))
    api.faults.append(Fault("PATCH", "nodes", "status", times=99, code=403, reason="Forbidden"))
    ran = node.apply("all-1g", *words(tmp_path, api))
    assert ran.code == 3 and node.stub.mig_changes() == []


def test_a_server_that_goes_away_meanwhile_takes_nothing_back(
    mig_node: MigMaker, api: ApiServer, tmp_path: Path
) -> None:
    node = mig_node(mig_machine("h100"))
    api.faults.append(Fault("PATCH", "nodes", "status", times=99, code=403, reason="Forbidden", after=1))
    ran = node.apply("all-1g", *words(tmp_path, api))
    assert ran.code == 0 and "the node's labels don't say success" in ran.err
    assert node.devices() == {"1g.10gb": 7}


def test_a_name_that_is_no_label_is_refused(mig_node: MigMaker, api: ApiServer, tmp_path: Path) -> None:
    node = mig_node(mig_machine("h100"))
    text = "version: v1\nmig-configs: {'a b': [{devices: all, mig-enabled: true, mig-devices: {}}]}\n"
    ran = node.apply("a b", *words(tmp_path, api), file=node.config(text))
    assert ran.code == 2 and "can't be the value of nvidia.com/mig.config" in ran.err
    assert node.stub.mig_changes() == []


def test_the_unit_is_enabled_and_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for the lock that whoever enables it holds."""
    from gpunode.host import Completed
    from gpunode.runtime import units

    ran: list[tuple[str, ...]] = []

    class Recording(Host):
        def run(self, argv: Sequence[str], **_: object) -> Completed:
            ran.append(tuple(argv))
            return Completed(tuple(argv), 0, "", "")

    monkeypatch.setattr(units, "_acts", lambda _host: True)
    units.Moves(coming=("gpunode-mig.service", "a.service")).settle(Recording())
    assert ran == [
        ("systemctl", "daemon-reload"),
        ("systemctl", "enable", "--now", "a.service"),
        ("systemctl", "enable", "gpunode-mig.service"),
    ]
