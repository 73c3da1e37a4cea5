"""The toolkit's packages as files in a directory, for machines without a network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpunode.dataclass import dataclass
from gpunode.errors import UsageError
from gpunode.host import Host
from gpunode.packages.manager import Manager, matches
from gpunode.packages.rpm import compare
from gpunode.packages.toolkit import PACKAGES, States

_SECONDS = 30.0


@dataclass(frozen=True)
class PackageFile:
    """One file, and what it says of itself."""

    path: str
    name: str
    version: str
    architecture: str


def read_directory(host: Host, manager: Manager, directory: str) -> tuple[PackageFile, ...]:
    """The toolkit's packages among the files of a directory. `UsageError` for one that is damaged."""
    ending = "*.deb" if manager.name == "apt" else "*.rpm"
    if not host.is_dir(directory):
        raise UsageError(f"{directory} is no directory", hint=f"--from takes the directory of {ending} files")
    found = [_read(host, manager, path) for path in host.glob(directory, ending)]
    return tuple(one for one in found if one.name in PACKAGES)


def _read(host: Host, manager: Manager, path: str) -> PackageFile:
    form = r"%{NAME}\t%{EVR}\t%{ARCH}\n"
    argv = ["rpm", "-qp", "--nosignature", "--qf", form, path]
    if manager.name == "apt":
        argv = ["dpkg-deb", "--show", "--showformat", r"${Package}\t${Version}\t${Architecture}\n", path]
    answer = host.run(argv, timeout=_SECONDS)
    words = answer.stdout.strip().split("\t")
    if not answer.ok or len(words) != 3:
        said = (answer.stderr.strip().splitlines() or ["it says nothing of itself"])[-1]
        raise UsageError(f"{path} is no whole package: {said}", hint="copy it again")
    return PackageFile(path, *words)


def chosen(
    host: Host, manager: Manager, files: Iterable[PackageFile], version: str
) -> tuple[PackageFile, ...]:
    """The four of one version for this machine. `UsageError` if there isn't exactly one such set."""
    argv = ["dpkg", "--print-architecture"] if manager.name == "apt" else ["rpm", "-E", "%{_arch}"]
    here = host.run(argv, timeout=_SECONDS).stdout.strip()
    fitting = [one for one in files if one.architecture in (here, "all", "noarch")]
    sets: dict[str, dict[str, PackageFile]] = {}
    for one in fitting:
        if not version or matches(one.version, version):
            sets.setdefault(one.version, {})[one.name] = one
    whole = {number: found for number, found in sets.items() if set(found) == set(PACKAGES)}
    if len(whole) == 1:
        only = next(iter(whole.values()))
        return tuple(
            only[name] for name in reversed(PACKAGES)
        )  # as they need each other, for whoever reads it
    raise UsageError(_trouble(whole, sets, version, here), hint=_hint(whole))


def _trouble(whole: Iterable[str], sets: dict[str, dict[str, PackageFile]], version: str, here: str) -> str:
    if whole:
        return f"there are several versions: {', '.join(sorted(whole))}"
    what = f" {version}" if version else ""
    if not sets:
        return f"there is no package of the toolkit{what} for {here or 'this machine'}"
    number, found = max(sets.items(), key=lambda one: len(one[1]))
    missing = ", ".join(name for name in PACKAGES if name not in found)
    return f"the four packages have to be of one version; of {number} for {here} these are missing: {missing}"


def _hint(whole: Iterable[str]) -> str:
    if whole:
        return "choose one: --version VERSION"
    return "put the four packages of one release into it: " + ", ".join(PACKAGES)


def is_downgrade(manager: Manager, states: States, files: Sequence[PackageFile]) -> bool:
    """Whether a file is older than what is installed. apt is allowed it whenever the version differs."""
    pairs = [(states[one.name].installed, one.version) for one in files if states[one.name].installed]
    if manager.name == "apt":
        return any(installed != version for installed, version in pairs)
    return any(compare(version, installed) < 0 for installed, version in pairs)
