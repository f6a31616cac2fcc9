"""
The agent of one node: one loop over the scheduler's link, the keeper, the workers' pipes and the user's signals.

    Welcome -> Join -> (Waiting) -> Assign -> preflight -> Ready -> Start -> workers -> Finished -+-> Verdict -> Leave
                                      ^------------------- another generation -------------------+

It decides nothing about the job: the scheduler does, and every node leaves with its verdict's code. What it decides
alone is what to do without a scheduler: when the link is lost, or a stop that the user asked for is not answered, the
workers are ended with the usual grace and it leaves with 69, or 128 + the signal. Every wait has an end.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from pdrun.errors import EXIT_UNAVAILABLE, PdrunError, RendezvousError
from pdrun.launcher.group import Group
from pdrun.launcher.model import LaunchPlan, StarterState
from pdrun.launcher.ports import Keeper, Link, WorkerOutput
from pdrun.launcher.preflight import preflight
from pdrun.launcher.signals import FORWARD, STOP, Signals
from pdrun.launcher.started import RUNNING, UP
from pdrun.launcher.starting import starter_command
from pdrun.launcher.store import Stores
from pdrun.launcher.surroundings import Surroundings
from pdrun.launcher.voice import Voice
from pdrun.rendezvous.messages import (
    Assign,
    Cause,
    Finished,
    Join,
    Leave,
    Message,
    Ready,
    Refuse,
    Start,
    StopRequest,
    StopWorkers,
    Unready,
    Verdict,
    Waiting,
    Welcome,
    WorkerExit,
)

STOP_ANSWER = 2.0
"""Seconds that a running job's scheduler has to answer a stop, before this node acts alone."""
STOP_ANSWER_WAITING = 0.7
"""The same while the nodes are still coming together."""
FAREWELL = 1.0


def run_agent(plan: LaunchPlan | Callable[[Welcome], LaunchPlan], link: Link, around: Surroundings) -> int:
    """
    Take part in a job until its end; return the exit code of the verdict.

    Args:
        plan: of this node, or how to make it once the scheduler has told the job's specification (`pdrun join`).

    Raises:
        PdrunError: the plan cannot be made, the scheduler was never reached or refused this node.
    """
    with Signals() as signals:
        around.reached(UP)
        agent = Agent(plan, link, signals, around)
        try:
            return agent.run()
        finally:
            agent.close()


class Agent:
    """See the module. `run` once, then `close`."""

    def __init__(
        self, plan: LaunchPlan | Callable[[Welcome], LaunchPlan], link: Link, signals: Signals, around: Surroundings
    ) -> None:
        self._planner = plan if callable(plan) else lambda welcome: plan
        self._known = None if callable(plan) else plan
        self._link, self._signals, self._around = link, signals, around
        self._clock = around.clock
        self._voice = Voice(self._clock, quiet=around.quiet, address=around.address, events=around.events)
        self._keeper: Keeper | None = None
        self._plan: LaunchPlan | None = None
        self._output: WorkerOutput | None = None
        self._run = ""
        self._assign: Assign | None = None
        self._group: Group | None = None
        self._stores = Stores()
        self._finished = False
        self._stops = 0
        self._last_stop = int(signal.SIGINT)
        self._answer_by: float | None = None
        self._leaving: int | None = None
        """The code to leave with once no worker is left; set where there will be no verdict."""
        self._judged = False
        """Whether the verdict has come."""
        self._code: int | None = None
        self._beat_at: float | None = None
        """When the keeper is to be asked again for a sign of life."""

    def run(self) -> int:
        """Loop until the job is over for this node."""
        self._keeper = self._made_keeper(self._known)
        try:
            while self._code is None:
                self._turn()
        except PdrunError as error:
            self._link.send(Leave(error.what))
            raise
        return self._code

    def close(self) -> None:
        """End everything that is left, in an order in which nothing is lost: workers, last words, the link."""
        if self._keeper is not None:
            self._keeper.close()
        self._stores.close()
        self._link.close(FAREWELL)
        if self._output is not None:
            self._output.close()

    # The loop ---------------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Wait for something, then deal with it: output first, so that no line is younger than what it explains."""
        ready = self._wait()
        for fd in ready:
            if self._output is not None:
                self._output.read(fd)
        if self._around.lifeline in ready and not os.read(self._around.lifeline, 4096):
            return self._lifeline_cut()
        for number in self._signals.read():
            self._signalled(number)
        self._keeper_events()
        if self._stores.fileno() in ready:
            self._start_store()
        self._messages(ready)
        if self._group is not None:
            self._group.tick()
        self._voice.look()
        self._conclude()
        return None

    def _wait(self) -> set[int]:
        """Sleep until a descriptor is readable or something is due; return the readable ones."""
        poll, now = select.poll(), self._clock.monotonic()
        for fd in (*self._descriptors(), *(self._output.filenos() if self._output else ())):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        times = [self._answer_by, self._beat_at, self._voice.deadline()]
        times.append(self._group.deadline() if self._group else None)
        if self._leaving is None:
            times.append(self._link.deadline())
        due = min((time for time in times if time is not None), default=None)
        # a millisecond more, in which poll counts: a wait that ends too early would be a busy one
        return {fd for fd, _ in poll.poll(None if due is None else max(0.0, due - now) * 1000 + (due > now))}

    def _descriptors(self) -> Iterator[int]:
        yield self._signals.fileno()
        if self._keeper is not None:
            yield self._keeper.fileno()
        if self._around.lifeline is not None:
            yield self._around.lifeline
        if self._leaving is None:
            yield self._link.fileno()
            if self._around.scheduler_child is not None:
                yield self._around.scheduler_child.fileno()
        yield self._stores.fileno()

    def _conclude(self) -> None:
        """What follows from the state of the workers."""
        group = self._group
        if group is not None and group.started and group.done and not self._finished:
            self._finished = True
            self._send_finished(group.generation)
        if self._answer_by is not None and self._clock.monotonic() >= self._answer_by:
            self._stop_alone()
        if self._leaving is not None and (group is None or not group.started or group.done):
            self._code = self._leaving
            if not self._judged:
                self._voice.left(self._code)

    def _send_finished(self, generation: int) -> None:
        assert self._plan is not None
        again = self._plan.spec.policy.max_restarts > 0
        self._link.send(Finished(generation, self._stores.hold_next(self._plan.listen) if again else ""))

    # The scheduler ----------------------------------------------------------------------------------------------------

    def _messages(self, ready: set[int]) -> None:
        if self._leaving is not None:
            return
        child = self._around.scheduler_child
        try:
            messages = self._link.poll()
            for message in messages:
                self._heard(message)
            if child is not None and child.fileno() in ready and self._code is None and not messages:
                raise RendezvousError("the scheduler process on this node has died")
        except RendezvousError as error:
            if self._stops:  # what follows from the user's stop is no failure
                self._stop_alone()
                return
            if self._group is None or not self._group.started:
                raise
            self._voice.say(f"{error}; stopping the workers of this node")
            self._leave_alone(error.exit_code, signal.SIGTERM)

    def _heard(self, message: Message) -> None:
        match message:
            case Welcome() if self._plan is None:
                self._welcome(message)
            case Waiting():
                self._voice.waiting(message)
            case Assign():
                self._assigned(message)
            case Start(generation) if self._group and self._group.generation == generation and not self._group.started:
                self._start(self._group)
            case StopWorkers(generation, number, grace, _):
                if self._group is not None and self._group.generation == generation and self._group.started:
                    self._voice.stopping(message)
                    self._group.stop(number, grace)
                self._answer_by = None
            case Refuse(code, reason):
                self._refused(code, reason)
            case Verdict():
                self._verdict(message)
            case _:
                pass

    def _welcome(self, message: Welcome) -> None:
        plan = self._plan = self._planner(message)
        self._run = message.run
        if self._known is None and self._keeper is not None:
            self._prepare(self._keeper, plan)
        self._output = self._around.output(plan)
        self._voice.begin(plan, self._run, self._output)
        self._around.welcomed(plan, message)
        self._link.send(Join(
            node=plan.node, node_rank=plan.spec.place.node_rank, workers=len(plan.workers), facts=dict(plan.facts),
            store=self._stores.hold(plan.listen), spec=plan.spec.to_json(),
        ))  # fmt: skip

    def _assigned(self, message: Assign) -> None:
        """Take the place in a generation; one that is known already was repeated after a reconnection."""
        if self._assign is not None and message.generation <= self._assign.generation:
            return
        plan, output = self._plan, self._output
        assert plan is not None and output is not None
        if self._assign is not None:
            self._stores.turn(self._keeper)
            self._voice.restarting(message)
        self._assign, self._finished = message, False
        found = preflight(plan, output)
        if found.code:
            self._link.send(Unready(message.generation, found.code, found.reason))
            return
        if self._keeper is None:
            self._keeper = self._made_keeper(plan)
        output.begin(self._run, message.world_size)
        self._group = Group(
            plan, self._run, message, self._keeper, output, self._clock, self._worker_ended, self._around.stdin
        )
        self._stores.wanted = message.node_rank == 0
        if found.imports_torch:
            self._start_store()
        self._link.send(Ready(message.generation))

    def _start(self, group: Group) -> None:
        assert self._assign is not None
        self._voice.started(self._assign)
        self._around.reached(RUNNING)
        group.start()
        if self._plan is not None and self._plan.spec.policy.max_restarts == 0 and self._keeper is not None:
            self._keeper.dismiss()

    def _worker_ended(self, rank: int, cause: Cause) -> None:
        assert self._assign is not None
        if self._leaving is None:
            self._link.send(WorkerExit(self._assign.generation, rank, cause))

    def _refused(self, code: int, reason: str) -> None:
        if self._group is not None and self._group.started and not self._group.done:
            self._voice.say(f"the scheduler refused this node: {reason}; stopping its workers")
            self._leave_alone(code or EXIT_UNAVAILABLE, signal.SIGTERM)
            return
        error = RendezvousError(reason)
        error.exit_code = code or EXIT_UNAVAILABLE
        raise error

    def _verdict(self, verdict: Verdict) -> None:
        group = self._group
        self._judged, self._answer_by = True, None
        if group is not None and group.started and not group.done:
            self._leave_alone(verdict.code, signal.SIGTERM)
        else:
            self._code = verdict.code
        self._voice.verdict(verdict)
        self._link.send(Leave())

    # Without the scheduler --------------------------------------------------------------------------------------------

    def _leave_alone(self, code: int, number: int) -> None:
        """End the workers with the job's grace; then leave with ``code``."""
        self._leaving, self._answer_by = code, None
        if self._group is not None and self._group.started and self._plan is not None:
            self._group.stop(number, self._plan.spec.policy.grace)

    def _stop_alone(self) -> None:
        """The user's stop was not answered."""
        number = self._last_stop
        if self._group is not None and self._group.started:
            self._voice.say("the scheduler does not answer; stopping the workers of this node")
        self._leave_alone(128 + number, signal.SIGKILL if self._stops > 1 else number)
        self._link.send(Leave(f"stopped by {signal.Signals(number).name}"))

    def _lifeline_cut(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
        self._link.send(Leave("the process that started this agent has died"))
        self._code = EXIT_UNAVAILABLE

    # Signals ----------------------------------------------------------------------------------------------------------

    def _signalled(self, number: int) -> None:
        if number in STOP:
            self._asked_to_stop(number)
        elif number == signal.SIGTSTP:
            self._pause()
        elif number in FORWARD and self._group is not None and self._group.started:
            self._group.forward(number)

    def _asked_to_stop(self, number: int) -> None:
        """Once: ask the scheduler to stop the job with grace. Again: kill here and now, and have it kill elsewhere."""
        self._stops += 1
        self._last_stop = number
        name = signal.Signals(number).name
        if self._plan is None:
            self._code = 128 + number
            return
        running = self._group is not None and self._group.started and not self._group.done
        self._voice.stop_asked(name, self._plan.spec.policy.grace, again=self._stops > 1, running=running)
        if self._leaving is None:
            self._link.send(StopRequest(number, f"{name} on {self._plan.node}", force=self._stops > 1))
            self._answer_by = self._clock.monotonic() + self._answer_time(running)
        if self._stops > 1 and self._group is not None and self._group.started:
            self._group.stop(signal.SIGKILL, 0.0)

    def _answer_time(self, running: bool) -> float:
        """How long the scheduler may take: the others end first where this node's workers already have."""
        if self._group is None or not self._group.started:
            return STOP_ANSWER_WAITING
        assert self._plan is not None
        return STOP_ANSWER if running or self._stops > 1 else self._plan.spec.policy.grace + 5 * STOP_ANSWER

    def _pause(self) -> None:
        """Ctrl-Z: stop the workers and this process; where other nodes count on its heartbeat that would be its end."""
        if self._plan is not None and self._plan.mode != "alone":
            self._voice.say("Ctrl-Z is not taken: the other nodes would count this one as lost")
            return
        if self._group is not None and self._group.started:
            self._group.forward(signal.SIGSTOP)
        self._signals.suspend()
        if self._group is not None and self._group.started:
            self._group.forward(signal.SIGCONT)

    # The keeper and the store -----------------------------------------------------------------------------------------

    def _made_keeper(self, plan: LaunchPlan | None) -> Keeper:
        """Start a keeper, and with it the import of torch, as soon as it is known that workers will be forked."""
        keeper = self._around.keeper()
        if plan is not None:
            self._prepare(keeper, plan)
        return keeper

    @staticmethod
    def _prepare(keeper: Keeper, plan: LaunchPlan) -> None:
        if plan.starting.how == "fork":
            keeper.prepare(starter_command(plan))

    def _keeper_events(self) -> None:
        if self._keeper is None:
            return
        try:
            for event in self._keeper.events():
                if isinstance(event, StarterState):
                    if event.why and not self._finished:
                        self._voice.say(f"workers cannot be forked, each imports for itself: {event.why}")
                elif event.slot < 0:
                    if not self._finished and (why := self._stores.complaint(event)):
                        self._voice.say(f"the process of torch's store (MASTER_PORT) ended: {why}")
                elif self._group is not None:
                    self._group.take(event)
            running = self._group is not None and self._group.started and not self._group.done
            self._beat_at = self._keeper.beat() if running else None
        except PdrunError as error:
            self._keeper.close()
            self._keeper, self._beat_at = None, None
            if self._group is None or not self._group.started:
                raise
            self._voice.say(str(error))
            self._group.abandon(error.what)

    def _start_store(self) -> None:
        plan, keeper = self._plan, self._keeper
        assert plan is not None and keeper is not None
        program = plan.workers[0].argv[0]
        is_python = plan.spec.program.kind != "command" or Path(program).name.startswith("python")
        python = program if is_python else sys.executable  # the one that has the workers' torch, where that is known
        fork = plan.starting.how == "fork"
        self._stores.start(keeper, python, {**plan.base_env, **plan.spec.env}, plan.cwd, fork=fork)
