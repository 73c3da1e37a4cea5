"""The TOML guard: an edit makes the requested change, or the file is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from hypothesis import given
from hypothesis import strategies as st

from gpunode.errors import ConfigError
from gpunode.facts.containerd import CRI_PLUGINS, load_config
from gpunode.facts.toml import Tree, mutated, same
from gpunode.host import Host
from gpunode.output.typed import toml
from gpunode.runtime import toml_edit
from gpunode.runtime.containerd_files import ContainerdState
from gpunode.runtime.containerd_plan import configured
from gpunode.runtime.containerd_removal import removed
from gpunode.runtime.engine import DesiredConfig, Handler, UnwantedConfig

P2 = CRI_PLUGINS[2]


def add_runtime(tree: Tree) -> None:
    cri = tree.setdefault("plugins", {}).setdefault(P2, {}).setdefault("containerd", {})
    cri["default_runtime_name"] = "nvidia"
    cri.setdefault("runtimes", {})["nvidia"] = {"runtime_type": "r2", "options": {"BinaryName": "/n"}}


def test_dotted_key_before_a_scalar_is_kept() -> None:
    # tomlkit 0.15.2 alone moves `root` into the new table here
    text = f'version = 2\nplugins."{P2}".sandbox_image = "p"\nroot = "/x"\n'
    after = toml(toml_edit.edit(text, add_runtime, "config.toml"))
    assert after == mutated(toml(text), add_runtime)
    assert after["root"] == "/x"


def test_comments_order_and_indentation_are_kept() -> None:
    text = (
        "# head\nversion = 2 # two\n\n[plugins]\n"
        f'  [plugins."{P2}".containerd.runtimes.runc] # runc\n    runtime_type = "r"\n'
        "\n# tail\n[grpc]\nuid = 0\n"
    )
    after = toml_edit.edit(text, add_runtime, "config.toml")
    assert [line for line in after.splitlines() if line in text.splitlines()] == text.splitlines()
    assert f'  [plugins."{P2}".containerd.runtimes.nvidia]\n' in after


def test_file_that_cannot_be_edited_is_refused_by_name() -> None:
    text = f'[plugins."{P2}"]\nsandbox_image = "p"\ncontainerd.default_runtime_name = """\nrunc"""\n'
    with pytest.raises(ConfigError, match=r"^config\.toml can't be edited") as caught:
        toml_edit.edit(text, add_runtime, "config.toml", "use a drop-in")
    assert (caught.value.code, caught.value.hint) == ("toml-guard", "use a drop-in")
    with pytest.raises(ConfigError) as caught:
        toml_edit.edit(text, add_runtime, "config.toml")
    below = f'below [plugins."{P2}".containerd] set'
    assert caught.value.hint == (
        f'in config.toml, {below} default_runtime_name = "nvidia", and {below} runtimes = '
        '{ nvidia = { runtime_type = "r2", options = { BinaryName = "/n" } } }; '
        "then run the same command again"
    )


def test_unparsable_file_has_line_and_column() -> None:
    with pytest.raises(ConfigError, match=r"^config\.toml:2:9: "):
        toml_edit.edit("version = 2\n[plugins\n", add_runtime, "config.toml")


def test_no_change_gives_the_same_text() -> None:
    text = 'version   =  2 # odd\n["grpc"]\n'
    assert toml_edit.edit(text, lambda tree: None, "config.toml") == text


def test_types_matter_when_trees_are_compared() -> None:
    assert not same({"a": 1}, {"a": True})
    assert not same({"a": 1}, {"a": 1.0})
    assert same({"a": float("nan")}, {"a": float("nan")})


# --- files of the shapes that containerd's users write ---------------------------------------------------

scalars: st.SearchStrategy[Any] = st.one_of(
    st.booleans(),
    st.integers(-9, 99),
    st.text("abc .#[]=\"'\\é\n", max_size=6),
    st.lists(st.text("ab", max_size=2), max_size=2),
)
tables = st.dictionaries(st.sampled_from(["snapshotter", "no_pivot", "a b", "x"]), scalars, max_size=3)


@st.composite
def documents(draw: st.DrawFn) -> str:
    """A config.toml: headers or dotted keys, natural or shuffled order, indented or not, with comments."""
    runtime = st.fixed_dictionaries(
        {"runtime_type": st.sampled_from(["io.containerd.runc.v2", "io.containerd.kata.v2"])},
        optional={"options": st.fixed_dictionaries({}, optional={"SystemdCgroup": st.booleans()})},
    )
    names = st.sampled_from(["runc", "kata", "crun"])
    cri: dict[str, Any] = draw(tables)
    if draw(st.booleans()):
        cri["containerd"] = {**draw(tables), "runtimes": draw(st.dictionaries(names, runtime, max_size=3))}
    tree = {"grpc": draw(tables), "plugins": {"io.containerd.x.v1.other": draw(tables), P2: cri}}
    shuffled = draw(st.randoms(use_true_random=False)) if draw(st.booleans()) else None
    dotted = draw(st.booleans())
    blocks = _blocks(tree, (), dotted, draw(st.sampled_from(["", "  "])))
    if shuffled is not None:
        random.Random(shuffled.random()).shuffle(blocks)
    return "# top\nversion = 2\nroot = '/r'\n" + "".join(blocks)


def _blocks(tree: dict[str, Any], path: tuple[str, ...], dotted: bool, indent: str) -> list[str]:
    """Text blocks, one per header; with `dotted` a table of scalars is written into its parent's block."""
    inline = {key: value for key, value in tree.items() if dotted and path and _only_scalars(value)}
    own: dict[tuple[str, ...], Any] = {}
    own |= {(key,): value for key, value in tree.items() if not isinstance(value, dict)}
    own |= {(key, inner): value for key, table in inline.items() for inner, value in table.items()}
    found = []
    if path and (own or not tree):
        pad = indent * (len(path) - 1)
        lines = [
            f"{pad}{_dotted(key)} = {tomlkit.item(value).as_string()} # c\n" for key, value in own.items()
        ]
        found.append(f"\n{pad}[{_dotted(path)}]\n" + "".join(lines))
    for key, value in tree.items():
        if isinstance(value, dict) and key not in inline:
            found += _blocks(value, (*path, key), dotted, indent)
    return found


def _only_scalars(value: Any) -> bool:
    return (
        isinstance(value, dict) and bool(value) and not any(isinstance(one, dict) for one in value.values())
    )


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(tomlkit.key(key).as_string() for key in path)


def _state(text: str, release: tuple[int, ...], tmp: Any) -> ContainerdState:
    root = tmp / "root"
    (root / "etc/containerd").mkdir(parents=True, exist_ok=True)
    (root / "etc/containerd/config.toml").write_text(text)
    config = load_config(Host(root), "/etc/containerd/config.toml", release)
    return ContainerdState(config, {config.path: text}, drop_in="/etc/containerd/conf.d/99-nvidia.toml")


@pytest.mark.full
@given(text=documents(), default=st.booleans())
def test_configure_changes_only_our_keys_and_unconfigure_restores(
    text: str, default: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp = tmp_path_factory.mktemp("toml")
    before = toml(text)
    desired = DesiredConfig((Handler("nvidia", "/usr/bin/nvidia-container-runtime"),), default)
    try:
        after = configured(_state(text, (1, 6), tmp), desired).texts["/etc/containerd/config.toml"]
    except ConfigError as error:
        assert error.code == "toml-guard"
        return
    assert after is not None
    tree = toml(after)
    table = tree["plugins"][P2]["containerd"]
    assert table["runtimes"].pop("nvidia")["options"]["BinaryName"] == desired.handlers[0].path
    if default:
        assert table.pop("default_runtime_name") == "nvidia"
    spelled = before["plugins"].get(P2, {}).get("containerd", {}).get("runtimes")
    if not spelled:
        assert table["runtimes"].pop("runc") == {"runtime_type": "io.containerd.runc.v2"}
    assert _pruned(tree) == _pruned(before)
    again = configured(_state(after, (1, 6), tmp), desired).texts
    assert all(new == after for new in again.values())
    outcome = removed(_state(after, (1, 6), tmp), UnwantedConfig(("nvidia",)), lambda one, other: None, {})
    back = outcome.texts["/etc/containerd/config.toml"]
    assert back is not None
    left = toml(back)
    if not spelled:
        left["plugins"][P2]["containerd"]["runtimes"].pop("runc")
    assert _pruned(left) == _pruned(before)


THREE = tuple(
    Handler(name, f"/usr/bin/nvidia-container-runtime{end}")
    for name, end in (("nvidia", ""), ("nvidia-cdi", ".cdi"), ("nvidia-legacy", ".legacy"))
)


@pytest.mark.full
@given(text=documents(), default=st.booleans(), cdi=st.booleans(), version=st.sampled_from([2, 3, 4]))
def test_drop_in_contains_only_ours_and_is_removed_again(
    text: str, default: bool, cdi: bool, version: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tmp = tmp_path_factory.mktemp("toml")
    release, plugin = ((2, 1, 9), P2) if version == 2 else ((2, 3, 5), CRI_PLUGINS[3])
    text = text.replace("version = 2", f"version = {version}").replace(P2, plugin)
    desired = DesiredConfig(THREE, default, cdi)
    state = _state(text, release, tmp)
    texts = dict(configured(state, desired).texts)
    drop_in = toml(texts[state.drop_in] or "")
    cri = drop_in["plugins"][plugin]
    assert drop_in["version"] == version and drop_in.keys() == {"version", "plugins"}
    assert cri["containerd"]["runtimes"].keys() == {handler.name for handler in THREE}
    assert cri.keys() == {"containerd"} and ("default_runtime_name" in cri["containerd"]) is default
    tables = [dict(table, options=None) for table in cri["containerd"]["runtimes"].values()]
    assert tables[0] == tables[1] == tables[2]
    main = toml(texts[state.config.path] or "")
    assert main.pop("imports") == ["/etc/containerd/conf.d/*.toml"] and main == toml(text)
    again = _with_drop_in(texts, release, tmp)
    assert not configured(again, desired).texts
    unwanted = UnwantedConfig(tuple(handler.name for handler in THREE))
    left = removed(again, unwanted, lambda one, other: None, {}).texts
    assert left[state.drop_in] is None
    assert toml(left[state.config.path] or "") == toml(text)


def _with_drop_in(texts: dict[str, str | None], release: tuple[int, ...], tmp: Path) -> ContainerdState:
    """The state once these texts are written."""
    (tmp / "root/etc/containerd/conf.d").mkdir(exist_ok=True)
    for path, text in texts.items():
        (tmp / "root" / path[1:]).write_text(text or "")
    config = load_config(Host(tmp / "root"), "/etc/containerd/config.toml", release)
    return ContainerdState(
        config, {path: text or "" for path, text in texts.items()}, drop_in=config.files[-1]
    )


def _pruned(tree: Any) -> Any:
    """Without tables that hold nothing: they mean nothing to containerd."""
    if not isinstance(tree, dict):
        return tree
    pruned = {key: _pruned(value) for key, value in tree.items()}
    return {key: value for key, value in pruned.items() if value != {}}


def test_line_ends_and_byte_order_mark_are_kept() -> None:
    text = f'\ufeffversion = 2\r\n[plugins."{P2}"]\r\nsandbox_image = "p"\r\n'
    after = toml_edit.edit(text, add_runtime, "config.toml")
    assert after.startswith("\ufeffversion = 2\r\n") and after.count("\ufeff") == 1
    assert after.count("\n") == after.count("\r\n") > text.count("\n")
    body = text.removeprefix("\ufeff")
    assert toml(after.removeprefix("\ufeff")) == mutated(toml(body), add_runtime)


def test_key_that_a_comment_shows_as_well_is_changed_in_its_own_line() -> None:
    def mutate(tree: Tree) -> None:
        tree["a"] = 3

    assert toml_edit.edit("#a = 1\na = 2\n", mutate, "f", beside_comments=True) == "#a = 1\na = 3\n"


def test_missing_import_is_refused(tmp_path: Path) -> None:
    path, text = "/config.toml", 'version = 2\nimports = ["/gone.toml"]\n'
    (tmp_path / "config.toml").write_text(text)
    config = load_config(Host(tmp_path, environ={}), path, (1, 6, 20))
    state = ContainerdState(config=config, texts={path: text})
    with pytest.raises(ConfigError, match=r"gone\.toml, which does not exist"):
        configured(state, DesiredConfig((Handler("nvidia", "/n"),)))


def test_file_that_tomlkit_cannot_edit_is_refused() -> None:
    def empty_table(tree: Tree) -> None:
        tree["z"] = {}

    with pytest.raises(ConfigError, match="was not changed"):
        toml_edit.edit("z = []\n\n[a]\n", empty_table, "config.toml")


def test_key_of_a_table_made_by_dotted_keys_is_added_to_them() -> None:
    line = f'  plugins."{P2}".containerd.x = 1 # c\n'
    text = f'version = 2\n{line}plugins."io.containerd.internal.v1.opt".path = "/opt"\n'

    def mutate(tree: Tree) -> None:
        tree["plugins"][P2]["enable_cdi"] = True

    after = toml_edit.put(text, ("plugins", P2, "enable_cdi"), True)
    added = f'  plugins."{P2}".enable_cdi = true\n'
    assert after == text.replace(line, added + line)
    edited = toml_edit.edit(text, mutate, "config.toml")
    assert [one for one in edited.splitlines() if "enable_cdi" not in one] == text.splitlines()
