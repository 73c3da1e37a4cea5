#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Module gpunode.node.mig."""

from __future__ import annotations

DOCUMENTATION = r"""
module: mig
short_description: Divides GPUs into MIG devices
version_added: 0.1.0
description:
  - Applies a MIG configuration with C(gpunode mig apply). GPUs in use are not touched; the task then fails.
  - A change that fails is rolled back.
options:
  config:
    description: Configuration in the format of nvidia-mig-parted.
    type: dict
  config_file:
    description: File on the node with such a configuration.
    type: path
  label:
    description: The configuration of that name; required if there are several.
    type: str
  mode_only:
    description: Set only the MIG mode, not the instances.
    type: bool
    default: false
  skip_reset:
    description: Don't reset GPUs. A change of the mode may then stay pending.
    type: bool
    default: false
  drain:
    description: Users of the GPUs to stop first; units and containers (C(docker:ID)) are started again.
    type: list
    elements: str
    default: []
  persist:
    description: Also apply the layout at each boot, before the engines start.
    type: bool
    default: false
  node_labels:
    description: Update the C(mig.config) labels of the Node.
    type: bool
    default: false
extends_documentation_fragment:
  - gpunode.node.gpunode
  - gpunode.node.gpunode.kubernetes
attributes:
  check_mode:
    support: full
    description: The task returns the plan. Users of the GPUs that would block it are warnings.
  diff_mode:
    support: full
    description: The layout of each GPU, and the files of O(persist).
"""

EXAMPLES = r"""
- name: Divide every GPU into seven devices
  gpunode.node.mig:
    config:
      version: v1
      mig-configs:
        all-1g.10gb:
          - devices: all
            mig-enabled: true
            mig-devices:
              1g.10gb: 7
    persist: true

- name: Apply a configuration of a file on the node
  gpunode.node.mig:
    config_file: /etc/gpunode/mig.yaml
    label: all-balanced
    drain: [nvidia-dcgm.service]
"""

RETURN = r"""
plan:
  description: Current and desired layout of each GPU, and the steps, as the kind C(MigPlan) in gpunode's JSON output.
  returned: success
  type: dict
devices:
  description: MIG devices of these GPUs afterwards, each with C(profile), C(at), C(gi), C(ci) and C(uuid).
  returned: when not in check mode
  type: list
  elements: dict
messages:
  description: Notes of gpunode.
  returned: success
  type: list
  elements: str
"""

import json

from ansible_collections.gpunode.node.plugins.module_utils.gpunode import KUBERNETES, Gpunode

SWITCH = {"type": "bool", "default": False}


def main():
    gpunode = Gpunode(
        dict(
            KUBERNETES,
            config={"type": "dict"},
            config_file={"type": "path"},
            label={"type": "str"},
            mode_only=SWITCH,
            skip_reset=SWITCH,
            drain={"type": "list", "elements": "str", "default": []},
            persist=SWITCH,
            node_labels=SWITCH,
        ),
        mutually_exclusive=[("config", "config_file")],
        required_one_of=[("config", "config_file")],
    )
    config = gpunode.params["config"]
    words = gpunode.words(config=None, label="--selected-config")
    # every JSON document is a YAML document
    inline = {} if config is None else {"stdin": json.dumps(config)}
    words += ["--config-file=-"] if inline else []
    envelope = gpunode.run("mig", "apply", *words, *gpunode.dry_run, **inline)
    data = envelope["data"]
    plan = data["plan"]
    if gpunode.check_mode:
        for one in plan["obstacles"]:
            gpunode.module.warn(f"GPU {one['gpu']} is in use by {one['name'] or one['what']}")
    gpunode.finish(
        envelope,
        changed=plan["changes"],
        entries=data["changes"],
        diffs=_layouts(plan),
        plan=plan,
        **({} if gpunode.check_mode else {"devices": data["devices"]}),
    )


def _layouts(plan):
    """The layouts before and after as one diff, if they differ."""
    if not plan["changes"]:
        return
    header = "MIG layout"
    before, after = (
        "".join(_line(gpu, side, number) for gpu in plan["gpus"])
        for number, side in enumerate(("today", "wanted"))
    )
    yield {"before": before, "after": after, "before_header": header, "after_header": header}


def _line(gpu, side, number):
    """One GPU as text. `wanted` is null where the driver reports profiles only once MIG is on."""
    pieces = gpu[side]
    instances = "to be planned" if pieces is None else ", ".join(map(_instance, pieces)) or "no instances"
    return f"GPU {gpu['index']} {gpu['uuid']}: MIG {gpu['mode'][number]}, {instances}\n"


def _instance(piece):
    return f"{piece['profile']} at {piece['placement']['start']}"


if __name__ == "__main__":
    main()
