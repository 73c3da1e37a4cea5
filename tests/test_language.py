"""User-visible strings and test names use plain English: the worst words stay out of them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import gpunode
from gpunode.cdi.spec import MARKER

ROOT = Path(gpunode.__file__).parent
WORDS = re.compile(
    r"\b(mends?|mended|told|nobody|somebody|someone|whoever|whose|anew|strangers?|begun|in force|taken back|"
    r"puts? back|of no use)\b",
    re.IGNORECASE,
)
# a test's name begins with its subject, a noun
SUBJECTS = re.compile(r"test_(what|who|whoever|whatever|it|nobody|somebody)_")
# local variables and parameters with such a name don't say what the value is
VAGUE = {
    *("asked", "behind", "came", "found", "given", "got", "judged", "meant", "mine", "named", "one", "ours"),
    *("said", "settled", "some", "theirs", "thing", "told", "wanted", "who", "whom"),
}
# fixed data, not text: a state in the journal, keys and outcomes in reports and logs, the name of a version
# gate, a line of files
DATA = {"begun", "mend", "mends", "mended", "not-mended", "cgroup-driver-told", MARKER}


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """String constants and docstrings of checks, which are printed; other docstrings are left out."""
    docstrings = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        is_check = isinstance(node, ast.FunctionDef) and any(
            isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id.endswith("check")
            for one in node.decorator_list
        )
        if not is_check:
            docstrings |= {id(one.value) for one in node.body if isinstance(one, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def test_user_visible_strings_contain_no_forbidden_words() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text!r}"
        for path in sorted(ROOT.rglob("*.py"))
        for line, text in strings(ast.parse(path.read_text()))
        if text not in DATA and WORDS.search(text)
    ]
    assert wrong == []


def test_test_names_contain_no_forbidden_words() -> None:
    paths = sorted(Path(__file__).parent.rglob("test_*.py"))
    names = {
        name for path in paths for name in re.findall(r"^ *def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(names) > 1000
    assert [
        name for name in sorted(names) if WORDS.search(name.replace("_", " ")) or SUBJECTS.match(name)
    ] == []


def locals_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Parameters and variables of functions; a class's fields are part of its interface."""
    fields = {
        id(node.target)
        for defined in ast.walk(tree)
        if isinstance(defined, ast.ClassDef)
        for node in defined.body
        if isinstance(node, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            yield node.lineno, node.id


def test_local_names_say_what_the_value_is() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted(ROOT.rglob("*.py"))
        for line, name in locals_of(ast.parse(path.read_text()))
        if name in VAGUE
    ]
    assert wrong == []


def test_local_names_include_loops_and_parameters_and_no_fields() -> None:
    tree = ast.parse("class A:\n    one: int\n\ndef a(got):\n    return [found for found in got]\n")
    assert sorted(name for _, name in locals_of(tree)) == ["found", "got"]


def test_check_reasons_and_messages_count_as_strings_and_other_docstrings_do_not() -> None:
    tree = ast.parse(
        '@engine_check("a")\ndef a():\n    """Why."""\n    fail("told")\n\ndef b():\n    """whose"""\n'
    )
    assert sorted(text for _, text in strings(tree)) == ["Why.", "a", "told"]
