"""Resolves configurations in tests: flags as lists of texts, a file as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpunode.host import Host
from gpunode.plugin.config.resolve import OptionSources, ResolvedSettings

FILES = Path(__file__).parent / "files"


def sources(
    flags: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None, file: Path | None = None
) -> OptionSources:
    given = {field: [text] for field, text in (flags or {}).items()}
    if file is not None:
        given["config_file"] = [str(file)]
    return OptionSources(Host(Path("/"), dict(environ or {})), given)


def resolve_text(text: str, file: Path, **flags: str) -> ResolvedSettings:
    file.write_text(text)
    return sources(flags, file=file).resolve()


def problem_texts(resolved: ResolvedSettings, file: Path) -> list[str]:
    """The problems, with the file's name left out."""
    return [problem.text.replace(f"{file}:", "") for problem in resolved.problems]
