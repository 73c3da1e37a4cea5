"""CUDA releases, brands, and images compared with the node."""

import pytest

from fixtures.machines import machine
from gpunode.commands.demo import build_machine
from gpunode.errors import DaemonError
from gpunode.facts import images
from gpunode.facts.cuda import (
    brands_of,
    driver_cuda,
    driver_version,
    first_for,
    judge_requirements,
    last_for,
    makes_code_for,
    newest_of,
    release,
    release_of,
    runs,
)
from gpunode.facts.images import Image, sample_cuda
from gpunode.facts.node import Node, Questions
from gpunode.host import Host
from gpunode.host.process import Completed
from tests.required import required


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12.8", (12, 8)),
        (" 12.8.1 ", (12, 8)),
        ("13.0.1.012", (13, 0)),
        ("12.4.0-rc1", (12, 4)),
        ("12", None),
        ("", None),
        ("cuda12.8", None),
        ("١٢.٨", None),
        ("12.8\n13.0", None),
    ],
)
def test_releases_are_two_numbers(text, expected):
    assert release_of(text) == expected


@pytest.mark.parametrize(
    ("wanted", "driver", "runs"),
    [
        ((13, 0), "580.65.06", True),
        ((13, 0), "575.57.08", False),
        ((12, 8), "525.60.13", True),
        ((12, 8), "525.60.11", False),
        ((12, 99), "535.54.03", True),
        ((11, 8), "450.80.02", True),
        ((10, 2), "440.33", True),
        ((10, 2), "418.39", False),
    ],
)
def test_any_driver_of_the_same_major_release_suffices(wanted, driver, runs):
    assert required(release(wanted)).runs_on(driver) is runs


@pytest.mark.parametrize(
    ("wanted", "offered", "answer"),
    [((99, 0), (13, 0), False), ((99, 1), (99, 0), None), ((99, 0), None, None), ((7, 5), (13, 0), True)],
)
def test_release_missing_in_the_table_is_unknown(wanted, offered, answer):
    assert release(wanted) is None
    assert runs(wanted, "580.65.06", offered)[0] is answer


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [
        ("615.71.09", (13, 4)),
        ("610.43.02", (13, 3)),
        ("580.159.03", (13, 0)),
        ("550.54.14", (12, 4)),
        ("535.309.01", (12, 2)),
        ("450.51.05", (11, 0)),
        ("450.36.06", (10, 2)),
        ("1.2", None),
    ],
)
def test_newest_cuda_of_a_driver_is_in_the_table(driver, cuda):
    assert newest_of(driver) == cuda


@pytest.mark.parametrize(
    ("wanted", "capability", "answer"),
    [
        ((13, 0), "7.0", "dropped"),
        ((12, 9), "7.0", "yes"),
        ((12, 4), "12.0", "too-early"),
        ((12, 8), "12.0", "yes"),
        ((99, 9), "9.0", "yes"),
        ((12, 8), "42.0", "unknown"),
        ((12, 8), "", "unknown"),
    ],
)
def test_gpus_that_a_release_generates_code_for(wanted, capability, answer):
    assert makes_code_for(wanted, capability) == answer
    assert (first_for("12.0"), last_for("7.0"), last_for("9.0")) == ("12.8", "12.9", "")


@pytest.mark.parametrize(
    ("name", "brands"),
    [
        ("NVIDIA GeForce RTX 4090", ("geforce", "geforcertx")),
        ("Tesla V100-PCIE-32GB", ("tesla", "nvidia")),
        ("NVIDIA H100 80GB HBM3", ("nvidia", "tesla")),
        ("GRID T4-8Q", ()),
        ("", ()),
    ],
)
def test_brands_follow_from_names(name, brands):
    assert brands_of(name) == brands


def test_sample_images_are_recognized_by_name_and_tag():
    assert sample_cuda("nvcr.io/nvidia/k8s/cuda-sample:vectoradd-cuda10.2") == "10.2"
    assert sample_cuda("docker.io/nvidia/samples:vectoradd-cuda11.2.1") == "11.2"
    assert sample_cuda("nvcr.io/nvidia/k8s/cuda-sample:vectoradd-cuda11.7.1-ubi8") == "11.7"
    assert sample_cuda("nvcr.io/nvidia/k8s/cuda-sample:vectoradd-cuda12.5.0@sha256:00") == "12.5"
    assert sample_cuda("nvidia/cuda:13.0.0-base") == ""
    assert sample_cuda("") == ""


def test_image_can_disable_its_requirements():
    named = {"NVIDIA_REQUIRE_CUDA": "cuda>=12.4", "NVIDIA_REQUIRE_JETPACK": "csv-mounts=all"}
    assert Image("Docker", named).requirements == {"NVIDIA_REQUIRE_CUDA": "cuda>=12.4"}
    assert Image("Docker", named | {"NVIDIA_DISABLE_REQUIRE": "true"}).requirements == {}
    assert Image("Docker", named | {"NVIDIA_DISABLE_REQUIRE": "0"}).requirements != {}


def node(root, name="healthy-h100", **recorded):
    spec = machine(name)
    for socket, answers in recorded.get("daemons", {}).items():
        spec["recording"]["daemons"].setdefault(socket, {}).update(answers)
    return Node(Host(build_machine(spec, root), environ={}), Questions(image="a:1"))


def test_engines_are_queried_in_order_until_one_has_the_image(tmp_path):
    here = {"/run/containerd/containerd.sock": {"images": {"a:1": {"Env": ["CUDA_VERSION=12.8.1", "odd"]}}}}
    search = node(tmp_path, daemons=here).image
    assert (search.held_not, search.silent) == (("Docker",), ())
    image = required(search.image)
    assert image.engine == "containerd"
    assert image.cuda == "12.8.1"


@pytest.mark.parametrize("wrong", [{}, {"a:1": None}, {"b:1": {}}])
def test_malformed_response_is_no_image(wrong, tmp_path):
    here = {
        "/run/docker.sock": {"images": wrong},
        "/run/containerd/containerd.sock": {"images": wrong},
    }
    search = node(tmp_path, daemons=here).image
    assert search.image is None
    assert search.held_not == ("Docker", "containerd")


def test_engine_that_does_not_respond_is_named(tmp_path, monkeypatch):
    asked = images._of_daemon

    def hangs(host, socket, *rest):
        if "docker" in socket:
            raise DaemonError("no answer within 3 s", code="timeout")
        return asked(host, socket, *rest)

    monkeypatch.setattr(images, "_of_daemon", hangs)
    search = node(tmp_path).image
    assert search.silent == ("Docker: no answer within 3 s",)
    assert search.held_not == ("containerd",)


@pytest.mark.parametrize(
    ("done", "found"),
    [
        (Completed((), 125, "", "no such image"), None),
        (
            Completed((), 0, '[{"Config": {"Env": ["CUDA_VERSION=12.8"]}}]', ""),
            {"Env": ["CUDA_VERSION=12.8"]},
        ),
        (Completed((), 0, "[]", ""), {}),
        (Completed((), 0, "garbled", ""), {}),
        (Completed((), 0, '[{"Config": 3}]', ""), {}),
    ],
)
def test_podman_is_queried_by_its_command(done, found, monkeypatch):
    monkeypatch.setattr(Host, "run", lambda *_, **__: done)
    assert images._of_podman(Host(), "a:1") == found


def test_hanging_podman_is_an_error(monkeypatch):
    monkeypatch.setattr(Host, "run", lambda *_, **__: Completed((), 124, "", "", timed_out=True))
    with pytest.raises(DaemonError):
        images._of_podman(Host(), "a:1")


def test_node_has_a_driver_and_its_cuda(tmp_path):
    spec = machine("healthy-h100")
    spec["recording"]["nvml"]["inventory"]["cudaVersion"] = "12.9"
    found = Node(Host(build_machine(spec, tmp_path), environ={}))
    assert (driver_version(found), driver_cuda(found)) == ("580.159.03", (12, 9))  # NVML's own name counts


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("cuda>=12.0", {True}),
        ("cuda>=13.9", {False}),
        ("cuda>=13.9 brand=tesla,driver>=535", {None}),  # an H100 is a Tesla to old drivers
        ("cuda>=13.9 brand=geforce,driver>=535", {False}),
        ("arch>=9.0", {True}),
        ("arch>=10.0", {False}),
    ],
)
def test_requirements_are_evaluated_for_every_gpu(text, answers, tmp_path):
    judged = judge_requirements(node(tmp_path), {"NVIDIA_REQUIRE_CUDA": text})
    assert len(judged) == 8
    assert {one.holds for one in judged} == answers


def test_expression_that_the_runtime_refuses_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="not a condition"):
        judge_requirements(node(tmp_path), {"NVIDIA_REQUIRE_CUDA": "gpu>=3"})
