"""
Beds of hosts for tests: up in under a second, gone with the test whatever happens. Needs root;
skips elsewhere.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.chaos import cluster as clusters
from tests.chaos.cluster import Cluster
from tests.chaos.jobs import Bed

_numbers = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """
    Everything here needs root; each test has hosts of its own, so any number of them may run side
    by side.
    """
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.root)


@pytest.fixture(scope="session")
def possible() -> None:
    """Skip where the machine cannot make hosts."""
    if reason := clusters.why_not():
        pytest.skip(reason)


@pytest.fixture
def make_bed(possible: None, tmp_path: Path) -> Iterator[Callable[[int], Bed]]:
    """Make a bed of so many hosts."""
    beds: list[Bed] = []

    def make(size: int) -> Bed:
        name = f"test-{os.getpid()}-{next(_numbers)}"
        beds.append(Bed(Cluster.up(name, size), tmp_path / f"shared{len(beds)}"))
        return beds[-1]

    yield make
    for bed in beds:
        bed.stop()


@pytest.fixture(scope="module")
def side_by_side(
    possible: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[None]]]:
    """
    The outcome of every fault in the module's FAULTS that is to be tested, by name.

    A fault is a function of a bed that mostly waits (for ten seconds of silence, say): four of them
    run at a time.
    """
    wanted = {
        item.callspec.params.get("fault")
        for item in request.session.items
        if hasattr(item, "callspec")
    }

    folder = tmp_path_factory.mktemp("side_by_side")

    def run(fault: Callable[[Bed], None]) -> None:
        bed = Bed(Cluster.up(f"test-{os.getpid()}-{next(_numbers)}", 3), folder / fault.__name__)
        try:
            fault(bed)
        finally:
            bed.stop()

    with ThreadPoolExecutor(4) as pool:
        yield {
            fault.__name__: pool.submit(run, fault)
            for fault in request.module.FAULTS
            if fault.__name__ in wanted
        }


@pytest.fixture
def bed(make_bed: Callable[[int], Bed]) -> Bed:
    """Three hosts."""
    return make_bed(3)
