"""The worlds that the tests of this folder share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
torch.set_num_threads(1)  # threads that wait for each other by spinning take the CPU of other tests

from tests.lib.rank_pool import Worlds  # noqa: E402


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Call it with a size to get that many ranks."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the fork server's torch
    made = Worlds()
    yield made
    made.close()
