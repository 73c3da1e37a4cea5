"""Every CRI-O configuration of the corpus: its meaning before, after, twice and undone, by CRI-O's rules.

The meaning is taken from `fixtures.crio_stub.effective`, which shares no code with gpunode.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from fixtures.crio import case_names, make_node, meaning
from gpunode.commands import configure_runtime, unconfigure_runtime
from gpunode.commands.configure_runtime import RuntimeChoice
from gpunode.errors import ConfigError
from gpunode.host import Host
from gpunode.output.result import Result
from gpunode.runtime.engine import Request
from tests.silent import SilentProgress

BROKEN = {
    "broken-drop-in": "crio.conf.d/20-broken.conf:3:16: ",
    "broken-type": "crio.conf:3: runtimes is not a table",
    "broken-utf8": "crio.conf:1:6: not UTF-8",
}
NAMES = ("nvidia", "nvidia-cdi", "nvidia-legacy")
GOOD = [name for name in case_names() if name not in BROKEN]
OWN = "/usr/bin/nvidia-container-runtime"


@pytest.fixture
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A recorded node with the case of the test as its /etc/crio, CRI-O 1.32 and the toolkit."""
    return make_node(tmp_path, request.param)


def configure(root: Path, **options: Any) -> Result:
    request = Request(("crio",), configures=True)
    return configure_runtime.run(Host(root, environ={}), request, SilentProgress(), RuntimeChoice(**options))


def unconfigure(root: Path) -> Result:
    request = Request(("crio",))
    return unconfigure_runtime.unconfigure(Host(root, environ={}), request, SilentProgress())


def bytes_of(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in (root / "etc").rglob("*") if path.is_file()}


def base_of(tree: dict[str, Any]) -> dict[str, Any]:
    """The low-level handler to copy: the default's if it is one, otherwise crun's, otherwise runc's."""
    runtime = tree["runtime"]
    for name in (runtime["default_runtime"], "crun", "runc"):
        table = runtime["runtimes"].get(name, {})
        if table.get("runtime_path", "").rpartition("/")[2] in ("crun", "runc"):
            return dict(table)
    return {}


def without_nvidia(tree: dict[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(tree)
    for name in NAMES:
        result["runtime"]["runtimes"].pop(name, None)
    return result


@pytest.mark.parametrize("node", GOOD, indirect=True)
def test_case_gets_the_handler_and_keeps_everything_else(node: Path) -> None:
    before = meaning(node)
    configure(node)
    after = meaning(node)
    handler = after["runtime"]["runtimes"]["nvidia"]
    assert (handler["runtime_path"], handler["runtime_type"]) == (OWN, "oci")
    base = base_of(before)
    for key in ("monitor_path", "runtime_root", "monitor_env", "monitor_cgroup", "allowed_annotations"):
        kept = before["runtime"]["runtimes"].get("nvidia", {}).get(key, base.get(key))
        assert handler.get(key) == kept or (key == "monitor_path" and not base), key
    assert not {"inherit_default_runtime", "platform_runtime_paths", "runtime_pull_image"} & handler.keys()
    for name in before["runtime"]["runtimes"].keys() - {"nvidia"}:
        assert after["runtime"]["runtimes"][name] == before["runtime"]["runtimes"][name], name
    assert without_nvidia(after) == without_nvidia(before)


@pytest.mark.parametrize("node", GOOD, indirect=True)
def test_second_run_changes_no_byte(node: Path) -> None:
    configure(node)
    first = {path: (content, Path(path).stat().st_mtime_ns) for path, content in bytes_of(node).items()}
    result = configure(node)
    assert [change.action for change in result.data.changes] == ["unchanged"]
    assert result.data.restart.verb == "none"
    second = {path: (content, Path(path).stat().st_mtime_ns) for path, content in bytes_of(node).items()}
    assert first == second


@pytest.mark.parametrize("node", GOOD, indirect=True)
def test_unconfigured_case_equals_the_original_without_nvidia(node: Path) -> None:
    before, files = meaning(node), bytes_of(node)
    configure(node)
    unconfigure(node)
    after = meaning(node)
    expected = without_nvidia(before)
    if expected["runtime"]["default_runtime"] in NAMES:
        expected["runtime"]["default_runtime"] = "crun"  # its value without the file that set another one
    assert after == expected
    if not any(b"nvidia" in content for content in files.values()):
        assert bytes_of(node) == files


@pytest.mark.parametrize("node", [name for name in GOOD if name != "later-default"], indirect=True)
def test_default_is_set_and_restored(node: Path) -> None:
    before = meaning(node)
    configure(node, set_as_default=True)
    assert meaning(node)["runtime"]["default_runtime"] == "nvidia"
    unconfigure(node)
    previous = before["runtime"]["default_runtime"]
    assert meaning(node)["runtime"]["default_runtime"] == ("crun" if previous in NAMES else previous)


@pytest.mark.parametrize("node", BROKEN, indirect=True)
def test_broken_case_is_refused_with_its_position_and_not_changed(
    node: Path, request: pytest.FixtureRequest
) -> None:
    files = bytes_of(node)
    for change in (configure, unconfigure):
        with pytest.raises(ConfigError) as caught:
            change(node)
        assert BROKEN[request.node.callspec.params["node"]] in caught.value.message
        assert "crio" in caught.value.hint
    assert bytes_of(node) == files
