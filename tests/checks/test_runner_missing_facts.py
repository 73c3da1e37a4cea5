"""A missing fact is no fault: healthy machines with facts dropped, truncated and garbled.

Each case has a number; the same number damages the same facts. Some numbers are new in each run, but not with
CI=true, and are part of the test's name. `python -m tests.checks.test_runner_missing_facts FIRST LAST` tries
a range.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fixtures.machines import HEALTHY, machine, options
from gpunode.checks.catalogue import ALL_CHECKS
from gpunode.checks.finding import FindingStatus
from gpunode.commands import doctor
from gpunode.commands.demo import build_machine
from gpunode.facts.node import Questions
from gpunode.host import Host
from tests.silent import SilentProgress

FIXED = (*range(24), 165786485)  # the last one drops a device file of a MIG instance
NEW = (
    [random.SystemRandom().randrange(1 << 32) for _ in range(4)]
    if os.environ.get("GPUNODE_TEST_NEW_EXAMPLES")
    else []
)
MOST_SECONDS = 20.0  # a diagnosis of a recorded machine takes 0.2 s; this is the limit on a busy machine
BAD = (FindingStatus.FAIL, FindingStatus.ERROR, FindingStatus.WARN)

# Facts whose absence is itself the fault, and the checks that report them. Everything else that is
# missing has to be silent.
ABSENCES = {
    r"devices:/dev/nvidia.*": {
        *("dev-nodes-missing", "uvm-not-loaded", "imex-channels", "cdi-spec-stale", "mig-caps-missing"),
    },
    r"sockets:.*(docker|containerd|crio).*|daemons:.*": {
        *("docker-not-running", "containerd-not-restarted", "crio-runtime-missing"),
    },
    r"sockets:.*kubelet\.sock": {"kubelet-device-plugin-dir"},
    r".*/bin/nvidia-(c|container-)\w+|.*/toolkit/.*": {
        *("docker-runtime-missing", "containerd-runtime-binary", "toolkit-missing", "cdi-spec-stale"),
        *("crio-runtime-missing", "crio-runtime-path", "toolkit-config-invalid", "jetson"),
    },
    r".*/host-files-for-container\.d/.*": {"jetson"},
    r".*/nvidia-smi": {"nvidia-smi-missing", "cdi-spec-stale", "wsl2"},
    r".*/(nvidia-persistenced|nvidia-imex|nvidia-cuda-mps-\w+|gsp_\w+\.bin)": {"cdi-spec-stale"},
    r".*lib(cuda|nvidia|nv|dxcore|GL|EGL)[\w-]*\.so.*": {
        *("libcuda-missing", "libnvidia-ml-missing", "cdi-spec-stale", "wsl2"),
    },
    r"/etc/ld\.so\.cache": {"libcuda-missing", "libnvidia-ml-missing", "cdi-spec-stale"},
    r"/sys/bus/pci/devices/[^/]*(/(driver|vendor|class|device))?": {
        *("gpu-bound-other-driver", "pci-gpu-count-mismatch", "pci-no-gpu"),
    },
    r"/dev/dxg": {"wsl2", "pci-no-gpu"},
    r"/(etc|run|var/run)/cdi(/.*)?": {"cdi-spec-missing"},
    r"/sys/module/nvidia_uvm/.*": {"uvm-not-loaded"},
    r".*/autoconf\.h|/lib/modules/[^/]*/build": {"kernel-headers-missing"},
    r"/proc/\d+/(cmdline|stat)": {"kubelet-not-running", "docker-not-running", "containerd-not-restarted"},
    r".*/(runc|crun|conmon|ldconfig|ldconfig\.real)|/sbin|/bin|/lib|/lib64": {
        *("toolkit-config-invalid", "cdi-spec-stale", "crio-runtime-path"),
    },
}

Fact = tuple[str, str]


def facts(spec: dict[str, Any]) -> list[Fact]:
    """All facts of this machine: files, links, programs, and the recording."""
    found = [(kind, path) for kind in ("files", "binary", "links") for path in spec.get(kind, {})]
    found += [("executables", path) for path in spec.get("executables", ())]
    recording = spec.get("recording", {})
    found += [(f"recording:{section}", key) for section in recording for key in recording[section]]
    return sorted(found)


def place_of(spec: dict[str, Any], kind: str) -> Any:
    section = kind.partition(":")[2]
    return spec["recording"][section] if section else spec[kind]


def drop(spec: dict[str, Any], fact: Fact) -> None:
    place = place_of(spec, fact[0])
    if isinstance(place, list):
        place.remove(fact[1])
    else:
        del place[fact[1]]


def garble(spec: dict[str, Any], fact: Fact, chance: random.Random) -> None:
    """Truncated, reversed, or replaced by something else."""
    kind, name = fact
    place = place_of(spec, kind)
    if isinstance(place, list):
        return drop(spec, fact)
    place[name] = (
        mangled(place[name], chance) if kind != "links" else chance.choice(["/", name, "../..", "/no"])
    )
    return None


def mangled(value: Any, chance: random.Random) -> Any:
    if isinstance(value, str):
        cut = chance.randrange(len(value) + 1)
        noise = "".join(chance.choice('{}[]"=:,\n\0 -9ü٣\\') for _ in range(chance.randrange(1, 12)))
        return chance.choice(
            [value[:cut], noise, value[:cut] + noise + value[cut:], value[::-1], "", "9" * 5000]
        )
    if isinstance(value, dict) and value:
        key = chance.choice(sorted(value))
        return {**value, key: mangled(value[key], chance)}
    if isinstance(value, list) and value:
        return [mangled(value[0], chance), *value[1:]]
    return chance.choice([None, True, -1, 1 << 70, "x", [], {}])


def diagnosed(spec: dict[str, Any], name: str, root: Path) -> Any:
    started = time.monotonic()
    host = Host(build_machine(spec, root), environ={})
    result = doctor.run(host, SilentProgress(), questions=Questions(**options(name)))
    assert time.monotonic() - started < MOST_SECONDS
    shutil.rmtree(root)
    assert [one.id for one in result.data.findings] == [check.id for check in ALL_CHECKS]
    json.dumps(result.envelope(), ensure_ascii=False)
    return result


def explained(identifier: str, dropped: list[Fact]) -> bool:
    for kind, name in dropped:
        text = f"{kind.partition(':')[2]}:{name}" if ":" in kind else name
        for pattern, checks in ABSENCES.items():
            if identifier in checks and re.fullmatch(pattern, text):
                return True
    return False


def false_alarms(number: int, root: Path) -> tuple[str, list[Any], list[Fact]]:
    """The machine, its unexplained findings, and what was dropped."""
    chance = random.Random(number)
    name = chance.choice(HEALTHY)
    spec = copy.deepcopy(machine(name))
    dropped = chance.sample(facts(spec), chance.choice((1, 1, 2, 4, 8)))
    for fact in dropped:
        drop(spec, fact)
    result = diagnosed(spec, name, root)
    said = [one for one in result.data.findings if one.status in BAD]
    return name, [one for one in said if not explained(one.id, dropped)], dropped


def test_excuses_name_existing_checks():
    assert {one for checks in ABSENCES.values() for one in checks} <= {check.id for check in ALL_CHECKS}


@pytest.mark.parametrize("number", [*FIXED, *NEW])
def test_missing_optional_facts_cause_no_false_alarm(number, tmp_path):
    name, alarms, dropped = false_alarms(number, tmp_path / "m")
    assert not alarms, (number, name, dropped, [(one.id, one.summary) for one in alarms])


@pytest.mark.parametrize("number", [*FIXED, *NEW])
def test_garbled_facts_break_no_check(number, tmp_path):
    """Files and outputs of programs may be anything. A report is printed in any case, and in time."""
    chance = random.Random(number)
    name = chance.choice(HEALTHY)
    spec = copy.deepcopy(machine(name))
    candidates = [
        one for one in facts(spec) if not one[0].startswith("recording:") or one[0].endswith("commands")
    ]
    for fact in chance.sample(candidates, chance.choice((1, 3, 9, 27))):
        if fact[0].endswith("commands"):
            answer = place_of(spec, fact[0])[fact[1]]
            answer["stdout"] = mangled(answer.get("stdout", ""), chance)
        elif fact[0] != "binary":
            garble(spec, fact, chance)
    result = diagnosed(spec, name, tmp_path / "m")
    broken = [one for one in result.data.findings if one.summary.startswith("internal error in the check")]
    assert not broken, (number, name, broken)


@pytest.mark.parametrize("number", [*FIXED, *NEW])
def test_garbled_daemon_responses_still_give_a_report(number, tmp_path):
    chance = random.Random(number)
    name = chance.choice(HEALTHY)
    spec = copy.deepcopy(machine(name))
    candidates = [one for one in facts(spec) if one[0] in ("recording:daemons", "recording:nvml")]
    for fact in chance.sample(candidates, min(len(candidates), chance.choice((1, 2, 4)))):
        garble(spec, fact, chance)
    result = diagnosed(spec, name, tmp_path / "m")
    broken = [one for one in result.data.findings if one.summary.startswith("internal error in the check")]
    assert not broken, (number, name, broken)


if __name__ == "__main__":
    import tempfile

    for one in range(int(sys.argv[1]), int(sys.argv[2])):
        with tempfile.TemporaryDirectory() as directory:
            machine_name, found, gone = false_alarms(one, Path(directory) / "m")
        if found:
            print(one, machine_name, [(alarm.id, alarm.summary[:80]) for alarm in found], gone)
