"""
120 lives of jobs under faults, 2,000 in the thorough run; ``python -m tests.rendezvous.simulator``
runs any number. Seeds that broke a rule stay as cases.
"""

from __future__ import annotations

import pytest

from tests.lib.tiers import by_tier

from .life import life

KEPT = [
    (
        78,
        10,
    ),  # a one-way cut: the node's own time-out must not pass for the end of a healthy process
    (116, 10),  # a link that comes and goes every second
    (254, 10),  # an order to start that a frozen agent reads 40 s later
    (329, 10),  # frozen for longer than the lease, then cut off: the lease has run on
    (1127, 10),  # a node that can never start comes back for ever
    (830, 50),  # what lay there while a node was frozen must not renew its lease
    (
        5590,
        50,
    ),  # two restarts of one, but of one within 30 s: right, and the judge had not known it
]


KEPT_WITH_STANDSTILLS = [
    (1000535, 20),  # a supervisor that stands still before it has started the workers
    (1003407, 5),  # a node that joined again repeats its reports after the job has ended
]


@pytest.mark.parametrize("first", range(0, by_tier(120, 2000), 40))
def test_lives_keep_the_rules(first: int) -> None:
    lives = [life(seed, 8) for seed in range(first, first + 40)]
    assert sum(one.faults for one in lives) > 20
    assert len({one.code for one in lives}) > 2


@pytest.mark.parametrize(("seed", "nodes"), KEPT)
def test_seeds_that_broke_a_rule_once(seed: int, nodes: int) -> None:
    life(seed, nodes, still=False)


@pytest.mark.parametrize(("seed", "nodes"), KEPT_WITH_STANDSTILLS)
def test_seeds_with_stopped_processes_that_broke_a_rule_once(seed: int, nodes: int) -> None:
    life(seed, nodes)


def test_equal_seeds_live_equal_lives() -> None:
    one, two = life(7, 12, traced=True), life(7, 12, traced=True)
    assert one.trace == two.trace and one.events == two.events and one.trace
