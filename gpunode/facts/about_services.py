"""Topics of `Node`: the services beside the driver, as systemd tells."""

from __future__ import annotations

from collections.abc import Mapping

from gpunode.facts import fabric_manager, nvswitch, unit_states
from gpunode.facts.about_driver import AboutDriver
from gpunode.facts.topic import Stuck, topic


class AboutServices(AboutDriver):
    """See `Node`."""

    @topic
    def units(self) -> Mapping[str, unit_states.UnitState]:
        """By name, those of `unit_states.UNITS`; one that isn't in it can't be told. A systemd that hangs is
        waited for once."""
        if self._units_hang:
            raise Stuck(self._units_hang[0])
        try:
            return unit_states.read_unit_states(self.host)
        except Stuck as error:
            self._units_hang.append(error.message)
            raise

    @topic
    def _units_hang(self) -> list[str]:
        return []

    @topic
    def switches(self) -> tuple[nvswitch.NvSwitch, ...]:
        """`Unreadable` for an ordinary user on a Blackwell baseboard."""
        return nvswitch.read_switches(self.host, self.gpus)

    @topic
    def fabric_log(self) -> tuple[fabric_manager.LogFinding, ...]:
        """Since the fabric manager was last started, in whichever boot that was."""
        return fabric_manager.read_log(self.host)
