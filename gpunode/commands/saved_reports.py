"""Reports that were saved: a DoctorReport as JSON or YAML, or the one inside a support bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpunode.errors import ConfigError, GpunodeError
from gpunode.host import Host

_MAKE_ONE = "make one: gpunode doctor --output-file NODE.json"


def saved_report(path: str) -> dict[str, Any]:
    """The envelope in a file of this machine, whatever --root is; `ConfigError` names one that is none."""
    place = str(Path(path).absolute())
    try:
        if path.endswith((".tar.gz", ".tgz")):
            from gpunode._bundle import report_in

            text = report_in(Path(place)).decode("utf-8", "replace")
        else:
            found = Host(Path("/")).read_text(place)
            if found is None:
                raise ConfigError(f"{path} is not there", hint=_MAKE_ONE)
            text = found
        return _envelope(path, text)
    except GpunodeError as error:
        raise ConfigError(error.message.replace(place, path), hint=error.hint, code=error.code) from error


def _envelope(path: str, text: str) -> dict[str, Any]:
    loaded = _parsed(path, text)
    if not isinstance(loaded, dict) or loaded.get("kind") != "DoctorReport":
        kind = loaded.get("kind") if isinstance(loaded, dict) else None
        told = f"it is a {str(kind)[:40]!a}" if kind else "it has no kind"
        raise ConfigError(f"{path} is no DoctorReport: {told}", hint=_MAKE_ONE)
    if not isinstance(loaded.get("data"), dict) or "findings" not in loaded["data"]:
        raise ConfigError(f"{path} is the report of a doctor that failed: it has no findings", hint=_MAKE_ONE)
    return loaded


def _parsed(path: str, text: str) -> Any:
    import json

    try:
        if path.endswith((".yaml", ".yml")):
            import yaml

            try:
                # libyaml's loader, where this PyYAML has it, takes a tenth of the time
                return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - safe
            except yaml.YAMLError as error:
                raise ValueError(" ".join(str(error).split())) from error
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        told = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{path} is no report: {told}", hint=_MAKE_ONE) from error
