"""Topics of `Node`: the services beside the driver, as systemd tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpunode.facts.about_driver import AboutDriver
from gpunode.facts.topic import Stuck, topic

if TYPE_CHECKING:
    from gpunode.facts.fabric_manager import LogFinding
    from gpunode.facts.nvswitch import NvSwitch
    from gpunode.facts.unit_states import UnitState


class AboutServices(AboutDriver):
    """See `Node`."""

    @topic
    def units(self) -> Mapping[str, UnitState]:
        """By name, those of `unit_states.UNITS`; one that isn't in it can't be told. A systemd that hangs is
        waited for once."""
        from gpunode.facts.unit_states import read_unit_states

        if self._units_hang:
            raise Stuck(self._units_hang[0])
        try:
            return read_unit_states(self.host)
        except Stuck as error:
            self._units_hang.append(error.message)
            raise

    @topic
    def _units_hang(self) -> list[str]:
        return []

    @topic
    def switches(self) -> tuple[NvSwitch, ...]:
        """`Unreadable` for an ordinary user on a Blackwell baseboard."""
        from gpunode.facts.nvswitch import read_switches

        return read_switches(self.host, self.gpus)

    @topic
    def fabric_log(self) -> tuple[LogFinding, ...]:
        """Since the fabric manager was last started, in whichever boot that was."""
        from gpunode.facts.fabric_manager import read_log

        return read_log(self.host)
