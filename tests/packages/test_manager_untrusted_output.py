"""Any output of a package manager and any file in its directories: a result or an error with a message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpunode.errors import GpunodeError
from gpunode.host import Host
from gpunode.host.process import Completed
from gpunode.packages.apt import Apt
from gpunode.packages.dnf import Dnf
from gpunode.packages.manager import Manager, PackageRequest
from gpunode.packages.zypper import Zypper

NAMES = ("nvidia-container-toolkit", "libnvidia-container1")
OUTPUTS = [
    *(NAMES[0], "\n", " ", "\t", "|", ":", '"', "\x00", "\x1b[0m", "3:1.2-1.el9", "(none)", "E: ", "Error: "),
    *("  Installed: ", "  Candidate: ", "  Version table:\n", " *** 1.2-1 500\n", "    500 http://x/ y\n"),
    *(
        "Inst ",
        "Conf ",
        "Remv ",
        "[1.0]",
        "(2.0 x [amd64])",
        "ii  ",
        "i | ",
        "v | ",
        'Dir::Etc "x";',
        "<solvable ",
    ),
]
outputs = st.lists(st.sampled_from(OUTPUTS) | st.text(max_size=3), max_size=20).map("".join)


class Saying(Host):
    """Every program prints the same."""

    def run(self, argv: Any, **_: Any) -> Completed:
        return Completed(tuple(argv), *self.environ["outputs"])


@pytest.mark.parametrize("kind", [Apt.of, Dnf, Zypper], ids=["apt", "dnf", "zypper"])
def test_any_manager_output_causes_no_traceback(kind: Any, tmp_path: Path) -> None:
    @settings(max_examples=40)
    @given(code=st.sampled_from([0, 1, 100, 103, -9]), out=outputs, err=outputs)
    def holds(code: int, out: str, err: str) -> None:
        answer: Any = {"outputs": (code, out, err)}
        manager: Manager = kind(Saying(tmp_path, answer))
        for ask in (
            lambda: manager.look(NAMES),
            lambda: manager.installed(NAMES),
            lambda: manager.preview(manager.install([PackageRequest(NAMES[0])])),
            lambda: manager.explain(Completed(("x",), code, out, err)),
            manager.finish,
            manager.require_holding,
        ):
            try:
                ask()
            except GpunodeError as error:
                assert error.message

    holds()
