"""CRI-O's plan over generated files: only the handler changes, a second plan is empty, a removal is whole."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.crio import meaning
from fixtures.crio_stub import files, to_toml
from gpunode.facts.daemons import Daemon
from gpunode.host import Host
from gpunode.output.typed import toml
from gpunode.runtime.crio import CrioEngine
from gpunode.runtime.engine import DesiredConfig, Handler, Plan, UnwantedConfig
from tests.files import write

NAMES = ("nvidia", "nvidia-cdi", "nvidia-legacy")
OWN = "/usr/bin/nvidia-container-runtime"
PROGRAMS = [
    "/usr/bin/crun",
    "/usr/libexec/crio/runc",
    "/opt/kata",
    OWN,
    "/usr/local/nvidia/toolkit/nvidia-container-runtime",
]
ANY_NAME = st.sampled_from(["crun", "runc", "kata", *NAMES])
HANDLER = st.fixed_dictionaries(
    {"runtime_path": st.sampled_from(PROGRAMS)},
    optional={
        "runtime_type": st.sampled_from(["oci", "vm", ""]),
        "monitor_path": st.just("/usr/bin/conmon"),
        "inherit_default_runtime": st.booleans(),
        "allowed_annotations": st.lists(st.sampled_from(["a", "b"]), max_size=2),
    },
)
RUNTIME = st.fixed_dictionaries(
    {},
    optional={
        "default_runtime": ANY_NAME,
        "pids_limit": st.integers(0, 9),
        "runtimes": st.dictionaries(ANY_NAME, HANDLER, max_size=3),
    },
)
PLACES = st.sampled_from(
    [
        *("crio.conf", "crio.conf.d/10-crio.conf", "crio.conf.d/50/x", "crio.conf.d/99-nvidia.conf"),
        *(
            "crio.conf.d/99-nvidia.toml",
            "crio.conf.d/99-nvidia.toml.bak",
            "crio.conf.d/zz.conf",
            "conf.d/99-nvidia.toml",
        ),
    ]
)


def others(tree: dict[str, Any]) -> dict[str, Any]:
    runtime = dict(tree["runtime"])
    runtime["runtimes"] = {name: table for name, table in runtime["runtimes"].items() if name not in NAMES}
    return {**tree, "runtime": {key: value for key, value in runtime.items() if key != "default_runtime"}}


def default_without_nvidia(root: Path) -> str:
    """The default of the last file that names none of NVIDIA's."""
    name = "crun"
    for path in files(str(root / "etc/crio/crio.conf"), str(root / "etc/crio/crio.conf.d")):
        named = toml(path.read_text()).get("crio", {}).get("runtime", {}).get("default_runtime")
        name = named if named and named not in NAMES else name
    return name


def carry_out(root: Path, plan: Plan) -> None:
    for edit in plan.changed:
        real = root / edit.path.lstrip("/")
        if edit.after is None:
            real.unlink()
        else:
            real.parent.mkdir(parents=True, exist_ok=True)
            real.write_bytes(edit.after)


@pytest.mark.full
@settings(max_examples=80, deadline=None)
@given(drawn=st.dictionaries(PLACES, RUNTIME, max_size=6))
def test_any_files_are_configured_or_refused(drawn: dict[str, dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for place, runtime in drawn.items():
            write(root, f"etc/crio/{place}", to_toml({"crio": {"runtime": runtime}}))
        daemon = Daemon("crio", None, (1, 32), "/etc/crio/crio.conf", "", "/run/c.sock", None)
        engine = CrioEngine(Host(root, environ={}), daemon)
        before, fallback = meaning(root), default_without_nvidia(root)
        desired = DesiredConfig((Handler("nvidia", OWN),))

        carry_out(root, engine.plan(desired, None))
        after = meaning(root)
        handler = after["runtime"]["runtimes"]["nvidia"]
        assert (handler["runtime_path"], handler.get("runtime_type") or "oci") == (OWN, "oci")
        assert not handler.get("inherit_default_runtime")
        assert others(after) == others(before)
        assert after["runtime"]["default_runtime"] == before["runtime"]["default_runtime"]
        for variant in ("nvidia-cdi", "nvidia-legacy"):
            assert after["runtime"]["runtimes"].get(variant) == before["runtime"]["runtimes"].get(variant)
        assert engine.plan(desired, None).changed == ()

        carry_out(root, engine.plan_removal(UnwantedConfig(NAMES), None))
        gone = meaning(root)
        assert not set(NAMES) & gone["runtime"]["runtimes"].keys() and others(gone) == others(before)
        assert gone["runtime"]["default_runtime"] == fallback
        assert engine.plan_removal(UnwantedConfig(NAMES), None).changed == ()
