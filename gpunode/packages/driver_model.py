"""What a driver's plan is made of: what the node is, what the user wants, and what was decided why."""

from __future__ import annotations

from gpunode.dataclass import dataclass, field
from gpunode.facts.driver_targets import REPOSITORY
from gpunode.facts.gpu_users import GpuUsers
from gpunode.facts.packages import Packages
from gpunode.facts.pci import PciGpu
from gpunode.facts.system import Distribution
from gpunode.packages.manager import Command, FileChange, PackageChange

OPEN, PROPRIETARY = "open", "proprietary"
DISTRIBUTION, NVIDIA = "distribution", "nvidia"
FLAVOURS = (OPEN, PROPRIETARY)


@dataclass(frozen=True)
class Wish:
    """What the command line asks for; 0 and empty leave it to the plan.

    `repository` is distribution, nvidia, or the address of a mirror of NVIDIA's repository. `hold` keeps the
    packages at their version afterwards. `key` is the armored key of such a mirror, empty for NVIDIA's own.
    """

    branch: int = 0
    version: str = ""
    flavour: str = ""
    repository: str = ""
    hold: bool = False
    key: bytes = b""


@dataclass(frozen=True)
class Situation:
    """The node as far as it bears on its driver. `architecture` is NVIDIA's word, sbsa for arm64.

    `version` and `opened` are those of the driver that is here (loaded, else on disk), empty and None without
    one; `loaded` whether it runs. `debian_own` is true beside a driver of
    Debian's own packages. `headers` are the releases that modules can be built for now. `key` is the
    certificate that signs this node's own modules and `key_enrolled` whether Secure Boot accepts it.
    `nouveau` names what of the kernel's own drivers holds GPUs or is loaded, `nouveau_kept_out` whether
    something refuses it at boot. `repositories` are the
    lines of the package manager's files. `unread` are things that this user may not look at, in words.
    """

    distribution: Distribution
    kind: str
    architecture: str
    kernel: str
    next_kernel: str
    gpus: tuple[PciGpu, ...]
    version: str = ""
    opened: bool | None = None
    loaded: bool = False
    packages: Packages = field(default_factory=Packages)
    stream: str = ""
    repositories: tuple[str, ...] = ()
    run_installed: bool = False
    operator_driver: str = ""
    vgpu_guest: bool = False
    secure_boot: bool = False
    key: str = ""
    key_enrolled: bool | None = None
    key_waits: bool = False
    nouveau: tuple[str, ...] = ()
    nouveau_kept_out: bool = True
    headers: tuple[str, ...] = ()
    debian_own: bool = False
    switches: int = 0
    nvlink5: bool = False
    rack: bool = False
    users: GpuUsers = field(default_factory=GpuUsers)
    unread: tuple[str, ...] = ()

    @property
    def nvidia_repository(self) -> bool:
        """Whether NVIDIA's own repository is set up."""
        return self.has(REPOSITORY)

    def has(self, address: str) -> bool:
        """Whether a repository file names this address, whatever else is in the line."""
        return any(address in one for one in self._lines if not one.startswith("#"))

    def ids(self, address: str) -> tuple[str, ...]:
        """What dnf or zypper calls the repositories at this address: whoever set one up named it."""
        found, name = [], ""
        for one in self._lines:
            if one.startswith("[") and one.endswith("]"):
                name = one[1:-1]
            elif address in one and not one.startswith("#") and name:
                found.append(name)
        return tuple(dict.fromkeys(found))

    @property
    def _lines(self) -> tuple[str, ...]:
        return tuple(one.strip().replace("$basearch", self.architecture) for one in self.repositories)

    @property
    def kernels(self) -> tuple[str, ...]:
        """The running kernel and the one that boots next, each once."""
        return tuple(dict.fromkeys(filter(None, (self.kernel, self.next_kernel))))


@dataclass(frozen=True)
class Decision:
    """One choice, the fact that led to it, and where the fact is from: a path, a table with its date, or an
    option."""

    subject: str
    choice: str
    because: str
    source: str


@dataclass(frozen=True)
class Refusal:
    """Why the plan won't be run. `code` is stable kebab-case."""

    code: str
    message: str
    hint: str


@dataclass(frozen=True)
class DriverPackage:
    """One package of the plan. `version` is the manager's whole one, empty while it isn't known; `origin` the
    repository that offers it; `exact` says that it must have the driver's own version."""

    name: str
    version: str = ""
    installed: str = ""
    origin: str = ""
    exact: bool = False


@dataclass(frozen=True)
class DriverPlan:
    """`data` of the envelope DriverPlan.

    `commands` run in order once the `files` are written; the first `preparing` of them only make the
    repository known, after which the versions are looked up anew, and the last `finishing` bring up what is
    installed: their failure takes nothing back. `watched` are the packages that may come or change,
    `stream_back` gives a dnf module its old stream. `reboot` says why a reboot is needed, empty if it isn't;
    gpunode never does it. `changes` is what the package manager says it would do.
    """

    branch: int = 0
    flavour: str = ""
    version: str = ""
    route: str = ""
    installed: str = ""
    up_to_date: bool = False
    decisions: tuple[Decision, ...] = ()
    packages: tuple[DriverPackage, ...] = ()
    files: tuple[FileChange, ...] = ()
    commands: tuple[Command, ...] = ()
    preparing: int = 0
    finishing: int = 0
    watched: tuple[str, ...] = ()
    stream_back: tuple[Command, ...] = ()
    changes: tuple[PackageChange, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    reboot: str = ""
    resolved: bool = False

    @property
    def id(self) -> str:
        """Of what it would do to this node, 12 hexadecimal digits; empty if that is nothing.

        Two plans with one id bring the same packages at the same versions, from the same places and by the
        same commands, in place of the same ones. What speaks against it doesn't count: that may be mended.
        """
        if not self.commands:
            return ""
        import hashlib

        files = [(one.path, one.content) for one in self.files]
        done = [self.branch, self.flavour, self.version, self.packages, files, self.changes, self.reboot]
        said = repr([*done, [one.text for one in self.commands]])
        return hashlib.sha256(said.encode()).hexdigest()[:12]
