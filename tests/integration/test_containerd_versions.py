"""Files of several versions with real containerds: settings called ignored are not effective."""

import shutil

import pytest

from fixtures.engines import CONTAINERD_CONFIG, start_containerd
from gpunode.checks.catalogue import BY_ID
from gpunode.checks.finding import FindingStatus
from gpunode.daemons.cri import Cri
from gpunode.facts.containerd import find_containerd
from gpunode.facts.daemons import parse_version
from gpunode.facts.node import Node
from gpunode.host import Host
from tests.integration.conftest import path_of
from tests.required import required

pytestmark = pytest.mark.full

OLD = "io.containerd.grpc.v1.cri"
NEW = "io.containerd.cri.v1.runtime"
IMPORTS = 'imports = ["{directory}/conf.d/*.toml"]\n'
PLAIN = CONTAINERD_CONFIG.removeprefix("version = 2\n").partition(f'[plugins."{OLD}"]')[0]


def table(plugin, name, program="/bin/true"):
    return f"""
[plugins."{plugin}"]
  [plugins."{plugin}".containerd.runtimes.{name}]
    runtime_type = "io.containerd.runc.v2"
    [plugins."{plugin}".containerd.runtimes.{name}.options]
      BinaryName = "{program}"
      SystemdCgroup = true
"""


def main(version, plugin):
    return (f"version = {version}\n" if version else "") + IMPORTS + PLAIN + table(plugin, "runc", "runc")


def both(plugin):
    """As NVIDIA's tool writes it: all settings of the table that containerd reports, and the handler."""
    second = table(plugin, "nvidia").partition(f'[plugins."{plugin}"]\n')[2]
    return table(plugin, "runc", "runc") + second


CASES = {
    "a drop-in without version": (main(2, OLD), both(OLD)),
    "of the newer version, with everything": (main(2, OLD), "version = 3\n" + both(NEW)),
    "of the newer version, alone": (main(2, OLD), "version = 3\n" + table(NEW, "nvidia")),
    "of the older version": (main(3, NEW), "version = 2\n" + table(OLD, "nvidia")),
    "of the older name, without version": (main(3, NEW), table(OLD, "nvidia")),
    "of the newer name, without version": (main(2, OLD), table(NEW, "nvidia")),
    "a main file without version": (main(0, OLD), ""),
}


# releases before 2.0 don't start with version 3
PAIRS = [
    (case, source)
    for case, texts in CASES.items()
    for source in ("installed", "trixie", "forky")
    if source == "forky" or "version = 3" not in "".join(texts)
]


@pytest.mark.containerd
@pytest.mark.parametrize(("case", "source"), PAIRS)
def test_ignored_settings_are_not_reported_as_effective(case, source):
    path = path_of(source)
    first, second = CASES[case]
    program = required(shutil.which("containerd", path=path))
    release = parse_version(Host().run([program, "--version"]).stdout)
    engine = start_containerd(first, binary=program, path=path)
    drop_in = engine.directory / "conf.d" / "99-nvidia.toml"
    drop_in.parent.mkdir()
    drop_in.write_text(second)
    with engine:
        with Cri(Host(), engine.socket) as cri:
            status = cri.status()
        wanted = {"runc", *(["nvidia"] if second else [])}
        whole = wanted <= set(status.handlers) and all(status.systemd_cgroup(name) for name in wanted)
        daemon = required(find_containerd(Host(), str(engine.config)))
        node = Node(Host())
        node.__dict__.update(
            {"kubelet": None, "docker": None, "containerd": daemon._replace(version=release)}
        )
        verdict = BY_ID["containerd-config-version"].run(node)
        if release < (2,) and second and verdict.status is FindingStatus.PASS and not whole:
            verdict = BY_ID["containerd-imports-clobber"].run(node)  # reported by another check
        assert (verdict.status is FindingStatus.PASS) == whole, (verdict, status.handlers, status.config)
