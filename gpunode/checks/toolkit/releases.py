"""Which releases of the toolkit and its packages are here, and where more of them come from."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.model import EVERYWHERE_BUT_TEGRA, HOST, Check, Verdict, fail, note, ok, seen, skip, warn
from gpunode.checks.toolkit import remedies
from gpunode.facts.apt_sources import AptSource, read_sources
from gpunode.facts.cuda_wanted import driver_version
from gpunode.facts.driver import version_numbers
from gpunode.facts.engines import containerd_role, crio_role, docker_role
from gpunode.facts.node import Node
from gpunode.facts.system import WSL2
from gpunode.result import Fix
from gpunode.tables import gate, numbers, table

_MAIN = "nvidia-container-toolkit"
_LIBRARIES = ("libnvidia-container-tools", "libnvidia-container1")
PACKAGES = (_MAIN, f"{_MAIN}-base", *_LIBRARIES)
_ROLES = {"docker": docker_role, "containerd": containerd_role, "crio": crio_role}
_REPOSITORY = "nvidia.github.io/"
# what the repository's own predecessors were called; they hold no release since 2023
_RETIRED = ("nvidia.github.io/nvidia-docker", "nvidia.github.io/nvidia-container-runtime")


def toolkit_versions_mixed(node: Node) -> Verdict:
    found = {name: node.packages.version(name) for name in PACKAGES}
    here = {name: version for name, version in found.items() if version}
    if _MAIN not in here or len(here) < 2:
        return skip("the toolkit isn't installed as packages")
    evidence = tuple(seen(node.packages.manager, f"{name} {version}") for name, version in here.items())
    main = version_numbers(here[_MAIN])
    exact = main >= gate("toolkit", "exact-packages")
    wrong = [
        name
        for name, version in here.items()
        if version_numbers(version) != main
        and (exact or name not in _LIBRARIES or version_numbers(version) < main)
    ]
    if wrong:
        return fail(f"{', '.join(wrong)} and {_MAIN} {here[_MAIN]} are of different releases", *evidence)
    return ok(f"the toolkit's packages are all of release {here[_MAIN]}", *evidence)


def toolkit_known_bad_version(node: Node) -> Verdict:
    version = node.toolkit.version
    if not version:
        return skip("the toolkit's version can't be told")
    text = ".".join(map(str, version))
    faults = [
        row
        for row in table("toolkit_bad_versions").rows
        if numbers(row["from"]) <= version < numbers(row["fixed"])
        and _used(node, row["where"])
        and _under_windows(node, row["windows_driver"])
    ]
    if not faults:
        return ok(f"no fault of toolkit {text} is known that matters here")
    evidence = [seen(row["ref"], f"{row['what']}; fixed in {row['fixed']}") for row in faults]
    # what an engine that is set up got of them is judged by its own checks
    harmful = [row for row in faults if not row["sets_up"]]
    told = f"toolkit {text}: {(harmful or faults)[0]['what']}"
    if any(row["windows_driver"] for row in faults):
        return fail(told, seen(node.toolkit.version_source, text), *evidence, fix=remedies.upgrade(node))
    judge = warn if harmful else note
    return judge(told, seen(node.toolkit.version_source, text), *evidence, fix=remedies.upgrade(node))


def _under_windows(node: Node, oldest: str) -> bool:
    """Whether a fault that depends on the Windows driver of WSL2 applies; True for any other fault."""
    if not oldest:
        return True
    return node.kind == WSL2 and version_numbers(driver_version(node)) >= version_numbers(oldest)


def _used(node: Node, engine: str) -> bool:
    return not engine or _ROLES[engine](node).used


def apt_signed_by(node: Node) -> Verdict:
    ours = [source for source in read_sources(node.host) if _REPOSITORY in source.uri]
    if not ours:
        return skip("apt has no source of NVIDIA's container toolkit")
    wrong = _conflicting(ours)
    if wrong:
        keep, drop = wrong[0], [one for one in wrong[1:] if one.path != wrong[0].path]
        fix = _removal(drop) if drop else Fix(f"${{EDITOR:-vi}} +{keep.line} {keep.path}")
        evidence = (
            seen(one.path, f"{one.uri} signed by {one.signed_by or 'no key'}", one.line) for one in wrong
        )
        return warn(f"apt has {keep.uri} twice, with different keys", *evidence, fix=fix)
    retired = [
        source for source in ours if any(source.uri.split("://")[-1].startswith(one) for one in _RETIRED)
    ]
    if retired:
        evidence = (seen(one.path, one.uri, one.line) for one in retired)
        return warn("apt asks a retired repository of the toolkit", *evidence, fix=_removal(retired))
    return ok("apt has one source of the container toolkit", seen(ours[0].path, ours[0].uri, ours[0].line))


def _conflicting(sources: list[AptSource]) -> list[AptSource]:
    """Entries of the first repository that is to be signed by different keys; that of its own name first."""
    for source in sources:
        same = [one for one in sources if (_place(one), one.suite) == (_place(source), source.suite)]
        if len({one.signed_by for one in same}) > 1:
            return sorted(same, key=lambda one: (not one.signed_by, _MAIN not in one.path, one.path))
    return []


def _place(source: AptSource) -> str:
    """The address with apt's word for the machine's architecture, which guides write out or don't."""
    head, slash, last = source.uri.rpartition("/")
    return f"{head}{slash}$(ARCH)" if last in ("amd64", "arm64") else source.uri


def _removal(sources: list[AptSource]) -> Fix:
    """Set files aside under a name that apt passes over."""
    paths = dict.fromkeys(source.path for source in sources)
    return Fix(" && ".join(f"mv {path} {path}.disabled" for path in paths) + " && apt update")


CHECKS = (
    Check(
        id="toolkit-versions-mixed",
        title="The toolkit's packages are of one release",
        layer="toolkit",
        severity="error",
        looks_at=f"the package database: {', '.join(PACKAGES)}.",
        why=(
            "The toolkit calls nvidia-container-cli with options of its own release. An older one answers "
            "'unrecognized option' or 'symbol lookup error', and no GPU container starts."
        ),
        remedy=fixes.UPGRADE_TOOLKIT,
        run=toolkit_versions_mixed,
        blocked_by=("toolkit-missing", "toolkit-too-old"),
        classes=HOST,
        table="version_gates",
        refs=("https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/release-notes.html",),
    ),
    Check(
        id="toolkit-known-bad-version",
        title="No known fault of this toolkit release matters here",
        layer="toolkit",
        severity="error",
        looks_at=(
            "the toolkit's version against a table of releases with faults, by the engines in use here, and "
            "under WSL2 by the Windows driver. A fault that breaks every container is an error, one that "
            "only comes when nvidia-ctk sets an engine up is a note."
        ),
        why="A newer release of the toolkit fixes these faults; the evidence says what each one breaks.",
        remedy=fixes.UPGRADE_TOOLKIT,
        run=toolkit_known_bad_version,
        blocked_by=("toolkit-missing", "toolkit-too-old"),
        classes=EVERYWHERE_BUT_TEGRA,
        table="toolkit_bad_versions",
        refs=("https://github.com/NVIDIA/nvidia-container-toolkit/blob/main/CHANGELOG.md",),
    ),
    Check(
        id="apt-signed-by",
        title="apt has one source of the toolkit",
        layer="toolkit",
        severity="warning",
        looks_at="/etc/apt/sources.list and sources.list.d: entries of nvidia.github.io and their keys.",
        why=(
            "With two keys for one repository apt stops with 'Conflicting values set for option Signed-By', "
            "and a retired one makes apt update fail: the node then gets no updates at all, the toolkit's "
            "and security fixes included."
        ),
        remedy=fixes.everywhere("ls /etc/apt/sources.list.d/"),
        run=apt_signed_by,
        blocked_by=("pci-no-gpu",),
        classes=EVERYWHERE_BUT_TEGRA,
        refs=(
            "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/troubleshooting.html",
        ),
    ),
)
