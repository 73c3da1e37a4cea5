"""The plan's files and commands, in the order in which they are carried out."""

from __future__ import annotations

from collections.abc import Sequence

from gpunode.dataclass import replace
from gpunode.facts.blacklist import INITRAMFS, NOUVEAU_FILE, NOUVEAU_TEXT, NOVA_FILE, NOVA_TEXT
from gpunode.facts.fabric_manager import UNIT
from gpunode.packages.driver_choice import Choice
from gpunode.packages.driver_model import OPEN, DriverPackage, Situation
from gpunode.packages.driver_route import Route
from gpunode.packages.manager import Command, FileChange, Manager, Wanted

_APT_LIST = "/etc/apt/sources.list.d/nvidia-driver.list"
_APT_KEY = "/etc/apt/keyrings/nvidia-driver.asc"
_RPM_KEY = "/etc/pki/rpm-gpg/RPM-GPG-KEY-nvidia-driver"
_ARCHIVES = "/var/cache/apt/archives"
_FABRIC_MANAGER = ("nvidia-fabricmanager", "nvidia-fabric-manager")
_MODULE = "nvidia-driver"
_UMAD_FILE = "/etc/modules-load.d/gpunode-nvlink.conf"
_INITRAMFS_SECONDS = 900.0


def repository_files(route: Route, family: str) -> tuple[FileChange, ...]:
    """The file that names NVIDIA's repository, and its key's if that was given; none where a package brings
    both."""
    if not route.add or (family == "debian" and not route.key):
        return ()
    key_file = _APT_KEY if family == "debian" else _RPM_KEY
    keys = (FileChange(key_file, route.key, "the mirror's key"),) if route.key else ()
    if family == "debian":
        text = f"deb [signed-by={key_file}] {route.base} /\n"
        return (*keys, FileChange(_APT_LIST, text.encode(), "a mirror of NVIDIA's repository"))
    alias = _alias(route)
    directory = "/etc/zypp/repos.d" if family == "suse" else "/etc/yum.repos.d"
    text = (
        f"[{alias}]\nname={alias}\nbaseurl={route.base}\nenabled=1\ngpgcheck=1\n"
        f"gpgkey={f'file://{key_file}' if route.key else f'{route.base}/{route.setup}'}\n"
    )
    return (*keys, FileChange(f"{directory}/{alias}.repo", text.encode(), "NVIDIA's repository"))


def _alias(route: Route) -> str:
    return f"cuda-{route.directory}-{route.base.rpartition('/')[2]}"


def make_known(route: Route, manager: Manager) -> tuple[Command, ...]:
    """What must run before the repository's versions can be told."""
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
    """The repository, and what keeps nouveau out at the next boot."""
    found = [*repository_files(route, situation.distribution.family)]
    if not situation.nouveau_kept_out:
        found.append(FileChange(NOUVEAU_FILE, NOUVEAU_TEXT.encode(), "nouveau stays away from the GPUs"))
    if any(one.lower().startswith("nova") for one in situation.nouveau):
        found.append(FileChange(NOVA_FILE, NOVA_TEXT.encode(), "nova stays away from the GPUs"))
    if situation.switches and situation.nvlink5:
        found.append(
            FileChange(_UMAD_FILE, b"ib_umad\n", "the fabric manager talks to the switches through it")
        )
    return tuple(found)


def changes_stream(situation: Situation, route: Route, choice: Choice) -> bool:
    """Whether another stream of the dnf module must be enabled; until then its packages aren't seen."""
    return route.modular and situation.stream != _stream(choice)


def _stream(choice: Choice) -> str:
    return f"{choice.branch}-{'open' if choice.flavour == OPEN else 'dkms'}"


def streams(situation: Situation, route: Route, choice: Choice, manager: Manager) -> tuple[Command, ...]:
    """The dnf module's stream for this branch and flavour, where branches are streams."""
    if not changes_stream(situation, route, choice):
        return ()
    enable = _module(manager, "enable", f"{_MODULE}:{_stream(choice)}")
    return (_module(manager, "reset", _MODULE), enable) if situation.stream else (enable,)


def streams_back(situation: Situation, route: Route, choice: Choice, manager: Manager) -> tuple[Command, ...]:
    """What takes that back."""
    if not changes_stream(situation, route, choice):
        return ()
    reset = _module(manager, "reset", _MODULE)
    again = (_module(manager, "enable", f"{_MODULE}:{situation.stream}"),) if situation.stream else ()
    return (reset, *again)


def _module(manager: Manager, verb: str, what: str) -> Command:
    return Command((getattr(manager, "program", manager.name), "-y", "module", verb, what))


def installs(
    situation: Situation,
    packages: Sequence[DriverPackage],
    headers: Sequence[Wanted],
    manager: Manager,
    *,
    branch: int,
    switching: bool,
) -> tuple[Command, ...]:
    """Headers first, so that DKMS finds them; then what pins the branch; then all of the driver at once.

    Packages whose version isn't known yet keep to the `branch`: a bare name would install the newest driver.
    """
    found = [manager.install(headers)] if headers else []
    pins = [one for one in packages if is_pin(one.name) and (not one.version or one.installed != one.version)]
    rest = [one for one in packages if not is_pin(one.name)]
    found += [manager.install(_wanted(pins, branch))] if pins else []
    older = any(one.installed and one.installed != one.version for one in rest)
    install = manager.install(_wanted(rest, branch), downgrade=older and manager.name != "dnf")
    found.append(_erasing(install, manager) if switching else install)
    return tuple(found)


def is_pin(name: str) -> bool:
    """Whether this package of NVIDIA's keeps apt to one branch."""
    return "-pinning-" in name


def _wanted(packages: Sequence[DriverPackage], branch: int) -> tuple[Wanted, ...]:
    return tuple(Wanted(one.name, one.version, branch if one.exact else 0) for one in packages)


def _erasing(command: Command, manager: Manager) -> Command:
    """Another branch or flavour pushes the old one out; apt does so for packages that conflict."""
    words = {"dnf": "--allowerasing", "zypper": "--force-resolution"}
    word = words.get(manager.name)
    if word is None or "install" not in command.argv:
        return command
    at = command.argv.index("install") + 1
    return replace(command, argv=(*command.argv[:at], word, *command.argv[at:]))


def settling(situation: Situation) -> tuple[Command, ...]:
    """What belongs to the install itself: an initramfs that keeps nouveau out as the file does."""
    if situation.nouveau_kept_out:
        return ()
    family = INITRAMFS.get(situation.distribution.family, ())
    return tuple(Command(argv, seconds=_INITRAMFS_SECONDS) for argv in family)


def finishing(
    situation: Situation, packages: Sequence[DriverPackage], hold: Sequence[Command], *, reboot: bool
) -> tuple[Command, ...]:
    """What has the driver come up, now if nothing stands in the way, else with the next boot; then the hold
    that was asked for."""
    found: list[Command] = []
    fabric = ("ib_umad",) if situation.switches and situation.nvlink5 else ()
    if not reboot:
        modules = ("nvidia", "nvidia-uvm", *fabric)
        found += [Command(("modprobe", name), seconds=120.0, changes=False) for name in modules]
    for unit in _units([one.name for one in packages]):
        now = () if reboot else ("--now",)
        found.append(Command(("systemctl", "enable", *now, unit), seconds=180.0, changes=False))
    return (*found, *hold)


def _units(names: Sequence[str]) -> tuple[str, ...]:
    """The fabric manager before persistence, whose unit comes with every driver."""
    fabric = any(name.startswith(_FABRIC_MANAGER) for name in names)
    return (*((UNIT,) if fabric else ()), "nvidia-persistenced.service")
