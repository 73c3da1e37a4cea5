"""os-release as distributions write it, and malformed."""

import os
from pathlib import Path

import pytest

from gpunode.facts.system import Distribution, read_distribution
from gpunode.host import Host


def host_with(root: Path, text: str | bytes) -> Host:
    (root / "etc").mkdir()
    (root / "etc/os-release").write_bytes(text if isinstance(text, bytes) else text.encode())
    return Host(root, environ={})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'PRETTY_NAME="Ubuntu 22.04.5 LTS"\nVERSION_ID="22.04"\nID=ubuntu\nID_LIKE=debian\n',
            ("ubuntu", "22.04", "Ubuntu 22.04.5 LTS", "debian"),
        ),
        (
            'NAME="Oracle Linux Server"\nVERSION_ID="9.4"\nID="ol"\nID_LIKE="fedora"\n',
            ("oracle", "9.4", "Oracle Linux Server", "rhel"),
        ),
        (
            'ID="opensuse-leap"\r\nID_LIKE="suse opensuse"\r\nVERSION_ID="15.6"\r\n',
            ("opensuse", "15.6", "", "suse"),
        ),
        ("ID=debian\nPRETTY_NAME='Debian GNU/Linux trixie/sid'\n", ("debian", "", None, "debian")),
        ('# ID=ubuntu\n\nID="arch\nVERSION_ID\n=x\n', ("", "", "", "other")),
        ("\udcff", ("", "", "", "other")),
        ("", ("", "", "", "other")),
    ],
)
def test_distribution_is_read_from_os_release(text, expected, tmp_path):
    found = read_distribution(host_with(tmp_path, text.encode("utf-8", "surrogateescape")))
    identifier, version, name, family = expected
    assert (found.id, found.version, found.family) == (identifier, version, family)
    assert found.name == ("Debian GNU/Linux trixie/sid" if name is None else name)


def test_version_is_read_only_from_this_root(tmp_path):
    """Debian's testing has no VERSION_ID, and the machine that runs gpunode may be another release."""
    assert read_distribution(host_with(tmp_path, "ID=debian\n")).version == ""


def test_pipe_is_not_waited_for(tmp_path):
    (tmp_path / "etc").mkdir()
    os.mkfifo(tmp_path / "etc/os-release")
    assert read_distribution(Host(tmp_path, environ={})) == Distribution("", "", "", "other")
