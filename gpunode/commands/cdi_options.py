"""What `cdi generate` and `cdi refresh` have in common: options, and making the specification they name."""

from __future__ import annotations

import re

from gpunode.cdi.build import STRATEGIES, Built, Form
from gpunode.cdi.engines import newest_used, readable
from gpunode.cdi.generate import Sources, generate
from gpunode.dataclass import dataclass
from gpunode.errors import UsageError
from gpunode.host import Host
from gpunode.result import Progress

HOOKS = ("auto", "none")


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


def check(content: Content) -> None:
    """`UsageError` for what CDI or gpunode doesn't know; names by CDI's own rules (its parser.go)."""
    if content.hooks not in HOOKS:
        raise UsageError(f"--hooks {content.hooks}: unknown", hint=f"known: {', '.join(HOOKS)}")
    for name in content.names:
        if name not in STRATEGIES:
            raise UsageError(f"--device-name {name}: unknown", hint=f"known: {', '.join(STRATEGIES)}")
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
    ):
        if not path.startswith("/"):
            raise UsageError(f"{option} {path!r} is no absolute path", hint=f"{option} /PATH")


def make(host: Host, content: Content, progress: Progress) -> Built:
    """Ask the node and build the specification that every engine on it reads."""
    check(content)
    dev_root = content.dev_root or content.driver_root
    limit = readable(host, newest_used(host, dev_root, dots="." in content.device_class))
    form = Form(content.vendor, content.device_class, content.names, limit)
    sources = Sources(content.driver_root, content.dev_root, content.library_path, content.hooks)
    with progress.step("asking NVML and looking for the driver's files"):
        return generate(host, sources, form)
