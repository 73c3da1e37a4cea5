"""The device plugin as an ordinary user, who may neither read nor write the kubelet's directories."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.ordinary_user import AS_ORDINARY_USER, public_directory

# gpunode serve itself starts a child, which another user can't if Python is in a home directory
_CLAIM = """
import json, sys
from pathlib import Path
from gpunode.errors import PreconditionError
from gpunode.host import Host
from gpunode.plugin.kubelet.registration import KubeletLink
from gpunode.plugin.kubelet.server import LinkContext
from gpunode.plugin.config.settings import Settings
from tests.plugin.nodes import RESOURCE, MemoryLog, feed

log = MemoryLog()
settings = Settings(kubelet_socket=sys.argv[1])
context = LinkContext(Host(Path("/"), {}), settings, None, None, log, [], print)
link = KubeletLink(context, RESOURCE, feed(1))
try:
    link.claim()
except PreconditionError as error:
    print(json.dumps([error.message, error.hint, log.messages("warning")]))
"""


def test_ordinary_user_gets_a_hint_to_use_root() -> None:
    with public_directory() as place:
        for name, mode in (("device-plugins", 0o755), ("plugins_registry", 0o750)):
            (place / name).mkdir()
            (place / name).chmod(mode)
        done = subprocess.run(
            [*AS_ORDINARY_USER, sys.executable, "-c", _CLAIM, str(place / "device-plugins/kubelet.sock")],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        assert not done.stderr
        message, hint, warnings = json.loads(done.stdout)
        assert message == f"can't create a socket in {place}/device-plugins"
        assert hint == "run as root, for example with sudo"
        assert warnings == ["can't look for a stale socket"]
