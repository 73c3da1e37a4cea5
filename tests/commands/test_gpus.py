"""`gpunode gpus` as a user types it, on recorded machines."""

import fcntl
import json
import os
import re
import struct
import subprocess
import termios
from contextlib import suppress

import pytest

from fixtures.machines import machine, recorded_host
from gpunode.commands.demo import build_machine
from tests.cli import clean_environment, command, gpunode
from tests.waiting import PATIENCE


@pytest.mark.parametrize(("name", "states"), [("healthy-docker-rocky9", {"-"}), ("healthy-h100", {"off"})])
def test_mig_is_off_only_on_gpus_that_support_it(name, states, tmp_path):
    root = recorded_host(name, tmp_path / "node").root
    ran = gpunode("gpus", "--root", str(root))
    assert ran.code == 0, ran.err
    assert {line.split()[-1] for line in ran.out.splitlines()[2:]} == states


def test_node_without_gpus_gets_a_warning(tmp_path):
    spec = machine("healthy-h100")
    spec["recording"]["nvml"]["inventory"]["gpus"] = []
    root = build_machine(spec, tmp_path / "node")
    ran = gpunode("gpus", "--root", str(root))
    assert (ran.code, "warning: no GPU was found" in ran.err) == (0, True)
    document = json.loads(gpunode("gpus", "--root", str(root), "-o", "json").out)
    assert (document["status"], document["data"]["gpus"]) == ("warn", [])


def on_a_terminal(columns, env, *argv):
    """The text that a terminal of that width shows, without colors, and whether it had any."""
    main, side = os.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environ = {name: value for name, value in clean_environment(env).items() if name != "COLUMNS"}
    with subprocess.Popen(command(*argv), stdout=side, stderr=subprocess.DEVNULL, env=environ) as child:
        os.close(side)
        shown = b""
        with suppress(OSError), os.fdopen(main, "rb", 0) as stream:  # EIO is its end
            while part := stream.read(4096):
                shown += part
        assert child.wait(PATIENCE) == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).replace("\r", ""), b"\x1b[" in shown


def test_pipe_gets_whole_uuids_also_with_colors(tmp_path):
    root = str(recorded_host("healthy-h100", tmp_path).root)
    ran = gpunode("gpus", "--root", root, env={"FORCE_COLOR": "1", "COLUMNS": ""})
    assert "\x1b[" in ran.out and "GPU-5a000001-1f6a-4c5e-9d2b-0a1b2c3d4e01" in ran.out


@pytest.mark.parametrize("columns", [40, 80, 100])
@pytest.mark.parametrize("argv", [("gpus",), ("verify",), ("plugin", "status")])
def test_narrow_terminal_shows_short_uuids_and_whole_words(argv, columns, tmp_path):
    """With colors, without, and dumb: the same text. A pipe gets everything, unwrapped."""
    spec = machine("healthy-h100")
    del spec["recording"]["nvml"]["inventory"]["gpus"][2:]
    root = str(build_machine(spec, tmp_path / "node"))
    whole = gpunode(*argv, "--root", root).out
    environs = ({"TERM": "xterm"}, {"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"})
    shown = [on_a_terminal(columns, env, *argv, "--root", root) for env in environs]
    assert [color for _, color in shown] == [True, False, False]
    uuid = "GPU-5a000001-1f6a-4c5e-9d2b-0a1b2c3d4e01"
    assert uuid in whole
    narrow = max(map(len, whole.splitlines())) > columns
    for text, _ in shown:
        times = re.findall(r"\d+\.\d+(?=\s+ms)", text)
        assert {*text.split()} - {*times} <= {*whole.split(), "GPU-5a000000", "GPU-5a000001"}
        if columns > 40:  # there the terminal wraps
            assert all(len(line) <= columns for line in text.splitlines())
        assert ("GPU-5a000001" if narrow else uuid) in text.split()
    if argv[0] != "verify":  # its times differ
        assert len({text for text, _ in shown}) == 1
