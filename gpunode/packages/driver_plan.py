"""The driver's plan: what the GPUs and the kernel need, the reasons and sources, and the commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gpunode.facts.driver import branch
from gpunode.facts.driver_targets import RUN_INSTALLER
from gpunode.facts.fabric import UNIT
from gpunode.facts.kernel_modules import INITRAMFS, NOUVEAU_FILE, NOUVEAU_TEXT, NOVA_FILE, NOVA_TEXT
from gpunode.facts.system import CONTAINER, TEGRA, WSL2
from gpunode.host import Host
from gpunode.output.result import some_of
from gpunode.packages.driver_choice import Choice, against_unknown, choose, is_known, known_as_of
from gpunode.packages.driver_model import OPEN, Decision, DriverPackage, DriverPlan, Refusal, Situation, Wish
from gpunode.packages.driver_source import (
    CUDA_RPM,
    DKMS,
    PACKAGES,
    PREBUILT,
    Name,
    PackageSelection,
    Route,
    choose_route,
    driver_version,
    lacking_headers,
    package_names,
    resolve,
    to_build,
)
from gpunode.packages.find import find_manager
from gpunode.packages.manager import (
    Command,
    FileChange,
    Manager,
    PackageChange,
    PackageRequest,
    PackagesError,
    PackageState,
    Trouble,
)

# The plan's files and commands, in the order in which they are carried out.

_APT_LIST = "/etc/apt/sources.list.d/nvidia-driver.list"
_APT_KEY = "/etc/apt/keyrings/nvidia-driver.asc"
_RPM_KEY = "/etc/pki/rpm-gpg/RPM-GPG-KEY-nvidia-driver"
_ARCHIVES = "/var/cache/apt/archives"
_FABRIC_MANAGER = ("nvidia-fabricmanager", "nvidia-fabric-manager")
_MODULE = "nvidia-driver"
_UMAD_FILE = "/etc/modules-load.d/gpunode-nvlink.conf"
_INITRAMFS_SECONDS = 900.0


def repository_files(route: Route, family: str) -> tuple[FileChange, ...]:
    """The file of NVIDIA's repository, and its key's if one was passed.

    None where a package installs both.
    """
    if not route.add or (family == "debian" and not route.key):
        return ()
    key_file = _APT_KEY if family == "debian" else _RPM_KEY
    keys = (FileChange(key_file, route.key, "the mirror's key"),) if route.key else ()
    if family == "debian":
        text = f"deb [signed-by={key_file}] {route.base} /\n"
        return (*keys, FileChange(_APT_LIST, text.encode(), "a mirror of NVIDIA's repository"))
    alias = f"cuda-{route.directory}-{route.base.rpartition('/')[2]}"
    directory = "/etc/zypp/repos.d" if family == "suse" else "/etc/yum.repos.d"
    text = (
        f"[{alias}]\nname={alias}\nbaseurl={route.base}\nenabled=1\ngpgcheck=1\n"
        f"gpgkey={f'file://{key_file}' if route.key else f'{route.base}/{route.setup}'}\n"
    )
    return (*keys, FileChange(f"{directory}/{alias}.repo", text.encode(), "NVIDIA's repository"))


def make_known(route: Route, manager: Manager) -> tuple[Command, ...]:
    """The commands that must run before the repository's versions are known."""
    if not route.add:
        return ()
    if manager.name != "apt":
        return (manager.refresh(),)
    if route.key:
        return (manager.refresh(_APT_LIST),)
    package = f"{_ARCHIVES}/{route.setup}"
    fetch = ("/usr/lib/apt/apt-helper", "download-file", f"{route.base}/{route.setup}", package)
    return (
        Command(fetch, seconds=300.0, changes=False),
        manager.install_files((package,)),
        manager.refresh(),
    )


def files(situation: Situation, route: Route) -> tuple[FileChange, ...]:
    """The repository's files, and the file that disables nouveau at the next boot."""
    changes = [*repository_files(route, situation.distribution.family)]
    if not situation.nouveau_kept_out:
        changes.append(FileChange(NOUVEAU_FILE, NOUVEAU_TEXT.encode(), "nouveau stays away from the GPUs"))
    if any(driver_name.lower().startswith("nova") for driver_name in situation.nouveau):
        changes.append(FileChange(NOVA_FILE, NOVA_TEXT.encode(), "nova stays away from the GPUs"))
    if situation.switches and situation.nvlink5:
        changes.append(
            FileChange(_UMAD_FILE, b"ib_umad\n", "the fabric manager talks to the switches through it")
        )
    return tuple(changes)


def changes_stream(situation: Situation, route: Route, choice: Choice) -> bool:
    """Whether another stream of the dnf module must be enabled; until then its packages are hidden."""
    return route.modular and situation.stream != _stream(choice)


def _stream(choice: Choice) -> str:
    return f"{choice.branch}-{'open' if choice.flavour == OPEN else 'dkms'}"


def streams(
    situation: Situation, route: Route, choice: Choice, manager: Manager
) -> tuple[tuple[Command, ...], tuple[Command, ...]]:
    """The commands that enable the dnf module's stream for this branch and flavour, where branches are
    streams; and those that restore the earlier stream."""
    if not changes_stream(situation, route, choice):
        return (), ()

    def module(verb: str, what: str) -> Command:
        return Command((getattr(manager, "program", manager.name), "-y", "module", verb, what))

    reset, enable = module("reset", _MODULE), module("enable", f"{_MODULE}:{_stream(choice)}")
    if not situation.stream:
        return (enable,), (reset,)
    return (reset, enable), (reset, module("enable", f"{_MODULE}:{situation.stream}"))


def install_commands(
    packages: Sequence[DriverPackage],
    headers: Sequence[PackageRequest],
    manager: Manager,
    *,
    limit: str,
    switching: bool,
) -> tuple[Command, ...]:
    """Headers first, so that DKMS finds them; then the pin of the branch; then all of the driver at once.

    Packages of which the version isn't known yet are limited to the branch or version `limit`: a bare name
    would install the newest driver.
    """
    commands = [manager.install(headers)] if headers else []
    pins = [
        package
        for package in packages
        if is_pin(package.name) and (not package.version or package.installed != package.version)
    ]
    rest = [package for package in packages if not is_pin(package.name)]
    commands += [manager.install(_requests(pins, limit))] if pins else []
    older = any(package.installed and package.installed != package.version for package in rest)
    install = manager.install(_requests(rest, limit), downgrade=older and manager.name != "dnf")
    commands.append(_erasing(install, manager) if switching else install)
    return tuple(commands)


def is_pin(name: str) -> bool:
    """Whether this package of NVIDIA's pins apt to one branch."""
    return "-pinning-" in name


def _requests(packages: Sequence[DriverPackage], limit: str) -> tuple[PackageRequest, ...]:
    return tuple(
        PackageRequest(package.name, package.version, limit if package.exact else "") for package in packages
    )


def _erasing(command: Command, manager: Manager) -> Command:
    """Remove the old branch or flavor; apt does so itself for packages that conflict."""
    words = {"dnf": "--allowerasing", "zypper": "--force-resolution"}
    word = words.get(manager.name)
    if word is None or "install" not in command.argv:
        return command
    at = command.argv.index("install") + 1
    return command._replace(argv=(*command.argv[:at], word, *command.argv[at:]))


def settling(situation: Situation) -> tuple[Command, ...]:
    """Part of the install itself: an initramfs that disables nouveau as the file does."""
    if situation.nouveau_kept_out:
        return ()
    family = INITRAMFS.get(situation.distribution.family, ())
    return tuple(Command(argv, seconds=_INITRAMFS_SECONDS) for argv in family)


def finishing_commands(
    situation: Situation, packages: Sequence[DriverPackage], hold: Sequence[Command], *, reboot: bool
) -> tuple[Command, ...]:
    """The commands that start the driver, and the hold that was requested.

    It starts now if nothing prevents that, else at the next boot.
    """
    commands: list[Command] = []
    fabric = ("ib_umad",) if situation.switches and situation.nvlink5 else ()
    if not reboot:
        modules = ("nvidia", "nvidia-uvm", *fabric)
        commands += [Command(("modprobe", name), seconds=120.0, changes=False) for name in modules]
    # the fabric manager before persistence, which is a unit of every driver
    managed = any(package.name.startswith(_FABRIC_MANAGER) for package in packages)
    for unit in (*((UNIT,) if managed else ()), "nvidia-persistenced.service"):
        now = () if reboot else ("--now",)
        commands.append(Command(("systemctl", "enable", *now, unit), seconds=180.0, changes=False))
    return (*commands, *hold)


# When gpunode refuses to install a driver: it would break running work, or not start afterwards.

_FEW = 3
_OTHERWISE = "build it into the image (bootc, rpm-ostree), or take the GPU operator's driver container"
_TRANSACTIONAL = (
    "install it into the next snapshot and reboot: transactional-update pkg install"
    " nvidia-open-driver-G07-signed-cuda-kmp-default, then nvidia-compute-utils-G07 at its version"
    " (G06 in place of G07 for branch 580 and older)"
)
_INSTEAD = {
    "talos": "put nvidia-open-gpu-kernel-modules and nvidia-container-toolkit into the image's schematic",
    "bottlerocket": "boot one of its -nvidia variants, which have the driver",
    "cos": "it has an installer of its own: cos-extensions install gpu",
    "flatcar": "take its nvidia-drivers system extension, or the GPU operator's driver container",
    "nixos": "set hardware.nvidia and services.xserver.videoDrivers, then nixos-rebuild switch",
    **dict.fromkeys(("sle-micro", "sl-micro", "opensuse-microos"), _TRANSACTIONAL),
    "guix": "declare the driver in the system configuration, then guix system reconfigure",
}
_MAKE_KEY = {  # dkms(8) and Ubuntu's shim-signed; each is enrolled with a password that the console asks for
    True: "update-secureboot-policy --new-key && mokutil --import /var/lib/shim-signed/mok/MOK.der",
    False: "dkms generate_mok && mokutil --import /var/lib/dkms/mok.pub",
}
_REFRESH = {"apt": "apt-get update", "dnf": "dnf makecache --refresh", "zypper": "zypper refresh"}


def hint_of(code: str, manager: str, message: str) -> str:
    """The hint for a package manager's error during a driver's installation; else `message`."""
    refresh = _REFRESH.get(manager, "refresh its indexes")
    return {
        Trouble.SIGNATURE: "the repository's key is missing, expired or another: put the right one in place",
        Trouble.CONFLICTING_SOURCES: "two files name NVIDIA's repository with different keys: keep one",
        Trouble.NETWORK: "see the network and the proxy (sudo drops http_proxy: sudo -E), or name a mirror "
        f"with --repository; old indexes too: {refresh}",
        Trouble.NO_REPOSITORY: "there is nothing at that address: --repository takes the directory that "
        "holds rhel9, ubuntu2404 and so on",
        Trouble.NOT_FOUND: f"{manager}'s indexes are old: {refresh}, then gpunode driver plan",
        "half-installed": "compare the current and the planned state: gpunode driver plan",
    }.get(code, message)


def against_system(situation: Situation) -> tuple[Refusal, ...]:
    """Reasons why a driver from packages is wrong for this node, whatever uses the GPUs now."""
    return (*_kind(situation), *_other_ways(situation))


def _kind(situation: Situation) -> Iterator[Refusal]:
    if situation.kind == CONTAINER:
        yield Refusal(
            "container",
            "this is a container: the kernel's driver belongs to its host",
            "run gpunode on the host",
        )
    elif situation.kind == WSL2:
        yield Refusal(
            "wsl2", "in WSL 2 the driver is that of Windows", "install NVIDIA's driver for Windows, none here"
        )
    elif situation.kind == TEGRA:
        yield Refusal("tegra", "on Jetson the driver comes with JetPack", "upgrade JetPack: apt upgrade")
    elif not situation.gpus:
        yield Refusal(
            "no-gpu", "no NVIDIA GPU is on the PCI bus", "gpunode doctor says what it sees of the bus"
        )
    elif all(gpu.for_vms for gpu in situation.gpus):
        yield Refusal(
            "vfio",
            "every GPU here is kept for virtual machines",
            "the driver goes into the machines that get them",
        )
    if situation.vgpu_guest:
        yield Refusal(
            "vgpu-guest",
            "the GPUs here are virtual (vGPU): their driver must fit that of the virtual machine's host",
            "install the guest driver of the host's vGPU release, from NVIDIA's licensing portal",
        )
    if situation.distribution.immutable:
        name = situation.distribution.name or situation.distribution.id
        yield Refusal(
            "immutable",
            f"{name} is an image; packages can't be installed into it",
            _INSTEAD.get(situation.distribution.id, _OTHERWISE),
        )


def _other_ways(situation: Situation) -> Iterator[Refusal]:
    if situation.run_installed:
        yield Refusal(
            "run-installer",
            "the driver was installed with NVIDIA's .run installer, and packages would overwrite its files",
            f"uninstall it first: {RUN_INSTALLER}, and reboot",
        )
    if situation.operator_driver:
        yield Refusal(
            "driver-container",
            f"the GPU operator brings the driver to this node ({situation.operator_driver})",
            "change it there (driver.version in the ClusterPolicy), or set driver.enabled=false first",
        )


def _in_use(situation: Situation) -> Iterator[Refusal]:
    users = situation.users.users
    if not users:
        return
    yield Refusal(
        "gpu-in-use",
        f"the GPUs are in use: {some_of(users, _FEW)}",
        "drain the node or end them first: new GPU programs fail from the change of the driver to the reboot",
    )


def against_module(situation: Situation, *, signed: bool) -> tuple[Refusal, ...]:
    """Secure Boot: a module that this node builds itself is only loaded with a key that is enrolled."""
    if not situation.secure_boot or signed or situation.key_enrolled:
        return ()
    if situation.key_waits:
        return (
            Refusal(
                "secure-boot",
                "Secure Boot is on, and the key for modules waits to be confirmed",
                "reboot with the console open, choose Enroll MOK, then run this again",
            ),
        )
    what = (
        f"the key {situation.key} isn't enrolled"
        if situation.key
        else "this node has no key to sign modules with"
    )
    if situation.key and situation.key_enrolled is None:
        what = f"mokutil doesn't report whether the key {situation.key} is enrolled"
    make = _MAKE_KEY[situation.distribution.id == "ubuntu"]
    first = f"mokutil --import {situation.key}" if situation.key else make
    return (
        Refusal(
            "secure-boot",
            f"Secure Boot is on, the module would be built on this node, and {what}",
            f"{first}, reboot and choose Enroll MOK at the console; or take signed modules if there are any",
        ),
    )


# The package manager's own preview, before anything is done.

_DRIVERS = ("nvidia", "libnv", "cuda", "nvlsm", "xorg")  # another NVIDIA driver's, which may be removed


def previewed(
    plan: DriverPlan, manager: Manager, install: Command
) -> tuple[DriverPlan, tuple[PackageChange, ...]]:
    """The package manager's preview.

    A refusal if it can't preview the change, or would remove packages that aren't the driver's.
    """
    if not plan.resolved or plan.refusals:
        return plan, ()
    try:
        changes = manager.preview(install)
    except PackagesError as error:
        hint = hint_of(error.code, manager.name, error.hint)
        refusal = Refusal("package-manager", error.message, hint)
        return plan._replace(refusals=(refusal,)), ()
    removed = [
        change.name
        for change in changes
        if not change.after and not any(word in change.name for word in _DRIVERS)
    ]
    if removed:
        refusal = Refusal(
            "takes-others-out",
            f"{manager.name} would take these packages out as well: {', '.join(removed)}",
            "find out why; remove them yourself if they are not needed, then run this again",
        )
        plan = plan._replace(refusals=(refusal,))
    return plan, changes


def unable_to_hold(manager: Manager) -> tuple[Refusal, ...]:
    """Reported in advance: the hold comes last, after the driver is installed."""
    try:
        manager.require_holding()
    except PackagesError as error:
        return (Refusal(error.code, error.message, error.hint),)
    return ()


def to_hold(plan: DriverPlan, changes: Sequence[PackageChange]) -> list[str]:
    """The driver's packages, and the libraries installed with them, which must keep their version too."""
    along = [
        change.name
        for change in changes
        if change.after and ("nvidia" in change.name or "libcuda" in change.name)
    ]
    return list(dict.fromkeys((*(package.name for package in plan.packages), *along)))


_NO_NEW_KERNELS = (
    "a held driver gets no modules for newer kernels: hold those too, or upgrade driver and kernel together"
)

States = Mapping[str, PackageState]


def plan_driver(host: Host, situation: Situation, wish: Wish) -> DriverPlan:
    """The whole plan, with its refusals. It queries the package manager and changes nothing."""
    barred = (*against_system(situation), *_in_use(situation))
    choice = choose(situation, wish)
    base = DriverPlan(
        choice.branch,
        choice.flavour,
        installed=situation.version,
        decisions=choice.decisions,
        refusals=(*barred, *choice.refusals),
        notes=(*choice.notes, *(f"not looked at: {what}" for what in situation.unread)),
    )
    if not situation.gpus or any(
        refusal.code in ("container", "wsl2", "tegra", "immutable") for refusal in barred
    ):
        return base._replace(branch=0, flavour="", decisions=(), notes=())
    route = choose_route(situation, wish, choice)
    base = base._replace(
        route=route.name,
        decisions=(*base.decisions, *route.decisions),
        refusals=(*base.refusals, *route.refusals),
    )
    if not route.name:
        return base
    return _with_packages(base, situation, wish, choice, route, find_manager(host))


def _with_packages(
    base: DriverPlan, situation: Situation, wish: Wish, choice: Choice, route: Route, manager: Manager
) -> DriverPlan:
    headers = lacking_headers(situation)
    states, why = _look(manager, situation, route, choice, headers)
    known = bool(states) and not route.add and not changes_stream(situation, route, choice)
    way = _way(situation, route, choice, states, known)
    names = package_names(situation, route, choice, way)
    resolved = resolve(names, states, choice, route, wish) if known else _unresolved(names, situation, wish)
    if not (known and resolved.version) and not choice.refusals and not is_known(choice.branch):
        resolved = PackageSelection(refusals=(against_unknown(situation, choice.branch),))
    needs = to_build(situation, route, headers, states) if way == DKMS else ((), ())
    signed = way == PREBUILT or (route.name == "suse" and choice.flavour == OPEN)
    refusals = (*base.refusals, *resolved.refusals, *against_module(situation, signed=signed), *needs[1])
    decisions = (*base.decisions, *_decisions(situation, wish, way, resolved, headers, known=known))
    notes = (*base.notes, *resolved.notes, *_fits(situation, base), *((why,) if why else ()))
    if states and not known and resolved.packages:
        notes += ("exact versions are known once the package manager has read the repository",)
    plan = base._replace(
        version=resolved.version,
        packages=resolved.packages,
        decisions=decisions,
        refusals=refusals,
        notes=notes,
        resolved=known and bool(resolved.version),
        watched=_considered(situation, route, choice, headers),
    )
    end = manager.finish() if states else None
    if end is None and _up_to_date(situation, plan):
        if not situation.loaded:
            notes += ("the driver is installed and not loaded; gpunode doctor says why",)
        loose = (
            [package.name for package in plan.packages if not states[package.name].held] if wish.hold else []
        )
        if loose:
            return plan._replace(commands=(manager.hold(loose),), notes=notes)
        return plan._replace(up_to_date=True, notes=notes)
    work = _Steps(manager, route, choice, way, needs[0], end)
    return _with_commands(plan, situation, wish, work)


class _Steps(NamedTuple):
    """The steps to a plan. `headers` are installed first; `end` finishes a killed run's transaction."""

    manager: Manager
    route: Route
    choice: Choice
    way: str
    headers: Sequence[PackageRequest]
    end: Command | None


def _with_commands(plan: DriverPlan, situation: Situation, wish: Wish, work: _Steps) -> DriverPlan:
    if not plan.packages:
        return plan
    choice, route, manager = work.choice, work.route, work.manager
    reboot = _reboot(situation, plan, work.way)
    before = branch(situation.version)
    switching = bool(before) and (before != choice.branch or situation.flavour not in ("", choice.flavour))
    stream, stream_back = streams(situation, route, choice, manager)
    preparing = (*make_known(route, manager), *stream)
    installs = install_commands(
        plan.packages, work.headers, manager, limit=wish.version or str(choice.branch), switching=switching
    )
    if wish.hold:
        plan = plan._replace(refusals=(*plan.refusals, *unable_to_hold(manager)))
    plan, changes = previewed(plan, manager, installs[-1])
    hold = (manager.hold(to_hold(plan, changes)),) if wish.hold else ()
    finishing = finishing_commands(situation, plan.packages, hold, reboot=bool(reboot))
    steps = (
        *((work.end,) if work.end else ()),
        *preparing,
        *installs,
        *settling(situation),
        *finishing,
    )
    if wish.hold and work.way == PREBUILT:
        plan = plan._replace(notes=(*plan.notes, _NO_NEW_KERNELS))
    return plan._replace(
        files=files(situation, route),
        commands=steps,
        preparing=len(preparing) and len(preparing) + bool(work.end),
        finishing=len(finishing),
        changes=changes,
        reboot=reboot,
        watched=tuple(dict.fromkeys((*plan.watched, *(entry.name for entry in changes), *_here(situation)))),
        stream_back=stream_back,
    )


def _here(situation: Situation) -> tuple[str, ...]:
    """The installed packages of the driver, which a new one may replace."""
    packages = situation.packages.containing("nvidia")
    return tuple(package.name for package in packages if "container" not in package.name)


def _fits(situation: Situation, base: DriverPlan) -> tuple[str, ...]:
    """Whether the loaded driver needs no change."""
    same = branch(situation.version) == base.branch and (situation.opened is True) == (base.flavour == OPEN)
    if not situation.loaded or not same or base.refusals:
        return ()
    return (
        f"driver {situation.version} is loaded and fits: this is only needed for a newer one of its branch",
    )


def _considered(
    situation: Situation, route: Route, choice: Choice, headers: Mapping[str, PackageRequest]
) -> tuple[str, ...]:
    """Every package that the plan may name, for each kind of module."""
    names = [package.name for way in route.ways for package in package_names(situation, route, choice, way)]
    return tuple(dict.fromkeys((*names, *(header.name for header in headers.values()))))


def _look(
    manager: Manager,
    situation: Situation,
    route: Route,
    choice: Choice,
    headers: Mapping[str, PackageRequest],
) -> tuple[States, str]:
    """The states of all packages that the plan may name.

    None, and the reason, if the package manager can't be queried.
    """
    names = _considered(situation, route, choice, headers)
    try:
        return manager.look((*names, *(("dkms",) if route.name == CUDA_RPM else ()))), ""
    except PackagesError as error:
        return {}, f"versions aren't known: {error.message}"


def _way(situation: Situation, route: Route, choice: Choice, states: States, known: bool) -> str:
    """Prebuilt modules if the archive has them for this kind of kernel, else DKMS."""
    for way in route.ways[:-1]:
        names = package_names(situation, route, choice, way)
        if not known or all(
            states[package.name].available for package in names if package.must and not package.exact
        ):
            return way
    return route.ways[-1]


def _unresolved(names: Sequence[Name], situation: Situation, wish: Wish) -> PackageSelection:
    here = situation.packages.installed
    packages = tuple(
        DriverPackage(entry.name, "", here[entry.name].version if entry.name in here else "", "", entry.exact)
        for entry in names
        if entry.must or entry.name in here or is_pin(entry.name)
    )
    return PackageSelection(wish.version, packages)


def _decisions(
    situation: Situation,
    wish: Wish,
    way: str,
    resolved: PackageSelection,
    headers: Mapping[str, PackageRequest],
    *,
    known: bool,
) -> tuple[Decision, ...]:
    decisions = []
    if resolved.version:
        reason, source = "the newest that every package here has", "package manager"
        if wish.version:
            lookup = "every package here has it" if known else "not looked up"
            reason, source = f"requested on the command line; {lookup}", f"--version {wish.version}"
        decisions.append(Decision("version", resolved.version, reason, source))
    if way == PREBUILT:
        reason = "the archive has modules for Ubuntu's kernels"
        source = "package manager" if known else known_as_of(PACKAGES)
        decisions.append(Decision("module comes", "built and signed", reason, source))
    elif way == DKMS:
        lacking = ", ".join(headers) or "none"
        reason = f"kernels without installed headers: {lacking}"
        decisions.append(Decision("module comes", "built here by DKMS", reason, "/lib/modules/*/build"))
    if situation.switches:
        more = " and the NVLink subnet manager" if situation.nvlink5 else ""
        reason = f"{situation.switches} NVSwitches; it exits if the driver has another version"
        decisions.append(
            Decision("fabric manager", f"at the driver's version{more}", reason, "/sys/bus/pci/devices")
        )
    if situation.secure_boot:
        signed = {True: "enrolled", False: "not enrolled", None: "not known"}[situation.key_enrolled]
        reason = "the kernel loads only signed modules" + (
            f"; this node's key is {signed}" if way == DKMS else ""
        )
        decisions.append(Decision("Secure Boot", "on", reason, "efivar SecureBoot"))
    return tuple(decisions)


def _reboot(situation: Situation, plan: DriverPlan, way: str) -> str:
    """Why this needs a reboot to take effect; empty if it doesn't."""
    if situation.loaded and (not plan.version or plan.version != situation.version):
        loaded = f"driver {situation.version} is loaded"
        return f"{loaded}: until the reboot, the module and the new libraries don't match"
    if situation.loaded and situation.flavour not in ("", plan.flavour):
        return "the module of the other kind is loaded"
    if situation.nouveau:
        return f"{situation.nouveau[0]}: it lets go of the GPUs with the next boot"
    prebuilt = any(package.name.endswith(f"-{situation.kernel}") for package in plan.packages)
    if way == PREBUILT and plan.resolved and not prebuilt:
        return f"there is no module for the running kernel {situation.kernel}: a newer kernel comes along"
    return ""


def _up_to_date(situation: Situation, plan: DriverPlan) -> bool:
    if not plan.resolved or any(refusal.code != "gpu-in-use" for refusal in plan.refusals):
        return False
    same = all(package.installed == package.version for package in plan.packages)
    return same and (not situation.version or driver_version(situation.version) == plan.version)
