# SPDX-License-Identifier: Apache-2.0
"""Runs gpunode on the node and reads the JSON envelope that each of its commands prints."""

from __future__ import annotations

import json
import os
from pathlib import Path

API_VERSION = "gpunode/v1"
DIRECTORIES = ["/usr/local/bin", "/opt/gpunode/bin"]

COMMON = {"executable": {"type": "path"}, "root": {"type": "path"}}
KUBERNETES = {name: {"type": "str"} for name in ("kubeconfig", "context", "server", "node")}
"""Arguments as in the documentation fragments."""


class Gpunode:
    """The program on this node. A failure ends the module with one message."""

    def __init__(self, module):
        self._module = module
        self._program = self._find(module.params["executable"])

    def _find(self, given):
        if given is None:
            found = self._module.get_bin_path("gpunode", opt_dirs=DIRECTORIES)
        else:
            found = given if os.access(given, os.X_OK) and Path(given).is_file() else None
        if found is None:
            where = f"there is no program {given}" if given else "gpunode is not installed on this node"
            self._module.fail_json(
                msg=f"{where}; hint: install gpunode with the role gpunode.node.gpu_node,"
                " or set the option executable to its path",
                code="gpunode-missing",
            )
        return found

    def run(self, *words, accept=(0,), require=None, stdin=None):
        """The envelope of a command, whose exit code must be one of `accept`; its data must have the key
        `require`."""
        root = self._module.params["root"]
        argv = [self._program, *([f"--root={root}"] if root else []), *words, "-o", "json"]
        code, out, err = self._module.run_command(argv, data=stdin)
        envelope = _envelope(out)
        if envelope is None:
            self._module.fail_json(
                msg=f"{self._program} printed no envelope of gpunode (exit code {code}): {_last_line(err or out)}",
                code="no-envelope",
                command=argv,
                stdout=out,
                stderr=err,
            )
        if code not in accept or (require is not None and require not in envelope["data"]):
            self._module.fail_json(
                msg=_message(envelope, code, err),
                code=next((error.get("code", "") for error in envelope["errors"]), ""),
                errors=envelope["errors"],
                exit_code=code,
                rolled_back=code == 4,
                **({"data": envelope["data"]} if envelope["data"] else {}),
                command=argv,
            )
        for text in envelope["messages"]:
            if text.startswith("warning: "):
                self._module.warn(text[len("warning: ") :])
        return envelope

    def finish(self, envelope, changed, diffs=(), **values):
        """End the module with the result of a command."""
        if self._module._diff:
            values["diff"] = list(diffs)
        self._module.exit_json(changed=changed, messages=envelope["messages"], **values)


def flags(params, names):
    """Words of the command line for the parameters that are set: `names` maps a parameter to its option."""
    words = []
    for name, flag in names.items():
        value = params[name]
        if value is True:
            words.append(flag)
        elif isinstance(value, list):
            words += [f"{flag}={one}" for one in value]
        elif value is not None and value is not False:
            words.append(f"{flag}={value}")
    return words


def is_change(change):
    """Whether an entry of `changes` is one."""
    return change["action"] != "unchanged"


def diffs_of(changes):
    """Unified diffs of `changes` as Ansible prints them."""
    return [{"prepared": one["diff"]} for one in changes if one.get("diff")]


def _envelope(text):
    try:
        loaded = json.loads(text)
    except ValueError:
        return None
    if not isinstance(loaded, dict) or loaded.get("apiVersion") != API_VERSION:
        return None
    return loaded


def _message(envelope, code, err):
    texts = [
        f"{error['message']}; hint: {error['hint']}" if error.get("hint") else error["message"]
        for error in envelope["errors"]
    ]
    if not texts:
        texts = [f"gpunode failed with exit code {code}: {_last_line(err) or envelope['status']}"]
    return " | ".join(texts)


def _last_line(text):
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
