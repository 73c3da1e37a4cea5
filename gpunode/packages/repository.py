"""The toolkit's repository on a node: adds it once, finds it again, and detects the retired ones before it.

Two entries for one repository with different keys make apt refuse to work at all, and a retired entry fails
every update, so existing entries are judged before anything is added. Files are disabled by renaming, never
deleted: apt, dnf and zypper all ignore the `SUFFIX`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from gpunode.errors import ConfigError, GpunodeError, PreconditionError, UsageError
from gpunode.facts.packages import read_sources
from gpunode.facts.tables import table
from gpunode.host import NOT_TRUSTED, Host
from gpunode.host.process import COMMAND_NOT_FOUND, Completed
from gpunode.output.typed import StrEnum
from gpunode.packages.apt import Apt
from gpunode.packages.manager import FileChange, Manager

SUFFIX = ".disabled-by-gpunode"
NAME = "nvidia-container-toolkit"
_CHANNELS = re.compile(r"^(stable|experimental)/(deb|rpm)/")
_SCHEMES = ("https://", "http://", "file:/")


class EntryState(StrEnum):
    """The relation of an entry to the toolkit's repository."""

    USED = "used"
    CHANNEL = "channel"  # another channel of the same repository, such as experimental; ignored
    RETIRED = "retired"  # an address that NVIDIA has retired: nvidia-docker, or one per distribution
    DUPLICATE = "duplicate"  # a duplicate of the same repository
    OTHER_KEY = "other-key"  # the right address, with a key that is missing or a different one
    REPLACED = "replaced"  # NVIDIA's own address, where a mirror is requested


class Facts(NamedTuple):
    """What is published: `deb` and `rpm` are paths below `base`, `places` this and the retired.

    `sha256` has the digests of the key's file, as NVIDIA publishes it and as ``gpg --dearmor`` writes it.
    """

    base: str
    deb: str
    rpm: str
    packages: tuple[str, ...]
    places: tuple[str, ...]
    fingerprint: str
    sha256: tuple[str, ...]
    key: bytes


class RepositoryEntry(NamedTuple):
    """One enabled entry of one file. `key` is its signing key, empty if it names none.

    `trusted` is whether the expected key is in that file; None if that is unknown, as for an address.
    """

    path: str
    line: int
    address: str
    key: str = ""
    trusted: bool | None = None


class Judged(NamedTuple):
    """An entry and its state."""

    entry: RepositoryEntry
    state: EntryState


class DesiredRepository(NamedTuple):
    """The desired repository. `base` has no slash at the end; `asked` if the user named it.

    `key` is armored, `fingerprint` its 40 hex digits, empty without gpg; `sha256` are the digests of files
    that hold this key alone.
    """

    base: str
    key: bytes
    fingerprint: str
    sha256: tuple[str, ...]
    asked: bool = False


class RepositoryPlan(NamedTuple):
    """The files to change, none if the repository is already configured.

    `file` is the one that names it and `id` its id in dnf and zypper, empty if that isn't known. `judged` are
    the entries that exist.
    """

    files: tuple[FileChange, ...]
    file: str
    id: str
    judged: tuple[Judged, ...]


def desired_repository(base: str = "", key: PublicKey | None = None) -> DesiredRepository:
    """NVIDIA's own with NVIDIA's key, a mirror of it, or one with a key of its own.

    `UsageError` for an address that no manager could use.
    """
    known = facts()
    if base and (
        not base.startswith(_SCHEMES) or not re.fullmatch(r"[!-~]+", base) or set("[]<>\"'\\#$%") & set(base)
    ):
        raise UsageError(
            f"{base!r} is not the address of a repository",
            hint="it begins with https://, http:// or file:/ and holds the directory 'stable'",
        )
    if "@" in base.partition("//")[2].partition("/")[0]:
        raise UsageError(
            "a password in the repository's address would be readable by every user on this node",
            hint="put it where apt (auth.conf) or dnf (the .repo file's username) keep it",
        )
    base = base.rstrip("/")
    if key is not None:
        digests = (_sha256(key.content),)
        return DesiredRepository(base or known.base, key.content, key.fingerprint, digests, asked=True)
    if _sha256(known.key) not in known.sha256:
        raise PreconditionError("the key that gpunode brings isn't NVIDIA's", hint="reinstall gpunode")
    return DesiredRepository(base or known.base, known.key, known.fingerprint, known.sha256, bool(base))


def facts() -> Facts:
    """From tables/toolkit_repository.json."""
    row = table("toolkit_repository").rows[0]
    key = "".join(f"{line}\n" for line in row["key"]).encode()
    places, packages = tuple(row["places"]), tuple(row["packages"])
    fingerprint, digests = row["fingerprint"], tuple(row["sha256"])
    return Facts(row["repository"], row["deb"], row["rpm"], packages, places, fingerprint, digests, key)


def judge(
    entries: Sequence[RepositoryEntry], desired: DesiredRepository, address: str, file: str
) -> tuple[Judged, ...]:
    """The entries of the toolkit, each with its state; one at most is `EntryState.USED`."""
    about = [(entry, _first_state(entry, desired, address, file)) for entry in entries]
    usable = [entry for entry, state in about if state is EntryState.USED]
    best = min(usable, key=lambda candidate: (not candidate.trusted, candidate.path != file), default=None)
    return tuple(
        Judged(entry, EntryState.DUPLICATE if state is EntryState.USED and entry is not best else state)
        for entry, state in about
        if state is not None
    )


def _first_state(
    entry: RepositoryEntry, desired: DesiredRepository, address: str, file: str
) -> EntryState | None:
    """The state of one entry alone; None if it doesn't concern the toolkit."""
    place = _place(entry.address)
    below = _below_nvidia(place)
    if entry.path == file and not desired.asked and below is None:
        return EntryState.USED  # a mirror that was configured earlier, with its key
    if place == _place(address):
        return EntryState.OTHER_KEY if entry.trusted is False else EntryState.USED
    if below is None:
        return EntryState.REPLACED if entry.path == file else None
    if not _CHANNELS.match(below):
        return EntryState.RETIRED
    return EntryState.REPLACED if desired.asked else EntryState.CHANNEL


def _entry(
    shelf: Shelf, desired: DesiredRepository, path: str, line: int, address: str, key: str
) -> RepositoryEntry:
    """An entry. Its key is read only if `judge` judges it: a node has many more entries and keys."""
    place = _place(address)
    about_toolkit = (
        path == shelf.file or place == _place(shelf.address(desired)) or _below_nvidia(place) is not None
    )
    return RepositoryEntry(path, line, address, key, shelf.holds(key, desired) if about_toolkit else None)


def _below_nvidia(place: str) -> str | None:
    """The path below NVIDIA's present repository, empty for one of the retired ones, None for others."""
    current, *retired = facts().places
    if place.startswith(current):
        return place.removeprefix(current)
    return "" if place.startswith(tuple(retired)) else None


def _place(address: str) -> str:
    """An address without scheme, architecture variable or trailing slashes, to compare."""
    bare = re.sub(r"^(mirror\+)?[a-z]+:/+", "", address, flags=re.IGNORECASE).rstrip("/") + "/"
    return re.sub(r"/(\$\(ARCH\)|\$basearch|\$arch|amd64|arm64|ppc64el|x86_64|aarch64)/$", "/", bare)


def plan_repository(host: Host, shelf: Shelf, desired: DesiredRepository) -> RepositoryPlan:
    """The changes after which the repository is configured exactly once, and no retired one is.

    `PreconditionError` if gpunode's own file has repositories of others.
    """
    entries = shelf.entries(desired)
    results = judge(entries, desired, shelf.address(desired), shelf.file)
    used = next((judgement.entry for judgement in results if judgement.state is EntryState.USED), None)
    off: dict[str, list[RepositoryEntry]] = {}
    for judgement in results:
        if judgement.state not in (EntryState.USED, EntryState.CHANNEL):
            off.setdefault(judgement.entry.path, []).append(judgement.entry)
    files: list[FileChange] = []
    if used is None:
        if any(entry.path == shelf.file and entry not in off.get(shelf.file, ()) for entry in entries):
            raise PreconditionError(
                f"{shelf.file} holds other repositories as well",
                hint="move those to a file of their own, then run this again",
            )
        off.pop(shelf.file, None)
        files += _added(host, shelf, desired)
    for path, gone in off.items():
        remaining = [entry for entry in entries if entry.path == path and entry not in gone]
        files += _disabled(host, shelf, path, gone, alone=not remaining)
    is_own = used is None or used.path == shelf.file
    return RepositoryPlan(tuple(files), used.path if used else shelf.file, NAME if is_own else "", results)


def _added(host: Host, shelf: Shelf, desired: DesiredRepository) -> list[FileChange]:
    key = f"the repository's key {desired.fingerprint}".rstrip()
    changes = [
        FileChange(shelf.key_file, desired.key, key),
        FileChange(shelf.file, shelf.render(desired), "the repository"),
    ]
    return [change for change in changes if host.read_bytes(change.path) != change.content]


def _disabled(
    host: Host, shelf: Shelf, path: str, gone: Sequence[RepositoryEntry], *, alone: bool
) -> list[FileChange]:
    """Rename the file if it has nothing else, else disable only the entries."""
    what = f"retired: {gone[0].address}"
    if not alone:
        return [FileChange(path, shelf.without(path, [entry.line for entry in gone]), what)]
    names = (f"{path}{SUFFIX}{'' if number == 1 else f'-{number}'}" for number in range(1, 100))
    content = host.read_bytes(path)
    free = next(name for name in names if host.read_bytes(name) in (None, content))
    return [FileChange(free, content, what), FileChange(path, None, what)]  # one of the two always exists


# The files in which apt, dnf and zypper configure repositories (sources.list(5), yum.conf(5)).

_OFF = "# switched off by gpunode: "
_RPM_DIRECTORIES = {"dnf": "/etc/yum.repos.d", "zypper": "/etc/zypp/repos.d"}
_RPM_KEY = f"/etc/pki/rpm-gpg/RPM-GPG-KEY-{NAME}"
_SECTION = re.compile(r"^\s*\[([^\]]+)\]\s*$")
_SETTING = re.compile(r"^([a-z_]+)\s*[=:]\s*(.*?)\s*$")
_FALSE = ("0", "no", "false", "off")


def shelf_of(host: Host, manager: Manager) -> Shelf:
    """The repository files of this manager."""
    if isinstance(manager, Apt):
        return AptShelf(host, manager)
    return RpmShelf(host, _RPM_DIRECTORIES[manager.name])


@dataclass(frozen=True)
class AptShelf:
    """sources.list, and the files in its directory in either format."""

    host: Host
    apt: Apt

    @property
    def file(self) -> str:
        """The file that gpunode writes: the name from NVIDIA's guide, which an administrator expects."""
        return f"{self.apt.places.sources_parts}/{NAME}.list"

    @property
    def key_file(self) -> str:
        """The key's file: apt reads an armored key from a file with this suffix, without gpg."""
        return f"{self.apt.places.etc}/keyrings/{NAME}.asc"

    def entries(self, desired: DesiredRepository) -> tuple[RepositoryEntry, ...]:
        """Every enabled entry, NVIDIA's or not."""
        places = self.apt.places
        sources = read_sources(self.host, places.sources_list, places.sources_parts)
        return tuple(
            _entry(self, desired, source.path, source.line, source.uri, source.signed_by)
            for source in sources
        )

    def holds(self, key: str, desired: DesiredRepository) -> bool | None:
        """An entry without a key is signed by any of those that apt trusts for everything."""
        etc = self.apt.places.etc
        common = (f"{etc}/trusted.gpg", *self.host.glob(f"{etc}/trusted.gpg.d", "*.[ag][sp][cg]"))
        answers = [_holds(self.host, path, desired) for path in ((key,) if key else common)]
        return True if True in answers else None if None in answers else False

    def address(self, desired: DesiredRepository) -> str:
        """The address of the channel for this kind of package."""
        return f"{desired.base}/{facts().deb}"

    def render(self, desired: DesiredRepository) -> bytes:
        """The content of gpunode's file."""
        return f"deb [signed-by={self.key_file}] {self.address(desired)} /\n".encode()

    def without(self, path: str, lines: Sequence[int]) -> bytes:
        """The file with the entries that start at these lines disabled, and no other change."""
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
            # the option may exist already, with the value yes
            text[at : at + len(stanza)] = [
                "Enabled: no\n", *(line for line in stanza if not line.lower().startswith("enabled:")),
            ]  # fmt: skip
        return "".join(text).encode()


@dataclass(frozen=True)
class RpmShelf:
    """The ``.repo`` files of a directory; dnf and zypper read the same format."""

    host: Host
    directory: str

    @property
    def file(self) -> str:
        return f"{self.directory}/{NAME}.repo"

    @property
    def key_file(self) -> str:
        return _RPM_KEY

    def entries(self, desired: DesiredRepository) -> tuple[RepositoryEntry, ...]:
        return tuple(
            _entry(
                self, desired, path, line, settings.get("baseurl", "").split()[0], settings.get("gpgkey", "")
            )
            for path in self.host.glob(self.directory, "*.repo")
            for line, settings in _sections(_text(self.host, path))
            if settings.get("enabled", "1").lower() not in _FALSE and settings.get("baseurl", "").split()
        )

    def holds(self, key: str, desired: DesiredRepository) -> bool | None:
        # a key that is fetched on first use is the choice of the file's author
        return _holds(self.host, key.removeprefix("file://"), desired) if key.startswith("file:///") else None

    def address(self, desired: DesiredRepository) -> str:
        return f"{desired.base}/{facts().rpm}"

    def render(self, desired: DesiredRepository) -> bytes:
        """The repository's index is signed, its packages are not, as in NVIDIA's own file."""
        lines = (
            f"[{NAME}]",
            f"name={NAME}",
            f"baseurl={self.address(desired)}",
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
            text[number:end] = [
                "enabled=0\n",
                *(line for line in text[number:end] if not _is(line, "enabled")),
            ]
        return "".join(text).encode()


Shelf = AptShelf | RpmShelf
"""The repository files of one kind of manager."""


def _sections(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Each section with its first line. A value may continue on an indented line."""
    sections: list[tuple[int, dict[str, str]]] = []
    last = ""
    for number, line in enumerate(text.splitlines(), 1):
        if _SECTION.match(line):
            sections.append((number, {}))
            last = ""
        elif sections and (match := _SETTING.match(line)):
            last = match[1]
            sections[-1][1][last] = match[2]
        elif sections and last and line[:1].isspace() and line.strip():
            sections[-1][1][last] += f" {line.strip()}"
    yield from sections


def _is(line: str, name: str) -> bool:
    match = _SETTING.match(line)
    return match is not None and match[1] == name


def _text(host: Host, path: str) -> str:
    """`ConfigError` for a file that can't be decoded and encoded without a change."""
    data = host.read_bytes(path) or b""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text", hint="convert it to UTF-8, then run this again"
        ) from error


# Keys in files. gpg reads them; apt, dnf and zypper verify signatures and expiry.
#
# Debian's and Ubuntu's minimal installations lack gpg. There NVIDIA's key is recognized by the digest of its
# file, and the user's key is the file that the user names.

_BEGIN = b"-----BEGIN PGP PUBLIC KEY BLOCK-----"
_END = b"-----END PGP PUBLIC KEY BLOCK-----"
_MAX_BYTES = 1 << 20  # keyrings of whole distributions have some hundred KiB


class PublicKey(NamedTuple):
    """A repository's key: `content` is armored, `fingerprint` its 40 hex digits, empty without gpg."""

    content: bytes
    fingerprint: str


def public_key(host: Host, data: bytes) -> PublicKey:
    """The key in a file that the user names, armored or binary. `ConfigError` for anything else."""
    if len(data) > _MAX_BYTES:
        raise ConfigError(
            f"this is not a repository's key: it is larger than {_MAX_BYTES >> 20} MiB",
            hint="give the repository's key, armored or binary",
        )
    binary = _BEGIN not in data
    if not binary:  # nothing else in the file: not a secret key beside it, nor a second key
        data = _first_block(data)
    if (data[:1] < b"\x80") if binary else not data:
        raise ConfigError(
            "this is not an OpenPGP public key", hint="give the repository's key, armored or binary"
        )
    shown = _show_keys(host, data)
    if shown.code in (COMMAND_NOT_FOUND, NOT_TRUSTED):
        if binary:  # rpm reads armored keys only
            raise ConfigError(
                f"a binary key needs gpg, which makes text of it: {shown.reason}",
                hint="give the key as text, as gpg --armor --export prints it",
            )
        return PublicKey(data, "")
    if shown.timed_out:
        raise PreconditionError("gpg didn't read the key in time", hint="run gpg --show-keys FILE yourself")
    fingerprint = next(iter(_fingerprints(shown)), "")
    if not fingerprint and shown.ok:
        raise ConfigError("there is no OpenPGP public key in it", hint="give the repository's own key")
    if binary and fingerprint:
        shown = _gpg(host, data, "--armor", "--import-options", "import-export", "--import")
        data = shown.stdout.encode()
    if not fingerprint or not data:
        raise ConfigError(f"the OpenPGP key is damaged: {shown.reason}", hint="fetch it again")
    return PublicKey(data, fingerprint)


def _first_block(data: bytes) -> bytes:
    """The first armored public key in a file, with the line ends of Unix; empty if it has no end."""
    block, end, _ = data[data.index(_BEGIN) :].partition(_END)
    return (block + end).replace(b"\r\n", b"\n") + b"\n" if end else b""


def _holds(host: Host, path: str, desired: DesiredRepository) -> bool | None:
    """Whether a key file has the expected key. False if it is missing; None if the entry names no file, or if
    gpg couldn't read the file: it is another machine's, gpg isn't trusted, or it didn't answer.

    False on a node without gpg if it isn't NVIDIA's file: gpunode then writes an entry with its own key.
    """
    if not path.startswith("/"):
        known = path and desired.fingerprint
        return desired.fingerprint in path.upper().replace(" ", "") if known else None
    try:
        data = host.read_bytes(path)
    except GpunodeError:
        return False
    if data is None or _sha256(data) in desired.sha256:
        return data is not None
    if not host.live:
        return None
    try:
        shown = _show_keys(host, data)
    except PreconditionError:
        return None
    unknown = shown.timed_out or shown.code == NOT_TRUSTED
    return None if unknown else desired.fingerprint in _fingerprints(shown)


def _show_keys(host: Host, data: bytes) -> Completed:
    return _gpg(host, data, "--show-keys", "--with-colons")


def _gpg(host: Host, data: bytes, *argv: str) -> Completed:
    """gpg in an empty home directory, so that no keyring or setting of a user changes what it prints.
    `PreconditionError` where no directory can be made."""
    try:
        with host.temporary_directory() as home:
            options = ("--homedir", str(home), "--no-options", "--no-keyring", "--batch", "--no-tty")
            return host.run(("gpg", *options, *argv), stdin=data)
    except OSError as error:
        raise PreconditionError(
            f"gpg needs a temporary directory: {error.strerror}", hint="free space in it, or set TMPDIR"
        ) from error


def _fingerprints(shown: Completed) -> tuple[str, ...]:
    """Those of the primary keys, 40 hex digits in capitals each (gnupg's doc/DETAILS)."""
    records = [line.split(":") for line in shown.stdout.splitlines()]
    return tuple(
        record[9] for before, record in pairwise(records) if (before[0], record[0]) == ("pub", "fpr")
    )


def _sha256(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()
