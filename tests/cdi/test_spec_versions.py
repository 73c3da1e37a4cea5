"""Which specification an engine reads, and which one a specification needs."""

import pytest

from gpunode.cdi.spec import Edits, NodeEdit, Spec, SpecDevice, needed
from gpunode.cdi.versions import limit, reads
from gpunode.facts.daemons import Daemon


@pytest.mark.parametrize(
    ("engine", "release", "version"),
    [
        ("containerd", (1, 6, 20), None),
        ("containerd", (1, 7, 0), (0, 5, 0)),
        ("containerd", (1, 7, 24), (0, 7, 0)),
        ("containerd", (2, 0, 4), (0, 8, 0)),
        ("containerd", (2, 1, 9), (1, 0, 0)),
        ("containerd", (3, 0, 0), (1, 1, 0)),
        ("docker", (20, 10, 24), None),
        ("docker", (26, 0, 2), (0, 6, 0)),
        ("docker", (26, 1, 5), (0, 7, 0)),
        ("docker", (28, 5, 2), (1, 0, 0)),
        ("podman", (4, 0), None),
        ("podman", (4, 3, 1), (0, 5, 0)),
        ("podman", (5, 1), (0, 7, 0)),
        ("crio", (1, 24, 6), (0, 3, 0)),
        ("crio", (1, 30, 0), (0, 7, 0)),
        ("podman", (), (0, 5, 0)),
        ("another", (1, 0, 0), (0, 5, 0)),
    ],
)
def test_engine_release_determines_the_newest_readable_version(engine, release, version):
    assert reads(engine, release) == version


def test_oldest_reader_sets_the_version_and_engines_without_cdi_are_ignored():
    def daemon(name, *release):
        return Daemon(name, None, release, "", "", "", None)

    engines = (daemon("docker", 28, 5, 2), daemon("podman", 4, 3, 1), daemon("containerd", 1, 6, 20))
    assert limit(engines) == (0, 5, 0)
    assert limit(engines[2:]) == limit(()) == (1, 1, 0)


def test_required_version_follows_from_the_fields_used():
    plain = SpecDevice("GPU-1", Edits(nodes=(NodeEdit("/dev/a"),)))
    moved = SpecDevice("GPU-1", Edits(nodes=(NodeEdit("/dev/a", "/b/dev/a"),)))
    assert needed(Spec("nvidia.com/gpu", (plain,), Edits())) == (0, 3, 0)
    assert needed(Spec("nvidia.com/gpu", (plain, SpecDevice("0", Edits())), Edits())) == (0, 5, 0)
    assert needed(Spec("nvidia.com/gpu", (moved,), Edits())) == (0, 5, 0)
    assert needed(Spec("nvidia.com/gpu.shared", (plain,), Edits())) == (0, 6, 0)
