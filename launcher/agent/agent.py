"""
The agent of one node: one loop over the scheduler link, the supervisor, the workers' pipes and the
user's signals.

    Welcome -> Join -> (Waiting) -> Assign -> preflight -> Ready -> Start -> workers -> Finished
                ^      (Standby)      ^                                                   |
                |                     +---------------- next generation ------------------+
                |                                                                         v
                +--- Refuse(rejoin): the workers end, then the node rejoins    Verdict -> Leave

The scheduler decides about the job, and every node exits with the code of its verdict. The agent
decides alone only without a scheduler (see `shutdown`): if the link is lost, or the user's stop is
not answered, it stops its workers with the usual grace period. It then exits with 69, or with
128 + the signal. Every wait is bounded.

`generation` runs the workers, `monitor` watches their progress, `helpers` owns the other
processes.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator

from pdrun.errors import EXIT_UNAVAILABLE, PdrunError, RendezvousError
from pdrun.launcher.agent.announcer import Announcer
from pdrun.launcher.agent.generation import GenerationRunner
from pdrun.launcher.agent.helpers import HelperProcesses
from pdrun.launcher.agent.interfaces import AgentDeps, Link, WorkerOutput
from pdrun.launcher.agent.lifeline import Lifeline
from pdrun.launcher.agent.monitor import PROGRESS_SECONDS, WorkerMonitor
from pdrun.launcher.agent.shutdown import KILL_MARGIN_SECONDS, NodeStopper, ShutdownState
from pdrun.launcher.common.signals import FORWARDED_SIGNALS, STOP_SIGNALS, SignalReceiver
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.rendezvous.protocol.messages import (
    Assign,
    Join,
    Leave,
    Message,
    Notice,
    Refuse,
    ShowStacks,
    Standby,
    Start,
    StopWorkers,
    Verdict,
    Waiting,
    Welcome,
)

CLOSE_SECONDS = 1.0
"""Longest wait, at the end, for the link to send its last messages."""


def run_agent(
    plan: LaunchPlan | Callable[[Welcome], LaunchPlan], link: Link, deps: AgentDeps
) -> int:
    """
    Run the agent of this node until the job ends; return the exit code of the verdict.

    Args:
        plan: the plan of this node, or a function that makes it from the scheduler's Welcome, which
            contains the job's specification (`pdrun join`).
        link: the connection to the scheduler.
        deps: everything else that the agent uses.

    Raises:
        PdrunError: the plan cannot be made, the scheduler was never reached, or it refused this
            node.
    """
    with SignalReceiver() as signals:
        deps.on_progress(Lifeline.UP)
        agent = Agent(plan, link, signals, deps)
        try:
            return agent.run()
        finally:
            agent.close()


class Agent:
    """Runs the loop of one node. Call `run` once, then `close`."""

    def __init__(
        self,
        plan: LaunchPlan | Callable[[Welcome], LaunchPlan],
        link: Link,
        signals: SignalReceiver,
        deps: AgentDeps,
    ) -> None:
        self._make_plan = plan if callable(plan) else lambda welcome: plan
        self._given_plan = None if callable(plan) else plan
        self._link = link
        self._signals = signals
        self._deps = deps
        self._clock = deps.clock
        self._announcer = Announcer(
            self._clock,
            is_quiet=deps.is_quiet,
            address=deps.address,
            event_log=deps.event_log,
            print_early=deps.print_line,
        )
        self._helpers = HelperProcesses(
            deps,
            self._announcer.print_line,
            self._find_fence,
            lambda: self._stopper.on_workers_fenced(),
        )
        self._monitor = WorkerMonitor(
            self._clock, self._send, self._announcer.print_line, is_quiet=deps.is_quiet
        )
        self._generation = GenerationRunner(
            self._helpers, self._monitor, self._announcer, deps, self._send
        )
        self._shutdown = ShutdownState()
        self._stopper = NodeStopper(
            self._shutdown, self._generation, self._announcer, link, self._clock
        )
        self._plan: LaunchPlan | None = None
        self._output: WorkerOutput | None = None
        self._run_name = ""
        self._has_joined = False
        self._exit_code: int | None = None

    def run(self) -> int:
        """Loop until the job has ended for this node; return the exit code."""
        if self._given_plan is not None:
            self._helpers.start_supervisor(self._given_plan)
        try:
            while self._exit_code is None:
                self._run_once()
        except PdrunError as error:
            self._link.send(Leave(error.what))
            raise
        return self._exit_code

    def close(self) -> None:
        """End all processes, then close the link, then flush the output: so nothing is lost."""
        self._helpers.close()
        self._monitor.close()
        self._link.close(CLOSE_SECONDS)
        if self._output is not None:
            self._output.close()

    # The loop

    def _run_once(self) -> None:
        """Wait for an event and handle it."""
        ready = self._wait_ready()
        # output first: a line that explains an event must be printed before it
        for fd in ready:
            if self._output is not None:
                self._output.read_pipe(fd)
        lifeline = self._deps.lifeline
        if lifeline in ready and not self._read_lifeline(lifeline):
            self._on_lifeline_lost()
            return
        for number in self._signals.read_signals():
            self._on_signal(number)
        self._monitor.read_reports()
        self._helpers.handle_events(
            self._generation.group, is_finished=self._generation.is_finished
        )
        if self._helpers.stores.fileno() in ready and self._plan is not None:
            self._helpers.start_store(self._plan)
        self._handle_messages(ready)
        if self._generation.group is not None:
            self._generation.group.run_due()
        self._monitor.run_once()
        self._announcer.print_due()
        self._advance()

    def _wait_ready(self) -> set[int]:
        """Sleep until a descriptor is readable or something is due; return the readable ones."""
        poll = select.poll()
        for fd in self._watched_fds():
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        timeout = None
        due = min((time for time in self._next_deadlines() if time is not None), default=None)
        if due is not None:
            left = due - self._clock.monotonic()
            # poll counts in milliseconds: one more, or the wait could end early and become busy
            timeout = max(0.0, left) * 1000 + (left > 0)
        return {fd for fd, _ in poll.poll(timeout)}

    def _watched_fds(self) -> Iterator[int]:
        yield self._signals.fileno()
        if self._deps.lifeline is not None:
            yield self._deps.lifeline
        if self._is_listening:
            yield self._link.fileno()
        yield from self._helpers.watched_fds(with_scheduler=self._is_listening)
        yield from self._monitor.watched_fds()
        if self._output is not None:
            yield from self._output.watched_fds()

    def _next_deadlines(self) -> Iterator[float | None]:
        yield self._shutdown.answer_deadline
        if self._shutdown.is_rejoining and not self._generation.is_running:
            yield self._shutdown.rejoin_at
        yield self._announcer.next_deadline()
        yield self._monitor.next_deadline()
        if self._generation.group is not None:
            yield self._generation.group.next_deadline()
        if self._is_listening:
            yield self._link.deadline()
        yield from self._helpers.next_deadlines(with_scheduler=self._is_listening)

    @property
    def _is_listening(self) -> bool:
        """Whether this agent still follows the scheduler."""
        return self._shutdown.exit_code is None and not self._shutdown.is_rejoining

    def _send(self, message: Message) -> None:
        if self._is_listening:
            self._link.send(message)

    def _advance(self) -> None:
        """Take the next step that follows from the state of the workers and from time."""
        shutdown = self._shutdown
        self._generation.report_finished(self._plan)
        now = self._clock.monotonic()
        if self._helpers.is_scheduler_restarting():
            shutdown.extend_answer_deadline()
        if shutdown.is_answer_overdue(now):
            self._helpers.replace_silent_scheduler()
            silence, cut_off = self._link.silent_for(), self._link.cut_off_for()
            if self._has_joined and shutdown.may_be_answered(silence, cut_off, now):
                self._stopper.wait_for_answer(now)
            else:
                self._stopper.stop_without_scheduler()
        if self._generation.is_running:
            if shutdown.is_lease_over(self._link.cut_off_for()):
                self._announcer.print_line(
                    f"no message from the scheduler for {shutdown.lease:.1f} s: stopping the"
                    " workers of this node, because the others may continue without it"
                )
                left = self._link.fence_at() - now - KILL_MARGIN_SECONDS
                self._stopper.stop_and_rejoin(max(0.0, left))
        elif shutdown.is_rejoining and now >= shutdown.rejoin_at:
            self._rejoin()
        elif shutdown.is_departing and shutdown.exit_code is None:
            self._link.send(Leave("it was asked to leave"))
            shutdown.exit_code = 128 + shutdown.last_signal
        if shutdown.exit_code is not None and not self._generation.is_running:
            self._exit_code = shutdown.exit_code
            if not shutdown.has_verdict:
                self._announcer.announce_exit(self._exit_code)

    def _find_fence(self) -> float | None:
        """Return the time at which the supervisor ends the workers unless it is moved."""
        return self._shutdown.fence_at(self._link.fence_at(), self._clock.monotonic())

    def _rejoin(self) -> None:
        """Join as a new node: nothing of the old one is left."""
        self._shutdown.is_rejoining = False
        self._has_joined = False
        self._generation.reset()
        self._link.renew()

    # The scheduler

    def _handle_messages(self, ready: set[int]) -> None:
        if not self._is_listening:
            return
        try:
            messages = self._link.poll()
            for message in messages:
                self._on_message(message)
            # with a verdict among the messages, the end of the scheduler is no failure
            if self._exit_code is None and not messages:
                self._helpers.restart_dead_scheduler(ready)
        except RendezvousError as error:
            if self._shutdown.stop_count:  # the user's stop ends the scheduler: no failure either
                self._stopper.stop_without_scheduler()
                return
            if not self._generation.has_started:
                raise
            self._announcer.print_line(f"{error}; stopping the workers of this node")
            self._stopper.stop_and_exit(error.exit_code, signal.SIGTERM)

    def _on_message(self, message: Message) -> None:
        match message:
            case Welcome() if not self._has_joined:
                self._on_welcome(message)
            case Waiting():
                self._shutdown.note_accepted()
                self._announcer.announce_waiting(message)
            case Standby(reason):
                self._shutdown.note_accepted()
                self._announcer.announce_standby(reason)
            case Notice(text):
                self._announcer.announce_notice(text)
            case Assign() if self._plan and self._output and not self._shutdown.is_departing:
                self._shutdown.note_accepted()
                self._generation.accept_assignment(
                    message, self._plan, self._output, self._run_name
                )
            case Start(generation) if self._plan and self._output:
                self._generation.start_workers(generation, self._plan, self._output)
            case StopWorkers():
                self._stopper.on_stop_workers(message)
            case ShowStacks(generation):
                self._monitor.show_stacks(generation)
            case Refuse():
                self._stopper.on_refuse(message, self._plan, is_pod=self._asks_as_pod)
            case Verdict():
                if not self._generation.is_running:
                    self._exit_code = message.code
                if self._deps.scheduler_process is not None:
                    self._deps.scheduler_process.keep_verdict(message)
                self._stopper.on_verdict(message)
            case _:
                pass

    def _on_welcome(self, message: Welcome) -> None:
        """Join the job. The first Welcome also makes the plan and the output."""
        plan = self._plan
        if plan is None:
            plan = self._make_plan(message)
            self._plan = plan
            self._run_name = message.run
            self._stopper.grace = plan.spec.policy.grace
            self._helpers.start_supervisor(plan)
            self._output = self._deps.make_output(plan)
            self._announcer.use_output(plan, self._run_name, self._output)
            self._deps.on_welcome(plan, message)
        is_scheduler_node = self._deps.scheduler_process is not None or plan.mode == "single"
        self._shutdown.set_lease(message, is_scheduler_node=is_scheduler_node)
        if is_scheduler_node or not plan.spec.resources.is_elastic:
            self._shutdown.may_depart = False
        self._monitor.progress_seconds = max(PROGRESS_SECONDS, message.heartbeat)
        self._has_joined = True
        store = self._helpers.stores.bind_current(plan.listen, plan.store)
        if self._helpers.stores.fault:
            self._announcer.print_line(self._helpers.stores.fault)
        self._link.send(
            Join(
                node=plan.node,
                node_rank=plan.spec.place.node_rank,
                workers=len(plan.workers),
                facts=dict(plan.compared),
                store=store,
                spec=plan.spec.to_shared_json(),
                is_pod=self._asks_as_pod,
            )
        )

    @property
    def _asks_as_pod(self) -> bool:
        """
        See `Join.is_pod`. Once accepted, the earlier one is this agent itself: its workers have
        ended.
        """
        return self._deps.is_pod and not self._shutdown.was_accepted

    # The process that started this agent

    def _read_lifeline(self, lifeline: int) -> bool:
        """Read the lifeline; return whether the process at its other end is alive."""
        data = os.read(lifeline, 4096)
        if Lifeline.FOR_ALL in data:
            self._shutdown.may_depart = False
        return bool(data)

    def _on_lifeline_lost(self) -> None:
        if self._helpers.supervisor is not None:
            self._helpers.supervisor.close()
        self._link.send(Leave("the process that started this agent has died"))
        self._exit_code = EXIT_UNAVAILABLE

    # Signals

    def _on_signal(self, number: int) -> None:
        if number in STOP_SIGNALS:
            if self._plan is None:
                self._shutdown.record_stop(number, self._clock.monotonic())
                self._exit_code = 128 + number
            else:
                self._stopper.on_stop_signal(number, self._plan)
        elif number == signal.SIGTSTP:
            self._suspend()
        elif number in FORWARDED_SIGNALS:
            self._generation.forward_signal(number)

    def _suspend(self) -> None:
        """
        Stop the workers and this process (Ctrl-Z) until they are continued.

        Not in a job of several nodes: without the heartbeat of this node it would be lost.
        """
        if self._plan is not None and self._plan.mode != "single":
            self._announcer.print_line(
                "Ctrl-Z is ignored: the other nodes would treat this node as lost"
            )
            return
        self._generation.forward_signal(signal.SIGSTOP)
        self._signals.suspend_process()
        self._generation.forward_signal(signal.SIGCONT)
