"""
What an agent learns about its workers and reports to the scheduler: progress, hangs, stacks.

    worker --datagram--> WorkerChannel -> Progress    at most every `progress_seconds`, the changes
    /proc, output -----> HangDetector  -> Hung        once per rank and generation
    ShowStacks --------> StackRequest  -> Stacks      within 3 s

A worker that only waits for others is as quiet as one that hangs. So "no output and no CPU time"
counts only if no worker of this node is working. `Stacks.active` names the working ranks of this
node, so that the scheduler can apply the same rule to the whole job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pdrun.clock import Clock
from pdrun.launcher.agent.channel import WorkerChannel, WorkerReport
from pdrun.launcher.agent.interfaces import SupervisorHandle, WorkerOutput
from pdrun.launcher.agent.worker_group import WorkerGroup
from pdrun.launcher.common import procfs
from pdrun.launcher.diagnosis.hangs import HangDetector, HangSuspicion, WorkerSample
from pdrun.launcher.diagnosis.late_variables import LateVariableCounter
from pdrun.launcher.diagnosis.stack_collector import StackRequest
from pdrun.launcher.diagnosis.usage import UsageSampler, choose_tool_runner
from pdrun.rendezvous.policies.collectives import describe_collective
from pdrun.rendezvous.policies.numbers import sum_numbers
from pdrun.rendezvous.policies.progress import MAX_PLANS
from pdrun.rendezvous.protocol.messages import (
    CollectiveReport,
    Hung,
    Message,
    Progress,
    Stacks,
    Step,
)

if TYPE_CHECKING:  # only jobs with a hang timeout import it
    from pdrun.launcher.diagnosis.spin_watch import SpinWatch

PROGRESS_SECONDS = 1.0
"""Shortest time between two reports of progress."""
MAX_LAST_READS = 16
"""Reads of reports when a worker has ended: more than its socket holds, while others report."""
MAX_COLLECTIVES = 64
"""Collectives that one node reports."""
MAX_SCAN_SECONDS = 5.0
"""Longest time after which a new descendant of a worker counts."""


class WorkerMonitor:
    """Watches the workers. One per agent; `begin_generation` is called once per generation."""

    def __init__(
        self,
        clock: Clock,
        send: Callable[[Message], None],
        print_line: Callable[[str], None],
        *,
        is_quiet: bool = False,
    ) -> None:
        """
        Args:
            clock: tells the time.
            send: sends a message to the scheduler.
            print_line: prints a line.
            is_quiet: another agent prints what concerns the whole job.
        """
        self._clock = clock
        self._send_message = send
        self._print_line = print_line
        self._channel: WorkerChannel | None = None
        self._has_tried_channel = False
        self._group: WorkerGroup | None = None
        self._stack_requests: list[tuple[StackRequest, dict[int, str] | None]] = []
        """
        Each with its purpose: the suspected ranks and why, or None if the scheduler asked.
        """
        self._spin_watch: SpinWatch | None = None
        self.progress_seconds = PROGRESS_SECONDS
        self._late_variables = LateVariableCounter()
        self._is_quiet = is_quiet

    def open_channel(self, *, is_wrapped: bool, hang_timeout: float | None) -> str:
        """
        Open the channel; return its path, or an empty string if that is impossible.

        Args:
            is_wrapped: the workers are commands, and the actual program may be a child of them.
            hang_timeout: seconds, or None.
        """
        self._is_wrapped = is_wrapped
        self._hang_timeout = hang_timeout
        if not self._has_tried_channel:
            self._has_tried_channel = True
            try:
                self._channel = WorkerChannel()
            except OSError as error:
                self._print_line(f"workers cannot report progress: {error}")
        return self._channel.path if self._channel else ""

    def begin_generation(
        self, group: WorkerGroup, output: WorkerOutput, supervisor: SupervisorHandle
    ) -> None:
        """Watch the workers of a new generation, which are about to start."""
        self._cancel_requests()
        self._group = group
        self._output = output
        self._supervisor = supervisor
        now = self._clock.monotonic()
        self._last_reports: dict[int, WorkerReport] = {}
        """The last report of each rank."""
        self._reporting_pids: dict[int, int] = {}
        self._saved_steps: dict[int, int] = {}
        self._changed_ranks: set[int] = set()
        self._sent_saved_step = -1
        self._plan_count = 0
        self._next_progress = now
        self._detectors: dict[int, HangDetector] = {}
        self._meters: dict[int, procfs.CpuMeter] = {}
        self._begun_at = now
        if self._spin_watch is not None:
            self._spin_watch.close()
            self._spin_watch = None
        if self._channel is not None and self._hang_timeout:
            from pdrun.launcher.diagnosis.spin_watch import SpinWatch

            self._spin_watch = SpinWatch(
                self._hang_timeout, self._channel.folder, self._signal_worker
            )
        self._next_check = now
        self._closed_ranks: set[int] = set()
        """Ranks that need no further check: reported as hanging, or about to be looked into."""
        self._repeat_at: dict[int, float] = {}
        """Ranks that were reported as possibly waiting, and when to report them again."""
        self._usage: UsageSampler | None = None
        """Made when the workers have started."""
        self._alive_count = 0
        self._last_exit_at = float("-inf")
        """When a worker was last found to have ended."""

    # The loop

    def watched_fds(self) -> Iterator[int]:
        """Yield the descriptors that are readable when `run_once` has something to do."""
        if self._channel is not None:
            yield self._channel.fileno()

    def next_deadline(self) -> float | None:
        """Return the monotonic time at which `run_once` is due although nothing is readable."""
        if self._group is None or self._group.is_done:
            return None
        times = [request.deadline for request, _ in self._stack_requests]
        if self._spin_watch is not None and (look := self._spin_watch.next_deadline()) is not None:
            times.append(look)
        if self._group.has_started and not self._group.is_stopping:
            times.append(self._next_check)
            if self._usage is not None:
                times.append(self._usage.next_at)
        if self._changed_ranks:
            times.append(self._next_progress)
        if self._late_variables.print_at is not None:
            times.append(self._late_variables.print_at)
        return min(times, default=None)

    def run_once(self) -> None:
        """Read reports; send progress, check for hangs and answer stack requests if due."""
        self.read_reports()
        group = self._group
        now = self._clock.monotonic()
        if group is None or not group.has_started:
            return
        if self._changed_ranks and now >= self._next_progress:
            self.send_progress()
        self._sample_usage(group, now)
        late_at = self._late_variables.print_at
        if late_at is not None and (now >= late_at or group.is_done):
            self._print_late_variables()
        look = self._spin_watch.next_deadline() if self._spin_watch is not None else None
        is_look_due = look is not None and now >= look
        if (now >= self._next_check or is_look_due) and not group.is_stopping:
            self._check_workers(group, now)
        for request, suspects in list(self._stack_requests):
            if now >= request.deadline and request.poll_workers(now):
                self._stack_requests.remove((request, suspects))
                self._answer_request(group, request, suspects)
                request.close()

    def close(self) -> None:
        """Cancel all requests and close the channel."""
        self._cancel_requests()
        if self._spin_watch is not None:
            self._spin_watch.close()
        self._print_late_variables()
        if self._channel is not None:
            if self._channel.rejected_count:
                self._print_line(
                    f"{self._channel.rejected_count} messages on the workers' socket were rejected:"
                    " they did not have the format of a worker's report"
                )
            self._channel.close()
            self._channel = None

    # Progress

    def read_reports(self) -> bool:
        """
        Read the workers' reports; return whether there were any.

        Call it before exits are reported: a saved step must reach the scheduler first.
        """
        if self._channel is None:
            return False
        reports = self._channel.read_reports()
        for report in reports:
            if self._is_from_worker(report) and report.late and self._group is not None:
                self._late_variables.add_report(
                    report.rank, report.late, self._clock.monotonic(), len(self._group.ranks)
                )
            elif report.plan:
                self._send_plan(report)
            elif self._is_from_worker(report):
                self._last_reports[report.rank] = report
                self._changed_ranks.add(report.rank)
                if report.saved is not None:
                    self._saved_steps[report.rank] = report.saved
        return bool(reports)

    def _send_plan(self, report: WorkerReport) -> None:
        """Send what rank 0 says about its run, MAX_PLANS times in a generation."""
        if report.rank or self._plan_count >= MAX_PLANS or not self._is_from_worker(report):
            return
        self._plan_count += 1
        self._send_message(Progress(report.generation, plan=report.plan))

    def _print_late_variables(self) -> None:
        line = self._late_variables.take_line()
        if line and not self._is_quiet:
            self._print_line(line)

    def _is_from_worker(self, report: WorkerReport) -> bool:
        """Return whether a worker of this generation sent a report, not a helper of a worker."""
        group = self._group
        if group is None or not group.has_started or report.generation != group.generation:
            return False
        if report.rank not in group.ranks:
            return False
        if self._is_wrapped:
            # the program may run below a shell: the first process that reports is the worker
            first_pid = self._reporting_pids.setdefault(report.rank, report.pid)
            return report.pid == first_pid
        pids = {rank: pid for rank, _, pid in group.alive_workers()}
        pid = pids.get(report.rank, 0)
        return not pid or not report.pid or report.pid == pid

    def send_last_progress(self) -> None:
        """
        Read all reports that have come, and send the progress: a worker has ended.

        Its last report may have come after the last call of `read_reports`.
        """
        for _ in range(MAX_LAST_READS):
            if not self.read_reports():
                break
        self.send_progress()

    def send_progress(self) -> None:
        """Send the progress that the scheduler does not know yet."""
        group = self._group
        if group is None or not self._changed_ranks:
            return
        steps = []
        for rank in sorted(self._changed_ranks):
            report = self._last_reports[rank]
            if report.step is not None:
                steps.append(Step(rank, report.step, report.busy, report.is_sampled))
        # a step counts as saved when all workers of the node have saved it
        saved = min((self._saved_steps.get(rank, -1) for rank in group.ranks), default=-1)
        self._changed_ranks.clear()
        self._next_progress = self._clock.monotonic() + self.progress_seconds
        if steps or saved != self._sent_saved_step:
            self._sent_saved_step = saved
            reports = self._last_reports
            total = max((report.total for report in reports.values()), default=0)
            numbers = sum_numbers(
                {rank: report.numbers for rank, report in reports.items()},
                {rank: report.bad_steps for rank, report in reports.items()},
            )
            self._send_message(Progress(group.generation, tuple(steps), saved, total, numbers))

    def _sample_usage(self, group: WorkerGroup, now: float) -> None:
        """Send what the workers use, if that is due."""
        if group.is_stopping or group.is_done:
            return
        if self._usage is None:
            if workers := group.alive_workers():
                self._usage = UsageSampler(
                    now,
                    group.ranks.start,
                    lambda: group.worker_devices(),
                    choose_tool_runner(),
                    self.progress_seconds / PROGRESS_SECONDS,
                )
                self._usage.begin(workers, now)
        elif now >= self._usage.next_at:
            workers = group.alive_workers()
            values = self._usage.take(workers, now)
            if workers and values:
                self._send_message(Progress(group.generation, usage=values))

    # Hangs

    def _check_workers(self, group: WorkerGroup, now: float) -> None:
        """Take a sample of each worker, and report those that hang."""
        alive = group.alive_workers()
        suspects = self._find_suspects(alive, now)
        self._next_check = now + self._seconds_to_check(now)
        if len(alive) < self._alive_count:
            # the workers that waited for the ended one notice it after a moment
            self._last_exit_at = now
        self._alive_count = len(alive)
        is_any_working = now - self._last_exit_at < (self._hang_timeout or 0.0)
        if self._spin_watch is not None and not self._has_steps():
            quiet = self._quiet_seconds(alive, now)
            may_look = not self._stack_requests
            idle = [rank for rank, _, _ in alive if self._is_idle(rank)]
            self._spin_watch.run_once(alive, idle, quiet, now, may_look=may_look)
        suspects += self._find_spinning(alive, now)
        is_any_working = is_any_working or any(self._is_working(rank) for rank, _, _ in alive)
        ended = {rank: found.reason for rank, found in suspects if found.only_if_ended}
        if ended and self._channel is not None:
            self._closed_ranks |= ended.keys()
            self._request_stacks([worker for worker in alive if worker[0] in ended], now, ended)
        for rank, found in suspects:
            if found.only_if_ended or (found.may_be_waiting and is_any_working):
                continue
            self._report_hang(group, rank, found.reason, waits=found.may_be_waiting)

    def _has_steps(self) -> bool:
        """Whether workers report progress: then nothing else counts."""
        return any(report.counted_step is not None for report in self._last_reports.values())

    def _output_at(self, rank: int) -> float:
        """Return the time of the last output of a worker itself."""
        at = self._output.last_output_at(rank)
        return at if self._spin_watch is None else self._spin_watch.filter_output(rank, at)

    def _is_idle(self, rank: int) -> bool:
        """Whether a worker has used no CPU time for a moment."""
        detector = self._detectors.get(rank)
        return detector is not None and detector.idle_seconds > 2 * detector.interval

    def _quiet_seconds(self, alive: list[tuple[int, int, int]], now: float) -> float:
        """Return for how long no worker of this node has printed anything or ended."""
        last = max((self._output_at(rank) for rank, _, _ in alive), default=now)
        return now - max(last, self._begun_at, self._last_exit_at)

    def _find_spinning(
        self, alive: list[tuple[int, int, int]], now: float
    ) -> list[tuple[int, HangSuspicion]]:
        """Return the workers that only wait in a collective, although they use CPU time."""
        found = []
        for rank, _, _ in alive:
            state = self._find_wait(rank, now)
            if state is not None and now >= self._repeat_at.get(rank, 0.0):
                reason = f"it has waited in {describe_collective(state)} for"
                why = f"{reason} {self._hang_timeout:g} s, using CPU time"
                found.append((rank, HangSuspicion(why, may_be_waiting=True)))
        return found

    def _find_wait(self, rank: int, now: float) -> CollectiveReport | None:
        """Return the collective in which a busy worker has waited for the timeout, or None."""
        detector = self._detectors.get(rank)
        timeout = self._hang_timeout
        if detector is None or timeout is None or self._spin_watch is None or self._has_steps():
            return None
        silent = now - max(self._output_at(rank), self._begun_at)
        if detector.idle_seconds >= timeout or silent < timeout:
            return None
        return self._spin_watch.find_wait(rank, now)

    def _seconds_to_check(self, now: float) -> float:
        """Return the time until the next samples, or until a worker reaches its timeout."""
        interval = HangDetector(self._hang_timeout, now).interval
        left = [watch.seconds_to_limit() for watch in self._detectors.values()]
        return min([interval, *(seconds for seconds in left if seconds > 0)])

    def _find_suspects(
        self, alive: list[tuple[int, int, int]], now: float
    ) -> list[tuple[int, HangSuspicion]]:
        """
        Return the suspected ranks, the most suspicious one first.

        That is: suspended ones, then those with the lowest step, then those idle for longest.
        """
        suspects: list[tuple[tuple[bool, int, float], int, HangSuspicion]] = []
        for rank, _, pid in alive:
            seen = self._sample_worker(rank, pid, now)
            if seen is None:
                self._detectors.pop(rank, None)
                continue
            detector = self._detectors.setdefault(rank, HangDetector(self._hang_timeout, now))
            found = detector.add_sample(seen, now)
            if found is None or rank in self._closed_ranks:
                continue
            if now >= self._repeat_at.get(rank, 0.0):
                step = -1 if seen.step is None else seen.step
                order = (seen.letter != "T", step, -detector.idle_seconds)
                suspects.append((order, rank, found))
        suspects.sort(key=lambda suspect: suspect[:2])
        return [(rank, found) for _, rank, found in suspects]

    def _sample_worker(self, rank: int, pid: int, now: float) -> WorkerSample | None:
        """Return a sample of a worker; None if neither a timeout nor a traceback asks for one."""
        has_traceback = False
        if self._output.last_traceback(rank) is not None:
            has_traceback = not self._output.has_survived(rank)
        if self._hang_timeout is None and not has_traceback:
            return None
        state = procfs.read_state(pid)
        report = self._last_reports.get(rank)
        meter = self._meters.get(rank)
        if meter is None:
            seconds = min(MAX_SCAN_SECONDS, (self._hang_timeout or MAX_SCAN_SECONDS) / 4)
            meter = self._meters[rank] = procfs.CpuMeter(pid, seconds)
        return WorkerSample(
            step=report.counted_step if report else None,
            saved=self._saved_steps.get(rank),
            output_at=self._output_at(rank),
            cpu_seconds=meter.read_seconds(now),
            letter=state.letter if state else "Z",
            is_traced=bool((state and state.tracer_pid) or (report and report.is_paused)),
            has_traceback=has_traceback,
        )

    def _is_working(self, rank: int) -> bool:
        """Return whether a worker has visibly done something within the hang timeout."""
        detector = self._detectors.get(rank)
        report = self._last_reports.get(rank)
        if detector is None or self._hang_timeout is None:
            return False
        if report is not None and report.counted_step is not None:
            return detector.stuck_seconds < self._hang_timeout
        if detector.idle_seconds >= self._hang_timeout:
            return False
        return self._find_wait(rank, self._clock.monotonic()) is None

    def _report_hang(self, group: WorkerGroup, rank: int, why: str, *, waits: bool = False) -> None:
        if waits:
            # the scheduler may know a working rank elsewhere: report it again after the same time
            self._repeat_at[rank] = self._clock.monotonic() + (self._hang_timeout or 0.0)
        else:
            self._closed_ranks.add(rank)
        self.send_progress()
        timeout = self._hang_timeout or 0.0
        self._send_message(Hung(group.generation, rank, why, waits, timeout))

    # Stacks

    def show_stacks(self, generation: int) -> None:
        """Collect the stacks of all workers for the scheduler."""
        group = self._group
        now = self._clock.monotonic()
        if group is not None and group.has_started and group.generation == generation:
            if not group.is_stopping:
                # who reaches the timeout now does not work any more
                self._check_workers(group, now)
            self._request_stacks(group.alive_workers(), now, None)

    def _request_stacks(
        self, workers: list[tuple[int, int, int]], now: float, suspects: dict[int, str] | None
    ) -> None:
        active: tuple[int, ...] = ()
        if suspects is None:
            active = tuple(rank for rank, _, _ in workers if self._is_working(rank))
        if self._spin_watch is not None:
            self._spin_watch.close()  # it would empty the workers' files
        if self._channel is not None:
            request = StackRequest(workers, self._channel.folder, self._signal_worker, now, active)
            self._stack_requests.append((request, suspects))
        elif self._group is not None:
            self._send_message(Stacks(self._group.generation, (), active))

    def _answer_request(
        self, group: WorkerGroup, request: StackRequest, suspects: dict[int, str] | None
    ) -> None:
        if suspects is None:
            # who has reached the timeout since was reported, and does not work any more
            active = tuple(rank for rank in request.active if self._is_working(rank))
            self._send_message(
                Stacks(
                    group.generation,
                    request.grouped_stacks(),
                    active,
                    *self._find_collectives(request),
                )
            )
            return
        alive = {rank for rank, _, _ in group.alive_workers()}
        for rank, why in suspects.items():
            if rank in alive and not group.is_stopping and request.has_program_ended(rank):
                self._report_hang(group, rank, why)

    def _find_collectives(
        self, request: StackRequest
    ) -> tuple[tuple[int, ...], tuple[CollectiveReport, ...]]:
        """Return the ranks that only wait although they are busy, and where all ranks are."""
        watch = self._spin_watch
        if watch is None:
            return (), ()
        now = self._clock.monotonic()
        stacks = dict(request.read_stacks())
        spinning = tuple(rank for rank in stacks if self._find_wait(rank, now) is not None)
        return spinning, watch.collective_states(stacks)[:MAX_COLLECTIVES]

    def _signal_worker(self, slot: int, number: int) -> None:
        self._supervisor.send_signal(slot, number, group=False)

    def _cancel_requests(self) -> None:
        for request, _ in self._stack_requests:
            request.close()
        self._stack_requests = []
