"""A progress that prints nothing, for functions of commands that are called directly."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SilentProgress:
    """Implements `output.result.Progress`."""

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        yield

    def note(self, text: str) -> None:
        """Nothing is printed."""

    def info(self, text: str) -> None:
        """Nothing is printed."""

    @contextmanager
    def following(self, text: str, name: str) -> Iterator[Callable[[str], None]]:
        yield lambda _last: None
