"""No command executes files planted by others, or discloses files readable only by root."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from gpunode.cli import app
from tests.cli import Ran
from tests.security.healthy import VERSION
from tests.security.stage import CANARY, MALLORY, Stage, stage

pytestmark = [pytest.mark.xdist_group("hostile_users"), pytest.mark.full]

_DRY = ("--dry-run",)
_RUNTIMES = ("auto", "docker", "containerd", "crio", "podman")
_ENGINES = tuple(("--runtime", name) for name in _RUNTIMES)
_CLUSTER = ("--server", "https://127.0.0.1:1", "--node", "node")
# every command with argument lists that reach as much of it as this node allows; OUT is a directory of root's
COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "doctor": (
        (),
        *(("-o", form) for form in ("json", "yaml", "html", "prometheus")),
        ("--explain",),
        ("--fix",),
        ("--output-file", "OUT/doctor.html"),
        ("--output-file", "OUT/gpunode.prom"),
    ),
    "explain": (("pci-no-gpu",), ()),
    "help": ((), ("doctor",), ("environment",)),
    "version": ((), ("-o", "json")),
    "report": (("--output-file", "OUT/report.tar.gz"), ("--redact", "all", "--output-file", "OUT/r.tar.gz")),
    "status runtime": ((), ("-o", "json"), ("-v",)),
    "setup": (("--dry-run",), ("--dry-run", "--kubernetes", *_CLUSTER)),
    "configure-runtime": (
        *((*one, *_DRY) for one in _ENGINES),
        ("--runtime", "auto", "--enable-cdi", *_DRY),
        *((*one, "--no-restart", "--yes") for one in _ENGINES[1:4]),
    ),
    "verify": ((), *(("--on", name) for name in _RUNTIMES[1:]), ("--on", "kubernetes", *_CLUSTER)),
    "unconfigure-runtime": (
        *((*one, *_DRY) for one in _ENGINES[:2]),
        *((*one, "--no-restart", "--yes") for one in _ENGINES[1:4]),
    ),
    "gpus": ((), ("-o", "json")),
    "cdi generate": ((), ("--output", "OUT/cdi.yaml")),
    "cdi list": ((),),
    "cdi refresh": (_DRY, ("--install", *_DRY), ()),
    "driver plan": ((),),
    "driver install": (_DRY,),
    "toolkit install": (_DRY,),
    "toolkit status": ((),),
    "toolkit remove": (_DRY,),
    "toolkit config get": ((),),
    "toolkit config set": (("nvidia-container-cli.no-cgroups=true", "--create"),),
    "toolkit config unset": (("nvidia-container-cli.no-cgroups", *_DRY),),
    "journal list": ((), ("-o", "json")),
    "journal show": ((),),
    "rollback": (_DRY, ("--no-restart", "--yes")),
    "mig list": ((), ("--profiles",)),
    "mig export": ((),),
    "mig plan": (("--config-file", "/etc/shadow", "--selected-config", "all-disabled"), ()),
    "mig apply": (("--selected-config", "all-disabled", *_DRY),),
    "mig assert": (("--selected-config", "all-disabled"),),
    "plugin check-config": ((),),
    "plugin status": ((), ("-o", "json"), ("--all",)),
    "labels": ((), ("--output-file", "OUT/labels"), _DRY),
    "node advertise": (("--resource", "nvidia.com/gpu", "--count", "1", *_CLUSTER, *_DRY),),
    "manifests all": ((),),
    "manifests runtime-class": ((),),
    "manifests daemon-set": ((),),
    "manifests rbac": (("--for", "verify"),),
    "manifests vector-add": ((),),
    "reset": (_DRY,),
    "schema": ((), ("all",)),
    "demo": ((),),
    "completion": (("bash",),),
}
SERVICES = ("plugin serve", "plugin inject")  # run by services.py
# output of a command line
EXPECTED: dict[tuple[str, ...], str] = {("journal", "show"): "+no-cgroups = true"}
# these read data named by other processes
_CHECKS = (
    "docker-desktop,docker-rootless,mps-mig-mixed,mig-strategy-mismatch,plugin-mount-mismatch,"
    "plugin-strategy-mismatch,plugin-device-specs,plugin-multiple"
)
# commands that read other processes
LOOKING = (
    ("doctor", "-o", "json"),
    ("doctor", "--only", _CHECKS),
    ("report", "--output-file", "OUT/report.tar.gz"),
    ("status", "runtime"),
    ("setup", "--dry-run"),
    *(("configure-runtime", *one, *_DRY) for one in _ENGINES),
    ("plugin", "status", "--all"),
)


def commands(group: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Every command of the table, by its words."""
    if not hasattr(group, "commands"):
        yield " ".join(path), group
        return
    for name in group.commands:
        yield from commands(group.get_command(None, name), *path, name)


def test_every_command_is_listed_here() -> None:
    assert sorted(dict(commands(typer.main.get_command(app)))) == sorted((*COMMANDS, *SERVICES))


@pytest.fixture(scope="module", params=["user", "setuid", "container", "crowd"])
def node(request: pytest.FixtureRequest) -> Iterator[Stage]:
    with stage(request.param) as made:
        yield made


@pytest.fixture(scope="module")
def quiet() -> Iterator[Stage]:
    """The node with a containerd of root's and a user's rootless Docker, both real."""
    with stage("healthy") as made:
        yield made


def lines(place: Path, all_commands: bool) -> Iterator[tuple[str, ...]]:
    every = ((*name.split(), *options) for name in COMMANDS for options in COMMANDS[name])
    for line in (*LOOKING, *(every if all_commands else ())):
        yield tuple(word.replace("OUT", str(place)) for word in line)


def leaks(node: Stage, line: tuple[str, ...], ran: Ran, place: Path) -> list[str]:
    """Executed and disclosed files of a run; markers and output files are removed for the next one."""
    problems = [f"{' '.join(line)}: executed {argv}" for argv in node.executed()]
    for marker in (node.directory / "markers").iterdir():
        marker.unlink()
    problems += [f"{' '.join(line)}: printed the secret" for text in (ran.out, ran.err) if CANARY in text]
    for path in [one for top in (place, node.secret / "state") for one in top.rglob("*") if one.is_file()]:
        if any(CANARY.encode() in data for data in _contents(path)):
            problems.append(f"{' '.join(line)}: wrote the secret to {path.name}")
        if path.is_relative_to(place):
            path.unlink()
    assert "Traceback" not in ran.err and "this is a bug" not in ran.err, (line, ran.err)
    assert EXPECTED.get(line, "") in ran.out, (line, ran)
    return problems


def _contents(path: Path) -> Iterator[bytes]:
    if not path.name.endswith(".tar.gz"):
        yield path.read_bytes()
        return
    with tarfile.open(path) as bundle:
        for member in bundle:
            yield member.name.encode()
            stream = bundle.extractfile(member)
            yield stream.read() if stream else b""


def test_nothing_is_executed_or_disclosed_for_root(node: Stage, request: pytest.FixtureRequest) -> None:
    place = node.secret / "out"
    everything = request.node.callspec.params["node"] == "user"
    problems = []
    for line in lines(place, everything):
        problems += leaks(node, line, node.as_root(*line), place)
    assert not problems, "\n".join(problems)


def test_no_service_executes_or_discloses_anything_for_root(node: Stage) -> None:
    """They register with the kubelet, allocate a GPU, detect a fault, start a daemon, and end."""
    ran = node.services()
    assert ran.code == 0, ran.err
    assert "served 4 nvidia.com/gpu" in ran.out, "two replicas of each GPU, by MPS"
    assert "MPS control daemon has ended" in ran.err
    assert "injected xid 79" in ran.out
    problems = leaks(node, SERVICES, ran, node.secret / "services")
    assert not problems, "\n".join(problems)


def test_nothing_is_executed_or_disclosed_for_another_user(node: Stage) -> None:
    place = node.directory / "run/victim"
    problems = []
    for line in lines(place, False):
        if line[0] in ("doctor", "report", "status"):
            problems += leaks(node, line, node.as_victim(*line), place)
    assert not problems, "\n".join(problems)


# the commands that write a file under a name that the user chooses
WRITING = {
    "doctor": ("doctor", "--only", "pci-no-gpu", "--output-file"),
    "report": ("report", "--output-file"),
    "labels": ("labels", "--output-file"),
    "cdi generate": ("cdi", "generate", "--output"),
}


def _writes_a_file(command: Any) -> bool:
    """By its options: -o is the format of the output. Those of labels are in the plugin's table."""
    words = {word for param in command.params for word in param.opts if param.name != "output"}
    return command.name == "labels" or bool(words & {"--output-file", "--output"})


def test_every_option_that_writes_a_file_is_listed_here() -> None:
    table = commands(typer.main.get_command(app))
    assert sorted(name for name, command in table if _writes_a_file(command)) == sorted(WRITING)


@pytest.mark.parametrize(("uid", "mode"), [(0, 0o777), (0, 0o1777), (MALLORY, 0o755)])
@pytest.mark.parametrize("command", WRITING)
def test_no_output_file_is_written_through_a_planted_symlink(
    quiet: Stage, command: str, uid: int, mode: int
) -> None:
    """With a name that another user created first, in a directory of that user or a world-writable one."""
    place = quiet.secret / f"{command}{mode}"
    victim, shared = place / "victim", quiet.directory / f"shared{mode}"
    place.mkdir()
    victim.write_text("precious")
    shared.mkdir(exist_ok=True)
    os.chown(shared, uid, uid)
    shared.chmod(mode)
    ending = {"cdi generate": "yaml", "report": "tar.gz"}.get(command, "json")
    taken, way = shared / f"{command}.{ending}", shared / f"way-{command}"
    for link, target in ((taken, victim), (way, place)):
        link.symlink_to(target)
        os.chown(link, MALLORY, MALLORY, follow_symlinks=False)
    ran = quiet.as_root(*WRITING[command], str(taken))
    assert victim.read_text() == "precious"
    assert taken.is_symlink() == (ran.code not in (0, 1) or "error:" in ran.err), ran  # replaced, or refused
    ran = quiet.as_root(*WRITING[command], f"{way}/new.{ending}")
    assert [path.name for path in place.iterdir()] == ["victim"], ran
    assert ran.code == 3 and "is a symlink that another user may have created" in ran.err


def test_real_containerd_is_queried_and_a_rootless_docker_is_listed(quiet: Stage) -> None:
    ran = quiet.as_root("status", "runtime", "-o", "json")
    engines = {(one["name"], one["user"]): one for one in ran.document["data"]["engines"]}
    assert engines["containerd", ""]["version"] == "1.7.20", ran.out
    assert engines["containerd", ""]["running"]
    assert any("containerd --version" in argv for argv in quiet.executed("asked"))
    assert engines["docker", "victim"]["version"] == VERSION
    assert (
        engines["docker", "victim"]["config"] == f"{quiet.directory}/home/victim/.config/docker/daemon.json"
    )
    assert quiet.executed() == []
