"""The worlds that the tests of this folder share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
torch.set_num_threads(1)  # threads that wait for each other by spinning take the CPU of other tests

from tests.lib.rank_pool import Worlds  # noqa: E402


@pytest.fixture(scope="session")
def worlds(request: pytest.FixtureRequest) -> Iterator[Worlds]:
    """
    Call it with a size to get that many ranks.

    They have imported what test modules of this session name in RANK_IMPORTS: once, in the process
    that forks them.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the fork server's torch
    modules = {item.module for item in request.session.items if isinstance(item, pytest.Function)}
    made = Worlds({name for module in modules for name in getattr(module, "RANK_IMPORTS", ())})
    yield made
    made.close()
