"""Plans for containerd's files, judged by `config dump` of 1.6, 1.7 and 2.x; no daemon runs."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from fixtures.corpus import CONFIGS
from gpunode.errors import ConfigError, PreconditionError
from gpunode.facts.containerd import CRI_PLUGINS
from gpunode.facts.daemons import Daemon, parse_version
from gpunode.facts.toml import Tree, dig, parse_toml, same
from gpunode.host import Host
from gpunode.runtime.containerd import ContainerdEngine, cdi_is_on, dump, runtimes_in
from gpunode.runtime.engine import DesiredConfig, Handler, Plan, UnwantedConfig
from tests.integration.conftest import path_of, require

pytestmark = [pytest.mark.full, pytest.mark.containerd]

PROGRAM = "/usr/bin/nvidia-container-runtime"
NVIDIA = DesiredConfig((Handler("nvidia", PROGRAM),))
NAMES = ("nvidia", "nvidia-cdi", "nvidia-legacy")
DRIFTED = (CONFIGS / "containerd/nvidia-ctk-drifted-v2.toml").read_text()
CURRENT = (CONFIGS / "containerd/nvidia-ctk-v2.toml").read_text()
COPY = (CONFIGS / "containerd/parts/nvidia-ctk-v2.toml").read_text()
MAIN = 'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\n  sandbox_image = "p:1"\n'


@dataclass(frozen=True)
class Node:
    """containerd's files in their own directory, and one release's program to judge them."""

    directory: Path
    binary: str
    release: tuple[int, ...]

    @property
    def main(self) -> Path:
        return self.directory / "config.toml"

    @property
    def deep(self) -> bool:
        return self.release >= (2,)

    @property
    def engine(self) -> ContainerdEngine:
        daemon = Daemon("containerd", self.binary, self.release, str(self.main), "test", "/none.sock", None)
        return ContainerdEngine(Host(), daemon)

    def write(self, name: str, text: str) -> Path:
        path = self.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("/etc/containerd", str(self.directory)))
        return path

    def seen(self) -> Tree:
        """containerd's own view, without the lists of files; a missing file is no `--config` for it."""
        tree = dump(Host(), self.binary, str(self.main) if self.main.exists() else None)
        assert tree is not None
        return {key: value for key, value in tree.items() if key not in ("imports", "version")}

    def configure(self, wanted: DesiredConfig = NVIDIA) -> Plan:
        plan = self.engine.plan(wanted, None)
        self.engine.validate(plan, wanted)
        return self._carry_out(plan)

    def unconfigure(self, unwanted: UnwantedConfig) -> Plan:
        plan = self.engine.plan_removal(unwanted, None)
        self.engine.validate(plan, None)
        return self._carry_out(plan)

    def _carry_out(self, plan: Plan) -> Plan:
        for edit in plan.changed:
            path = Path(edit.path)
            path.parent.mkdir(exist_ok=True)
            if edit.after is None:
                path.unlink()
            else:
                path.write_bytes(edit.after)
        return plan

    def files(self) -> dict[str, bytes]:
        found = (path for path in self.directory.rglob("*") if path.is_file())
        return {str(path.relative_to(self.directory)): path.read_bytes() for path in found}


@pytest.fixture(params=["1.6", "trixie", "forky"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Node:
    require("containerd")
    binary = shutil.which("containerd", path=path_of(request.param) if request.param != "1.6" else None)
    assert binary is not None
    release = parse_version(Host().run([binary, "--version"]).stdout)
    return Node(tmp_path, binary, release)


def runtimes(tree: Tree) -> Tree:
    tables = (dig(tree, "plugins", CRI_PLUGINS[number], "containerd", "runtimes") for number in (3, 2))
    return next((found for found in tables if isinstance(found, dict)), {})


def without(tree: Tree, *names: str) -> Tree:
    """The view without these runtimes; unset options of the others are dropped, which runc treats alike."""
    for name in names:
        runtimes(tree).pop(name, None)
    for entry in runtimes(tree).values():
        entry["options"] = {key: value for key, value in (entry.get("options") or {}).items() if value}
    return tree


# --- a missing file --------------------------------------------------------------------------------------


def test_missing_file_is_created_and_only_the_runtime_changes(node: Node) -> None:
    before = node.seen()
    plan = node.configure()
    assert plan.config_version == (3 if node.deep else 2)
    after = node.seen()
    assert runtimes(after)["nvidia"]["options"]["BinaryName"] == PROGRAM
    assert same(without(after, "nvidia"), without(before))
    node.unconfigure(UnwantedConfig(NAMES))
    assert same(without(node.seen()), without(before))


def test_files_that_are_not_imported_do_not_become_effective(node: Node) -> None:
    node.write("config.toml", MAIN)
    node.write("conf.d/50-other.toml", "version = 2\noom_score = -7\n")
    node.configure()
    assert node.seen()["oom_score"] == 0 and "nvidia" in runtimes(node.seen())
    node.unconfigure(UnwantedConfig(NAMES))
    assert node.main.read_text() == MAIN or not node.deep


# --- copies that NVIDIA's tools generated -----------------------------------------------------------------


def test_copy_with_the_runtime_is_kept_and_its_shadowed_settings_reported(node: Node) -> None:
    node.write("config.toml", DRIFTED)
    node.write("conf.d/99-nvidia.toml", COPY)
    plan = node.configure()
    assert not plan.changed
    assert len(plan.notes) == 1 and "sandbox_image ('registry.k8s.io/pause:3.9' there" in plan.notes[0]
    assert "--replace" in plan.notes[0]
    node.write("config.toml", CURRENT)
    assert node.configure().notes == ()


def test_replacing_a_copy_makes_the_main_file_effective(node: Node) -> None:
    node.write("config.toml", DRIFTED)
    copied = node.write("conf.d/99-nvidia.toml", COPY)
    plan = node.configure(NVIDIA._replace(replace=True))
    assert any("sandbox_image" in note for note in plan.notes)
    assert "pause:3.10" in str(node.seen()) and "pause:3.9" not in str(node.seen())
    assert set(runtimes(node.seen())) == {"runc", "nvidia"}
    if node.deep:
        assert set(parse_toml(copied.read_text(), "")["plugins"][CRI_PLUGINS[2]]) == {"containerd"}
    else:
        assert not copied.exists() and "imports" not in parse_toml(node.main.read_text(), "")
    assert not node.configure(NVIDIA._replace(replace=True)).changed


def test_replacing_a_copy_keeps_its_other_runtimes_and_default(node: Node) -> None:
    more = COPY.replace('default_runtime_name = "runc"', 'default_runtime_name = "nvidia-cdi"')
    block = re.search(
        r"\n +\[plugins\S+runtimes\.nvidia\].*?(?=\n +\[plugins\S+runtimes\.runc\])", COPY, re.S
    )
    assert block is not None
    more += block[0].replace("runtimes.nvidia", "runtimes.nvidia-cdi").replace('-runtime"', '-runtime.cdi"')
    node.write("config.toml", DRIFTED)
    node.write("conf.d/99-nvidia.toml", more)
    before = node.seen()
    assert runtimes(before)["nvidia-cdi"]["options"]["BinaryName"] == f"{PROGRAM}.cdi"
    node.configure(NVIDIA._replace(replace=True))
    assert set(runtimes(node.seen())) == {"runc", "nvidia", "nvidia-cdi"}
    assert "'default_runtime_name': 'nvidia-cdi'" in str(node.seen())


def test_undo_deletes_a_redundant_copy(node: Node) -> None:
    node.write("config.toml", CURRENT)
    copied = node.write("conf.d/99-nvidia.toml", COPY)
    before = node.seen()
    plan = node.unconfigure(UnwantedConfig(NAMES))
    assert not copied.exists() and plan.notes == ()
    assert "imports" not in parse_toml(node.main.read_text(), "")
    assert same(without(node.seen()), without(before, "nvidia"))


def test_undo_keeps_a_copy_that_shadows_settings_and_names_them(node: Node) -> None:
    node.write("config.toml", DRIFTED)
    copied = node.write("conf.d/99-nvidia.toml", COPY)
    before = node.seen()
    plan = node.unconfigure(UnwantedConfig(NAMES))
    assert copied.exists() and len(plan.notes) == 1 and "still hides sandbox_image" in plan.notes[0]
    assert same(without(node.seen()), without(before, "nvidia"))


@pytest.mark.parametrize("place", ["conf.d", "config.d"])
def test_undo_removes_an_nvidia_drop_in_that_is_not_imported(node: Node, place: str) -> None:
    node.write("config.toml", MAIN)
    stale = node.write(f"{place}/99-nvidia.toml", COPY)
    mine = node.write(f"{place}/50-mine.toml", "version = 2\n")
    assert any(str(stale) in note for note in node.engine.plan(DesiredConfig(cdi=node.deep), None).notes)
    plan = node.unconfigure(UnwantedConfig(NAMES))
    assert not stale.exists() and mine.exists() and str(stale) in plan.notes[0]
    assert node.main.read_text() == MAIN


# --- several handlers, CDI, defaults ----------------------------------------------------------------------


def test_several_handlers_inherit_the_same_options_and_are_removed_together(node: Node) -> None:
    systemd = "[plugins.{0}.containerd.runtimes.runc]\n  runtime_type = 'io.containerd.runc.v2'\n"
    systemd += "[plugins.{0}.containerd.runtimes.runc.options]\n  SystemdCgroup = true\n"
    node.write("config.toml", MAIN + systemd.replace("{0}", f'"{CRI_PLUGINS[2]}"'))
    before = node.seen()
    handlers = tuple(
        Handler(name, f"{PROGRAM}{end}") for name, end in zip(NAMES, ("", ".cdi", ".legacy"), strict=True)
    )
    node.configure(DesiredConfig(handlers, set_as_default=True))
    found = runtimes(node.seen())
    assert [found[handler.name]["options"]["BinaryName"] for handler in handlers] == [
        handler.path for handler in handlers
    ]
    assert all(found[name]["options"]["SystemdCgroup"] is True for name in NAMES)
    assert not node.configure(DesiredConfig(handlers, set_as_default=True)).changed
    node.unconfigure(UnwantedConfig(NAMES))
    assert same(without(node.seen()), without(before))


def test_cdi_alone_changes_nothing_else_and_is_removed_again(node: Node) -> None:
    if node.release < (1, 7):
        with pytest.raises(PreconditionError, match="no CDI"):
            node.configure(DesiredConfig(cdi=True))
        return
    text = MAIN + "  enable_cdi = false\n" if node.deep else MAIN
    node.write("config.toml", text)
    before = node.seen()
    plan = node.configure(DesiredConfig(cdi=True))
    assert plan.switched_cdi and cdi_is_on(node.seen())
    assert runtimes_in(node.seen()) == runtimes_in(before)
    assert not node.configure(DesiredConfig(cdi=True)).changed
    node.unconfigure(UnwantedConfig((), cdi=True))
    assert same(node.seen(), before)
    assert node.main.read_text() == text


def test_snapshotter_ignored_by_containerd_stays_ignored(node: Node) -> None:
    node.write("config.toml", (CONFIGS / "containerd/proxy-plugins-v2.toml").read_text())
    before = node.seen()
    node.configure()
    assert same(without(node.seen(), "nvidia"), without(before))
    assert not node.configure().changed
    node.unconfigure(UnwantedConfig(NAMES))
    assert same(without(node.seen()), without(before))


# --- refusals ---------------------------------------------------------------------------------------------


def test_file_already_refused_by_containerd_is_reported_as_such(node: Node) -> None:
    node.write("config.toml", MAIN.replace('"p:1"', "3"))
    before = node.files()
    with pytest.raises(ConfigError, match=r"refuses .*config\.toml as it is") as caught:
        node.configure()
    assert "/tmp/gpunode" not in caught.value.message and "config dump" in caught.value.hint
    assert node.files() == before


def test_commands_in_the_hint_make_a_version_1_file_configurable(node: Node) -> None:
    node.write(
        "config.toml",
        '[plugins]\n  [plugins.cri]\n    sandbox_image = "p:9"\n  [plugins."cri".cni]\n    bin_dir = "/b"\n',
    )
    if not node.deep:
        node.configure()
        assert "p:9" in str(node.seen()) and "nvidia" in runtimes(node.seen())
        return
    with pytest.raises(ConfigError, match="ignores its CRI settings") as caught:
        node.configure()
    assert Host().run(["sh", "-c", caught.value.hint.partition(": ")[2]]).ok
    node.configure()
    assert "p:9" in str(node.seen()) and "nvidia" in runtimes(node.seen())
