"""Every containerd file of the corpus on every containerd that is here; `config dump` judges."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.corpus_containerd import Containerd
from tests.integration.corpus_table import Key, Table, keys, table

pytestmark = pytest.mark.containerd


@pytest.fixture(scope="module")
def cells(request: pytest.FixtureRequest) -> Iterator[Table]:
    with table("containerd", Containerd.on, request) as made:
        yield made


@pytest.mark.parametrize("key", keys("containerd"))
def test_nothing_but_the_runtime_changes_and_it_goes_again(cells: Table, key: Key) -> None:
    cells.check(key)
