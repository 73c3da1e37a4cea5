"""A translated configuration as a file's text, held against our own reader before anybody gets it."""

from __future__ import annotations

import copy
from pathlib import Path

from gpunode.dataclass import replace
from gpunode.host import Host
from gpunode.plugin.config.problems import Problem
from gpunode.plugin.config.resolve import Resolved, Sources
from gpunode.plugin.config.translate import Left, Translation, take

_NOWHERE = "/translated"  # is never opened: the bytes are given
_UNKNOWN = "unknown key"


def settled(found: Translation) -> tuple[Translation, str]:
    """The translation without keys that nobody knows, and its text; `problems` if that is no config file."""
    config, left = copy.deepcopy(found.config), list(found.left)
    while True:
        text = _text(config)
        resolved = _resolved(text)
        unknown = [one for one in resolved.problems if one.message.startswith(_UNKNOWN)]
        taken = [one.key for one in unknown if take(config, one.key)]
        left += [Left(key, "no device plugin knows this key, and NVIDIA's passes it over") for key in taken]
        if not taken:
            break
    problems = tuple(map(_told, resolved.problems))
    left += [Left(one.key or "the whole", one.message, one.hint) for one in resolved.warnings]
    return replace(found, config=config, left=tuple(left), problems=problems), text


def _text(config: object) -> str:
    import yaml

    return str(yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100))


def _resolved(text: str) -> Resolved:
    return Sources(Host(Path("/"), {}), {"config_file": [_NOWHERE]}).resolve(text.encode())


def _told(problem: Problem) -> str:
    return ": ".join(filter(None, (problem.key, problem.message)))
