"""What dnf and zypper share: rpm's database, and its order of versions (rpm-version(7))."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cmp_to_key

from gpunode.host import Host
from gpunode.packages.manager import Available

_ASK_SECONDS = 30.0
_PART = re.compile(r"[0-9]+|[a-zA-Z]+|[~^]")


def installed(host: Host, names: Sequence[str]) -> Mapping[str, str]:
    """The newest installed version of each, epoch and release with it; absent ones are left out."""
    answer = host.run(["rpm", "-q", "--qf", r"%{NAME}\t%{EVR}\n", *names], timeout=_ASK_SECONDS)
    found: dict[str, str] = {}
    for line in answer.stdout.splitlines():  # absent ones are told in a line without a tab
        name, tab, version = line.partition("\t")
        if tab and (name not in found or compare(version, found[name]) > 0):
            found[name] = version
    return found


def newest_first(offers: Iterable[tuple[str, str]]) -> tuple[Available, ...]:
    """Versions with their repositories, out of (version, repository) pairs."""
    origins: dict[str, list[str]] = {}
    for version, repository in offers:
        known = origins.setdefault(version, [])
        if repository and repository not in known:
            known.append(repository)
    ordered = sorted(origins, key=cmp_to_key(compare), reverse=True)
    return tuple(Available(version, tuple(origins[version])) for version in ordered)


def compare(first: str, second: str) -> int:
    """-1, 0 or 1 as rpm orders ``epoch:version-release``; no epoch is epoch 0."""
    return next(
        (order for one, two in zip(_split(first), _split(second), strict=True) if (order := _part(one, two))),
        0,
    )


def _split(version: str) -> tuple[str, str, str]:
    epoch, colon, rest = version.partition(":")
    number, _, release = (rest if colon else version).partition("-")
    return (epoch if colon else "0"), number, release


def _part(first: str, second: str) -> int:
    ones, twos = _PART.findall(first), _PART.findall(second)
    for one, two in zip(ones, twos, strict=False):
        if (order := _word(one, two)) != 0:
            return order
    if len(ones) == len(twos):
        return 0
    longer, sign = (ones, 1) if len(ones) > len(twos) else (twos, -1)
    return -sign if longer[min(len(ones), len(twos))] == "~" else sign


def _word(one: str, two: str) -> int:
    """A tilde is older than anything, a caret than any word; numbers are newer than letters."""
    for mark in "~^":
        if mark in (one, two) and one != two:
            return -1 if one == mark else 1
    if one.isdigit() and two.isdigit():
        return (int(one) > int(two)) - (int(one) < int(two))
    if one.isdigit() != two.isdigit():
        return 1 if one.isdigit() else -1
    return (one > two) - (one < two)
