"""
The workers of one generation on this node: started and stopped together, each reported once.

    start --Spawned--> running --Exited--> swept --> output drained --> Cause reported
                          |
                          +-- stop: signal, SIGKILL after the grace period; a worker that is still
                              there UNKILLABLE_SECONDS later is named and left behind

A worker that ended because a peer disappeared is reported SETTLE_SECONDS later while others of this
node still run. The report would stop them, and the worker at fault may need that time to print the
reason.

A worker whose last output is a traceback gets the signal to stop STOP_DELAY_SECONDS later than the
others. If the exception was not caught, the worker exits in that time with Python's own exit code,
which proves it (see `pdrun.launcher.diagnosis.causes`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping

from pdrun.clock import Clock
from pdrun.launcher.agent.group_worker import GroupWorker, is_dumping_core, is_suspended
from pdrun.launcher.agent.interfaces import SupervisorHandle, WorkerOutput
from pdrun.launcher.common.process_names import group_processes
from pdrun.launcher.common.procfs import count_oom_kills
from pdrun.launcher.common.standard_input import StandardInput
from pdrun.launcher.diagnosis.causes import LINGER_SECONDS, Evidence, find_cause
from pdrun.launcher.plan.environment import build_worker_env
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.launcher.plan.start_method import worker_start_option
from pdrun.launcher.supervisor.events import (
    Exited,
    Spawned,
    SpawnFailed,
    SupervisorEvent,
    Swept,
    WorkerCommand,
)
from pdrun.rendezvous.protocol.messages import Assign, Cause
from pdrun.topology import Device

SETTLE_SECONDS = 0.4
SWEEP_SECONDS = 0.5
"""Longest wait of an exit's report for the sweep of the worker's descendants."""
DRAIN_SECONDS = 0.3
"""Longest wait for the end of an ended worker's pipes: a descendant may hold them open."""
STOP_DELAY_SECONDS = 2.0
"""
At most half of the grace period. An interpreter that has loaded torch needs 0.5 s to exit, a busy
one more.
"""
UNKILLABLE_SECONDS = 5.0
"""Wait for the end of a killed process, which may be in an uninterruptible system call."""
READS_PER_STOP = 8
"""A pipe holds 1 MiB, and one read takes a quarter of it."""

ReportExit = Callable[[int, Cause], None]


class WorkerGroup:
    """
    Starts, watches and stops the workers. Called from the agent's loop only.

    `report_exit` is called once per worker, with its rank and the cause of its end.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        run_name: str,
        assign: Assign,
        supervisor: SupervisorHandle,
        output: WorkerOutput,
        clock: Clock,
        report_exit: ReportExit,
        stdin: StandardInput | None = None,
        channel_path: str = "",
        extra_env: Mapping[str, str] | None = None,
    ) -> None:
        self._extra_env = extra_env or {}
        self._channel_path = channel_path
        self._plan = plan
        self.run_name = run_name
        self._assign = assign
        self._supervisor = supervisor
        self._output = output
        self._clock = clock
        self._report_exit = report_exit
        self._stdin = stdin
        self.stdin_rank: int | None = None
        """Rank that reads the standard input of this process."""
        self._workers = {
            worker.local_rank: GroupWorker(worker, assign.first_rank + worker.local_rank)
            for worker in plan.workers
        }
        self._kill_at: float | None = None
        self._give_up_at: float | None = None
        self._oom_kills_before = 0
        self.generation = assign.generation
        self.has_started = False

    @property
    def is_done(self) -> bool:
        """Whether every worker is reported, and its descendants are swept."""
        return all(worker.is_reported and worker.is_swept for worker in self._workers.values())

    @property
    def is_stopping(self) -> bool:
        """Whether the workers are being stopped."""
        return self._kill_at is not None

    def start_workers(self) -> None:
        """Ask the supervisor to spawn all workers."""
        self.has_started = True
        self._oom_kills_before = count_oom_kills()
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self.stdin_rank = self._find_stdin_rank()
        try:
            for slot, worker in self._workers.items():
                env = build_worker_env(
                    self._plan, self.run_name, self._assign, worker.plan, self._channel_path
                )
                env |= self._extra_env
                out, err = self._output.open_pipes(worker.rank, slot, self.generation)
                stdin = null
                if self._stdin is not None and worker.rank == self.stdin_rank:
                    self._stdin.save_terminal()
                    stdin = self._stdin.fd
                command = WorkerCommand(
                    slot,
                    worker.plan.argv,
                    env,
                    self._plan.cwd,
                    worker.plan.cpus,
                    worker_start_option(self._plan.start_method),
                )
                try:
                    self._supervisor.spawn(command, stdin, out, err)
                finally:
                    os.close(out)
                    os.close(err)
        finally:
            os.close(null)

    def _find_stdin_rank(self) -> int | None:
        """Return the rank that reads the standard input of this process, or None."""
        if self._stdin is None:
            return None
        spec = self._plan.spec
        rank = self._stdin.choose_rank(
            spec.program.stdin, spec.output.show_ranks, self._assign.world_size
        )
        if rank not in self.ranks or self._stdin.is_readable():
            return rank
        if spec.program.stdin is not None:
            self._output.print_line(
                f"pdrun: rank {rank} cannot read the terminal: this job is in the background"
            )
        return None

    def handle_event(self, event: SupervisorEvent) -> None:
        """Handle a supervisor event; events of other slots are ignored."""
        worker = self._workers.get(event.slot)
        if worker is None:
            return
        match event:
            case Spawned(_, pid):
                worker.pid = pid
            case SpawnFailed():
                worker.spawn_failure = event
                worker.ended_at = self._clock.monotonic()
                worker.is_swept = True
                self._on_worker_end(worker)
            case Exited(_, _, status, at) if worker.is_running:
                worker.exit_status = status
                worker.ended_at = at
                worker.report_at = self._clock.monotonic() + SWEEP_SECONDS
                self._supervisor.sweep_descendants(event.slot)
            case Swept(_, processes, stuck):
                worker.is_swept = True
                self._print_leftovers(worker, processes, stuck)
                if worker.cause is None:
                    self._on_worker_end(worker)
            case _:
                pass

    def stop_workers(self, number: int, grace: float) -> None:
        """
        Send the signal now, and SIGKILL after ``grace`` seconds.

        If it is called again, the earlier end counts.
        """
        self._read_all_output()  # output from before the stop was not caused by it
        now = self._clock.monotonic()
        kill_at = now + grace
        if number == signal.SIGKILL:
            kill_at = now
        is_first = self._kill_at is None
        if self._kill_at is not None and self._kill_at <= kill_at:
            # repeated, for example after a reconnection: to a script, a second signal would mean
            # something different
            return
        self._kill_at = kill_at
        for worker in self._running_workers():
            if is_first and not is_dumping_core(worker.pid):
                worker.stopped_at = now
            if kill_at > now and worker.stopped_at is not None:
                worker.signal_at = now
                if is_first:
                    worker.signal_at = now + self._stop_delay(worker, number, grace)
                worker.delayed_signal = number
        self._report_all()
        self.run_due()

    def alive_workers(self) -> list[tuple[int, int, int]]:
        """Return (rank, slot, pid) of the running workers."""
        return [
            (worker.rank, slot, worker.pid)
            for slot, worker in self._workers.items()
            if worker.is_running and worker.pid
        ]

    def worker_devices(self) -> dict[int, Device]:
        """Return the device of each rank that has one."""
        workers = self._workers.values()
        return {one.rank: one.plan.device for one in workers if one.plan.device is not None}

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        return range(self._assign.first_rank, self._assign.first_rank + len(self._workers))

    def forward_signal(self, number: int) -> None:
        """Pass on a signal that does not stop the job."""
        to_group = self._is_command or number in (signal.SIGSTOP, signal.SIGCONT)
        for worker in self._running_workers():
            self._supervisor.send_signal(worker.plan.local_rank, number, group=to_group)

    def fail_first(self, why: str) -> None:
        """
        Report the first running worker as lost with a process that it needs, and kill it.

        The generation ends with this cause, as with any worker's.
        """
        worker = next(self._running_workers(), None)
        if worker is None or self.is_stopping:
            return
        now = self._clock.monotonic()
        worker.stopped_at = now
        worker.cause = Cause("exit", 1, at=now, summary=why, log=self._output.log_path(worker.rank))
        self._send_signal(worker, signal.SIGKILL, group=True)
        self._report_worker(worker)

    def mark_lost(self, why: str) -> None:
        """Report the running workers as lost: the supervisor died, and every worker with it."""
        for worker in self._workers.values():
            worker.is_swept = True
            if worker.cause is None and worker.is_running:
                self._output.drain_worker(worker.rank, DRAIN_SECONDS)
                worker.ended_at = self._clock.monotonic()
                worker.cause = Cause(
                    "lost", 137, signal=signal.SIGKILL, at=worker.ended_at, summary=why
                )
            elif worker.cause is None:
                self._on_worker_end(worker)
        self._report_all()

    def run_due(self) -> None:
        """Do what is due: delayed signals, SIGKILL, reports."""
        now = self._clock.monotonic()
        for worker in self._running_workers():
            if worker.signal_at is not None and now >= worker.signal_at:
                self._send_signal(worker, worker.delayed_signal, group=self._is_command)
        if self._kill_at is not None and now >= self._kill_at and self._give_up_at is None:
            self._give_up_at = now + UNKILLABLE_SECONDS
            for worker in self._running_workers():
                worker.stopped_at = worker.stopped_at or now
                self._send_signal(worker, signal.SIGKILL, group=True)
        if self._give_up_at is not None and now >= self._give_up_at:
            for worker in self._running_workers():
                worker.ended_at = now
                worker.is_swept = True
                name = f"rank {worker.rank} (pid {worker.pid})"
                self._output.print_line(f"pdrun: {name} cannot be killed; leaving it behind")
        for worker in self._workers.values():
            if worker.is_running or now < worker.report_at:
                continue
            if worker.cause is None:
                self._on_worker_end(worker)
            elif not worker.is_reported:
                self._report_worker(worker)
            elif not worker.is_swept and now >= self._sweep_deadline(worker):
                worker.is_swept = True

    def next_deadline(self) -> float | None:
        """Return the monotonic time at which `run_due` has something to do, or None."""
        times = []
        end_at = self._give_up_at or self._kill_at
        if end_at is not None and any(self._running_workers()):
            times.append(end_at)
        for worker in self._workers.values():
            if worker.is_running:
                if worker.signal_at is not None:
                    times.append(worker.signal_at)
            elif not worker.is_reported:
                times.append(worker.report_at)
            elif not worker.is_swept:
                times.append(self._sweep_deadline(worker))
        return min(times, default=None)

    @property
    def _is_command(self) -> bool:
        """Whether the workers are plain commands: then signals go to whole process groups."""
        return self._plan.spec.program.kind == "command"

    def _sweep_deadline(self, worker: GroupWorker) -> float:
        """Return when a reported worker is treated as swept although nothing confirmed it."""
        return worker.report_at + UNKILLABLE_SECONDS + SWEEP_SECONDS

    def _send_signal(self, worker: GroupWorker, number: int, *, group: bool) -> None:
        worker.signal_at = None
        worker.sent_signals.append(number)
        slot = worker.plan.local_rank
        self._supervisor.send_signal(slot, number, group=group)
        if number != signal.SIGKILL and is_suspended(worker.pid):
            # a suspended process handles the signal only when it is continued
            self._supervisor.send_signal(slot, signal.SIGCONT, group=group)

    def _stop_delay(self, worker: GroupWorker, number: int, grace: float) -> float:
        """
        Return the seconds by which to delay a signal to stop.

        Only a worker that may be exiting gets a delay, and never for a Ctrl-C.
        """
        last = self._output.last_traceback(worker.rank)
        if last is None or number == signal.SIGINT or self._output.has_survived(worker.rank):
            return 0.0
        if self._clock.monotonic() - last[0] <= LINGER_SECONDS:
            return min(STOP_DELAY_SECONDS, grace / 2)
        return 0.0

    def _running_workers(self) -> Iterator[GroupWorker]:
        return (worker for worker in self._workers.values() if worker.is_running)

    def _on_worker_end(self, worker: GroupWorker) -> None:
        """Read the last output of an ended worker, find the cause, and report it now or later."""
        self._output.drain_worker(worker.rank, DRAIN_SECONDS)
        worker.cause = find_cause(
            Evidence(
                status=worker.exit_status,
                at=worker.ended_at or 0.0,
                traceback=self._output.last_traceback(worker.rank),
                survived=self._output.has_survived(worker.rank),
                tail=self._output.last_lines(worker.rank),
                recent=self._output.recent_stderr(worker.rank),
                stopped_at=worker.stopped_at,
                stop_signals=tuple(worker.sent_signals),
                spawn_failure=worker.spawn_failure,
                oom_kills=count_oom_kills() - self._oom_kills_before,
                log=self._output.log_path(worker.rank),
            )
        )
        others_run = any(self._running_workers())
        if worker.cause.kind == "communication" and others_run and not self.is_stopping:
            worker.report_at = self._clock.monotonic() + SETTLE_SECONDS
        else:
            self._report_worker(worker)
            if not others_run:
                self._report_all()

    def _report_worker(self, worker: GroupWorker) -> None:
        if worker.cause is None or worker.is_reported:
            return
        worker.is_reported = True
        if worker.cause.kind not in ("ok", "stopped", "suspect"):
            self._output.show_hidden_tail(worker.rank)
        self._report_exit(worker.rank, worker.cause)

    def _report_all(self) -> None:
        for worker in self._workers.values():
            self._report_worker(worker)

    def _print_leftovers(
        self, worker: GroupWorker, processes: tuple[str, ...], stuck: tuple[str, ...]
    ) -> None:
        # a killed worker had no chance to clean up
        has_exited = worker.exit_status is not None and os.WIFEXITED(worker.exit_status)
        rank = f"pdrun: rank {worker.rank}"
        if processes and has_exited and not self.is_stopping:
            names = group_processes(processes)
            self._output.print_line(f"{rank} left processes behind, which were ended: {names}")
        if stuck:
            names = group_processes(stuck)
            self._output.print_line(f"{rank} left processes that cannot be killed: {names}")

    def _read_all_output(self) -> None:
        for _ in range(READS_PER_STOP):
            for fd in list(self._output.watched_fds()):
                self._output.read_pipe(fd)
