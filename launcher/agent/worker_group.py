"""
The workers of one generation on this node: started together, watched, stopped with one grace, each
ended exactly once.

    start --Spawned--> running --Exited--> swept --> its last output read --> Cause reported
                          | stop: signal, SIGKILL after the grace, given up STUCK seconds later (named, not waited for)

A worker that ended because a peer went away is held back SETTLE seconds while others of this node
still run: its report would have them stopped, and the one that is really at fault may need that
time to print why.

A worker whose last word is a traceback gets an order to stop PATIENCE seconds later than the
others: if the exception was not caught, it ends by itself in that time, with Python's code for it,
and that proves it (see `causes`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pdrun.clock import Clock
from pdrun.launcher.agent.interfaces import Keeper, WorkerOutput
from pdrun.launcher.common import procfs
from pdrun.launcher.common.oom import oom_kills
from pdrun.launcher.diagnosis.causes import LINGER, Evidence, cause_of
from pdrun.launcher.plan.environment import worker_env
from pdrun.launcher.plan.model import LaunchPlan, WorkerPlan
from pdrun.launcher.plan.start_method import start_of
from pdrun.launcher.supervisor.events import (
    Exited,
    KeeperEvent,
    Spawned,
    SpawnFailed,
    Swept,
    WorkerCommand,
)
from pdrun.rendezvous.protocol.messages import Assign, Cause

SETTLE = 0.4
SWEEP_WAIT = 0.5
"""Seconds that the report of an exit waits for the sweep of what the worker left."""
DRAIN = 0.3
PATIENCE = 2.0
"""
Seconds, at most half of the grace: interpreters that have loaded torch need 0.5 s to leave, busy
ones more.
"""
STUCK = 5.0

Report = Callable[[int, Cause], None]


@dataclass
class _Worker:
    plan: WorkerPlan
    rank: int
    pid: int = 0
    status: int | None = None
    ended_at: float | None = None
    stopped_at: float | None = None
    stop_signals: list[int] = field(default_factory=list)
    signal_at: float | None = None
    """When a signal to stop that was held back is due, and which."""
    held_signal: int = 0
    failure: SpawnFailed | None = None
    swept: bool = False
    report_by: float = 0.0
    """When the report stops waiting: for the sweep, then for the settling."""
    cause: Cause | None = None
    reported: bool = False

    @property
    def running(self) -> bool:
        return self.ended_at is None


class Group:
    """See the module. All calls come from the agent's loop; `report` is called once a worker."""

    def __init__(
        self,
        plan: LaunchPlan,
        run: str,
        assign: Assign,
        keeper: Keeper,
        output: WorkerOutput,
        clock: Clock,
        report: Report,
        stdin: int | None = None,
        channel: str = "",
    ) -> None:
        self._channel = channel
        self._plan = plan
        self._run = run
        self._assign = assign
        self._keeper = keeper
        self._output = output
        self._clock = clock
        self._report = report
        self._stdin = stdin
        self._workers = {
            worker.local_rank: _Worker(worker, assign.first_rank + worker.local_rank)
            for worker in plan.workers
        }
        self._kill_at: float | None = None
        self._give_up_at: float | None = None
        self._oom_before = 0
        self.generation = assign.generation
        self.started = False

    @property
    def done(self) -> bool:
        """Whether every worker is reported and what it left is swept."""
        return all(worker.reported and worker.swept for worker in self._workers.values())

    @property
    def stopping(self) -> bool:
        """Whether the workers have been told to end."""
        return self._kill_at is not None

    def start(self) -> None:
        """Ask the keeper for all workers."""
        self.started = True
        self._oom_before = oom_kills()
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            for slot, worker in self._workers.items():
                env = worker_env(self._plan, self._run, self._assign, worker.plan, self._channel)
                out, err = self._output.open(worker.rank, slot, self.generation)
                stdin = self._stdin if worker.rank == 0 and self._stdin is not None else null
                command = WorkerCommand(
                    slot,
                    worker.plan.argv,
                    env,
                    self._plan.cwd,
                    worker.plan.cpus,
                    start_of(self._plan.starting),
                )
                try:
                    self._keeper.spawn(command, stdin, out, err)
                finally:
                    os.close(out)
                    os.close(err)
        finally:
            os.close(null)

    def take(self, event: KeeperEvent) -> None:
        """An event of one of the workers' slots."""
        worker = self._workers.get(event.slot)
        if worker is None:
            return
        match event:
            case Spawned(_, pid):
                worker.pid = pid
            case SpawnFailed():
                worker.failure, worker.ended_at, worker.swept = event, self._clock.monotonic(), True
                self._conclude(worker)
            case Exited(_, _, status, at) if worker.running:
                worker.status = status
                worker.ended_at = at
                worker.report_by = self._clock.monotonic() + SWEEP_WAIT
                self._keeper.sweep(event.slot)
            case Swept(_, processes, stuck):
                worker.swept = True
                self._tell_leftovers(worker, processes, stuck)
                if worker.cause is None:
                    self._conclude(worker)
            case _:
                pass

    def stop(self, number: int, grace: float) -> None:
        """
        Tell the workers to end: the signal now, SIGKILL after ``grace`` seconds; again: the earlier
        end counts.
        """
        self._read_everything()  # what was printed before this moment was not caused by it
        now = self._clock.monotonic()
        kill_at = now if number == signal.SIGKILL else now + grace
        first = self._kill_at is None
        if self._kill_at is not None and self._kill_at <= kill_at:
            # said again, after a reconnection say: a second signal would mean something else to a
            # script
            return
        self._kill_at = kill_at
        for worker in self._running():
            if first:
                worker.stopped_at = None if _dumps_core(worker.pid) else now
            if kill_at > now and worker.stopped_at is not None:
                wait = self._patience(worker, number, grace) if first else 0.0
                worker.signal_at = now + wait
                worker.held_signal = number
        self._flush_held()
        self.tick()

    def alive(self) -> list[tuple[int, int, int]]:
        """Return (rank, slot, pid) of the workers that run now."""
        return [
            (worker.rank, slot, worker.pid)
            for slot, worker in self._workers.items()
            if worker.running and worker.pid
        ]

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        return range(self._assign.first_rank, self._assign.first_rank + len(self._workers))

    def forward(self, number: int) -> None:
        """Pass on a signal that is none of ours."""
        for worker in self._running():
            whole = self._plan.spec.program.kind == "command" or number in (
                signal.SIGSTOP,
                signal.SIGCONT,
            )
            self._keeper.signal(worker.plan.local_rank, number, group=whole)

    def abandon(self, why: str) -> None:
        """The keeper died and with it every worker: report those who had not ended."""
        for worker in self._workers.values():
            worker.swept = True
            if worker.cause is None and worker.running:
                self._output.drain(worker.rank, DRAIN)
                worker.ended_at = self._clock.monotonic()
                worker.cause = Cause(
                    "lost", 137, signal=signal.SIGKILL, at=worker.ended_at, summary=why
                )
            elif worker.cause is None:
                self._conclude(worker)
        self._flush_held()

    def tick(self) -> None:
        """Do what has become due."""
        now = self._clock.monotonic()
        for worker in self._running():
            if worker.signal_at is not None and now >= worker.signal_at:
                self._tell(
                    worker, worker.held_signal, group=self._plan.spec.program.kind == "command"
                )
        if self._kill_at is not None and now >= self._kill_at and self._give_up_at is None:
            self._give_up_at = now + STUCK
            for worker in self._running():
                worker.stopped_at = worker.stopped_at or now
                self._tell(worker, signal.SIGKILL, group=True)
        if self._give_up_at is not None and now >= self._give_up_at:
            for worker in self._running():
                worker.ended_at = now
                worker.swept = True
                self._output.say(
                    f"pdrun: rank {worker.rank} (pid {worker.pid}) cannot be killed; leaving it behind"
                )
        for worker in self._workers.values():
            if worker.running or now < worker.report_by:
                continue
            if worker.cause is None:
                self._conclude(worker)
            elif not worker.reported:
                self._send(worker)
            elif not worker.swept and now >= worker.report_by + STUCK + SWEEP_WAIT:
                worker.swept = True

    def deadline(self) -> float | None:
        """Monotonic time at which `tick` has something to do, or None."""
        times = [
            time
            for time in (self._give_up_at or self._kill_at,)
            if time is not None and any(self._running())
        ]
        times += [worker.signal_at for worker in self._running() if worker.signal_at is not None]
        for worker in self._workers.values():
            if not worker.running and not (worker.reported and worker.swept):
                times.append(worker.report_by + (STUCK + SWEEP_WAIT if worker.reported else 0.0))
        return min(times, default=None)

    def _tell(self, worker: _Worker, number: int, *, group: bool) -> None:
        worker.signal_at = None
        worker.stop_signals.append(number)
        self._keeper.signal(worker.plan.local_rank, number, group=group)
        if number != signal.SIGKILL and _is_stopped(worker.pid):
            self._keeper.signal(
                worker.plan.local_rank, signal.SIGCONT, group=group
            )  # or it would not hear of it

    def _patience(self, worker: _Worker, number: int, grace: float) -> float:
        """
        Seconds to hold an order to stop back: only where the worker may be on its way out, never
        for a Ctrl-C.
        """
        last = self._output.traceback(worker.rank)
        if last is None or number == signal.SIGINT or self._output.survived(worker.rank):
            return 0.0
        if self._clock.monotonic() - last[0] <= LINGER:
            return min(PATIENCE, grace / 2)
        return 0.0

    def _running(self) -> Iterator[_Worker]:
        return (worker for worker in self._workers.values() if worker.running)

    def _conclude(self, worker: _Worker) -> None:
        """
        A worker has ended: read its last words, find the cause, report it (see the module for
        when).
        """
        self._output.drain(worker.rank, DRAIN)
        worker.cause = cause_of(
            Evidence(
                status=worker.status,
                at=worker.ended_at or 0.0,
                traceback=self._output.traceback(worker.rank),
                survived=self._output.survived(worker.rank),
                tail=self._output.tail(worker.rank),
                recent=self._output.recent(worker.rank),
                stopped_at=worker.stopped_at,
                stop_signals=tuple(worker.stop_signals),
                spawn_failure=worker.failure,
                oom_kills=oom_kills() - self._oom_before,
                log=self._output.log_path(worker.rank),
            )
        )
        if worker.cause.kind == "communication" and any(self._running()) and not self.stopping:
            worker.report_by = self._clock.monotonic() + SETTLE
        else:
            self._send(worker)
            if not any(self._running()):
                self._flush_held()

    def _send(self, worker: _Worker) -> None:
        if worker.cause is None or worker.reported:
            return
        worker.reported = True
        if worker.cause.kind not in ("ok", "stopped", "suspect"):
            self._output.reveal(worker.rank)
        self._report(worker.rank, worker.cause)

    def _flush_held(self) -> None:
        for worker in self._workers.values():
            self._send(worker)

    def _tell_leftovers(
        self, worker: _Worker, processes: tuple[str, ...], stuck: tuple[str, ...]
    ) -> None:
        by_itself = worker.status is not None and os.WIFEXITED(
            worker.status
        )  # a killed one could not tidy up
        if processes and by_itself and not self.stopping:
            names = "; ".join(processes)
            self._output.say(
                f"pdrun: rank {worker.rank} left processes behind, which were ended: {names}"
            )
        if stuck:
            self._output.say(
                f"pdrun: rank {worker.rank} left processes that cannot be killed: {'; '.join(stuck)}"
            )

    def _read_everything(self) -> None:
        for _ in range(8):  # a pipe holds 1 MiB, a read takes a quarter of it
            for fd in list(self._output.filenos()):
                self._output.read(fd)


def _is_stopped(pid: int) -> bool:
    """Whether somebody has stopped a process (SIGSTOP): it hears nothing until it is continued."""
    found = procfs.state(pid) if pid else None
    return found is not None and found.letter == "T"


def _dumps_core(pid: int) -> bool:
    """Whether a process has already crashed and is only writing its core."""
    try:
        return "CoreDumping:\t1" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
