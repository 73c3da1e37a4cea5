"""What the doctor tries on --deep: things that are run on the node and leave nothing behind."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gpunode.errors import GpunodeError, PreconditionError
from gpunode.facts.about import Trial
from gpunode.host import Host
from gpunode.result import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_SECONDS = 15.0  # for the GPU alone; the image and the container take a few more


def trials(progress: Progress) -> Mapping[str, Callable[[Host, str], Trial]]:
    """By engine: a vector-add in a container, on the GPU with this UUID."""
    return {"docker": partial(_in_container, "docker", progress)}


def _in_container(engine: str, progress: Progress, host: Host, uuid: str) -> Trial:
    from gpunode.commands.verify import Options, in_container

    try:
        answer, via = in_container(host, Options(on=engine, timeout=_SECONDS), (uuid,), progress)
    except PreconditionError as error:
        return Trial(None, error.message)
    except GpunodeError as error:
        return Trial(False, f"{error.message}; {error.hint}" if error.hint else error.message)
    wrong = answer.error or next((one.message for one in answer.devices if one.status != "ok"), "")
    if wrong or not answer.devices:
        return Trial(False, f"{via}: {wrong or 'the program saw no GPU'}")
    return Trial(True, f"vector-add on {uuid} by {via}")
