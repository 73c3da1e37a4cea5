"""Writes the pages that show what the program prints: checks, environment variables, transcripts.

``python scripts/generate_docs.py`` writes; ``--check`` only prints what is out of date (exit 1). Numbers that
differ from run to run (times, temporary names) don't count as a difference.
"""

import difflib
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from gpunode.cli import app  # noqa: E402
from gpunode.commands.help import variables  # noqa: E402
from scripts.man_pages import pages as manual_pages  # noqa: E402

VOLATILE = (
    # wherever this machine's temporary directory is
    (re.compile(r"(?<![\w.-])/\S*?/gpunode-\w{8}(?=[/\s:]|$)"), "/tmp/gpunode-XXXXXXXX"),
    (re.compile(r"\d+(\.\d+)? (ms|s)\b"), "N \\2"),
    # a second entry within one second has a number behind its name
    (re.compile(r"\d{8}T\d{6}Z(-[a-z]+(?:-[a-z]+)*)(?:-\d+)?"), "YYYYMMDDTHHMMSSZ\\1"),
    (re.compile(r"time=\S+"), "time=..."),
    (re.compile(r"gfd\.timestamp=\d+"), "gfd.timestamp=N"),
    # the age of the reference tables
    (re.compile(r"\d+ days? old"), "N days old"),
    (re.compile(r" +"), " "),
)

_TRANSCRIPT = re.compile(r"(<!-- prints: ([\w-]+) -->\n```\w*\n).*?```", re.DOTALL)


def stable(text: str) -> str:
    """The text without parts that differ in every run."""
    for pattern, shown in VOLATILE:
        text = pattern.sub(shown, text)
    return text


def printed(*argv: str, env: dict[str, str] | None = None) -> str:
    """Output of gpunode on stdout, as a user without colors sees it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUNODE_")}
    done = subprocess.run(
        [sys.executable, "-m", "gpunode", *argv],
        env={**kept, **(env or {}), "NO_COLOR": "1", "COLUMNS": "110"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    return done.stdout


def environment_page() -> str:
    """Every option that a variable can set, as `gpunode help environment` lists them."""
    lines = [
        "# Environment variables",
        "",
        "Every lasting option has one variable; a flag takes precedence. One-shot flags such as `--dry-run`",
        "and `--yes` have none. `gpunode help environment` prints this list.",
        "",
        "| variable | option | of | means |",
        "|---|---|---|---|",
    ]
    for one in variables(typer.main.get_command(app)):
        others = f" Also: {', '.join(f'`{other}`' for other in one.others)}." if one.others else ""
        command = one.command or "every command"
        lines.append(f"| `{one.name}` | `{one.option}` | {command} | {one.help}{others} |")
    lines += [
        "",
        "Beside these: `NO_COLOR` and `FORCE_COLOR` (see no-color.org; `--color` beats both),",
        "`NOTIFY_SOCKET` and `JOURNAL_STREAM` (set by systemd for `plugin serve`), and `GPUNODE_STATE_DIR`",
        "(directory of the journal instead of `/var/lib/gpunode`).",
    ]
    return "\n".join(lines) + "\n"


def checks_page() -> str:
    done = subprocess.run(
        [sys.executable, "-m", "gpunode.checks.document"], capture_output=True, text=True, check=True
    )
    return done.stdout


def engines_page() -> str:
    from fixtures.corpus_page import page

    return page()


def device_plugin_page() -> str:
    """The page with its table of options as they are."""
    from gpunode.commands.plugin_options import SERVING

    return page_with_options("docs/device-plugin.md", SERVING, "NVIDIA's plugin")


def labels_page() -> str:
    from gpunode.commands.labels import options

    return page_with_options("docs/labels.md", options(), "GPU feature discovery")


def page_with_options(page: str, options: Any, theirs_of: str) -> str:
    """The page with its table of options as they are."""
    from gpunode.commands.plugin_options import default_text
    from gpunode.plugin.config.options import metavar

    rows = [
        f"| option | variables of {theirs_of} | key in the file | default | means |",
        "|---|---|---|---|---|",
    ]
    for option in options:
        flags = " ".join(f"`{flag}`" for flag in option.flags)
        words = metavar(option).replace("|", "\\|")
        theirs = " ".join(f"`{name}`" for name in option.variables)
        key = f"`{option.key}`" if option.key else ""
        default = f"`{default_text(option)}`" if default_text(option) else ""
        restart = "" if option.live else " Needs a restart."
        rows.append(f"| {flags} {words} | {theirs} | {key} | {default} | {option.help}{restart} |")
    text = (REPOSITORY / page).read_text()
    before, mark, rest = text.partition("<!-- options -->\n")
    _, end, after = rest.partition("<!-- end of options -->")
    assert mark and end, f"{page} has no place for its options"
    return before + mark + "\n".join(rows) + "\n" + end + after


def page_with_transcripts(page: str) -> str:
    """The page with each block after a ``<!-- prints: NAME -->`` mark replaced by the output of that run."""
    text = (REPOSITORY / page).read_text()
    assert _TRANSCRIPT.search(text), f"{page} has no block that shows a run"
    return _TRANSCRIPT.sub(lambda found: found[1] + TRANSCRIPTS[found[2]]().rstrip("\n") + "\n```", text)


def demo_transcript() -> str:
    return "$ gpunode demo\n" + printed("demo")


def doctor_transcript() -> str:
    from fixtures.machines import recorded_host

    with tempfile.TemporaryDirectory(prefix="gpunode-") as name:
        recorded_host("driver-lib-mismatch", Path(name) / "node")
        return "$ gpunode doctor\n" + printed("doctor", "--root", f"{name}/node")


def fix_transcript() -> str:
    from fixtures.machines import recorded_host

    with tempfile.TemporaryDirectory(prefix="gpunode-") as name:
        recorded_host("uvm-not-loaded", Path(name) / "node")
        return "$ gpunode doctor --fix\n" + printed("doctor", "--fix", "--root", f"{name}/node")


def compare_transcript() -> str:
    """Four nodes of which one has yesterday's module and one another distribution."""
    from fixtures.machines import recorded_host

    nodes = {
        "node1": "healthy-h100",
        "node2": "healthy-h100",
        "node7": "driver-lib-mismatch",
        "node9": "healthy-docker-rocky9",
    }
    with tempfile.TemporaryDirectory(prefix="gpunode-") as name:
        files = []
        for node, recorded in nodes.items():
            root = Path(name) / node
            recorded_host(recorded, root)
            (root / "proc/sys/kernel/hostname").write_text(node + "\n")
            files.append(f"{name}/{node}.json")
            printed("doctor", "--root", str(root), "--output-file", files[-1])
        return "$ gpunode doctor --compare node*.json\n" + printed("doctor", "--compare", *files)


def dry_run_transcript() -> str:
    from gpunode.commands.demo import build_demo_node

    with tempfile.TemporaryDirectory(prefix="gpunode-") as name:
        build_demo_node(Path(name) / "node")
        argv = ["configure-runtime", "--runtime", "containerd", "--dry-run"]
        return f"$ gpunode {' '.join(argv)}\n" + printed(*argv, "--root", f"{name}/node")


def status_transcript() -> str:
    from fixtures.machines import recorded_host

    with tempfile.TemporaryDirectory(prefix="gpunode-") as name:
        recorded_host("containerd-not-restarted", Path(name) / "node")
        return "$ gpunode status runtime\n" + printed("status", "runtime", "--root", f"{name}/node")


def recorded_transcript(machine: str, *argv: str) -> str:
    """Output of a command on a recorded machine."""
    from fixtures.machines import recorded_host

    with tempfile.TemporaryDirectory(prefix="gpunode-") as name:
        recorded_host(machine, Path(name) / "node")
        return f"$ gpunode {' '.join(argv)}\n" + printed(*argv, "--root", f"{name}/node")


def setup_transcript() -> str:
    return recorded_transcript("fresh-node-with-driver", "setup", "--kubernetes")


TRANSCRIPTS: dict[str, Callable[[], str]] = {
    "demo": demo_transcript,
    "doctor": doctor_transcript,
    "fix": fix_transcript,
    "compare": compare_transcript,
    "dry-run": dry_run_transcript,
    "status": status_transcript,
    "setup": setup_transcript,
}
PAGES: dict[str, Callable[[], str]] = {
    "docs/checks.md": checks_page,
    "docs/engines.md": engines_page,
    "docs/device-plugin.md": device_plugin_page,
    "docs/labels.md": labels_page,
    "docs/environment.md": environment_page,
    "docs/doctor.md": lambda: page_with_transcripts("docs/doctor.md"),
    "docs/setup.md": lambda: page_with_transcripts("docs/setup.md"),
    "docs/demo.md": lambda: page_with_transcripts("docs/demo.md"),
    "docs/runtimes.md": lambda: page_with_transcripts("docs/runtimes.md"),
}


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = False
    manual: dict[str, Callable[[], str]] = {
        f"docs/man/{name}": functools.partial(str, text) for name, text in manual_pages().items()
    }
    for name, page in {**PAGES, **manual}.items():
        path = REPOSITORY / name
        before, after = path.read_text() if path.exists() else "", page()
        if stable(before) == stable(after):
            continue
        stale = True
        if check:
            difference = difflib.unified_diff(
                stable(before).splitlines(),
                stable(after).splitlines(),
                name,
                "what a run prints",
                lineterm="",
            )
            print("\n".join(difference))
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(after)
            print(f"wrote {name}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
