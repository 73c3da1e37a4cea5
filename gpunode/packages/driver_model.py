"""Types of a driver's plan: the node's state, the user's options, and the decisions with their reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from gpunode.errors import Unreadable
from gpunode.facts import driver
from gpunode.facts.device_plugins import find_operator
from gpunode.facts.driver_targets import REPOSITORY, repository_lines
from gpunode.facts.gpu_use import GpuUsers, gpu_users
from gpunode.facts.kernel_modules import ModuleOptions
from gpunode.facts.kernels import has_headers, has_module_file
from gpunode.facts.module_builds import key_enrolled, signing_key, waiting_keys
from gpunode.facts.node import Node
from gpunode.facts.packages import Packages, module_stream
from gpunode.facts.pci import PciGpu, read_vgpus
from gpunode.facts.system import Distribution
from gpunode.facts.traits import OPERATOR_DRIVER, TRAITS
from gpunode.packages.manager import Command, FileChange, PackageChange

OPEN, PROPRIETARY = "open", "proprietary"
DISTRIBUTION, NVIDIA = "distribution", "nvidia"
FLAVOURS = (OPEN, PROPRIETARY)


class Wish(NamedTuple):
    """The options of the command line; 0 and empty leave the choice to the plan.

    `repository` is distribution, nvidia, or the address of a mirror of NVIDIA's repository. `hold` keeps the
    packages at their version afterwards. `key` is the armored key of such a mirror, empty for NVIDIA's own.
    """

    branch: int = 0
    version: str = ""
    flavour: str = ""
    repository: str = ""
    hold: bool = False
    key: bytes = b""


class Situation(NamedTuple):
    """The node's state as far as it matters for the driver. `architecture` is NVIDIA's name, sbsa for arm64.

    `version` and `opened` are those of the present driver (loaded, else on disk), empty and None without one;
    `loaded` whether it is loaded. `debian_own` is true for a driver from Debian's own packages. `headers` are
    the releases that modules can be built for now. `key` is the certificate that signs this node's own
    modules and `key_enrolled` whether Secure Boot accepts it. `nouveau` names the kernel's own drivers that
    hold GPUs or are loaded, `nouveau_kept_out` whether a configuration disables them at boot. `repositories`
    are the lines of the package manager's files. `unread` lists, as text, what this user may not read.
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
    packages: Packages = Packages()
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
    users: GpuUsers = GpuUsers()
    unread: tuple[str, ...] = ()

    @property
    def flavour(self) -> str:
        """The present driver's kernel module: open or proprietary, empty if that is unknown."""
        return {True: OPEN, False: PROPRIETARY, None: ""}[self.opened]

    @property
    def nvidia_repository(self) -> bool:
        """Whether NVIDIA's own repository is set up."""
        return self.has(REPOSITORY)

    def has(self, address: str) -> bool:
        """Whether a repository file has this address, on any line."""
        return any(address in line for line in self._lines if not line.startswith("#"))

    def ids(self, address: str) -> tuple[str, ...]:
        """The ids in dnf or zypper of the repositories at this address; the administrator may choose them."""
        names, name = [], ""
        for line in self._lines:
            if line.startswith("[") and line.endswith("]"):
                name = line[1:-1]
            elif address in line and not line.startswith("#") and name:
                names.append(name)
        return tuple(dict.fromkeys(names))

    @property
    def _lines(self) -> tuple[str, ...]:
        return tuple(
            repository.strip().replace("$basearch", self.architecture) for repository in self.repositories
        )

    @property
    def kernels(self) -> tuple[str, ...]:
        """The running kernel and the one that boots next, without duplicates."""
        return tuple(dict.fromkeys(filter(None, (self.kernel, self.next_kernel))))


class Decision(NamedTuple):
    """One choice and the fact that led to it.

    The fact's source is a path, a table with its date, or an option.
    """

    subject: str
    choice: str
    because: str
    source: str


class Refusal(NamedTuple):
    """Why the plan can't run. `code` is stable kebab-case."""

    code: str
    message: str
    hint: str


class DriverPackage(NamedTuple):
    """One package of the plan.

    `version` is the manager's whole one, empty while it isn't known; `origin` the repository that offers it;
    `exact` means that it must have the driver's own version.
    """

    name: str
    version: str = ""
    installed: str = ""
    origin: str = ""
    exact: bool = False


class DriverPlan(NamedTuple):
    """`data` of the envelope DriverPlan.

    `commands` run in order once the `files` are written. The first `preparing` of them only add the
    repository, after which the versions are looked up again; the last `finishing` start what is installed,
    and their failure rolls nothing back. `watched` are the packages that may be added or changed,
    `stream_back` restores a dnf module's old stream. `reboot` is why a reboot is needed, empty if it isn't;
    gpunode never reboots. `changes` is what the package manager reports that it would do.
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
        """The id of its effect on this node, 12 hexadecimal digits; empty if there is none.

        Two plans with one id install the same packages at the same versions, from the same sources and with
        the same commands, in place of the same ones. Refusals don't count, because the user may resolve them.
        """
        if not self.commands:
            return ""
        import hashlib

        files = [(file.path, file.content) for file in self.files]
        done = [self.branch, self.flavour, self.version, self.packages, files, self.changes, self.reboot]
        text = repr([*done, [command.text for command in self.commands]])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


# The node's state, read for the driver's plan. Reading changes nothing.

_ARM_LOADER = "/lib/ld-linux-aarch64.so.1"
_KERNELS_OWN = ("nouveau", "nova_core")
# device ids of Blackwell's baseboards and superchips: their NVLink is managed over InfiniBand (fabric.py)
_NVLINK5 = ("0x29", "0x31")
_OPERATOR_PODS = "nvidia-driver-daemonset"

_Value = TypeVar("_Value")


def read_situation(node: Node) -> Situation:
    """Everything that the choice of the driver depends on; `unread` names what this user may not read."""
    unread: list[str] = []

    def read_or(what: str, read: Callable[[], _Value], otherwise: _Value) -> _Value:
        try:
            return read()
        except Unreadable as error:
            unread.append(f"{what}: {error.message}")
            return otherwise

    host, key = node.host, signing_key(node.host)
    nvlink5 = any(gpu.device_id.startswith(_NVLINK5) for gpu in node.gpus)
    arm = host.exists(_ARM_LOADER)
    options = read_or("modprobe.d", lambda: node.module_options, ModuleOptions((), ()))
    secure, nouveau = bool(node.secure_boot), _kernels_own(node)
    kernels = tuple(dict.fromkeys(filter(None, (node.kernel, node.next_kernel))))
    # modinfo may still report a module that belongs to no kernel
    installed = node.module is not None or node.module_built or bool(node.dkms)
    users = gpu_users(node)
    if users.closed:
        unread.append(f"who uses the GPUs: {users.closed} processes are closed to this user")
    return Situation(
        distribution=node.distribution,
        kind=node.kind,
        architecture="sbsa" if arm else "x86_64",
        kernel=node.kernel,
        next_kernel=node.next_kernel,
        gpus=node.gpus,
        version=node.driver_version if installed else "",
        opened=node.module_open,
        loaded=node.module is not None,
        packages=node.packages,
        stream=module_stream(host, "nvidia-driver"),
        repositories=repository_lines(node.host),
        run_installed=node.run_installed,
        operator_driver=read_or("the operator's pods", lambda: _operator_driver(node), ""),
        vgpu_guest=TRAITS["vgpu-guest"].holds(node) or bool(read_or("vGPUs", lambda: read_vgpus(host), None)),
        secure_boot=secure,
        key=key,
        key_enrolled=key_enrolled(host, key) if secure and key else None,
        key_waits=bool(secure and waiting_keys(host)),
        nouveau=nouveau,
        nouveau_kept_out=not nouveau
        and (
            bool(options.refused("nouveau"))
            or not any(has_module_file(host, kernel, "nouveau") for kernel in kernels)
        ),
        headers=tuple(kernel for kernel in kernels if has_headers(host, kernel)),
        debian_own=_debians(node),
        switches=read_or("NVSwitches", lambda: len(node.switches), 0),
        nvlink5=nvlink5,
        rack=nvlink5 and arm,
        users=users,
        unread=tuple(unread),
    )


def _debians(node: Node) -> bool:
    """Debian's own packages call the module nvidia-current."""
    loaded = node.module is not None and node.module.name == "nvidia_current"
    return loaded or any(name.startswith("nvidia-current") for name in node.host.listdir("/var/lib/dkms"))


def _operator_driver(node: Node) -> str:
    """What the GPU operator's driver container has left on this node; empty if nothing."""
    if TRAITS["operator-driver"].holds(node):
        return OPERATOR_DRIVER
    return next((pod for pod in find_operator(node.host).pods if _OPERATOR_PODS in pod), "")


def _kernels_own(node: Node) -> tuple[str, ...]:
    """nouveau and nova: each GPU that they hold, or that they are loaded while nvidia isn't."""
    owners = tuple(
        f"{gpu.driver} owns {gpu.address}"
        for gpu in node.gpus
        if (gpu.driver or "").lower().startswith(("nouveau", "nova"))
    )
    if owners or node.module is not None:
        return owners
    return tuple(f"{name} is loaded" for name in _KERNELS_OWN if driver.module_loaded(node.host, name))
