"""Paths below a process's root directory: each response about them comes from the file that was opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpunode.host import Host, trust
from gpunode.host.files import READ_BYTES
from tests.security.container import process_below

OTHER = 61001


@pytest.fixture
def inside(place: Path) -> Iterator[str]:
    """The root directory of a container's process, which is `place`/rootfs."""
    root = place / "rootfs"
    root.mkdir()
    with process_below(root) as pid:
        yield f"/proc/{pid}/root"


@pytest.fixture
def exchanged(place: Path, inside: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory that the container replaces with a link to the node's as soon as its path is resolved.

    Both directories have the same names for different files.
    """
    (place / "rootfs/box/dir").mkdir(parents=True)
    (place / "rootfs/box/file").write_text("own")
    (place / "rootfs/box/link").symlink_to("own")
    (place / "rootfs/box/gone").write_text("own")
    (place / "node/file").mkdir(parents=True)
    (place / "node/dir").write_text("of the node")
    (place / "node/link").symlink_to("of-the-node")
    original = trust.opened_as

    @contextmanager
    def slow(uid: int, root: str, path: str, *, follow: bool = True) -> Iterator[tuple[int, str]]:
        with original(uid, root, path, follow=follow) as opened:
            (place / "rootfs/box").rename(place / "rootfs/before")
            (place / "rootfs/box").symlink_to(place / "node")
            yield opened

    monkeypatch.setattr(trust, "opened_as", slow)
    return f"{inside}/box"


@pytest.mark.parametrize(
    ("look", "name", "answer"),
    [
        (Host.exists, "gone", True),
        (Host.is_file, "file", True),
        (Host.is_file, "dir", False),
        (Host.is_dir, "dir", True),
        (Host.is_dir, "file", False),
        (Host.is_symlink, "link", True),
        (Host.is_symlink, "gone", False),
        (Host.readlink, "link", "own"),
        (Host.readlink, "gone", None),
    ],
)
def test_directory_replaced_by_a_symlink_discloses_nothing_of_the_node(
    exchanged: str, look: Callable[[Host, str], object], name: str, answer: object
) -> None:
    assert look(Host(), f"{exchanged}/{name}") == answer


def test_missing_path_is_neither_a_file_nor_an_error(place: Path, inside: str) -> None:
    host, rootfs = Host(), place / "rootfs"
    (rootfs / "circle").symlink_to("circle")
    (rootfs / "file").write_text("")
    for name in ("circle", "missing", "missing/x", "file/x", "x" * 300, "a\0b"):
        path = f"{inside}/{name}"
        assert (host.exists(path), host.is_file(path), host.is_dir(path)) == (False, False, False)
    for name in ("missing", "missing/x", "file", "file/x", "a\0b"):
        assert not host.is_symlink(f"{inside}/{name}") and host.readlink(f"{inside}/{name}") is None
    assert host.is_symlink(f"{inside}/circle") and host.readlink(f"{inside}/circle") == "circle"


def test_tail_of_a_file_of_any_size_is_read(place: Path, inside: str) -> None:
    log = place / "rootfs/log"
    with log.open("wb") as stream:
        stream.truncate(READ_BYTES)
        stream.seek(READ_BYTES)
        stream.write(b"the last line\n")
    assert Host().read_tail(f"{inside}/log", 5) == "line\n"
    assert Host().as_user(OTHER).read_tail(str(log), 5) == "line\n"


def test_tail_of_a_proc_file_is_limited_to_its_size(place: Path) -> None:
    """Which is none: root would read more of it than the user."""
    assert Host().as_user(OTHER).read_tail("/proc/version", 100) == ""
