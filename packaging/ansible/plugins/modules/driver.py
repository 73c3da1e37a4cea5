#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Module gpunode.node.driver."""

from __future__ import annotations

DOCUMENTATION = r"""
module: driver
short_description: Installs the NVIDIA driver
version_added: 0.1.0
description:
  - Installs the driver that C(gpunode driver plan) selects for the GPUs, the kernel and the distribution.
  - Running GPU programs are never interrupted, and the node is never rebooted; RV(reboot) says whether it must be.
options:
  branch:
    description: Driver branch, such as V(580); selected for the GPUs by default.
    type: int
  version:
    description: Driver version; by default the newest of the branch.
    type: str
  flavour:
    description: Kind of the kernel module; selected for the GPUs by default.
    type: str
    choices: [open, proprietary]
  repository:
    description: V(distribution), V(nvidia), or the URL of a mirror of NVIDIA's repository.
    type: str
extends_documentation_fragment:
  - gpunode.node.gpunode
  - gpunode.node.gpunode.packages
attributes:
  check_mode:
    support: full
    description: The task returns the plan, and fails if it would be refused.
  diff_mode:
    support: full
    description: Unified diffs of repository and module files.
"""

EXAMPLES = r"""
- name: Install the driver
  gpunode.node.driver:
    branch: 580
  register: driver

- name: Reboot if the driver needs it
  ansible.builtin.reboot:
  when: driver.reboot != ""
"""

RETURN = r"""
plan:
  description: As the kind C(DriverPlan) in gpunode's JSON output.
  returned: success
  type: dict
reboot:
  description: Why the node must be rebooted; empty if it need not.
  returned: success
  type: str
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
            branch={"type": "int"},
            version={"type": "str"},
            flavour={"type": "str", "choices": ["open", "proprietary"]},
            repository={"type": "str"},
        )
    )
    envelope = gpunode.run("driver", "install", *gpunode.words(), *(gpunode.dry_run or ["--yes"]))
    data = envelope["data"]
    plan = data["plan"]
    if plan["refusals"] and not plan["upToDate"]:
        first = plan["refusals"][0]
        message = f"{first['message']}; hint: {first['hint']}"
        gpunode.module.fail_json(msg=message, code=first["code"], plan=plan)
    gpunode.finish(
        envelope,
        changed=not plan["upToDate"],
        entries=data["changes"],
        plan=plan,
        reboot=data["reboot"],
        commands=(plan if gpunode.check_mode else data)["commands"],
    )


if __name__ == "__main__":
    main()
