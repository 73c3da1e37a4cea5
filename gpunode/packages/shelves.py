"""The files in which apt, dnf and zypper are told of repositories (sources.list(5), yum.conf(5))."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from gpunode.dataclass import dataclass
from gpunode.errors import ConfigError, GpunodeError, PreconditionError
from gpunode.facts.apt_sources import read_sources
from gpunode.host import Host
from gpunode.packages.apt import Apt
from gpunode.packages.manager import Manager
from gpunode.packages.openpgp import read_keys
from gpunode.packages.repository import NAME, Entry, Shelf, Wanted, facts

_OFF = "# switched off by gpunode: "
_RPM_DIRECTORIES = {"dnf": "/etc/yum.repos.d", "zypper": "/etc/zypp/repos.d"}
_RPM_KEY = f"/etc/pki/rpm-gpg/RPM-GPG-KEY-{NAME}"
_SECTION = re.compile(r"^\s*\[([^\]]+)\]\s*$")
_SETTING = re.compile(r"^([a-z_]+)\s*[=:]\s*(.*?)\s*$")
_FALSE = ("0", "no", "false", "off")


def shelf_of(host: Host, manager: Manager) -> Shelf:
    """The one of this manager."""
    if isinstance(manager, Apt):
        return AptShelf(host, manager)
    return RpmShelf(host, _RPM_DIRECTORIES[manager.name])


@dataclass(frozen=True)
class AptShelf:
    """sources.list, and what lies in its directory in either format."""

    host: Host
    apt: Apt

    @property
    def file(self) -> str:
        """Under the name that NVIDIA's guide gives it, so that a later reader finds it."""
        return f"{self.apt.places.sources_parts}/{NAME}.list"

    @property
    def key_file(self) -> str:
        """apt reads an armored key from a name that ends so, and that needs no gpg."""
        return f"{self.apt.places.etc}/keyrings/{NAME}.asc"

    def entries(self, wanted: Wanted) -> tuple[Entry, ...]:
        places = self.apt.places
        found = read_sources(self.host, places.sources_list, places.sources_parts)
        return tuple(
            Entry(one.path, one.line, one.uri, one.signed_by, self._holds(one.signed_by, wanted))
            for one in found
        )

    def _holds(self, key: str, wanted: Wanted) -> bool | None:
        """An entry that names no key is signed by any of those that apt trusts for everything."""
        etc = self.apt.places.etc
        common = (f"{etc}/trusted.gpg", *self.host.glob(f"{etc}/trusted.gpg.d", "*.[ag][sp][cg]"))
        return any(_holds(self.host, path, wanted) for path in ((key,) if key else common))

    def address(self, wanted: Wanted) -> str:
        return f"{wanted.base}/{facts().deb}"

    def render(self, wanted: Wanted) -> bytes:
        return f"deb [signed-by={self.key_file}] {self.address(wanted)} /\n".encode()

    def without(self, path: str, lines: Sequence[int]) -> bytes:
        text = _text(self.host, path).splitlines(keepends=True)
        for number in sorted(set(lines), reverse=True):
            if not path.endswith(".sources"):
                text[number - 1] = _OFF + text[number - 1]
                continue
            at = number - 1
            stanza = text[
                at : at + next((n for n, line in enumerate(text[at:]) if not line.strip()), len(text))
            ]
            addresses = [
                word for line in stanza if line.lower().startswith("uris:") for word in line.split()[1:]
            ]
            if len(addresses) > 1:
                raise PreconditionError(
                    f"{path}, line {number}: an entry names NVIDIA's repository together with others",
                    hint="give it an entry of its own, then run this again",
                )
            # a switch may be there already, and says yes
            text[at : at + len(stanza)] = [
                "Enabled: no\n", *(line for line in stanza if not line.lower().startswith("enabled:")),
            ]  # fmt: skip
        return "".join(text).encode()


@dataclass(frozen=True)
class RpmShelf:
    """The ``.repo`` files of a directory; dnf and zypper read the same form."""

    host: Host
    directory: str

    @property
    def file(self) -> str:
        return f"{self.directory}/{NAME}.repo"

    @property
    def key_file(self) -> str:
        return _RPM_KEY

    def entries(self, wanted: Wanted) -> tuple[Entry, ...]:
        return tuple(
            Entry(
                path,
                line,
                said.get("baseurl", "").split()[0],
                key := said.get("gpgkey", ""),
                self._holds(key, wanted),
            )
            for path in self.host.glob(self.directory, "*.repo")
            for line, said in _sections(_text(self.host, path))
            if said.get("enabled", "1").lower() not in _FALSE and said.get("baseurl", "").split()
        )

    def _holds(self, key: str, wanted: Wanted) -> bool | None:
        # one that is fetched on first use is the choice of whoever wrote the file
        return _holds(self.host, key.removeprefix("file://"), wanted) if key.startswith("file:///") else None

    def address(self, wanted: Wanted) -> str:
        return f"{wanted.base}/{facts().rpm}"

    def render(self, wanted: Wanted) -> bytes:
        """Signed as a whole and not package by package, as NVIDIA does it."""
        lines = (
            f"[{NAME}]",
            f"name={NAME}",
            f"baseurl={self.address(wanted)}",
            "enabled=1",
            "repo_gpgcheck=1",
            "gpgcheck=0",
            f"gpgkey=file://{self.key_file}",
            "sslverify=1",
        )
        return "".join(f"{line}\n" for line in lines).encode()

    def without(self, path: str, lines: Sequence[int]) -> bytes:
        text = _text(self.host, path).splitlines(keepends=True)
        for number in sorted(set(lines), reverse=True):
            end = next((n for n in range(number, len(text)) if _SECTION.match(text[n])), len(text))
            text[number:end] = ["enabled=0\n", *(one for one in text[number:end] if not _is(one, "enabled"))]
        return "".join(text).encode()


def _sections(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Each section with the line in which it begins. A value may go on in an indented line."""
    found: list[tuple[int, dict[str, str]]] = []
    last = ""
    for number, line in enumerate(text.splitlines(), 1):
        if _SECTION.match(line):
            found.append((number, {}))
            last = ""
        elif found and (match := _SETTING.match(line)):
            last = match[1]
            found[-1][1][last] = match[2]
        elif found and last and line[:1].isspace() and line.strip():
            found[-1][1][last] += f" {line.strip()}"
    yield from found


def _is(line: str, name: str) -> bool:
    match = _SETTING.match(line)
    return match is not None and match[1] == name


def _text(host: Host, path: str) -> str:
    """`ConfigError` for a file whose text would not come back as it was."""
    data = host.read_bytes(path) or b""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text", hint="put it right, then run this again") from error


def _holds(host: Host, path: str, wanted: Wanted) -> bool | None:
    """Whether a key file has the wanted key. False if there is none; None if the entry names no file."""
    if not path.startswith("/"):
        return None if not path else wanted.fingerprint in path.upper().replace(" ", "")
    try:
        data = host.read_bytes(path)
        return data is not None and wanted.fingerprint in {key.fingerprint for key in read_keys(data)}
    except GpunodeError:
        return False
