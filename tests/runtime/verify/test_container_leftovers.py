"""Only objects that are ours and have a certainly dead creator count as leftovers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpunode.host import Host
from gpunode.runtime.verify.container import is_dead, labels, maker, maker_of_image

BOOT, START = "1b2c3d4e", "777"


def test_own_process_is_alive_and_an_ended_one_is_dead() -> None:
    assert not is_dead(Host(), maker(Host()))
    code = (
        "from gpunode.host import Host\n"
        "from gpunode.runtime.verify.container import maker\n"
        "print(maker(Host()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert is_dead(Host(), done.stdout.strip())


def test_objects_of_a_run_are_labelled_with_their_process() -> None:
    assert labels(Host()) == {"gpunode.run": "verify", "gpunode.maker": maker(Host())}
    for what in ("verify:0123456789ab-", "stand-in:"):
        assert maker_of_image(f"gpunode.local/{what}{maker(Host())}-1a2b3c4d") == maker(Host())


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A node with the processes 1 and 42, the second one with a name that looks like more fields."""
    for pid in ("1", "42"):
        (tmp_path / "proc" / pid).mkdir(parents=True)
        fields = " ".join(["S", *["0"] * 18, START, "0"])
        (tmp_path / f"proc/{pid}/stat").write_text(f"{pid} (a ) b) {fields}\n")
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026531836]")
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text(f"{BOOT}-aaaa-bbbb-cccc-dddddddddddd\n")
    return Host(root=tmp_path)


@pytest.mark.parametrize(
    ("who", "dead"),
    [
        (f"{BOOT}-4026531836-42-{START}", False),
        (f"{BOOT}-4026531836-42-776", True),  # the pid belongs to another process now
        (f"{BOOT}-4026531836-43-{START}", True),
        (f"ffffffff-4026531836-42-{START}", True),  # before the last boot
        (f"{BOOT}-4026539999-43-{START}", False),  # pids of another namespace say nothing here
        (f"ffffffff-4026539999-42-{START}", False),  # nor does a boot id that only they see
        ("", False),
        ("somebody else's label", False),
        (f"{BOOT}-4026531836-42", False),
        (f"{BOOT}-4026531836-42-{START}\n", False),
    ],
)
def test_process_is_dead_only_if_this_kernel_says_so(host: Host, who: str, dead: bool) -> None:
    assert is_dead(host, who) is dead


def test_hidden_processes_of_other_users_are_not_dead(host: Host) -> None:
    (host.root / "proc/1/stat").unlink()
    assert not is_dead(host, f"{BOOT}-4026531836-43-{START}")


@pytest.mark.parametrize(
    "name",
    [
        "docker.io/library/cuda:12",
        "gpunode.local/verify:latest",
        "gpunode.local/own:0123456789ab-1b2c3d4e-1-2-3-1a2b3c4d",
        "evil/gpunode.local/verify:1b2c3d4e-1-2-3-1a2b3c4d",
        "gpunode.local/verify:1b2c3d4e-1-2-3-1a2b3c4d\n",
        "",
    ],
)
def test_image_with_another_name_has_no_owner_process(name: str) -> None:
    assert maker_of_image(name) == ""
