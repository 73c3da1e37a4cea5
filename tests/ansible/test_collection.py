"""The collection's files: documentation that Ansible renders and that fits the code, YAML, versions."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from gpunode import __version__
from tests.ansible.controller import COLLECTION, Controller, require_ansible

pytestmark = pytest.mark.xdist_group("ansible-collection")
MODULES = sorted(path.stem for path in (COLLECTION / "plugins/modules").glob("*.py"))
LICENSE = "# SPDX-License-Identifier: Apache-2.0"


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Controller:
    require_ansible()
    return Controller(tmp_path_factory.mktemp("collection") / "controller")


@pytest.fixture(scope="module")
def pages(controller: Controller) -> dict[str, Any]:
    """What ansible-doc knows of each module."""
    done = controller.run("ansible-doc", "--json", *(f"gpunode.node.{name}" for name in MODULES))
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert isinstance(found, dict)
    return {name.rpartition(".")[2]: page for name, page in found.items()}


@pytest.fixture(scope="module")
def specs(controller: Controller) -> Iterator[dict[str, Any]]:
    """The argument specification of each module, as its code has it."""
    basic = importlib.import_module("ansible.module_utils.basic")

    class Stop(Exception):
        pass

    def keep(self: object, argument_spec: dict[str, Any], **more: Any) -> None:
        raise Stop(argument_spec, more)

    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(controller.place / "collections"))
        patch.setattr(basic.AnsibleModule, "__init__", keep)
        for name in MODULES:
            module = importlib.import_module(f"ansible_collections.gpunode.node.plugins.modules.{name}")
            with pytest.raises(Stop) as stopped:
                module.main()
            found[name], more = stopped.value.args
            assert more["supports_check_mode"] is True, name
        yield found


def test_there_are_the_modules_that_the_documentation_names() -> None:
    assert MODULES == ["doctor_info", "driver", "labels", "mig", "runtime", "toolkit", "verify"]


@pytest.mark.parametrize("name", MODULES)
def test_documentation_fits_the_arguments(name: str, pages: dict[str, Any], specs: dict[str, Any]) -> None:
    page, spec = pages[name], specs[name]
    options = page["doc"]["options"]
    assert set(options) == set(spec)
    for option, described in options.items():
        for key in ("type", "elements", "choices", "default"):
            assert described.get(key) == spec[option].get(key), (option, key)
        assert described["description"], option
    assert page["doc"]["version_added"] == __version__ and page["doc"]["attributes"]["check_mode"]
    tasks = yaml.safe_load(page["examples"])
    used = [task[f"gpunode.node.{name}"] or {} for task in tasks if f"gpunode.node.{name}" in task]
    assert used and all(set(words) <= set(options) for words in used)
    assert all(value["description"] and value["type"] for value in page["return"].values())


def test_ansible_doc_prints_a_page(controller: Controller) -> None:
    done = controller.run("ansible-doc", "gpunode.node.runtime")
    assert done.code == 0 and "ERROR" not in done.err, done.err
    assert "`gpunode configure-runtime'" in " ".join(done.out.split())


def test_yamllint_has_no_complaint() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "yamllint", "--strict", "."], cwd=COLLECTION, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_python_files_have_the_license_and_no_python_that_ansible_rejects() -> None:
    for path in COLLECTION.rglob("*.py"):
        lines = path.read_text().splitlines()
        assert LICENSE in lines[:2], path
        assert "from __future__ import annotations" in lines, path


def test_versions_agree() -> None:
    galaxy = yaml.safe_load((COLLECTION / "galaxy.yml").read_text())
    assert galaxy["version"] == __version__


def test_every_python_that_ansible_supports_on_nodes_can_read_the_modules() -> None:
    """Python 3.9 is the oldest."""
    for path in COLLECTION.rglob("*.py"):
        ast.parse(path.read_text(), filename=str(path), feature_version=(3, 9))
