# SPDX-License-Identifier: Apache-2.0
"""Runs gpunode on the node and reads the JSON envelope that each of its commands prints."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

API_VERSION = "gpunode/v1"
DIRECTORIES = ["/usr/local/bin", "/opt/gpunode/bin"]

COMMON = {"executable": {"type": "path"}, "root": {"type": "path"}}
KUBERNETES = {name: {"type": "str"} for name in ("kubeconfig", "context", "server", "node")}
PACKAGES = {
    "hold": {"type": "bool", "default": False},
    "key": {"type": "path", "no_log": False},
    "lock_timeout": {"type": "int", "default": 600},
}
"""Arguments as in the documentation fragments."""


class Gpunode:
    """A module that runs the program on this node. A failure ends the module with one message."""

    def __init__(self, options, **rules):
        """`options` are the module's own arguments, `rules` further ones of AnsibleModule."""
        self.module = AnsibleModule(argument_spec={**COMMON, **options}, supports_check_mode=True, **rules)
        self.params = self.module.params
        self.check_mode = self.module.check_mode
        self._options = options
        self._program = self._find(self.params["executable"])

    def words(self, **flags):
        """Words of the command line for the options that are set. An option is passed by its own name, unless
        `flags` has another name, or None to leave it out."""
        words = []
        for name in self._options:
            flag, value = flags.get(name, "--" + name.replace("_", "-")), self.params[name]
            if flag is None or value is None or value is False:
                continue
            if value is True:
                words.append(flag)
            else:
                words += [f"{flag}={one}" for one in (value if isinstance(value, list) else [value])]
        return words

    @property
    def dry_run(self):
        """The word that makes a command only print its plan, in check mode."""
        return ["--dry-run"] if self.check_mode else []

    def _find(self, given):
        if given is None:
            found = self.module.get_bin_path("gpunode", opt_dirs=DIRECTORIES)
        else:
            found = given if os.access(given, os.X_OK) and Path(given).is_file() else None
        if found is None:
            where = f"there is no program {given}" if given else "gpunode is not installed on this node"
            self.module.fail_json(
                msg=f"{where}; hint: install gpunode with the role gpunode.node.gpu_node,"
                " or set the option executable to its path",
                code="gpunode-missing",
            )
        return found

    def run(self, *words, accept=(0,), require=None, stdin=None):
        """The envelope of a command, whose exit code must be one of `accept`; its data must have the key
        `require`."""
        root = self.params["root"]
        argv = [self._program, *([f"--root={root}"] if root else []), *words, "-o", "json"]
        code, out, err = self.module.run_command(argv, data=stdin)
        envelope = _envelope(out)
        if envelope is None:
            self.module.fail_json(
                msg=f"{self._program} printed no envelope of gpunode (exit code {code}): {_last_line(err or out)}",
                code="no-envelope",
                command=argv,
                stdout=out,
                stderr=err,
            )
        if code not in accept or (require is not None and require not in envelope["data"]):
            self.module.fail_json(
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
                self.module.warn(text[len("warning: ") :])
        return envelope

    def finish(self, envelope, changed=False, entries=(), diffs=(), **values):
        """End the module with the result of a command. `entries` are those of `changes` in the envelope."""
        if self.module._diff:
            values["diff"] = [*diffs, *({"prepared": one["diff"]} for one in entries if one.get("diff"))]
        changed = changed or any(one["action"] != "unchanged" for one in entries)
        self.module.exit_json(changed=changed, messages=envelope["messages"], **values)


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
