"""The registry of container engines against the places that name engines, and docs/adding-an-engine.md."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import get_args

import pytest

from gpunode.cdi.versions import UNKNOWN_ENGINE, oldest
from gpunode.commands.doctor import Preflight
from gpunode.commands.verify import VerifyPlace
from gpunode.errors import UsageError
from gpunode.facts import effective, engines
from gpunode.facts.daemons import Daemon, find_daemon
from gpunode.facts.registry import DAEMONS, DISTRIBUTIONS, ENGINES
from gpunode.facts.tables import numbers, table
from gpunode.host import Host
from gpunode.runtime import find
from gpunode.runtime.verify import run_program
from gpunode.runtime.verify.container import ContainerRequest
from tests.engine_places import lines_of, places
from tests.silent import SilentProgress

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "adding-an-engine.md"


def test_tables_have_an_entry_for_each_engine() -> None:
    assert set(engines.ROLES) == set(ENGINES)
    assert set(effective._READERS) == set(ENGINES)
    assert set(find.FINDERS) == {*ENGINES, *DISTRIBUTIONS}
    assert set(get_args(VerifyPlace)) == {*ENGINES, *DISTRIBUTIONS, "host", "kubernetes"}
    assert set(get_args(Preflight)) == {*ENGINES, "kubernetes"}


def test_first_release_with_cdi_is_that_of_the_tables() -> None:
    firsts: dict[str, tuple[int, ...]] = {}
    for row in table("cdi_versions").rows:
        firsts.setdefault(row["engine"], numbers(row["since"]))
    for row in table("version_gates").rows:
        if row["gate"] == "cdi":
            assert firsts[row["component"]] == numbers(row["since"])
    assert firsts == {name: (*engine.cdi, 0, 0)[:3] for name, engine in ENGINES.items()}


def test_unknown_engine_is_refused_and_not_treated_as_containerd(tmp_path: Path) -> None:
    request = ContainerRequest("lxd")
    with pytest.raises(UsageError, match="no program can be run in lxd"):
        run_program(Host(), request, SilentProgress())
    daemon = Daemon("lxd", None, (), "/etc/lxd.toml", "the default path", "/run/lxd.sock", None)
    with pytest.raises(ValueError, match="no engine for the daemon 'lxd'"):
        find.of_daemon(Host(tmp_path), daemon)
    assert oldest("lxd") == UNKNOWN_ENGINE


def test_every_engine_has_a_class_of_its_own(tmp_path: Path) -> None:
    found = {
        name: find.of_daemon(Host(tmp_path), Daemon(name, None, (), f"/etc/{name}", "", "", None))
        for name in ENGINES
    }
    assert len({type(engine) for engine in found.values()}) == len(ENGINES)


def test_only_daemons_have_units() -> None:
    assert set(ENGINES) - set(DAEMONS) == {"podman"}


def test_module_of_a_new_engine_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(ENGINES, "lxd", ENGINES["podman"]._replace(title="LXD", program="lxd"))
    with pytest.raises(ModuleNotFoundError, match=r"gpunode\.facts\.lxd"):
        find_daemon("lxd", Host(tmp_path))
    monkeypatch.setattr(find, "FINDERS", {**find.FINDERS, "lxd": find_daemon})
    daemon = Daemon("lxd", None, (), "/etc/lxd.toml", "the default path", "/run/lxd.sock", None)
    with pytest.raises(ModuleNotFoundError, match=r"gpunode\.runtime\.lxd"):
        find.of_daemon(Host(tmp_path), daemon)


def test_lines_that_name_engines_are_those_of_modules_for_several_engines() -> None:
    text = """\
        if node.docker is None and engine != "crio":
            dig(tree, "plugins", "containerd")
        UNITS = "Before=containerd.service"
    """
    assert set(lines_of(dedent(text))) == {1, 3}
    modules = places()
    assert {"facts/engines.py", "facts/effective.py", "checks/cdi.py", "commands/mig_boot.py"} <= set(modules)
    assert not {"facts/docker.py", "runtime/docker_rootless.py", "checks/crio.py"} & set(modules)


def test_page_names_only_existing_files() -> None:
    assert "tests.engine_places" in PAGE.read_text()
    paths = re.findall(r"\b([a-z_]+/[a-z_/]+\.py)\b", PAGE.read_text())
    assert [
        path for path in paths if not any((top / path).exists() for top in (ROOT, ROOT / "gpunode"))
    ] == []
