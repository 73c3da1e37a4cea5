"""`gpunode toolkit config` as a user runs it: output, exit codes, the journal, rollback."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpunode.commands import toolkit_config as command
from gpunode.errors import UsageError
from gpunode.host import Host
from tests.cli import Ran, gpunode
from tests.ordinary_user import AS_ORDINARY_USER, UID, public_directory
from tests.runtime.test_toolkit_file import PACKAGED
from tests.silent import silent_session

MODE = "nvidia-container-runtime.mode"
Run = Callable[..., Ran]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The toolkit's file as its package ships it, on a node below `tmp_path`."""
    place = tmp_path / "etc/nvidia-container-runtime/config.toml"
    place.parent.mkdir(parents=True)
    place.write_text(PACKAGED)
    return place


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """The group's commands on that node."""
    return lambda *argv, **more: gpunode("toolkit", "config", *argv, "--root", str(tmp_path), **more)


def settings(ran: Ran) -> dict[str, Any]:
    return {one["key"]: one for one in ran.document["data"]["settings"]}


def test_get_prints_every_key_with_its_source(file: Path, run: Run) -> None:
    ran = run("get", "-o", "json")
    assert (ran.code, ran.document["kind"]) == (0, "ToolkitConfig")
    found = settings(ran)
    assert (found[MODE]["value"], found[MODE]["source"]) == ("auto", "file")
    assert found["nvidia-container-cli.no-cgroups"]["source"] == "default"
    assert found["features.allow-ldconfig-from-container"]["value"] is None
    assert found[MODE]["allowed"] == ["auto", "cdi", "csv", "jit-cdi", "legacy"]


def test_get_of_one_key_prints_the_bare_value(file: Path, run: Run) -> None:
    assert run("get", "nvidia-container-runtime.runtimes").out == "docker-runc,runc,crun\n"
    assert run("get", "nvidia-container-cli.no-cgroups").out == "false\n"


def test_get_of_a_table_prints_its_keys(file: Path, run: Run) -> None:
    found = settings(run("get", "nvidia-container-runtime.modes.cdi", "-o", "json"))
    assert [name.rpartition(".")[2] for name in found] == ["spec-dirs", "default-kind", "annotation-prefixes"]


def test_get_of_an_unknown_key_names_the_nearest(tmp_path: Path, run: Run) -> None:
    ran = run("get", "nvidia-container-runtime.mod")
    assert (ran.code, ran.out) == (2, "")
    assert f"hint: did you mean {MODE}?" in ran.err


def test_get_without_a_file_prints_the_toolkits_defaults(tmp_path: Path, run: Run) -> None:
    ran = run("get", "-o", "json")
    assert ran.code == 0 and ran.document["data"]["exists"] is False
    assert settings(ran)[MODE]["value"] == "auto"


def test_defaults_follow_the_distribution(tmp_path: Path, run: Run) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text('ID="opensuse-leap"\nID_LIKE="suse opensuse"\n')
    (tmp_path / "sbin").mkdir()
    (tmp_path / "sbin/ldconfig.real").write_text("x")
    found = settings(run("get", "nvidia-container-cli", "-o", "json"))
    assert found["nvidia-container-cli.user"]["value"] == "root:video"
    assert found["nvidia-container-cli.ldconfig"]["value"] == "@/sbin/ldconfig.real"


def test_get_names_settings_that_the_toolkit_does_not_accept(file: Path, run: Run) -> None:
    file.write_text('nvidia-container-runtime.mode = "cdy"\n[nvidia-container-cli]\nno-cgroup = true\n')
    ran = run("get")
    assert ran.code == 1
    assert "allowed values are auto, cdi, csv, jit-cdi, legacy, not 'cdy'" in ran.err
    assert "did you mean nvidia-container-cli.no-cgroups?" in ran.err
    command = f"gpunode --root {file.parents[2]} toolkit config unset nvidia-container-cli.no-cgroup"
    assert f"hint: take it out: {command}\n" in ran.err
    assert run("unset", "nvidia-container-cli.no-cgroup").code == 0
    assert "no-cgroup" not in file.read_text()


def test_set_dry_run_shows_the_diff_and_changes_nothing(file: Path, run: Run, tmp_path: Path) -> None:
    ran = run("set", f"{MODE}=cdi", "--dry-run")
    assert ran.code == 0
    assert '-mode = "auto" # as the package has it\n+mode = "cdi" # as the package has it\n' in ran.out
    assert file.read_text() == PACKAGED
    assert not (tmp_path / "var").exists()


def test_set_writes_once_and_rollback_restores_the_bytes_and_the_mode(file: Path, run: Run) -> None:
    file.chmod(0o640)
    ran = run("set", f"{MODE}=cdi", "-o", "json")
    change = ran.document["data"]["changes"][0]
    assert (ran.code, change["action"], settings(ran)[MODE]["value"]) == (0, "updated", "cdi")
    assert file.read_text() == PACKAGED.replace('mode = "auto"', 'mode = "cdi"')
    entry = ran.document["data"]["journal"]
    before = file.stat().st_mtime_ns
    again = run("set", f"{MODE}=cdi", "-o", "json").document["data"]
    assert (again["changes"][0]["action"], again["journal"]) == ("unchanged", "")
    assert file.stat().st_mtime_ns == before
    back = gpunode("rollback", entry, "--root", str(file.parents[2]), "-o", "json").document
    assert (back["data"]["changes"][0]["action"], back["data"]["restart"]["verb"]) == ("restored", "none")
    assert file.read_text() == PACKAGED
    assert file.stat().st_mode & 0o777 == 0o640


def test_rollback_of_a_created_file_removes_it(tmp_path: Path, run: Run) -> None:
    refused = run("set", f"{MODE}=cdi")
    assert refused.code == 3 and "--create" in refused.err
    created = run("set", "--create", f"{MODE}=cdi", "-o", "json").document["data"]
    path = tmp_path / "etc/nvidia-container-runtime/config.toml"
    assert created["changes"][0]["action"] == "created" and path.read_text().endswith('mode = "cdi"\n')
    assert gpunode("rollback", "--root", str(tmp_path)).code == 0
    assert not path.exists()


def test_rollback_keeps_a_file_changed_by_another_user(file: Path, run: Run, tmp_path: Path) -> None:
    assert run("set", f"{MODE}=cdi").code == 0
    file.write_text(file.read_text() + "# mine\n")
    ran = gpunode("rollback", "--root", str(tmp_path))
    assert ran.code == 1 and "nothing was restored" in ran.err
    assert file.read_text().endswith("# mine\n")


@pytest.mark.parametrize(
    ("setting", "message", "hint"),
    [
        (f"{MODE}=foo", "allowed values are auto, cdi, csv, jit-cdi, legacy, not 'foo'", "config get"),
        ("nvidia-container-runtime.mod=cdi", "has no key", f"did you mean {MODE}?"),
        ("mode=cdi", "has no key", f"did you mean {MODE}?"),
        ("qqq=1", "has no key", "config get"),
        (MODE, f"{MODE!r} has no value", f"config unset {MODE}"),
        ("foo", "'foo' has no value", "KEY=VALUE"),
        ("disable-require=yes", "must be true or false, not 'yes'", "disable-require=true"),
        ("nvidia-container-cli.ldconfig=/sbin/ldconfig", "must start with @", "config get"),
        ("nvidia-container-cli.ldconfig=@ldconfig", "absolute path", "config get"),
        ("nvidia-container-runtime.runtimes=", "must not be empty", "config get"),
        ("nvidia-container-runtime.log-level=loud", "not 'loud'", "config get"),
        ("supported-driver-capabilities=compute,cuda", "not 'cuda'", "config get"),
        ("nvidia-container-runtime.modes.legacy.cuda-compat-mode=x", "not 'x'", "config get"),
        ("nvidia-container-runtime.modes.cdi.default-kind=gpu", "VENDOR/CLASS", "config get"),
        ("nvidia-container-runtime.modes.cdi.spec-dirs=cdi", "absolute path", "config get"),
        ("nvidia-container-cli.environment=X", "not NAME=VALUE", "config get"),
    ],
)
def test_setting_that_the_toolkit_refuses_is_refused_with_a_hint(
    file: Path, setting: str, message: str, hint: str
) -> None:
    host = Host(file.parents[2])
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        command.toolkit_config_set(silent_session(host), [setting])
    assert hint in caught.value.hint
    assert file.read_text() == PACKAGED


def test_refused_value_is_a_usage_error_on_stderr(file: Path, run: Run) -> None:
    ran = run("set", f"{MODE}=foo")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"error: {MODE}: allowed values are auto") and "\nhint: " in ran.err


def test_ldconfig_of_the_container_is_accepted_if_the_feature_allows_it(file: Path, run: Run) -> None:
    ran = run("set", "features.allow-ldconfig-from-container=true", "nvidia-container-cli.ldconfig=/sbin/l")
    assert ran.code == 0


def test_duplicate_key_is_a_usage_error(file: Path, run: Run) -> None:
    ran = run("set", f"{MODE}=cdi", f"{MODE}=auto")
    assert ran.code == 2 and "given twice" in ran.err


def test_no_cgroups_prints_a_warning_about_other_containers(file: Path, run: Run) -> None:
    ran = run("set", "nvidia-container-cli.no-cgroups=true")
    assert ran.code == 0 and "Unknown Error" in ran.err


def test_unset_restores_the_default_and_needs_a_known_key(file: Path, run: Run) -> None:
    assert run("unset", MODE).code == 0
    assert 'mode = "auto"' not in file.read_text()
    assert run("unset", MODE).out.endswith(" unchanged\n")
    assert run("unset", "nvidia-container-runtime.mood").code == 2


def test_broken_file_is_named_with_its_line_and_not_changed(file: Path, run: Run) -> None:
    file.write_text("mode = \n")
    for argv in (("get",), ("set", f"{MODE}=cdi")):
        ran = run(*argv)
        assert ran.code == 1 and "config.toml:1:" in ran.err and "hint: " in ran.err
    assert file.read_text() == "mode = \n"


def test_wrong_types_in_the_file_are_reported_without_a_crash(file: Path, run: Run) -> None:
    file.write_text('nvidia-container-runtime = 5\nnvidia-container-cli = {no-cgroups = "yes"}\n')
    ran = run("get")
    assert ran.code == 1 and "it must be a bool, not a string" in ran.err
    refused = run("set", f"{MODE}=cdi")
    assert refused.code == 1 and "but the toolkit expects a table" in refused.err


def test_file_is_the_one_that_the_toolkits_programs_read(tmp_path: Path) -> None:
    own = tmp_path / "home/nvidia-container-runtime/config.toml"
    own.parent.mkdir(parents=True)
    own.write_text('[nvidia-container-runtime]\nmode = "legacy"\n')
    named = tmp_path / "named.toml"
    named.write_text('[nvidia-container-runtime]\nmode = "csv"\n')
    environment = {"XDG_CONFIG_HOME": str(tmp_path / "home")}
    ran = gpunode("toolkit", "config", "get", MODE, "-o", "json", env=environment)
    assert (ran.document["data"]["config"], ran.document["data"]["configSource"]) == (
        str(own),
        "XDG_CONFIG_HOME",
    )
    environment["NVIDIA_CTK_CONFIG_FILE_PATH"] = str(named)
    assert gpunode("toolkit", "config", "get", MODE, env=environment).out == "csv\n"
    for option in ("--config-file", "--config"):  # nvidia-ctk has both
        assert gpunode("toolkit", "config", "get", MODE, option, str(own), env=environment).out == "legacy\n"
    for variable in ("GPUNODE_TOOLKIT_CONFIG_GET_CONFIG_FILE", "GPUNODE_TOOLKIT_CONFIG_GET_CONFIG"):
        ran = gpunode("toolkit", "config", "get", MODE, env={**environment, variable: str(own)})
        assert (ran.out, ran.err) == ("legacy\n", ""), "the second was released"


def test_without_root_the_diff_is_shown_and_nothing_is_written() -> None:
    with public_directory() as place:
        path = place / "config.toml"
        path.write_text(PACKAGED)
        argv = ("toolkit", "config", "set", f"{MODE}=cdi", "--config", str(path))
        shown = gpunode(*argv, "--dry-run", prefix=AS_ORDINARY_USER)
        assert shown.code == 0 and '+mode = "cdi"' in shown.out
        refused = gpunode(*argv, prefix=AS_ORDINARY_USER)
        assert refused.code == 3 and f"changing {path} needs root" in refused.err
        assert path.read_text() == PACKAGED


def test_own_file_of_a_user_is_changed_without_root() -> None:
    with public_directory() as home:
        place = home / ".config/nvidia-container-runtime/config.toml"
        place.parent.mkdir(parents=True)
        place.write_text(PACKAGED)
        for one in (home, *home.rglob("*")):
            os.chown(one, UID, UID)
        environment = {"HOME": str(home), "XDG_CONFIG_HOME": f"{home}/.config", "XDG_RUNTIME_DIR": str(home)}
        ran = gpunode("toolkit", "config", "set", f"{MODE}=cdi", env=environment, prefix=AS_ORDINARY_USER)
        assert ran.code == 0, ran.err
        assert 'mode = "cdi"' in place.read_text()
        assert gpunode("rollback", env=environment, prefix=AS_ORDINARY_USER).code == 0
        assert (place.read_text(), place.stat().st_uid) == (PACKAGED, UID)


def test_value_is_checked_before_the_file_is_searched(run: Run, tmp_path: Path) -> None:
    ran = run("set", f"{MODE}=cid")
    assert ran.code == 2 and ran.err.startswith(f"error: {MODE}: allowed values are auto"), ran.err
    missing = run("set", f"{MODE}=cdi")
    assert (missing.code, f"install it: gpunode --root {tmp_path} toolkit install" in missing.err) == (
        3,
        True,
    )


def test_get_of_a_named_file_that_does_not_exist_is_an_error(run: Run) -> None:
    ran = run("get", "--config", "/nope")
    assert (ran.code, ran.out, ran.err.splitlines()[0]) == (3, "", "error: /nope doesn't exist")
