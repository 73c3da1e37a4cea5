"""`topic`: one fact about a machine, read at its first use and stored.

Unlike with functools.cached_property a hanging read is waited for only once: if one thread hangs inside a
topic (a stuck file system, a process table that blocks), the next caller gets an error at once, and so does
one that asks a daemon or a program that didn't answer before.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, Generic, TypeVar, overload

from gpunode.errors import DaemonError, GpunodeError

_Value = TypeVar("_Value")
_BUSY = "_busy_topics"
_FAILED = "_failed_topics"


class Stuck(GpunodeError):
    """A read doesn't return; `first` if this caller waited for it, not if the hang was known before."""

    def __init__(self, message: str, *, first: bool = False) -> None:
        super().__init__(message)
        self.first = first


class topic(Generic[_Value]):
    """Decorates a method without arguments; a value that is set in the instance's dictionary takes
    precedence."""

    def __init__(self, read: Callable[[Any], _Value]) -> None:
        self._read = read
        self._name = read.__name__
        self.__doc__ = read.__doc__

    @overload
    def __get__(self, node: None, owner: type[Any]) -> topic[_Value]: ...

    @overload
    def __get__(self, node: object, owner: type[Any]) -> _Value: ...

    def __get__(self, node: object | None, owner: type[Any]) -> topic[_Value] | _Value:
        if node is None:
            return self
        failed: dict[str, GpunodeError] = node.__dict__.setdefault(_FAILED, {})
        if self._name in failed:
            raise failed[self._name]
        busy: dict[str, int] = node.__dict__.setdefault(_BUSY, {})
        if busy.setdefault(self._name, get_ident()) != get_ident():
            raise Stuck(f"waits for a hanging query: {self._name.replace('_', ' ').strip()}")
        try:
            value = node.__dict__[self._name] = self._read(node)
        except DaemonError as error:
            failed[self._name] = error
            raise
        except Stuck as error:
            if error.first:
                failed[self._name] = Stuck(error.message)
            raise
        finally:
            del busy[self._name]
        return value
