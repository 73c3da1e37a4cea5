"""Asking several daemons at once, none for longer than a person waits."""

from __future__ import annotations

from collections.abc import Sequence

from gpunode.dataclass import dataclass
from gpunode.errors import GpunodeError
from gpunode.runtime.engine import Active, Engine

SECONDS = 3.0  # a healthy daemon answers within milliseconds, a busy one within a second


@dataclass(frozen=True)
class Answer:
    """What a daemon said, or in `silence` why it said nothing."""

    active: Active | None = None
    silence: str = ""


def ask_all(engines: Sequence[Engine], seconds: float = SECONDS) -> tuple[Answer, ...]:
    """The answers, in the engines' order, after `seconds` at most: one that is late counts as silent."""
    import threading

    answers: dict[int, Answer] = {}

    def ask(number: int, engine: Engine) -> None:
        try:
            answers[number] = Answer(engine.ask())
        except GpunodeError as error:
            answers[number] = Answer(None, error.message)

    # daemon threads: one that hangs in a socket must not keep the program from ending
    threads = [threading.Thread(target=ask, args=pair, daemon=True) for pair in enumerate(engines)]
    for thread in threads:
        thread.start()
    deadline = engines[0].host.monotonic() + seconds if engines else 0.0
    for thread, engine in zip(threads, engines, strict=True):
        thread.join(max(0.0, deadline - engine.host.monotonic()))
    late = Answer(None, f"no answer within {seconds:g} seconds")
    return tuple(answers.get(number, late) for number in range(len(engines)))
