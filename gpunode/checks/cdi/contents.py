"""What the specifications say, and whether those who read them understand it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpunode.checks import fixes
from gpunode.checks.cdi.readers import Reader, judge, readers
from gpunode.checks.cdi.shadows import hidden_by, rank
from gpunode.checks.model import HOST, Check, Verdict, fail, ok, seen, skip, warn
from gpunode.facts.daemons import parse_version
from gpunode.facts.node import Node
from gpunode.facts.system import WSL2
from gpunode.result import Fix

if TYPE_CHECKING:
    from gpunode.facts.cdi import CdiSpec

_UVM = "/dev/nvidia-uvm"
_SPEC = "https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md"
_NONE = "there is no CDI specification for GPUs"


def _of_gpus(node: Node) -> list[CdiSpec]:
    """Those that give containers GPUs and that engines take: none that a later directory hides whole."""
    return [spec for spec in node.cdi_specs if spec.serves_gpus and hidden_by(node.cdi_specs, spec) is None]


def cdi_uvm_absent_in_spec(node: Node) -> Verdict:
    specs = _of_gpus(node)
    if not specs:
        return skip(_NONE)
    if node.host.device(_UVM) is None:
        return skip(f"there is no {_UVM} on this node")
    for spec in specs:
        paths = {one.path for one in spec.nodes}
        gpus = sorted(path for path in paths if path.removeprefix("/dev/nvidia").isdigit())
        if gpus and _UVM not in paths:
            evidence = (seen(spec.path, f"has {', '.join(gpus[:4])}, and no {_UVM}"), seen(_UVM, "is there"))
            return judge(node)(
                f"{spec.path} leaves out {_UVM}", *evidence, fix=fixes.rewrite_cdi(spec.path, spec.kind)
            )
    return ok(f"{specs[0].path} has {_UVM}")


def cdi_duplicate(node: Node) -> Verdict:
    specs = [spec for spec in node.cdi_specs if not spec.problem]
    if len(specs) < 2:
        return ok("no two specifications name the same device") if specs else skip(_NONE)
    for one, other in _pairs(specs):
        names = sorted(set(one.names) & set(other.names))
        if names and rank(one) == rank(other):
            shown = ", ".join(f"{one.kind}={name}" for name in names[:3])
            extra = one if "nvidia.yaml" in other.path else other
            return judge(node)(
                f"two specifications name {shown}, so engines take neither",
                seen(one.path, one.kind),
                seen(other.path, other.kind),
                fix=Fix(f"mv {extra.path} {extra.path}.disabled"),
            )
    for spec in specs:
        above = hidden_by(tuple(specs), spec)
        if above is not None and (above.devices, above.edits) != (spec.devices, spec.edits):
            fix = Fix(f"mv {spec.path} {spec.path}.disabled")
            evidence = (seen(spec.path, "hidden"), seen(above.path, "the one that engines take"))
            return warn(f"{spec.path} is hidden by {above.path} and says something else", *evidence, fix=fix)
    return ok("no device is named in two specifications that differ")


def _pairs(specs: list[CdiSpec]) -> Iterator[tuple[CdiSpec, CdiSpec]]:
    for number, one in enumerate(specs):
        yield from ((one, other) for other in specs[number + 1 :] if other.kind == one.kind)


def cdi_unsupported_version(node: Node) -> Verdict:
    specs = [spec for spec in _of_gpus(node) if parse_version(spec.version)]
    if not specs:
        return skip(_NONE)
    here = readers(node)
    for spec in specs:
        late = [reader for reader in here if _too_new(spec, reader)]
        if late:
            return _unread(spec, late)
    names = ", ".join(reader.name for reader in here) or "no engine with CDI is here to read them"
    return ok(f"specifications of version {specs[0].version} are read by: {names}")


def _too_new(spec: CdiSpec, reader: Reader) -> bool:
    from gpunode.cdi.versions import reads

    known = reads(reader.name, reader.version)
    return known is not None and bool(reader.version) and parse_version(spec.version) > known


def _unread(spec: CdiSpec, late: list[Reader]) -> Verdict:
    from gpunode.cdi.versions import reads, text

    evidence = [seen(spec.path, f"cdiVersion {spec.version}")]
    for reader in late:
        known = reads(reader.name, reader.version)
        release = ".".join(map(str, reader.version))
        evidence.append(seen(reader.name, f"{release} reads up to {text(known) if known else 'none'}"))
    names = ", ".join(reader.name for reader in late)
    summary = f"{names} can't read {spec.path}: it is of version {spec.version}"
    fix = fixes.rewrite_cdi(spec.path, spec.kind)
    if any(reader.needs for reader in late):
        return fail(summary, *evidence, fix=fix)
    return warn(summary, *evidence, fix=fix)


def cdi_wsl_dxcore(node: Node) -> Verdict:
    for spec in _of_gpus(node):
        if any(path.endswith("/libdxcore.so") for path in spec.mounts):
            continue
        fix = Fix(f"nvidia-ctk cdi generate --mode=wsl --output={spec.path}")
        return warn(f"{spec.path} leaves out libdxcore.so", seen(spec.path, "no libdxcore.so"), fix=fix)
    return ok("specifications have libdxcore.so") if _of_gpus(node) else skip(_NONE)


CHECKS = (
    Check(
        id="cdi-uvm-absent-in-spec",
        title="CDI specifications have unified memory's device",
        layer="cdi",
        severity="error",
        looks_at=f"specifications of kind nvidia.com/gpu that list GPUs' files: whether {_UVM} is there.",
        why=(
            "CUDA needs this device. A specification that was made before the module nvidia-uvm was loaded "
            "lacks it: in containers nvidia-smi works, and CUDA fails with error 999."
        ),
        remedy=fixes.REFRESH_CDI,
        run=cdi_uvm_absent_in_spec,
        blocked_by=("module-not-loaded", "uvm-not-loaded", "dev-nodes-missing", "cdi-spec-stale"),
        classes=HOST,
        refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/1967",),
    ),
    Check(
        id="cdi-duplicate",
        title="No device is in two specifications",
        layer="cdi",
        severity="error",
        looks_at="device names of NVIDIA's specifications in /etc/cdi and /var/run/cdi.",
        why=(
            "Two files of one directory that name the same device are in conflict, and the device can't be "
            "resolved. A file in /var/run/cdi hides one in /etc/cdi, whose edits then do nothing, until a "
            "boot at which the first isn't written."
        ),
        remedy=fixes.everywhere("gpunode cdi list"),
        run=cdi_duplicate,
        blocked_by=("pci-no-gpu",),
        classes=(*HOST, WSL2),
        refs=(_SPEC,),
    ),
    Check(
        id="cdi-unsupported-version",
        title="Engines read the specifications' version",
        layer="cdi",
        severity="error",
        looks_at=(
            "cdiVersion of the specifications, and which one each engine in use reads by its release, where "
            "its CDI is on."
        ),
        why=(
            "An engine passes over a specification of a version that it doesn't know and says 'unresolvable "
            "CDI devices'. gpunode cdi refresh writes the lowest version that will do."
        ),
        remedy=fixes.REFRESH_CDI,
        run=cdi_unsupported_version,
        blocked_by=("pci-no-gpu", "cdi-spec-stale"),
        classes=HOST,
        table="cdi_versions",
        refs=(_SPEC, "https://github.com/NVIDIA/nvidia-container-toolkit/issues/1940"),
    ),
    Check(
        id="cdi-wsl-dxcore",
        title="CDI specifications have libdxcore.so",
        layer="cdi",
        severity="warning",
        looks_at="specifications of kind nvidia.com/gpu under WSL2: whether they mount libdxcore.so.",
        why="Under WSL2 the driver's libraries reach the GPU by libdxcore.so; without it there is none.",
        remedy=fixes.everywhere("nvidia-ctk cdi generate --mode=wsl --output=/var/run/cdi/nvidia.yaml"),
        run=cdi_wsl_dxcore,
        blocked_by=("pci-no-gpu",),
        classes=(WSL2,),
        refs=("https://github.com/NVIDIA/nvidia-container-toolkit/issues/1739",),
    ),
)
