import json

import pytest

from gpunode.facts.toolkit import OciHook, nvidia_hooks
from gpunode.host import Host

DIRECTORY = "/usr/share/containers/oci/hooks.d"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (json.dumps({"version": "1.0.0", "hook": {"path": "/usr/bin/nvidia-container-toolkit"}}), True),
        (json.dumps({"hook": "/usr/bin/nvidia-container-runtime-hook", "stage": ["prestart"]}), True),
        (json.dumps({"version": "1.0.0", "hook": {"path": "/usr/libexec/oci/seccomp"}}), False),
        (json.dumps({"hook": {"path": 7}}), False),
        (json.dumps([1]), False),
        ("{", False),
        ("[" * 100000, False),
        ("", False),
    ],
)
def test_hooks_of_both_formats_are_read_and_others_skipped(tmp_path, text, program):
    host = Host(tmp_path, environ={})
    host.path(DIRECTORY).mkdir(parents=True)
    host.path(f"{DIRECTORY}/one.json").write_text(text)
    host.path(f"{DIRECTORY}/one.txt").write_text(text)
    found = nvidia_hooks(host, (DIRECTORY, DIRECTORY, "/nowhere"))
    assert [one.path for one in found] == ([f"{DIRECTORY}/one.json"] if program else [])
    assert all(isinstance(one, OciHook) and one.program for one in found)
