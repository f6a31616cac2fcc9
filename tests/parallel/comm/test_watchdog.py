"""
Waits that cannot end name what they waited for; what watches over them is gone before the
interpreter is.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from pdrun.errors import DeadlineExceeded, PeerLost
from pdrun.parallel.comm import watchdog
from pdrun.parallel.comm.watchdog import CollectiveWatchdog
from tests.lib.tiers import thorough

pytestmark = pytest.mark.torch

PROGRAM = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from pdrun.parallel.comm import watchdog

class Slow:
    "A store of torch's that takes its time: a call of C++ without the interpreter's lock."
    store = dist.HashStore()

    def check(self, keys):
        print("asked", flush=True)
        try:
            self.store.wait(["never"], timedelta(seconds=0.3))
        except RuntimeError:
            pass
        return False

class Late:
    "Its end comes when Python is being taken down, and leaves a thread time to come back meanwhile."

    def __del__(self):
        time.sleep(1.0)

watchdog.POLL_SECONDS = 0.01
late = Late()
first = watchdog.start_watchdog(100.0, 0, 2, Slow(), True)
{more}
time.sleep(0.2)
"""


class Work:
    def __init__(self, words: str) -> None:
        self.words = words

    def wait(self, limit: object) -> None:
        raise RuntimeError(self.words)


@pytest.mark.parametrize(
    "words",
    [
        (
            "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:6828. This is"
            " typically"
        ),
        "[gloo/transport/tcp/pair.cc:1] Connection reset by peer",
        "ncclRemoteError: a peer",
        "writev: Broken pipe",
    ],
)
def test_a_peer_that_is_gone_is_named_in_one_line(words: str) -> None:
    watch = CollectiveWatchdog(100.0)
    watch._store = object()
    watch.enter_phase("step 3")
    with pytest.raises(
        PeerLost, match=r"^step 3: the losses cannot end: another rank is gone \([^()]*\)$"
    ) as caught:
        watch.wait(Work(words), "the losses")
    assert isinstance(caught.value, RuntimeError) and words in str(caught.value.__cause__)
    watch.leave_phase()
    with pytest.raises(PeerLost, match=r"^pdrun.parallelize: the losses"):
        watch.wait(Work(words), "the losses")


def test_who_is_left_by_one_whose_time_was_over_is_late_too() -> None:
    watch = CollectiveWatchdog(0.0)
    watch._store = torch.distributed.HashStore()
    with pytest.raises(DeadlineExceeded, match=r"no end after 0 s: rank 0 waits for the losses"):
        watch.wait(Work("Connection closed by peer"), "the losses")


def test_another_error_of_a_collective_stays_what_it_is() -> None:
    watch = CollectiveWatchdog(100.0)
    watch._store = object()
    with pytest.raises(RuntimeError, match=r"^shapes differ$") as caught:
        watch.wait(Work("shapes differ"), "the losses")
    assert not isinstance(caught.value, PeerLost)


@pytest.mark.parametrize(
    "more",
    [
        thorough(""),
        "watchdog.start_watchdog(100.0, 0, 2, Slow(), True)",
        "time.sleep(0.1); first.close()",
    ],
)
def test_no_thread_is_in_a_call_when_python_is_taken_down(more: str) -> None:
    """It would end the process with SIGABRT: "terminate called without an active exception"."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{more}", more)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "") and "asked" in done.stdout


def test_a_store_that_does_not_answer_is_not_waited_for_long() -> None:
    program = PROGRAM.replace(
        "{more}", "watchdog.CLOSE_SECONDS = 0.2; Late.__del__ = lambda self: None"
    )
    program = program.replace("seconds=0.3", "seconds=50")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")


class CountsOfThread(threading.local):
    """Meetings so far, of this thread."""

    def __init__(self) -> None:
        self.counts: dict[Any, int] = {}

    def __getitem__(self, key: Any) -> int:
        return self.counts.get(key, 0)

    def __setitem__(self, key: Any, value: int) -> None:
        self.counts[key] = value


class CountingStore:
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        self.store = torch.distributed.HashStore()
        self.checks = 0

    def check(self, keys: list[str]) -> bool:
        self.checks += 1
        return bool(self.store.check(keys))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_meetings_leave_nothing_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore()
    before = store.num_keys()
    ranks = tuple(range(4))
    monkeypatch.setattr(watchdog, "_meetings", CountsOfThread())  # a thread plays a process

    def meet(rank: int) -> None:
        watch = CollectiveWatchdog(20.0, rank)
        watch._store = store
        for _ in range(5):
            watch.meet("a call", ranks, "it is called")

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.num_keys() == before


def test_a_meeting_asks_for_all_ranks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore()
    watch = CollectiveWatchdog(20.0, 0)
    watch._store = store
    monkeypatch.setattr(watchdog, "_meetings", CountsOfThread())
    ranks = tuple(range(100))
    for rank in ranks:
        store.set(f"pdrun/meet/{'-'.join(map(str, ranks))}/a call/1/{rank}", "1")
    watch.meet("a call", ranks, "it is called")
    assert store.checks == 1


def test_all_watchdogs_of_a_process_give_one_answer() -> None:
    """The second one would overwrite what the run's waits for."""
    store = torch.distributed.HashStore()
    run, groups = (CollectiveWatchdog(100.0, 0) for _ in range(2))
    for each in (run, groups):
        each._store = store
        watchdog._running_watchdogs.add(each)
    try:
        run.enter_phase("step 3")
        run._wait_label = "the losses"
        answers = {each._describe_position() for each in (run, groups)}
    finally:
        for each in (run, groups):
            watchdog._running_watchdogs.discard(each)
    assert answers == {"waits for the losses in step 3"}
    groups._collect_answers = lambda answers: None  # type: ignore[method-assign]
    run._collect_answers = lambda answers: None  # type: ignore[method-assign]
    asked = []
    for each in (run, groups):
        each._ask_ranks("the losses")
        asked.append(store.get(watchdog.QUESTION_KEY))
        each._answered.add(asked[-1].decode())
        groups._answered |= run._answered
    assert len(set(asked)) == 2  # no question has the name of an earlier one
