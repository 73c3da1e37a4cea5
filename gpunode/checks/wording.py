"""How evidence and remedies of a finding are put into a few lines that a person reads at night."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from gpunode.result import Evidence, Fix

_DISTURBS = {"drain": "stops GPU work", "reboot": "reboots the node"}
# what a command with `restart` restarts, what hurts most first: the layer of a check doesn't tell
_RESTARTS = (
    (r"wsl\.exe --shutdown", "ends everything that runs in WSL"),
    (r"\bpct reboot\b", "reboots this LXC container"),
    (
        r"configure-runtime --runtime docker\b(?!.*--cdi)",  # runtime/docker.py chooses by the live daemon
        "reloads Docker; where only a restart helps (--dry-run says so),"
        " its containers stop unless live-restore is on",
    ),
    (
        r"--runtime docker\b|(start|stop|update) docker\b|\bdocker-ce\b|\bdocker\.io\b",
        "restarts Docker: its containers stop unless live-restore is on",
    ),
    (
        r"--runtime (k3s|rke2|k0s|microk8s)\b|restart (k3s|rke2|k0s|microk8s)|k0s stop",
        "restarts this node's Kubernetes: running pods go on",
    ),
    (
        r"--runtime containerd\b|restart containerd\b|\bcontainerd\.io\b",
        "restarts containerd: running containers go on",
    ),
    (r"disable --now cri-?o\b", "stops CRI-O"),
    (r"--runtime crio\b|restart cri-?o\b", "restarts CRI-O: running containers go on"),
    (r"restart kubelet\b", "restarts the kubelet: running pods go on"),
    (r"nvidia-fabricmanager", "restarts the fabric manager"),
    (r"nvidia-imex", "restarts the IMEX daemon"),
    (r"device-plugin|\bdaemonset\b", "restarts the device plugin: running pods go on"),
    (r"\bcrictl (stop|rm)|\bdocker restart\b|\bpodman restart\b", "restarts the containers that it names"),
)
_ALIKE = 3  # so many lines that differ in one word of their path become one


def disturbance(fix: Fix) -> str:
    """What carrying a fix out disturbs; empty for nothing."""
    if fix.disruptive == "none":
        return ""
    known = (told for pattern, told in _RESTARTS if re.search(pattern, fix.command))
    return _DISTURBS.get(fix.disruptive) or next(known, "restarts a daemon")


def evidence_lines(evidence: Sequence[Evidence]) -> Iterator[str]:
    """``place: what was seen`` each; many alike as one, the way a shell would take them all."""
    for (value, _, _), group in groupby(evidence, lambda one: (one.value, one.line, one.source.count("/"))):
        alike = list(group)
        place = _braced([one.source for one in alike]) if len(alike) >= _ALIKE else ""
        for one in alike[:1] if place else alike:
            line = f":{one.line}" if one.line is not None else ""
            yield f"{place or one.source}{line}: {value}"


def _braced(paths: Sequence[str]) -> str:
    """``/dev/{nvidia0,nvidia1}`` for paths that differ in one part; empty if they don't."""
    parts = list(zip(*(path.split("/") for path in paths), strict=True))
    differing = [number for number, names in enumerate(parts) if len(set(names)) > 1]
    if len(differing) != 1 or not all(path.startswith("/") and " " not in path for path in paths):
        return ""
    return "/".join(
        "{" + ",".join(names) + "}" if number in differing else names[0] for number, names in enumerate(parts)
    )
