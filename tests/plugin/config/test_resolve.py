"""Precedence, provenance, and options that contradict each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpunode.output.result import ExitCode
from gpunode.plugin.config.options import OPTIONS, PREFIX
from gpunode.plugin.config.settings import MPS_ROOT
from tests.plugin.config.resolving import FILES, resolve_text, sources


def test_flag_overrides_our_variable_then_theirs_then_the_file_then_the_default(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("version: v1\nflags:\n  migStrategy: single\n")
    theirs = {"MIG_STRATEGY": "none"}
    both = {**theirs, f"{PREFIX}MIG_STRATEGY": "mixed"}
    cases = [
        ({"mig_strategy": "single"}, both, "single", "--mig-strategy"),
        ({}, both, "mixed", "GPUNODE_PLUGIN_SERVE_MIG_STRATEGY"),
        ({}, theirs, "none", "MIG_STRATEGY"),
        ({}, {}, "single", f"{file}:3"),
    ]
    for flags, environ, value, origin in cases:
        resolved = sources(flags, environ, file).resolve()
        assert (resolved.valid_settings().mig_strategy, resolved.origins["mig_strategy"]) == (value, origin)
    assert "mig_strategy" not in sources().resolve().origins


def test_empty_variable_is_ignored(tmp_path: Path) -> None:
    environ = {"MIG_STRATEGY": "", "PASS_DEVICE_SPECS": "", "DEVICE_LIST_STRATEGY": "", "CONFIG_FILE": ""}
    resolved = sources({}, environ, FILES / "with-gfd.yaml").resolve()
    assert (resolved.valid_settings().mig_strategy, resolved.settings.pass_device_specs) == ("mixed", True)


def test_empty_flag_is_a_value() -> None:
    assert (
        sources({"kubelet_socket": ""}, {"KUBELET_SOCKET": "/x"}).resolve().valid_settings().kubelet_socket
        == ""
    )
    assert (
        sources({"imex_channel_ids": ""}, {"IMEX_CHANNEL_IDS": "0"}).resolve().settings.imex_channel_ids == ()
    )


@pytest.mark.parametrize("option", [one for one in OPTIONS if one.variables], ids=lambda one: one.field)
def test_every_variable_of_the_nvidia_plugin_is_read(option) -> None:
    text = {
        **{"boolean": "true", "path": "/x", "socket": "/x", "text": "/x", "integers": "0", "xids": "48"},
        **{"words": "all", "hold": "60s"},
    }.get(option.kind, option.allowed[-1] if option.allowed else "")
    for name in option.variables:
        resolved = sources({}, {name: text}).resolve()
        assert resolved.origins[option.field] == name


def test_health_variables_behave_as_documented() -> None:
    environ = {"DP_DISABLE_HEALTHCHECKS": "all", "DP_ENABLE_HEALTHCHECKS": "48"}
    health = sources({}, environ).resolve().valid_settings().health
    assert (health.disabled, health.enabled) == (frozenset({-1}), frozenset({48}))
    (problem,) = sources({}, {"DP_DISABLE_HEALTHCHECKS": "31,foo"}).resolve().problems
    assert problem.text.startswith("DP_DISABLE_HEALTHCHECKS: 'foo' is not an XID")
    lenient = sources({"lenient": "true"}, {"DP_DISABLE_HEALTHCHECKS": "31,foo"}).resolve()
    assert lenient.valid_settings().health.disabled == {31}
    assert [one.text for one in lenient.warnings] == [
        "DP_DISABLE_HEALTHCHECKS: 'foo' is not an XID; allowed are numbers from 1, all and xids; ignored"
    ]


def test_every_invalid_value_is_reported_with_its_source() -> None:
    resolved = sources({"mig_strategy": "all"}, {"GDS_ENABLED": "perhaps"}).resolve()
    assert [one.text for one in resolved.problems] == [
        "--mig-strategy: 'all' is not one of none, single, mixed",
        "GDS_ENABLED: 'perhaps' is neither true nor false",
    ]
    with pytest.raises(Exception, match="mig-strategy") as caught:
        resolved.valid_settings()
    assert caught.value.exit_code is ExitCode.USAGE  # type: ignore[attr-defined]


def test_mps_needs_an_option_that_selects_its_daemons() -> None:
    file = FILES / "mps-ten.yaml"
    (problem,) = sources(file=file).resolve().problems
    assert problem.key == "sharing.mps" and "--mps" in problem.hint
    assert sources({"mps_root": "/run/other"}, file=file).resolve().valid_settings().mps_root == "/run/other"
    assert sources({"mps": "true"}, file=file).resolve().valid_settings().mps_root == MPS_ROOT
    assert "gpunode starts no daemon" in sources({"mps": "true"}).resolve().warnings[0].text


def test_mps_and_mixed_exclude_each_other() -> None:
    resolved = sources({"mps": "true", "mig_strategy": "mixed"}, file=FILES / "mps-ten.yaml").resolve()
    (problem,) = resolved.problems
    assert "mig-strategy mixed (--mig-strategy)" in problem.text
    assert problem.text.startswith(f"{FILES}/mps-ten.yaml:2: sharing.mps: ")


def test_cdi_needs_no_driver_while_the_configuration_is_read() -> None:
    assert sources({"device_list_strategy": "cdi-annotations,cdi-cri"}).resolve().problems == ()


def test_amd_has_its_own_resource_name_and_no_mps(tmp_path: Path) -> None:
    assert sources({"vendor": "amd"}).resolve().valid_settings().resource_name == "amd.com/gpu"
    assert (
        sources({"vendor": "amd", "resource_name": "a/b"}).resolve().valid_settings().resource_name == "a/b"
    )
    text = "sharing: {mps: {resources: [{name: gpu, replicas: 2}]}}"
    resolved = resolve_text(text, tmp_path / "c", vendor="amd", mps="true")
    assert [one.key for one in resolved.problems] == ["sharing.mps", ""]


@pytest.mark.parametrize("prefix", ["cdi.k8s.io", "", "/", "CDI/", "cdi.k8s.io//"])
def test_invalid_annotation_prefix_gives_a_warning(prefix: str) -> None:
    flags = {"cdi_annotation_prefix": prefix, "device_list_strategy": "cdi-annotations"}
    (warning,) = sources(flags).resolve().warnings
    assert "cdi.k8s.io/" in warning.text
    del flags["device_list_strategy"]
    assert sources(flags).resolve().warnings == ()


def test_unknown_hooks_and_features_give_a_warning() -> None:
    resolved = sources({"cdi_disable_hooks": "update-ldcach", "cdi_feature_flags": "frobnicate"}).resolve()
    assert resolved.problems == ()
    assert sorted(one.text for one in resolved.warnings) == [
        "--cdi-disable-hooks: 'update-ldcach' is not known; did you mean update-ldcache?",
        "--cdi-feature-flags: 'frobnicate' is not known",
    ]
