"""CDI specifications: do they still describe this machine?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpunode.checks import fixes
from gpunode.checks.cdi.readers import judge
from gpunode.checks.cdi.shadows import hidden_by
from gpunode.checks.model import HOST, Check, Verdict, ok, seen, skip
from gpunode.facts.node import Node
from gpunode.result import Evidence

if TYPE_CHECKING:
    from gpunode.facts.cdi import CdiSpec

_SHOWN = 6


def cdi_spec_stale(node: Node) -> Verdict:
    specs = tuple(spec for spec in node.cdi_specs if hidden_by(node.cdi_specs, spec) is None)
    if not specs:
        return skip("there is no CDI specification for NVIDIA devices")
    for spec in specs:
        wrong = tuple(_wrong(node, spec))
        if wrong:
            more = len(wrong) - _SHOWN
            shown = (*wrong[:_SHOWN], seen(spec.path, f"and {more} more")) if more > 0 else wrong
            fix = fixes.rewrite_cdi(spec.path, spec.kind)
            return judge(node)(f"{spec.path} doesn't describe this machine any more", *shown, fix=fix)
    return ok(f"{len(specs)} CDI specification{'s' if len(specs) > 1 else ''} fit this machine")


def _wrong(node: Node, spec: CdiSpec) -> Iterator[Evidence]:
    from gpunode.facts.cdi import known_gpus, stale_parts

    if spec.problem:
        yield seen(spec.path, spec.problem)
    names_gpus = any(name.startswith("GPU-") for name in spec.names)
    gpus = known_gpus(node.nvml.inventory) if names_gpus and node.module is not None else None
    version = node.module.version if node.module else ""
    yield from (seen(spec.path, part) for part in stale_parts(node.host, spec, version, gpus))


CHECKS = (
    Check(
        id="cdi-spec-stale",
        title="CDI specifications fit this machine",
        layer="cdi",
        severity="error",
        looks_at=(
            "every specification of kind nvidia.com/... in /etc/cdi and /var/run/cdi that no other hides: "
            "mounted files, device files and their numbers, hooks, the driver version in library names, and "
            "the GPUs that devices are named after. Where no engine takes specifications this is a warning."
        ),
        why=(
            "A specification lists files of the driver that it was made for. After an upgrade or a reboot "
            "they may be gone, and containers fail with 'cannot stat' or CUDA error 999. Docker 29.2 and "
            "later try CDI first."
        ),
        remedy=fixes.REFRESH_CDI,
        run=cdi_spec_stale,
        blocked_by=(
            "module-not-loaded",
            "driver-lib-mismatch",
            "dev-nodes-missing",
            "mig-caps-missing",
            "dev-node-major-stale",
            "uvm-not-loaded",
            "nvml-hang",
        ),
        classes=HOST,
        refs=("https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md",),
    ),
)
