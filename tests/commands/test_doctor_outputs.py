"""The formats of a report, through the command line: JSON, YAML, metrics, a page, a file; comparisons."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from fixtures.machines import machine, recorded_host
from gpunode.commands import doctor, doctor_compare
from gpunode.commands.demo import build_machine
from gpunode.errors import ConfigError, UsageError
from gpunode.host import Host
from gpunode.output.html import page
from gpunode.output.prometheus import metrics
from gpunode.output.render import plain_lines
from gpunode.output.result import ExitCode
from tests.cli import gpunode
from tests.silent import SilentProgress

UNITS = Path(__file__).parents[2] / "packaging"
SAMPLE = re.compile(
    r'[a-z_:]+(\{[a-z]+="(?:[^"\\\n]|\\["\\n])*"(,[a-z]+="(?:[^"\\\n]|\\["\\n])*")*\})? [0-9.e+-]+'
)


def envelope(host):
    return json.loads(json.dumps(doctor.run(host, SilentProgress()).envelope()))


@pytest.fixture
def root(tmp_path):
    return recorded_host("driver-lib-mismatch", tmp_path / "m").root


def test_json_and_yaml_have_equal_content_and_exit_code(root):
    as_json = gpunode("--root", str(root), "doctor", "-o", "json")
    as_yaml = gpunode("--root", str(root), "doctor", "-o", "yaml")
    assert as_json.code == as_yaml.code == ExitCode.FAILED
    first, second = as_json.document, yaml.safe_load(as_yaml.out)
    for one in (first, second):
        assert {"at", "seconds"} <= set(one["data"])
        one["data"] |= {"at": 0, "seconds": 0}
        for finding in one["data"]["findings"]:
            finding["milliseconds"] = 0
    assert first == second
    assert first["data"]["first"] == "driver-lib-mismatch"
    assert "kubelet-not-running" not in first["data"]["chains"]
    assert "nvml-hang" in first["data"]["chains"]["driver-lib-mismatch"]


def test_metrics_are_accepted_by_a_textfile_collector(root):
    ran = gpunode("--root", str(root), "doctor", "-o", "prometheus")
    assert ran.code == ExitCode.FAILED and ran.out.endswith("\n")
    lines = ran.out.splitlines()
    assert [line for line in lines if not line.startswith("# ") and not SAMPLE.fullmatch(line)] == []
    assert len(lines) == len(set(lines))
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(typed) == len(set(typed))
    assert {line.partition("{")[0].split()[0] for line in lines if line[0] != "#"} == set(typed)
    labels = 'id="driver-lib-mismatch",layer="driver",status="fail",severity="error"'
    assert f"gpunode_doctor_finding{{{labels}}} 1" in lines
    assert "gpunode_doctor_ok 0" in lines


def test_node_name_cannot_end_a_metric_label(tmp_path):
    report = envelope(recorded_host("healthy-h100", tmp_path / "m"))
    report["data"]["node"]["kernel"] = 'a"} 1\nevil{x="\\'
    text = metrics(report)
    assert 'kernel="a\\"} 1\\nevil{x=\\"\\\\"' in text
    assert [one for one in text.splitlines() if one[0] != "#" and not SAMPLE.fullmatch(one)] == []


def test_prometheus_parser_reads_the_same_values(tmp_path):
    parser = pytest.importorskip("prometheus_client.parser")
    report = envelope(recorded_host("driver-lib-mismatch", tmp_path / "m"))
    odd = 'a"b\\c\nd\té ×'
    report["data"]["node"] |= {"kernel": odd, "engines": [{"name": odd, "version": ""}] * 2}
    samples = [
        one for family in parser.text_string_to_metric_families(metrics(report)) for one in family.samples
    ]
    series = [(one.name, tuple(sorted(one.labels.items()))) for one in samples]
    assert len(series) == len(set(series)) > 20
    (info,) = (one for one in samples if one.name == "gpunode_node_info")
    assert info.labels["kernel"] == odd
    assert all(one.timestamp is None for one in samples)
    (when,) = (one.value for one in samples if one.name.endswith("last_run_timestamp_seconds"))
    assert abs(when - report["data"]["at"]) < 0.01


def test_healthy_node_has_no_finding_metric(tmp_path):
    text = metrics(envelope(recorded_host("healthy-docker-rocky9", tmp_path / "m")))
    assert "gpunode_doctor_finding" not in text
    assert "gpunode_doctor_ok 1\n" in text


@pytest.mark.parametrize(
    ("name", "start"),
    [("n.html", "<!doctype html>"), ("n.prom", "# HELP"), ("n.json", "{"), ("n.txt", "1 error: ")],
)
def test_file_is_written_atomically_in_the_format_of_its_extension(name, start, root, tmp_path):
    place = tmp_path / name
    ran = gpunode("--root", str(root), "doctor", "--output-file", str(place))
    assert (ran.code, ran.out) == (ExitCode.FAILED, "")
    assert place.read_text().startswith(start)
    assert stat.S_IMODE(place.stat().st_mode) == 0o644
    assert sorted(tmp_path.iterdir()) == [root, place]


def test_unwritable_file_is_refused_before_the_node_is_examined(root):
    for path in ("/nowhere/at/all.prom", "/dev/null/x", "/etc"):
        ran = gpunode("--root", str(root), "doctor", "--output-file", path)
        assert ran.code == ExitCode.USAGE and path in ran.err


def test_ending_of_no_report_is_refused_unless_the_format_is_given(root, tmp_path):
    path = tmp_path / "n.pdf"
    ran = gpunode("--root", str(root), "doctor", "--output-file", str(path))
    assert (ran.code, ran.out, path.exists()) == (ExitCode.USAGE, "", False)
    assert ran.err == (
        f"error: --output-file {path}: '.pdf' is not the ending of a report\n"
        "hint: use .html, .json, .yaml, .prom or .txt, or choose the format with -o\n"
    )
    gpunode("--root", str(root), "doctor", "--output-file", str(path), "-o", "html")
    assert path.read_text().startswith("<!doctype html>")


def test_failed_write_keeps_the_old_file(root, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    place = tmp_path / "closed"
    place.mkdir()
    (place / "n.prom").write_text("old")
    place.chmod(0o500)
    assert gpunode("--root", str(root), "doctor", "--output-file", str(place / "n.prom")).code != 0
    assert (place / "n.prom").read_text() == "old"


@pytest.mark.parametrize("form", ["html", "prometheus"])
def test_other_commands_refuse_formats_they_do_not_support(form, root):
    for words in (("gpus",), ("explain",), ("explain", "pci-no-gpu"), ("doctor", "--fix")):
        ran = gpunode("--root", str(root), *words, "-o", form)
        assert ran.code == ExitCode.USAGE and ran.out == ""


def test_page_contains_its_report_and_loads_nothing(tmp_path):
    report = envelope(recorded_host("driver-lib-mismatch", tmp_path / "m"))
    text = page(report)
    inside = re.search(r'<script type="application/json" id="report">(.*?)</script>', text, re.DOTALL)
    assert inside is not None and json.loads(inside[1]) == report
    assert re.findall(r'(?:src|srcset|action|poster|background)\s*=\s*"', text) == []
    assert re.findall(r"<(?:link|img|iframe|object|embed|base)\b|@import|url\(", text) == []
    assert "default-src 'none'" in text


# --- comparing --------------------------------------------------------------------------------------------


def saved(tmp_path, name, label):
    spec = machine(name)
    spec["files"]["/proc/sys/kernel/hostname"] = label + "\n"
    report = envelope(Host(build_machine(spec, tmp_path / f"m-{label}"), environ={}))
    path = tmp_path / f"{label}.json"
    path.write_text(json.dumps(report))
    return str(path)


def test_compared_nodes_are_grouped_by_their_findings(tmp_path):
    paths = [
        saved(tmp_path, "healthy-h100", "a1"),
        saved(tmp_path, "healthy-h100", "a2"),
        saved(tmp_path, "docker-runtime-missing", "b1"),
    ]
    ran = gpunode("doctor", "--compare", *paths, "-o", "json")
    assert (ran.code, ran.document["kind"], ran.document["status"]) == (0, "DoctorComparison", "warn")
    data = ran.document["data"]
    assert [one["name"] for one in data["nodes"]] == ["a1", "a2", "b1"]
    kernel = next(one for one in data["differences"] if one["what"] == "kernel")
    assert [group["nodes"] for group in kernel["groups"]] == [["a1", "a2"], ["b1"]]
    (finding,) = data["findings"]
    assert finding["what"] == "docker-runtime-missing"
    assert {group["value"] for group in finding["groups"] if group["nodes"] == ["b1"]} <= {"fail", "warn"}
    assert gpunode("doctor", "--compare", *paths, "--strict").code == ExitCode.FAILED


def test_equal_nodes_are_reported_with_their_common_findings(tmp_path):
    paths = [saved(tmp_path, "driver-lib-mismatch", f"n{number}") for number in range(3)]
    result = doctor_compare.run(tuple(paths), strict=True)
    assert (result.status, result.exit_code, result.data.differences) == ("ok", ExitCode.OK, ())
    assert result.data.common == {"driver-lib-mismatch": "fail"}
    lines = [line for block in result.blocks for line in plain_lines(block)]
    assert lines[0] == "3 nodes, and they don't differ"


def test_nodes_with_equal_names_are_distinguished_by_file(tmp_path):
    path = saved(tmp_path, "healthy-docker-rocky9", "same")
    other = tmp_path / "other.json"
    other.write_text(Path(path).read_text())
    result = doctor_compare.run((path, str(other)))
    assert len({one.name for one in result.data.nodes}) == 2
    report = json.loads(Path(path).read_text())
    report["data"]["node"]["driver"] = "570.1"
    other.write_text(json.dumps(report))
    result = doctor_compare.run((path, str(other)))
    lines = [line for block in result.blocks for line in plain_lines(block)]
    assert lines[0] == "2 nodes, 1 difference" and any(str(other) in line for line in lines)


@pytest.mark.full
def test_thousand_nodes_are_printed_in_two_lines(tmp_path):
    text = Path(saved(tmp_path, "healthy-docker-rocky9", "n")).read_text()
    report = json.loads(text)
    paths = []
    for number in range(300):
        report["data"]["node"] |= {
            "name": f"n{number}.lab.example",
            "driver": "580.1" if number % 100 else "570.2",
        }
        paths.append(str(tmp_path / f"n{number}.json"))
        Path(paths[-1]).write_text(json.dumps(report))
    started = time.process_time()
    result = doctor_compare.run(tuple(paths))
    assert (
        time.process_time() - started < 30
    )  # 1.2 s on an idle machine; each further node costs as much as its file
    (driver,) = result.data.differences
    assert [(group.value, len(group.nodes)) for group in driver.groups] == [("580.1", 297), ("570.2", 3)]
    lines = [line for block in result.blocks for line in plain_lines(block)]
    assert lines[0] == "300 nodes (all of them in lab.example), 1 difference"
    assert lines[-1].split() == ["570.2", "3", "n0,", "n100,", "n200"]
    assert "and 291 more" in lines[-2]


def test_bundle_and_yaml_reports_can_be_compared(tmp_path, root):
    bundle = str(tmp_path / "b.tar.gz")
    assert gpunode("--root", str(root), "report", "--output-file", bundle).code == 0
    as_yaml = tmp_path / "n.yaml"
    gpunode("--root", str(root), "doctor", "--output-file", str(as_yaml))
    ran = gpunode("doctor", "--compare", bundle, str(as_yaml), "-o", "json")
    assert (ran.code, ran.document["status"]) == (0, "ok")


def fleet(place, *, nodes=("healthy-docker-rocky9", "driver-lib-mismatch", "driver-lib-mismatch")):
    """A file of lines: a report of each machine, a node that was not reached, one where the doctor failed."""
    lines = []
    for number, name in enumerate(nodes):
        report = json.loads(Path(saved(place, name, f"n{number}")).read_text())
        lines.append(json.dumps(report))
    for name, code in (("n8", "unreachable"), ("n9", "gpunode-missing")):
        error = {"code": code, "message": f"{name} <b>\x1b[2J"}
        report = {"kind": "DoctorReport", "status": "error", "data": {"node": {"name": name}}}
        lines.append(json.dumps(report | {"errors": [error]}))
    path = place / "fleet.jsonl"
    path.write_text("\n".join(lines) + "\n\n")
    return str(path)


def test_a_file_of_lines_groups_equal_findings_and_names_nodes_without_a_report(tmp_path):
    path = fleet(tmp_path)
    ran = gpunode("doctor", "--compare", path, "-o", "json")
    data = ran.document["data"]
    assert (ran.code, [one["name"] for one in data["nodes"]]) == (0, ["n0", "n1", "n2"])
    assert [(one["name"], one["code"]) for one in data["missing"]] == [
        ("n8", "unreachable"),
        ("n9", "gpunode-missing"),
    ]
    fault = data["faults"][0]
    assert (fault["id"], fault["status"], fault["nodes"]) == ("driver-lib-mismatch", "fail", ["n1", "n2"])
    assert fault["fixes"] == [{"command": "reboot", "nodes": ["n1", "n2"]}]
    table = gpunode("doctor", "--compare", path).out
    assert "  n8  unreachable      n8 <b>" in table and "\x1b" not in table


def test_the_page_of_a_fleet_is_complete_and_escaped(tmp_path):
    path = fleet(tmp_path)
    page_file = tmp_path / "fleet.html"
    ran = gpunode("doctor", "--compare", path, "--output-file", str(page_file))
    assert (ran.code, ran.out) == (0, "")
    text = page_file.read_text()
    assert gpunode("doctor", "--compare", path, "-o", "html").out == text
    assert "<h1>5 nodes</h1>" in text
    assert "1 unreachable, 1 without a report, 2 with errors, 1 without a fault" in text
    assert "2 of 3 nodes: n1, n2" in text and "<code>reboot" in text
    assert "n8 &lt;b&gt;\\x1b[2J" in text and "<b>" not in text
    unreachable = text.index("Unreachable nodes")
    assert unreachable < text.index("<code>n8</code>") < text.index("Nodes where the doctor did not run")


def test_a_fleet_of_which_no_node_has_a_report_is_a_page_too(tmp_path):
    path = fleet(tmp_path, nodes=())
    ran = gpunode("doctor", "--compare", path, "-o", "html")
    assert ran.code == 0 and "1 unreachable, 1 without a report" in ran.out
    assert gpunode("doctor", "--compare", path, "--strict").code == ExitCode.FAILED


def test_a_comparison_has_no_metrics(tmp_path):
    path = fleet(tmp_path)
    for words in (("-o", "prometheus"), ("--output-file", str(tmp_path / "fleet.prom"))):
        ran = gpunode("doctor", "--compare", path, *words)
        assert ran.code == ExitCode.USAGE and "is for a whole report" in ran.err
    assert not (tmp_path / "fleet.prom").exists()


def test_a_line_that_is_no_report_is_named_by_its_number(tmp_path):
    path = Path(fleet(tmp_path))
    path.write_text(path.read_text() + "{}\n")
    ran = gpunode("doctor", "--compare", str(path))
    assert ran.code == ExitCode.FAILED and f"{path}:7 is not a DoctorReport: it has no kind" in ran.err


MALFORMED = {
    "cut": '{"apiVersion": "gpunode/v1", "kind": "Doc',
    "empty": "",
    "a list": "[]",
    "another kind": '{"kind": "GpuInventory", "data": {}}',
    "a failed doctor": '{"kind": "DoctorReport", "status": "error", "data": {}}',
    "no node": '{"kind": "DoctorReport", "status": "ok", "data": {"findings": []}}',
    "wrong types": '{"kind": "DoctorReport", "status": "ok", "data": {"findings": 3, "node": {}}}',
    "a finding of text": '{"kind": "DoctorReport", "status": "ok", "data": {"findings": ["x"], "node": {}}}',
    "engines of text": (
        '{"kind": "DoctorReport", "status": "ok", "data": {"findings": [], "node": {"engines": ["x"]}}}'
    ),
    "nested too deep": "[" * 100_000,
    "bytes": "\udcff\udcfe",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_report_is_an_error_that_names_the_file(name, tmp_path):
    good = saved(tmp_path, "healthy-docker-rocky9", "good")
    bad = tmp_path / "bad.json"
    bad.write_bytes(MALFORMED[name].encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=re.escape(str(bad))):
        doctor_compare.run((good, str(bad)))


@pytest.mark.parametrize("options", ["--only wsl2", "--skip wsl2", "--expect-gpus 0", "--deep"])
def test_compare_refuses_options_that_have_no_effect(options, tmp_path):
    ran = gpunode("doctor", "--compare", "a.json", "b.json", *options.split())
    assert ran.code == ExitCode.USAGE and f"{options.split()[0]} is for a diagnosis" in ran.err


def test_compare_ignores_environment_variables_of_doctor(tmp_path):
    paths = [saved(tmp_path, "healthy-docker-rocky9", name) for name in ("a", "b")]
    assert gpunode("doctor", "--compare", *paths, env={"GPUNODE_DOCTOR_EXPECT_GPUS": "0"}).code == 0


def test_untrusted_report_forges_no_row(tmp_path):
    path = saved(tmp_path, "healthy-docker-rocky9", "good")
    report = json.loads(Path(path).read_text())
    report["data"]["node"] |= {"name": "x\n  580.1  99  all\x1b[2J\u202e", "kernel": "\r\n" + "k" * 5000}
    report["data"]["at"] = float("nan")
    report["data"]["findings"].append({"id": "a\nb", "status": "fail"})
    (tmp_path / "evil.json").write_text(json.dumps(report))
    ran = gpunode("doctor", "--compare", path, str(tmp_path / "evil.json"))
    assert ran.code == 0 and "\x1b" not in ran.out and "\u202e" not in ran.out
    assert all(len(line) < 400 for line in ran.out.splitlines())
    assert [line for line in ran.out.splitlines() if line.split()[:2] == ["580.1", "99"]] == []
    whole = gpunode("doctor", "--compare", path, str(tmp_path / "evil.json"), "-o", "json")
    assert "NaN" not in whole.out


def test_yaml_aliases_do_not_expand_without_limit(tmp_path):
    good = saved(tmp_path, "healthy-docker-rocky9", "good")
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    lines += ["kind: DoctorReport", "status: ok", "data: {findings: [], node: {name: *a9, kernel: *a9}}"]
    (tmp_path / "laughs.yaml").write_text("\n".join(lines))
    ran = gpunode("doctor", "--compare", good, str(tmp_path / "laughs.yaml"), "-o", "json")
    assert ran.code == 0 and len(ran.out) < 10_000


def test_compare_needs_two_reports_and_hints_how_to_get_them(tmp_path):
    with pytest.raises(UsageError, match="two nodes or more"):
        doctor_compare.run(("one.json",))
    ran = gpunode("doctor", "--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "-o", "json")
    assert (ran.code, ran.document["status"]) == (ExitCode.FAILED, "error")
    assert "a.json doesn't exist" in ran.err


# --- the units --------------------------------------------------------------------------------------------


def test_service_may_write_only_the_collectors_file():
    text = (UNITS / "gpunode-doctor.service").read_text()
    start = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    place = next(line for line in text.splitlines() if line.startswith("ReadWritePaths=")).partition("=")[2]
    assert start.split()[1:3] == ["doctor", "--output-file"]
    assert Path(start.split()[-1]).parent == Path(place) and start.endswith(".prom")
    assert "SuccessExitStatus=1" in text and "ProtectSystem=strict" in text
    assert "WantedBy=timers.target" in (UNITS / "gpunode-doctor.timer").read_text()


HIDING = {
    "ProtectKernelModules": "/lib/modules, where the next kernel's module lies",
    "PrivateNetwork": "/proc/net/unix",
    "PrivateTmp": "/tmp/nvidia-mps",
    "PrivateDevices": "/dev/nvidia*",
    "DeviceAllow": "/dev/nvidia*",
    "DevicePolicy": "/dev/nvidia*",
    "ProtectClock": "/dev/nvidia*",
    "ProtectKernelLogs": "/dev/kmsg",
    "ProtectProc": "other users' processes",
    "ProcSubset": "/proc/driver",
    "PrivateUsers": "what root may read",
    "InaccessiblePaths": "",
    "TemporaryFileSystem": "",
}


def test_service_sandbox_hides_nothing_that_checks_read():
    """Files hidden by a sandbox look missing: a false alarm every five minutes."""
    lines = (UNITS / "gpunode-doctor.service").read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    assert {name: settings[name] for name in HIDING if name in settings} == {}
    assert settings["ProtectHome"] == "read-only"
    assert {"CAP_SYS_MODULE", "CAP_MKNOD"}.isdisjoint(settings["CapabilityBoundingSet"].split())
    assert settings["SystemCallErrorNumber"] == "EPERM"  # not a signal, which would end NVML's child


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze isn't installed")
def test_systemd_accepts_the_units(tmp_path):
    for name in ("gpunode-doctor.service", "gpunode-doctor.timer"):
        text = (UNITS / name).read_text()
        (tmp_path / name).write_text(text.replace("/usr/local/bin/gpunode", sys.executable))
    argv = ["systemd-analyze", "verify", str(tmp_path / "gpunode-doctor.timer")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if "gpunode-doctor" in line] == []
