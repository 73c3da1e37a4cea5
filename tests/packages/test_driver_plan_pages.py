"""The runs shown on the toolkit and driver pages, repeated; see tests/test_docs_pages.py."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fixtures.package_answers import record
from gpunode.commands.driver import made
from gpunode.packages.driver_model import Wish
from tests.cli import Ran, gpunode
from tests.packages.apt_root import AptRoot, Repository
from tests.packages.test_driver_plan import OLD_REPO, archive, built, cuda_rpm
from tests.test_docs_pages import printed, runs

_MIRROR, _KEY = "https://mirror.example.com/nvidia", "/srv/mirror/key.asc"
_RETIRED = "https://nvidia.github.io/nvidia-docker/ubuntu20.04/$(ARCH)"


def _printed(ran: Ran) -> str:
    """Terminal output, without queries that change nothing and numbers that differ in every run."""
    output = re.sub(r"^  (querying|looking at) .*\n", "", ran.err, flags=re.M) + ran.out
    output = re.sub(r"(?<=done in )\d+\.\d(?= s)|(?<=\(process )\d+|(?<=process )\d+", "N", output)
    return re.sub(r"\b[0-9A-F]{40}\b", "KEY", output)


def _page(name: str) -> dict[str, str]:
    return {line: _printed(Ran(0, text, "")) for line, text in runs(name).items()}


@pytest.mark.full
def test_toolkit_page_is_up_to_date(apt: AptRoot, repository: Repository) -> None:
    page = _page("docs/toolkit.md")
    runs: dict[str, str] = {}

    def see(line: str) -> None:
        words = line.replace(_MIRROR, repository.url).replace(_KEY, str(repository.key))
        shown = _printed(apt.gpunode(*shlex.split(words))).replace(f" --root {apt.root}", "")
        shown = shown.replace(str(apt.root), "")
        runs[line] = shown.replace(repository.url, _MIRROR).replace(str(repository.key), _KEY)

    (apt.sources / "nvidia-docker.list").write_text(f"deb {_RETIRED} /\n")
    first, dry_run, second, waits, removal = page
    see(first)
    see(dry_run)
    asked = ("--repository", repository.url, "--key", str(repository.key), "--version", "1.19.0")
    assert apt.gpunode("toolkit", "install", *asked).code == 0
    see(second)
    with apt.locked():
        see(waits)
    assert apt.gpunode("toolkit", "install", "--hold").code == 0
    see(removal)
    assert runs == page


def test_driver_page_is_up_to_date(tmp_path: Path) -> None:
    gone = ("/sys/module/nvidia", "/proc/driver/nvidia", "/var/lib/dkms")
    new = built(tmp_path, "healthy-h100-nvswitch", {}, gone)
    for modules in new.glob("lib/modules/*/modules.dep"):
        modules.write_text("")
    record(new, archive("580.173.02", switches=True), lambda host: made(host, Wish()))
    old = built(tmp_path, "kmod-flavour-rocky9", OLD_REPO)
    record(old, cuda_rpm("595.91.07"), lambda host: made(host, Wish(branch=595)))
    refused = gpunode("driver", "install", "--yes", "--branch", "595", "--root", str(old))
    assert refused.code == 3 and refused.out  # the plan, for which the page has dots
    assert runs("docs/driver.md") == {
        "driver plan": printed(gpunode("driver", "plan", "--root", str(new))),
        "driver install --yes --branch 595": f"...\n{printed(refused).removeprefix(refused.out)}".replace(
            f" --root {old}", ""
        ),
    }
