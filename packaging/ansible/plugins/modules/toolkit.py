#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Module gpunode.node.toolkit."""

from __future__ import annotations

DOCUMENTATION = r"""
module: toolkit
short_description: Installs the NVIDIA Container Toolkit
version_added: 0.1.0
description:
  - Adds NVIDIA's repository and installs the toolkit's packages with C(gpunode toolkit install).
options:
  version:
    description: Version such as V(1.20.0); by default the newest, and an installed one is kept.
    type: str
  upgrade:
    description: Upgrade an installed toolkit to the newest version.
    type: bool
    default: false
  hold:
    description: Exclude the packages from upgrades.
    type: bool
    default: false
  repository:
    description: URL of a mirror of NVIDIA's repository.
    type: str
  key:
    description: File on the node with the signing key of the mirror.
    type: path
  packages:
    description: Directory on the node with the packages; no repository is added.
    type: path
  lock_timeout:
    description: Seconds to wait for another package manager.
    type: int
    default: 600
extends_documentation_fragment:
  - gpunode.node.gpunode
attributes:
  check_mode:
    support: full
    description: The task returns the commands that would run.
  diff_mode:
    support: full
    description: Unified diffs of repository files.
"""

EXAMPLES = r"""
- name: Install the toolkit
  gpunode.node.toolkit:
    version: 1.20.0
    hold: true
"""

RETURN = r"""
version:
  description: Version of all packages; empty if it is not known yet.
  returned: success
  type: str
  sample: 1.20.0
commands:
  description: Commands that ran, or would run.
  returned: success
  type: list
  elements: str
messages:
  description: Notes of gpunode.
  returned: success
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.gpunode.node.plugins.module_utils.gpunode import (
    COMMON,
    Gpunode,
    diffs_of,
    flags,
    is_change,
)

FLAGS = {
    "version": "--version",
    "upgrade": "--upgrade",
    "hold": "--hold",
    "repository": "--repository",
    "key": "--key",
    "packages": "--from",
    "lock_timeout": "--lock-timeout",
}


def main():
    module = AnsibleModule(
        argument_spec=dict(
            COMMON,
            version={"type": "str"},
            upgrade={"type": "bool", "default": False},
            hold={"type": "bool", "default": False},
            repository={"type": "str"},
            key={"type": "path", "no_log": False},
            packages={"type": "path"},
            lock_timeout={"type": "int", "default": 600},
        ),
        supports_check_mode=True,
    )
    gpunode = Gpunode(module)
    dry_run = ["--dry-run"] if module.check_mode else []
    envelope = gpunode.run("toolkit", "install", *flags(module.params, FLAGS), *dry_run)
    data = envelope["data"]
    gpunode.finish(
        envelope,
        changed=bool(data["commands"]) or any(map(is_change, data["changes"])),
        diffs=diffs_of(data["changes"]),
        version=data["version"],
        commands=data["commands"],
    )


if __name__ == "__main__":
    main()
