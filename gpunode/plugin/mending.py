"""What to do about a problem's `mend`, for people: the same words in the log and in `plugin status`."""

from __future__ import annotations

_WORDS = {
    "restart-app": "restart the application that failed",
    "reboot": "drain and reboot the node",
    "replace": "have the GPU replaced",
}


def how_to_mend(mend: str, index: str, pid: int = 0) -> str:
    """ "" for a `mend` that nobody has to see to. `index` is the unit's, `pid` the serving plugin's if known.

    A reset fails while any process has NVML open, and the plugin does: SIGUSR1 makes it close NVML.
    """
    if mend != "reset":
        return _WORDS.get(mend, "")
    closing = f"kill -USR1 {pid} (closes NVML for 2 min), " if pid else ""
    return f"drain the node, {closing}then nvidia-smi --gpu-reset -i {index.partition(':')[0]}"
