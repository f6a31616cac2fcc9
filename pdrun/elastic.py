"""
What a script says to pdrun while it runs, and what it learns about the job's life. Outside pdrun
nothing happens.

    import pdrun
    from pdrun import elastic

    start = elastic.agreed_step() + 1           # the last step that every worker had saved, -1: begin
    for step in range(start, steps):
        train(step)
        pdrun.progress(step)                    # a hang and a slow rank are known by it
        if step % 100 == 0 or elastic.stopping():
            save(step)
            elastic.saved(step)
        if elastic.stopping():                  # SIGTERM came: this node goes, or the workers are started again
            break

Words go to the agent as datagrams through a socket file in a folder of this user alone, and are
never waited for: an agent that does not read costs nothing. Only the worker itself speaks; in its
children, however made (DataLoader), every call here does nothing.

Limits. Python delivers signals to the main thread only, so `on_stop` must be called there first;
`stopping` called from other threads only looks. A main thread inside a long C call hears of a stop
when that returns.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # every worker imports this file; typing alone would take longer than all of it
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, SupportsIndex, TypeVar

    Callback = TypeVar("Callback", bound=Callable[[], object])

__all__ = [
    "agreed_step",
    "attach",
    "generation",
    "on_stop",
    "progress",
    "restart_count",
    "saved",
    "stopping",
]

REPORT_SECONDS = 0.1
"""Seconds between two reports of a worker, at least; one of a saved step goes at once."""
MAX_STEP = 1 << 53
"""Steps from here on are refused: other sides of the job may count in doubles."""
SAVED_REPORT_SECONDS = 1.0
"""Seconds for which the report of a saved step waits for an agent whose queue is full."""
STACKS_SIGNAL = 51
"""
Asks a worker for its stacks: a real-time signal that programs rarely use.
`launcher/stdlib_only/forked_worker.py` has it too.
"""


class _WorkerReporter:
    """
    This process as a worker: its way to the agent, what it has said, and whether it was told to
    stop.
    """

    def __init__(self) -> None:
        environ = os.environ
        self.pid = os.getpid()
        self.path = environ.get("PDRUN_AGENT", "")
        self.rank = environ.get("RANK", "")
        self.generation = _parse_number(environ.get("PDRUN_GENERATION"), 0)
        self.restarts = _parse_number(environ.get("TORCHELASTIC_RESTART_COUNT"), 0)
        self.agreed = _parse_number(environ.get("PDRUN_AGREED_STEP"), -1)
        self.is_reporting = bool(self.path) and self.rank.isdecimal() and not _is_child_process()
        self.socket: socket.socket | None = None
        self.step = -1
        self.busy = 0.0
        self.saved = -1
        self.next_report_at = 0.0
        """Monotonic seconds from which on the next report may go."""
        self.pending = threading.Event()
        """Set while a report is held back that the flusher is to send."""
        self.flusher: threading.Thread | None = None
        self.callbacks: list[Callable[[], object]] = []
        self.stop_requested = False
        self.has_handler = False
        self.previous_handler: Any = None
        if self.is_reporting:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            _register_stacks(self.path)

    def send_report(self) -> bool:
        """
        Send what holds now; False where the agent's queue is full. An agent that is gone is no
        error.
        """
        busy = f',"busy":{self.busy:.6g}' if self.busy else ""
        saved = f',"saved":{self.saved}' if self.saved >= 0 else ""
        step = f',"step":{self.step}' if self.step >= 0 else ""
        text = f'{{"rank":{self.rank},"generation":{self.generation}{step}{busy}{saved}}}'
        try:
            assert self.socket is not None
            self.socket.sendto(text.encode(), self.path)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def report_soon(self) -> None:
        """Send what holds now, or have it sent soon when the last report was a moment ago."""
        now = time.monotonic()
        if now >= self.next_report_at:
            self.next_report_at = now + REPORT_SECONDS
            self.send_report()
        elif not self.pending.is_set():
            self.pending.set()
            if self.flusher is None:
                self.flusher = threading.Thread(
                    target=self.flush_reports, name="pdrun-progress", daemon=True
                )
                self.flusher.start()

    def flush_reports(self) -> None:
        """
        In a thread of its own, which only scripts with quick steps have: the last of such steps is
        told too.
        """
        while True:
            self.pending.wait()
            time.sleep(max(0.0, self.next_report_at - time.monotonic()))
            self.pending.clear()
            self.next_report_at = time.monotonic() + REPORT_SECONDS
            self.send_report()

    def install_handler(self) -> bool:
        """
        Take SIGTERM over; whether that is so now. In a child, or outside the main thread, it cannot
        be.
        """
        if (
            not self.has_handler
            and threading.current_thread() is threading.main_thread()
            and not _is_child_process()
        ):
            self.has_handler = True
            self.previous_handler = signal.signal(signal.SIGTERM, self.on_sigterm)
        return self.has_handler

    def on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM has come."""
        if (
            os.getpid() != self.pid
        ):  # a forked child that nobody has made anew: DataLoader ends its own by SIGTERM
            return _call_previous_handler(self.previous_handler, number, frame, in_order=False)
        again = self.stop_requested
        self.stop_requested = True
        callbacks = self.callbacks
        self.callbacks = []
        for callback in callbacks:
            callback()
        if again or callbacks or callable(self.previous_handler):
            _call_previous_handler(self.previous_handler, number, frame, in_order=True)
        return None


def progress(step: SupportsIndex, busy: float | None = None) -> None:
    """
    Tell that this worker has done a step.

    With ``--hang-timeout`` a worker that does no new step for that long hangs; a rank that falls
    behind is named while the job runs. Call it once a step; a call in which nothing is due takes
    less than a microsecond or two.

    Args:
        step: its number, 0 or above.
        busy: seconds of the worker's own work in it, without waiting for others: by it a slow rank
            is known although
            all ranks do their steps together. None: not known.

    Raises:
        ValueError: the step is below 0 or endless, or ``busy`` is no span of time.
    """
    worker = _get_reporter()
    if worker is None:
        return
    worker.step = _check_step(step)
    if busy is not None:
        if not 0 <= busy < 1e9:
            raise ValueError(f"busy={busy!r} is no number of seconds")
        worker.busy = float(busy)
    worker.report_soon()


def saved(step: SupportsIndex) -> None:
    """
    Tell that a step is saved: a later generation may begin from it.

    What all workers have said is what `agreed_step` answers after a restart, so every rank says it,
    also where only one writes: then the others say it when they know that it has (after a barrier).

    Raises:
        ValueError: the step is below 0 or endless.
    """
    number = _check_step(step)
    worker = _get_reporter()
    if worker is None:
        return
    worker.saved = number
    worker.next_report_at = time.monotonic() + REPORT_SECONDS
    give_up = time.monotonic() + SAVED_REPORT_SECONDS
    while not worker.send_report() and time.monotonic() < give_up:
        time.sleep(0.005)


def on_stop(callback: Callback) -> Callback:
    """
    Have ``callback()`` called when this worker is told to stop (SIGTERM), once, in the main thread
    between bytecodes.

    It may save; SIGKILL follows after the job's grace. When all callbacks have returned, the
    handler that was there before is called; where there was none the process leaves with 143 (by
    SystemExit, so that ``finally`` blocks and exit handlers run). A script that would rather end by
    itself at a good moment polls `stopping` instead.

    Returns:
        the callback, so that this is a decorator, too.

    Raises:
        RuntimeError: called outside the main thread, where Python cannot take a signal over.
    """
    worker = _get_worker()
    if not _is_child_process() and os.getpid() == worker.pid:
        if not worker.install_handler():
            raise RuntimeError(
                "pdrun.elastic.on_stop must be called in the main thread, which alone hears signals"
            )
        worker.callbacks.append(callback)
    return callback


def stopping() -> bool:
    """
    Whether this worker was told to stop; from the first call on (in the main thread) SIGTERM does
    nothing else.

    A second SIGTERM ends the process, as the first one would have.
    """
    worker = _get_worker()
    if os.getpid() != worker.pid:
        return False
    worker.install_handler()
    return worker.stop_requested


def agreed_step() -> int:
    """
    The last step of which every worker of an earlier generation had said that it is saved; -1:
    none.
    """
    return _get_worker().agreed


def generation() -> int:
    """
    How often the workers have been started before: after failures, and after nodes came or went.
    """
    return _get_worker().generation


def restart_count() -> int:
    """How often the job was started again after a failure; the same on every node."""
    return _get_worker().restarts


def attach() -> None:
    """
    Have the agent able to ask this worker where it is, should it hang; every other call here does
    that, too.
    """
    _get_worker()


_instance: _WorkerReporter | None = None


def _get_worker() -> _WorkerReporter:
    global _instance
    if _instance is None:
        _instance = _WorkerReporter()
    return _instance


def _get_reporter() -> _WorkerReporter | None:
    """This worker where it may speak: under pdrun, and not a child that was forked from one."""
    worker = _instance or _get_worker()
    return worker if worker.is_reporting and os.getpid() == worker.pid else None


def _is_child_process() -> bool:
    """
    Whether multiprocessing has made this process: it has its worker's environment, and is none.
    """
    module: Any = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


def _check_step(step: SupportsIndex) -> int:
    number = step.__index__()
    if not 0 <= number < MAX_STEP:
        raise ValueError(f"step {number} is not between 0 and {MAX_STEP - 1}")
    return number


def _parse_number(text: str | None, default: int) -> int:
    if text is not None and text.isascii() and text.isdecimal():
        return int(text)
    return default


def _call_previous_handler(
    previous: Any, number: int, frame: FrameType | None, *, in_order: bool
) -> None:
    """
    Do what the handler before ours would have done; where there was none, leave in order, or die of
    the signal.
    """
    if callable(previous):
        previous(number, frame)
    elif previous == signal.SIG_DFL and in_order:
        raise SystemExit(128 + number)
    elif previous == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _register_stacks(path: str) -> None:
    """
    Have STACKS_SIGNAL write this process's Python stacks into a file beside the agent's socket.
    """
    import faulthandler
    import fcntl

    try:
        low = os.open(
            f"{path.rpartition('/')[0]}/{os.getpid()}.stacks",
            os.O_WRONLY | os.O_CREAT | os.O_APPEND,
            0o600,
        )
        try:
            high = fcntl.fcntl(
                low, fcntl.F_DUPFD_CLOEXEC, 200
            )  # out of the way of a script that counts on 3, 4, ...
        finally:
            os.close(low)
        faulthandler.register(STACKS_SIGNAL, file=high, all_threads=True)
    except (OSError, ValueError):
        pass  # stacks are then read from outside, as far as that goes
