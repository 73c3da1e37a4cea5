"""The program alone: only its files and the standard library, as in a container; and its kernel."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpunode
from fixtures.scenario import Fault, gpu_uuid, machine, mig_uuid, mixed_layout, with_mig
from gpunode.gpu import vectoradd
from gpunode.gpu.child import module_argv
from gpunode.gpu.vectoradd import PROGRAM_FILES, arguments, longest_run, read_answer
from tests.gpu.children import run_python

PACKAGE = Path(gpunode.__file__).parent


@pytest.fixture
def alone(tmp_path):
    """Runs the program from a directory that holds nothing but `PROGRAM_FILES`."""
    root = tmp_path / "alone"
    for name in PROGRAM_FILES:
        target = root / "gpunode" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / name, target)
    start = (
        f"import sys, runpy; sys.path.insert(0, {str(root)!r}); sys.argv[1:1] = [];"
        f" runpy.run_module({vectoradd.MODULE!r}, run_name='__main__', alter_sys=True)"
    )

    def run(env, *extra):
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", start, *extra],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stderr == ""
        return done.returncode, read_answer(done.stdout)

    return run


def test_package_files_alone_verify_every_gpu(alone, make_node):
    code, answer = alone(make_node(machine(2)).env)
    assert (code, answer.error) == (0, "")
    assert [(one.index, one.uuid, one.status) for one in answer.devices] == [
        (0, gpu_uuid(0), "ok"),
        (1, gpu_uuid(1), "ok"),
    ]
    assert all(one.elements == 1 << 20 and one.max_error == 0.0 for one in answer.devices)


def test_named_mig_devices_each_get_a_process_that_sees_them(alone, make_node):
    node = make_node(with_mig(machine(2), 1, mixed_layout(1)))
    uuids = [gpu_uuid(0), *(mig_uuid(1, i) for i in range(4))]
    code, answer = alone(node.env, *arguments(uuids, 30))
    assert code == 0
    assert [(one.uuid, one.status) for one in answer.devices] == [(uuid, "ok") for uuid in uuids]
    assert "MIG" in answer.devices[1].name


def test_without_names_a_lone_mig_gpu_uses_its_first_device(alone, make_node):
    code, answer = alone(make_node(with_mig(machine(1), 0, mixed_layout(0))).env)
    assert (code, [one.uuid for one in answer.devices]) == (0, [mig_uuid(0, 0)])


def test_cuda_visible_devices_limits_the_tested_devices(alone, make_node):
    code, answer = alone({**make_node(machine(4)).env, "CUDA_VISIBLE_DEVICES": "2,3"})
    assert (code, [one.uuid for one in answer.devices]) == (0, [gpu_uuid(2), gpu_uuid(3)])


@pytest.mark.parametrize("code", [3, 100, 802, 803, 999])
def test_failing_cuinit_is_reported_with_its_meaning(alone, make_node, code):
    exit_code, answer = alone(make_node(machine(1).with_faults(Fault("cuInit", code))).env)
    assert (exit_code, answer.devices, answer.code) == (1, (), code)
    assert answer.error.startswith("cuInit: CUDA_ERROR_")
    assert f"({code})" in answer.error


def test_unknown_device_fails_alone(alone, make_node):
    code, answer = alone(make_node(machine(1)).env, *arguments([gpu_uuid(0), gpu_uuid(9)], 30))
    assert (code, [one.status for one in answer.devices]) == (1, ["ok", "fail"])
    assert "CUDA_ERROR_NO_DEVICE" in answer.devices[1].message


def test_hanging_device_count_times_out(alone, make_node):
    node = make_node(machine(1).with_faults(Fault("cuInit", hang=60)))
    code, answer = alone(node.env, *arguments([], 1))
    assert (code, answer.devices) == (1, ())
    assert "did not end within 1 s" in answer.error


@pytest.mark.parametrize(
    "text",
    [
        "",
        "junk",
        "[]",
        "{}",
        "null",
        "[" * 100_000,
        '{"devices": 3, "error": null}',
        '{"devices": [{}], "error": null}',
        '{"devices": [{"index": Infinity, "max_error": null, "uuid": "", "name": ""}], "error": null}',
        '{"devices": [], "error": "x"}',
    ],
)
def test_invalid_response_is_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        read_answer(text)


def test_non_numeric_error_code_is_dropped():
    assert read_answer('{"devices": [], "error": {"message": "lost", "code": [3]}}').code is None


def test_noise_before_the_result_is_ignored():
    assert read_answer('a library says hello\n{"devices": [], "error": null}\n').devices == ()


def test_time_limit_allows_for_every_round():
    assert longest_run(1, 10) == longest_run(16, 10) < longest_run(17, 10)
    assert longest_run(0, 10) > 20, "counting the devices takes time of its own"


def test_kernel_assembles(tmp_path):
    if shutil.which("ptxas") is None:
        pytest.skip("ptxas is missing: the kernel can't be assembled here")
    (tmp_path / "kernel.ptx").write_text(vectoradd.VECTOR_ADD)
    done = subprocess.run(
        ["ptxas", "-arch=sm_75", "-o", tmp_path / "kernel.cubin", tmp_path / "kernel.ptx"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert vectoradd.ENTRY.encode() in (tmp_path / "kernel.cubin").read_bytes()


def test_kernel_targets_the_oldest_driver():
    lines = vectoradd.VECTOR_ADD.splitlines()
    assert lines[:3] == [".version 6.0", ".target sm_30", ".address_size 64"]


def test_result_is_one_json_line(alone, make_node):
    node = make_node(machine(1))
    done = subprocess.run(
        module_argv(vectoradd.MODULE),
        env={**os.environ, **node.env},
        capture_output=True,
        check=True,
    )
    assert set(json.loads(done.stdout)) == {"devices", "error"}


def test_environment_variables_that_falsify_the_proof_are_removed():
    script = (
        "import os, json, sys; sys.path.insert(0, sys.argv[1]); from gpunode.gpu import vectoradd\n"
        "vectoradd._prepare('GPU-x')\n"
        "print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('CUDA_')}))"
    )
    given = {"CUDA_DISABLE_PTX_JIT": "1", "CUDA_INJECTION64_PATH": "/x.so", "CUDA_VISIBLE_DEVICES": "3"}
    found = run_python(script, given, str(PACKAGE.parent))
    assert found == {
        "CUDA_CACHE_DISABLE": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "GPU-x",
    }


def test_sum_of_another_gpu_proves_nothing(make_node):
    """The stub respects CUDA_VISIBLE_DEVICES, so the selector is changed under the program."""
    script = (
        "import json; from gpunode.gpu.vectoradd import Target, try_all\n"
        f"[one] = try_all([Target(0, {gpu_uuid(1)!r}, {gpu_uuid(0)!r})], 30)\n"
        "print(json.dumps([one.status, one.message]))"
    )
    status, message = run_python(script, make_node(machine(2)).env)
    assert status == "fail"
    assert f"gave {gpu_uuid(1)}" in message
