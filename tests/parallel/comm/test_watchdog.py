"""
Waits that cannot end name what they waited for; what watches over them is gone before the
interpreter is.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pdrun.errors import DeadlineExceeded, PeerLost
from pdrun.parallel.comm.watchdog import CollectiveWatchdog

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
    ["", "watchdog.start_watchdog(100.0, 0, 2, Slow(), True)", "time.sleep(0.1); first.close()"],
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
