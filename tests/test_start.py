"""What makes a start short and nothing else: modules that are spared, patterns that are compiled late."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys

import pytest

from gpunode._spared import spared
from gpunode.pattern import pattern


def run_python(program: str) -> object:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


SPARED = """
import json, sys
sys.modules.pop("urllib.parse", None)
from gpunode._spared import spared
with spared("urllib.parse", "quote_from_bytes"):
    from urllib.parse import quote_from_bytes
before = "urllib.parse" in sys.modules
text = quote_from_bytes(b"a b", safe="")
print(json.dumps([before, text, "urllib.parse" in sys.modules]))
"""


def test_a_spared_module_is_loaded_by_who_calls_it() -> None:
    assert run_python(SPARED) == [False, "a%20b", True]


def test_a_module_that_is_loaded_stays_what_it_is() -> None:
    before = sys.modules["json"]
    with spared("json", "dumps"):
        assert sys.modules["json"] is before
    assert sys.modules["json"] is before


def test_a_failed_import_leaves_no_stand_in() -> None:
    with pytest.raises(ZeroDivisionError), spared("ftplib", "parse227"):
        raise ZeroDivisionError
    assert "ftplib" not in sys.modules


def test_nvml_s_bindings_bring_no_subprocess_along_and_can_still_find_a_library() -> None:
    program = (
        "import json, sys\n"
        "from gpunode.gpu.nvml import load_bindings\n"
        "bindings = load_bindings()\n"
        "spared = not {'subprocess', 'ctypes.util'} & set(sys.modules)\n"
        "print(json.dumps([spared, bindings.find_library('no-such-library-at-all')]))\n"
    )
    assert run_python(program) == [True, None]


def test_a_pattern_is_compiled_when_it_is_asked() -> None:
    late = pattern(r"(?P<name>[a-z]+)\d", re.IGNORECASE)
    assert vars(late).keys() == {"_given"}
    found = late.fullmatch("AB1")
    assert found is not None
    assert found["name"] == "AB"
    assert late.fullmatch("1") is None
    assert (late.pattern, late.flags & re.IGNORECASE) == (r"(?P<name>[a-z]+)\d", re.IGNORECASE)
    with pytest.raises(re.error):
        pattern("(").match("")
    assert copy.copy(late).fullmatch("AB1")
    with pytest.raises(AttributeError):
        _ = late.no_such_thing  # type: ignore[attr-defined]
