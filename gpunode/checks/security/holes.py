"""Known holes of the toolkit and the driver, from NVIDIA's bulletins. Nothing is asked of the network."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.model import HOST, Check, Verdict, ok, seen, skip, warn
from gpunode.checks.security import remedies
from gpunode.checks.toolkit.remedies import upgrade
from gpunode.facts.driver import module_loaded
from gpunode.facts.node import Node
from gpunode.facts.system import WSL2
from gpunode.tables import table

_VGPU_MANAGER = "nvidia_vgpu_vfio"


def toolkit_cve(node: Node) -> Verdict:
    from gpunode.facts.bulletins import TOOLKIT, name_of, toolkit_bulletins

    version = node.toolkit.version
    if not version:
        return skip("the toolkit's version can't be told")
    text = ".".join(map(str, version))
    found = toolkit_bulletins(node.host, version, node.toolkit_settings)
    if not found:
        return ok(f"no hole of toolkit {text} is known as of {table(TOOLKIT).date}")
    evidence = [
        seen(name_of(one), f"{', '.join(one['cves'])} (CVSS {one['score']}), closed in {one['fixed']}")
        for one in found
    ]
    summary = f"toolkit {text} has known holes that {found[0]['fixed']} closes"
    return warn(summary, seen(node.toolkit.version_source, text), *evidence, fix=upgrade(node))


def driver_cve(node: Node) -> Verdict:
    from gpunode.facts.bulletins import DRIVER, driver_bulletins, name_of
    from gpunode.facts.gpu_support import branch, ended

    version = node.module.version if node.module else ""
    number = branch(version)
    if not number:
        return skip("the module doesn't tell its version")
    if module_loaded(node.host, _VGPU_MANAGER):
        return skip("the vGPU manager has releases of its own")
    if ended(number) is not None:
        return skip(f"branch {number} gets no more fixes: see driver-eol")
    found = driver_bulletins(version)
    if not found:
        return ok(f"no hole of driver {version} is known as of {table(DRIVER).date}")
    evidence = [seen(name_of(one), f"closed in {fixed}") for one, fixed in found]
    summary = f"driver {version} has known holes that {found[0][1]} closes"
    return warn(
        summary,
        seen("/sys/module/nvidia/version", version),
        *evidence,
        fix=remedies.driver_upgrade(node, found[0][1]),
    )


CHECKS = (
    Check(
        id="toolkit-cve",
        title="No hole of the container toolkit is known",
        layer="security",
        severity="warning",
        looks_at=(
            "the toolkit's version against a table of NVIDIA's security bulletins, whose date is shown. A "
            "hole that the mode, the low-level runtime or a setting of config.toml closes doesn't count."
        ),
        why=(
            "By the worst of them whoever chooses a container's image gets at the host. Where only trusted "
            "images run, the next maintenance window is early enough."
        ),
        remedy=fixes.UPGRADE_TOOLKIT,
        run=toolkit_cve,
        blocked_by=("toolkit-missing", "toolkit-too-old", "toolkit-config-invalid"),
        classes=(*HOST, WSL2),
        table="toolkit_cves",
        refs=(
            "https://github.com/NVIDIA/product-security",
            "https://nvidia.custhelp.com/app/answers/detail/a_id/5659",
        ),
    ),
    Check(
        id="driver-cve",
        title="No hole of the driver is known",
        layer="security",
        severity="warning",
        looks_at=(
            "the loaded module's version against a table of NVIDIA's security bulletins, whose date is "
            "shown: the release of its own branch that closes each."
        ),
        why=(
            "Most of them let a local user, or a program in a container, crash the driver or gain rights. "
            "Where only trusted programs run, the next maintenance window is early enough."
        ),
        remedy=fixes.UPGRADE_DRIVER,
        run=driver_cve,
        blocked_by=("module-not-loaded", "driver-too-old", "driver-lib-mismatch"),
        unless=("vgpu-guest",),
        table="driver_cves",
        refs=("https://github.com/NVIDIA/product-security",),
    ),
)
