"""Virtual GPUs (vGPU) as their guest sees them, and confidential computing."""

from __future__ import annotations

from gpunode.checks import fixes
from gpunode.checks.fabric import remedies
from gpunode.checks.model import ANY_ENGINE, HOST, Check, Verdict, fail, ok, seen, skip, warn
from gpunode.facts.kernel_log import SOURCE, matching
from gpunode.facts.node import Node
from gpunode.facts.processes import boot_time
from gpunode.facts.system import VM
from gpunode.facts.xid_log import last_load
from gpunode.result import Evidence, Fix

_TOKENS = "/etc/nvidia/ClientConfigToken"
_TOKEN = "client_configuration_token_*.tok"  # noqa: S105 - as the licence portal names its files
_SETTINGS = "/etc/nvidia/gridd.conf"
_UNIT = "nvidia-gridd.service"
_LICENCE_SECONDS = 300  # nvidia-gridd asks within the first minutes after a boot
_LICENSING = "https://docs.nvidia.com/license-system/latest/nvidia-license-system-quick-start-guide/"
_VERSIONS = "https://docs.nvidia.com/vgpu/"
# what the guest's driver logs where the host refuses it, or is too old for it
_REFUSED = (
    r"SetGuestSystemInfo: The host version \(([\d.]+)\) is too old"
    r"|Incompatible Guest/Host drivers|Guest driver is incompatible with host driver"
    r"|[vV]GPU.{0,80}version mismatch"
)


def vgpu_license(node: Node) -> Verdict:
    asked = [one for one in node.conditions if one.licence.supported]
    if not asked:
        return skip("NVML tells of no virtual GPU that needs a licence")
    without = [one for one in asked if one.licence.licensed is False]
    if not without:
        return ok("the virtual GPUs have a licence")
    if 0 < node.host.now() - boot_time(node.host) < _LICENCE_SECONDS:
        return skip("the node has just booted, nvidia-gridd still asks for a licence")
    evidence = [
        seen(f"NVML, GPU {one.index} ({one.pci})", f"no licence{_products(one.licence.products)}")
        for one in without[:8]
    ]
    unit = node.units.get(_UNIT)
    if unit is not None and not unit.runs:
        fix = Fix(f"systemctl enable --now {_UNIT}", True, "none")
        return warn(
            "the virtual GPUs have no licence: nobody asks for one", *evidence, seen(_UNIT, unit), fix=fix
        )
    if not _configured(node):
        fix = Fix(f"install -m 744 {_TOKEN} {_TOKENS}/ && systemctl restart nvidia-gridd")
        nothing = seen(_TOKENS, "no client configuration token")
        return warn("the virtual GPUs have no licence: no token says where from", *evidence, nothing, fix=fix)
    return warn("the virtual GPUs have no licence", *evidence)


def _products(names: tuple[str, ...] | None) -> str:
    return f" for {', '.join(names)}" if names else ""


def _configured(node: Node) -> bool:
    """A token of the licence service, wherever gridd.conf has it, or the address of an older licence server.
    `Unreadable` where this user may not look."""
    lines = (line.partition("=") for line in (node.host.read_text(_SETTINGS) or "").splitlines())
    settings = {key.strip(): value.strip().strip('"') for key, _, value in lines if not key.startswith("#")}
    tokens = settings.get("ClientConfigTokenPath") or _TOKENS
    return bool(settings.get("ServerAddress")) or bool(node.host.glob(tokens, "*.tok"))


def vgpu_driver_mismatch(node: Node) -> Verdict:
    since = last_load(node.kernel_log)  # guest or host may have been upgraded since
    found = [(line, match) for line, match in matching(node.kernel_log, _REFUSED) if line.seconds >= since]
    if not found:
        return ok("the driver hasn't refused the host's vGPU manager")
    line, match = found[-1]
    host = f" {match[1]}" if match[1] else ""
    loaded = node.module.version if node.module else ""
    evidence: list[Evidence] = [seen(SOURCE, line.text)]
    evidence += [seen("/sys/module/nvidia/version", loaded)] if loaded else []
    return fail(f"the host's vGPU manager{host} doesn't fit driver {loaded}".rstrip(), *evidence)


def cc_mode(node: Node) -> Verdict:
    told = next((one for one in node.conditions if one.cc_enabled is not None), None)
    if told is None or not told.cc_enabled:
        return (
            ok("confidential computing is off") if told else skip("NVML tells of no confidential computing")
        )
    if told.cc_ready is not False:
        return ok("the GPUs compute in confidence and take work")
    return warn(
        "the GPUs compute in confidence and wait to be declared ready",
        seen("NVML, confidential computing", "on, GPUs not ready"),
    )


CHECKS = (
    Check(
        id="vgpu-driver-mismatch",
        title="The guest's driver fits the host's vGPU manager",
        layer="fabric",
        severity="error",
        looks_at="what the guest's driver says of the host's vGPU manager in the kernel's log.",
        why=(
            "Guest and host have to be of one vGPU release, or of releases that know each other. Otherwise "
            "the virtual GPU is switched off: it is on the bus and nothing can use it."
        ),
        remedy=remedies.GUEST_DRIVER,
        run=vgpu_driver_mismatch,
        blocked_by=("module-not-loaded",),
        classes=(VM,),
        refs=(_VERSIONS,),
        preflight=ANY_ENGINE,
    ),
    Check(
        id="vgpu-license",
        title="Virtual GPUs have a licence",
        layer="fabric",
        severity="warning",
        looks_at=f"what NVML says of licences, {_UNIT}, {_SETTINGS} and tokens in {_TOKENS}.",
        why=(
            "A virtual GPU without a licence works at first and is slowed down after some minutes; some "
            "profiles lose CUDA. The usual causes are a missing token, a clock that is wrong, and a licence "
            "service that can't be reached."
        ),
        remedy=fixes.everywhere(f"journalctl -b -u {_UNIT} -n 30; timedatectl"),
        run=vgpu_license,
        blocked_by=("module-not-loaded", "nvml-hang", "vgpu-driver-mismatch"),
        classes=HOST,
        refs=(_LICENSING,),
        needs=("vgpu-guest",),
    ),
    Check(
        id="cc-mode",
        title="GPUs that compute in confidence take work",
        layer="fabric",
        severity="warning",
        looks_at="NVML's state of confidential computing, and whether the GPUs are declared ready.",
        why=(
            "With confidential computing on, GPUs refuse all work until somebody has attested them and says "
            "that they are ready. Until then CUDA fails in every container."
        ),
        remedy=fixes.everywhere("nvidia-smi conf-compute -srs 1"),
        run=cc_mode,
        blocked_by=("module-not-loaded", "nvml-hang"),
        classes=HOST,
        refs=("https://docs.nvidia.com/confidential-computing/",),
    ),
)
