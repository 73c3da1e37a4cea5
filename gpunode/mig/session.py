"""Read and change the MIG layout of the node's GPUs through NVML in a child process (`mig.nvml`).

`MigSession` keeps one child, and so NVML, open for many requests, because each opening wakes all GPUs. A GPU
can't be reset while it is open: close the session first.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from gpunode.errors import GpunodeError
from gpunode.gpu.child import ChildFailure, answer, start, unusable
from gpunode.gpu.library_paths import nvml_options
from gpunode.gpu.model import GPU_IS_LOST
from gpunode.gpu.nvml import (
    IN_USE,
    INSUFFICIENT_RESOURCES,
    NO_PERMISSION,
    NOT_SUPPORTED,
    RESET_REQUIRED,
)
from gpunode.host import Host
from gpunode.host.process import LineChild
from gpunode.host.recording import naming_the_key
from gpunode.mig.model import Layouts, Placement, layouts_from_json
from gpunode.output.result import ExitCode
from gpunode.output.typed import PlainError, plain

READ_SECONDS = 60.0
CHANGE_SECONDS = 120.0  # setting the mode of an Ampere GPU resets it

_HINTS = {
    NO_PERMISSION: "run it as root",
    IN_USE: "end the processes that use the GPU; list them: gpunode mig plan",
    INSUFFICIENT_RESOURCES: "list the layout and the possible profiles: gpunode mig list --profiles",
    NOT_SUPPORTED: "enable MIG; on a virtual GPU the host controls the layout",
    GPU_IS_LOST: "find out why: gpunode doctor",
    RESET_REQUIRED: "reset the GPU, or reboot",
}


class MigError(GpunodeError):
    """NVML refused a MIG call, hung or crashed.

    `nvml_code` is NVML's return code, None if it hung or crashed.
    """

    default_code = "mig"

    def __init__(self, doing: str, what: str, reason: str, nvml_code: int | None = None) -> None:
        """`what` names the GPU and the instance; empty for the node."""
        place = f"{what}: " if what else ""
        code = f" (NVML {nvml_code})" if nvml_code is not None else ""
        rights = nvml_code == NO_PERMISSION
        super().__init__(
            f"{place}can't {doing}: {reason}{code}",
            hint=_HINTS.get(nvml_code or 0, "find out why: gpunode doctor"),
            code="mig-permission" if rights else "mig-hang" if nvml_code is None else "mig",
            exit_code=ExitCode.PRECONDITION if rights else ExitCode.FAILED,
        )
        self.nvml_code = nvml_code


class MigProcess(NamedTuple):
    """A process on a GPU, or on one of its instances; `gi` and `ci` are None for the whole GPU."""

    pid: int
    gi: int | None = None
    ci: int | None = None


class MigSession:
    """An open NVML in a child. Every method raises `MigError`; after a hang or a crash the session is closed.

    GPUs are identified by UUID, profiles by the driver's id, places by `Placement`.
    """

    def __init__(self, host: Host) -> None:
        """Start the child; `MigError` if NVML doesn't open."""
        self._child: LineChild | None = None
        try:
            self._child = start(host, "gpunode.mig.nvml", nvml_options(host))
            self._answer("open NVML", "", READ_SECONDS)
        except ChildFailure as error:
            raise MigError("open NVML", "", str(error)) from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> MigSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child, and NVML with it; does nothing if it has ended."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def layouts(self) -> Layouts:
        """The present layouts of all GPUs."""
        return layouts_from_json(self._query("read the layouts", READ_SECONDS, do="layouts"))

    def processes(self, uuid: str) -> tuple[MigProcess, ...]:
        """The processes on a GPU and its instances."""
        rows = self._query("list the processes", READ_SECONDS, do="processes", uuid=uuid)
        return tuple(MigProcess(*row) for row in rows)

    def set_mode(self, uuid: str, on: bool) -> bool:
        """Switch MIG on or off. Off requires a GPU without instances; on Ampere it may stay pending.

        Return whether the mode is active: if not, it waits for a reset.
        """
        doing = f"switch MIG {'on' if on else 'off'}"
        return bool(self._query(doing, CHANGE_SECONDS, do="set-mode", uuid=uuid, on=on)["active"])

    def create_gpu_instance(
        self, uuid: str, profile_id: int, at: Placement | None = None, name: str = ""
    ) -> tuple[int, Placement]:
        """Create a GPU instance `at` a placement, or where the driver chooses; return its id and its
        placement."""
        doing = f"create GPU instance {name or f'of profile id {profile_id}'}{f' at {at}' if at else ''}"
        reply = self._query(
            doing, CHANGE_SECONDS, do="create-gpu-instance", uuid=uuid, profile=profile_id, **_place(at)
        )
        return reply["id"], Placement(*reply["at"])

    def create_compute_instance(self, uuid: str, gi: int, slices: int, at: Placement | None = None) -> int:
        """Create a compute instance of so many slices on a GPU instance; return its id."""
        doing = f"create compute instance {slices}c{f' at {at}' if at else ''}"
        question = {"do": "create-compute-instance", "uuid": uuid, "gi": gi, "slices": slices, **_place(at)}
        return int(self._query(doing, CHANGE_SECONDS, **question)["id"])

    def destroy_gpu_instance(self, uuid: str, gi: int) -> None:
        """Destroy a GPU instance without compute instances."""
        self._query("destroy it", CHANGE_SECONDS, do="destroy-gpu-instance", uuid=uuid, gi=gi)

    def destroy_compute_instance(self, uuid: str, gi: int, ci: int) -> None:
        """Destroy a compute instance that no process uses."""
        self._query("destroy it", CHANGE_SECONDS, do="destroy-compute-instance", uuid=uuid, gi=gi, ci=ci)

    def _query(self, doing: str, seconds: float, **question: Any) -> Any:
        if self._child is None:
            raise MigError(doing, "", "NVML is closed after its failure")
        self._child.tell(json.dumps(question))
        return self._answer(doing, question.get("uuid", ""), seconds)

    def _answer(self, doing: str, uuid: str, seconds: float) -> Any:
        """The child's response. `MigError` if NVML refuses.

        A timeout or a crash raises it too, and closes the session.
        """
        assert self._child is not None
        what = f"GPU {uuid}" if uuid else ""
        try:
            document = answer(self._child, seconds)
            error = document.get("error")
            if error is None:
                return document.get("done")
            refusal = MigError(doing, error.get("what") or what, error["message"], error["code"])
        except ChildFailure as failure:
            self._child = None
            question = failure.question
            if question is not None and question.gpus:
                what = f"GPU {question.gpus[0]}"
            question_text = f": {question}" if question is not None else ""
            raise MigError(doing, what, f"{failure.reason}{question_text}") from None
        except (KeyError, TypeError, AttributeError) as problem:
            self.close()
            raise MigError(doing, what, unusable(repr(problem))) from None
        raise refusal


def _place(at: Placement | None) -> dict[str, Any]:
    return {"at": [at.start, at.size]} if at is not None else {}


def read_layouts(host: Host) -> Layouts:
    """The MIG layouts of this node's GPUs. `MigError` if NVML doesn't report them.

    A recorded machine returns its recorded layouts (`ConfigError` for a malformed recording).
    """
    if not host.live:
        return _recorded(host)
    with MigSession(host) as session:
        layouts = session.layouts()
    host.heard("nvml", "mig", plain(layouts))
    return layouts


def _recorded(host: Host) -> Layouts:
    recorded = host.recording.get("nvml", {}).get("mig")
    if recorded is None:
        error = MigError("read the layouts", "", "nothing was recorded of this machine's MIG")
        error.hint = "gpunode report records it on that node"
        raise error
    with naming_the_key():
        if isinstance(recorded, dict) and "gpus" not in recorded:
            raise PlainError("nvml.mig.gpus is missing")
        return layouts_from_json(recorded, "nvml.mig")
