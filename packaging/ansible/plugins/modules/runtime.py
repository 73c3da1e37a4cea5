#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Module gpunode.node.runtime."""

from __future__ import annotations

DOCUMENTATION = r"""
module: runtime
short_description: Registers the nvidia runtime with container engines
version_added: 0.1.0
description:
  - Configures Docker, containerd, CRI-O or podman with C(gpunode configure-runtime), restarts or reloads the engine,
    and checks that the running engine has the runtime.
  - A change that fails is rolled back. The task then fails, and RV(ignore:rolled_back) is true.
options:
  runtime:
    description:
      - Engines to configure, V(docker), V(containerd), V(crio), V(podman), V(k3s), V(rke2), V(k0s) or V(microk8s).
      - V(auto) is the engine of the kubelet, or the only engine of the node.
    type: list
    elements: str
    default: [auto]
  state:
    description: Whether the runtime is registered or removed.
    type: str
    choices: [present, absent]
    default: present
  name:
    description: Name of the runtime in the engine.
    type: str
    default: nvidia
  path:
    description: Path of the runtime's program. By default C(nvidia-container-runtime).
    type: str
  set_as_default:
    description: Make it the default runtime of the engine.
    type: bool
    default: false
  cdi:
    description: Also enable CDI in the engine, and write and refresh the CDI specification, or remove both.
    type: bool
    default: false
  also:
    description: Further runtimes to register, each of which forces one mode of the toolkit.
    type: list
    elements: str
    choices: [cdi, legacy]
    default: []
  config:
    description: Configuration file of the engine; by default the file that the daemon uses.
    type: path
  drop_in_config:
    description: Drop-in file to write (containerd 2, CRI-O); selected by default.
    type: path
  socket:
    description: Socket of the daemon; detected by default.
    type: path
  replace:
    description: Replace a drop-in that C(nvidia-ctk) or the GPU operator wrote.
    type: bool
    default: false
  restart:
    description: Restart or reload the engine. Without it the files are written, and the change becomes active later.
    type: bool
    default: true
  restart_command:
    description: Command that restarts the engine where systemd doesn't manage it.
    type: str
  stop_containers:
    description: Restart the engine also where that stops running containers. Otherwise the task fails.
    type: bool
    default: false
extends_documentation_fragment:
  - gpunode.node.gpunode
attributes:
  check_mode:
    support: full
    description: The task returns the planned changes, and fails if the change would be refused.
  diff_mode:
    support: full
    description: Unified diffs of the files.
seealso:
  - module: gpunode.node.verify
"""

EXAMPLES = r"""
- name: Register the nvidia runtime with the engine of this node
  gpunode.node.runtime:

- name: Configure Docker, also if its restart stops containers
  gpunode.node.runtime:
    runtime: [docker]
    set_as_default: true
    stop_containers: true

- name: Remove the runtime from containerd
  gpunode.node.runtime:
    runtime: [containerd]
    state: absent
"""

RETURN = r"""
engines:
  description:
    - One entry for each engine, as C(data) of the kind C(RuntimeConfiguration) in gpunode's JSON output.
  returned: success
  type: list
  elements: dict
  contains:
    engine:
      description: Name of the engine.
      type: str
      sample: containerd
    engineVersion:
      description: Version of the engine.
      type: str
      sample: 1.7.24
    changes:
      description: Files, each with C(path), C(action) and C(diff).
      type: list
      elements: dict
    restart:
      description: What makes the change active, with C(verb), C(performed), C(command) and C(reason).
      type: dict
    active:
      description: Runtimes that the running engine has, with C(handler) and C(default); null if it was not queried.
      type: dict
    journal:
      description: Identifier for C(gpunode rollback); empty if nothing was changed.
      type: str
restart_needed:
  description: Whether an engine is, or in check mode would be, restarted rather than reloaded.
  returned: success
  type: bool
messages:
  description: Notes of gpunode.
  returned: success
  type: list
  elements: str
"""

from ansible_collections.gpunode.node.plugins.module_utils.gpunode import Gpunode

FLAGS = {
    "name": "--nvidia-runtime-name",
    "path": "--nvidia-runtime-path",
    "stop_containers": "--yes",
    "state": None,
    "also": None,
    "restart": None,
}
# unconfigure-runtime has no such options
ABSENT = {**FLAGS, "path": None, "set_as_default": None, "replace": None}


def main():
    gpunode = Gpunode(
        {
            "runtime": {"type": "list", "elements": "str", "default": ["auto"]},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "name": {"type": "str", "default": "nvidia"},
            "path": {"type": "str"},
            "set_as_default": {"type": "bool", "default": False},
            "cdi": {"type": "bool", "default": False},
            "also": {"type": "list", "elements": "str", "choices": ["cdi", "legacy"], "default": []},
            "config": {"type": "path"},
            "drop_in_config": {"type": "path"},
            "socket": {"type": "path"},
            "replace": {"type": "bool", "default": False},
            "restart": {"type": "bool", "default": True},
            "restart_command": {"type": "str"},
            "stop_containers": {"type": "bool", "default": False},
        }
    )
    params = gpunode.params
    if params["state"] == "present":
        words = ["configure-runtime", *gpunode.words(**FLAGS)]
        words += [f"--also={','.join(params['also'])}"] if params["also"] else []
    else:
        words = ["unconfigure-runtime", *gpunode.words(**ABSENT)]
    words += [] if params["restart"] else ["--no-restart"]
    envelope = gpunode.run(*words, *gpunode.dry_run)
    data = envelope["data"]
    engines = data.get("engines", [data])
    restarts = [engine["restart"] for engine in engines]
    if gpunode.check_mode:
        restarts = [one for one in restarts if one["verb"] in ("restart", "reload") and params["restart"]]
    else:
        restarts = [one for one in restarts if one["performed"]]
    gpunode.finish(
        envelope,
        changed=bool(restarts),
        entries=[change for engine in engines for change in engine["changes"]],
        engines=engines,
        restart_needed=any(one["verb"] == "restart" for one in restarts),
    )


if __name__ == "__main__":
    main()
