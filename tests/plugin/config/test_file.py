"""Config files as users write them, valid and invalid."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpunode.plugin.config.settings import ALL_XIDS, NameRule, SharedResource
from tests.plugin.config.resolving import FILES, problem_texts, resolve_text, sources

KNOWN_FILES = sorted(FILES.iterdir())
GPU = "nvidia.com/gpu"


def settings_of(name: str, **flags: str):
    return sources(flags, file=FILES / name).resolve().valid_settings()


@pytest.mark.parametrize("file", KNOWN_FILES, ids=lambda path: path.name)
def test_valid_files_are_accepted(file: Path) -> None:
    resolved = sources({"mps": "true"} if "mps" in file.name else {}, file=file).resolve()
    assert (resolved.problems, resolved.warnings) == ((), ())


def test_empty_file_changes_only_its_own_name() -> None:
    assert settings_of("empty.yaml", config_file="") != settings_of("readme-flags.yaml")
    assert settings_of("empty.yaml").sharing is None


def test_ten_slices() -> None:
    sharing = settings_of("time-slicing-ten.yaml").sharing
    assert sharing is not None
    assert (sharing.strategy, sharing.resources) == ("time-slicing", (SharedResource(GPU, 10),))
    assert (sharing.rename_by_default, sharing.fail_requests_greater_than_one) == (False, False)


def test_mps_container_may_request_one_share_by_default() -> None:
    for name, single in (("mps-ten.yaml", True), ("mps-many.yaml", False)):
        sharing = settings_of(name, mps="true").sharing
        assert sharing is not None and sharing.strategy == "mps"
        assert sharing.fail_requests_greater_than_one is single


def test_printed_configuration_of_the_nvidia_plugin_is_accepted() -> None:
    found = settings_of("mps-printed.json")
    assert (found.mig_strategy, found.mps_root, found.mps) == ("single", "/run/nvidia/mps", False)
    assert found.rules == (NameRule("gpu", "*", GPU), NameRule("mig", "*", GPU))
    assert found.sharing is not None and found.sharing.rename_by_default


def test_devices_are_all_a_number_or_a_list() -> None:
    sharing = settings_of("time-slicing-devices.yaml").sharing
    assert sharing is not None
    uuid = "GPU-8a3b2c1d-0000-1111-2222-333344445555"
    first, second, third = sharing.resources
    assert first.devices == ("0", "1", "2:0", "3:1", uuid, f"MIG-{uuid}/1/0")
    assert first.rename == "nvidia.com/gpu.shared"
    assert (second.devices, third.devices) == (2, None)


def test_case_is_ignored_as_in_the_nvidia_plugin() -> None:
    sharing = settings_of("time-slicing-lower-case.yaml").sharing
    assert sharing is not None
    assert sharing.resources == (SharedResource(GPU, 8),)


def test_comma_separated_string_is_split() -> None:
    assert settings_of("strategies-string.yaml").device_list_strategy == ("volume-mounts", "cdi-cri")
    assert settings_of("strategies-list.yaml").device_list_strategy == (
        "envvar",
        "cdi-annotations",
        "cdi-cri",
    )


def test_yaml_booleans_in_words_are_accepted() -> None:
    found = settings_of("operator-roots.yaml")
    assert (found.gds_enabled, found.mofed_enabled, found.gdrcopy_enabled) == (True, True, True)


def test_anchors_and_merges_are_resolved() -> None:
    found = settings_of("anchors.yaml")
    assert found.pass_device_specs
    assert found.sharing is not None
    assert found.sharing.resources == (SharedResource(GPU, 4), SharedResource("nvidia.com/other", 4))


def test_gpunode_section() -> None:
    found = settings_of("ours.yaml")
    assert (found.include, found.exclude) == (("*H100*", "0000:3b:00.0"), ("7",))
    assert (found.health.disabled, found.health.enabled) == (frozenset({ALL_XIDS}), frozenset({48, 79}))
    assert (found.health.hold_seconds, found.health.poll_seconds) == (90.0, 5.0)
    assert (found.registration, found.resource_name, found.listen) == (
        "watcher",
        "example.com/gpu",
        "127.0.0.1:9400",
    )


def test_names_without_a_domain_get_the_vendors(tmp_path: Path) -> None:
    text = "resources: {gpus: [{pattern: '*', name: big}]}"
    assert resolve_text(text, tmp_path / "c", vendor="amd").settings.rules[0].name == "amd.com/big"
    assert (
        resolve_text(f"{text}\nflags: {{gpunode: {{vendor: amd}}}}", tmp_path / "c").settings.rules[0].name
        == "amd.com/big"
    )
    assert resolve_text(text, tmp_path / "c").settings.rules[0].name == "nvidia.com/big"


SHARED = "sharing:\n  timeSlicing:\n    resources:\n    - {name: nvidia.com/gpu, replicas: 2}\n"
WRONG = {
    "version: v2": "1: version: unknown version 'v2'; the only one is v1",
    "flags:\n  migStratgy: none": "2: flags.migStratgy: unknown key; did you mean migStrategy?",
    "flags:\n  deviceListStrategy: envvar": "2: flags.deviceListStrategy: unknown key; its place is flags.",
    "flags:\n  plugin:\n    migStrategy: none": "3: flags.plugin.migStrategy: unknown key; its place is",
    "sharing:\n  timeSlicing:\n    replicas: 4": "3: sharing.timeSlicing.replicas: unknown key",
    "flags:\n- none": "2: flags: expected a mapping of",
    "flags: none": "1: flags: expected a mapping of",
    "flags:\n  failOnInitError: maybe": "2: flags.failOnInitError: 'maybe' is neither true nor false",
    "flags:\n  failOnInitError: [true]": "2: flags.failOnInitError: expected true or false; found a list",
    "flags:\n  plugin:\n    deviceListStrategy: []": "3: flags.plugin.deviceListStrategy: at least one of",
    "flags:\n  plugin:\n    deviceListStrategy: [{}]": "3: flags.plugin.deviceListStrategy: expected one or",
    "flags:\n  nvidiaDriverRoot: run": "2: flags.nvidiaDriverRoot: 'run' is not an absolute path",
    "imex:\n  channelIDs: [1]": "2: imex.channelIDs: only channel 0, or none, can be handed out",
    "health:\n  holdDown: 60": "2: health.holdDown: 60ns can",
    "health:\n  holdDown: 1.5": "2: health.holdDown: 1.5ns can",
    "health:\n  disable: [ecc]": "2: health.disable: 'ecc' is not an XID",
    "sharing:\n  mps:\n    resources: []": "3: sharing.mps.resources: at least one {name, replicas}",
    "sharing:\n  mps:\n    renameByDefault: true": "3: sharing.mps.resources: at least one",
    "sharing:\n  timeSlicing:\n    resources: 3": "3: sharing.timeSlicing.resources: expected a list; found",
    f"{SHARED}    - nvidia.com/gpu": "5: sharing.timeSlicing.resources[1]: expected a mapping of name",
    f"{SHARED}    -": "5: sharing.timeSlicing.resources[1]: expected a mapping",
    f"{SHARED}    - {{replicas: 2}}": "5: sharing.timeSlicing.resources[1].name: name is needed",
    f"{SHARED}    - {{name: a}}": "5: sharing.timeSlicing.resources[1].replicas: replicas is needed",
    f"{SHARED}    - {{name: a, replicas: 1}}": "5: sharing.timeSlicing.resources[1].replicas: '1' is not",
    f"{SHARED}    - {{name: a, replicas: 2.0}}": "5: sharing.timeSlicing.resources[1].replicas: '2.0' is not",
    f"{SHARED}    - {{name: a/b/c, replicas: 2}}": "5: sharing.timeSlicing.resources[1].name: 'a/b/c': ",
    f"{SHARED}    - {{name: a, Replicas: 2}}": "5: sharing.timeSlicing.resources[1].Replicas: unknown key;",
    f"{SHARED}    - {{name: a, replicas: 2, devices: 0}}": "resources[1].devices: '0' is neither all",
    f"{SHARED}    - {{name: a, replicas: 2, devices: 2.0}}": "resources[1].devices: '2.0' is neither all",
    f"{SHARED}    - {{name: a, replicas: 2, devices: -1}}": "resources[1].devices: '-1' is neither all",
    f"{SHARED}    - {{name: a, replicas: 2, devices: []}}": "resources[1].devices: a list is neither all",
    f"{SHARED}    - {{name: a, replicas: 2, devices: some}}": "resources[1].devices: 'some' is neither all",
    f"{SHARED}    - {{name: a, replicas: 2, devices: [x]}}": "resources[1].devices[0]: 'x' is not an index",
    f"{SHARED}    - {{name: a, replicas: 2, devices: [[0]]}}": "resources[1].devices[0]: expected an index",
    f"{SHARED}    - {{name: {'n' * 64}, replicas: 2}}": "resources[1].name: ",
    "resources:\n  gpus:\n  - {name: a}": "3: resources.gpus[0].pattern: pattern is needed",
    "resources:\n  gpus:\n  - {pattern: a}": "3: resources.gpus[0].name: name is needed",
    "resources:\n  mig:\n  - {pattern: a, name: A/b}": "3: resources.mig[0].name: 'A/b': ",
    "resources:\n  exclude: [tpyo]": "2: resources.exclude: 'tpyo' is not an index",
    "flags: {}\nFlags: {}": "2: Flags: the same key as on line 1, in other case",
    "flags:\n\tmigStrategy: none": "2: not YAML: YAML doesn't allow tabs for indentation; use spaces",
    "flags: {": "not YAML: ",
    "a:\n  b: 1\n c: 2": "3: not YAML: this line is indented by 1, but the block that started",
    "a:\n  b: 1\n   c: 2": "3: not YAML: a second ':' on a line, or a line that is indented further",
    "a: 1\nb: \x1b": "2: not YAML: the character U+001B isn't allowed",
    "flags: *nothing": "1: not YAML: ",
    "? [a]\n: b": "1: a key must be a string",
    "flags: !!python/object:os.system {}": "1: the tag !!python/object:os.system isn't allowed",
    "a: &a [*a]": "nested too deeply",
    "a: " + "[" * 40 + "]" * 40: "nested too deeply",
    "a: " + "[" * 5000: "nested too deeply",
    "- " * 5000: "nested too deeply",
    "just words": "1: expected a mapping of version, flags",
    "- 1": "1: expected a mapping of version, flags",
    "a: \x07": "not YAML: ",
    "apiVersion: v1\nkind: ConfigMap\ndata: {}": "1: this is a Kubernetes object",
    "default: |-\n  version: v1\n  flags: {}": "1: this is a ConfigMap's data: the config file is what",
    "config:\n  map: {}\nmigStrategy: none": "1: these are the values of the Helm chart",
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: " ".join(text.split())[:40])
def test_error_is_reported_with_line_and_key(text: str, tmp_path: Path) -> None:
    resolved = resolve_text(text, tmp_path / "c")
    assert any(WRONG[text] in one for one in problem_texts(resolved, tmp_path / "c")), problem_texts(
        resolved, tmp_path / "c"
    )


def test_settings_that_the_nvidia_plugin_ignores_are_ignored_with_a_warning(tmp_path: Path) -> None:
    """The last value of a key, the first document, and MPS of two sharing methods are used."""
    file = tmp_path / "c"
    mps = "  mps:\n    resources: [{name: gpu, replicas: 3}]\n"
    text = f"flags: {{migStrategy: mixed}}\nflags: {{migStrategy: single}}\n{SHARED}{mps}---\nversion: v2\n"
    resolved = resolve_text(text, file, mps="true")
    assert resolved.problems == ()
    assert [one.text.replace(f"{file}:", "") for one in resolved.warnings] == [
        "2: duplicate key flags: this value is used, the one on line 1 is ignored",
        "4: sharing.timeSlicing: a node shares in one way: sharing.mps counts, and this has no effect",
        "10: a second document, which is ignored: one file is one document",
    ]
    assert resolved.settings.mig_strategy == "single"
    assert resolved.settings.sharing is not None
    assert resolved.settings.sharing.strategy == "mps"
    assert resolved.settings.sharing.resources == (SharedResource(GPU, 3),)


def test_name_too_long_after_renaming_is_an_error(tmp_path: Path) -> None:
    name = "nvidia.com/" + "n" * 58
    text = f"sharing:\n  timeSlicing:\n    resources:\n    - {{name: {name}, replicas: 2}}\n"
    assert resolve_text(text, tmp_path / "c").problems == ()
    longer = text + "    renameByDefault: true\n"
    assert "with .shared behind it" in problem_texts(resolve_text(longer, tmp_path / "c"), tmp_path / "c")[0]


def test_all_errors_are_reported_in_file_order(tmp_path: Path) -> None:
    text = "resources:\n  exclude: [x]\nflags:\n  migStrategy: all\n  nope: 1\nhealth: []\nversion: 3\n"
    found = problem_texts(resolve_text(text, tmp_path / "c"), tmp_path / "c")
    assert [one.partition(":")[0] for one in found] == ["2", "4", "5", "6", "7"]


def test_lenient_turns_unknown_keys_and_invalid_xids_into_warnings(tmp_path: Path) -> None:
    text = "flags: {migStrategy: single, nope: 1}\nhealth: {disable: [ecc, 31]}\n"
    resolved = resolve_text(text, tmp_path / "c", lenient="true")
    assert resolved.problems == ()
    assert [one.key for one in resolved.warnings] == ["flags.nope", "health.disable"]
    assert resolved.settings.mig_strategy == "single"
    assert resolved.settings.health.disabled == {31}


def test_alias_bomb_ends_early(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    assert (
        "aliases resolved" in problem_texts(resolve_text("\n".join(lines), tmp_path / "c"), tmp_path / "c")[0]
    )


def test_unreadable_file_is_named_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "c"
    file.write_bytes(b"version: v1\nflags: {x: '\xff'}\n")
    assert problem_texts(sources(file=file).resolve(), file) == ["2: not UTF-8 text"]
    file.write_bytes(b"#" * 300_000)
    assert "exceed the limit of 262144" in problem_texts(sources(file=file).resolve(), file)[0]
    (problem,) = sources(file=tmp_path).resolve().problems
    assert problem.text == f"{tmp_path}: is a directory"
    (problem,) = sources(file=tmp_path / "gone").resolve().problems
    assert problem.text == f"{tmp_path}/gone: does not exist"


def test_config_manager_link_to_dev_null_is_an_empty_file(tmp_path: Path) -> None:
    link = tmp_path / "config.yaml"
    link.symlink_to("/dev/null")
    assert sources(file=link).resolve().problems == ()
