"""CRI-O's process, unit and files, and the merged configuration by its rules, implemented a second time."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.crio_stub import effective, to_toml
from gpunode.errors import ConfigError
from gpunode.facts.crio import compiled_default, drop_in_directory, find_crio, load_crio
from gpunode.facts.podman import find_podman, load_podman
from gpunode.facts.toolkit import nvidia_hooks
from gpunode.host import Host
from tests.cli import gpunode
from tests.facts.test_daemons import Node
from tests.files import write
from tests.ordinary_user import AS_ORDINARY_USER, public_directory

ARGV = (
    "/usr/bin/crio",
    "--config",
    "/srv/crio.conf",
    "--config-dir=/srv/drop-ins/",
    "--listen",
    "/run/c.sock",
)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_empty_node_has_no_crio_and_no_podman(node: Node) -> None:
    assert find_crio(node.host) is None and find_podman(node.host) is None


def test_paths_are_read_from_the_running_daemon(node: Node) -> None:
    node.process(7, *ARGV)
    found = find_crio(node.host)
    assert found is not None and found.process is not None
    assert (found.config_path, found.socket, found.process.pid) == ("/srv/crio.conf", "/run/c.sock", 7)
    assert drop_in_directory(found) == "/srv/drop-ins"


def test_environment_variables_apply_without_a_flag(node: Node) -> None:
    node.process(7, "crio", "-c", "/srv/flag.conf")
    node.file("/proc/7/environ", "A=1\0CONTAINER_CONFIG=/srv/env.conf\0CONTAINER_CONFIG_DIR=/srv/env.d\0")
    found = find_crio(node.host)
    assert found is not None
    assert (found.config_path, drop_in_directory(found)) == ("/srv/flag.conf", "/srv/env.d")


def test_variables_of_a_stopped_daemon_come_from_its_unit(node: Node) -> None:
    lines = "Environment=CONTAINER_CONFIG=/srv/c.conf CONTAINER_LISTEN=/run/d.sock\nExecStart=/usr/bin/crio\n"
    node.file("/etc/systemd/system/crio.service", f"[Service]\n{lines}")
    node.file("/usr/bin/crio", "x", 0o755)
    found = find_crio(node.host)
    assert found is not None
    assert (found.config_path, found.socket) == ("/srv/c.conf", "/run/d.sock")


def test_dangling_drop_in_is_refused_as_by_crio(node: Node) -> None:
    node.file("/etc/crio/crio.conf.d/10-crio.conf", "")
    (node.root / "etc/crio/crio.conf.d/50-gone.conf").symlink_to("/srv/gone.conf")
    with pytest.raises(ConfigError, match=r"50-gone.conf is a link to /srv/gone.conf, which doesn't exist"):
        load_crio(node.host, "/etc/crio/crio.conf", "/etc/crio/crio.conf.d")


@pytest.mark.parametrize("unit", ["crio.service", "cri-o.service"])
def test_stopped_daemon_is_found_by_its_unit(node: Node, unit: str) -> None:
    node.file(f"/etc/systemd/system/{unit}", "[Service]\nExecStart=/usr/bin/crio -d /srv/d $CRIO_OPTIONS\n")
    node.file("/usr/bin/crio", "x", 0o755)
    found = find_crio(node.host)
    assert found is not None and found.process is None
    assert (found.unit, found.config_path, drop_in_directory(found)) == (
        unit,
        "/etc/crio/crio.conf",
        "/srv/d",
    )


def test_socket_is_taken_from_the_last_file(node: Node) -> None:
    node.file("/usr/bin/crio", "x", 0o755)
    node.file("/etc/crio/crio.conf", '[crio.api]\nlisten = "/run/a.sock"\n')
    node.file("/etc/crio/crio.conf.d/10", '[crio.api]\nlisten = "unix:///run/b.sock"\n')
    found = find_crio(node.host)
    assert found is not None and found.socket == "/run/b.sock"
    node.file("/etc/crio/crio.conf.d/20", "broken")
    found = find_crio(node.host)
    assert found is not None and found.socket == "/var/run/crio/crio.sock"


def test_line_of_a_handler_is_found_as_header_and_as_key(node: Node) -> None:
    text = '# runtime_path = "x"\n[crio.runtime.runtimes.nvidia]\n\n"runtime_path" = "/x"\n'
    text += '[crio.runtime.runtimes.runc]\nruntime_path = "/y"\n'
    node.file("/etc/crio/crio.conf", text)
    (file,) = load_crio(node.host, "/etc/crio/crio.conf", "/etc/crio/crio.conf.d").files
    assert (file.line_of_handler("nvidia"), file.line_of_handler("nvidia", "runtime_path")) == (2, 4)
    assert (file.line_of_handler("runc"), file.line_of_handler("runc", "runtime_path")) == (5, 6)
    assert (file.line_of_handler("nvidia", "absent"), file.line_of_handler("absent")) == (2, 1)


@pytest.mark.parametrize(
    "text",
    [
        "crio = 1",
        "crio.runtime = []",
        "crio.runtime.runtimes = 'x'",
        "crio.runtime.default_runtime = 1",
        "crio.runtime.runtimes.nvidia = 'x'",
        "crio.runtime.runtimes.nvidia.runtime_path = 1",
    ],
)
def test_wrong_types_are_refused_with_their_position(node: Node, text: str) -> None:
    node.file("/etc/crio/crio.conf", text)
    with pytest.raises(ConfigError, match=r"^/etc/crio/crio.conf:1: \w+ is not a"):
        load_crio(node.host, "/etc/crio/crio.conf", "/etc/crio/crio.conf.d")


def test_compiled_default_changed_with_1_31() -> None:
    assert [compiled_default(one) for one in ((1, 30, 9), (1, 31), (), (2, 0))] == [
        "runc",
        "crun",
        "crun",
        "crun",
    ]


NAMES = st.sampled_from(["crun", "runc", "nvidia", "kata"])
HANDLERS = st.fixed_dictionaries(
    {"runtime_path": st.sampled_from(["/a", "/b"])},
    optional={
        "monitor_path": st.just("/m"),
        "allowed_annotations": st.lists(st.sampled_from("xy"), max_size=2),
    },
)
RUNTIMES = st.fixed_dictionaries(
    {},
    optional={
        "default_runtime": NAMES,
        "pids_limit": st.integers(0, 9),
        "runtimes": st.dictionaries(NAMES, HANDLERS, max_size=3),
    },
)
FILE_NAMES = st.sampled_from(
    ["10-a.conf", "10-a.conf.bak", "99-nvidia.toml", ".hidden", "5", "10-a/x", "é", "Z"]
)


@settings(max_examples=60, deadline=None)
@given(main=RUNTIMES, drop_ins=st.dictionaries(FILE_NAMES, RUNTIMES, max_size=5))
def test_files_are_merged_as_in_crio(main: dict[str, Any], drop_ins: dict[str, dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for place, runtime in {
            "crio.conf": main,
            **{f"d/{key}": one for key, one in drop_ins.items()},
        }.items():
            write(root, place, to_toml({"crio": {"runtime": runtime}}))
        theirs = effective(str(root / "crio.conf"), str(root / "d"))["runtime"]
        ours = load_crio(Host(), str(root / "crio.conf"), str(root / "d"))
    assert {"crun": theirs["runtimes"]["crun"], **ours.handlers} == theirs["runtimes"]
    assert (ours.named_default or "crun") == theirs["default_runtime"]
    assert ours.setting("runtime", "pids_limit") == theirs.get("pids_limit")


def test_only_nvidia_hooks_are_listed(node: Node) -> None:
    place = "/etc/containers/oci/hooks.d"
    node.file(
        f"{place}/a.json", '{"version": "1.0.0", "hook": {"path": "/usr/bin/nvidia-container-toolkit"}}'
    )
    node.file(f"{place}/b.json", '{"hook": "/usr/bin/nvidia-container-runtime-hook"}')  # the 0.1.0 format
    node.file(f"{place}/c.json", '{"hook": {"path": "/usr/bin/oci-umount"}}')
    for number, text in enumerate(("", "[]", "{", '{"hook": 1}', '{"hook": {"path": []}}', "[" * 9999)):
        node.file(f"{place}/odd{number}.json", text)
    found = nvidia_hooks(node.host, ("/absent", place, place))
    assert [hook.path for hook in found] == [f"{place}/a.json", f"{place}/b.json"]


def test_last_podman_file_has_priority(node: Node) -> None:
    node.file("/usr/share/containers/containers.conf", '[engine]\nruntime = "crun"\nhooks_dir = ["/h", 1]\n')
    node.file("/etc/containers/containers.conf", '[engine.runtimes]\nnvidia = ["/a"]\n')
    node.file("/etc/containers/containers.conf.d/1.conf", '[engine.runtimes]\nnvidia = ["/b"]\n')
    node.file("/etc/containers/containers.conf.d/2.conf.bak", '[engine.runtimes]\nnvidia = ["/c"]\n')
    config = load_podman(node.host)
    assert config.runtimes == {"nvidia": ["/b"]}
    assert (config.setting("runtime"), config.strings("hooks_dir")) == ("crun", ("/h",))


@pytest.mark.parametrize(
    "text", ["engine = 1", "engine.runtime = 1", "engine.runtimes = []", "engine.runtimes.a = 'x'"]
)
def test_wrong_types_in_podman_files_are_refused(node: Node, text: str) -> None:
    node.file("/etc/containers/containers.conf", text)
    with pytest.raises(ConfigError, match=r"/etc/containers/containers\.conf: .*\[engine\]"):
        load_podman(node.host)


def test_unreadable_directory_hints_at_root() -> None:
    with public_directory() as place:
        drop_ins = place / "etc/crio/crio.conf.d"
        drop_ins.mkdir(parents=True)
        (place / "usr/bin").mkdir(parents=True)
        (place / "usr/bin/crio").write_text("x")
        (place / "usr/bin/crio").chmod(0o755)
        (drop_ins / "10-crio.conf").write_text("")
        drop_ins.chmod(0o744)
        argv = ("configure-runtime", "--runtime", "crio", "--dry-run", "--root", str(place), "-o", "json")
        ran = gpunode(*argv, prefix=AS_ORDINARY_USER)
        assert ran.document["errors"][0]["hint"].startswith("run as root")
