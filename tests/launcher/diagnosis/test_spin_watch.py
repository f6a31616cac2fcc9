"""
Workers that use CPU time: those that only wait in a collective, and those that work. The kernel's
counters, stacks and dumps are given; time is a number.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdrun.launcher.diagnosis import spin_watch
from pdrun.launcher.diagnosis.flight_recorder import CollectiveRecord
from pdrun.launcher.diagnosis.spin_watch import SpinWatch
from pdrun.launcher.diagnosis.stacks import find_collective_call
from pdrun.rendezvous.protocol.messages import CollectiveReport

REDUCE = CollectiveReport((), "0 (default_pg)", 101, "all_reduce", True, (0, 1))
LIBRARY = "/x/torch/distributed/distributed_c10d.py"
IN_COLLECTIVE = f'File "{LIBRARY}", line 10 in all_reduce\nFile "/x/train.py", line 3 in step'
AT_WORK = 'File "/x/train.py", line 3 in step'
RANK = 0


class Scene:
    """One worker that spins; `live` lets time pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, timeout: float = 8.0) -> None:
        self.now, self.began, self.timeout = 100.0, 100.0, timeout
        self.switches = 0
        self.stack = AT_WORK
        self.entered_at: float | None = None
        """Time at which it has called a collective that does not end; None: it has no recorder."""
        self.called_at = 100.0
        self.stack_requests = self.dumps = 0
        self.idle: list[int] = []
        scene = self

        class Request:
            def __init__(self, workers: object, *rest: object, uses_py_spy: bool) -> None:
                scene.stack_requests += 1
                self.deadline = scene.now + 0.05

            def poll_workers(self, now: float) -> bool:
                return True

            def take_python_stacks(self) -> dict[int, str]:
                return {RANK: scene.stack} if scene.stack else {}

            def close(self) -> None:
                pass

        class Dump:
            def __init__(self, folder: Path, rank: int, now: float) -> None:
                self.is_over = scene.entered_at is None
                self.was_asked = not self.is_over
                self.due = now + (5.0 if not scene.dumps else 0.5)
                scene.dumps += self.was_asked

            def poll(self, now: float) -> CollectiveRecord | None:
                if now < self.due:
                    return None
                self.is_over = True
                entered, called = scene.wall(scene.entered_at or 0.0), scene.wall(scene.called_at)
                if scene.entered_at is None or scene.entered_at > now:
                    return CollectiveRecord((), called, 0)
                return CollectiveRecord((REDUCE,), max(entered, called), entered)

        monkeypatch.setattr(spin_watch, "StackRequest", Request)
        monkeypatch.setattr(spin_watch, "DumpRequest", Dump)
        monkeypatch.setattr(
            spin_watch,
            "procfs",
            SimpleNamespace(read_voluntary_switches=lambda pid: scene.switches),
        )
        monkeypatch.setattr(
            spin_watch, "time", SimpleNamespace(time_ns=lambda: scene.wall(scene.now))
        )
        self.watch = SpinWatch(timeout, Path("/nowhere"), lambda slot, number: None)

    @staticmethod
    def wall(at: float) -> int:
        return int((at + 1e9) * 1e9)

    def live(
        self, seconds: float, each: Callable[[], None] = lambda: None, quiet_since: float = 100.0
    ) -> float | None:
        """Return how long it took until the worker was found to wait; None: it was not."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.1
            each()
            quiet = self.now - quiet_since
            self.watch.run_once([(RANK, 0, 1)], self.idle, quiet, self.now)
            if quiet >= self.timeout and self.watch.find_wait(RANK, self.now) is not None:
                return self.now - self.began
        return None


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_a_collective_that_does_not_end_is_found_by_the_flight_recorder(scene: Scene) -> None:
    scene.entered_at = 100.0
    found = scene.live(30)
    assert found is not None and 8.0 <= found <= 10.0
    assert scene.watch.find_wait(RANK, scene.now) == REDUCE
    assert scene.stack_requests == 0, "no signal where the recorder tells"
    assert scene.dumps <= 2


def test_a_call_that_the_recorder_does_not_have_yet_is_found_by_its_stack(scene: Scene) -> None:
    """The first point-to-point call waits for its communicator before it is recorded."""
    scene.stack = IN_COLLECTIVE.replace("all_reduce", "recv")
    scene.entered_at = 1e6
    found = scene.live(30)
    assert found is not None and found <= 14.0, "the first dump took five seconds"
    assert scene.watch.find_wait(RANK, scene.now) == CollectiveReport((), "", 0, "recv", True)


def test_a_collective_that_began_before_the_last_output_is_found_in_time(scene: Scene) -> None:
    scene.entered_at = 96.0
    found = scene.live(30)
    assert found is not None and 8.0 <= found <= 10.0


def test_one_that_began_later_is_found_later(scene: Scene) -> None:
    scene.live(3)
    scene.entered_at = scene.called_at = 103.0
    found = scene.live(30)
    assert found is not None and 10.0 <= found <= 15.0


def test_without_a_recorder_the_stack_must_be_a_collective_and_stay(scene: Scene) -> None:
    scene.stack = IN_COLLECTIVE
    found = scene.live(30)
    assert found is not None and 8.0 <= found <= 9.0
    assert scene.watch.find_wait(RANK, scene.now) == CollectiveReport((), "", 0, "all_reduce", True)


def test_a_long_kernel_is_work(scene: Scene) -> None:
    assert scene.live(100) is None


def test_a_long_kernel_with_a_recorder_is_work(scene: Scene) -> None:
    scene.entered_at = 1e6  # not yet
    assert scene.live(100) is None


def test_collectives_that_follow_each_other_in_one_line_are_work(scene: Scene) -> None:
    """A silent training loop that synchronizes at each step: always the same stack."""

    def step() -> None:
        scene.entered_at = scene.called_at = scene.now - 0.01

    scene.entered_at = 100.0
    assert scene.live(200, step) is None
    assert scene.dumps <= 2 + 200 / scene.timeout, "torch prints a line for each dump"


def test_steps_of_half_the_timeout_are_work(scene: Scene) -> None:
    def step() -> None:
        if scene.now - scene.called_at > 0.6 * scene.timeout:
            scene.entered_at = scene.called_at = scene.now

    scene.entered_at = 100.0
    assert scene.live(200, step) is None


def test_a_main_thread_that_sleeps_now_and_then_is_never_signalled(scene: Scene) -> None:
    """It compiles, loads data or writes a checkpoint."""
    scene.stack = IN_COLLECTIVE

    def work() -> None:
        scene.switches += 1

    assert scene.live(100, work) is None
    assert scene.stack_requests == scene.dumps == 0


def test_another_stack_starts_the_time_again(scene: Scene) -> None:
    scene.stack = IN_COLLECTIVE
    scene.live(6)
    scene.stack = IN_COLLECTIVE.replace("line 3", "line 4")
    assert scene.live(5) is None


def test_output_ends_the_looks(scene: Scene) -> None:
    scene.stack = IN_COLLECTIVE
    scene.entered_at = 100.0
    assert scene.live(50, quiet_since=1e9) is None
    assert scene.stack_requests == scene.dumps == 0


def test_an_idle_node_is_left_alone(scene: Scene) -> None:
    scene.idle = [RANK]
    scene.entered_at = 100.0
    scene.live(50)
    assert scene.stack_requests == scene.dumps == 0


def test_the_line_that_torch_prints_about_a_dump_is_no_sign_of_life(scene: Scene) -> None:
    scene.entered_at = 100.0
    assert scene.watch.filter_output(RANK, 100.5) == 100.5
    scene.live(7)
    assert scene.dumps == 1
    assert scene.watch.filter_output(RANK, 105.0) == 100.5
    scene.live(20)
    assert scene.watch.filter_output(RANK, scene.now + 50) == scene.now + 50


def test_where_ranks_are_is_told_by_recorders_first(scene: Scene) -> None:
    scene.entered_at = 100.0
    scene.live(20)
    found = scene.watch.collective_states({RANK: IN_COLLECTIVE, 1: IN_COLLECTIVE, 2: AT_WORK})
    assert [(state.group, state.ranks) for state in found] == [("0 (default_pg)", (0,)), ("", (1,))]


@pytest.mark.parametrize(
    ("stack", "call"),
    [
        (IN_COLLECTIVE, "all_reduce"),
        (f'File "{LIBRARY}", line 3 in recv\n{AT_WORK}', "recv"),
        ('File "/x/train.py", line 3 in all_gather_into_tensor', "all_gather_into_tensor"),
        ("spin (libx.so)\n0x (libc.so.6)\nbarrier (train.py:4)\n<module> (train.py:9)", "barrier"),
        (f'File "{LIBRARY}", line 3 in init_process_group\n{AT_WORK}', ""),
        ('File "/x/connection.py", line 3 in recv', ""),  # multiprocessing
        ('File "/x/threading.py", line 3 in wait', ""),
        (AT_WORK, ""),
        # a collective that runs work of the program, as torch's distributed checkpoint does
        ('File "/x/filesystem.py", line 3 in write_data\nFile "/x/u.py", line 8 in all_reduce', ""),
        ("(no Python stack) state R (running)", ""),
        ("", ""),
    ],
)
def test_the_innermost_call_must_be_the_collective(stack: str, call: str) -> None:
    assert find_collective_call(stack) == call


def test_the_clock_of_the_scene_is_the_only_one() -> None:
    assert spin_watch.time is time
