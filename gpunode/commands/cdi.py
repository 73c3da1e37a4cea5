"""`gpunode cdi`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any, NamedTuple

import typer

from gpunode.cdi import refresh
from gpunode.cdi.build import STRATEGIES, Built, Form, Sources
from gpunode.cdi.build import generate as build_generate
from gpunode.cdi.engines import installed, kept_elsewhere, readable
from gpunode.cdi.hooks import HOOK_NAMES
from gpunode.cdi.locations import (
    NVIDIA_UNITS,
    STANDARD,
    FileState,
    ListedDevice,
    files,
    listed,
    nvidia_keeps,
    nvidia_refreshes,
    refuse_conflict,
    remarks,
    rivals,
)
from gpunode.cdi.spec import FORMATS, Spec, as_tree, encode, format_of, made_by_gpunode
from gpunode.cdi.versions import NEWEST, text
from gpunode.commands.help_page import command_group
from gpunode.commands.options import (
    DEVICE,
    DRIVER,
    OUTPUT,
    DriverRootOption,
    DryRunOption,
    Strings,
    one_of,
    refuse_both,
    refuse_unknown,
)
from gpunode.commands.session import Session, verb
from gpunode.errors import GpunodeError, PreconditionError, UsageError
from gpunode.facts.cdi import DIRECTORIES, vendor_specs
from gpunode.facts.driver import loaded_module
from gpunode.host import Host
from gpunode.host.journal import FileEdit, rollback_command
from gpunode.host.transaction import UnitChanges, change_files, marked_edit
from gpunode.output.result import Block, Cell, Change, Progress, Result, Style, Table, Text, change_blocks
from gpunode.runtime.restart import engine_restart

cdi_app = command_group("Generate and list CDI specifications. They describe the GPUs to engines.")

NameOption = Annotated[
    Strings,
    typer.Option(
        "--device-name",
        "--device-name-strategy",
        metavar="index|uuid|type-index,...",
        help="Names of the devices.",
        show_default="index,uuid",
        autocompletion=one_of("index", "uuid", "type-index", comma=True),
    ),
]


@dataclass(frozen=True)
class SourceOptions:
    """Where the driver's files are, and whether hooks are used."""

    driver_root: DriverRootOption = "/"
    dev_root: Annotated[
        str,
        typer.Option(
            "--dev-root",
            metavar="PATH",
            help="Directory that contains dev/.",
            show_default="the driver root",
            rich_help_panel=DRIVER,
        ),
    ] = ""
    library_path: Annotated[
        Strings,
        typer.Option(
            "--library-path",
            "--library-search-path",
            metavar="DIR,...",
            help="Search these directories for libraries first.",
        ),
    ] = None
    hooks: Annotated[
        str,
        typer.Option(
            "--hooks",
            metavar="auto|none",
            help="Use NVIDIA's hooks, programs that prepare a container, if installed (auto), or none.",
            autocompletion=one_of("auto", "none"),
        ),
    ] = "auto"

    @property
    def sources(self) -> Sources:
        return Sources(self.driver_root, self.dev_root, tuple(self.library_path or ()), self.hooks)


@dataclass(frozen=True)
class SpecificationOptions:
    """What the specification contains, and how its devices are called."""

    vendor: Annotated[
        str, typer.Option("--vendor", help="Vendor part of the device names.", rich_help_panel=DEVICE)
    ] = "nvidia.com"
    device_class: Annotated[str, typer.Option("--class", help="Class part of the device names.")] = "gpu"
    device_name: NameOption = None
    device_id: Annotated[
        Strings,
        typer.Option(
            "--device-id",
            "--device-ids",
            metavar="ID,...",
            help="Include only these GPUs and MIG devices: index, UUID or GPU:MIG index.",
        ),
    ] = None
    no_all_device: Annotated[bool, typer.Option("--no-all-device", help="Omit the device named all.")] = False
    disable_hook: Annotated[
        Strings,
        typer.Option(
            "--disable-hook",
            "--disable-hooks",
            metavar="NAME,...",
            help="Omit these hooks, such as chmod, or all.",
            autocompletion=one_of("all", *HOOK_NAMES, comma=True),
        ),
    ] = None
    enable_hook: Annotated[
        Strings,
        typer.Option(
            "--enable-hook",
            "--enable-hooks",
            metavar="NAME,...",
            help="Keep these hooks even if --disable-hook names them.",
            autocompletion=one_of(*HOOK_NAMES, comma=True),
        ),
    ] = None
    nvidia_cdi_hook_path: Annotated[
        str,
        typer.Option(
            "--nvidia-cdi-hook-path",
            "--nvidia-ctk-path",
            metavar="PATH",
            help="Path of NVIDIA's hook program.",
            show_default="detected",
            rich_help_panel=DRIVER,
        ),
    ] = ""
    ldconfig_path: Annotated[
        str,
        typer.Option(
            "--ldconfig-path",
            metavar="PATH",
            help="Path of the ldconfig that the hooks run.",
            show_default="detected",
        ),
    ] = ""
    feature_flag: Annotated[
        Strings,
        typer.Option(
            "--feature-flag",
            "--feature-flags",
            metavar="FLAG,...",
            help="Set disable-ipc-discoverer or no-additional-gids-for-device-nodes.",
            autocompletion=one_of(
                "disable-ipc-discoverer", "no-additional-gids-for-device-nodes", comma=True
            ),
        ),
    ] = None


@verb(cdi_app, "generate", "CdiSpec", own_output=True)
def cdi_generate(
    session: Session,
    output_file: Annotated[
        str,
        typer.Option(
            "--output-file",
            "--output",
            metavar="PATH",
            help="Write to this file instead of stdout.",
            rich_help_panel=OUTPUT,
        ),
    ] = "",
    format_name: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="yaml|json",
            help="Format of the specification.",
            show_default="by the file's extension",
            autocompletion=one_of(*FORMATS),
        ),
    ] = "",
    source: SourceOptions = SourceOptions(),
    options: SpecificationOptions = SpecificationOptions(),
    mode: Annotated[str, typer.Option("--mode", "--discovery-mode", hidden=True)] = "auto",
) -> Result:
    """Print a CDI specification of the GPUs. To keep one up to date: gpunode cdi refresh --install.

    gpunode cdi generate > nvidia.yaml
    """
    host = session.host
    if mode not in ("auto", "nvml"):  # nvidia-ctk's for what isn't NVIDIA's Linux driver
        raise UsageError(
            f"--mode {mode} has no counterpart: gpunode describes the GPUs of NVIDIA's Linux driver",
            hint=f"nvidia-ctk cdi generate --mode={mode}",
        )
    sources, form = _requested(source, options)
    path, file_format = destination(output_file, format_name)
    check(sources, form)
    built = make(host, sources, form, session.progress)
    data = encode(built.spec, file_format)
    if not path:
        document = Text(data.decode().removesuffix("\n"), Style.DOCUMENT)
        return Result(
            "CdiSpec", _data("", "", file_format, built.spec), messages=built.notes, blocks=(document,)
        )
    conflicts = rivals(host, path, built.spec)
    refuse_conflict(conflicts)
    action = write(host, path, data)
    notes = (*built.notes, *remarks(conflicts))
    where = "" if host.live else f" (under --root {host.root})"
    blocks = (
        Text(f"{path} {action}{where}", Style.PLAIN if action == "unchanged" else Style.GOOD),
        devices_line(built),
    )
    return Result("CdiSpec", _data(path, action, file_format, built.spec), messages=notes, blocks=blocks)


@verb(cdi_app, "list", "CdiDevices")
def cdi_list(
    session: Session,
    spec_dir: Annotated[
        Strings,
        typer.Option(
            "--spec-dir",
            metavar="DIR,...",
            help="Directories of specifications; later ones win.",
            show_default=",".join(DIRECTORIES),
        ),
    ] = None,
) -> Result:
    """List NVIDIA's CDI devices. The list has the file of each, and whether an engine can use it.

    gpunode cdi list
    """
    for directory in spec_dir or ():
        if not session.host.is_dir(directory):
            raise UsageError(f"--spec-dir {directory}: there is no such directory", hint="--spec-dir /DIR")
    host, directories = session.host, tuple(spec_dir or DIRECTORIES)
    specs, module = vendor_specs(host, directories), loaded_module(host)
    devices = listed(host, specs, module.version if module else "", directories)
    data = CdiDevices(directories, files(host, specs, installed(host)), devices)
    unusable = any(device.state not in _STYLES for device in data.devices)
    has_problems = unusable or any(file.problem for file in data.files)
    return Result("CdiDevices", data, "warn" if has_problems else "ok", blocks=_blocks(data))


@verb(cdi_app, "refresh", "CdiRefresh")
def cdi_refresh(
    session: Session,
    source: SourceOptions = SourceOptions(),
    device_name: NameOption = None,
    install: Annotated[
        bool,
        typer.Option(
            "--install", help="Install a systemd unit and a udev rule that refresh it when the GPUs change."
        ),
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the units of --install.")] = False,
    dry_run: DryRunOption = False,
) -> Result:
    """Write /var/run/cdi/nvidia.yaml if the GPUs changed. The file is removed if the driver is not loaded.

    Needs root, except with --dry-run.

    gpunode cdi refresh --dry-run

    sudo gpunode cdi refresh --install
    """
    refuse_both(install=install, remove=remove)
    if install or remove:
        return change_units(session.host, session.progress, remove=remove, dry_run=dry_run)
    form = Form(names=tuple(device_name or Form().names))
    return refresh_specification(session.host, source.sources, form, session.progress, dry_run=dry_run)


# `gpunode cdi list`: the CDI devices of this node, their files, and which of them an engine can use.

_STYLES = {"usable": Style.GOOD, "hidden": Style.DIM}


class CdiDevices(NamedTuple):
    """`data` of the envelope. `devices` are in the engines' order; a later directory wins."""

    directories: tuple[str, ...]
    files: tuple[FileState, ...]
    devices: tuple[ListedDevice, ...]


def _blocks(data: CdiDevices) -> tuple[Block, ...]:
    if not data.files:
        empty = f"no CDI specification of NVIDIA's in {' or '.join(data.directories)}"
        return Text(empty, Style.WARN), Text("make one: gpunode cdi refresh", Style.COMMAND)
    page: list[Block] = []
    if data.devices:
        rows = tuple(
            (
                device.name,
                device.path,
                Cell(device.state, _STYLES.get(device.state, Style.BAD)),
                device.reason,
            )
            for device in data.devices
        )
        page.append(Table(("DEVICE", "FILE", "STATE", ""), rows))
    page += [Text(f"{file.path}: {file.problem}", Style.BAD) for file in data.files if file.problem]
    if any(device.state == "stale" for device in data.devices):
        page.append(Text("describe the node as it is now: gpunode cdi refresh", Style.COMMAND))
    return tuple(page)


# What `cdi generate` and `cdi refresh` share: options, and the function that builds the specification.

HOOKS = ("auto", "none")
_NO_GIDS, _NO_SOCKETS = "no-additional-gids-for-device-nodes", "disable-ipc-discoverer"
_FLAGS = (_NO_GIDS, _NO_SOCKETS)
_NO_EFFECT = ("disable-nvsandboxutils",)  # gpunode doesn't use that library


def check(sources: Sources, form: Form) -> None:
    """`UsageError` for values that CDI or gpunode doesn't support; names follow CDI's own rules (its
    parser.go)."""
    refuse_unknown("--hooks", [sources.hooks], HOOKS)
    refuse_unknown("--device-name", form.names, STRATEGIES)
    for device in sources.device_ids:
        if not re.fullmatch(r"all|\d+(:\d+)?|(GPU|MIG)-.+", device, re.ASCII):
            raise UsageError(
                f"--device-id {device!r} is neither an index nor a UUID",
                hint="an index, a UUID, GPU:MIG by index, or all; list them: gpunode gpus",
            )
    for option, value, pattern in (
        ("--vendor", form.vendor, r"[A-Za-z]([\w.-]*[A-Za-z0-9])?"),
        ("--class", form.device_class, r"[A-Za-z]([\w.-]*[A-Za-z0-9])?"),
    ):
        if not re.fullmatch(pattern, value, re.ASCII):
            raise UsageError(
                f"{option} {value!r} can't be part of a device's name",
                hint="letters, digits, '-', '_' and '.'; a letter first, a letter or digit last",
            )
    for option, path in (
        ("--driver-root", sources.driver_root),
        ("--dev-root", sources.dev_root or "/"),
        *(("--library-path", path) for path in sources.library_path),
        ("--nvidia-cdi-hook-path", sources.hook_path or "/"),
        ("--ldconfig-path", sources.ldconfig or "/"),
    ):
        if not path.startswith("/"):
            raise UsageError(f"{option} {path!r} is not an absolute path", hint=f"{option} /PATH")


def _requested(source: SourceOptions, options: SpecificationOptions) -> tuple[Sources, Form]:
    disabled, enabled = options.disable_hook or [], options.enable_hook or []
    hooks, flags = source.hooks, options.feature_flag or []
    _check_nvidia_ctk(disabled, enabled, flags)
    if "all" in disabled:
        hooks = hooks if enabled or hooks not in HOOKS else "none"
        disabled = list(HOOK_NAMES)
    sources = source.sources._replace(
        hooks=hooks,
        hook_path=options.nvidia_cdi_hook_path,
        ldconfig=options.ldconfig_path,
        disabled_hooks=frozenset(disabled) - frozenset(enabled),
        sockets=_NO_SOCKETS not in flags,
        device_ids=tuple(options.device_id or ()),
    )
    form = Form(
        *(options.vendor, options.device_class, tuple(options.device_name or Form().names)),
        every=not options.no_all_device,
        groups=_NO_GIDS not in flags,
    )
    return sources, form


def _check_nvidia_ctk(disabled: Sequence[str], enabled: Sequence[str], flags: Sequence[str]) -> None:
    """Options of nvidia-ctk that have no effect here."""
    for option, names, known in (
        ("--disable-hook", disabled, (*HOOK_NAMES, "chmod", "all")),
        ("--enable-hook", enabled, HOOK_NAMES),
        ("--feature-flag", flags, (*_FLAGS, *_NO_EFFECT)),
    ):
        for word in names:
            if word not in known:
                raise UsageError(
                    f"{option} {word} has no counterpart: gpunode never writes that",
                    hint=f"known: {', '.join(known)}",
                )


def make(host: Host, sources: Sources, form: Form, progress: Progress) -> Built:
    """Query the node and build the specification, in a version that every engine on it reads."""
    dev_root = sources.dev_root or sources.driver_root
    limit = readable(host, dev_root, dots="." in form.device_class)
    with progress.step("querying NVML and finding the driver's files"):
        return build_generate(host, sources, form._replace(limit=limit))


# `gpunode cdi generate`: a CDI specification of this node's GPUs, on stdout or in a file.


class CdiSpec(NamedTuple):
    """`data` of the envelope. `path` is empty for stdout, where `action` is empty too; `spec` is the content.

    `hooks` is whether the specification needs NVIDIA's hook program when a container starts.
    """

    path: str
    action: str
    format: str
    cdi_version: str
    kind: str
    devices: tuple[str, ...]
    hooks: bool
    spec: dict[str, Any]


def destination(output: str, form: str) -> tuple[str, str]:
    """Path (empty for stdout) and format. `UsageError` for names that engines wouldn't read."""
    path = "" if output == "-" else output
    refuse_unknown("--format", [form] if form else [], FORMATS)
    if not path:
        return "", form or "yaml"
    if path in ("table", "json", "yaml"):
        raise UsageError(
            f"--output {path}: here --output names the file to write, as in nvidia-ctk",
            hint=f"for the result as {path}: -o {path}; for a file of that name: --output-file ./{path}",
        )
    file_format = format_of(path)
    if file_format is None:
        form = form or "yaml"
        return f"{path}.{form}", form  # nvidia-ctk does so too
    if form and form != file_format:
        raise UsageError(
            f"--format {form} contradicts the name {path}: engines go by the extension",
            hint=f"--output-file {path.removesuffix(file_format)}{form}",
        )
    return path, file_format


def write(host: Host, path: str, data: bytes) -> str:
    """created, updated or unchanged."""
    if not path.startswith("/") and not host.live:
        raise UsageError(f"--output-file {path!r} is not an absolute path", hint="--output-file /PATH")
    before = host.read_bytes(path)
    if before == data:
        return "unchanged"
    host.make_dirs(str(PurePosixPath(path).parent))
    host.write_atomic(path, data)
    return "created" if before is None else "updated"


def devices_line(built: Built) -> Text:
    """The devices on one line."""
    spec = built.spec
    all_names = [device.name for device in spec.devices if device.name != "all"]
    short = [name for name in all_names if name[0].isdigit()]
    names = short or all_names
    every = " and all" if any(device.name == "all" for device in spec.devices) else ""
    also = ", also by UUID" if short and len(short) < len(all_names) else ""
    hooks = "NVIDIA's hooks" if spec.edits.hooks else "no hooks"
    return Text(f"{spec.kind}: {', '.join(names)}{every}{also}; CDI {text(spec.version)}, {hooks}", Style.DIM)


def _data(path: str, action: str, form: str, spec: Spec) -> CdiSpec:
    names = tuple(device.name for device in spec.devices)
    return CdiSpec(
        path, action, form, text(spec.version), spec.kind, names, bool(spec.edits.hooks), as_tree(spec)
    )


# `gpunode cdi refresh`: update the standard specification, or remove it after the driver is gone.

_GONE = "the driver isn't loaded: no specification to write"


class CdiRefresh(NamedTuple):
    """`data` of the envelope: what happened to each file, and the units that were enabled or disabled."""

    changes: tuple[Change, ...]
    units: tuple[str, ...] = ()
    journal: str = ""
    dry_run: bool = False


def refresh_specification(
    host: Host, sources: Sources, form: Form, progress: Progress, *, dry_run: bool = False
) -> Result:
    """Write `STANDARD` if it differs from the node's present state; kind CdiRefresh.

    Without a driver our own file is removed, and that is success: a unit that runs at every change must not
    fail before the driver is loaded. `GpunodeError` if a loaded driver can't be described.
    """
    check(sources, form)
    before = host.read_bytes(STANDARD)
    module = loaded_module(host)
    if module is not None and not module.live:
        raise GpunodeError(
            "the driver is just being loaded or unloaded",
            hint="run this again in a moment",
            code="driver-busy",
        )
    elsewhere = {path: host.read_bytes(path) for path in kept_elsewhere(host)}
    if module is None:
        own_files = {**({STANDARD: before} if made_by_gpunode(before) else {}), **elsewhere}
        if not dry_run:
            for path in own_files:
                host.remove(path)
        edits = [FileEdit(path, present, None) for path, present in own_files.items()]
        return _result(dry_run, edits or [FileEdit(STANDARD, before, before)], (_GONE,))
    built = make(host, sources, form, progress)
    conflicts = rivals(host, STANDARD, built.spec)
    refuse_conflict(conflicts)
    notes = (*built.notes, *remarks(conflicts))
    data = encode(built.spec, "yaml")
    edits = [FileEdit(path, present, data) for path, present in ({STANDARD: before} | elsewhere).items()]
    if nvidia_keeps(host, built, NEWEST):
        notes = (*notes, f"nvidia-cdi-refresh.service keeps {STANDARD}, which has all devices")
        edits[0] = FileEdit(STANDARD, before, before)
    for edit in edits if not dry_run else ():
        if edit.after != edit.before:
            write(host, edit.path, data)
    changed = any(edit.after is data for edit in edits)
    return _result(dry_run, edits, notes, *((devices_line(built),) if changed else ()))


def _result(dry_run: bool, edits: Sequence[FileEdit], notes: tuple[str, ...], *more: Block) -> Result:
    changes = tuple(edit.change() for edit in edits if (edit.before, edit.after) != (None, None))
    data = CdiRefresh(changes, dry_run=dry_run)
    blocks = (*change_blocks(changes, dry_run=dry_run), *more)
    return Result("CdiRefresh", data, messages=notes, blocks=blocks)


# `gpunode cdi refresh --install|--remove`: the units and the udev rule that keep the specification up to
# date.

OPERATION = "cdi-refresh"


def change_units(host: Host, progress: Progress, *, remove: bool = False, dry_run: bool = False) -> Result:
    """Install, or with `remove` remove the files; kind CdiRefresh. `PreconditionError` where systemd doesn't
    run or NVIDIA's own units do the work already; `ConfigError` for a file of that name that gpunode didn't
    write.
    """
    if not remove:
        _refuse(host)

    directories = [path.rpartition("/")[0] for path in kept_elsewhere(host)]

    def plan() -> tuple[FileEdit, ...]:
        return tuple(
            marked_edit(host, path, None if remove else data, refresh.MARKER)
            for path, data in refresh.files(host, directories)
        )

    installed_units = tuple(unit for unit in refresh.UNITS if host.is_file(f"/etc/systemd/system/{unit}"))
    restart = engine_restart(host, progress)
    changed = change_files(host, OPERATION, plan, restart, named_units=refresh.UNITS, dry_run=dry_run)
    if not dry_run:
        _reload_udev_rules(host, not remove and not changed.journal)
    units = installed_units if remove else refresh.UNITS
    data = CdiRefresh(changed.changes, units, changed.journal, dry_run)
    page = change_blocks(data.changes, dry_run=dry_run)
    if changed.journal:
        page.append(Text(f"undo it with: {rollback_command(host, changed.journal)}", Style.DIM))
    return Result("CdiRefresh", data, messages=changed.notes, blocks=tuple(page))


def _refuse(host: Host) -> None:
    if not host.systemd_runs():
        raise PreconditionError(
            "systemd doesn't run on this node, so it can't refresh the specification",
            hint="run `gpunode cdi refresh` from whatever starts services here, after the driver is loaded",
            code="no-systemd",
        )
    if nvidia_refreshes(host):
        raise PreconditionError(
            f"{NVIDIA_UNITS[1]} is enabled and writes the same file: they would overwrite each other",
            hint=f"keep that one, or: systemctl disable --now {' '.join(NVIDIA_UNITS)}",
            code="nvidia-cdi-refresh",
        )


def _reload_udev_rules(host: Host, again: bool) -> None:
    """Make udev read the current rules; with `again` enable units whose files exist already."""
    if again:
        UnitChanges(enable=refresh.UNITS).after_files(host)
    if host.live and host.which("udevadm"):
        host.run(("udevadm", "control", "--reload"), timeout=30.0)
