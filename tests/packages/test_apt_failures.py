"""Failures of a real apt: the network, a proxy, the clock, a full disk, a read-only one.

Each is an error with apt's text and a fix, and nothing is left half-done.
"""

import functools
import http.server
import os
import subprocess
import threading
from typing import ClassVar

import pytest

from tests.packages.apt_root import PACKAGES, make_repository

pytestmark = pytest.mark.xdist_group("apt")  # one repository, and one process that forks gpunode
NEWEST = dict.fromkeys(PACKAGES, "1.20.0-1")
ENTER = ("unshare", "--mount", "--propagation", "private", "sh", "-ec")


class Answers(http.server.SimpleHTTPRequestHandler):
    """Serves files, also as a proxy."""

    proxied: ClassVar[list[str]] = []

    def translate_path(self, path):
        if path.startswith("http://"):
            self.proxied.append(path)
            path = f"/{path.split('/', 3)[3]}"
        return super().translate_path(path)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def web(repository):
    """The mirror over HTTP."""
    handler = functools.partial(Answers, directory=str(repository.base))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def fails(apt, web, repository):
    """Output of a failing install with that URL, configuration, environment or mounts."""
    mirror = f"http://127.0.0.1:{web.server_port}"

    def made(url=mirror, *, settings="", environ=None, script="", key=repository.key):
        with (apt.root / "apt.conf").open("a") as file:
            file.write(f'Acquire::Retries "0";\n{settings}')
        prefix = (*ENTER, f'{script}\nexec "$@"', "sh") if script else ()
        if script and subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
            pytest.skip("needs the right to mount")
        (apt.root / "etc/apt/keyrings").mkdir(exist_ok=True)
        before = apt.tree()
        asked = ("--repository", url.replace("MIRROR", mirror), "--key", str(key))
        done = apt.gpunode("toolkit", "install", *asked, prefix=prefix, env=environ)
        assert (apt.tree(), apt.installed()) == (before, {}), done.err
        assert done.code in (3, 4), done.err
        return done.err

    return made


def test_url_without_a_repository_is_reported(fails):
    output = fails("MIRROR/none")
    assert "does not have a Release file" in output and "hint: there is nothing at that address" in output


def test_unresolvable_host_name_is_reported(fails):
    output = fails("http://mirror.invalid")
    assert "'mirror.invalid'" in output and "hint: the repository can't be reached: see its name" in output


def test_unresponsive_proxy_of_variable_or_apt_configuration_is_reported(fails):
    output = fails(environ={"http_proxy": "http://127.0.0.1:1"})
    assert "127.0.0.1:1" in output and "sudo drops http_proxy" in output
    output = fails(settings='Acquire::http::Proxy "http://proxy.invalid:3128";\n')
    assert "'proxy.invalid'" in output and "the proxy" in output


def test_working_proxy_is_used(apt, web, repository):
    asked = ("--repository", "http://mirror.invalid", "--key", str(repository.key))
    proxy = {"http_proxy": f"http://127.0.0.1:{web.server_port}"}
    done = apt.gpunode("toolkit", "install", *asked, env=proxy)
    assert (done.code, apt.installed()) == (0, NEWEST), done.err
    assert any(path.startswith("http://mirror.invalid/stable/deb/") for path in Answers.proxied)


@pytest.mark.parametrize(
    ("date", "message"),
    [
        ("Fri, 01 Jan 2100 00:00:00 UTC", "is not valid yet (invalid for another"),
        (
            "Thu, 01 Jan 2026 00:00:00 UTC\nValid-Until: Fri, 02 Jan 2026 00:00:00 UTC",
            "is expired (invalid since",
        ),
    ],
)
def test_wrong_clock_or_expired_index_is_reported(fails, signer, tmp_path, date, message):
    mirror = make_repository(tmp_path / "mirror", signer)
    release = mirror.flat / "Release"
    release.write_text(release.read_text().replace("Thu, 01 Jan 2026 00:00:00 UTC", date))
    signer.clearsign(release, mirror.flat / "InRelease")
    output = fails(mirror.url, key=mirror.key)
    assert message in output and "hint: this node's clock is wrong (timedatectl), or" in output


def full(place):
    """A file system without free space there."""
    return f"mount -t tmpfs -o size=4k tmpfs {place}; mkdir -p {place}/partial; touch {place}/a; " + (
        f"dd if=/dev/zero of={place}/a bs=4k count=9 2>/dev/null || :"
    )


def read_only(place):
    return f"mount --bind {place} {place}; mount -o remount,bind,ro {place}"


@pytest.mark.full
def test_full_disk_during_download_or_install_is_reported(apt, fails):
    for place in ("var/cache/apt/archives", "var/lib/apt/lists", "usr"):
        output = fails(script=full(apt.root / place))
        assert "No space left on device" in output or "enough free space" in output
        assert "hint: free disk space, then run this again" in output


@pytest.mark.full
def test_read_only_directories_are_reported(apt, fails):
    for place in ("etc", "var", "usr"):
        output = fails(script=read_only(apt.root / place))
        assert "Read-only file system" in output and "read-only" in output.partition("hint: ")[2]
    (apt.root / "state").mkdir(exist_ok=True)
    output = fails(script=read_only(apt.root / "state"))
    assert "state/lock: Read-only file system" in output and not os.listdir(apt.sources)
