"""podman by its command line: the few calls that running one program takes. It has no daemon to ask."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpunode.dataclass import dataclass
from gpunode.errors import DaemonError
from gpunode.host import Completed, Host

ANSWER_SECONDS = 30.0
_LOAD_SECONDS = 120.0
_UNKNOWN = ("image not known", "no such container", "no container with name")


@dataclass(frozen=True)
class Podman:
    """One podman with the storage that it uses; `options` come before every subcommand."""

    host: Host
    binary: str
    options: tuple[str, ...] = ()

    def call(self, *arguments: str, timeout: float = ANSWER_SECONDS, stdin: bytes | None = None) -> Completed:
        """Run a subcommand to its end, whatever it comes to."""
        return self.host.run((self.binary, *self.options, *arguments), timeout=timeout, stdin=stdin)

    def complaint(self, *arguments: str, timeout: float = ANSWER_SECONDS, stdin: bytes | None = None) -> str:
        """Run a subcommand; why it failed, "" if it didn't or if there was nothing to remove."""
        done = self.call(*arguments, timeout=timeout, stdin=stdin)
        if done.timed_out:
            return f"it did not end within {timeout:g} s"
        known = any(words in done.stderr for words in _UNKNOWN)
        return "" if done.ok or known else said(done)

    def load(self, archive: bytes) -> str:
        """Bring a ``docker save`` archive in; what podman complained of."""
        return self.complaint("load", "--quiet", timeout=_LOAD_SECONDS, stdin=archive)

    def has_image(self, reference: str) -> bool:
        """Whether podman holds this image; nothing is pulled. `DaemonError` if it can't tell."""
        answer = self.call("image", "exists", reference)
        if answer.code not in (0, 1):  # podman-image-exists(1): 1 is no, 125 a failure of podman's own
            raise DaemonError(f"podman image exists: {said(answer)}", hint="podman info")
        return answer.ok

    def remove_image(self, reference: str) -> str:
        """Remove a name and, if it was the last, the image; what podman complained of."""
        return self.complaint("rmi", "--force", reference)

    def remove_container(self, name: str) -> str:
        """Kill it if need be and remove it; what podman complained of."""
        return self.complaint("rm", "--force", "--ignore", "--volumes", name)

    def labelled_containers(self, labels: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Ids of the containers that carry these labels, stopped ones included, each with all its labels."""
        filters = [part for item in labels.items() for part in ("--filter", "label={}={}".format(*item))]
        found = self._listing("ps", "--all", *filters, "--format", "json")
        return {
            one["Id"]: {str(name): str(value) for name, value in one["Labels"].items()}
            for one in found
            if isinstance(one.get("Id"), str) and isinstance(one.get("Labels"), dict)
        }

    def image_names(self, repository: str) -> tuple[str, ...]:
        """Every tag of one repository, sorted."""
        found = self._listing("images", "--filter", f"reference={repository}", "--format", "json")
        lists = (one.get("Names") for one in found)
        names = (name for some in lists if isinstance(some, list) for name in some)
        return tuple(sorted({name for name in names if isinstance(name, str)}))

    def _listing(self, *arguments: str) -> Sequence[dict[str, Any]]:
        done = self.call(*arguments)
        if not done.ok:
            raise DaemonError(f"podman {arguments[0]}: {said(done)}", hint="podman info")
        try:
            answer = json.loads(done.stdout or "[]")
        except (ValueError, RecursionError):
            answer = None
        return [one for one in answer if isinstance(one, dict)] if isinstance(answer, list) else []


def said(done: Completed) -> str:
    """The failure in podman's words, without what it logs around them."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
    return (errors or lines or [f"exit code {done.code}"])[-1]
