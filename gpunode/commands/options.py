"""Options that several commands share, with their help."""

from typing import Annotated, Any

import typer

from gpunode.commands.completion import engines, one_of
from gpunode.errors import UsageError

# no `from __future__ import annotations`: Typer reads these annotations as objects


Strings = list[str] | None


def duration_option(*flags: str, least: float, default: float | None, help: str) -> Any:
    """An option for a duration in seconds: 500ms, 60s, 2m or 1h; a number without a unit is in seconds.

    `default` is shown in the help; None if the help text has it.
    """

    def parse(value: str | float) -> float:
        from gpunode.plugin.config.values import duration

        if isinstance(value, float):  # Typer passes the default, too
            return value
        try:
            return duration(value, least, bare=True)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    shown = False if default is None else f"{default:g}s"
    return typer.Option(*flags, parser=parse, metavar="DURATION", help=help, show_default=shown)


LOCK_SECONDS = 600.0
LockOption = Annotated[
    float,
    duration_option(
        "--lock-timeout",
        least=0,
        default=LOCK_SECONDS,
        help="How long to wait for another package manager to finish.",
    ),
]

RuntimeOption = Annotated[
    str,
    typer.Option(
        "--runtime",
        metavar="ENGINE",
        help="Engine to configure; auto is the engine of the kubelet, or the only one.",
        autocompletion=engines,
    ),
]
RuntimesOption = Annotated[
    Strings,
    typer.Option(
        "--runtime",
        metavar="ENGINE",
        help="docker, containerd, crio, podman, k3s, rke2, k0s, microk8s or auto (repeatable; "
        "default: auto, the engine of the kubelet or the only one).",
        autocompletion=engines,
    ),
]
NameOption = Annotated[str, typer.Option("--nvidia-runtime-name", help="Name of the runtime in the engine.")]
ConfigOption = Annotated[
    str,
    typer.Option(
        "--config", metavar="PATH", help="Configuration file of the engine; the daemon's own by default."
    ),
]
DropInOption = Annotated[
    str,
    typer.Option(
        "--drop-in-config",
        metavar="PATH",
        help="Drop-in file to write (containerd 2, CRI-O); selected by default.",
    ),
]
SocketOption = Annotated[
    str, typer.Option("--socket", metavar="PATH", help="Socket of the daemon; detected by default.")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the diff and the commands; change nothing.")
]
NoRestartOption = Annotated[
    bool, typer.Option("--no-restart", help="Write the files; print what must be restarted.")
]
RestartCommandOption = Annotated[
    str,
    typer.Option(
        "--restart-command",
        metavar="CMD",
        help="Command that restarts the daemon where systemd doesn't manage it.",
    ),
]


def refuse_restart_command(no_restart: bool, restart_command: str) -> None:
    """`UsageError` for a restart command that `--no-restart` would leave unused."""
    if no_restart and restart_command:
        raise UsageError("--no-restart and --restart-command exclude each other", hint="give one of them")


YesOption = Annotated[
    bool, typer.Option("-y", "--yes", help="Don't ask before running containers are stopped.")
]
ProgramOption = Annotated[
    str,
    typer.Option(
        "--nvidia-runtime-path",
        "--runtime-path",
        metavar="PATH",
        help="Path of the runtime; nvidia-container-runtime (docker: found in PATH) by default.",
    ),
]
DefaultOption = Annotated[
    bool,
    typer.Option(
        "--set-as-default", "--nvidia-set-as-default", help="Make nvidia the default runtime of the engine."
    ),
]
CdiOption = Annotated[
    bool,
    typer.Option(
        "--cdi",
        "--cdi.enabled",
        "--cdi.enable",
        "--enable-cdi",
        help="Enable CDI in the engine, and write and refresh the CDI specification.",
    ),
]
ConfigModeOption = Annotated[str, typer.Option("--config-mode", hidden=True)]
ConfigSourceOption = Annotated[str, typer.Option("--config-source", hidden=True)]
ExecutableOption = Annotated[str, typer.Option("--executable-path", hidden=True)]
HookFileOption = Annotated[str, typer.Option("--oci-hook-path", hidden=True)]
HookProgramOption = Annotated[str, typer.Option("--nvidia-runtime-hook-path", hidden=True)]
AlsoOption = Annotated[
    str,
    typer.Option(
        "--also",
        metavar="VARIANTS",
        help="Also register nvidia-cdi, nvidia-legacy or both: cdi, legacy or cdi,legacy.",
        autocompletion=one_of("cdi", "legacy", comma=True),
    ),
]
ReplaceOption = Annotated[
    bool,
    typer.Option("--replace", help="Replace a drop-in that nvidia-ctk or the GPU operator wrote."),
]
ExitCodeOption = Annotated[
    bool, typer.Option("--exit-code", help="With --dry-run: exit 1 if changes are pending.")
]
NoVerifyOption = Annotated[
    bool, typer.Option("--no-verify", help="Don't query the running daemon afterwards.")
]
KubeconfigOption = Annotated[
    str,
    typer.Option(
        "--kubeconfig",
        metavar="PATH",
        help="Kubeconfig file, or kubelet for the kubelet's own. Default: KUBECONFIG, the pod's "
        "account or ~/.kube/config.",
    ),
]
ContextOption = Annotated[str, typer.Option("--context", metavar="NAME", help="Kubeconfig context to use.")]
ServerOption = Annotated[
    str,
    typer.Option("--server", metavar="URL", help="URL of a kubectl proxy, such as http://127.0.0.1:8001."),
]
NodeOption = Annotated[
    str,
    typer.Option("--node", metavar="NAME", help="Name of the Node; NODE_NAME or the host name by default."),
]
