"""Single values, from whatever source."""

from __future__ import annotations

import math
import re

import pytest

from gpunode.commands.plugin_options import default_text
from gpunode.plugin.config.options import BY_FIELD, OPTIONS
from gpunode.plugin.config.resolve import option_value
from gpunode.plugin.config.settings import ALL_XIDS, Settings
from gpunode.plugin.config.values import parse


def value(field: str, *texts: str) -> object:
    return parse(BY_FIELD[field], texts)


def value_problem(field: str, *texts: str) -> str:
    """Why these texts aren't a valid value of that option; empty if they are."""
    try:
        value(field, *texts)
    except ValueError as error:
        return str(error)
    return ""


THEIRS = """
--mig-strategy | MIG_STRATEGY
  flags.migStrategy | none
--fail-on-init-error | FAIL_ON_INIT_ERROR
  flags.failOnInitError | true
--driver-root --nvidia-driver-root | NVIDIA_DRIVER_ROOT
  flags.nvidiaDriverRoot | /
--dev-root --nvidia-dev-root | NVIDIA_DEV_ROOT
  flags.nvidiaDevRoot |
--driver-root-ctr-path --container-driver-root | DRIVER_ROOT_CTR_PATH CONTAINER_DRIVER_ROOT
  flags.plugin.containerDriverRoot | /driver-root
--pass-device-specs | PASS_DEVICE_SPECS
  flags.plugin.passDeviceSpecs | false
--device-list-strategy | DEVICE_LIST_STRATEGY
  flags.plugin.deviceListStrategy | envvar
--device-id-strategy | DEVICE_ID_STRATEGY
  flags.plugin.deviceIDStrategy | uuid
--gdrcopy-enabled | GDRCOPY_ENABLED
  flags.gdrcopyEnabled | false
--gds-enabled | GDS_ENABLED
  flags.gdsEnabled | false
--mofed-enabled | MOFED_ENABLED
  flags.mofedEnabled | false
--cdi-annotation-prefix | CDI_ANNOTATION_PREFIX
  flags.plugin.cdiAnnotationPrefix | cdi.k8s.io/
--nvidia-cdi-hook-path --nvidia-ctk-path | NVIDIA_CDI_HOOK_PATH NVIDIA_CTK_PATH
  flags.plugin.nvidiaCTKPath | /usr/bin/nvidia-ctk
--mps-root | MPS_ROOT
  flags.mpsRoot |
--shared-devices-allocation-policy | SHARED_DEVICES_ALLOCATION_POLICY
  flags.plugin.sharedDevicesAllocationPolicy | distributed
--device-discovery-strategy | DEVICE_DISCOVERY_STRATEGY
  flags.deviceDiscoveryStrategy | auto
--imex-channel-ids | IMEX_CHANNEL_IDS
  imex.channelIDs |
--imex-required | IMEX_REQUIRED
  imex.required | false
--kubelet-socket | KUBELET_SOCKET
  flags.gpunode.kubeletSocket | /var/lib/kubelet/device-plugins/kubelet.sock
--config-file | CONFIG_FILE
   |
--cdi-feature-flags | CDI_FEATURE_FLAGS
  flags.gpunode.cdiFeatureFlags |
--cdi-disable-hooks | CDI_DISABLE_HOOKS
  flags.gpunode.cdiDisableHooks |
"""
"""NVIDIA's plugin 0.20: flags | variables, then key | default. Keys in flags.gpunode are ours alone."""


def test_every_option_of_the_nvidia_plugin_exists_with_its_default() -> None:
    there = (
        f"{' '.join(one.flags)} | {' '.join(one.variables)}\n  {one.key} | {default_text(one)}".rstrip()
        for one in OPTIONS
    )
    theirs = set(re.findall(r"^--.*\n  .*", THEIRS, re.MULTILINE))
    assert len(theirs) == 22
    assert theirs <= set(there)


def test_names_are_unique() -> None:
    flags = [flag for option in OPTIONS for flag in option.flags]
    variables = [name for option in OPTIONS for name in (option.variable, *option.variables)]
    keys = [option.key for option in OPTIONS if option.key]
    for names in (flags, variables, keys, [option.field for option in OPTIONS]):
        assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.field)
def test_every_default_is_a_valid_value(option) -> None:
    default = option_value(Settings(), option)
    if default is None:
        assert option.field in ("lenient", "kube_api_qps", "kube_api_burst")  # options without a kept default
        return
    text = ",".join(map(str, default)) if isinstance(default, list) else str(default)
    if option.kind in ("hold", "interval"):
        text = f"{default:g}s"
    text = text.lower() if option.kind == "boolean" else text
    given = parse(option, [text])
    assert (list(given) if isinstance(given, tuple) else given) == default


@pytest.mark.parametrize(
    "text", ["1", "t", "T", "true", "TRUE", "True", "0", "f", "F", "false", "FALSE", "False"]
)
def test_booleans_are_spelled_as_in_go(text: str) -> None:
    assert value("pass_device_specs", text) is (text in {"1", "t", "T", "true", "TRUE", "True"})


@pytest.mark.parametrize("text", ["yes", "on", "2", "", "tRue", "null"])
def test_other_spellings_are_not_booleans(text: str) -> None:
    assert "neither true nor false" in value_problem("pass_device_specs", text)


def test_lists_are_split_trimmed_and_deduplicated() -> None:
    assert value("device_list_strategy", " envvar , cdi-cri", "envvar") == ("envvar", "cdi-cri")
    assert value("cdi_disable_hooks", "") == ()
    assert "at least one of" in value_problem("device_list_strategy", ",")
    assert "'cdi' is not one of envvar" in value_problem("device_list_strategy", "envvar,cdi")
    assert value("mig_strategy", "single", "mixed") == "mixed"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60s", 60),
        ("1m30s", 90),
        ("500ms", 0.5),
        ("1.5h", 5400),
        ("0", 0),
        ("60", 60),
        ("infinite", math.inf),
        ("90000000000ns", 90),
    ],
)
def test_hold_down_times_are_go_durations(text: str, seconds: float) -> None:
    assert value("health_hold_down", text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("soon", "is not a duration"),
        ("-5s", "is not a duration"),
        ("25h", "not between"),
        ("1d", "is not a duration"),
        ("", "is not a duration"),
        ("s", "is not a duration"),
    ],
)
def test_invalid_hold_down_time_is_refused(text: str, message: str) -> None:
    assert message in value_problem("health_hold_down", text)


def test_health_poll_interval_is_bounded() -> None:
    assert "can't be monitored" in value_problem("health_poll_interval", "infinite")
    assert "not between 0.1s" in value_problem("health_poll_interval", "1ms")


def test_xids() -> None:
    assert value("health_disable", "xids, 31,31") == (ALL_XIDS, 31)
    assert value("health_disable", "ALL") == (ALL_XIDS,)
    for word in ("0", "-1", "ecc", "7x", "999999", "٣"):
        assert repr(word) in value_problem("health_enable", f"48,{word}")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("0", "0"),
        ("007", "7"),
        ("0:1", "0:1"),
        ("GPU-8a3b2c1d-0000-1111-2222-333344445555",) * 2,
        ("MIG-8a3b2c1d-0000-1111-2222-333344445555",) * 2,
        ("MIG-GPU-8a3b2c1d-0000-1111-2222-333344445555/1/0",) * 2,
        ("0000:3b:00.0",) * 2,
        ("00000000:3B:00.0",) * 2,
        ("3b:00.0",) * 2,
        ("*H100*",) * 2,
        ("NVIDIA H100 80GB HBM3",) * 2,
        ("1g.10gb",) * 2,
        ("amdgpu_xcp_3",) * 2,
    ],
)
def test_selectors(text: str, meant: str) -> None:
    assert value("include", text) == (meant,)


@pytest.mark.parametrize(
    "text", ["foo", "GPU-1234", "-1", "2.0", "0:1:2", "0:x", "MIG-GPU-1/2", "gpu0", "1 2", "zz:00.0", "GPU_1"]
)
def test_selector_that_never_matches_is_an_error(text: str) -> None:
    assert repr(text) in value_problem("exclude", text)


@pytest.mark.parametrize("text", ["127.0.0.1:9400", ":9400", "[::1]:9400", "localhost:1", ""])
def test_addresses(text: str) -> None:
    assert value("listen", text) == text


@pytest.mark.parametrize("text", ["9400", "127.0.0.1", "a:65536", "::1:9400", "a b:1", ":"])
def test_invalid_address_is_refused(text: str) -> None:
    assert "HOST:PORT" in value_problem("listen", text)


def test_only_imex_channel_zero_can_be_allocated() -> None:
    assert value("imex_channel_ids", "0") == (0,)
    assert value("imex_channel_ids", "") == ()
    assert "only channel 0" in value_problem("imex_channel_ids", "0,1")
