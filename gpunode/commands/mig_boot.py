"""`gpunode mig apply --persist`: the systemd unit that applies a layout at each boot, before any service that
allocates GPUs starts.

A reboot removes the instances, and from Hopper on the mode as well (NVIDIA's MIG user guide).
"""

from __future__ import annotations

from collections.abc import Iterator

from gpunode.cdi.refresh import program
from gpunode.commands import mig_plan
from gpunode.errors import PreconditionError, UsageError
from gpunode.facts.mig import keeper
from gpunode.facts.node import Node
from gpunode.host import Host
from gpunode.host.journal import FileEdit
from gpunode.host.transaction import FilesChanged, change_files, marked_edit
from gpunode.output.result import Block, Progress, Style, Text, change_blocks
from gpunode.runtime.restart import engine_restart

OPERATION = "mig-persist"
UNIT = "gpunode-mig.service"
UNIT_FILE = f"/etc/systemd/system/{UNIT}"
CONFIG_FILE = "/etc/gpunode/mig.yaml"
MARKER = "# Made by gpunode (gpunode mig apply --persist); gpunode rollback takes it away."

_UNIT = """\
{marker}
[Unit]
Description=Apply the MIG layout {label} to the GPUs (gpunode)
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
# creates the device files if no process has used a GPU since boot
ExecStartPre=-/usr/bin/nvidia-modprobe -c 0 -u
ExecStart={program} mig apply --config-file {config} --selected-config {label_word}
# a faulty GPU must not block the boot; later units then start without MIG
TimeoutStartSec=480
Restart=no

[Install]
WantedBy=multi-user.target
"""


def unit_text(program: str, label: str) -> str:
    """The unit's text. `program` is the start of the ExecStart line, `label` the configuration's label.

    `UsageError` for a label with control characters, which a unit can't contain.
    """
    if any(ord(character) < 32 or ord(character) == 127 for character in label):
        raise UsageError(f"{label!r} can't stand in a unit", hint="rename the configuration")
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


def refuse_persist(host: Host, selection: mig_plan.ConfigSelection) -> None:
    """Checks before anything is changed: `PreconditionError` where a unit can't apply a layout, or another
    unit does already; `ConfigError` for a unit of this name that gpunode didn't write."""
    edits(host, selection)
    if not host.systemd_runs():
        raise PreconditionError(
            "systemd doesn't run on this node, so it can't apply the layout at boot",
            hint="run `gpunode mig apply` from whatever starts services here, before the engines",
            code="no-systemd",
        )
    other_keeper = keeper(Node(host), besides=UNIT)
    if other_keeper:
        raise PreconditionError(
            f"{other_keeper} makes the instances at boot already: they would overwrite each other",
            hint="leave --persist out, or disable the other one first",
            code="mig-keeper",
        )


def edits(host: Host, selection: mig_plan.ConfigSelection) -> tuple[FileEdit, ...]:
    unit = unit_text(program(host), selection.label).encode()
    return (
        FileEdit(CONFIG_FILE, host.read_bytes(CONFIG_FILE), selection.data),
        marked_edit(host, UNIT_FILE, unit, MARKER),
    )


def persist_preview(host: Host, selection: mig_plan.ConfigSelection) -> Iterator[Block]:
    """What --persist would write, or why it would not. `ConfigError` for a unit that gpunode didn't write."""
    try:
        refuse_persist(host, selection)
    except PreconditionError as error:
        yield Text(f"--persist would be refused: {error.message}; {error.hint}", Style.WARN)
    yield from change_blocks([edit.change() for edit in edits(host, selection)], dry_run=True)


def install(host: Host, selection: mig_plan.ConfigSelection, progress: Progress) -> FilesChanged:
    return change_files(
        host,
        OPERATION,
        lambda: edits(host, selection),
        engine_restart(host, progress),
        context={"label": selection.label},
        named_units=(UNIT,),
    )


def another_at_boot(host: Host, selection: mig_plan.ConfigSelection) -> Iterator[str]:
    """Warning: this layout lasts until the next boot, when the unit of an earlier --persist applies its
    own."""
    unit = host.read_text(UNIT_FILE) or ""
    if not unit.startswith(MARKER):
        return
    try:
        same = unit == unit_text(program(host), selection.label)
    except UsageError:
        same = False
    if not same or host.read_bytes(CONFIG_FILE) != selection.data:
        yield f"{UNIT} still applies an earlier layout at each boot: add --persist to have this one"
