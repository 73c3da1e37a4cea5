"""The documentation shows the output of real runs, and its links have targets."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpunode import __version__
from gpunode.output.result import ExitCode
from tests.cli import REPOSITORY, clean_environment

PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")])


@pytest.mark.full
def test_generated_pages_and_transcripts_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/generate_docs.py", "--check"],
        cwd=REPOSITORY,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"run `make docs`:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_have_existing_targets(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """Names by which links refer to the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_to_headings_have_existing_targets(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]*)#([^)]+)\)", page.read_text())
    missing = [link for link in links if link[1] not in anchors(page.parent / link[0] if link[0] else page)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_named_source_files_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # it names files of its time
    names = re.findall(r"(?<![\w/])(?:gpunode|tests|fixtures|scripts)/[\w/]+\.py\b", page.read_text())
    assert [name for name in names if not (REPOSITORY / name).exists()] == []


def test_index_lists_every_page() -> None:
    index = (REPOSITORY / "docs/README.md").read_text()
    files = [path for path in (REPOSITORY / "docs").iterdir() if path.is_file()]
    pages = [path.name for path in files if path.name != "README.md"]
    assert [name for name in pages if f"]({name})" not in index] == []
    assert "(docs/README.md)" in (REPOSITORY / "README.md").read_text()


# pages of which a test repeats every run that they show, with that test
REPEATED = {
    "README.md": "machine/readme.py",
    "docs/device-plugin.md": "test_docs_pages.py",
    "docs/driver.md": "packages/test_driver_plan_pages.py",
    "docs/kubernetes.md": "test_docs_pages.py",
    "docs/manifests.md": "test_docs_pages.py",
    "docs/labels.md": "test_docs_pages.py",
    "docs/mig.md": "test_docs_pages.py",
    "docs/toolkit.md": "packages/test_driver_plan_pages.py",
}
_BLOCK = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(?:console)?\n(\$ .*?)^```$", re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_run_that_a_page_shows_is_repeated_or_marked_as_a_recording(page: Path) -> None:
    """`make docs` writes what follows ``<!-- prints: NAME -->``."""
    shown = [
        (mark, block)
        for mark, block in _BLOCK.findall(page.read_text())
        if any(not line.startswith(("$ ", "# ")) for line in block.splitlines() if line)
    ]
    test = REPEATED.get(str(page.relative_to(REPOSITORY)))
    if test is not None:
        assert shown and page.name in (REPOSITORY / "tests" / test).read_text()
        return
    unmarked = [block for mark, block in shown if not mark.startswith(("prints: ", "a recording"))]
    assert unmarked == []


def test_every_exit_code_is_explained() -> None:
    text = (REPOSITORY / "docs/exit-codes.md").read_text()
    assert [code for code in ExitCode if f"\n| {int(code)} |" not in text] == []


def test_every_kind_is_listed() -> None:
    text = (REPOSITORY / "docs/json.md").read_text()
    sources = [path.read_text() for path in (REPOSITORY / "gpunode").rglob("*.py")]
    kinds = {kind for source in sources for kind in re.findall(r'@verb\(\w+, "[^"]+", "(\w+)"[,)]', source)}
    assert kinds
    assert [kind for kind in sorted(kinds) if f"`{kind}`" not in text] == []


def test_changelog_has_a_section_for_this_version() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    assert "## Unreleased" in text or f"## {__version__}" in text


def test_make_help_lists_every_target() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (REPOSITORY / "Makefile").read_text(), re.M)
    assert {line.split()[0] for line in done.stdout.splitlines()} == set(phony.split())
