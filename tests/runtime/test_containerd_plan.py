"""Rules of containerd's files on unavailable releases, from trees: 2.0 to 2.3, versions 1 to 4."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpunode.errors import ConfigError, ValidationError
from gpunode.facts.containerd import CRI_PLUGINS, load_config
from gpunode.facts.daemons import Daemon
from gpunode.host import Host
from gpunode.output.typed import toml
from gpunode.runtime.containerd import ContainerdEngine, allowed_for, must_have, must_keep
from gpunode.runtime.containerd_plan import runtime_table
from gpunode.runtime.engine import Active, DesiredConfig, Handler, Plan, UnwantedConfig
from tests.files import write

MAIN = "/etc/containerd/config.toml"
DROP_IN = "/etc/containerd/conf.d/99-nvidia.toml"
NVIDIA = DesiredConfig((Handler("nvidia", "/usr/bin/nvidia-container-runtime"),))
P2, P3 = CRI_PLUGINS[2], CRI_PLUGINS[3]


class Node:
    """A tree with containerd's files, read by a release that can't be run here."""

    def __init__(self, root: Path, release: str) -> None:
        self.root = root
        self.release = tuple(map(int, release.split(".")))

    def write(self, path: str, text: str) -> None:
        write(self.root, path, text)

    def engine(self, drop_in: str = "") -> ContainerdEngine:
        daemon = Daemon("containerd", None, self.release, MAIN, "test", "/run/c.sock", None)
        return ContainerdEngine(Host(self.root, environ={}), daemon, drop_in)

    def plan(self, desired: DesiredConfig = NVIDIA, drop_in: str = "") -> Plan:
        return self.engine(drop_in).plan(desired, None)


def texts(plan: Plan) -> dict[str, str]:
    return {edit.path: (edit.after or b"").decode() for edit in plan.changed}


@pytest.mark.parametrize(
    ("release", "version"), [("1.6.20", 2), ("1.7.24", 2), ("2.0.11", 3), ("2.2.7", 3), ("2.3.4", 4)]
)
def test_missing_file_gets_the_version_that_the_release_writes(
    tmp_path: Path, release: str, version: int
) -> None:
    plan = Node(tmp_path, release).plan()
    written = {path: toml(text) for path, text in texts(plan).items()}
    assert plan.config_version == version
    assert {tree["version"] for tree in written.values()} == {version}
    assert set(written) == ({MAIN} if version == 2 else {MAIN, DROP_IN})


@pytest.mark.parametrize("version", [2, 3, 4])
def test_drop_in_has_the_main_files_version_on_2_3(tmp_path: Path, version: int) -> None:
    node = Node(tmp_path, "2.3.4")  # refuses to start with an import of a higher version
    node.write(MAIN, f"version = {version}\n")
    drop_in = toml(texts(node.plan())[DROP_IN])
    assert drop_in["version"] == version
    assert set(drop_in["plugins"]) == {P2 if version == 2 else P3}


@pytest.mark.parametrize("text", ["version = 1\n[plugins.cri]\n", '[plugins.cri]\nsandbox_image = "p"\n'])
def test_version_1_gets_a_drop_in_of_version_1_on_2_3(tmp_path: Path, text: str) -> None:
    node = Node(tmp_path, "2.3.4")
    node.write(MAIN, text)
    changed = texts(node.plan())
    drop_in = toml(changed[DROP_IN])
    assert drop_in["version"] == 1 and set(drop_in["plugins"]) == {"cri"}
    assert changed[MAIN].replace('imports = ["/etc/containerd/conf.d/*.toml"]\n', "") == text


def test_file_without_version_keeps_short_names_if_they_are_read(tmp_path: Path) -> None:
    text = 'disabled_plugins = ["aufs", "cri"]\n'
    node = Node(tmp_path, "1.7.24")
    node.write(MAIN, text)
    after = toml(texts(node.plan())[MAIN])
    assert after["disabled_plugins"] == ["aufs"] and "version" not in after
    assert "nvidia" in after["plugins"]["cri"]["containerd"]["runtimes"]
    with pytest.raises(ConfigError, match=r"config\.toml:1: .*short name 'aufs'.* ignores"):
        Node(tmp_path, "2.2.7").plan()


@pytest.mark.parametrize(
    ("release", "main", "other", "message"),
    [
        ("2.1.9", "version = 4\n", "", r"config\.toml:1: version = 4, containerd 2\.1\.9 reads up to 3"),
        ("1.6.20", "\nversion = 3\n", "", r"config\.toml:2: version = 3, containerd 1\.6\.20 reads up to 2"),
        (
            "2.1.9",
            'version = 3\nimports = ["o.toml"]\n',
            "version = 2\n[plugins.a]\n",
            r"o\.toml:1: version = 2",
        ),
        ("2.1.9", "\ufeffversion = 3\n", "", r"config\.toml:1: begins with a byte order mark"),
        (
            "2.1.9",
            'version = 3\n\nimports = [\n"gone.toml"]\n',
            "",
            r"config\.toml:4: imports /etc/containerd/gone",
        ),
        (
            "2.1.9",
            f'version = 3\n[plugins."{P3}"]\nenable_cdi = "no"\n',
            "",
            r"config\.toml:3: .* is not true or",
        ),
        (
            "1.7.24",
            f'version = 2\n[plugins."{P2}"]\ncontainerd = []\n',
            "",
            r"config\.toml:3: .* is not a table",
        ),
    ],
)
def test_refusal_names_file_line_and_hint(
    tmp_path: Path, release: str, main: str, other: str, message: str
) -> None:
    node = Node(tmp_path, release)
    node.write(MAIN, main)
    if other:
        node.write("/etc/containerd/o.toml", other)
    with pytest.raises(ConfigError, match=message) as caught:
        node.plan()
    assert caught.value.hint


def test_each_file_may_have_its_own_version_on_2_3(tmp_path: Path) -> None:
    node = Node(tmp_path, "2.3.5")
    node.write(MAIN, 'version = 4\nimports = ["o.toml"]\n')
    node.write("/etc/containerd/o.toml", f'version = 2\n[plugins."{P2}"]\nsandbox_image = "p"\n')
    assert toml(texts(node.plan())[DROP_IN])["version"] == 4


def test_drop_in_that_needs_a_copy_is_refused_on_containerd_1(tmp_path: Path) -> None:
    node = Node(tmp_path, "1.7.24")
    node.write(MAIN, f'version = 2\n[plugins."{P2}"]\nsandbox_image = "p"\n')
    with pytest.raises(ConfigError, match="would have to be a copy") as caught:
        node.plan(drop_in="/etc/containerd/mine.toml")
    assert "leave out --drop-in-config" in caught.value.hint


def test_named_drop_in_gets_the_runtime_on_containerd_2(tmp_path: Path) -> None:
    node = Node(tmp_path, "2.1.9")
    node.write(MAIN, "version = 3\n")
    mine = "/etc/containerd/mine.toml"
    changed = texts(node.plan(drop_in=mine))
    assert set(toml(changed[mine])["plugins"]) == {P3}
    for path, text in changed.items():
        node.write(path, text)
    removal = node.engine(mine).plan_removal(UnwantedConfig(("nvidia",)), None)
    assert texts(removal) == {MAIN: "version = 3\n", mine: ""}


@pytest.mark.parametrize(
    ("drop_in", "unread", "imported"),
    [
        (DROP_IN, "", "/etc/containerd/conf.d/*.toml"),
        (DROP_IN, "/etc/containerd/conf.d/old.toml", "/etc/containerd/conf.d/99-nvidia*.toml"),
        (DROP_IN, "/etc/containerd/conf.d/99-nvidia-2.toml", DROP_IN),
        ("/etc/containerd/mine.toml", "", "/etc/containerd/mine*.toml"),
        ("/etc/containerd/mine.toml", "/etc/containerd/mine-old.toml", "/etc/containerd/mine.toml"),
        ("/etc/containerd/con.toml", "", "/etc/containerd/con.toml"),
        ("/etc/containerd/mine.conf", "", "/etc/containerd/mine.conf"),
        ("/etc/containerd/mine[1].toml", "", "/etc/containerd/mine[1].toml"),
    ],
)
def test_import_covers_no_other_file_and_goes_with_the_drop_in(
    tmp_path: Path, drop_in: str, unread: str, imported: str
) -> None:
    node = Node(tmp_path, "2.1.9")
    node.write(MAIN, "version = 3\n")
    if unread:
        node.write(unread, "version = 3\n")
    changed = texts(node.plan(drop_in=drop_in))
    assert toml(changed[MAIN])["imports"] == [imported]
    for path, text in changed.items():
        node.write(path, text)
    removal = node.engine(drop_in).plan_removal(UnwantedConfig(("nvidia",)), None)
    assert texts(removal) == {MAIN: "version = 3\n", drop_in: ""}


def test_main_file_named_as_drop_in_does_not_import_itself(tmp_path: Path) -> None:
    node = Node(tmp_path, "2.1.9")
    node.write(MAIN, "version = 3\n")
    changed = texts(node.plan(drop_in=MAIN))
    assert list(changed) == [MAIN] and "imports" not in toml(changed[MAIN])


OURS = {"nvidia": {"options": {"BinaryName": "/usr/bin/nvidia-container-runtime"}}}


@pytest.mark.parametrize(
    ("desired", "cri", "message"),
    [
        (NVIDIA, {}, "does not find the runtime nvidia in the new"),
        (
            NVIDIA._replace(set_as_default=True),
            {"containerd": {"runtimes": OURS}},
            "still use None as default",
        ),
        (DesiredConfig(cdi=True), {"enable_cdi": False, "containerd": {"a": 1}}, "still have CDI off"),
    ],
)
def test_view_of_containerd_without_the_desired_configuration_is_refused(
    desired: DesiredConfig, cri: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message) as caught:
        must_have({"plugins": {P3: cri}}, desired, MAIN)
    assert MAIN.rpartition("/")[0] in caught.value.hint


def test_view_of_containerd_in_which_another_key_changes_is_refused() -> None:
    before, after = ({"plugins": {P3: {"max_container_log_line_size": size}}} for size in (1, 2))
    with pytest.raises(ValidationError, match=rf"than nvidia differently: plugins\.{P3}\.max_container_log"):
        must_keep(before, after, allowed_for(NVIDIA), MAIN)


def test_foreign_drop_in_that_is_not_imported_does_not_become_effective(tmp_path: Path) -> None:
    node = Node(tmp_path, "2.1.9")
    node.write(MAIN, "version = 3\n")
    node.write(DROP_IN, "version = 3\noom_score = -5\n")
    with pytest.raises(
        ConfigError, match="is not imported, and contains settings that gpunode did not write"
    ):
        node.plan()
    node.write(DROP_IN, f'version = 2\n[plugins."{P2}".containerd.runtimes.nvidia]\nruntime_type = "x"\n')
    drop_in = toml(texts(node.plan())[DROP_IN])  # only the runtime, of another version: rewritten
    assert drop_in["version"] == 3 and set(drop_in["plugins"]) == {P3}


def test_directories_that_containerd_does_not_search_for_cdi_are_reported(tmp_path: Path) -> None:
    node = Node(tmp_path, "2.1.9")
    node.write(MAIN, f'version = 3\n[plugins."{P3}"]\ncdi_spec_dirs = ["/opt/cdi", "/run/cdi"]\n')
    plan = node.plan(DesiredConfig(cdi=True))
    assert not plan.changed and not plan.switched_cdi
    assert plan.notes == (
        f"cdi_spec_dirs in {MAIN} leaves out /etc/cdi: containerd does not see a specification there",
    )


@pytest.mark.parametrize(("active", "verb"), [(True, "none"), (None, "none"), (False, "restart")])
def test_cdi_in_the_file_but_not_in_the_daemon_restarts_it(
    tmp_path: Path, active: bool | None, verb: str
) -> None:
    node = Node(tmp_path, "1.7.24")
    node.write(MAIN, f'version = 2\n[plugins."{P2}"]\nenable_cdi = true\n')
    plan = node.engine().plan(DesiredConfig(cdi=True), Active(("runc",), "runc", cdi=active))
    assert (plan.changed, plan.verb) == ((), verb)


def test_cdi_does_not_enable_a_disabled_cri(tmp_path: Path) -> None:
    node = Node(tmp_path, "2.1.9")
    node.write(MAIN, f'version = 3\ndisabled_plugins = ["{P3}"]\n')
    plan = node.plan(DesiredConfig(cdi=True))
    assert not plan.changed and "switches containerd's CRI off" in plan.notes[0]


def test_default_runtime_table_of_nvidia_ctk_legacy_mode_is_removed(tmp_path: Path) -> None:
    node = Node(tmp_path, "1.7.24")
    table = '[plugins.cri.containerd.default_runtime{0}]\n{1} = "{2}"\n'
    text = '[plugins.cri]\nsandbox_image = "p"\n'
    ours = table.format("", "runtime_type", "t") + table.format(
        ".options", "Runtime", NVIDIA.handlers[0].path
    )
    node.write(MAIN, text + ours)
    assert texts(node.engine().plan_removal(UnwantedConfig(("nvidia",)), None)) == {MAIN: text}
    node.write(MAIN, text + table.format(".options", "BinaryName", "/usr/bin/kata"))
    assert not node.engine().plan_removal(UnwantedConfig(("nvidia",)), None).changed


def test_previous_default_is_restored_only_if_no_other_file_sets_it(tmp_path: Path) -> None:
    node = Node(tmp_path, "2.1.9")
    crun = f'[plugins."{P3}".containerd]\ndefault_runtime_name = "crun"\n'
    nvidia = f'version = 3\n[plugins."{P3}".containerd]\ndefault_runtime_name = "nvidia"\n'
    node.write(MAIN, f'version = 3\nimports = ["conf.d/*.toml", "{DROP_IN}"]\n{crun}')
    node.write(DROP_IN, nvidia)
    changed = texts(node.engine().plan_removal(UnwantedConfig(("nvidia",), "crun"), None))
    assert changed[DROP_IN] == "" and toml(changed[MAIN])["imports"] == ["conf.d/*.toml"]
    node.write(MAIN, 'version = 3\nimports = ["conf.d/*.toml"]\n')
    changed = texts(node.engine().plan_removal(UnwantedConfig(("nvidia",), "crun"), None))
    assert changed == {DROP_IN: nvidia.replace('"nvidia"', '"crun"')}


def test_cgroup_driver_of_a_default_nvidia_is_kept_if_no_file_defines_runc(tmp_path: Path) -> None:
    """EKS's GPU images: overriding it with the built-in runc would separate the node from its kubelet."""
    node, handler = Node(tmp_path, "2.1.9"), NVIDIA.handlers[0]
    entry = {
        "runtime_type": "io.containerd.runc.v2",
        "options": {"BinaryName": handler.path, "SystemdCgroup": True},
    }
    node.write(
        MAIN,
        f'version = 2\n[plugins."{P2}".containerd]\ndefault_runtime_name = "nvidia"\n'
        f'[plugins."{P2}".containerd.runtimes.nvidia]\nruntime_type = "io.containerd.runc.v2"\n'
        f'options = {{ BinaryName = "{handler.path}", SystemdCgroup = true }}\n',
    )
    built_in = {"runtime_type": "io.containerd.runc.v2", "options": {"SystemdCgroup": False}}
    effective = {"plugins": {P3: {"containerd": {"runtimes": {"runc": built_in, "nvidia": entry}}}}}
    config = load_config(node.engine().host, MAIN, (2, 1, 9))
    assert runtime_table(config, effective, handler, False) == entry
