"""
What an agent learns of its running workers, and tells the scheduler: progress, hangs, stacks.

    worker --datagram--> Channel --> Progress            at most every `every` seconds, what has changed
    /proc, output ------> Watch  --> Hung                once a rank and generation
    ShowStacks ---------> Inquiry -> Stacks              within 3 s

Who only waits for others is as quiet as one that hangs. So "no output and no CPU time" counts only
while no worker of this node is at work; for the scheduler, which asks the other nodes, the answer
names those who are (`Stacks.active`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pdrun.clock import Clock
from pdrun.launcher.agent.channel import WorkerChannel, WorkerReport
from pdrun.launcher.agent.interfaces import SupervisorHandle, WorkerOutput
from pdrun.launcher.agent.worker_group import WorkerGroup
from pdrun.launcher.common import procfs
from pdrun.launcher.diagnosis.hangs import HangDetector, HangSuspicion, WorkerSample
from pdrun.launcher.diagnosis.stack_collector import StackRequest
from pdrun.rendezvous.protocol.messages import Hung, Message, Progress, Stacks, Step

PROGRESS_SECONDS = 1.0
"""Seconds between two reports of progress, at least."""


class WorkerMonitor:
    """See the module. One for an agent's life; `begin` once a generation."""

    def __init__(
        self, clock: Clock, send: Callable[[Message], None], print_line: Callable[[str], None]
    ) -> None:
        self._clock = clock
        self._send_message = send
        self._print_line = print_line
        self._channel: WorkerChannel | None = None
        self._has_tried_channel = False
        self._group: WorkerGroup | None = None
        self._stack_requests: list[tuple[StackRequest, dict[int, str] | None]] = []
        """
        Each with what it was asked for: why some ranks are suspected, or None: because of
        ShowStacks.
        """
        self.progress_seconds = PROGRESS_SECONDS

    def open_channel(self, *, wrapped: bool, timeout: float | None) -> str:
        """
        Make the channel; return its path, empty where there can be none.

        Args:
            wrapped: the workers' processes are commands, below which the program proper may run.
            timeout: of hangs.
        """
        self._is_wrapped = wrapped
        self._hang_timeout = timeout
        if not self._has_tried_channel:
            self._has_tried_channel = True
            try:
                self._channel = WorkerChannel()
            except OSError as error:
                self._print_line(f"workers cannot report progress: {error}")
        return self._channel.path if self._channel else ""

    def begin_generation(
        self, group: WorkerGroup, output: WorkerOutput, keeper: SupervisorHandle
    ) -> None:
        """The workers of a generation start."""
        self._cancel_requests()
        self._group = group
        self._output = output
        self._supervisor = keeper
        now = self._clock.monotonic()
        self._last_reports: dict[int, WorkerReport] = {}
        """The last that each rank said."""
        self._reporting_pids: dict[int, int] = {}
        self._saved_steps: dict[int, int] = {}
        self._changed_ranks: set[int] = set()
        self._sent_saved_step = -1
        self._next_progress = now
        self._detectors: dict[int, HangDetector] = {}
        self._next_check = now
        self._closed_ranks: set[int] = set()
        """Ranks whose case is closed: told, or found to be at work."""
        self._repeat_at: dict[int, float] = {}
        """Ranks that were told to be quiet, and from when on to tell it again."""
        self._alive_count = 0
        self._last_exit_at = float("-inf")
        """When a worker was last seen to have ended."""

    # The loop
    # ---------------------------------------------------------------------------------------------------------

    def watched_fds(self) -> Iterator[int]:
        """Descriptors that are readable when `turn` has something to do."""
        if self._channel is not None:
            yield self._channel.fileno()

    def next_deadline(self) -> float | None:
        """When `turn` is due although nothing is readable."""
        if self._group is None or self._group.is_done:
            return None
        times = [inquiry.deadline for inquiry, _ in self._stack_requests]
        if self._group.has_started and not self._group.is_stopping:
            times.append(self._next_check)
        if self._changed_ranks:
            times.append(self._next_progress)
        return min(times, default=None)

    def run_once(self) -> None:
        """Do what is there to be done."""
        self.read_reports()
        group = self._group
        now = self._clock.monotonic()
        if group is None or not group.has_started:
            return
        if self._changed_ranks and now >= self._next_progress:
            self.send_progress()
        if now >= self._next_check and not group.is_stopping:
            self._check_workers(group, now)
        for inquiry, suspects in list(self._stack_requests):
            if now >= inquiry.deadline and inquiry.poll_workers(now):
                self._stack_requests.remove((inquiry, suspects))
                self._answer_request(group, inquiry, suspects)
                inquiry.close()

    def close(self) -> None:
        """Let go of everything."""
        self._cancel_requests()
        if self._channel is not None:
            if self._channel.rejected_count:
                self._print_line(
                    f"{self._channel.rejected_count} messages on the workers' socket were none of pdrun's"
                )
            self._channel.close()
            self._channel = None

    # Progress
    # ---------------------------------------------------------------------------------------------------------

    def read_reports(self) -> None:
        """
        Take what the workers have said; before their ends are told, or a step that was saved would
        come too late.
        """
        for told in self._channel.read_reports() if self._channel else ():
            if self._is_from_worker(told):
                self._last_reports[told.rank] = told
                self._changed_ranks.add(told.rank)
                if told.saved is not None:
                    self._saved_steps[told.rank] = told.saved

    def _is_from_worker(self, told: WorkerReport) -> bool:
        """Whether it was said by a worker of this generation, not by a helper of one."""
        group = self._group
        if (
            group is None
            or not group.has_started
            or told.generation != group.generation
            or told.rank not in group.ranks
        ):
            return False
        pid = next((pid for rank, _, pid in group.alive_workers() if rank == told.rank), 0)
        if self._is_wrapped:  # below a shell, say: the first that speaks is it
            return self._reporting_pids.setdefault(told.rank, told.pid) == told.pid
        return not pid or not told.pid or told.pid == pid

    def send_progress(self) -> None:
        """Tell the scheduler now what it has not heard."""
        group = self._group
        if group is None or not self._changed_ranks:
            return
        steps = [self._last_reports[rank] for rank in sorted(self._changed_ranks)]
        saved = min((self._saved_steps.get(rank, -1) for rank in group.ranks), default=-1)
        moved = tuple(
            Step(told.rank, told.step, told.busy) for told in steps if told.step is not None
        )
        self._changed_ranks.clear()
        self._next_progress = self._clock.monotonic() + self.progress_seconds
        if moved or saved != self._sent_saved_step:
            self._sent_saved_step = saved
            self._send_message(Progress(group.generation, moved, saved))

    # Hangs
    # ------------------------------------------------------------------------------------------------------------

    def _check_workers(self, group: WorkerGroup, now: float) -> None:
        suspects: list[tuple[tuple[bool, int, float], int, HangSuspicion]] = []
        alive = group.alive_workers()
        for rank, _, pid in alive:
            seen = self._sample_worker(rank, pid)
            if seen is None:
                self._detectors.pop(rank, None)
                continue
            watch = self._detectors.setdefault(rank, HangDetector(self._hang_timeout, now))
            found = watch.add_sample(seen, now)
            if (
                found is not None
                and rank not in self._closed_ranks
                and now >= self._repeat_at.get(rank, 0.0)
            ):
                order = (
                    seen.letter != "T",
                    -1 if seen.step is None else seen.step,
                    -watch.idle_seconds,
                )
                suspects.append((order, rank, found))
        self._next_check = now + HangDetector(self._hang_timeout, now).interval
        if len(alive) < self._alive_count:  # who waited for it takes a moment to see that
            self._last_exit_at = now
        self._alive_count = len(alive)
        someone_works = any(self._is_working(rank) for rank, _, _ in alive)
        someone_works = someone_works or now - self._last_exit_at < (self._hang_timeout or 0.0)
        ended = {rank: found.reason for _, rank, found in suspects if found.only_if_ended}
        if ended and self._channel is not None:
            self._closed_ranks |= ended.keys()
            self._request_stacks([worker for worker in alive if worker[0] in ended], now, ended)
        for _, rank, found in sorted(suspects, key=lambda suspect: suspect[:2]):
            if not found.only_if_ended and not (found.may_be_waiting and someone_works):
                self._report_hang(group, rank, found.reason, waits=found.may_be_waiting)

    def _sample_worker(self, rank: int, pid: int) -> WorkerSample | None:
        """Look at a worker; None: without a timeout there is no reason to."""
        traceback = self._output.last_traceback(rank) is not None and not self._output.has_survived(
            rank
        )
        if self._hang_timeout is None and not traceback:
            return None
        state = procfs.read_state(pid)
        told = self._last_reports.get(rank)
        return WorkerSample(
            step=told.step if told else None,
            saved=self._saved_steps.get(rank),
            output_at=self._output.last_output_at(rank),
            cpu_seconds=procfs.read_cpu_seconds(pid),
            letter=state.letter if state else "Z",
            is_traced=bool(state and state.tracer_pid),
            has_traceback=traceback,
        )

    def _is_working(self, rank: int) -> bool:
        """Whether a worker has done something within the timeout, as far as can be seen."""
        watch = self._detectors.get(rank)
        told = self._last_reports.get(rank)
        if watch is None or self._hang_timeout is None:
            return False
        return (
            watch.stuck_seconds if told and told.step is not None else watch.idle_seconds
        ) < self._hang_timeout

    def _report_hang(self, group: WorkerGroup, rank: int, why: str, *, waits: bool = False) -> None:
        # the scheduler may know of one that is at work: then it is told again after as long a time
        if waits:
            self._repeat_at[rank] = self._clock.monotonic() + (self._hang_timeout or 0.0)
        else:
            self._closed_ranks.add(rank)
        self.send_progress()
        self._send_message(Hung(group.generation, rank, why, waits))

    # Stacks
    # -----------------------------------------------------------------------------------------------------------

    def show_stacks(self, generation: int) -> None:
        """The scheduler wants to know where everybody is."""
        group = self._group
        if group is not None and group.has_started and group.generation == generation:
            self._request_stacks(group.alive_workers(), self._clock.monotonic(), None)

    def _request_stacks(
        self, workers: list[tuple[int, int, int]], now: float, suspects: dict[int, str] | None
    ) -> None:
        def signal(slot: int, number: int) -> None:
            self._supervisor.send_signal(slot, number, group=False)

        active = (
            tuple(rank for rank, _, _ in workers if self._is_working(rank))
            if suspects is None
            else ()
        )
        if self._channel is not None:
            self._stack_requests.append(
                (StackRequest(workers, self._channel.folder, signal, now, active), suspects)
            )
        elif self._group is not None:
            self._send_message(Stacks(self._group.generation, (), active))

    def _answer_request(
        self, group: WorkerGroup, inquiry: StackRequest, suspects: dict[int, str] | None
    ) -> None:
        if suspects is None:
            self._send_message(Stacks(group.generation, inquiry.grouped_stacks(), inquiry.active))
            return
        alive = {rank for rank, _, _ in group.alive_workers()}
        for rank, why in suspects.items():
            if rank in alive and not group.is_stopping and inquiry.has_program_ended(rank):
                self._report_hang(group, rank, why)

    def _cancel_requests(self) -> None:
        for inquiry, _ in self._stack_requests:
            inquiry.close()
        self._stack_requests = []
