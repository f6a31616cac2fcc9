"""Which worker hangs: a table of lives, each a second at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdrun.launcher.diagnosis.hangs import TRACEBACK_SECONDS, HangDetector, WorkerSample

QUIET = WorkerSample(cpu_seconds=1.0)


def live(
    watch: HangDetector, seconds: float, change=lambda seen, now: seen, seen=QUIET, start=100.0
):
    """
    Look each half second at what ``change`` makes of the worker; return (when first suspected,
    why).
    """
    now, step = start, min(0.5, watch.interval)
    while now < start + seconds:
        now += step
        seen = change(seen, now)
        found = watch.add_sample(seen, now)
        if found is not None:
            return round(now - start, 1), found
    return None


def test_without_a_new_step_for_the_timeout_it_hangs_even_if_it_spins():
    watch = HangDetector(10.0, 100.0)

    def spin(seen, now):
        return replace(
            seen, cpu_seconds=seen.cpu_seconds + 0.5, output_at=now, step=min(int(now - 100), 7)
        )

    at, found = live(watch, 60, spin)
    assert 17 <= at <= 18
    assert (found.reason, found.may_be_waiting, found.only_if_ended) == (
        "no progress for 10 s (step 7)",
        False,
        False,
    )


def test_a_saved_step_is_progress():
    watch = HangDetector(10.0, 100.0)
    assert live(watch, 60, lambda seen, now: replace(seen, step=3, saved=int(now) // 8)) is None


def test_before_the_first_report_output_or_cpu_time_is_life():
    for life in (
        lambda seen, now: replace(
            seen, cpu_seconds=seen.cpu_seconds + 0.05
        ),  # a tenth of a CPU: the start of a program
        lambda seen, now: replace(seen, output_at=now // 8 * 8),
    ):  # a line now and then
        assert live(HangDetector(10.0, 100.0), 60, life) is None
    at, found = live(HangDetector(10.0, 100.0), 60)
    assert 10 <= at <= 11
    assert (found.reason, found.may_be_waiting) == ("no output and no CPU time for 10 s", True)


def test_a_thread_that_looks_around_is_no_work():
    assert (
        live(
            HangDetector(10.0, 100.0),
            60,
            lambda seen, now: replace(seen, cpu_seconds=seen.cpu_seconds + 0.005),
        )
        is not None
    )


@pytest.mark.parametrize(
    ("letter", "words"), [("T", "stopped by a signal"), ("D", "uninterruptible sleep")]
)
def test_the_state_is_told_and_is_no_waiting_for_others(letter, words):
    _, found = live(
        HangDetector(10.0, 100.0), 60, seen=WorkerSample(cpu_seconds=1.0, letter=letter)
    )
    assert words in found.reason and not found.may_be_waiting


def test_a_debugger_stops_the_clock():
    watch = HangDetector(10.0, 100.0)
    assert live(watch, 60, seen=WorkerSample(cpu_seconds=1.0, step=4, is_traced=True)) is None
    at, _ = live(watch, 60, seen=WorkerSample(cpu_seconds=1.0, step=4), start=160.0)
    assert at >= 10


def test_a_stall_of_the_agent_makes_nobody_hang():
    watch = HangDetector(10.0, 100.0)
    watch.add_sample(WorkerSample(cpu_seconds=1.0, step=1), 100.5)
    assert watch.add_sample(WorkerSample(cpu_seconds=1.0, step=1), 500.0) is None
    assert watch.stuck_seconds <= 2.5


def test_without_a_timeout_only_a_printed_traceback_is_suspect():
    assert live(HangDetector(None, 100.0), 3600, seen=WorkerSample(cpu_seconds=1.0, step=1)) is None
    at, found = live(
        HangDetector(None, 100.0), 3600, seen=WorkerSample(cpu_seconds=1.0, has_traceback=True)
    )
    assert at >= TRACEBACK_SECONDS and found.only_if_ended and "printed a traceback" in found.reason
    printed = WorkerSample(cpu_seconds=1.0, has_traceback=True)
    assert (
        live(
            HangDetector(None, 100.0),
            3600,
            lambda seen, now: replace(seen, cpu_seconds=seen.cpu_seconds + 0.4),
            printed,
        )
        is None
    )


def test_looks_are_rare():
    assert (
        HangDetector(600.0, 0.0).interval,
        HangDetector(None, 0.0).interval,
        HangDetector(1.0, 0.0).interval,
        HangDetector(2.0, 0.0).interval,
    ) == (
        0.4,
        5.0,
        0.1,
        0.2,
    )


def test_a_child_that_ends_takes_its_cpu_time_along_and_hides_no_work() -> None:
    watch = HangDetector(4.0, 0.0)
    assert watch.add_sample(WorkerSample(cpu_seconds=9.0), 0.4) is None
    for look in range(
        2, 40
    ):  # the tree's sum has dropped by the child's 8 s; what is left works on
        assert watch.add_sample(WorkerSample(cpu_seconds=1.0 + 0.4 * look), 0.4 * look) is None
    assert watch.idle_seconds == 0.0


def test_a_tick_now_and_then_is_no_work() -> None:
    watch, found = HangDetector(4.0, 0.0), None
    for look in range(1, 40):
        found = found or watch.add_sample(
            WorkerSample(cpu_seconds=1.0 + 0.01 * (look // 6)), 0.4 * look
        )
    assert found is not None and "no CPU time" in found.reason
