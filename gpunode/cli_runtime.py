"""The verbs that change a container engine's configuration, and take it back."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from typing import TYPE_CHECKING, Annotated

import typer

from gpunode.commands.options import (
    AlsoOption,
    CdiOption,
    ConfigModeOption,
    ConfigOption,
    ConfigSourceOption,
    DefaultOption,
    DropInOption,
    DryRunOption,
    ExecutableOption,
    ExitCodeOption,
    HookFileOption,
    HookProgramOption,
    NameOption,
    NoRestartOption,
    NoVerifyOption,
    ProgramOption,
    ReplaceOption,
    RestartCommandOption,
    RuntimesOption,
    SocketOption,
    YesOption,
)
from gpunode.commands.outcome import Session
from gpunode.commands.session import verb

if TYPE_CHECKING:
    from gpunode.output.result import Result

runtime_app = typer.Typer(rich_markup_mode=None)


@verb(runtime_app, "configure-runtime", "RuntimeConfiguration")
def configure_runtime(
    session: Session,
    runtime: RuntimesOption = None,
    config: ConfigOption = "",
    drop_in_config: DropInOption = "",
    nvidia_runtime_name: NameOption = "nvidia",
    nvidia_runtime_path: ProgramOption = "",
    set_as_default: DefaultOption = False,
    cdi: CdiOption = False,
    also: AlsoOption = "",
    replace: ReplaceOption = False,
    dry_run: DryRunOption = False,
    exit_code: ExitCodeOption = False,
    no_restart: NoRestartOption = False,
    restart_command: RestartCommandOption = "",
    no_verify: NoVerifyOption = False,
    socket: SocketOption = "",
    yes: YesOption = False,
    config_mode: ConfigModeOption = "",
    config_source: ConfigSourceOption = "",
    executable_path: ExecutableOption = "",
    oci_hook_path: HookFileOption = "",
    nvidia_runtime_hook_path: HookProgramOption = "",
) -> "Result":
    """Register the nvidia runtime with the engine. Restarts or reloads it, asks it, puts all back on failure.

    gpunode configure-runtime --runtime containerd --dry-run

    gpunode configure-runtime --runtime docker
    """
    from gpunode.commands import configure_runtime as command
    from gpunode.commands.nvidia_ctk_options import refuse_configure_options

    refused = {"--config-source": config_source, "--executable-path": executable_path}
    refused |= {"--oci-hook-path": oci_hook_path, "--nvidia-runtime-hook-path": nvidia_runtime_hook_path}
    refuse_configure_options(refused, config_mode)
    request = command.Request(
        runtimes=tuple(runtime or ("auto",)),
        config=config,
        drop_in_config=drop_in_config,
        socket=socket,
        restart_command=restart_command,
        dry_run=dry_run,
        exit_code=exit_code,
        no_restart=no_restart,
        no_verify=no_verify,
        yes=yes,
        configures=True,
    )
    options = command.Options(
        request,
        nvidia_runtime_name=nvidia_runtime_name,
        nvidia_runtime_path=nvidia_runtime_path,
        set_as_default=set_as_default,
        cdi=cdi,
        also=tuple(filter(None, also.replace(" ", "").split(","))),
        replace=replace,
    )
    return command.run(session.host, options, session.progress)


@verb(runtime_app, "unconfigure-runtime", "RuntimeConfiguration")
def unconfigure_runtime(
    session: Session,
    runtime: RuntimesOption = None,
    config: ConfigOption = "",
    drop_in_config: DropInOption = "",
    nvidia_runtime_name: NameOption = "nvidia",
    cdi: Annotated[
        bool,
        typer.Option(
            "--cdi",
            help="Take CDI out as well: the engine's switch, whoever set it, and the files of ours.",
        ),
    ] = False,
    dry_run: DryRunOption = False,
    no_restart: NoRestartOption = False,
    restart_command: RestartCommandOption = "",
    socket: SocketOption = "",
    yes: YesOption = False,
) -> "Result":
    """Take the nvidia runtime out again. The previous default runtime is put back.

    gpunode unconfigure-runtime --runtime docker
    """
    from gpunode.commands import unconfigure_runtime as command

    request = command.Request(
        runtimes=tuple(runtime or ("auto",)),
        config=config,
        drop_in_config=drop_in_config,
        socket=socket,
        restart_command=restart_command,
        dry_run=dry_run,
        no_restart=no_restart,
        yes=yes,
    )
    options = command.Options(request, nvidia_runtime_name=nvidia_runtime_name, cdi=cdi)
    return command.run(session.host, options, session.progress)


@verb(runtime_app, "rollback", "Rollback")
def rollback(
    session: Session,
    entry: Annotated[
        str, typer.Argument(metavar="[ID]", help="A journal entry; the last one if not given.")
    ] = "",
    dry_run: DryRunOption = False,
    no_restart: NoRestartOption = False,
    restart_command: RestartCommandOption = "",
    yes: YesOption = False,
) -> "Result":
    """Restore the files of a journal entry. Byte for byte; then the engine is restarted or reloaded.

    gpunode rollback
    """
    from gpunode.commands import rollback as command

    options = command.Options(
        id=entry, dry_run=dry_run, no_restart=no_restart, restart_command=restart_command, yes=yes
    )
    return command.run(session.host, options, session.progress)
