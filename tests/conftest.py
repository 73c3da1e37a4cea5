"""Settings of every test: randomness, order, and Ctrl-C.

The same examples are tried each time, so that a change fails because of itself; with the variable
GPUNODE_TEST_NEW_EXAMPLES set new ones are drawn. No example has a deadline, and none is too slow to generate:
the load of a busy machine says nothing about gpunode.
"""

import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# Collected tests live as long as the process. Searching them for garbage is a quarter of the time that
# collecting them takes.
gc.disable()

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--first-parameters",
        action="store_true",
        help="run each parametrized test with its first parameters only: what a test reads from this machine"
        " depends on its code",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Groups first, because one process runs a group, and the longest groups before the others."""
    items.sort(key=_place)
    if config.getoption("--first-parameters"):
        first: dict[str, pytest.Item] = {}
        for item in items:
            first.setdefault(item.nodeid.partition("[")[0], item)
        kept = list(first.values())
        config.hook.pytest_deselected(items=[*set(items).difference(kept)])
        items[:] = kept


_LONGEST = ("test_fleet", "installed", "hostile_users", "soak")
"""Groups that take minutes, by a part of their names. The first one builds the packages; those that are not
listed would wait for them."""


def _place(item: pytest.Item) -> int:
    group = item.get_closest_marker("xdist_group")
    if group is None:
        return len(_LONGEST) + 2
    longest = [number for number, name in enumerate(_LONGEST) if name in group.args[0]]
    return longest[0] if longest else len(_LONGEST) + (not group.args[0].startswith("machine-"))
