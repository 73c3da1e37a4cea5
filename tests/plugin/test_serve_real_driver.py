"""The plugin with NVIDIA's own libnvidia-ml and no driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.test_nvml_real_libraries import libraries  # noqa: F401 - a fixture
from tests.plugin.serving import kubelet

pytestmark = pytest.mark.full


def test_missing_driver_is_named_and_waited_for(
    libraries: dict[str, str],  # noqa: F811
    short: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", libraries["LD_LIBRARY_PATH"])
    with kubelet(short) as (stub, start):
        serving = start()
        message = "waiting for the NVIDIA driver: the NVIDIA kernel module is not loaded"
        assert serving.says(message, 20), serving.log()
        assert (stub.registrations, serving.process.poll()) == ([], None)
        assert serving.end() == 0
        assert "Traceback" not in serving.log()
