"""Modules that somebody else's imports ask for and hardly ever call: loaded when they are called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any


@contextmanager
def spared(name: str, function: str) -> Iterator[None]:
    """Have `from NAME import FUNCTION` in here cost nothing; whoever calls the function loads the module.

    Nothing happens where it is loaded already.
    """
    if name in sys.modules:
        yield
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(name), function)(*args, **kwargs)

    sys.modules[name] = stand_in = ModuleType(name)
    setattr(stand_in, function, call)
    try:
        yield
    finally:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
