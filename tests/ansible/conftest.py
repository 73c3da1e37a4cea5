"""The controller on which tests run Ansible."""

from pathlib import Path

import pytest

from tests.ansible.controller import Controller, require_ansible


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    require_ansible()
    return Controller(tmp_path / "controller")
