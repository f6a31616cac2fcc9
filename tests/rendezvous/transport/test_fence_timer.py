"""
The fence of a node lies before the time at which its scheduler marks it lost, whatever is slow.

The scheduler's side is the product's own `FailureDetector`.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from pdrun.rendezvous.membership.failure_detector import FailureDetector
from pdrun.rendezvous.protocol.events import SchedulerConfig
from pdrun.rendezvous.protocol.messages import Heartbeat
from pdrun.rendezvous.transport.resend import FenceTimer
from pdrun.rendezvous.transport.timeouts import fence_margin

DEAD = 10.0


def test_contact_dates_from_the_sending_of_the_heartbeat() -> None:
    timer = FenceTimer(100.0)
    assert timer.fence_at(DEAD) == 100.0 + DEAD - fence_margin(DEAD)
    timer.on_heartbeat(Heartbeat(1, 0), 1.0, 101.0)
    timer.on_heartbeat(Heartbeat(2, 1), 1.0, 102.0)
    assert timer.fence_at(DEAD) == 109.0, "nothing is answered yet"
    timer.on_echo(1)
    assert timer.fence_at(DEAD) == 110.0
    timer.on_echo(2)
    timer.on_echo(1)  # late: it moves nothing back
    assert timer.fence_at(DEAD) == 111.0


def test_an_answer_that_is_missing_dates_the_contact_back() -> None:
    timer = FenceTimer(0.0)
    timer.on_heartbeat(Heartbeat(5, 1), 1.0, 8.0)  # 2, 3 and 4 are not answered
    timer.on_echo(5)
    assert timer.fence_at(DEAD) == 8.0 - 3.0 + 9.0


def test_a_new_connection_counts_from_its_hello_and_forgets_what_the_old_one_sent() -> None:
    timer = FenceTimer(0.0)
    timer.on_heartbeat(Heartbeat(1, 0), 1.0, 50.0)
    timer.on_hello(60.0)
    timer.on_echo(1)
    assert timer.fence_at(DEAD) == 9.0
    timer.on_welcome()
    assert timer.fence_at(DEAD) == 69.0


def test_an_accepted_connection_gives_a_moment() -> None:
    timer = FenceTimer(0.0)
    timer.on_connected(12.0)
    assert timer.fence_at(DEAD) == 12.0
    timer.on_connected(20.0)
    assert timer.fence_at(DEAD) == 20.0


@pytest.mark.parametrize("seed", range(40))
def test_the_fence_is_before_the_loss_for_any_delays(seed: int) -> None:
    """Heartbeats and answers are late, in order, and one way is cut at last."""
    rng = random.Random(seed)
    slowest = rng.choice((0.01, 0.3, 1.5, 4.0))
    config = SchedulerConfig("job", "run", 2)
    detector = FailureDetector(config, 0.0)
    member: Any = SimpleNamespace(
        alive_at=0.0, answered_at=0.0, is_suspect=False, peer="p", hello=SimpleNamespace(agent="a")
    )
    timer = FenceTimer(0.0)
    up_cut, down_cut = (rng.choice((rng.uniform(3, 25), 1e9)) for _ in range(2))
    up_cut = min(up_cut, 30.0)
    pending: list[tuple[float, str, Any]] = []
    echo, number, beat_at, up_at, down_at = 0, 0, 0.0, 0.0, 0.0
    now = 0.0
    while now < 80.0:
        now += 0.05
        detector.advance_clock(now)
        for item in [item for item in pending if item[0] <= now]:
            pending.remove(item)
            if item[1] == "up":
                detector.mark_alive(member, now)
                detector.on_heartbeat(member, item[2], now)
                if now < down_cut:
                    down_at = max(down_at, now + rng.uniform(0, slowest))
                    pending.append((down_at, "down", item[2].number))
            else:
                echo = max(echo, item[2])
                timer.on_echo(item[2])
        if now >= beat_at:
            number, beat_at = number + 1, now + 1.0
            beat = Heartbeat(number, echo)
            timer.on_heartbeat(beat, 1.0, now)
            if now < up_cut:
                up_at = max(up_at, now + rng.uniform(0, slowest))
                pending.append((up_at, "up", beat))
        lost, _ = detector.find_overdue([member], now)
        if lost is not None:
            assert timer.fence_at(DEAD) + fence_margin(DEAD) <= now + 0.1
            return
    raise AssertionError("a node that is cut off is lost")
