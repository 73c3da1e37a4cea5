"""What single values can't show: options that contradict each other. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gpunode.pattern import pattern
from gpunode.plugin.config.options import BY_FIELD
from gpunode.plugin.config.problems import Problem
from gpunode.plugin.settings import Settings

_PREFIX = pattern(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/")


def check(
    settings: Settings, origins: Mapping[str, str], part: str = ""
) -> tuple[list[Problem], list[Problem]]:
    """(problems, warnings). What depends on the node's GPUs is found when they are seen. `part` is labels for
    that command, and empty for those that serve."""

    def at(field: str) -> str:
        return origins.get(field, BY_FIELD[field].flags[0] if field in BY_FIELD else "")

    problems, warnings = [], []
    mps = settings.sharing is not None and settings.sharing.strategy == "mps"
    if mps and settings.mig_strategy == "mixed":
        message = f"MPS can't serve MIG devices, which mig-strategy mixed ({at('mig_strategy')}) advertises"
        problems.append(Problem(at("sharing"), "sharing.mps", message, "take single or none, or timeSlicing"))
    if mps and not settings.mps_root and part != "labels":
        message = "nobody is said to run the MPS daemons"
        hint = "give --mps, and gpunode runs them, or --mps-root for daemons that run elsewhere"
        problems.append(Problem(at("sharing"), "sharing.mps", message, hint))
    if settings.vendor != "nvidia":
        problems += _amd(settings, at("vendor"), at("sharing"))
    if settings.mps and not mps:
        message = "there is no sharing.mps in a config file: no daemon is started"
        warnings.append(Problem(at("mps"), "", message))
    key = settings.cdi_annotation_prefix
    if "cdi-annotations" in settings.device_list_strategy and not _PREFIX.fullmatch(key):
        message = f"{key!r} begins no annotation's key; engines look for cdi.k8s.io/ and pass others over"
        warnings.append(Problem(at("cdi_annotation_prefix"), "", message, "cdi.k8s.io/"))
    if settings.imex_required and not settings.imex_channel_ids:
        message = "without channel IDs nothing is required"
        warnings.append(Problem(at("imex_required"), "", message, "--imex-channel-ids 0"))
    if "stdout" in settings.labels.to and part != "labels":
        message = "a service has no stdout to show labels on"
        problems.append(Problem(at("labels_to"), "", message, "--labels file, node-feature or node"))
    if settings.device_discovery_strategy == "vfio" and part != "labels":
        message = "GPUs that are kept for virtual machines can't be served to containers"
        hint = "gpunode labels --device-discovery-strategy vfio labels them"
        problems.append(Problem(at("device_discovery_strategy"), "", message, hint))
    if settings.simulate and settings.vendor != "nvidia":
        problems.append(Problem(at("simulate"), "", "simulated nodes have NVIDIA GPUs", "--vendor nvidia"))
    return problems, warnings


def _amd(settings: Settings, vendor: str, sharing: str) -> list[Problem]:
    problems = []
    if settings.sharing is not None and settings.sharing.strategy == "mps":
        problems.append(
            Problem(sharing, "sharing.mps", f"MPS is NVIDIA's; the vendor is {settings.vendor} ({vendor})")
        )
    if settings.mps:
        problems.append(Problem(vendor, "", f"--mps is for NVIDIA's GPUs; the vendor is {settings.vendor}"))
    return problems
