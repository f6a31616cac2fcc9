"""Signals that a batch system sends to workers as well: passed on once to each process."""

from __future__ import annotations

import signal

from pdrun.launcher.stdlib_only.worker_exec import DirectSignals


def test_a_worker_that_has_a_signal_is_not_sent_it_again() -> None:
    direct = DirectSignals(is_in_slurm=False)
    direct.on_signal(signal.SIGTERM, {10, 11}, 1.0)
    assert direct.is_repetition(10, signal.SIGTERM, 1.5)
    assert not direct.is_repetition(10, signal.SIGTERM, 1.6), "the second one is another signal"
    assert not direct.is_repetition(12, signal.SIGTERM, 1.6), "started later"
    assert not direct.is_repetition(11, signal.SIGUSR1, 1.6)


def test_the_next_worker_of_a_slot_gets_its_first_signal() -> None:
    direct = DirectSignals(is_in_slurm=False)
    direct.on_signal(signal.SIGTERM, {10}, 1.0)
    direct.on_exit(10)
    assert not direct.is_repetition(10, signal.SIGTERM, 1.5), "the pid was given again"
