"""systemd's state of the units that matter to GPUs: one query for all of them.

`UNITS` lists all units that are queried; a check that needs another unit adds its name there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gpunode.facts.topic import Stuck
from gpunode.host import Host

UNITS = (
    *("nvidia-fabricmanager.service", "nvidia-persistenced.service", "nvidia-gridd.service"),
    *("nvidia-imex.service", "nvidia-mig-manager.service", "nvidia-dcgm.service", "nvlsm.service"),
    *("nvidia-cdi-refresh.service", "nvidia-cdi-refresh.path"),
    *("gpunode-cdi-refresh.service", "gpunode-cdi-refresh.path", "gpunode-device-plugin.service"),
    *("docker.service", "docker.socket", "containerd.service", "crio.service", "kubelet.service"),
    *("apt-daily-upgrade.timer", "unattended-upgrades.service", "dnf-automatic.timer"),
    *("chrony.service", "chronyd.service", "systemd-timesyncd.service", "ntpd.service", "ntpsec.service"),
    "systemd-modules-load.service",
)
_PROPERTIES = "Id,Names,LoadState,ActiveState,SubState,UnitFileState,Result"
COMMAND = ("systemctl", "show", f"--property={_PROPERTIES}")
_RECORDED = "systemctl show "
_SECONDS = 3.0  # systemd answers for 25 units within 20 ms


class UnitState(NamedTuple):
    """One unit in systemd's words (org.freedesktop.systemd1(5)), empty where it reports none.

    `load`: loaded, not-found, masked, ...; `active`: active, inactive, failed, activating, ...; `sub`:
    running, exited, dead, ...; `file`: enabled, disabled, static, masked, ... for what the next boot does;
    `result`: success, exit-code, timeout, start-limit-hit, ... of its last run.
    """

    name: str
    load: str
    active: str
    sub: str
    file: str
    result: str

    @property
    def installed(self) -> bool:
        return self.load not in ("", "not-found")

    @property
    def runs(self) -> bool:
        """Active, or activating; a finished oneshot unit (exited) counts."""
        return self.active in ("active", "reloading", "activating", "refreshing")

    @property
    def has_failed(self) -> bool:
        """Whether its last run failed, also while systemd waits to restart it."""
        return self.result not in ("", "success")

    @property
    def at_boot(self) -> bool:
        """Whether the next boot starts it by itself. Another unit may start a static one."""
        return self.file in ("enabled", "enabled-runtime", "linked-runtime", "alias", "generated")

    @property
    def may_start_at_boot(self) -> bool:
        return self.at_boot or self.file == "static"

    def __str__(self) -> str:
        words = (f"{self.active} ({self.sub})" if self.sub else self.active, self.file, self.result)
        return ", ".join(word for word in words if word not in ("", "success")) or self.load


def read_unit_states(host: Host, units: Sequence[str] = UNITS) -> Mapping[str, UnitState]:
    """By name; a unit that systemd doesn't know has `load` not-found. {} if systemd isn't init, or reports
    nothing. `Stuck` if it hangs. A recorded machine returns the recorded output of the command."""
    if not host.live:
        answers = host.recording.get("commands", {}).items()
        texts = (answer.get("stdout", "") for command, answer in answers if command.startswith(_RECORDED))
        return parse_unit_states("\n\n".join(texts))
    if not host.systemd_runs():
        return {}
    done = host.run([*COMMAND, *units], timeout=_SECONDS)
    if done.timed_out:
        raise Stuck(f"systemd didn't answer within {_SECONDS:g} s: {COMMAND[0]} {COMMAND[1]}", first=True)
    return parse_unit_states(done.stdout)


def shown_units(text: str) -> Iterator[list[tuple[str, str]]]:
    """Properties of units, as ``systemctl show`` prints them: KEY=VALUE lines, units separated by an empty
    line; a key may occur more than once."""
    for block in text.split("\n\n"):
        pairs = (line.partition("=") for line in block.splitlines())
        yield [(key, value) for key, equals, value in pairs if equals]


def parse_unit_states(text: str) -> dict[str, UnitState]:
    """Parser for the states that ``systemctl show`` prints; by every name of a unit."""
    states: dict[str, UnitState] = {}
    for block in shown_units(text):
        pairs = dict(block)
        if not pairs.get("Id"):
            continue
        keys = ("Id", "LoadState", "ActiveState", "SubState", "UnitFileState", "Result")
        state = UnitState(*(pairs.get(key, "") for key in keys))
        states |= dict.fromkeys((state.name, *pairs.get("Names", "").split()), state)
    return states
