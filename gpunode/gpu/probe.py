"""The child of `isolated.probe`: asks NVML for the inventory and prints it as one JSON document.

``{"inventory": {...}}`` as `gpunode gpus -o json` has it under `data`, with ``"topology"`` beside it if the
argument --topology asks for it, or
``{"error": {"code": 18, "message": "..."}}``. ``--library PATH`` names the library to load. ``--root PATH``
names the root directory of a driver container: its libraries and its device files are used.

With --condition a line ``[INDEX, {...}]`` follows for each GPU, as soon as it is known: a GPU over which NVML
hangs or crashes doesn't take the inventory with it. Each question is named on stderr before NVML is asked:
the last line there is the one in which it hung or crashed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from gpunode.gpu.child import end_with_parent
from gpunode.gpu.discover import discover
from gpunode.gpu.model import Inventory
from gpunode.gpu.nvml import Nvml, load_bindings
from gpunode.gpu.nvml_errors import NO_PERMISSION, NvmlError
from gpunode.result import plain


def main() -> int:
    """Print the inventory or NVML's error; always 0, so that anything else means a crash."""
    end_with_parent()
    try:
        _enter(_value("--root"))
        with Nvml.open(_value("--library"), _Asking) as nvml:
            inventory = discover(nvml)
            answer = {"inventory": plain(inventory)}
            if "--topology" in sys.argv[1:]:
                from gpunode.gpu.topology import read_topology

                answer["topology"] = plain(read_topology(nvml, inventory))
            _say(answer)
            if "--condition" in sys.argv[1:]:
                _say_conditions(nvml, inventory)
    except NvmlError as error:
        _say({"error": {"code": error.code, "message": error.message}})
    return 0


class _Asking:
    """Names a question on stderr; there is nothing to do when NVML has answered it."""

    def __init__(self, function: str, gpus: Sequence[int]) -> None:
        about = f" of {' and '.join(f'GPU {gpu}' for gpu in gpus)}" if gpus else ""
        self._line = f"asking {function}{about}\n".encode()

    def __enter__(self) -> None:
        os.write(sys.stderr.fileno(), self._line)

    def __exit__(self, *_: object) -> None:
        return


def _say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _say_conditions(nvml: Nvml, inventory: Inventory) -> None:
    from gpunode.gpu.condition_reader import read_conditions

    for condition in read_conditions(nvml, inventory):
        _say([condition.index, plain(condition)])


def _value(option: str) -> str:
    return sys.argv[sys.argv.index(option) + 1] if option in sys.argv else ""


def _enter(root: str) -> None:
    """Make a driver container's root the root of this process; no module can be imported after that."""
    if not root:
        return
    import gpunode.gpu.condition_reader
    import gpunode.gpu.topology  # noqa: F401 - both are needed later

    load_bindings()
    try:
        os.chroot(root)
        os.chdir("/")
    except OSError as error:
        raise NvmlError(NO_PERMISSION, f"can't enter {root}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
