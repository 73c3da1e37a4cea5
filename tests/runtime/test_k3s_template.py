"""The template of k3s and rke2 as text: additions, removals, and the predicted rendering."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpunode.facts.toml import parse_toml
from gpunode.runtime import k3s

BASE = """\
version = 3
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
"""
INCLUDE = '{{ template "base" . }}\n'
RUNTIMES = "plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes"
TABLE = f'[{RUNTIMES}.nvidia]\nruntime_type = "io.containerd.runc.v2"\n'
LINES = st.sampled_from(["", "# note", "[debug]", 'level = "info"', '{{- template "base" . -}}', "{{ .X }}"])


@given(st.lists(LINES, max_size=6), st.booleans())
def test_added_tables_are_removed_again(lines: list[str], guard: bool) -> None:
    text = "\n".join(lines).rstrip() + "\n"
    tables = k3s.guarded(TABLE, "nvidia") if guard else TABLE
    once = k3s.with_tables(text, tables)
    assert k3s.with_tables(once, tables) == once
    assert parse_toml(k3s.tables_of(once), "ours") == parse_toml(TABLE, "ours")
    assert (k3s.without_tables(once) or "").rstrip() == text.rstrip()


def test_template_created_by_gpunode_is_removed_with_its_last_table() -> None:
    made = k3s.with_tables(None, TABLE)
    assert k3s.without_tables(made) is None
    assert k3s.without_tables(k3s.with_tables(INCLUDE, TABLE)) is not None
    assert k3s.without_tables(f"{INCLUDE}[debug]\n") == f"{INCLUDE}[debug]\n"


@pytest.mark.parametrize(
    "header",
    [
        f"[{RUNTIMES}.nvidia]",
        f"  [{RUNTIMES}.'nvidia'.options]",
        '[plugins."io.containerd.grpc.v1.cri".containerd.runtimes."nvidia"]',
    ],
)
def test_line_of_a_foreign_handler_is_found(header: str) -> None:
    assert k3s.line_of_handler(f"{INCLUDE}# one\n{header}\n", "nvidia") == 3
    assert k3s.line_of_handler(f"{INCLUDE}{header}\n", "nvidia-cdi") is None
    ours = k3s.with_tables(INCLUDE, TABLE)
    assert k3s.line_of_handler(ours, "nvidia") is None
    assert k3s.line_of_handler(f"{ours}{header}\n", "nvidia") == ours.count("\n") + 1


def test_detected_runtimes_count_if_the_base_or_their_loop_is_included() -> None:
    assert k3s.registers_found(INCLUDE)
    assert k3s.registers_found("{{ range $k, $v := .ExtraRuntimes }}{{ end }}")
    full = k3s.with_tables(BASE, k3s.guarded(TABLE, "nvidia"))
    assert not k3s.registers_found(full)  # our own condition includes nothing


def test_guarded_table_is_not_rendered_if_the_base_has_it() -> None:
    text = k3s.with_tables(INCLUDE, k3s.guarded(TABLE, "nvidia"))
    alone = k3s.rendered(text, BASE)
    assert alone is not None and alone.count("runtimes.nvidia]") == 1
    both = k3s.rendered(text, f"{BASE}[{RUNTIMES}.'nvidia']\n")
    assert both is not None and parse_toml(both, "rendered")
    assert k3s.rendered("{{ if .X }}{{ end }}", BASE) is None


@pytest.mark.parametrize("text", [None, INCLUDE, f"# top\n{INCLUDE}[debug]\n", k3s.with_tables(None, TABLE)])
def test_base_is_recovered_from_the_rendered_file(text: str | None) -> None:
    now = k3s.rendered(text, BASE)
    assert now is not None
    assert (k3s.base_of(text, now) or "").strip() == BASE.strip()


def test_template_with_its_own_logic_gives_no_base() -> None:
    assert k3s.base_of(f"{INCLUDE}{{{{ .X }}}}\n", BASE) is None
    assert k3s.base_of(f"{INCLUDE}{INCLUDE}", BASE) is None
    assert k3s.base_of(f"# other\n{INCLUDE}", BASE) is None
