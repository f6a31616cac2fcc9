"""
How a node ends its workers and itself: on a signal, on the scheduler's order, or without it.

| event | effect |
|---|---|
| SIGINT; SIGTERM in a job of fixed size | ask the scheduler to stop the whole job |
| SIGTERM in an elastic job | only this node leaves (its machine is withdrawn) |
| a second signal | kill all workers of this node |
| the scheduler is silent for the lease | stop the workers, then rejoin as a new node |
| the supervisor has ended the workers at the fence | rejoin as a new node |

After the lease the other nodes may form a generation without this node. So its workers must have
ended before that, by the time of the fence. The supervisor ends them then if this agent stands
still. The scheduler's node never leaves alone: the job would end with it.

`ShutdownState` is data: flags and times. `NodeStopper` acts.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from pdrun.clock import Clock
from pdrun.errors import EXIT_UNAVAILABLE, RendezvousError
from pdrun.launcher.agent.announcer import Announcer
from pdrun.launcher.agent.generation import GenerationRunner
from pdrun.launcher.agent.interfaces import Link
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.rendezvous.protocol.messages import (
    Depart,
    Leave,
    Refuse,
    StopRequest,
    StopWorkers,
    Verdict,
    Welcome,
)
from pdrun.rendezvous.transport.timeouts import fence_margin

STOP_ANSWER_SECONDS = 2.0
"""Time that the scheduler of a running job has to answer a stop, before this node acts alone."""
FORMING_ANSWER_SECONDS = 0.7
"""The same while the nodes of the job are still joining."""
RESTART_ANSWER_SECONDS = 10.0
"""The same, from the first stop on, while the scheduler process is being restarted."""
MAX_CUT_SECONDS = 5.0
"""
A stop waits up to RESTART_ANSWER_SECONDS for a scheduler whose machine has accepted a connection
within this time: its process may stand still, and is replaced.
"""
SILENT_SECONDS = 0.5
"""A scheduler that has sent nothing for so long, not even this answer, may stand still."""
ANSWER_RETRY_SECONDS = 0.25
"""Time between two decisions whether to wait any longer."""
RETRY_SECONDS = 1.0
"""Time between two attempts to join in the place of an earlier instance of this node."""
KILL_MARGIN_SECONDS = 0.3
"""This agent ends the workers so long before the fence, at which the supervisor ends itself too."""


@dataclass
class ShutdownState:
    """What is known about the end of this node."""

    may_depart: bool = True
    """Whether the job can continue without this node, as far as is known."""
    stop_count: int = 0
    """Signals to stop so far."""
    last_signal: int = int(signal.SIGINT)
    first_stop_at: float = 0.0
    """Monotonic time of the first signal to stop."""
    answer_deadline: float | None = None
    """Monotonic time until which the scheduler has to answer a stop."""
    exit_code: int | None = None
    """Exit code once all workers have ended; set if the verdict does not give it."""
    is_stop_ordered: bool = False
    """The scheduler stops the job already. It does not answer a request to stop any more."""
    is_answer_awaited: bool = False
    """The user was informed that a stop waits for a silent scheduler."""
    has_verdict: bool = False
    is_departing: bool = False
    """This node leaves the job alone."""
    is_rejoining: bool = False
    """
    The scheduler has given this node up, or the node must assume that. It rejoins as a new node
    once its workers have ended.
    """
    rejoin_at: float = 0.0
    """Monotonic time before which this node does not rejoin."""
    was_accepted: bool = False
    """The scheduler has accepted this node, now or before it rejoined."""
    give_up_at: float | None = None
    """
    Monotonic time until which this node waits for the end of its earlier instance; None: it does
    not wait.
    """
    detection_seconds: float = 0.0
    """Time after which the scheduler takes a silent node for lost."""
    lease: float = 0.0
    """Seconds without the scheduler for which the workers may continue; 0: no limit."""
    own_stall: float = 0.0
    """Seconds for which this agent may stand still if it has no lease; 0: no limit."""

    def set_lease(self, welcome: Welcome, *, is_scheduler_node: bool) -> None:
        """Take the lease of this run. The scheduler's own node has none: nothing can cut it off."""
        self.lease = 0.0 if is_scheduler_node else welcome.lease
        self.detection_seconds = welcome.dead
        if welcome.heartbeat:
            # The last heartbeat may be one interval old, and so may its answer.
            stall = welcome.dead - 2 * welcome.heartbeat - fence_margin(welcome.dead)
            self.own_stall = max(0.0, stall)

    def fence_at(self, link_fence_at: float, now: float) -> float | None:
        """
        Return the time at which the supervisor ends the workers unless this agent moves it.

        With a lease the last contact with the scheduler decides: the others may start after it.
        Otherwise only this agent's own standstill counts. After the verdict no others start.
        """
        if self.lease and not self.has_verdict:
            return link_fence_at
        return now + self.own_stall if self.own_stall else None

    def note_accepted(self) -> None:
        """Record that this node is one of the job."""
        self.was_accepted = True
        self.give_up_at = None

    def should_depart(self, number: int) -> bool:
        """Return whether a first signal to stop means this node alone."""
        is_first = self.stop_count == 0 and self.exit_code is None
        return is_first and number == signal.SIGTERM and self.may_depart

    def record_stop(self, number: int, now: float) -> bool:
        """Record a signal to stop; return whether it means this node alone."""
        means_this_node = self.should_depart(number)
        if self.stop_count == 0:
            self.first_stop_at = now
        self.stop_count += 1
        self.last_signal = number
        return means_this_node

    def is_lease_over(self, silence: float) -> bool:
        """Return whether a node with running workers has been cut off for longer than its lease."""
        if self.is_rejoining or self.exit_code is not None:
            return False
        return bool(self.lease) and silence > self.lease

    def extend_answer_deadline(self) -> None:
        """
        Give a scheduler process that is being replaced the time to start and to learn of the stop.
        """
        if self.answer_deadline is not None:
            replaced_at = self.first_stop_at + RESTART_ANSWER_SECONDS
            self.answer_deadline = max(self.answer_deadline, replaced_at)

    def may_be_answered(self, silence: float, cut_off: float, now: float) -> bool:
        """
        Return whether a stop that is overdue should wait for a scheduler that may be replaced.

        Args:
            silence: seconds since the scheduler's last message.
            cut_off: seconds since the scheduler's machine has shown a sign of life.
            now: monotonic time.
        """
        is_frozen = silence > SILENT_SECONDS and cut_off < MAX_CUT_SECONDS
        is_late = now >= self.first_stop_at + RESTART_ANSWER_SECONDS
        return self.stop_count == 1 and is_frozen and not is_late

    def is_answer_overdue(self, now: float) -> bool:
        """Return whether the scheduler has not answered in time."""
        return self.answer_deadline is not None and now >= self.answer_deadline


def answer_seconds(
    *, has_started: bool, is_running: bool, is_repeated: bool, grace: float
) -> float:
    """
    Return the time that the scheduler has to answer a stop.

    If only this node's workers have ended, the scheduler first waits for those of the other nodes.

    Args:
        has_started: workers of this node were started.
        is_running: some of them still run.
        is_repeated: it is not the first signal to stop.
        grace: the job's grace period in seconds.
    """
    if not has_started:
        return FORMING_ANSWER_SECONDS
    if is_running or is_repeated:
        return STOP_ANSWER_SECONDS
    return grace + 5 * STOP_ANSWER_SECONDS


class NodeStopper:
    """Stops the workers of this node. The agent exits, or rejoins, when they have ended."""

    def __init__(
        self,
        state: ShutdownState,
        generation: GenerationRunner,
        announcer: Announcer,
        link: Link,
        clock: Clock,
    ) -> None:
        self._state = state
        self._generation = generation
        self._announcer = announcer
        self._link = link
        self._clock = clock
        self.grace = 0.0
        """The job's grace period in seconds; set with the plan."""

    def on_stop_signal(self, number: int, plan: LaunchPlan) -> None:
        """
        Handle a signal to stop.

        The first one asks the scheduler to stop the job with its grace period. A second one kills
        the workers here, and asks the scheduler to kill the others.
        """
        state = self._state
        means_this_node = state.record_stop(number, self._clock.monotonic())
        is_repeated = state.stop_count > 1
        grace = plan.spec.policy.grace
        state.is_departing = means_this_node or (state.is_departing and number == signal.SIGTERM)
        name = signal.Signals(number).name
        self._announcer.announce_stop_request(
            name,
            grace,
            is_repeated=is_repeated,
            is_running=self._generation.is_running,
            is_departing=state.is_departing,
        )
        if state.is_departing and is_repeated:
            state.answer_deadline = None
        elif state.exit_code is None:
            reason = f"{name} on {plan.node}"
            if state.is_departing:
                self._link.send(Depart(reason))
            else:
                self._link.send(StopRequest(number, reason, force=is_repeated))
            wait = answer_seconds(
                has_started=self._generation.has_started,
                is_running=self._generation.is_running and not state.is_stop_ordered,
                is_repeated=is_repeated,
                grace=grace,
            )
            state.answer_deadline = self._clock.monotonic() + wait
        if is_repeated:
            self._generation.stop_workers(signal.SIGKILL, 0.0)

    def on_stop_workers(self, message: StopWorkers) -> None:
        """Stop the workers because the scheduler ends this generation."""
        group = self._generation.group
        if group is not None and group.generation == message.generation and group.has_started:
            self._announcer.announce_stop(message)
            group.stop_workers(message.signal, message.grace)
        if message.reason.startswith("stopped by"):
            # the job cannot continue without this node: it ends, and there will be a verdict
            self._state.is_departing = False
            self._state.is_stop_ordered = True
        self._state.answer_deadline = None

    def on_refuse(self, refuse: Refuse, plan: LaunchPlan | None, *, is_pod: bool) -> None:
        """
        Stop the workers because the scheduler does not accept this node.

        Args:
            is_pod: see `Join.is_pod`.

        Raises:
            RendezvousError: no workers run, and this node can neither rejoin nor try again.
        """
        code = refuse.code or EXIT_UNAVAILABLE
        is_running = self._generation.is_running
        if refuse.rejoin and plan is not None and not self._state.stop_count:
            first = "once its workers have ended, " if is_running else ""
            self._announcer.print_line(
                f"the scheduler had given this node up: {refuse.reason}; {first}it rejoins"
            )
            self.stop_and_rejoin(0.0)  # others may run in its place already
            return
        if is_running:
            self._announcer.print_line(
                f"the scheduler refused this node: {refuse.reason}; stopping its workers"
            )
            self.stop_and_exit(code, signal.SIGTERM)
            return
        reason = refuse.reason
        if refuse.retry and not self._state.stop_count:
            if self._wait_for_earlier(is_pod=is_pod):
                return
            # The job runs with the earlier pod. So this is no verdict on it: whoever made this pod
            # must take it for a lost one.
            code = 128 + signal.SIGTERM
            reason = f"the earlier pod has not ended: {reason}"
        error = RendezvousError(reason)
        error.exit_code = code
        raise error

    def _wait_for_earlier(self, *, is_pod: bool) -> bool:
        """
        Ask again a little later; return False if it has been long enough.

        The earlier node may first have to be found silent, and it may save for the grace period. If
        it is no pod, the scheduler sets the end: it refuses this one once the earlier one has shown
        that it is alive.
        """
        state = self._state
        now = self._clock.monotonic()
        if state.give_up_at is None:
            wait = state.detection_seconds + self.grace + 5 * RETRY_SECONDS
            state.give_up_at = now + wait
            what, limit = ("pod", f"up to {wait:.0f} s ") if is_pod else ("agent", "")
            self._announcer.print_line(
                f"an earlier {what} of this name is still a node of the job: waiting {limit}until"
                " it has ended or is found lost; then this one joins"
            )
        elif is_pod and now >= state.give_up_at:
            return False
        state.is_rejoining = True
        state.rejoin_at = now + RETRY_SECONDS
        return True

    def on_verdict(self, verdict: Verdict) -> None:
        """Stop the workers that still run, print the summary and leave the job."""
        self._state.has_verdict = True
        self._state.answer_deadline = None
        self._state.is_departing = False
        if self._generation.is_running:
            self.stop_and_exit(verdict.code, signal.SIGTERM)
        self._announcer.announce_verdict(verdict)
        self._link.send(Leave())

    def stop_and_exit(self, code: int, number: int) -> None:
        """Stop the workers with the job's grace period; the agent then exits with `code`."""
        self._state.exit_code = code
        self._state.answer_deadline = None
        self._generation.stop_workers(number, self.grace)

    def wait_for_answer(self, now: float) -> None:
        """
        Give a silent scheduler more time to answer the user's stop: its node replaces it.

        `ShutdownState.may_be_answered` limits this.
        """
        state = self._state
        if not state.is_answer_awaited:
            state.is_answer_awaited = True
            left = state.first_stop_at + RESTART_ANSWER_SECONDS - now
            self._announcer.print_line(
                f"the scheduler does not answer: waiting up to {left:.0f} s for it; a second signal"
                " kills the workers of this node"
            )
        state.answer_deadline = now + ANSWER_RETRY_SECONDS

    def stop_without_scheduler(self) -> None:
        """Stop the workers because the scheduler has not answered the user's stop."""
        number = self._state.last_signal
        if self._generation.has_started:
            self._announcer.print_line(
                "the scheduler does not answer; stopping the workers of this node"
            )
        is_forced = self._state.stop_count > 1
        self.stop_and_exit(128 + number, signal.SIGKILL if is_forced else number)
        self._link.send(Leave(f"stopped by {signal.Signals(number).name}"))

    def on_workers_fenced(self) -> None:
        """
        Decide what follows after the supervisor has ended the workers and itself.

        With a lease this node has been given up, or is about to be. Otherwise the end of the
        workers is reported as a failure.
        """
        state = self._state
        if state.exit_code is None and state.lease and not state.stop_count:
            state.is_rejoining = True
        elif state.exit_code is None and state.stop_count:
            state.exit_code = 128 + state.last_signal
        state.answer_deadline = None

    def stop_and_rejoin(self, grace: float) -> None:
        """Stop the workers, whose results no longer count; the agent then rejoins."""
        self._state.is_rejoining = True
        self._state.answer_deadline = None
        self._generation.stop_workers(signal.SIGTERM, grace)
