"""Every check, in the order in which people read them: from the PCI bus to the device plugin."""

from __future__ import annotations

from gpunode.checks import (
    cdi,
    containerd,
    crio,
    cuda,
    devices,
    docker,
    driver,
    fabric,
    hardware,
    health,
    kubelet,
    platform,
    podman,
    security,
    toolkit,
)
from gpunode.checks.model import LAYERS, Check
from gpunode.errors import UsageError

_ROOMS = (
    *(hardware, driver, devices, health, fabric, toolkit, cdi),
    *(docker, containerd, crio, podman, kubelet, cuda, platform, security),
)
ALL_CHECKS: tuple[Check, ...] = tuple(
    sorted((check for room in _ROOMS for check in room.CHECKS), key=lambda check: LAYERS.index(check.layer))
)
BY_ID = {check.id: check for check in ALL_CHECKS}


def find_check(identifier: str) -> Check:
    """The check of this id; `UsageError` names the nearest ones."""
    check = BY_ID.get(identifier)
    if check is None:
        from difflib import get_close_matches

        begun = [known for known in BY_ID if identifier and known.startswith(identifier)]
        near = (begun or get_close_matches(identifier, BY_ID, n=3, cutoff=0.4))[:3]
        hint = f"did you mean {' or '.join(near)}?" if near else "gpunode doctor --list shows all of them"
        raise UsageError(f"there is no check {identifier!r}", hint=hint)
    return check
