"""Options that contradict each other are refused before anything is read or written; a variable is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli import gpunode


@pytest.mark.parametrize(
    ("argv", "error", "hint"),
    [
        ("gpus -q -v", "--quiet and --verbose exclude each other", "give one of them"),
        ("-o html gpus", "this command has no -o html", "only gpunode doctor has; use -o json"),
        (
            "plugin check-config a.yaml --config-file b.yaml",
            "both FILE and --config-file are given",
            "name the file once",
        ),
        (
            "mig apply -f a.yaml -c all-1g --persist --mode-only",
            "--persist applies a whole layout at boot",
            "leave --mode-only out",
        ),
        (
            "configure-runtime --runtime containerd --also cdi --nvidia-runtime-name nvidia-cdi",
            "the name nvidia-cdi is a variant's own",
            "choose another: --nvidia-runtime-name nvidia",
        ),
        (
            "doctor --output-file r.html -o json",
            "-o json contradicts the name r.html",
            "leave out -o: .html is enough",
        ),
        (
            "doctor --output-file node.json -o html",
            "-o html contradicts the name node.json",
            "leave out -o: .json is enough",
        ),
        (
            "labels --to stdout --output-file /x",
            "--output-file is for --to file",
            "add --to file, or leave --output-file out",
        ),
        (
            "labels --use-node-feature-api --to file",
            "--use-node-feature-api is for --to node-feature",
            "add --to node-feature, or leave --use-node-feature-api out",
        ),
        (
            "labels --node-name gpu-1",
            "--node is for --to node-feature or node",
            "add --to node-feature, or leave --node out",
        ),
        (
            "labels --watch --oneshot=true --to file --output-file /nowhere/gfd",
            "--watch and --oneshot exclude each other",
            "give one of them",
        ),
        ("setup --wait 5s", "--wait goes with --kubernetes", "add --kubernetes, or leave it out"),
        (
            "report --output-file x.zip",
            "--output-file x.zip: a bundle is a .tar.gz file",
            "name it so",
        ),
        ("manifests all --mps 0", "--mps: must be 1 to 48, not 0", "see gpunode manifests all --help"),
    ],
)
def test_options_that_exclude_each_other_are_refused(argv: str, error: str, hint: str) -> None:
    ran = gpunode(*argv.split())
    assert ran.code == 2 and (not ran.out or ran.document["status"] == "error")
    assert ran.err == f"error: {error}\nhint: {hint}\n"


def test_option_for_amd_warns_that_it_is_ignored_with_nvidia() -> None:
    ran = gpunode("labels", "--simulate", "h100:1", "--firmware")
    assert ran.code == 0
    assert "warning: --firmware: ignored: the vendor is nvidia" in ran.err


@pytest.mark.parametrize(
    ("argv", "variable", "value", "error"),
    [
        ("gpus -q", "GPUNODE_VERBOSE", "1", "--quiet and --verbose exclude each other"),
        ("doctor --output-file r.html", "GPUNODE_OUTPUT", "json", "-o json contradicts the name r.html"),
        (
            "doctor -o json",
            "GPUNODE_DOCTOR_OUTPUT_FILE",
            "r.html",
            "-o json contradicts the name r.html",
        ),
        (
            "configure-runtime --no-restart",
            "GPUNODE_CONFIGURE_RUNTIME_RESTART_COMMAND",
            "service docker restart",
            "--no-restart and --restart-command exclude each other",
        ),
        (
            "rollback --restart-command true",
            "GPUNODE_ROLLBACK_NO_RESTART",
            "1",
            "--no-restart and --restart-command exclude each other",
        ),
        (
            "doctor --only pci-no-gpu",
            "GPUNODE_DOCTOR_SKIP",
            "nvml-hang,pci-no-gpu:known",
            "pci-no-gpu is selected and skipped",
        ),
        (
            "doctor --skip pci-no-gpu",
            "GPUNODE_DOCTOR_ONLY",
            "pci-no-gpu",
            "pci-no-gpu is selected and skipped",
        ),
        (
            "node advertise --resource example.com/gpu --remove",
            "GPUNODE_NODE_ADVERTISE_COUNT",
            "4",
            "--count and --remove exclude each other",
        ),
    ],
)
def test_variable_that_contradicts_an_option_is_named(
    argv: str, variable: str, value: str, error: str
) -> None:
    ran = gpunode(*argv.split(), env={variable: value})
    assert ran.code == 2 and (not ran.out or ran.document["status"] == "error")
    assert ran.err.splitlines()[0] == f"error: {error} (set by {variable})"


def test_variable_names_itself_where_it_contradicts_the_vendor() -> None:
    ran = gpunode("labels", "--simulate", "h100:1", env={"GPUNODE_LABELS_FIRMWARE": "true"})
    assert ran.code == 0
    assert "warning: GPUNODE_LABELS_FIRMWARE: ignored: the vendor is nvidia" in ran.err


def test_report_compared_with_itself_is_refused(tmp_path: Path) -> None:
    for name in ("proc", "sys", "etc"):
        (tmp_path / name).mkdir()
    report = str(tmp_path / "node.json")
    gpunode("doctor", "--root", str(tmp_path), "--only", "pci-no-gpu", "--output-file", report)
    ran = gpunode("doctor", "--compare", report, report)
    assert ran.code == 2 and ran.err.startswith("error: --compare needs the reports of two nodes or more\n")


def test_text_file_takes_any_format(tmp_path: Path) -> None:
    for name in ("proc", "sys", "etc"):
        (tmp_path / name).mkdir()
    file = tmp_path / "report.txt"
    ran = gpunode("doctor", "--root", str(tmp_path), "--output-file", str(file), "-o", "json")
    assert ran.err == f"wrote {file}\n" and file.read_text().startswith("{")


def test_empty_config_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plugin.yaml"
    file.write_text("\n")
    ran = gpunode("plugin", "check-config", str(file))
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == f"error: {file} is empty\nhint: a config file begins with: version: v1\n"
    ran = gpunode("manifests", "all", "--config-file", str(file))
    assert (ran.code, ran.out) == (1, "") and ran.err.startswith(f"error: {file} is empty\n")
    nothing = gpunode("plugin", "check-config", "/dev/null", "--simulate", "h100:1")
    assert nothing.code == 0, nothing.err  # the config manager's word for no file
