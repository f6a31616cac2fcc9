"""All mutants, in shards: each is noticed by its test. What ``scripts/mutants`` shows."""

from __future__ import annotations

import pytest

from tests.mutants.runner import try_mutants
from tests.mutants.tables import ALL

SHARDS = 24


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_mutant_is_noticed(shard: int) -> None:
    assert try_mutants(ALL[shard::SHARDS]) == []
