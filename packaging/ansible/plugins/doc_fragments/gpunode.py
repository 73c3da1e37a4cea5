# SPDX-License-Identifier: Apache-2.0
"""Documentation that all modules share."""

from __future__ import annotations


class ModuleDocFragment:
    """Options and requirements of every module; C(KUBERNETES) of those that use an API server, C(PACKAGES)
    of those that install packages."""

    DOCUMENTATION = r"""
options:
  executable:
    description:
      - Path of the gpunode program on the node.
      - By default gpunode is looked for in E(PATH), V(/usr/local/bin) and V(/opt/gpunode/bin).
    type: path
  root:
    description:
      - Root directory to use instead of V(/), such as a mounted host or a recorded machine.
      - Nothing is restarted or queried there.
    type: path
requirements:
  - gpunode on the node; see the role P(gpunode.node.gpu_node#role)
author:
  - gpunode maintainers (!UNKNOWN)
"""

    KUBERNETES = r"""
options:
  kubeconfig:
    description:
      - Kubeconfig file on the node, or V(kubelet) for that of the kubelet.
    type: str
  context:
    description: Context of the kubeconfig.
    type: str
  server:
    description: URL of a kubectl proxy.
    type: str
  node:
    description: Name of the Node; by default the host name of the node.
    type: str
"""

    PACKAGES = r"""
options:
  key:
    description: File on the node with the signing key of the mirror.
    type: path
  hold:
    description: Exclude the packages from upgrades.
    type: bool
    default: false
  lock_timeout:
    description: Seconds to wait for another package manager.
    type: int
    default: 600
"""
