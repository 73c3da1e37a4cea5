#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Module gpunode.node.doctor_info."""

from __future__ import annotations

DOCUMENTATION = r"""
module: doctor_info
short_description: Diagnoses a GPU node
version_added: 0.1.0
description:
  - Runs C(gpunode doctor) and returns its report. Nothing is changed.
  - The task succeeds also if the node has faults. Use RV(status) in C(failed_when) to fail on them.
options:
  only:
    description: Run only these checks; all by default.
    type: list
    elements: str
    default: []
  skip:
    description: Skip these checks, each as C(ID) or C(ID:REASON).
    type: list
    elements: str
    default: []
  ignore:
    description: Report errors of these checks as warnings, each as C(ID) or C(ID:REASON), or V(all).
    type: list
    elements: str
    default: []
  preflight:
    description: Check only what would block the installation of this.
    type: str
    choices: [docker, containerd, crio, podman, kubernetes]
  expect_gpus:
    description: Number of GPUs that the node must have.
    type: int
  cuda:
    description: Check whether programs for this CUDA release run, such as V(12.8).
    type: str
  image:
    description: Check the requirements of this container image, which the node must have.
    type: str
  deep:
    description: Also run a test container and query the device plugin. Check mode ignores it.
    type: bool
    default: false
extends_documentation_fragment:
  - gpunode.node.gpunode
attributes:
  check_mode:
    support: full
  diff_mode:
    support: none
seealso:
  - name: Fleet report
    description: One page of the reports of all nodes, by the playbook C(gpunode.node.report).
    link: https://docs.ansible.com/ansible-core/devel/collections_guide/collections_using_playbooks.html
"""

EXAMPLES = r"""
- name: Diagnose the node
  gpunode.node.doctor_info:
    expect_gpus: 8
  register: doctor
  failed_when: doctor.status in ["fail", "error"]

- name: Print the root cause
  ansible.builtin.debug:
    msg: "{{ doctor.first.summary }}: {{ doctor.first.fix | map(attribute='command') | join(', then ') }}"
  when: doctor.first is not none
"""

RETURN = r"""
status:
  description:
    - The worst status of a check, V(ok), V(warn) or V(fail).
    - V(error) if a check itself failed.
  returned: success
  type: str
  sample: fail
first:
  description: The finding to fix first, as in C(findings) of the report; null if there is none.
  returned: success
  type: dict
  contains:
    id:
      description: Identifier of the check.
      type: str
      sample: containerd-runtime-missing
    summary:
      description: What is wrong.
      type: str
    fix:
      description: Commands that fix it.
      type: list
      elements: dict
counts:
  description: Number of findings by status.
  returned: success
  type: dict
  sample: {"pass": 61, "warn": 1, "fail": 0, "skip": 90, "error": 0}
report:
  description:
    - The whole envelope of kind C(DoctorReport). Written to a file, it is input for C(gpunode doctor --compare).
  returned: success
  type: dict
messages:
  description: Notes of gpunode.
  returned: success
  type: list
  elements: str
"""

from ansible_collections.gpunode.node.plugins.module_utils.gpunode import Gpunode

SEVERAL = {"type": "list", "elements": "str", "default": []}
PREFLIGHTS = ["docker", "containerd", "crio", "podman", "kubernetes"]


def main():
    gpunode = Gpunode(
        {
            "only": SEVERAL,
            "skip": SEVERAL,
            "ignore": SEVERAL,
            "preflight": {"type": "str", "choices": PREFLIGHTS},
            "expect_gpus": {"type": "int"},
            "cuda": {"type": "str"},
            "image": {"type": "str"},
            "deep": {"type": "bool", "default": False},
        }
    )
    words = gpunode.words(**({"deep": None} if gpunode.check_mode else {}))
    # 1 with findings is a report of faults; 1 without is a doctor that failed
    envelope = gpunode.run("doctor", *words, accept=(0, 1), require="findings")
    data = envelope["data"]
    gpunode.finish(
        envelope,
        status=envelope["status"],
        first=next((one for one in data["findings"] if one["id"] == data["first"]), None),
        counts=data["counts"],
        report=envelope,
    )


if __name__ == "__main__":
    main()
