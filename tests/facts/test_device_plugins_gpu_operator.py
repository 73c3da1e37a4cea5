"""Files of the GPU operator on a node: directories of logs and the validator's markers."""

from gpunode.facts.device_plugins import VALIDATIONS, find_operator, stage_log
from gpunode.host import Host

PODS = "var/log/pods"
VALIDATOR = "gpu-operator_nvidia-operator-validator-h8k2d_3b6e"


def test_node_without_the_operator_has_none_of_its_parts(tmp_path):
    (tmp_path / PODS / "kube-system_coredns-x_1").mkdir(parents=True)
    (tmp_path / VALIDATIONS[1:]).mkdir(parents=True)
    (tmp_path / VALIDATIONS[1:] / "driver-ready").touch()
    found = find_operator(Host(tmp_path, environ={}))
    assert (found.pods, found.validators, found.ready) == ((), (), ())


def test_first_stage_without_its_marker_is_the_missing_one(tmp_path):
    (tmp_path / PODS / VALIDATOR).mkdir(parents=True)
    place = tmp_path / VALIDATIONS[1:]
    place.mkdir(parents=True)
    host = Host(tmp_path, environ={})
    assert find_operator(host).missing == "driver"
    for stage, missing in (("driver", "toolkit"), ("toolkit", "cuda"), ("cuda", "plugin"), ("plugin", "")):
        (place / f"{stage}-ready").touch()
        assert find_operator(host).missing == missing


def test_newest_log_of_a_stage_is_read(tmp_path):
    logs = tmp_path / PODS / VALIDATOR / "toolkit-validation"
    logs.mkdir(parents=True)
    for number in ("2", "10"):
        (logs / f"{number}.log").write_text(f"try {number}\n")
    (logs / "notes.log").write_text("no number\n")
    host = Host(tmp_path, environ={})
    operator = find_operator(host)
    found = stage_log(host, operator, "toolkit")
    assert found is not None and found[0].endswith("/10.log") and found[1] == ("try 10",)
    assert stage_log(host, operator, "cuda") is None
