"""What `cdi generate` and `cdi refresh` have in common: options, and making the specification they name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpunode.cdi.build import STRATEGIES, Built, Form, Sources, generate
from gpunode.cdi.engines import newest_used, readable
from gpunode.cdi.hooks import HOOK_NAMES
from gpunode.errors import UsageError
from gpunode.host import Host
from gpunode.output.result import Progress

HOOKS = ("auto", "none")
_NO_GIDS, _NO_SOCKETS = "no-additional-gids-for-device-nodes", "disable-ipc-discoverer"
_FLAGS = (_NO_GIDS, _NO_SOCKETS)
_NO_EFFECT = ("disable-nvsandboxutils",)  # gpunode doesn't use that library


@dataclass(frozen=True)
class Content:
    """What goes into a specification; names and defaults are nvidia-ctk's where it has them."""

    driver_root: str = "/"
    dev_root: str = ""
    library_path: tuple[str, ...] = ()
    hooks: str = "auto"
    vendor: str = "nvidia.com"
    device_class: str = "gpu"
    names: tuple[str, ...] = ("index", "uuid")
    device_ids: tuple[str, ...] = ()
    every: bool = True
    disabled_hooks: tuple[str, ...] = ()
    enabled_hooks: tuple[str, ...] = ()
    hook_path: str = ""
    ldconfig: str = ""
    feature_flags: tuple[str, ...] = ()


def check(content: Content) -> None:
    """`UsageError` for what CDI or gpunode doesn't know; names by CDI's own rules (its parser.go)."""
    if content.hooks not in HOOKS:
        raise UsageError(f"--hooks {content.hooks}: unknown", hint=f"known: {', '.join(HOOKS)}")
    for name in content.names:
        if name not in STRATEGIES:
            raise UsageError(f"--device-name {name}: unknown", hint=f"known: {', '.join(STRATEGIES)}")
    _check_nvidia_ctk(content)
    for option, value, pattern in (
        ("--vendor", content.vendor, r"[A-Za-z]([\w.-]*[A-Za-z0-9])?"),
        ("--class", content.device_class, r"[A-Za-z]([\w.-]*[A-Za-z0-9])?"),
    ):
        if not re.fullmatch(pattern, value, re.ASCII):
            raise UsageError(
                f"{option} {value!r} can't be part of a device's name",
                hint="letters, digits, '-', '_' and '.'; a letter first, a letter or digit last",
            )
    for option, path in (
        ("--driver-root", content.driver_root),
        ("--dev-root", content.dev_root or "/"),
        *(("--library-path", path) for path in content.library_path),
        ("--nvidia-cdi-hook-path", content.hook_path or "/"),
        ("--ldconfig-path", content.ldconfig or "/"),
    ):
        if not path.startswith("/"):
            raise UsageError(f"{option} {path!r} is no absolute path", hint=f"{option} /PATH")


def _check_nvidia_ctk(content: Content) -> None:
    """Words of nvidia-ctk's that mean nothing here."""
    for option, words, known in (
        ("--disable-hook", content.disabled_hooks, (*HOOK_NAMES, "chmod", "all")),
        ("--enable-hook", content.enabled_hooks, HOOK_NAMES),
        ("--feature-flag", content.feature_flags, (*_FLAGS, *_NO_EFFECT)),
    ):
        for word in words:
            if word not in known:
                raise UsageError(
                    f"{option} {word} has no counterpart: gpunode never writes that",
                    hint=f"known: {', '.join(known)}",
                )


def make(host: Host, content: Content, progress: Progress) -> Built:
    """Ask the node and build the specification that every engine on it reads."""
    check(content)
    dev_root = content.dev_root or content.driver_root
    limit = readable(host, newest_used(host, dev_root, dots="." in content.device_class))
    groups = _NO_GIDS not in content.feature_flags
    form = Form(
        content.vendor, content.device_class, content.names, limit, every=content.every, groups=groups
    )
    disabled = frozenset(content.disabled_hooks) - frozenset(content.enabled_hooks)
    sources = Sources(
        content.driver_root,
        content.dev_root,
        content.library_path,
        "none" if "all" in disabled and not content.enabled_hooks else content.hooks,
        hook_path=content.hook_path,
        ldconfig=content.ldconfig,
        disabled_hooks=frozenset(HOOK_NAMES) - frozenset(content.enabled_hooks)
        if "all" in disabled
        else disabled,
        sockets=_NO_SOCKETS not in content.feature_flags,
        device_ids=content.device_ids,
    )
    with progress.step("asking NVML and looking for the driver's files"):
        return generate(host, sources, form)
