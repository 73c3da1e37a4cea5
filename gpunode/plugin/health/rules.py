"""Which events count, after NVIDIA's DP_DISABLE_HEALTHCHECKS and DP_ENABLE_HEALTHCHECKS. Pure."""

from __future__ import annotations

from gpunode.facts.xids import xid
from gpunode.plugin.settings import ALL_XIDS, HealthSettings


def counts(number: int, settings: HealthSettings) -> bool:
    """Whether this XID makes a device unhealthy: enabled beats disabled beats its class."""
    if settings.enabled & {number, ALL_XIDS}:
        return True
    if settings.disabled & {number, ALL_XIDS}:
        return False
    return xid(number).counts


def readings_count(settings: HealthSettings) -> bool:
    """Whether ECC, row remapping, the recovery action and the fabric do: all is off means these as well."""
    return ALL_XIDS not in settings.disabled or ALL_XIDS in settings.enabled
