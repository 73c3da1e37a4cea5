"""Options of nvidia-ctk that gpunode knows and refuses, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping

from gpunode.errors import UsageError

_HOOK = (
    "OCI hooks are deprecated: gpunode registers the runtime",
    "leave it out; for GPUs without the runtime: --cdi",
)
CONFIGURE = {
    "--config-source": (
        "gpunode reads the engine's files and asks the running daemon, whatever the source",
        "leave it out; to name the file: --config PATH",
    ),
    "--executable-path": (
        "gpunode finds the engine's program by its process",
        "leave it out; to name the file: --config PATH",
    ),
    "--oci-hook-path": _HOOK,
    "--nvidia-runtime-hook-path": _HOOK,
}
_CONFIG_MODES = ("config-file", "config")
_MODES = ("auto", "nvml")


def refuse_configure_options(options: Mapping[str, str], config_mode: str) -> None:
    """`UsageError` for what `configure-runtime` can't take over from ``nvidia-ctk runtime configure``."""
    for option, value in options.items():
        if value:
            reason, hint = CONFIGURE[option]
            raise UsageError(f"{option} has no counterpart: {reason}", hint=hint)
    if config_mode and config_mode not in _CONFIG_MODES:
        raise UsageError(f"--config-mode {config_mode} has no counterpart: {_HOOK[0]}", hint=_HOOK[1])


def refuse_mode(mode: str) -> None:
    """`UsageError` for a discovery mode other than that of NVIDIA's Linux driver."""
    if mode not in _MODES:
        raise UsageError(
            f"--mode {mode} has no counterpart: gpunode describes the GPUs of NVIDIA's Linux driver",
            hint=f"nvidia-ctk cdi generate --mode={mode}",
        )
