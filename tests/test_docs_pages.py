"""The names on the architecture page exist. The runs shown on the pages on MIG, Kubernetes and labels are
repeated on stubs, recorded machines and a test API server.

test_docs.py covers what `make docs` generates, packages/test_driver_plan_pages.py the pages that need an apt.
Every run shown on a page must be repeated here: one that is not repeated fails the comparison.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.api_server import ApiServer
from fixtures.machines import recorded_host
from fixtures.scenario import Process, StubGpuInstance, mig_machine, mixed_layout, with_mig
from gpunode.output.typed import toml
from tests.cli import REPOSITORY, Ran, gpunode
from tests.cluster import Gpunode, api, certificates, run
from tests.mig.conftest import EXAMPLES, MigNode, mig_node

__all__ = ["api", "certificates", "mig_node", "run"]


def runs(page: str) -> dict[str, str]:
    """Output of the page by the command line after `$ gpunode`: all output, without the prompt."""
    blocks = re.findall(r"^```(?:console)?\n(\$ .*?)^```$", (REPOSITORY / page).read_text(), re.M | re.S)
    parts = [part for block in blocks for part in re.split(r"^\$ (?=gpunode )", block, flags=re.M) if part]
    examples = (part.partition("\n") for part in parts)
    return {line.removeprefix("gpunode "): text for line, _, text in examples if text}


def printed(ran: Ran) -> str:
    """The part of a run that a page shows: its output, and the error with its hint."""
    errors = (one for one in ran.err.splitlines(True) if one.startswith(("error:", "hint:")))
    return ran.out + "".join(errors)


# --- the architecture -----------------------------------------------------------------------------------


def exists(name: str) -> bool:
    """Whether gpunode has this module, or this function, class or attribute of a module."""
    module, attributes = "gpunode", name.split(".")
    while attributes and (spec := importlib.util.find_spec(f"{module}.{attributes[0]}")):
        module = f"{module}.{attributes.pop(0)}"
        if spec.submodule_search_locations is None:
            break
    found = importlib.import_module(module)
    for attribute in attributes:
        if not hasattr(found, attribute):
            return False
        found = getattr(found, attribute)
    return module != "gpunode"


def test_architecture_page_names_only_existing_files() -> None:
    text = (REPOSITORY / "docs/architecture.md").read_text()
    names = re.findall(r"`([\w.]+\.\w+)`", text)
    assert [name for name in dict.fromkeys(names) if not exists(name)] == []
    walks = dict(re.findall(r"^## Walk: (\S+)\n(.*?)(?=^## )", text, re.M | re.S))
    counts = {walk: len(re.findall(r"`\w+(?:\.\w+)+`", steps)) for walk, steps in walks.items()}
    assert set(counts) == {"doctor", "configure-runtime", "Allocate"} and min(counts.values()) > 10


def test_architecture_page_lists_every_package() -> None:
    text = (REPOSITORY / "docs/architecture.md").read_text()
    listed = set(re.findall(r"^\| `(\w+)`", text, re.M))
    package = REPOSITORY / "gpunode"
    assert {path.parent.name for path in package.glob("*/__init__.py")} <= listed
    assert [name for name in listed if not exists(name)] == []


# --- MIG ------------------------------------------------------------------------------------------------

_CUT = (
    with_mig(mig_machine("h100", "h100", "a30", "a100-40gb"), 0, mixed_layout(0))
    .with_gpu(2, mig_enabled=True, gpu_instances=(StubGpuInstance(3, 0, 1),))
    .with_gpu(3, reported={"mig_next": 1})
)

# a process that uses the GPU, of whatever number it gets where the command runs
_WITH_SLEEP = """\
file=$1; shift
sleep 60 & sed -i "s/pid=7860/pid=$!/" "$file"
"$@"; code=$?
kill $!; exit $code
"""


@pytest.mark.full
def test_mig_page_is_up_to_date(mig_node: Callable[..., MigNode]) -> None:
    page = runs("docs/mig.md")
    node = mig_node(_CUT)
    outputs: dict[str, str] = {}

    def see(line: str, prefix: tuple[str, ...] = ()) -> None:
        words = [EXAMPLES if word == "mig.yaml" else word for word in shlex.split(line)[1:]]
        text = printed(node.run(*words, prefix=prefix)).replace(EXAMPLES, "mig.yaml")
        outputs[line] = re.sub(r"(?<=process )\d+|(?<=--drain )\d+", "7860", text)

    see("mig list")
    see("mig export --config-label today")
    node.stub.write(mig_machine("h100"))
    see("mig list --profiles")
    see("mig apply -f mig.yaml -c all-balanced")
    # the first 1g that was made has the id 7
    node.stub.write(replace(mig_machine("h100"), processes=(Process(0, 7860, gi=7, ci=0),)))
    see("mig plan -f mig.yaml -c parts", prefix=("sh", "-c", _WITH_SLEEP, "sh", str(node.stub.scenario_path)))
    node.stub.write(mig_machine("h100"))
    applied = node.apply("parts")
    assert applied.code == 0, applied.err
    see("mig assert -f mig.yaml -c media")
    assert outputs == page


# --- Kubernetes -----------------------------------------------------------------------------------------

_POD_LIFE = (
    {"phase": "Pending"},
    {
        "phase": "Succeeded",
        "containerStatuses": [{"name": "vector-add", "state": {"terminated": {"exitCode": 0}}}],
    },
)
_LOG = """\
[Vector addition of 50000 elements]
Copy input data from the host memory to the CUDA device
CUDA kernel launch with 196 blocks of 256 threads
Copy output data from the CUDA device to the host memory
Test PASSED
Done
"""


def test_kubernetes_and_manifests_pages_are_up_to_date(api: ApiServer, run: Gpunode, tmp_path: Path) -> None:
    (tmp_path / ".kube").mkdir()
    (tmp_path / "kubeconfig").rename(tmp_path / ".kube/config")  # kubectl's own path
    shown = {**runs("docs/kubernetes.md"), **runs("docs/manifests.md")}
    page = {line: _any_pod(text) for line, text in shown.items()}
    assert len(page) == 5
    api.pod_life, api.logs = [*_POD_LIFE], {"": _LOG}
    # in the page's order: later commands see the changes of earlier ones
    outputs = {line: run(*shlex.split(line), KUBECONFIG="") for line in page}
    assert {line: ran.code for line, ran in outputs.items() if ran.code} == {}
    home = {line: ran.out.replace(str(tmp_path), "/root") for line, ran in outputs.items()}
    assert {line: _any_pod(text) for line, text in home.items()} == page


def _any_pod(text: str) -> str:
    """Without parts that differ in every run: the server's address, the pod's name, the time."""
    text = re.sub(r"https://[\d.]+:\d+", "https://10.0.0.1:6443", text)
    return re.sub(r"vector-add-\w{5}\b", "vector-add-XXXXX", re.sub(r"\d+\.\d s +", "N s ", text))


# --- the device plugin --------------------------------------------------------------------------------


def test_the_page_on_the_device_plugin(tmp_path: Path) -> None:
    """The only run with output that it shows: the translation of GKE's file."""
    (line, text), *others = runs("docs/device-plugin.md").items()
    command, _, target = line.partition(" > ")
    assert (others, target) == ([], "plugin.yaml")
    file = tmp_path / "gpu_config.json"
    file.write_text('{"GPUPartitionSize": "1g.5gb"}')
    *words, path = shlex.split(command)
    assert path == "/etc/nvidia/gpu_config.json"
    ran = gpunode(*words, str(file))
    assert (ran.code, ran.err.replace(str(file), path)) == (0, text)


# --- labels ---------------------------------------------------------------------------------------------


def test_labels_page_is_up_to_date(tmp_path: Path) -> None:
    page = runs("docs/labels.md")
    recorded_host("healthy-mig-h100", tmp_path / "node")
    outputs = {line: printed(gpunode(*shlex.split(line), "--root", f"{tmp_path}/node")) for line in page}
    assert page and outputs == page


# --- the image ------------------------------------------------------------------------------------------


def test_image_is_built_from_existing_files() -> None:
    text = (REPOSITORY / "packaging/Dockerfile").read_text()
    packages = (REPOSITORY / "scripts/build_packages.py").read_text()
    # its context is the offline bundle
    named = re.findall(r'"/bundle/([^"]+)"', text)
    assert named and [word for word in named if f'write(top / "{word}"' not in packages] == []
    assert [word for word in named if not (REPOSITORY / "packaging" / word).exists()] == []
    assert "\nARG VERSION=\n" in text and '"ARG VERSION="' in packages
    project = toml((REPOSITORY / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"\{wheel_file\}\[([\w,]+)\]", packages)
    assert set(extras.split(",")) == {"all"} <= set(project["optional-dependencies"])
    assert project["optional-dependencies"]["all"] == ["gpunode[metrics,kubernetes]"]
