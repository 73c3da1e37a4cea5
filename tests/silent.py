"""A progress that prints nothing, for functions of commands that are called directly."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpunode.commands.session import GlobalOptions, Session
from gpunode.host import Host


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


def silent_session(host: Host) -> Session:
    """What a command's function takes."""
    return Session(host, SilentProgress(), "", GlobalOptions())
