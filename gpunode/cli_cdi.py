"""`gpunode cdi ...`: which commands and options there are; the commands are imported when they run."""

# no `from __future__ import annotations`: Typer reads these annotations as objects

from typing import TYPE_CHECKING, Annotated

import typer

from gpunode.commands.options import DryRunOption, Strings
from gpunode.commands.outcome import Session
from gpunode.commands.session import verb

if TYPE_CHECKING:
    from gpunode.commands.cdi_options import Content
    from gpunode.output.result import Result

cdi_app = typer.Typer(
    help="Name the GPUs to engines by CDI specifications.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

DriverRootOption = Annotated[
    str, typer.Option("--driver-root", metavar="DIR", help="Where the driver is installed.")
]
DevRootOption = Annotated[
    str, typer.Option("--dev-root", metavar="DIR", help="Above its dev/; the driver root if not given.")
]
LibraryPathOption = Annotated[
    Strings,
    typer.Option(
        "--library-path",
        "--library-search-path",
        metavar="DIR",
        help="Look for libraries here first (repeatable).",
    ),
]
HooksOption = Annotated[
    str,
    typer.Option(
        "--hooks", metavar="WHICH", help="auto: NVIDIA's hooks where nvidia-cdi-hook is; none: without."
    ),
]
VendorOption = Annotated[str, typer.Option("--vendor", help="Vendor in the devices' names.")]
ClassOption = Annotated[str, typer.Option("--class", help="Class in the devices' names.")]
NameOption = Annotated[
    Strings,
    typer.Option(
        "--device-name",
        "--device-name-strategy",
        metavar="KIND",
        help="index, uuid or type-index (repeatable); index and uuid without.",
    ),
]


DeviceIdOption = Annotated[
    Strings,
    typer.Option(
        "--device-id",
        "--device-ids",
        metavar="ID",
        help="Only this GPU or MIG device, by index, UUID or GPU:MIG index (repeatable).",
    ),
]
DisableHookOption = Annotated[
    Strings,
    typer.Option(
        "--disable-hook",
        "--disable-hooks",
        metavar="NAME",
        help="Leave this hook out; all: as --hooks none (repeatable).",
    ),
]
EnableHookOption = Annotated[
    Strings,
    typer.Option(
        "--enable-hook",
        "--enable-hooks",
        metavar="NAME",
        help="Keep this hook although --disable-hook names it (repeatable).",
    ),
]
HookPathOption = Annotated[
    str,
    typer.Option(
        "--nvidia-cdi-hook-path",
        "--nvidia-ctk-path",
        metavar="PATH",
        help="NVIDIA's hook program; found if not given.",
    ),
]
LdconfigOption = Annotated[
    str, typer.Option("--ldconfig-path", metavar="PATH", help="The ldconfig that the hooks run.")
]
FeatureFlagOption = Annotated[
    Strings,
    typer.Option(
        "--feature-flag",
        "--feature-flags",
        metavar="FLAG",
        help="disable-ipc-discoverer or no-additional-gids-for-device-nodes (repeatable).",
    ),
]


@verb(cdi_app, "generate", "CdiSpec", own_output=True)
def cdi_generate(
    session: Session,
    output_path: Annotated[
        str, typer.Option("--output", metavar="PATH", help="Write this file instead of stdout.")
    ] = "",
    format_name: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="yaml or json; else by the file's name.")
    ] = "",
    driver_root: DriverRootOption = "/",
    dev_root: DevRootOption = "",
    library_path: LibraryPathOption = None,
    hooks: HooksOption = "auto",
    vendor: VendorOption = "nvidia.com",
    device_class: ClassOption = "gpu",
    device_name: NameOption = None,
    device_id: DeviceIdOption = None,
    no_all_device: Annotated[bool, typer.Option("--no-all-device", help="Add no device named all.")] = False,
    disable_hook: DisableHookOption = None,
    enable_hook: EnableHookOption = None,
    nvidia_cdi_hook_path: HookPathOption = "",
    ldconfig_path: LdconfigOption = "",
    feature_flag: FeatureFlagOption = None,
    mode: Annotated[str, typer.Option("--mode", "--discovery-mode", hidden=True)] = "auto",
) -> "Result":
    """Print a CDI specification of the GPUs. Every engine on this node can read it.

    gpunode cdi generate --output /var/run/cdi/nvidia.yaml
    """
    from dataclasses import replace

    from gpunode.commands import cdi_generate as command
    from gpunode.commands.nvidia_ctk_options import refuse_mode

    refuse_mode(mode)
    content = replace(
        _content(driver_root, dev_root, library_path, hooks, vendor, device_class, device_name),
        device_ids=tuple(device_id or ()),
        every=not no_all_device,
        disabled_hooks=tuple(disable_hook or ()),
        enabled_hooks=tuple(enable_hook or ()),
        hook_path=nvidia_cdi_hook_path,
        ldconfig=ldconfig_path,
        feature_flags=tuple(feature_flag or ()),
    )
    return command.run(session.host, command.Options(output_path, format_name, content), session.progress)


@verb(cdi_app, "list", "CdiDevices")
def cdi_list(
    session: Session,
    spec_dir: Annotated[
        Strings,
        typer.Option(
            "--spec-dir",
            metavar="DIR",
            help="Read specifications here, later ones win (repeatable); else /etc/cdi and /var/run/cdi.",
        ),
    ] = None,
) -> "Result":
    """List NVIDIA's CDI devices. Each with its file, and whether an engine can use it.

    gpunode cdi list
    """
    from gpunode.commands import cdi_list as command

    options = command.Options(tuple(spec_dir)) if spec_dir else command.Options()
    return command.run(session.host, options, session.progress)


@verb(cdi_app, "refresh", "CdiRefresh")
def cdi_refresh(
    session: Session,
    driver_root: DriverRootOption = "/",
    dev_root: DevRootOption = "",
    library_path: LibraryPathOption = None,
    hooks: HooksOption = "auto",
    device_name: NameOption = None,
    install: Annotated[
        bool, typer.Option("--install", help="Let systemd and udev do it whenever the GPUs change.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Take those units away again.")] = False,
    dry_run: DryRunOption = False,
) -> "Result":
    """Write /var/run/cdi/nvidia.yaml if the GPUs changed. Takes it away if the driver is gone.

    gpunode cdi refresh --install
    """
    if install or remove:
        from gpunode.commands import cdi_units

        return cdi_units.run(session.host, cdi_units.Options(install, remove, dry_run), session.progress)
    from gpunode.commands import cdi_refresh as command

    content = _content(driver_root, dev_root, library_path, hooks, "nvidia.com", "gpu", device_name)
    return command.run(session.host, command.Options(content, dry_run), session.progress)


def _content(
    driver_root: str,
    dev_root: str,
    library_path: Strings,
    hooks: str,
    vendor: str,
    device_class: str,
    device_name: Strings,
) -> "Content":
    from gpunode.commands.cdi_options import Content

    names = tuple(device_name or ("index", "uuid"))
    paths = tuple(library_path or ())
    return Content(driver_root, dev_root, paths, hooks, vendor, device_class, names)
