"""Settings of every test: randomness, order, and Ctrl-C.

The same examples are tried each time, so that a change fails because of itself; with the variable
GPUNODE_TEST_NEW_EXAMPLES set new ones are drawn. No example has a deadline, and none is too slow to generate:
the load of a busy machine says nothing about gpunode.
"""

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# a shell starts background jobs with SIGINT ignored, and every child inherits that
signal.signal(signal.SIGINT, signal.default_int_handler)

_SLOW = (HealthCheck.too_slow,)
settings.register_profile(
    "reproducible",
    derandomize=True,
    database=None,
    print_blob=True,
    deadline=None,
    suppress_health_check=_SLOW,
)
settings.register_profile("new each time", derandomize=False, deadline=None, suppress_health_check=_SLOW)
settings.load_profile("new each time" if os.environ.get("GPUNODE_TEST_NEW_EXAMPLES") else "reproducible")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups first, and of those the booted machines: one process runs a group, which may take minutes."""
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[bool, bool]:
    group = item.get_closest_marker("xdist_group")
    return group is None, group is not None and not group.args[0].startswith("machine-")
