"""Pictures for README and docs: the report of gpunode doctor in Chromium, and its page in a terminal as SVG.

``python scripts/take_screenshots.py [CHROMIUM]`` writes docs/images/. The node is the demo's: eight H100, the
driver installed, containerd without the nvidia runtime.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from gpunode.commands.demo import build_demo_node  # noqa: E402

IMAGES = REPOSITORY / "docs/images"
HEIGHTS = {1280: 1000, 400: 1400}
"""Height in pixels of a picture, by its width."""
# blink's PreferredColorScheme: https://source.chromium.org/search?q=enum%20PreferredColorScheme
SCHEMES = {"dark": 0, "light": 1}
_COLUMNS = 110


def doctor(root: Path, *options: str) -> str:
    """Output of `gpunode doctor` on that node, with colours."""
    done = subprocess.run(
        [sys.executable, "-m", "gpunode", "doctor", "--root", str(root), "--color", "always", *options],
        env={**os.environ, "COLUMNS": str(_COLUMNS)},
        capture_output=True,
        text=True,
        check=False,  # 1: the node has a fault
    )
    return done.stdout


def terminal_picture(output: str) -> str:
    """The output as an SVG of a terminal."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=_COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(f"$ gpunode doctor\n{output}"))
        svg = console.export_svg(title="gpunode doctor")
    # without the fonts that rich names on a server elsewhere
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def browser_picture(chromium: str, page: Path, scheme: str, width: int, profile: Path) -> None:
    """Chromium's picture of a page."""
    subprocess.run(
        [
            *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
            *("--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars"),
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
            f"--user-data-dir={profile}",
            f"--window-size={width},{HEIGHTS[width]}",
            f"--screenshot={IMAGES / f'doctor-{scheme}-{width}.png'}",
            page.as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )


def main() -> int:
    chromium = sys.argv[1] if len(sys.argv) > 1 else "chromium"
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpunode-") as name:
        directory = Path(name)
        build_demo_node(directory / "node")
        page = directory / "doctor.html"
        doctor(directory / "node", "--output-file", str(page))
        (IMAGES / "doctor-terminal.svg").write_text(terminal_picture(doctor(directory / "node")))
        for scheme in SCHEMES:
            for width in HEIGHTS:
                browser_picture(chromium, page, scheme, width, directory / f"profile-{scheme}-{width}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
