"""Options that several commands share, with their help."""

from typing import Annotated

import typer

# no `from __future__ import annotations`: Typer reads these annotations as objects


Strings = list[str] | None

RuntimeOption = Annotated[
    str,
    typer.Option(
        "--runtime",
        metavar="ENGINE",
        help="The engine to set up, as for configure-runtime; auto is the kubelet's, or the only one here.",
    ),
]
RuntimesOption = Annotated[
    Strings,
    typer.Option(
        "--runtime",
        metavar="ENGINE",
        help="docker, containerd, crio, podman; k3s, rke2, k0s, microk8s for a distribution's containerd;"
        " auto, as without it: the kubelet's, or the only one here (repeatable).",
    ),
]
NameOption = Annotated[str, typer.Option("--nvidia-runtime-name", help="The runtime's name in the engine.")]
ConfigOption = Annotated[
    str,
    typer.Option("--config", metavar="PATH", help="The engine's file; found from the daemon if not given."),
]
DropInOption = Annotated[
    str,
    typer.Option(
        "--drop-in-config",
        metavar="PATH",
        help="gpunode's drop-in, where the engine has one (containerd 2, CRI-O); chosen if not given.",
    ),
]
SocketOption = Annotated[
    str, typer.Option("--socket", metavar="PATH", help="The daemon's socket; found if not given.")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show the diff and the commands; change nothing.")
]
NoRestartOption = Annotated[
    bool, typer.Option("--no-restart", help="Write only; say what must be restarted.")
]
RestartCommandOption = Annotated[
    str,
    typer.Option(
        "--restart-command", metavar="CMD", help="Restarts the daemon where systemd doesn't run it."
    ),
]
YesOption = Annotated[bool, typer.Option("-y", "--yes", help="Go on although containers will be stopped.")]
ProgramOption = Annotated[
    str,
    typer.Option(
        "--nvidia-runtime-path",
        "--runtime-path",
        metavar="PATH",
        help="Its program; nvidia-container-runtime for docker, else /usr/bin/nvidia-container-runtime.",
    ),
]
DefaultOption = Annotated[
    bool,
    typer.Option(
        "--set-as-default", "--nvidia-set-as-default", help="Make it what every container runs with."
    ),
]
CdiOption = Annotated[
    bool,
    typer.Option(
        "--cdi",
        "--cdi.enabled",
        "--cdi.enable",
        "--enable-cdi",
        help="Switch the engine's CDI on and write the CDI specification, with units that keep it fresh.",
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
        help="Variants to register too: cdi (as nvidia-cdi), legacy; or cdi,legacy.",
    ),
]
ReplaceOption = Annotated[
    bool,
    typer.Option(
        "--replace", help="Put our own drop-in in the place of one that nvidia-ctk or the GPU operator wrote."
    ),
]
ExitCodeOption = Annotated[
    bool, typer.Option("--exit-code", help="With --dry-run: exit 1 if changes are pending.")
]
NoVerifyOption = Annotated[bool, typer.Option("--no-verify", help="Don't ask the running daemon afterwards.")]
KubeconfigOption = Annotated[
    str,
    typer.Option(
        "--kubeconfig",
        metavar="PATH",
        help="How to come to the API server; kubelet is this node's own. KUBECONFIG, else a pod's account or"
        " ~/.kube/config if not given.",
    ),
]
ContextOption = Annotated[str, typer.Option("--context", metavar="NAME", help="A context of the kubeconfig.")]
ServerOption = Annotated[
    str, typer.Option("--server", metavar="URL", help="A kubectl proxy, such as http://127.0.0.1:8001.")
]
NodeOption = Annotated[
    str,
    typer.Option(
        "--node", metavar="NAME", help="The Node object; NODE_NAME or this machine's name if not given."
    ),
]
