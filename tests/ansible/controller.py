"""An Ansible controller for tests: the collection of packaging/ansible, without this machine's settings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli import REPOSITORY, Ran, clean_environment
from tests.waiting import PATIENCE

COLLECTION = REPOSITORY / "packaging/ansible"
_PROGRAMS = Path(sys.executable).parent


def require_ansible() -> None:
    """Skip where ansible-core isn't installed beside pytest; an error with CI=true."""
    if not (_PROGRAMS / "ansible-playbook").exists() or shutil.which("ssh") is None:
        assert not os.environ.get("CI"), "ansible-core or ssh is missing"
        pytest.skip("ansible-core or ssh is missing")


@dataclass
class Controller:
    """A directory in which Ansible runs. `prefix` starts each program, in a network namespace say."""

    place: Path
    prefix: Sequence[str] = ()

    def __post_init__(self) -> None:
        above = self.place / "collections/ansible_collections/gpunode"
        above.mkdir(parents=True)
        (above / "node").symlink_to(COLLECTION)
        # while a task runs Ansible polls a thousand times a second, otherwise
        (self.place / "ansible.cfg").write_text("[defaults]\ninternal_poll_interval = 0.02\n")

    @property
    def env(self) -> dict[str, str]:
        programs = f"{_PROGRAMS}:{os.environ['PATH']}"
        ours = {name: value for name, value in clean_environment().items() if not name.startswith("ANSIBLE_")}
        return {
            **ours,
            "PATH": programs,
            "PWD": str(self.place),
            "ANSIBLE_CONFIG": str(self.place / "ansible.cfg"),
            "ANSIBLE_HOME": str(self.place / "home"),
            "ANSIBLE_COLLECTIONS_PATH": str(self.place / "collections"),
            "ANSIBLE_LOCALHOST_WARNING": "false",
            "ANSIBLE_NOCOLOR": "true",
            "LC_ALL": "C.UTF-8",
        }

    def start(self, program: str, *words: str) -> subprocess.Popen[str]:
        """A program of Ansible that goes on while the test does something else."""
        return subprocess.Popen(
            [*self.prefix, str(_PROGRAMS / program), *words],
            env=self.env,
            cwd=self.place,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, program: str, *words: str, timeout: float = PATIENCE) -> Ran:
        """A program of Ansible to its end."""
        with self.start(program, *words) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return Ran(process.returncode, out, err)

    def results(self, *tasks: Mapping[str, Any], options: Sequence[str] = ()) -> list[dict[str, Any]]:
        """What each task returned that ran on this machine; those that failed, too."""
        numbered = [
            {**task, "register": f"result{number}", "ignore_errors": True}
            for number, task in enumerate(tasks)
        ]
        names = ", ".join(f"result{number}" for number in range(len(tasks)))
        written = self.place / "results.json"
        written.unlink(missing_ok=True)
        last = {
            "ansible.builtin.copy": {"content": f"{{{{ [{names}] | to_json }}}}", "dest": str(written)},
            "check_mode": False,
            "diff": False,
        }
        play = {"hosts": "localhost", "gather_facts": False, "tasks": [*numbered, last]}
        file = self.place / "tasks.json"
        file.write_text(json.dumps([play]))
        python = f"ansible_python_interpreter={sys.executable}"
        done = self.run(
            "ansible-playbook", "-i", "localhost,", "-c", "local", "-e", python, *options, str(file)
        )
        assert done.code == 0, done.out + done.err
        results = json.loads(written.read_text())
        assert isinstance(results, list)
        return results
