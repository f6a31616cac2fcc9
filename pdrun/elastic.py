"""
What a script reports to pdrun while it runs, and what it can ask. Outside pdrun these calls do
nothing.

    import pdrun
    from pdrun import elastic

    start = elastic.agreed_step() + 1           # the last step that every worker has saved, or -1
    for step in range(start, steps):
        train(step)
        pdrun.progress(step)                    # for the detection of hangs and slow ranks
        if step % 100 == 0 or elastic.stopping():
            save(step)
            elastic.saved(step)
        if elastic.stopping():                  # SIGTERM: this node leaves, or the workers restart
            break

Reports are datagrams to the agent, through a socket file in a folder of mode 0700. They never
block: an agent that does not read costs nothing. Only the worker itself reports. In its children
(of DataLoader, for example) every call here does nothing.

Limits: Python delivers signals to the main thread only, so `on_stop` must be called there. In other
threads `stopping` returns the current state and installs no handler. A main thread inside a long C
call is notified of a stop when the call returns.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # every worker imports this module; importing typing would take longer than it
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
"""Minimum time between two reports of a worker. A saved step is reported immediately."""
SAMPLE_SECONDS = 5.0
"""Time between two steps that a `pdrun.Run` reports."""
RATE_SECONDS = 1.0
"""Shortest time over which the rate of steps and the own work of one are taken."""
PEAK_MODULE = "pdrun.parallel.report.device_peak"
"""Imported by name when FLOPs are reported: it is on a higher floor."""
MAX_STEP = 1 << 53
"""Steps must be below this: other processes may store them as doubles."""
MAX_NUMBERS = 32
"""Numbers that a worker reports with its step."""
MAX_NAME_CHARACTERS = 64
SAVED_REPORT_SECONDS = 1.0
"""Time that the report of a saved step waits for an agent whose queue is full."""
MAX_PLAN_BYTES = 24_000
MAX_FACTS = 256
MAX_FACT_CHARACTERS = 400
TRACE_LOOK_SECONDS = 0.5
"""Time between two looks for a request of `pdrun trace`."""
TRACE_REQUEST = "trace.json"
"""File beside the agent's socket; `launcher/jobs/views/trace.py` writes it."""
TRACE_MODULE = "pdrun.parallel.startup.step_trace"
"""Imported by name when a trace is asked for: it is on a higher floor, and needs torch."""
STACKS_SIGNAL = 51
"""
Requests the stacks of a worker. A real-time signal that programs rarely use.
`launcher/stdlib_only/forked_worker.py` has the same constant.
"""


class _WorkerReporter:
    """This process as a worker: its socket to the agent, its last report, its stop request."""

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
        self.has_script_busy = False
        """Whether the script measures its own work: then it is not estimated."""
        self.cpu_anchor: tuple[int, int, float] | None = None
        """Thread, step and CPU time of that thread from which the estimate counts."""
        self.next_estimate_at = 0.0
        self.saved = -1
        self.total = 0
        self.is_sampled = False
        """Whether the step is one of a `pdrun.Run`, which reports some of its steps only."""
        self.has_script_steps = False
        """Whether the script reports its steps: then a run does not."""
        self.is_paused = False
        """Whether it waits in `pdrun.breakpoint`: then it does not hang."""
        self.next_sample_at = 0.0
        self.next_look_at = 0.0
        """Monotonic time of the next look for a request of a trace."""
        self.starts_trace_at = 0.0
        """Monotonic time at which a trace that was asked for starts."""
        self.trace: Any = None
        """The trace that runs."""
        self.flops = 0.0
        """FLOPs of the model in a step, as the script says; 0: not known."""
        self.utilization = 0.0
        """Share of the devices' peak that the last steps used for these; 0: not known."""
        self.rate_anchor: tuple[int, float] | None = None
        """Step and monotonic time from which the rate of steps counts."""
        self.numbers: dict[str, Any] = {}
        """What the script reports with its step; tensors become numbers when they are sent."""
        self.bad_steps: dict[str, int] = {}
        """Of the numbers that are not finite now: the first step with such a value."""
        self.next_report_at = 0.0
        """Monotonic time from which the next report may be sent."""
        self.pending = threading.Event()
        """Set while there is a report that the flusher must send."""
        self.flusher: threading.Thread | None = None
        self.callbacks: list[Callable[[], object]] = []
        self.stop_requested = False
        self.has_handler = False
        self.previous_handler: Any = None
        if self.is_reporting:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            _register_stacks(self.path)

    def send_report(self) -> bool:
        """Send the current values; return False if the agent's queue is full."""
        busy = f',"busy":{self.busy:.6g}' if self.busy else ""
        saved = f',"saved":{self.saved}' if self.saved >= 0 else ""
        step = f',"step":{self.step}' if self.step >= 0 else ""
        total = f',"total":{self.total}' if self.total else ""
        known = self.numbers
        if self.utilization and "mfu" not in known:
            known = {**known, "mfu": self.utilization}
        numbers = f',"numbers":{self.format_numbers(known)}' if known else ""
        if self.bad_steps:  # another thread may change it
            steps = tuple(self.bad_steps.items())
            bad = ",".join(f'"{name}":{first}' for name, first in steps if name in known)
            numbers += f',"bad":{{{bad}}}'
        sampled = ',"sampled":true' if self.is_sampled else ""
        paused = ',"paused":true' if self.is_paused else ""
        head = f'"rank":{self.rank},"generation":{self.generation}'
        return self.send_text(f"{{{head}{step}{sampled}{paused}{busy}{saved}{total}{numbers}}}")

    def send_text(self, text: str) -> bool:
        """Send a datagram; return False if the agent's queue is full."""
        try:
            assert self.socket is not None
            self.socket.sendto(text.encode(), self.path)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def estimate_busy(self, now: float) -> None:
        """
        Without ``busy=``, take the CPU time of this thread per step, over RATE_SECONDS or more.

        That is the worker's own work only if a thread that waits for others sleeps, see
        `_waits_asleep`; else nothing is known.
        """
        if now < self.next_estimate_at or self.has_script_busy:
            return
        self.next_estimate_at = now + RATE_SECONDS
        if not _waits_asleep():
            return
        anchor = (threading.get_ident(), self.step, time.thread_time())
        before, self.cpu_anchor = self.cpu_anchor, anchor
        if before is not None and before[0] == anchor[0] and before[1] < self.step:
            self.busy = (anchor[2] - before[2]) / (self.step - before[1])

    def note_numbers(self, numbers: dict[str, Any]) -> None:
        """Keep the step's numbers, and look for bad ones where that waits for no device."""
        # without their graph: the step's activations must not live until the next report
        self.numbers = {
            name: value.detach() if hasattr(value, "detach") else value
            for name, value in numbers.items()
        }
        for name, value in self.numbers.items():
            if type(value) is float:
                if -1e300 < value < 1e300:
                    if self.bad_steps:
                        self.bad_steps.pop(name, None)
                else:
                    self.bad_steps.setdefault(name, self.step)
            elif getattr(value, "is_cpu", False):
                self.read_number(name, value)

    def read_number(self, name: str, value: Any) -> float | None:
        """Return a number; None: it cannot be read. Note whether it is finite."""
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            return None  # a tensor of several elements, or a device that is capturing a graph
        if abs(number) < 1e300:
            self.bad_steps.pop(name, None)
        else:
            self.bad_steps.setdefault(name, self.step)
        return number

    def format_numbers(self, numbers: dict[str, Any]) -> str:
        """Return numbers as JSON: null if not finite. One that cannot be read is left out."""
        parts = []
        for name, value in numbers.items():
            number = self.read_number(name, value)
            if number is not None:
                text = f"{number:.9g}" if abs(number) < 1e300 else "null"
                parts.append(f'"{name}":{text}')
        return "{" + ",".join(parts) + "}"

    def note_rate(self) -> None:
        """Update the utilization, at most once in RATE_SECONDS."""
        now = time.monotonic()
        if self.rate_anchor is None or self.step <= self.rate_anchor[0]:
            self.rate_anchor = (self.step, now)
            return
        step, since = self.rate_anchor
        if now - since < RATE_SECONDS:
            return
        self.rate_anchor = (self.step, now)
        self.utilization = self.flops * (self.step - step) / (now - since) / _read_world_peak()

    def report_soon(self) -> None:
        """Send the current values, or let the flusher send them if the last report is recent."""
        now = time.monotonic()
        if self.trace is not None or now >= self.next_look_at:
            self.run_trace(now)
        self.estimate_busy(now)
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
                atexit.register(self.send_pending)

    def run_trace(self, now: float) -> bool:
        """
        Start a trace that `pdrun trace` has asked for, or count a step of the one that runs.

        Returns:
            Whether one runs.
        """
        if self.trace is not None:
            if not self.trace.count_step():
                self.trace = None
        elif now >= self.next_look_at:
            self.next_look_at = now + TRACE_LOOK_SECONDS
            request = f"{self.path.rpartition('/')[0]}/{TRACE_REQUEST}"
            if os.path.exists(request):  # noqa: PTH110 - pathlib is not imported here
                import importlib

                module: Any = importlib.import_module(TRACE_MODULE)
                found = module.start_trace(request, self.rank)
                if isinstance(found, float):  # all ranks start at the same time
                    self.next_look_at = self.starts_trace_at = now + found
                else:
                    self.trace = found
        return self.trace is not None

    def flush_reports(self) -> None:
        """
        Send delayed reports, in a thread that only scripts with fast steps have.

        Without it the last of several fast steps would not be reported.
        """
        while True:
            self.pending.wait()
            time.sleep(max(0.0, self.next_report_at - time.monotonic()))
            self.pending.clear()
            self.next_report_at = time.monotonic() + REPORT_SECONDS
            self.send_report()

    def send_pending(self) -> None:
        """Send the last of several fast steps: the process exits before the flusher would."""
        if self.pending.is_set() and os.getpid() == self.pid:
            self.send_report()

    def install_handler(self) -> bool:
        """
        Handle SIGTERM; return whether it is handled.

        Not possible in a child process or outside the main thread.
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
        """Handle SIGTERM: request a stop, run the callbacks, then do what the old handler did."""
        # A forked child still has this handler: DataLoader ends its children by SIGTERM.
        if os.getpid() != self.pid:
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


def progress(
    step: SupportsIndex,
    busy: float | None = None,
    *,
    total: SupportsIndex | None = None,
    flops: float | None = None,
    **numbers: Any,
) -> None:
    """
    Report that this worker has completed a step.

    With ``--hang-timeout``, a worker that completes no step for that long hangs. A rank that falls
    behind is named while the job runs. Call it once per step. A call that sends nothing takes 1 to
    2 microseconds.

    Args:
        step: number of the step, at least 0.
        busy: seconds of the worker's own work in the step, without the time that it waited for
            other ranks. Shows a slow rank although all ranks complete their steps together. None:
            the CPU time of the calling thread where collectives are those of gloo on CPUs, which
            sleep while they wait (not seen: a rank that itself sleeps, or waits for its disk);
            else not known.
        total: number of steps of the whole run. None: as reported before, or not known.
        flops: floating point operations of the model in a step, of all ranks together. With them
            ``mfu`` is reported, the share of the devices' peak, where that is known.
        numbers: what `pdrun status` and `pdrun report` show of the step: ``loss=loss, lr=lr``.
            Numbers, or tensors of one element. A tensor is read when it is sent, at most ten times
            a second, in another thread if the steps are short: do not change it in place. At most
            32.

    Raises:
        ValueError: ``step``, ``busy``, ``total`` or ``flops`` is out of range.
        ConfigError: PDRUN_PEAK_FLOPS is no peak.
        TypeError: one of ``numbers`` is no number, or there are too many of them.
    """
    worker = _get_reporter()
    if worker is None:
        return
    worker.step = _check_step(step)
    worker.has_script_steps = True
    worker.is_sampled = False
    if busy is not None:
        if not 0 <= busy < 1e9:
            raise ValueError(f"busy must be a number of seconds, got {busy!r}")
        worker.busy = float(busy)
        worker.has_script_busy = True
    if total is not None:
        worker.total = _check_step(total)
    if flops is not None:
        if not 0 <= flops < 1e30:
            raise ValueError(f"flops must be a number of operations, got {flops!r}")
        worker.flops = float(flops)
    if worker.flops:
        worker.note_rate()
    if numbers:
        _check_numbers(numbers)
        worker.note_numbers(numbers)
    worker.report_soon()


def sample_step(
    step: int, read_numbers: Callable[[], dict[str, float]], *, is_last: bool = False
) -> float:
    """
    Report a step of a `pdrun.Run`, for the eyes: it does not count for hangs and ranks behind.

    If the script reports its own steps, nothing is reported. Of several runs in a script, the first
    that is due reports.

    Args:
        step: number of the step.
        read_numbers: returns the step's numbers; only called if they are sent.
        is_last: report it, however recent the last report is: the process exits.

    Returns:
        the monotonic time from which the next call should be made. It is at a full multiple of
        SAMPLE_SECONDS of the wall clock, so that all ranks report the same step.
    """
    worker = _get_reporter()
    if worker is None or worker.has_script_steps:
        return float("inf")
    now = time.monotonic()
    due = now + SAMPLE_SECONDS - time.time() % SAMPLE_SECONDS
    if is_last or now >= worker.next_sample_at:
        worker.next_sample_at = due
        worker.step = _check_step(step)
        worker.is_sampled = True
        worker.estimate_busy(now)
        worker.numbers = read_numbers()
        worker.send_report()
    if not is_last and worker.run_trace(now):
        return now  # each of its steps counts
    return min(due, worker.starts_trace_at) if worker.starts_trace_at > now else due


def takes_plan() -> bool:
    """Return whether `report_plan` reports: this process is rank 0 of a job of pdrun."""
    worker = _get_reporter()
    return worker is not None and worker.rank == "0"


def report_plan(
    facts: list[tuple[str, str, str]], cells: tuple[tuple[str, str, str], ...] = ()
) -> None:
    """
    Report what this worker's run does, for the event log; only rank 0 does.

    Args:
        facts: name, value and source of each; the first ones, if they are too many.
        cells: longer ones, which are left out together if they do not fit.
    """
    worker = _get_reporter()
    if worker is None or worker.rank != "0":
        return
    import json

    kept: list[list[str]] = []
    size = 0
    for fact in facts:
        row = [text[:MAX_FACT_CHARACTERS] for text in fact]
        size += len(json.dumps(row)) + 1
        if size <= MAX_PLAN_BYTES and len(kept) < MAX_FACTS:
            kept.append(row)
    size += sum(len(json.dumps(row)) + 1 for row in cells)
    if size <= MAX_PLAN_BYTES and len(kept) + len(cells) <= MAX_FACTS:
        kept += [list(fact) for fact in cells]
    head = {"rank": 0, "generation": worker.generation, "plan": kept}
    give_up = time.monotonic() + SAVED_REPORT_SECONDS
    while not worker.send_text(json.dumps(head)) and time.monotonic() < give_up:
        time.sleep(0.005)


def pause(is_paused: bool) -> str:
    """
    Report that this worker waits in a debugger, or that it goes on; while it waits, it does not
    hang. Return its agent's private folder; empty: no agent.
    """
    worker = _get_reporter()
    if worker is None:
        return ""
    worker.is_paused = is_paused
    worker.send_report()
    return worker.path.rpartition("/")[0]


def saved(step: SupportsIndex) -> None:
    """
    Report that a step is saved, so that a later generation may start from it.

    After a restart `agreed_step` returns the last step that all workers have reported. Every rank
    must report it, also if only one rank writes: the others report it when they know that it is
    written (after a barrier).

    Raises:
        ValueError: ``step`` is out of range.
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
    Call ``callback()`` once when this worker must stop (SIGTERM), in the main thread.

    It may save a checkpoint. SIGKILL follows after the job's grace period. When all callbacks have
    returned, the previous signal handler is called. Without one the process exits with 143, by
    SystemExit, so that ``finally`` blocks and exit handlers run. A script that wants to choose the
    moment of its end polls `stopping` instead.

    Returns:
        the callback, so that this can be used as a decorator.

    Raises:
        RuntimeError: called outside the main thread, where Python cannot install a handler.
    """
    worker = _get_worker()
    if not _is_child_process() and os.getpid() == worker.pid:
        if not worker.install_handler():
            raise RuntimeError(
                "pdrun.elastic.on_stop must be called in the main thread, which receives signals"
            )
        worker.callbacks.append(callback)
    return callback


def stopping() -> bool:
    """
    Return whether this worker must stop.

    From the first call on (in the main thread) SIGTERM only sets this. A second SIGTERM ends the
    process, as the first one would have.
    """
    worker = _get_worker()
    if os.getpid() != worker.pid:
        return False
    worker.install_handler()
    return worker.stop_requested


def agreed_step() -> int:
    """Return the last step that every worker of an earlier generation has saved; -1: none."""
    return _get_worker().agreed


def generation() -> int:
    """Return how often the workers were started before: after failures and changes of nodes."""
    return _get_worker().generation


def restart_count() -> int:
    """Return how often the job was restarted after a failure; equal on all nodes."""
    return _get_worker().restarts


def attach() -> None:
    """Let the agent request this worker's stacks. Every other call here does it, too."""
    _get_worker()


_instance: _WorkerReporter | None = None


def _get_worker() -> _WorkerReporter:
    global _instance
    if _instance is None:
        _instance = _WorkerReporter()
    return _instance


def _get_reporter() -> _WorkerReporter | None:
    """Return this worker if it may report: it runs under pdrun and is not a forked child."""
    worker = _instance or _get_worker()
    if worker.is_reporting and os.getpid() == worker.pid:
        return worker
    return None


def _is_child_process() -> bool:
    """Return whether multiprocessing has started this process: it is a child of a worker."""
    module: Any = sys.modules.get("multiprocessing.process")
    return module is not None and module.parent_process() is not None


def _waits_asleep() -> bool:
    """
    Return whether a thread of this process sleeps while it waits for other ranks.

    It does with gloo on CPUs. With NCCL, MPI and the like it spins, there or at the next value that
    is read from the device: its CPU time would blame the rank that waits.
    """
    torch: Any = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    for name in ("cuda", "npu", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_initialized():
            return False
    return "gloo" in distributed.get_backend()


def _check_step(step: SupportsIndex) -> int:
    number = step.__index__()
    if not 0 <= number < MAX_STEP:
        raise ValueError(f"step must be from 0 to {MAX_STEP - 1}, got {number}")
    return number


_world_peak = 0.0


def _read_world_peak() -> float:
    """Return the FLOP per second of all devices of the job; infinite: not known."""
    global _world_peak
    if not _world_peak:
        import importlib

        module: Any = importlib.import_module(PEAK_MODULE)
        found = module.find_peak()
        world = _parse_number(os.environ.get("WORLD_SIZE"), 1)
        _world_peak = found.flops * world if found is not None else float("inf")
    return _world_peak


def _check_numbers(numbers: dict[str, Any]) -> None:
    if len(numbers) > MAX_NUMBERS:
        raise TypeError(f"at most {MAX_NUMBERS} numbers can be reported, got {len(numbers)}")
    for name, value in numbers.items():
        if not hasattr(value, "__float__"):
            raise TypeError(f"{name} must be a number, got {type(value).__name__}")
        plain = name.replace(".", "_")
        if not (plain.isascii() and plain.isidentifier() and len(name) <= MAX_NAME_CHARACTERS):
            raise TypeError(f"{name!r} is no name: letters, digits, _ and ., at most 64")


def _parse_number(text: str | None, default: int) -> int:
    if text is not None and text.isascii() and text.isdecimal():
        return int(text)
    return default


def _call_previous_handler(
    previous: Any, number: int, frame: FrameType | None, *, in_order: bool
) -> None:
    """
    Do what the previous handler would have done.

    Without one: exit by SystemExit (``in_order``), or die of the signal.
    """
    if callable(previous):
        previous(number, frame)
    elif previous == signal.SIG_DFL and in_order:
        raise SystemExit(128 + number)
    elif previous == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _register_stacks(path: str) -> None:
    """Let STACKS_SIGNAL write this process's Python stacks to a file next to the agent's socket."""
    import faulthandler
    import fcntl

    try:
        low = os.open(
            f"{path.rpartition('/')[0]}/{os.getpid()}.stacks",
            os.O_WRONLY | os.O_CREAT | os.O_APPEND,
            0o600,
        )
        try:
            # A high number, because a script may rely on 3, 4, ... being free.
            high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 200)
        finally:
            os.close(low)
        faulthandler.register(STACKS_SIGNAL, file=high, all_threads=True)
    except (OSError, ValueError):
        pass  # stacks are then read from outside, as far as possible
