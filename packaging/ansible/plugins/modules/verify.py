#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Module gpunode.node.verify."""

from __future__ import annotations

DOCUMENTATION = r"""
module: verify
short_description: Proves that GPUs compute
version_added: 0.1.0
description:
  - Runs a CUDA vector-add on every GPU and MIG device with C(gpunode verify), on the host, in a container or in a pod.
  - The task fails if a device computes a wrong result, or if the program does not run.
options:
  "on":
    description: Where the CUDA program runs.
    type: str
    choices: [host, docker, containerd, crio, podman, k3s, rke2, k0s, microk8s, kubernetes]
    default: host
  image:
    description: Run the program C(vectoradd) of this image.
    type: str
  name:
    description: Name of the runtime in the engine.
    type: str
    default: nvidia
  cdi:
    description: Request the GPUs through CDI instead of the runtime.
    type: bool
    default: false
  socket:
    description: Socket of the engine; detected by default.
    type: path
  timeout:
    description: Seconds after which the task fails. By default 60 for each device, 300 for a pod.
    type: int
  namespace:
    description: Namespace of the pod.
    type: str
  resource:
    description: Resource that the pod requests. By default C(nvidia.com/gpu).
    type: str
  runtime_class:
    description: RuntimeClass of the pod. V(auto) uses C(nvidia) if it exists.
    type: str
    default: auto
extends_documentation_fragment:
  - gpunode.node.gpunode
  - gpunode.node.gpunode.kubernetes
attributes:
  check_mode:
    support: full
    description: The task is skipped, because the proof starts a program on the GPUs.
  diff_mode:
    support: none
seealso:
  - module: gpunode.node.runtime
"""

EXAMPLES = r"""
- name: Run a CUDA program on every GPU, in containers of containerd
  gpunode.node.verify:
    "on": containerd

- name: Run it in a pod
  gpunode.node.verify:
    "on": kubernetes
    kubeconfig: kubelet
    namespace: gpu-tests
"""

RETURN = r"""
devices:
  description: Results by device, each with C(index), C(uuid), C(name), C(status) and C(message).
  returned: success
  type: list
  elements: dict
via:
  description: How the container got the GPUs, such as C(handler nvidia); empty on the host.
  returned: success
  type: str
  sample: handler nvidia
pod:
  description: The pod, null unless O(on=kubernetes).
  returned: success
  type: dict
messages:
  description: Notes of gpunode.
  returned: success
  type: list
  elements: str
"""

from ansible_collections.gpunode.node.plugins.module_utils.gpunode import KUBERNETES, Gpunode

PLACES = ["host", "docker", "containerd", "crio", "podman", "k3s", "rke2", "k0s", "microk8s", "kubernetes"]


def main():
    gpunode = Gpunode(
        dict(
            KUBERNETES,
            on={"type": "str", "choices": PLACES, "default": "host"},
            image={"type": "str"},
            name={"type": "str", "default": "nvidia"},
            cdi={"type": "bool", "default": False},
            socket={"type": "path"},
            timeout={"type": "int"},
            namespace={"type": "str"},
            resource={"type": "str"},
            runtime_class={"type": "str", "default": "auto"},
        )
    )
    if gpunode.check_mode:
        gpunode.module.exit_json(changed=False, skipped=True, msg="the proof does not run in check mode")
    envelope = gpunode.run("verify", *gpunode.words(name="--nvidia-runtime-name"))
    data = envelope["data"]
    gpunode.finish(envelope, devices=data["devices"], via=data["via"], pod=data["pod"])


if __name__ == "__main__":
    main()
