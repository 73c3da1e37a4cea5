"""`gpunode report` and `doctor --root BUNDLE`: the same findings elsewhere, and no private data."""

import gzip
import io
import json
import stat
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.machines import HEALTHY, machine, names, options, recorded_host
from fixtures.scenario import Fault, mig_machine, mixed_layout, with_mig
from fixtures.stubs import have_compiler, stub_node
from gpunode.checks.runner import run_checks
from gpunode.commands import report
from gpunode.commands.demo import build_machine
from gpunode.errors import ConfigError, PreconditionError, UsageError
from gpunode.facts.node import Node
from gpunode.host import Host, bundle
from gpunode.output.result import ExitCode
from tests.cli import gpunode
from tests.silent import silent_session

UUID = "GPU-4e1a2b6c-89d0-4f51-9c3e-7a0b1c2d3e01"


def findings(host):
    return {one.id: replace(one, milliseconds=0) for one in run_checks(Node(host))}


def bundle_of(host, path, **chosen):
    result = report.report(silent_session(host), str(path), **chosen)
    assert result.data.path == str(path)
    return result


def texts(path):
    """Every file of a bundle as text, by its name below the top directory."""
    found = {}
    with tarfile.open(path) as bundle:
        for member in bundle:
            stream = bundle.extractfile(member)
            if stream is not None:
                found[member.name.partition("/")[2]] = stream.read().decode("utf-8", "surrogateescape")
    return found


# every machine takes minutes; which faults are in this selection changes with each new machine
SOME = [name for name in names()[::8] if not options(name)]


@pytest.mark.full
@pytest.mark.parametrize("name", sorted({*HEALTHY, *SOME}))
def test_bundle_gives_the_findings_of_the_machine(name, tmp_path):
    host = recorded_host(name, tmp_path / "machine")
    bundle_of(host, tmp_path / "b.tar.gz")
    with bundle.unpacked(tmp_path / "b.tar.gz") as root:
        assert findings(Host(root, environ={})) == findings(host)


def test_findings_are_equal_without_names_and_uuids(tmp_path):
    host = recorded_host("driver-lib-mismatch", tmp_path / "machine")
    bundle_of(host, tmp_path / "b.tar.gz", redact=("all",))
    with bundle.unpacked(tmp_path / "b.tar.gz") as root:
        seen = findings(Host(root, environ={}))
    assert {one: finding.status for one, finding in seen.items()} == {
        one: finding.status for one, finding in findings(host).items()
    }


def named_machine(root):
    spec = machine("healthy-docker-rocky9")
    spec["files"] |= {
        "/proc/sys/kernel/hostname": "blackbird7.lab.example\n",
        "/etc/docker/daemon.json": json.dumps(
            {
                "runtimes": {"nvidia": {"path": "nvidia-container-runtime", "args": []}},
                "registry-mirrors": ["https://me:hunter2@mirror.lab.example"],
                "log-opts": {"splunk-token": "tok-5up3r"},
            }
        ),
    }
    info = spec["recording"]["daemons"]["/run/docker.sock"]["info"]
    info |= {
        "Name": "blackbird7",
        "HttpProxy": "http://me:hunter2@proxy:3128",
        "Labels": ["secret=opensesame"],
    }
    return Host(build_machine(spec, root), environ={})


def test_secrets_are_removed_and_names_only_on_request(tmp_path):
    host = named_machine(tmp_path / "machine")
    bundle_of(host, tmp_path / "plain.tar.gz")
    whole = "".join(texts(tmp_path / "plain.tar.gz").values())
    assert [word for word in ("hunter2", "tok-5up3r", "opensesame") if word in whole] == []
    assert "blackbird7" in whole
    bundle_of(host, tmp_path / "bare.tar.gz", redact=("hostnames", "uuids"))
    found = texts(tmp_path / "bare.tar.gz")
    inventory = host.recording["nvml"]["inventory"]["gpus"]
    hidden = ["blackbird7", "lab.example", *(gpu["uuid"].removeprefix("GPU-") for gpu in inventory)]
    assert [
        word for word in hidden if any(word in text or word in name for name, text in found.items())
    ] == []
    recorded = json.loads(found["machine/.gpunode/recording.json"])["nvml"]["inventory"]["gpus"]
    assert len({gpu["uuid"] for gpu in recorded}) == len(inventory)
    assert all(gpu["uuid"].startswith("GPU-00000000-") for gpu in recorded)


def test_only_the_name_of_foreign_processes_is_recorded(tmp_path):
    spec = machine("healthy-docker-rocky9")
    spec["files"] |= {"/proc/4242/cmdline": "/opt/payroll\0--report\0salaries\0", "/proc/4242/stat": ""}
    dockerd = next(
        path for path, text in spec["files"].items() if path.endswith("cmdline") and "dockerd" in text
    )
    spec["files"][dockerd.replace("cmdline", "environ")] = "PATH=/usr/bin\0MY_DIARY=dear\0"
    bundle_of(Host(build_machine(spec, tmp_path / "m"), environ={}), tmp_path / "b.tar.gz")
    found = texts(tmp_path / "b.tar.gz")
    assert found["machine/proc/4242/cmdline"] == "/opt/payroll\0"
    assert "dear" not in "".join(found.values())


def test_file_is_private_and_replaces_no_symlink_target(tmp_path):
    host = recorded_host("healthy-docker-rocky9", tmp_path / "m")
    other = tmp_path / "other"
    other.write_text("untouched")
    path = tmp_path / "b.tar.gz"
    path.symlink_to(other)
    bundle_of(host, path)
    assert other.read_text() == "untouched" and not path.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with tarfile.open(path) as bundle:
        tops = {member.name.partition("/")[0] for member in bundle}
    assert len(tops) == 1 and tops.pop().startswith("gpunode-report-")


def test_file_name_is_safe_for_any_host_name(tmp_path, monkeypatch):
    spec = machine("healthy-docker-rocky9")
    spec["files"]["/proc/sys/kernel/hostname"] = "../../etc/$(reboot)\n"
    monkeypatch.chdir(tmp_path)
    result = report.report(silent_session(Host(build_machine(spec, tmp_path / "m"), environ={})))
    assert Path(result.data.path).parent == tmp_path
    assert Path(result.data.path).name.startswith("gpunode-report-etc---reboot-")


@pytest.mark.parametrize(
    "chosen", [{"redact": ("everything",)}, {"output_file": "/"}, {"output_file": "/nowhere/at/all"}]
)
def test_contradicting_options_are_refused_before_work(chosen, tmp_path):
    with pytest.raises(UsageError):
        report.report(silent_session(Host(tmp_path / "missing", environ={})), **chosen)


def test_unreadable_file_stays_unreadable_in_the_bundle(tmp_path):
    spec = machine("healthy-h100")
    spec["recording"]["unreadable"] = {"/etc/docker/daemon.json": "can't read it: Permission denied"}
    host = Host(build_machine(spec, tmp_path / "m"), environ={})
    bundle_of(host, tmp_path / "b.tar.gz")
    with bundle.unpacked(tmp_path / "b.tar.gz") as root:
        finding = findings(Host(root, environ={}))["docker-config-invalid-json"]
    assert (finding.status.value, finding.skipped) == ("skip", "unreadable")


# --- untrusted bundles ----------------------------------------------------------------------------------


def archive(path, *entries, mode="w:gz"):
    """A bundle of (name, content or TarInfo) pairs."""
    with tarfile.open(path, mode) as out:
        for name, content in entries:
            entry = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            entry.name = name
            data = content if isinstance(content, bytes) else b""
            if isinstance(content, bytes):
                entry.size = len(data)
            out.addfile(entry, io.BytesIO(data))
    return path


def special(kind, target=""):
    entry = tarfile.TarInfo()
    entry.type, entry.linkname = kind, target
    return entry


FINE = ("t/machine/etc/hostname", b"node\n")
HOSTILE = {
    "a way up": [FINE, ("t/machine/../../../evil", b"x")],
    "an absolute path": [FINE, ("/t/machine/evil", b"x")],
    "a bare dot": [FINE, ("t/./machine/evil", b"x")],
    "a symlink": [FINE, ("t/machine/etc/link", special(tarfile.SYMTYPE, "/etc"))],
    "a file behind a symlink": [("t/machine/a", special(tarfile.SYMTYPE, "/tmp")), ("t/machine/a/b", b"x")],
    "a hard link": [FINE, ("t/machine/hard", special(tarfile.LNKTYPE, "/etc/shadow"))],
    "a device": [FINE, ("t/machine/dev/sda", special(tarfile.BLKTYPE))],
    "a pipe": [FINE, ("t/machine/fifo", special(tarfile.FIFOTYPE))],
    "the same file twice": [FINE, FINE],
    "a file where a directory is": [("t/machine/etc", b""), FINE],
    "a file where a file is a directory": [FINE, ("t/machine/etc/hostname/x", b"")],
    "too deep a path": [FINE, ("t/machine/" + "d/" * 80 + "x", b"")],
    "no machine": [("t/report.json", b"{}")],
    "links that are no object": [FINE, ("t/links.json", b"[]")],
    "a link out": [FINE, ("t/links.json", b'{"/../../evil": "/etc"}')],
    "a link over a file": [FINE, ("t/links.json", b'{"/etc/hostname": "/etc"}')],
    "a link behind a link": [FINE, ("t/links.json", b'{"/a": "/tmp", "/a/b": "/etc"}')],
    "links nested too deep": [FINE, ("t/links.json", b"[" * 200_000)],
    "a link to a number": [FINE, ("t/links.json", b'{"/a": 3}')],
    "a link behind a file": [FINE, ("t/links.json", b'{"/etc/hostname/x": "/etc"}')],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bundle_is_refused_by_name_and_writes_nothing_elsewhere(name, tmp_path, monkeypatch):
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    path = archive(tmp_path / "evil.tar.gz", *HOSTILE[name])
    with pytest.raises(ConfigError, match=r"evil\.tar\.gz is not a support bundle"), bundle.unpacked(path):
        pass
    assert sorted(tmp_path.iterdir()) == [path, place]
    assert list(place.iterdir()) == []


def test_decompression_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "MOST_BYTES", 8 << 20)
    path = tmp_path / "bomb.tar.gz"
    entry = tarfile.TarInfo("t/machine/zeros")
    entry.size = bundle.MOST_BYTES - (1 << 20)
    with gzip.open(path, "wb", compresslevel=1) as out:
        for number in range(2):
            entry.name = f"t/machine/zeros{number}"
            out.write(entry.tobuf())
            piece = bytes(1 << 20)
            for _ in range(entry.size >> 20):
                out.write(piece)
    with pytest.raises(ConfigError, match="unpacks to more than"), bundle.unpacked(path):
        pass


def test_too_many_entries_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "MOST_ENTRIES", 10)
    path = archive(tmp_path / "many.tar.gz", *((f"t/machine/{number}", b"") for number in range(12)))
    with pytest.raises(ConfigError, match="more than 10 entries"), bundle.unpacked(path):
        pass


def header(kind, name="x", size=0):
    entry = tarfile.TarInfo(name)
    entry.type, entry.size = kind, size
    return entry.tobuf(tarfile.GNU_FORMAT)


def extended(kind, text):
    return header(kind, size=len(text)) + text + bytes(-len(text) % 512)


def sparse(path="30 GNU.sparse.name=../../evil\n"):
    return extended(b"x", path.encode()) + header(b"0", "t/machine/f")


# headers on which the standard library's reader takes minutes or recurses, and others that no tar writes
HEADERS = {
    "a long pax number": extended(b"x", b"1" * 200_000 + b" "),
    "a pax header that names its letters": extended(b"x", b"20 hdrcharset=BINARY" + b"9" * 400_000),
    "a chain of long names": extended(b"L", b"abc\0") * 5000 + header(b"0", "t/machine/f"),
    "a chain of pax headers": extended(b"x", b"13 path=abcd\n") * 5000 + header(b"0", "t/machine/f"),
    "a sparse file": sparse(),
    "a map of a sparse file that is a bomb": extended(b"x", b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n")
    + header(b"0", "t/machine/f", 512)
    + b"99999999\n"
    + b"1\n" * (16 << 20),
    "headers of which each is long to read": (
        extended(b"x", b"1 " * 2000 + b"=") + header(b"0", "t/machine/f")
    )
    * 2,
    "a number that is too long": extended(b"x", b"1" * 400 + b" path=a\n") + header(b"0", "t/machine/f"),
    "a length that fits no integer": extended(b"x", b"9" * 200 + b" path=a\n") + header(b"0", "t/machine/f"),
    "a header for all members": extended(b"g", b"13 path=abcd\n") + header(b"0", "t/machine/f"),
    "a negative size in pax": extended(b"x", b"11 size=-5\n") + header(b"0", "t/machine/f"),
    "a size of pax that is a bomb": extended(b"x", b"19 size=9999999999\n") + header(b"0", "t/machine/f"),
    "a path of pax that leads out": extended(b"x", b"19 path=t/m/../evil\n") + header(b"0", "t/machine/f"),
    "no time": extended(b"x", b"13 mtime=nan\n") + header(b"0", "t/machine/f"),
    "half a record": extended(b"x", b"50 path=a\n") + header(b"0", "t/machine/f"),
    "a wrong check sum": header(b"0", "t/machine/f").replace(b"machine", b"MACHINE"),
    "a negative size": header(b"0", "t/machine/f", -1),
}


@pytest.mark.parametrize("before", [header(b"5", "t/machine/etc"), b""], ids=["later", "first"])
@pytest.mark.parametrize("name", HEADERS)
def test_invalid_tar_headers_are_refused_at_once(name, before, tmp_path):
    path = tmp_path / "odd.tar.gz"
    path.write_bytes(gzip.compress(before + HEADERS[name] + bytes(1024), 1))
    started = time.process_time()
    with pytest.raises(ConfigError, match=r"odd\.tar\.gz is not a support bundle"), bundle.unpacked(path):
        pass
    assert time.process_time() - started < 10


def test_bundle_that_takes_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "MOST_SECONDS", 0.0)
    path = archive(tmp_path / "slow.tar.gz", FINE)
    with pytest.raises(ConfigError, match=r"slow\.tar\.gz .* takes more than 0 s"), bundle.unpacked(path):
        pass


def test_slow_headers_end_with_the_time_limit(tmp_path, monkeypatch):
    """A kilobyte for each second that tarfile alone needs."""
    monkeypatch.setattr(bundle, "MOST_SECONDS", 1.0)
    records = b"1 " * 2000 + b"="
    path = tmp_path / "slow.tar.gz"
    path.write_bytes(gzip.compress((extended(b"x", records) + header(b"5", "t/machine/etc")) * 4000, 1))
    started = time.process_time()
    with pytest.raises(ConfigError, match=r"slow\.tar\.gz is not a support bundle"), bundle.unpacked(path):
        pass
    assert time.process_time() - started < 10


def test_number_of_empty_directories_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "MOST_DIRECTORIES", 100)
    files = [(f"t/machine/{number}/a/b/c/d/e", b"") for number in range(30)]
    links = {f"/{number}/a/b/c/d/e": "/x" for number in range(30)}
    entries = {"files": files, "links": [FINE, ("t/links.json", json.dumps(links).encode())]}
    for name, some in entries.items():
        path = archive(tmp_path / f"{name}.tar.gz", *some)
        with pytest.raises(ConfigError, match="more than 100 directories"), bundle.unpacked(path):
            pass


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_bundle_repacked_by_another_tar_is_read(form, tmp_path):
    names = ("etc/hostname", "long/" * 30 + "name", "n" * 120 if form != tarfile.USTAR_FORMAT else "n")
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz", format=form) as out:
        for name in names:
            entry = tarfile.TarInfo(f"t/machine/{name}")
            entry.size, entry.mtime = 3, 1234.5 if form == tarfile.PAX_FORMAT else 1234
            out.addfile(entry, io.BytesIO(b"abc"))
    with bundle.unpacked(tmp_path / "b.tar.gz") as root:
        assert [(root / name).read_bytes() for name in names] == [b"abc"] * 3
        assert int((root / names[1]).stat().st_mtime) == 1234


@pytest.mark.parametrize("cut", [0, 5, 40, -20])
def test_truncated_bundle_is_an_error_without_traceback(cut, tmp_path):
    host = recorded_host("healthy-docker-rocky9", tmp_path / "m")
    bundle_of(host, tmp_path / "b.tar.gz")
    path = tmp_path / "cut.tar.gz"
    path.write_bytes((tmp_path / "b.tar.gz").read_bytes()[: cut or None] if cut else b"")
    with pytest.raises(ConfigError, match="not a support bundle"), bundle.unpacked(path):
        pass


def test_file_modes_and_times_of_a_bundle_are_ignored(tmp_path):
    entry = tarfile.TarInfo()
    entry.mode, entry.mtime, entry.size = 0o6777, 1 << 60, 0
    path = archive(tmp_path / "odd.tar.gz", FINE, ("t/machine/bin/su", entry))
    with bundle.unpacked(path) as root:
        assert stat.S_IMODE((root / "bin/su").stat().st_mode) == 0o755
        assert (root / "bin/su").stat().st_uid == Path(tmp_path).stat().st_uid


# --- through the command line ----------------------------------------------------------------------------


def test_report_is_diagnosed_on_another_machine(tmp_path):
    host = recorded_host("driver-lib-mismatch", tmp_path / "m")
    path = tmp_path / "b.tar.gz"
    made = gpunode("--root", str(host.root), "report", "--output-file", str(path), "-o", "json")
    assert (made.code, made.document["kind"], made.document["status"]) == (0, "SupportBundle", "ok")
    assert made.document["data"]["doctor"]["first"] == "driver-lib-mismatch"
    looked = gpunode("doctor", "--root", str(path), "-o", "json")
    assert (looked.code, looked.document["data"]["first"]) == (ExitCode.FAILED, "driver-lib-mismatch")
    assert {"about.json", "report.json", "report.html", "links.json"} <= set(texts(path))


def cuts(document):
    return [[one["profile"] for one in gpu["instances"]] for gpu in document["data"]["gpus"]]


@pytest.mark.full
@pytest.mark.skipif(not have_compiler(), reason="gcc is not installed")
@pytest.mark.parametrize("hidden", [(), ("--redact", "all")], ids=["plain", "redacted"])
def test_bundle_contains_the_mig_layout(hidden, tmp_path):
    node = stub_node(tmp_path, with_mig(mig_machine("h100", "a30"), 0, mixed_layout(0)))
    path = str(tmp_path / "b.tar.gz")
    made = gpunode("report", "--output-file", path, *hidden, "-o", "json", env=node.env)
    assert (made.code, made.document["data"]["leftOut"]) == (0, {})
    there, here = (
        gpunode("mig", "list", *words, "-o", "json", env=node.env) for words in ((), ("--root", path))
    )
    assert there.code == here.code == 0
    if hidden:
        cuts = [[one["profile"] for one in gpu["instances"]] for gpu in here.document["data"]["gpus"]]
        assert cuts == [
            [one["profile"] for one in gpu["instances"]] for gpu in there.document["data"]["gpus"]
        ]
        assert there.document["data"]["gpus"][0]["uuid"] not in here.out
    else:
        assert here.document["data"] == there.document["data"]
    exported = gpunode("mig", "export", "--root", path, env=node.env)
    assert exported.code == 0
    assert exported.out == gpunode("mig", "export", env=node.env).out


@pytest.mark.full
@pytest.mark.skipif(not have_compiler(), reason="gcc is not installed")
def test_mig_layout_that_nvml_cannot_read_is_left_out_by_name(tmp_path):
    fault = Fault("nvmlGpuInstanceGetComputeInstances", abort=True)
    node = stub_node(tmp_path, with_mig(mig_machine("h100"), 0, mixed_layout(0)).with_faults(fault))
    path = str(tmp_path / "b.tar.gz")
    made = gpunode("report", "--output-file", path, env=node.env)
    assert made.code == 0
    assert "left out: MIG layouts: " in made.out
    looked = gpunode("mig", "list", "--root", path)
    assert looked.code == ExitCode.FAILED
    assert "nothing was recorded of this machine's MIG" in looked.err


def test_bundle_is_only_read(tmp_path):
    host = recorded_host("healthy-docker-rocky9", tmp_path / "m")
    bundle_of(host, tmp_path / "b.tar.gz")
    refused = gpunode("--root", str(tmp_path / "b.tar.gz"), "configure-runtime", "--runtime", "docker")
    assert refused.code == ExitCode.USAGE
    assert "can only be looked at" in refused.err


def test_output_names_the_redaction_and_the_command_that_reads_the_bundle(tmp_path):
    root, path = recorded_host("healthy-docker-rocky9", tmp_path / "m").root, tmp_path / "b.tar.gz"
    made = gpunode("--root", str(root), "report", "--redact", "uuids", "--output-file", str(path))
    assert made.out.splitlines()[2:] == [
        "redacted: secrets, uuids",
        "without host names and UUIDs: gpunode report --redact all",
        f"to read the doctor's report on any machine: gpunode doctor --root {path}",
    ]


def test_deeply_nested_recording_is_not_reported_as_our_bug(tmp_path):
    path = archive(tmp_path / "b.tar.gz", FINE, ("t/machine/.gpunode/recording.json", b"[" * 200_000))
    ran = gpunode("doctor", "--root", str(path))
    assert ran.code == ExitCode.FAILED
    assert "recording.json is nested too deep" in ran.err and "bug" not in ran.err


def test_file_that_is_no_bundle_is_named(tmp_path):
    (tmp_path / "x.tar.gz").write_bytes(b"not a bundle")
    ran = gpunode("doctor", "--root", str(tmp_path / "x.tar.gz"), "-o", "json")
    assert (ran.code, ran.document["status"]) == (ExitCode.FAILED, "error")
    assert "x.tar.gz is not a support bundle: it is not a gzip file\n" in ran.err


def test_unwritable_directory_is_reported_before_any_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.access", lambda place, mode: place != tmp_path)
    with pytest.raises(PreconditionError) as raised:
        report.report(silent_session(Host(tmp_path)))
    assert raised.value.message == f"can't write into {tmp_path}"
    assert raised.value.hint == "name another place: gpunode report --output-file PATH.tar.gz"
