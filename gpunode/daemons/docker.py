"""Docker's Engine API over its unix socket, with only the calls that gpunode makes.

Paths contain no version, so the daemon uses its newest one: the calls used here have kept their form from API
1.41 (Docker 20.10) on, and Docker 29 refuses the versions below 1.44 that would otherwise have to be named.
The types in the daemon's answers are checked before they are used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from gpunode.daemons.http import UnixHttp, decoded
from gpunode.errors import DaemonError
from gpunode.host import Host

DEFAULT_SOCKET = "/run/docker.sock"
ANSWER_SECONDS = 10.0
_LOAD_SECONDS = 120.0
_HINTS = {
    "absent": "start Docker: systemctl start docker",
    "refused": "no process listens on the socket: systemctl restart docker",
    "denied": "run as root, or join the group docker: usermod -aG docker USER, then log in again",
    "timeout": "the daemon hangs: journalctl -u docker -n 50",
}


@dataclass(frozen=True)
class DockerApi:
    """One dockerd behind its socket. Every call opens its own connection and closes it."""

    host: Host
    socket: str = DEFAULT_SOCKET
    timeout: float = ANSWER_SECONDS

    # --- the daemon ------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """``/info``: Runtimes, DefaultRuntime, CgroupDriver, LiveRestoreEnabled, ContainersRunning, ..."""
        if self.host.live:
            answer = self._object("GET", "/info")
            self.host.heard("daemons", self.socket, {"info": answer})
            return answer
        recorded: dict[str, Any] = self._http.recall("info", dict)
        return recorded

    def program_version(self) -> str:
        """The running program's version from the header of the smallest response; empty if it isn't Docker's.

        Every dockerd since 1.12 sends ``Server: Docker/28.5.1 (linux)``. Podman's service, which serves the
        same API, sends Libpod. ``/version`` would make dockerd start runc to query its version.
        """
        server = self._http.response("GET", "/_ping", timeout=self.timeout).headers.get("server", "")
        return server.removeprefix("Docker/") if server.startswith("Docker/") else ""

    # --- images ----------------------------------------------------------------------------------------

    def has_image(self, reference: str) -> bool:
        """Whether the daemon has this image; nothing is pulled."""
        return self.image_config(reference) is not None

    def image_config(self, reference: str) -> dict[str, Any] | None:
        """The image's own settings (Env, Labels, Cmd, ...), None if the daemon doesn't have it."""
        try:
            image = self._object("GET", f"/images/{quote(reference)}/json")
        except DaemonError as error:
            if error.code == "not-found":
                return None
            raise
        config = image.get("Config")
        return config if isinstance(config, dict) else {}

    def image_names(self, repository: str) -> tuple[str, ...]:
        """Every tag of one repository, sorted."""
        images = self._listing("/images/json", {"reference": [repository]})
        lists = (image.get("RepoTags") for image in images)
        tags = (tag for image_tags in lists if isinstance(image_tags, list) for tag in image_tags)
        return tuple(sorted(tag for tag in tags if isinstance(tag, str)))

    def load_image(self, archive: bytes) -> None:
        """Load a ``docker save`` archive. The daemon reports its failures in a stream with status 200."""
        headers = {"Content-Type": "application/x-tar"}
        raw = self._request("POST", "/images/load?quiet=1", archive, headers, timeout=_LOAD_SECONDS)
        for line in raw.splitlines():
            message = decoded(line)
            if isinstance(message, dict) and message.get("error"):
                raise DaemonError(f"Docker can't load the image: {message['error']}")

    def remove_image(self, reference: str) -> None:
        """Remove a tag and, if it was the last, its layers. A missing image is not an error."""
        self._forgiving("DELETE", f"/images/{quote(reference)}?force=1")

    # --- containers ------------------------------------------------------------------------------------

    def labelled_containers(self, labels: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Ids of the containers with these labels, stopped ones included, each with all its labels."""
        desired = [f"{name}={value}" for name, value in labels.items()]
        containers = self._listing("/containers/json", {"label": desired}, "&all=1")
        return {
            str(container["Id"]): {str(name): str(value) for name, value in container["Labels"].items()}
            for container in containers
            if container.get("Id") and isinstance(container.get("Labels"), dict)
        }

    def running_containers(self) -> tuple[tuple[str, str, str], ...]:
        """Id, name and image of every running container."""
        if self.host.live:
            listed = self._listing("/containers/json", {})
        else:
            listed = [row for row in self._http.recall("containers", list) if isinstance(row, dict)]
        containers = []
        for entry in listed:
            names = entry.get("Names")
            name = str(names[0]).removeprefix("/") if isinstance(names, list) and names else ""
            containers.append((str(entry.get("Id", "")), name, str(entry.get("Image", ""))))
        rows = [
            {"Id": identifier, "Names": [f"/{name}"], "Image": image}
            for identifier, name, image in containers
        ]
        self.host.heard("daemons", self.socket, {"containers": rows})
        return tuple(containers)

    def containers_of(self, runtimes: Sequence[str], most: int) -> tuple[tuple[str, bool], ...]:
        """Name, and whether it runs, of those of the newest `most` containers that were made with `runtimes`.

        The list doesn't contain a container's runtime, so each is queried; one that is removed meanwhile is
        skipped.
        """
        result = []
        for entry in self._listing("/containers/json", {}, f"&all=1&limit={most}"):
            try:
                container = self._object("GET", f"/containers/{quote(str(entry.get('Id')))}/json")
            except DaemonError as error:
                if error.code != "not-found":
                    raise
                continue
            settings = container.get("HostConfig")
            if isinstance(settings, dict) and settings.get("Runtime") in runtimes:
                name = str(container.get("Name") or entry.get("Id")).removeprefix("/")
                result.append((name, entry.get("State") == "running"))
        return tuple(result)

    def create_container(self, specification: Mapping[str, Any], name: str) -> str:
        """The new container's id. `specification` is the body of ``POST /containers/create``."""
        answer = self._object("POST", f"/containers/create?name={quote(name)}", specification)
        container = answer.get("Id")
        if not isinstance(container, str) or not container:
            raise DaemonError("Docker created a container without returning its Id", code="malformed")
        return container

    def start_container(self, container: str, timeout: float) -> None:
        """Start it; failures of the OCI runtime are raised here."""
        self._request("POST", f"/containers/{container}/start", timeout=timeout)

    def wait_container(self, container: str, timeout: float) -> int:
        """Its exit status, once it has ended. `DaemonError` with code ``timeout`` if it doesn't end in
        time."""
        answer = self._object("POST", f"/containers/{container}/wait", timeout=timeout)
        status = answer.get("StatusCode")
        if not isinstance(status, int):
            raise DaemonError("Docker reported no exit status", code="malformed")
        return status

    def logs(self, container: str) -> tuple[str, str]:
        """Its output to stdout and stderr so far."""
        raw = self._request("GET", f"/containers/{container}/logs?stdout=1&stderr=1")
        out, err = split_streams(raw)
        return out.decode("utf-8", "replace"), err.decode("utf-8", "replace")

    def kill_container(self, container: str) -> None:
        """SIGKILL. One that has ended already (409) or is removed (404) is not an error."""
        self._forgiving("POST", f"/containers/{container}/kill")

    def remove_container(self, container: str) -> None:
        """Kill it if necessary and remove it with its anonymous volumes."""
        self._forgiving("DELETE", f"/containers/{container}?force=1&v=1")

    # --- requests --------------------------------------------------------------------------------------

    def _forgiving(self, method: str, path: str) -> None:
        try:
            self._request(method, path, timeout=30.0)
        except DaemonError as error:
            if error.code not in ("not-found", "conflict"):
                raise

    def _listing(
        self, path: str, filters: Mapping[str, Sequence[str]], more: str = ""
    ) -> list[dict[str, Any]]:
        """Objects of a list; other values in it are left out."""
        answer = decoded(self._request("GET", f"{path}?filters={quote(json.dumps(filters))}{more}"))
        return [entry for entry in answer if isinstance(entry, dict)] if isinstance(answer, list) else []

    def _object(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        answer = decoded(self._request(method, path, data, headers, timeout=timeout))
        if not isinstance(answer, dict):
            raise DaemonError(
                f"{self.socket} returned no JSON object for {path}",
                hint=f"find the process that listens on it: ss -xlp src {self.socket}",
                code="malformed",
            )
        return answer

    def _request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout: float | None = None,
    ) -> bytes:
        return self._http.response(method, path, body, headers, timeout=timeout or self.timeout).body

    @property
    def _http(self) -> UnixHttp:
        return UnixHttp(self.host, self.socket, _HINTS, "journalctl -u docker -n 50")


def split_streams(raw: bytes) -> tuple[bytes, bytes]:
    """Split Docker's log stream: frames of stream number (1 out, 2 err), 3 zero bytes, length, text.

    The length is a big-endian uint32. Of a truncated last frame the existing part is returned.
    """
    parts: dict[int, list[bytes]] = {1: [], 2: []}
    position = 0
    while position + 8 <= len(raw):
        length = int.from_bytes(raw[position + 4 : position + 8], "big")
        parts.setdefault(raw[position], []).append(raw[position + 8 : position + 8 + length])
        position += 8 + length
    return b"".join(parts[1]), b"".join(parts[2])
