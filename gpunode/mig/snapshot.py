"""The layout before a change, on disk while it runs: who finds it knows that a run was killed half-way."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gpunode.gpu.mig_wire import layouts_from_json
from gpunode.gpu.traces import boot_id
from gpunode.host import Host
from gpunode.journal import state_directory
from gpunode.mig.layout import GpuLayout, Layouts
from gpunode.result import plain


def path_of(host: Host) -> str:
    """Where it lies."""
    return f"{state_directory(host)}/mig-before.json"


def save(host: Host, before: Sequence[GpuLayout]) -> None:
    """Keep what these GPUs were."""
    host.make_dirs(state_directory(host), mode=0o700)
    data = {"boot": boot_id(host), "layouts": plain(Layouts("", tuple(before)))}
    host.write_atomic(path_of(host), json.dumps(data).encode(), mode=0o600, keep=False)


def load(host: Host) -> tuple[GpuLayout, ...]:
    """What GPUs were when a run began that didn't end; () without one, or from before the last boot, which
    takes all instances anyway."""
    text = host.read_text(path_of(host))
    try:
        data = json.loads(text or "null")
        if not isinstance(data, dict) or data.get("boot") != boot_id(host):
            return ()
        return layouts_from_json(data["layouts"]).gpus
    except (ValueError, KeyError, TypeError, AttributeError):
        return ()


def forget(host: Host) -> None:
    """The change has come to an end, one way or the other."""
    host.remove(path_of(host))
