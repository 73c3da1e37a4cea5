"""`gpunode driver plan`: which driver these GPUs and this kernel need, why, and what would bring it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gpunode.errors import UsageError
from gpunode.facts.node import Node
from gpunode.host import Host
from gpunode.output.result import Block, Progress, Result, Style, Table, Text
from gpunode.packages.driver_model import DISTRIBUTION, FLAVOURS, NVIDIA, DriverPlan, Situation, Wish

KIND = "DriverPlan"
_NUMERALS = frozenset("0123456789.")


@dataclass(frozen=True)
class Options:
    """The command line's wishes; empty and 0 leave it to the plan."""

    wish: Wish = Wish()


@dataclass(frozen=True)
class FileLine:
    """A file that the plan writes."""

    path: str
    reason: str
    content: str


@dataclass(frozen=True)
class PlanData:
    """`data` of the envelope: the plan as programs read it, commands as a person would type them."""

    id: str
    branch: int
    flavour: str
    version: str
    route: str
    installed: str
    up_to_date: bool
    resolved: bool
    decisions: tuple[object, ...]
    packages: tuple[object, ...]
    files: tuple[FileLine, ...]
    commands: tuple[str, ...]
    changes: tuple[object, ...]
    refusals: tuple[object, ...]
    reboot: str


def wish(
    host: Host, branch: int, version: str, flavour: str, repository: str, key: str, *, hold: bool
) -> Wish:
    """What the command line's words mean; `key` is a file. `ConfigError` for what is no key."""
    data = b""
    if key:
        from gpunode.packages.openpgp import armored, fingerprints

        found = host.read_bytes(str(Path(key).absolute()))
        if found is None:
            raise UsageError(f"there is no file {key}", hint="--key takes the mirror's public key")
        data = armored(found)
        fingerprints(data)  # raises for what is no key
    return Wish(branch, version, flavour, repository.rstrip("/"), hold, data)


def run(host: Host, options: Options, progress: Progress) -> Result:
    """Plan and change nothing; kind DriverPlan. What stands in the way is part of it, and no error."""
    check(options.wish)  # before anything is said to be looked at
    with progress.step("looking at the GPUs, the kernel and the packages"):
        plan = made(host, options.wish)[1]
    blocked = bool(plan.refusals) and not plan.up_to_date
    status = "warn" if blocked else "ok"
    return Result(KIND, data_of(plan), status=status, messages=plan.notes, blocks=tuple(blocks(plan)))


def made(host: Host, wish: Wish, before: Situation | None = None) -> tuple[Situation, DriverPlan]:
    """The node as it is now and its plan. `UsageError` for a wish that can't be meant.

    With `before`, what our own files have changed since then counts as still to be done.
    """
    from gpunode.packages.driver_model import read_situation
    from gpunode.packages.driver_plan import plan_driver

    check(wish)
    situation = read_situation(Node(host))
    if before is not None:
        situation = replace(situation, nouveau_kept_out=before.nouveau_kept_out)
    return situation, plan_driver(host, situation, wish)


def check(wish: Wish) -> None:
    """A branch, a version, a flavour and a repository, each on its own and together."""
    if wish.flavour not in ("", *FLAVOURS):
        raise UsageError(f"no kernel module is called {wish.flavour!r}", hint=f"known: {', '.join(FLAVOURS)}")
    numbers = wish.version.split(".")
    if wish.version and not (set(wish.version) <= _NUMERALS and len(numbers) in (2, 3) and all(numbers)):
        raise UsageError(f"{wish.version!r} is no driver's version", hint="as in --version 580.159.03")
    if wish.version and wish.branch and numbers[0] != str(wish.branch):
        raise UsageError(
            f"version {wish.version} isn't of branch {wish.branch}", hint="leave out --branch or --version"
        )
    known = ("", DISTRIBUTION, NVIDIA)
    if wish.key and wish.repository in known:
        raise UsageError("a key is for a mirror of NVIDIA's repository", hint="name it: --repository URL")
    if "@" in wish.repository.partition("//")[2].partition("/")[0]:
        raise UsageError(
            "a password in the repository's address could be read by everybody on this node",
            hint="put it where apt (auth.conf) or dnf (the .repo file's username) keep it",
        )
    if wish.repository not in known and not wish.repository.startswith(("https://", "file:/")):
        raise UsageError(
            f"{wish.repository!r} is no repository",
            hint="distribution, nvidia, or the https address of a mirror of NVIDIA's",
        )
    if any(not one.isprintable() or one in ' "[]' for one in wish.repository):
        raise UsageError(
            "a repository's address has no blanks or quotes", hint="give it as a browser takes it"
        )


def data_of(plan: DriverPlan) -> PlanData:
    """The plan for programs."""
    return PlanData(
        plan.id,
        plan.branch,
        plan.flavour,
        plan.version,
        plan.route,
        plan.installed,
        plan.up_to_date,
        plan.resolved,
        plan.decisions,
        plan.packages,
        tuple(FileLine(one.path, one.reason, (one.content or b"").decode()) for one in plan.files),
        tuple(one.text for one in plan.commands),
        plan.changes,
        plan.refusals,
        plan.reboot,
    )


def blocks(plan: DriverPlan, *, refusals: bool = True) -> Iterator[Block]:
    """The plan for people; without `refusals` where errors tell them."""
    if plan.decisions:
        shown = plan.version or f"branch {plan.branch}"
        yield Text(f"driver {shown}, {plan.flavour} kernel module", Style.HEADING)
        width = max(len(one.subject) for one in plan.decisions) + 2
        for one in plan.decisions:
            yield Text(f"  {one.subject:<{width}}{one.choice}")
            yield Text(f"  {'':<{width}}{one.because} ({one.source})", Style.DIM)
    if plan.up_to_date:
        yield Text(f"driver {plan.version} is installed: nothing to do", Style.GOOD)
    if plan.packages and not plan.up_to_date:
        yield Text("")
        lines = tuple(
            (one.name, one.installed or "-", one.version or "newest of the branch", one.origin or "-")
            for one in plan.packages
        )
        yield Table(("PACKAGE", "NOW", "THEN", "FROM"), lines)
    yield from _work(plan)
    if refusals and plan.refusals and not plan.up_to_date:
        if plan.decisions or plan.commands:
            yield Text("")
        yield Text("not to be run as it is:", Style.BAD)
        for refusal in plan.refusals:
            yield Text(f"  {refusal.message}", Style.BAD)
            yield Text(f"    {refusal.hint}", Style.DIM)


def _work(plan: DriverPlan) -> Iterator[Block]:
    if not plan.commands:
        return
    yield Text("")
    for file in plan.files:
        yield Text(f"write {file.path}: {file.reason}")
    for command in plan.commands:
        yield Text(f"$ {command.text}", Style.COMMAND)
    gone = [one.name for one in plan.changes if not one.after]
    if gone:
        yield Text(f"goes away: {', '.join(gone)}", Style.WARN)
    reboot = f"reboot needed: {plan.reboot}" if plan.reboot else "no reboot is needed"
    yield Text(reboot, Style.WARN if plan.reboot else Style.GOOD)
    yield Text(f"plan {plan.id}", Style.DIM)
