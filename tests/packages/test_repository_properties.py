"""With any repositories on a node: after the plan there is exactly one, and a second plan is empty."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunode.host import Host
from gpunode.packages.apt import Apt, AptPaths
from gpunode.packages.repository import (
    SUFFIX,
    AptShelf,
    EntryState,
    RpmShelf,
    desired_repository,
    judge,
    plan_repository,
)
from tests.packages.conftest import DIRECTORY

NVIDIA = "https://nvidia.github.io"
KEYS = ("", "/keys/good.asc", "/keys/other.asc", "/keys/none.asc")
ADDRESSES = (
    f"{NVIDIA}/libnvidia-container/stable/deb/$(ARCH)",
    f"{NVIDIA}/libnvidia-container/stable/deb/amd64/",
    f"{NVIDIA}/libnvidia-container/stable/rpm/$basearch",
    f"{NVIDIA}/libnvidia-container/experimental/deb/$(ARCH)",
    f"{NVIDIA}/libnvidia-container/ubuntu18.04/$(ARCH)",
    f"{NVIDIA}/nvidia-docker/ubuntu20.04/amd64",
    f"{NVIDIA}/nvidia-container-runtime/centos7/$basearch",
    "https://mirror.example.com/nvidia/stable/deb/$(ARCH)",
    "https://deb.example.com/debian",
)
ENTRY = st.tuples(st.sampled_from(ADDRESSES), st.sampled_from(KEYS))
ENTRIES = st.lists(ENTRY, min_size=1, max_size=3)
NAMES = st.sampled_from(("a", "nvidia-docker", "libnvidia-container", "z"))
BASES = st.sampled_from(("", "https://mirror.example.com/nvidia"))


def line(address, key):
    return f"deb {f'[signed-by={key}] ' if key else ''}{address} /\n"


def stanza(address, key):
    signed = f"Signed-By: {key}\n" if key else ""
    return f"Types: deb\nURIs: {address}\nSuites: /\n{signed}\n"


def section(number, address, key):
    signed = f"gpgkey=file://{key}\n" if key else ""
    return f"[s{number}]\nbaseurl={address}\n{signed}enabled=1\n\n"


def applied(host, root, plan):
    for change in plan.files:
        path = root / change.path.lstrip("/")
        if change.content is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(change.content)


def assert_settles(root, shelf, host, base):
    """The plan is executed; the second plan, and foreign entries, are as expected."""
    desired = desired_repository(base)
    others = [one.address for one in shelf.entries(desired) if "example.com/debian" in one.address]
    text = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    applied(host, root, plan_repository(host, shelf, desired))
    judged = judge(shelf.entries(desired), desired, shelf.address(desired), shelf.file)
    states = [one.state for one in judged]
    assert states.count(EntryState.USED) == 1
    assert set(states) <= {EntryState.USED, EntryState.CHANNEL}
    assert plan_repository(host, shelf, desired).files == ()
    assert [one.address for one in shelf.entries(desired) if "example.com/debian" in one.address] == others
    for path, before in text.items():  # nothing is deleted: it has its name, or the new one, or was ours
        kept = (path, path.with_name(path.name + SUFFIX))
        assert path.name.startswith("nvidia-container-toolkit.") or any(
            one.exists() and (one == path or one.read_bytes() == before) for one in kept
        )


def keys(root):
    (root / "keys").mkdir()
    (root / "keys/good.asc").write_bytes(desired_repository().key)
    (root / "keys/other.asc").write_text("no key at all\n")


@pytest.mark.full
@settings(max_examples=80, deadline=None)
@given(st.dictionaries(NAMES, ENTRIES, max_size=3), st.dictionaries(NAMES, ENTRIES, max_size=2), BASES)
def test_apt(lists, sources, base):
    with tempfile.TemporaryDirectory(dir=DIRECTORY) as name:
        root = Path(name)
        parts = root / "etc/apt/sources.list.d"
        parts.mkdir(parents=True)
        keys(root)
        for file, entries in lists.items():
            (parts / f"{file}.list").write_text("".join(line(*one) for one in entries))
        for file, entries in sources.items():
            (parts / f"{file}.sources").write_text("".join(stanza(*one) for one in entries))
        host = Host(root, environ={})
        places = AptPaths("/etc/apt", "/etc/apt/sources.list", "/etc/apt/sources.list.d", "/s", "/l", "/a")
        assert_settles(root, AptShelf(host, Apt(host, places)), host, base)


@pytest.mark.full
@settings(max_examples=80, deadline=None)
@given(st.dictionaries(NAMES, ENTRIES, max_size=3), BASES)
def test_dnf_and_zypper(files, base):
    with tempfile.TemporaryDirectory(dir=DIRECTORY) as name:
        root = Path(name)
        place = root / "etc/yum.repos.d"
        place.mkdir(parents=True)
        keys(root)
        for file, entries in files.items():
            text = "".join(section(number, *one) for number, one in enumerate(entries))
            (place / f"{file}.repo").write_text(text)
        host = Host(root, environ={})
        assert_settles(root, RpmShelf(host, "/etc/yum.repos.d"), host, base)
