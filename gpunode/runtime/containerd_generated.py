"""Drop-ins that NVIDIA's tools generated: copies of the CRI section that hide what the main file says.

They are left alone as long as they give the right runtime, with a word about what they hide. `replaced` says
what must come of them where somebody asked for that.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpunode.dataclass import dataclass, replace
from gpunode.facts.containerd import ContainerdConfig, dig, merge
from gpunode.facts.writers import GeneratedCopy, generated_copy, nvidia_writer
from gpunode.runtime import containerd_imports
from gpunode.runtime.containerd_plan import Outcome, configured
from gpunode.runtime.containerd_state import State
from gpunode.runtime.engine import Handler, Wanted
from gpunode.runtime.trees import Tree

_SHOWN = 5
Copies = Mapping[str, GeneratedCopy]


@dataclass(frozen=True)
class Replacement:
    """The state without the copies, what is wanted then, and the copies themselves."""

    state: State
    wanted: Wanted
    copies: Copies


def copies(state: State) -> Copies:
    """The generated copies among the files that containerd reads, by path."""
    config = state.config
    found = {}
    for path in config.files:
        if path == config.path:
            continue
        others = _merged_without(config, path)
        copied = generated_copy(config.trees[path], others, config.plugin)
        if copied is not None and nvidia_writer(state.texts[path], config.trees[path]):
            found[path] = copied
    return found


def _merged_without(config: ContainerdConfig, left_out: str) -> Tree:
    merged: Tree = {}
    for path, tree in config.trees.items():
        if path != left_out:
            merged = merge(merged, tree, deep=config.deep)
    return merged


def drift(state: State, found: Copies) -> tuple[str, ...]:
    """What the copies hide, for people; nothing about a copy that hides nothing."""
    notes = []
    for path, copied in found.items():
        others = _merged_without(state.config, path)
        hidden = [_hidden(state, others, path, key) for key in copied.shadowed]
        if not state.deep:
            hidden += [f"{'.'.join(key)} ({state.config.path} only)" for key in copied.lost]
        if hidden:
            more = f" and {len(hidden) - _SHOWN} more" if len(hidden) > _SHOWN else ""
            notes.append(
                f"{path} is a copy of the whole CRI section that NVIDIA's tools generated, and hides newer"
                f" settings: {', '.join(hidden[:_SHOWN])}{more}; to put only the runtime in its place:"
                " gpunode configure-runtime --replace"
            )
    return tuple(notes)


def _hidden(state: State, others: Tree, path: str, key: tuple[str, ...]) -> str:
    plugin = state.config.plugin
    copied = dig(state.config.trees[path], "plugins", plugin, *key)
    return f"{'.'.join(key)} ({copied!r} there, {dig(others, 'plugins', plugin, *key)!r} otherwise)"


def enlarged(wanted: Wanted, found: Copies) -> Wanted:
    """What is wanted and what the copies gave: their other runtimes, a default that was theirs, CDI."""
    handlers = {handler.name: handler for handler in wanted.handlers}
    for copied in found.values():
        for name, program in copied.handlers.items():
            handlers.setdefault(name, Handler(name, program))
    default = wanted.default or next((one.default for one in found.values() if one.default), "")
    ordered = sorted(
        handlers.values(), key=lambda handler: handler.name != default
    )  # the default comes first
    cdi = wanted.cdi or any(copied.cdi for copied in found.values())
    return replace(wanted, handlers=tuple(ordered), set_as_default=bool(default), cdi=cdi)


def replaced(replacement: Replacement) -> Outcome:
    """Minimal configuration in the copies' place, and an account of what changes with them."""
    state, found = replacement.state, replacement.copies
    outcome = configured(state, replacement.wanted)
    texts: dict[str, str | None] = dict(outcome.texts)
    for path in found:
        texts.setdefault(path, None)
    gone = [path for path in found if texts[path] is None]
    written = [path for path, text in texts.items() if text is not None]
    needed = [path for path in (*state.config.files, *state.neighbours, *written) if path not in gone]
    for importer, patterns in containerd_imports.forgotten(state.config, gone, needed).items():
        texts[importer] = containerd_imports.without(
            texts.get(importer) or state.texts[importer], patterns, importer
        )
    return replace(outcome, texts=texts, notes=(*outcome.notes, *_in_force(found)))


def _in_force(found: Copies) -> tuple[str, ...]:
    notes = []
    for path, copied in found.items():
        keys = [".".join(key) for key in (*copied.shadowed, *copied.lost)]
        if keys:
            more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
            notes.append(
                f"with {path} goes its copy of the CRI section; these of the other files come into force:"
                f" {', '.join(keys[:_SHOWN])}{more}"
            )
    return tuple(notes)
