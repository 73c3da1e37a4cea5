"""A DoctorReport as metrics in Prometheus' text format, for the textfile collector of its node exporter.

No sample has a timestamp: the collector refuses a file with one. docs/doctor.md lists the metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

_PROBLEMS = ("fail", "error", "warn")
_Family = tuple[str, str, list[tuple[Mapping[str, str], float]]]
"""One gauge: its name and meaning, and the labels and value of each sample."""


def metrics(envelope: Mapping[str, Any]) -> str:
    """The whole file, each line ending in a newline. A gauge without samples isn't written."""
    lines: list[str] = []
    for name, text, samples in _families(envelope):
        if samples:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
            lines += [f"{name}{_labels(labels)} {_number(value)}" for labels, value in samples]
    return "".join(f"{line}\n" for line in lines)


def _families(envelope: Mapping[str, Any]) -> Iterator[_Family]:
    data = envelope["data"]
    findings = data["findings"]
    yield (
        "gpunode_doctor_finding",
        "Always 1: a finding that is an error, a broken check (status error) or a warning.",
        [
            ({name: finding[name] for name in ("id", "layer", "status", "severity")}, 1)
            for finding in findings
            if finding["status"] in _PROBLEMS
        ],
    )
    yield (
        "gpunode_doctor_checks",
        "Number of checks by status.",
        [({"status": status}, number) for status, number in data["counts"].items()],
    )
    waiting = sum(finding["blockedBy"] is not None for finding in findings)
    yield (
        "gpunode_doctor_checks_waiting",
        "Number of checks that are skipped because of a root cause.",
        [({}, waiting)],
    )
    ok = envelope["status"] in ("ok", "warn")
    yield "gpunode_doctor_ok", "1 if no check found an error.", [({}, float(ok))]
    safe = data["reboot"]["safe"]
    yield (
        "gpunode_doctor_reboot_safe",
        "0 if a check found a problem that a reboot would cause.",
        [] if safe is None else [({}, float(safe))],
    )
    yield (
        "gpunode_doctor_table_age_seconds",
        "Age of each reference table that the checks use.",
        [({"table": table["name"]}, table["ageDays"] * 86400) for table in data["tables"]],
    )
    yield "gpunode_doctor_duration_seconds", "Duration of the checks.", [({}, data["seconds"])]
    yield "gpunode_doctor_last_run_timestamp_seconds", "Time when the checks ran.", [({}, data["at"])]
    yield from _node(data)


def _node(data: Mapping[str, Any]) -> Iterator[_Family]:
    node = data["node"]
    labels = {
        "class": node["class"],
        "distribution": (node["distro"] or {}).get("name", ""),
        "kernel": node["kernel"],
        "driver": node["driver"] or "",
        "toolkit": node["toolkit"],
        "version": data["version"],
    }
    yield "gpunode_node_info", "Always 1: the node and gpunode's version.", [(labels, 1)]
    models = Counter(gpu["name"] or gpu["deviceId"] for gpu in node["gpus"])
    yield (
        "gpunode_node_gpus",
        "GPUs on the bus, by model, or by PCI id if NVML was not queried.",
        [({"model": model}, number) for model, number in models.items()],
    )
    # each name and version once: two rootless daemons would produce the same series twice
    engines = dict.fromkeys((engine["name"], engine["version"]) for engine in node["engines"])
    yield (
        "gpunode_node_engine_info",
        "Always 1: a container engine of this node.",
        [({"engine": name, "version": version}, 1) for name, version in engines],
    )


def _labels(labels: Mapping[str, str]) -> str:
    pairs = [f'{name}="{_escaped(str(value))}"' for name, value in labels.items()]
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _escaped(value: str) -> str:
    """Prometheus' three escapes; bytes that are not UTF-8 are escaped too, because the file must be UTF-8."""
    value = value.encode("utf-8", "backslashreplace").decode()
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", " ")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.6g}" if value < 1e6 else f"{value:.3f}"
