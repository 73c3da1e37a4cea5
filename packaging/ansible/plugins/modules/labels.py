#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Module gpunode.node.labels."""

from __future__ import annotations

DOCUMENTATION = r"""
module: labels
short_description: Publishes labels that describe the GPUs of a node
version_added: 0.1.0
description:
  - Writes the labels of GPU Feature Discovery with C(gpunode labels), for Node Feature Discovery or on the Node.
options:
  to:
    description:
      - Where to publish the labels.
      - V(file) is a feature file and V(node-feature) an object for Node Feature Discovery, V(node) the Node itself.
    type: list
    elements: str
    choices: [file, node-feature, node]
    default: [file]
  output_file:
    description: Path of the feature file.
    type: path
  vendor:
    description: Vendor of the GPUs.
    type: str
    choices: [nvidia, amd]
    default: nvidia
  config_file:
    description: Configuration file of the device plugin on the node.
    type: path
  mig_strategy:
    description: How MIG devices are advertised.
    type: str
    choices: [none, single, mixed]
  timestamp:
    description: Whether the labels include the time of the first pass of this boot.
    type: bool
    default: false
  namespace:
    description: Namespace of the NodeFeature object.
    type: str
extends_documentation_fragment:
  - gpunode.node.gpunode
  - gpunode.node.gpunode.kubernetes
attributes:
  check_mode:
    support: full
    description: The task returns the labels, and whether they differ from the published ones.
  diff_mode:
    support: full
    description: Unified diffs of files and objects.
"""

EXAMPLES = r"""
- name: Write a feature file for Node Feature Discovery
  gpunode.node.labels:

- name: Label the Node, with the kubelet's account
  gpunode.node.labels:
    to: [node]
    kubeconfig: kubelet
"""

RETURN = r"""
labels:
  description: The labels by key.
  returned: success
  type: dict
  sample: {"nvidia.com/gpu.count": "8"}
changes:
  description: Files and objects, each with C(path), C(action) and C(diff).
  returned: success
  type: list
  elements: dict
messages:
  description: Notes of gpunode.
  returned: success
  type: list
  elements: str
"""

from ansible_collections.gpunode.node.plugins.module_utils.gpunode import KUBERNETES, Gpunode

SINKS = ["file", "node-feature", "node"]


def main():
    gpunode = Gpunode(
        dict(
            KUBERNETES,
            to={"type": "list", "elements": "str", "choices": SINKS, "default": ["file"]},
            output_file={"type": "path"},
            vendor={"type": "str", "choices": ["nvidia", "amd"], "default": "nvidia"},
            config_file={"type": "path"},
            mig_strategy={"type": "str", "choices": ["none", "single", "mixed"]},
            timestamp={"type": "bool", "default": False},
            namespace={"type": "str"},
        )
    )
    words = [f"--to={','.join(gpunode.params['to'])}", *gpunode.words(to=None, timestamp=None)]
    words += [] if gpunode.params["timestamp"] else ["--no-timestamp=true"]
    envelope = gpunode.run("labels", *words, *gpunode.dry_run)
    data = envelope["data"]
    gpunode.finish(envelope, entries=data["changes"], labels=data["labels"], changes=data["changes"])


if __name__ == "__main__":
    main()
