"""A minute of the soak; `scripts/soak` runs ten."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bed.soak import soak


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_minute_of_random_faults(possible: None, tmp_path: Path) -> None:
    found = soak(minutes=1.0, seed=20261128, hosts=4, folder=tmp_path)
    assert not found.wrong, found.report()
    assert sum(found.counts.values()) >= 8, found.report()
