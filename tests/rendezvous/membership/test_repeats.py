"""What an agent repeats after a reconnection changes nothing."""

from __future__ import annotations

from tests.rendezvous.helpers import Machine, config


def test_an_exit_that_is_repeated_counts_once() -> None:
    machine = Machine(config(nodes=2, max_restarts=1))
    machine.run("a", "b")
    for _ in range(2):
        machine.fail("a", 0)
    assert machine.kinds().count("exited") == 1
    assert len(machine.membership.generation.failures) == 1
