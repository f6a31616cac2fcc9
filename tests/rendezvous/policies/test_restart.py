"""Whether a job is tried again, how soon, and what is said when it is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.rendezvous.membership.machine import JobState, LocalStop
from pdrun.rendezvous.policies.restart import (
    RestartHistory,
    count_restart,
    is_permanent,
    mask_numbers,
    restart_delay,
    restarts_left,
)
from pdrun.rendezvous.protocol.messages import (
    Cause,
    CauseKind,
    Notice,
    Progress,
    Ready,
    Step,
    WorkerExit,
)
from tests.rendezvous.helpers import Machine, cause, config


def running(*names: str, **changes: object) -> Machine:
    machine = Machine(config(nodes=len(names), heartbeat=0.0, **changes))
    machine.run(*names)
    return machine


def again(machine: Machine, *names: str, wait: float = 31.0) -> None:
    """
    All workers have ended; let the back-off pass, and start the next generation where there is one.
    """
    machine.finish(*names)
    if machine.membership.state is JobState.RESTARTING:
        machine.tick(wait)
    if machine.membership.state is JobState.ASSIGNING:
        for name in names:
            machine.say(name, Ready(machine.membership.generation.number))


def test_the_delay_doubles_while_restarts_follow_quickly() -> None:
    setting, attempts, delays = config(max_restarts=20, backoff=2.0), RestartHistory(), []
    for lived in (1.0, 1.0, 59.0, 1.0, 1.0, 1.0, 1.0, 61.0, 1.0, 1.0):
        attempts = count_restart(setting, attempts, lived, 0.0)
        delays.append(restart_delay(setting, attempts))
    assert delays == [0.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 0.0, 2.0, 4.0]


@given(st.lists(st.floats(0.0, 500.0), max_size=12), st.integers(1, 4), st.floats(1.0, 300.0))
def test_only_restarts_inside_the_window_count(gaps: list[float], most: int, window: float) -> None:
    setting, attempts, now, made = (
        config(max_restarts=most, restart_window=window),
        RestartHistory(),
        0.0,
        [],
    )
    for gap in gaps:
        now += gap
        recent = [at for at in made if now - at < window]
        assert restarts_left(setting, attempts, now) == most - len(recent)
        if len(recent) < most:
            attempts = count_restart(setting, attempts, 1.0, now)
            made.append(now)
    assert attempts.restarts == len(made)


def test_the_window_in_a_job() -> None:
    machine = running("a", max_restarts=1, restart_window=100.0)
    for _ in range(3):
        machine.fail("a", 0)
        again(machine, "a")
        machine.tick(101.0)
    assert (
        machine.membership.shutdown.restarts == 3 and machine.membership.state is JobState.RUNNING
    )
    machine.fail("a", 0)
    again(machine, "a")
    machine.fail("a", 0)
    again(machine, "a")
    assert machine.verdict.reason == (
        "rank 0 on a failed: exception 1 (no restart is left: 1 within 100 s), after 4 restarts"
    )


def test_the_back_off_is_waited_for_and_said_and_a_stop_ends_it() -> None:
    machine = running("a", "b", max_restarts=3, backoff=4.0)
    machine.fail("a", 0)
    again(machine, "a", "b")
    assert machine.membership.generation.number == 1 and not machine.to("a", Notice)
    machine.fail("b", 1)
    machine.finish("a", "b")
    assert machine.membership.state is JobState.RESTARTING
    assert machine.to("a", Notice)[0].text.startswith("restart 2 of 3 in 4 s")
    assert machine.records[-1].kind == "restarting" and machine.records[-1].data["delay"] == 4.0
    machine.tick(3.5)
    assert machine.membership.generation.number == 1
    machine.tick(1.0)
    assert (
        machine.membership.state is JobState.ASSIGNING and machine.membership.shutdown.restarts == 2
    )
    for name in "ab":
        machine.say(name, Ready(2))
    machine.fail("b", 1)
    machine.finish("a", "b")
    machine.step(LocalStop(2, "Ctrl-C"))
    assert machine.verdict.code == 130


def test_a_node_that_goes_during_the_back_off_is_missed() -> None:
    machine = running("a", "b", max_restarts=3, backoff=4.0)
    machine.fail("a", 0)
    again(machine, "a", "b")
    machine.fail("a", 0)
    machine.finish("a", "b")
    machine.cut("b")
    machine.tick(5.0)
    assert (
        machine.membership.state is JobState.GATHERING and machine.membership.shutdown.restarts == 2
    )
    machine.enter("c")
    assert machine.membership.state is JobState.ASSIGNING


@pytest.mark.parametrize(
    ("changes", "code", "restarted", "why"),
    [
        ({"restart_on": (42, 137)}, 42, True, ""),
        ({"restart_on": (42,)}, 7, False, "not restarted: exit code 7 is not one of --restart-on"),
        (
            {"no_restart_on": (7, 8)},
            7,
            False,
            "not restarted: exit code 7 is one of --no-restart-on",
        ),
        ({"no_restart_on": (7, 8)}, 9, True, ""),
    ],
)
def test_exit_codes_decide(
    changes: dict[str, object], code: int, restarted: bool, why: str
) -> None:
    machine = running("a", max_restarts=2, **changes)
    machine.fail("a", 0, kind="exit", code=code)
    machine.finish("a")
    if restarted:
        assert machine.membership.state is JobState.ASSIGNING
    else:
        assert machine.verdict.code == code and machine.verdict.reason.endswith(f"({why})")


def test_the_code_of_the_first_cause_decides_not_that_of_a_victim() -> None:
    machine = running("a", "b", max_restarts=2, restart_on=(42,))
    machine.fail("a", 0, kind="communication", code=1)
    assert machine.membership.state is JobState.RESTARTING
    machine.fail("b", 1, kind="exit", code=42)
    machine.finish("a", "b")
    assert machine.membership.state is JobState.ASSIGNING
    machine = running("a", "b", max_restarts=2, restart_on=(42,))
    machine.fail("a", 0, kind="communication", code=1)
    machine.fail("b", 1, kind="exit", code=41)
    machine.finish("a", "b")
    assert machine.verdict.code == 41 and "not one of --restart-on" in machine.verdict.reason


IMPORTS = (
    "ModuleNotFoundError: No module named 'x'",
    "ImportError: cannot import name 'y'",
    "SyntaxError: invalid",
)


def exception(summary: str, kind: CauseKind = "exception") -> Cause:
    return Cause(kind, 1, summary=summary)


@pytest.mark.parametrize(
    ("causes", "expected"),
    [
        ([exception(text) for text in IMPORTS], True),
        (
            [
                exception(IMPORTS[0]),
                exception("Connection closed", "communication"),
                exception("", "stopped"),
            ],
            True,
        ),
        ([exception(IMPORTS[0]), exception("ValueError: boom")], False),
        ([exception(IMPORTS[0]), Cause("signal", 139, 11)], False),
        ([exception("Connection closed", "communication")], False),
        ([exception("mymodule.ImportError: x")], True),
        ([exception("ImportErrorLike: x")], False),
        ([], False),
    ],
)
def test_what_is_hopeless(causes: list[Cause], expected: bool) -> None:
    assert is_permanent(causes) is expected


def test_hopeless_failures_are_not_tried_again() -> None:
    machine = running("a", "b", max_restarts=5)
    for name, rank in (("a", 0), ("b", 1)):
        machine.say(name, _exit(machine, rank, exception(IMPORTS[rank])))
    machine.finish("a", "b")
    assert machine.membership.generation.number == 0
    assert "all failed workers met an import or syntax error" in machine.verdict.reason


def test_one_worker_that_failed_otherwise_gives_hope_though_it_is_heard_last() -> None:
    machine = running("a", "b", max_restarts=5)
    machine.say("a", _exit(machine, 0, exception(IMPORTS[0])))
    machine.say("b", _exit(machine, 1, exception("ValueError: boom")))
    machine.finish("a", "b")
    assert machine.membership.generation.number == 1


def _exit(machine: Machine, rank: int, why: Cause) -> WorkerExit:
    return WorkerExit(machine.membership.generation.number, rank, why)


def loop(
    machine: Machine,
    times: int,
    *,
    wait: float = 1.0,
    progress: bool = False,
    text: str = "at 0x{0:x}",
) -> None:
    for time in range(times):
        if progress:
            machine.say("a", Progress(machine.membership.generation.number, (Step(0, 1),)))
        machine.tick(wait)
        machine.say(
            "a", _exit(machine, 0, exception(f"ValueError: {text.format(time + 7)} in step {time}"))
        )
        again(machine, "a")


def test_a_crash_loop_ends_at_the_fourth_time() -> None:
    machine = running("a", max_restarts=50)
    loop(machine, 3)
    assert machine.membership.state is JobState.RUNNING
    loop(machine, 1)
    assert machine.membership.shutdown.restarts == 3
    assert "the same failure 4 times in a row, each soon after the start" in machine.verdict.reason


@pytest.mark.parametrize("how", [{"wait": 11.0}, {"progress": True}, {"text": "{0:*>9}" + "x" * 3}])
def test_no_crash_loop(how: dict[str, object]) -> None:
    machine = running("a", max_restarts=50)
    if "text" in how:
        for number in range(8):
            loop(machine, 1, text="abcdefgh"[number])
    else:
        loop(machine, 8, **how)  # type: ignore[arg-type]
    assert (
        machine.membership.shutdown.restarts == 8 and machine.membership.state is JobState.RUNNING
    )


def test_another_failure_in_between_begins_the_count_anew() -> None:
    machine = running("a", max_restarts=50)
    loop(machine, 3)
    loop(machine, 1, text="something else")
    loop(machine, 3)
    assert (
        machine.membership.shutdown.restarts == 7 and machine.membership.state is JobState.RUNNING
    )


def test_the_used_up_budget_is_said() -> None:
    machine = running("a", max_restarts=1)
    for _ in range(2):
        machine.fail("a", 0, kind="exit", code=3)
        again(machine, "a")
    assert (
        machine.verdict.reason == "rank 0 on a failed: exit 3 (no restart is left), after 1 restart"
    )


def test_where_no_restart_was_asked_for_nothing_is_said() -> None:
    machine = running("a")
    machine.fail("a", 0, kind="exit", code=3)
    machine.finish("a")
    assert machine.verdict.reason == "rank 0 on a failed: exit 3"


def test_what_differs_between_attempts_is_blanked() -> None:
    assert mask_numbers("rank 12 at 0xDEADbeef: 3.5 s") == "rank # at #: #.# s"
    assert cause().retry
