"""The systemd unit that applies a layout at each boot, before anything that hands out GPUs starts.

Instances are gone after a reboot, and from Hopper on the mode as well (NVIDIA's MIG user guide).
"""

from __future__ import annotations

UNIT = "gpunode-mig.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
CONFIG_FILE = "/etc/gpunode/mig.yaml"
MARKER = "# Made by gpunode (gpunode mig apply --persist); gpunode rollback takes it away."

_UNIT = """\
{marker}
[Unit]
Description=Cut the GPUs into their MIG layout {label} (gpunode)
# the persistence daemon holds the GPUs open from then on, the fabric manager links them
After=nvidia-persistenced.service nvidia-fabricmanager.service systemd-modules-load.service
Before=gpunode-cdi-refresh.service nvidia-cdi-refresh.service
Before=gpunode-device-plugin.service gpunode-mps.service gpunode-doctor.service
Before=nvidia-dcgm.service dcgm.service nvidia-dcgm-exporter.service nvsm.service slurmd.service
Before=docker.service containerd.service crio.service kubelet.service k3s.service k3s-agent.service
Before=rke2-server.service rke2-agent.service k0scontroller.service k0sworker.service
Before=snap.microk8s.daemon-containerd.service snap.microk8s.daemon-kubelite.service
Before=snap.docker.dockerd.service podman-restart.service

[Service]
Type=oneshot
RemainAfterExit=yes
# makes the device files on a node that nobody has asked for a GPU yet
ExecStartPre=-/usr/bin/nvidia-modprobe -c 0 -u
ExecStart={program} mig apply --config-file {config} --selected-config {label_word}
# a boot must not hang on a sick GPU; whoever comes after starts then without MIG
TimeoutStartSec=480
Restart=no

[Install]
WantedBy=multi-user.target
"""


def unit(program: str, label: str) -> str:
    """The unit's text. `program` is an ExecStart's first words, `label` the configuration's.

    ValueError for a label that a unit can't hold: control characters.
    """
    if any(ord(character) < 32 or ord(character) == 127 for character in label):
        raise ValueError(label)
    return _UNIT.format(
        marker=MARKER,
        label=label.replace("%", "%%"),
        program=program,
        config=CONFIG_FILE,
        label_word=_word(label),
    )


def _word(label: str) -> str:
    """One word of ExecStart (systemd.service(5), "COMMAND LINES"): ``%`` and ``$`` are doubled."""
    text = label.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{text}"'
