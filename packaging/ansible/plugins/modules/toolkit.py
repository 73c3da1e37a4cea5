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
  repository:
    description: URL of a mirror of NVIDIA's repository.
    type: str
  packages:
    description: Directory on the node with the packages; no repository is added.
    type: path
extends_documentation_fragment:
  - gpunode.node.gpunode
  - gpunode.node.gpunode.packages
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

from ansible_collections.gpunode.node.plugins.module_utils.gpunode import PACKAGES, Gpunode


def main():
    gpunode = Gpunode(
        dict(
            PACKAGES,
            version={"type": "str"},
            upgrade={"type": "bool", "default": False},
            repository={"type": "str"},
            packages={"type": "path"},
        )
    )
    envelope = gpunode.run("toolkit", "install", *gpunode.words(packages="--from"), *gpunode.dry_run)
    data = envelope["data"]
    gpunode.finish(
        envelope,
        changed=bool(data["commands"]),
        entries=data["changes"],
        version=data["version"],
        commands=data["commands"],
    )


if __name__ == "__main__":
    main()
