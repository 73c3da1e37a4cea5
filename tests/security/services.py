"""The services of gpunode with a kubelet stub: started, used, and ended by SIGTERM.

Runs as a program on the stage; its argument is a directory of root's. Its processes write to its streams.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fixtures.mps_control import mps_stub
from gpunode.host import Host
from gpunode.plugin.observe.status_file import read_own_status
from tests.cli import command
from tests.plugin.kubelet_stub import KubeletStub
from tests.waiting import eventually

RESOURCE = "nvidia.com/gpu"
_CONFIG = f"version: v1\nsharing: {{mps: {{resources: [{{name: {RESOURCE}, replicas: 2}}]}}}}\n"
_SECONDS = 60.0


@contextmanager
def _service(*argv: str) -> Iterator[None]:
    """A service that is asked to end when its work here is done."""
    with subprocess.Popen(command(*argv)) as process:
        try:
            yield
        finally:
            process.terminate()
        assert process.wait(_SECONDS) == 0, argv


def main(place: Path) -> None:
    kubelet = KubeletStub(Host(), str(place / "dp"))
    (place / "dp").mkdir()
    kubelet.start()
    serve = ("plugin", "serve", "--kubelet-socket", f"{place}/dp/kubelet.sock")
    with _service(*serve, "--state-dir", f"{place}/nvml"):
        assert kubelet.wait_allocatable(RESOURCE, 2, _SECONDS)
        assert len(kubelet.allocate(RESOURCE, 1).ids) == 1
    kubelet.restart()
    state = ("--state-dir", f"{place}/simulated")
    with _service(*serve, *state, "--simulate", "h100:2"):
        assert kubelet.wait_allocatable(RESOURCE, 2, _SECONDS)
        subprocess.run(command("plugin", "inject", "xid", "79", "--gpu", "0", *state), check=True)
        assert kubelet.wait_allocatable(RESOURCE, 1, _SECONDS)
    kubelet.stop()
    os.environ["PATH"] += f":{mps_stub(place / 'bin').directory}"
    (place / "config.yaml").write_text(_CONFIG)
    kubelet.start()
    mps = ("--mps", "--mps-root", f"{place}/mps", "--config-file", f"{place}/config.yaml")
    state = ("--state-dir", f"{place}/mps-state")
    with _service(*serve, *state, *mps):
        assert eventually((place / "mps/.ready").exists)
        # the daemons may be ready before the plugin knows that the kubelet has registered it
        assert eventually(lambda: (own := read_own_status(Host(), state[1])) is not None and own.ready)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
