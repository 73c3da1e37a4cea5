"""Edits of the toolkit's config.toml: the requested settings are there, and every other byte is unchanged."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from gpunode.errors import ConfigError
from gpunode.facts.toml import dig
from gpunode.facts.toolkit import KEYS, Key, names_in, parsed, wrong
from gpunode.output.typed import toml
from gpunode.runtime.toolkit_file import with_settings, without_settings

# the form in which NVIDIA's packages ship it (Debian, toolkit 1.17)
PACKAGED = """\
#accept-nvidia-visible-devices-as-volume-mounts = false
#accept-nvidia-visible-devices-envvar-when-unprivileged = true
disable-require = false
supported-driver-capabilities = "compat32,compute,display,graphics,ngx,utility,video"
#swarm-resource = "DOCKER_RESOURCE_GPU"

[nvidia-container-cli]
#debug = "/var/log/nvidia-container-toolkit.log"
environment = []
#ldcache = "/etc/ld.so.cache"
ldconfig = "@/sbin/ldconfig"
load-kmods = true
#no-cgroups = false
#path = "/usr/bin/nvidia-container-cli"
#root = "/run/nvidia/driver"
#user = "root:video"

[nvidia-container-runtime]
#debug = "/var/log/nvidia-container-runtime.log"
log-level = "info"
mode = "auto" # as the package has it
runtimes = ["docker-runc", "runc", "crun"]

[nvidia-container-runtime.modes]

[nvidia-container-runtime.modes.cdi]
annotation-prefixes = ["cdi.k8s.io/"]
default-kind = "nvidia.com/gpu"
spec-dirs = ["/etc/cdi", "/var/run/cdi"]

[nvidia-container-runtime.modes.csv]
mount-spec-path = "/etc/nvidia-container-runtime/host-files-for-container.d"

[nvidia-container-runtime-hook]
path = "nvidia-container-runtime-hook"
skip-mode-detection = false

[nvidia-ctk]
path = "nvidia-ctk"
"""
PATH = "config.toml"
TEXTS = st.text("abcxyz0-/_ .=#\"'\\é", max_size=12)


@st.composite
def settings(draw: st.DrawFn) -> dict[tuple[str, ...], Any]:
    """Any values of the right types for some keys."""
    chosen: list[Key] = draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True))
    kinds = {"bool": st.booleans(), "string": TEXTS, "list": st.lists(TEXTS, max_size=3)}
    return {key.path: draw(kinds[key.kind]) for key in chosen}


@st.composite
def files(draw: st.DrawFn) -> str:
    """The packaged file as a user may have edited it: lines removed, own comments, other line ends."""
    lines = PACKAGED.splitlines()
    gone = draw(st.sets(st.sampled_from([n for n, line in enumerate(lines) if line[:1] not in ("[", "")])))
    noted = draw(st.sets(st.sampled_from(range(len(lines)))))
    kept = []
    for number, line in enumerate(lines):
        kept += [f"  # note {number}: mode = 'x' [y]"] if number in noted else []
        kept += [] if number in gone else [line]
    end = draw(st.sampled_from(["\n", "\r\n"]))
    bom = draw(st.sampled_from(["", "\ufeff"]))
    return bom + end.join(kept) + draw(st.sampled_from([end, ""]))


def loaded(text: str) -> dict[str, Any]:
    return toml(text.removeprefix("\ufeff"))


@how(max_examples=40)
@given(files(), settings())
def test_only_the_requested_settings_change(text: str, desired: dict[tuple[str, ...], Any]) -> None:
    before, after = loaded(text), with_settings(text, PATH, desired)
    tree = loaded(after)
    assert [dig(tree, *path) for path in desired] == list(desired.values())
    names = {".".join(path) for path in desired}
    assert set(names_in(tree)) == set(names_in(before)) | names
    for name in set(names_in(before)) - names:
        assert dig(tree, *name.split(".")) == dig(before, *name.split("."))


@how(max_examples=40)
@given(files(), settings())
def test_every_comment_and_every_other_line_is_kept(text: str, desired: dict[tuple[str, ...], Any]) -> None:
    text, after = text.removeprefix("\ufeff"), with_settings(text, PATH, desired).removeprefix("\ufeff")
    changed = {path[-1] for path in desired}
    kept = [line for line in text.split("\n") if line.partition("=")[0].strip() not in changed]
    there = iter([*after.split("\n"), ""])
    missing = [line for line in kept if not any(line.rstrip("\r") == one.rstrip("\r") for one in there)]
    assert missing == []  # all of them, in their order


@how(max_examples=40)
@given(files(), settings())
def test_setting_twice_equals_once_and_unsetting_keeps_the_rest(
    text: str, desired: dict[tuple[str, ...], Any]
) -> None:
    once = with_settings(text, PATH, desired)
    assert with_settings(once, PATH, desired) == once
    tree = loaded(without_settings(once, PATH, list(desired)))
    names = {".".join(path) for path in desired}
    assert set(names_in(tree)) == set(names_in(loaded(text))) - names


@how(max_examples=40)
@given(settings())
def test_key_added_and_removed_restores_the_packaged_bytes(
    desired: dict[tuple[str, ...], Any],
) -> None:
    there = set(names_in(loaded(PACKAGED)))
    shown = {path: value for path, value in desired.items() if f"#{path[-1]} =" in PACKAGED}
    new = {path: value for path, value in shown.items() if ".".join(path) not in there}
    assert without_settings(with_settings(PACKAGED, PATH, new), PATH, list(new)) == PACKAGED


def test_new_key_is_added_below_its_commented_example() -> None:
    after = with_settings(PACKAGED, PATH, {("nvidia-container-cli", "no-cgroups"): True})
    assert after == PACKAGED.replace("#no-cgroups = false\n", "#no-cgroups = false\nno-cgroups = true\n")
    debug = with_settings(PACKAGED, PATH, {("nvidia-container-runtime", "debug"): "/x"})
    line = '#debug = "/var/log/nvidia-container-runtime.log"\n'
    assert debug == PACKAGED.replace(line, line + 'debug = "/x"\n')


def test_missing_table_is_appended_after_an_empty_line() -> None:
    after = with_settings(PACKAGED, PATH, {("features", "disable-imex-channel-creation"): True})
    assert after == PACKAGED + "\n[features]\ndisable-imex-channel-creation = true\n"


def test_value_in_place_of_a_table_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"config\.toml: nvidia-container-runtime is a value") as caught:
        with_settings('nvidia-container-runtime = "x"\n', PATH, {("nvidia-container-runtime", "mode"): "cdi"})
    assert caught.value.hint == "take it out: gpunode toolkit config unset nvidia-container-runtime"


def test_every_default_is_valid_in_the_schema() -> None:
    for key in KEYS:
        value = list(key.default) if isinstance(key.default, tuple) else key.default
        assert value is None or wrong(key, value, {}) == "", key.name
        text = {"bool": "true", "list": "a,b", "string": "x"}[key.kind]
        assert parsed(key, text) == {"bool": True, "list": ["a", "b"], "string": "x"}[key.kind]
