"""Imports as containerd resolves them, and the line of a key in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpunode.errors import ConfigError
from gpunode.facts.containerd import covers, expand_import, load_config
from gpunode.facts.toml import LARGEST, line_of_key, line_of_text, parse_toml
from gpunode.host import Host

MAIN = "/etc/containerd/config.toml"


@pytest.mark.parametrize(
    ("pattern", "path", "read"),
    [
        ("/etc/containerd/conf.d/*.toml", "/etc/containerd/conf.d/99.toml", True),
        ("conf.d/*.toml", "/etc/containerd/conf.d/99.toml", True),
        ("../containerd/conf.d/99.toml", "/etc/containerd/conf.d/99.toml", True),
        ("conf.d/*", "/etc/containerd/conf.d/deep/99.toml", False),
        ("*/99.toml", "/etc/containerd/conf.d/99.toml", True),
        ("conf.d/9?.toml", "/etc/containerd/conf.d/99.toml", False),  # no star, no glob
        ("conf.d/9?*", "/etc/containerd/conf.d/99.toml", True),
        ("conf.d/[^a]*.toml", "/etc/containerd/conf.d/99.toml", True),
        ("conf.d/[^9]*.toml", "/etc/containerd/conf.d/99.toml", False),
        ("conf.d/[!9]*.toml", "/etc/containerd/conf.d/99.toml", True),  # Go has no such negation
        ("conf.d/\\**.toml", "/etc/containerd/conf.d/99.toml", False),
        ("conf.d/[9-0]*.toml", "/etc/containerd/conf.d/99.toml", False),
        ("conf.d/[*", "/etc/containerd/conf.d/[x", False),
    ],
)
def test_import_pattern_covers_the_files_containerd_reads(
    pattern: str, path: str, read: bool, tmp_path: Path
) -> None:
    assert covers(MAIN, pattern, path) is read
    file = tmp_path / path[1:]
    file.parent.mkdir(parents=True)
    file.write_text("")
    assert (path in expand_import(Host(tmp_path, environ={}), MAIN, pattern)) is read


@pytest.mark.parametrize(
    ("release", "beside"), [((1, 6, 20), False), ((1, 6, 29), True), ((1, 7, 15), False), ((2, 1, 9), True)]
)
def test_relative_glob_depends_on_the_release(release: tuple[int, ...], beside: bool) -> None:
    assert covers(MAIN, "conf.d/*.toml", "/etc/containerd/conf.d/99.toml", release) is beside
    assert covers(MAIN, "conf.d/99.toml", "/etc/containerd/conf.d/99.toml", release)


def test_missing_import_is_listed_with_its_importer(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('version = 3\nimports = ["b.toml"]\n')
    (tmp_path / "b.toml").write_text('imports = ["gone.toml", "none/*.toml"]\n')
    found = load_config(Host(tmp_path, environ={}), "/a.toml").missing_imports
    assert [(one.path, one.importer, one.pattern) for one in found] == [
        ("/gone.toml", "/b.toml", "gone.toml")
    ]


def test_oversized_file_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(ConfigError, match="too large for an engine's configuration") as caught:
        parse_toml("#" * (LARGEST + 1), "/etc/containerd/config.toml")
    assert caught.value.hint == "inspect the file: head -c 500 /etc/containerd/config.toml"


TEXT = """\
version = 2
# plugins.cri = "no"
[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    sandbox_image = "p"
    containerd.default_runtime_name = 'runc' # dotted
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes]
    kata = { runtime_type = "k" }
[[other]]
version = 9
"""


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("version",), 1),
        (("plugins",), 3),
        (("plugins", "io.containerd.grpc.v1.cri", "sandbox_image"), 5),
        (("plugins", "io.containerd.grpc.v1.cri", "containerd", "default_runtime_name"), 6),
        (("plugins", "io.containerd.grpc.v1.cri", "containerd", "runtimes"), 7),
        (("plugins", "io.containerd.grpc.v1.cri", "containerd", "runtimes", "kata", "options"), 8),
        (("other", "version"), 10),
        (("absent",), 0),
    ],
)
def test_line_of_a_key(path: tuple[str, ...], line: int) -> None:
    assert line_of_key(TEXT, path) == line
    assert line_of_key(TEXT.replace("\n", "\r\n"), path) == line


def test_line_of_a_text_skips_comments() -> None:
    assert line_of_text("# 'a'\nimports = [\n  'a',\n]\n", "a") == 3
    assert line_of_text("", "a") == 0
