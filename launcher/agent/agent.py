"""
The agent of one node: one loop over the scheduler's link, the keeper, the workers' pipes and the
user's signals.

    Welcome -> Join -> (Waiting) -> Assign -> preflight -> Ready -> Start -> workers -> Finished -+-> Verdict -> Leave
                ^      (Standby)      ^------------------- another generation -------------------+
                +--- Refuse(rejoin): given up; the workers end, then a new agent joins

It decides nothing about the job: the scheduler does, and every node leaves with its verdict's code.
What it decides alone is what to do without a scheduler (`leaving`): when the link is lost, or a
stop that the user asked for is not answered, the workers are ended with the usual grace and it
leaves with 69, or 128 + the signal. Every wait has an end. Its workers are in `part`; what they
tell, or show by doing nothing, in `reports`; its other processes in `crew`.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator

from pdrun.errors import EXIT_UNAVAILABLE, PdrunError, RendezvousError
from pdrun.launcher.agent.announcer import Voice
from pdrun.launcher.agent.generation import Part
from pdrun.launcher.agent.helpers import Crew
from pdrun.launcher.agent.interfaces import Link, Surroundings, WorkerOutput
from pdrun.launcher.agent.lifeline import FOR_ALL, UP
from pdrun.launcher.agent.monitor import EVERY, Reports
from pdrun.launcher.agent.shutdown import Leaving, answer_time
from pdrun.launcher.common.signals import FORWARD, STOP, Signals
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.rendezvous.protocol.messages import (
    Assign,
    Depart,
    Join,
    Leave,
    Message,
    Notice,
    Refuse,
    ShowStacks,
    Standby,
    Start,
    StopRequest,
    StopWorkers,
    Verdict,
    Waiting,
    Welcome,
)

FAREWELL = 1.0


def run_agent(
    plan: LaunchPlan | Callable[[Welcome], LaunchPlan], link: Link, around: Surroundings
) -> int:
    """
    Take part in a job until its end; return the exit code of the verdict.

    Args:
        plan: of this node, or how to make it once the scheduler has told the job's specification
            (`pdrun join`).

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
        self,
        plan: LaunchPlan | Callable[[Welcome], LaunchPlan],
        link: Link,
        signals: Signals,
        around: Surroundings,
    ) -> None:
        self._planner = plan if callable(plan) else lambda welcome: plan
        self._known = None if callable(plan) else plan
        self._link = link
        self._signals = signals
        self._around = around
        self._clock = around.clock
        self._voice = Voice(
            self._clock,
            quiet=around.quiet,
            address=around.address,
            events=around.events,
            before=around.say,
        )
        self._crew = Crew(around.keeper, self._voice.say)
        self._reports = Reports(self._clock, self._tell, self._voice.say)
        self._part = Part(self._crew, self._reports, self._voice, around, self._tell)
        self._leave = Leaving()
        self._plan: LaunchPlan | None = None
        self._output: WorkerOutput | None = None
        self._run = ""
        self._joined = False
        self._code: int | None = None

    def run(self) -> int:
        """Loop until the job is over for this node."""
        if self._known is not None:
            self._crew.hire(self._known)
        try:
            while self._code is None:
                self._turn()
        except PdrunError as error:
            self._link.send(Leave(error.what))
            raise
        return self._code

    def close(self) -> None:
        """
        End everything that is left, in an order in which nothing is lost: workers, last words, the
        link.
        """
        self._crew.close()
        self._reports.close()
        self._link.close(FAREWELL)
        if self._output is not None:
            self._output.close()

    # The loop
    # ---------------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """
        Wait for something, then deal with it: output first, so that no line is younger than what it
        explains.
        """
        ready = self._wait()
        for fd in ready:
            if self._output is not None:
                self._output.read(fd)
        if self._around.lifeline in ready and not self._lifeline_holds(self._around.lifeline):
            return self._lifeline_cut()
        for number in self._signals.read():
            self._signalled(number)
        self._reports.read()
        self._crew.events(self._part.group, finished=self._part.finished)
        if self._crew.stores.fileno() in ready and self._plan is not None:
            self._crew.start_store(self._plan)
        self._messages(ready)
        if self._part.group is not None:
            self._part.group.tick()
        self._reports.turn()
        self._voice.look()
        self._conclude()
        return None

    def _wait(self) -> set[int]:
        """Sleep until a descriptor is readable or something is due; return the readable ones."""
        poll = select.poll()
        now = self._clock.monotonic()
        for fd in (*self._descriptors(), *(self._output.filenos() if self._output else ())):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        times = [
            self._leave.answer_by,
            self._crew.beat_at,
            self._voice.deadline(),
            self._reports.deadline(),
        ]
        times.append(self._part.group.deadline() if self._part.group else None)
        if self._hears:
            times.append(self._link.deadline())
            times.append(
                self._around.scheduler_child.deadline() if self._around.scheduler_child else None
            )
        due = min((time for time in times if time is not None), default=None)
        # a millisecond more, in which poll counts: a wait that ends too early would be a busy one
        return {
            fd
            for fd, _ in poll.poll(
                None if due is None else max(0.0, due - now) * 1000 + (due > now)
            )
        }

    def _descriptors(self) -> Iterator[int]:
        yield self._signals.fileno()
        if self._crew.keeper is not None:
            yield self._crew.keeper.fileno()
        if self._around.lifeline is not None:
            yield self._around.lifeline
        if self._hears:
            yield self._link.fileno()
            if self._around.scheduler_child is not None:
                yield self._around.scheduler_child.fileno()
        yield self._crew.stores.fileno()
        yield from self._reports.filenos()

    @property
    def _hears(self) -> bool:
        """Whether the scheduler's word still counts, for this agent as it is."""
        return self._leave.code is None and not self._leave.returning

    def _tell(self, message: Message) -> None:
        if self._hears:
            self._link.send(message)

    def _conclude(self) -> None:
        """What follows from the state of the workers, and from time."""
        leave = self._leave
        self._part.conclude(self._plan)
        child = self._around.scheduler_child
        if child is not None and child.deadline() is not None:  # it has died and is not back yet
            leave.absent()
        if leave.overdue(self._clock.monotonic()):
            self._stop_alone()
        if self._part.running:
            if leave.expired(self._link.cut_off_for()):
                self._voice.say(
                    f"no word of the scheduler for {leave.lease:.1f} s: stopping the workers of this node, "
                    "for the others may go on without it"
                )
                self._end_and_return(leave.last_grace)
        elif leave.returning:
            self._come_back()
        elif leave.departing and leave.code is None:
            self._link.send(Leave("it was told to go"))
            leave.code = 128 + leave.last
        if leave.code is not None and not self._part.running:
            self._code = leave.code
            if not leave.judged:
                self._voice.left(self._code)

    # The scheduler
    # ----------------------------------------------------------------------------------------------------

    def _messages(self, ready: set[int]) -> None:
        if not self._hears:
            return
        try:
            messages = self._link.poll()
            for message in messages:
                self._heard(message)
            if (
                self._code is None and not messages
            ):  # the verdict may be among them: then its end is no loss
                self._tend_scheduler(ready)
        except RendezvousError as error:
            if self._leave.stops:  # what follows from the user's stop is no failure
                self._stop_alone()
                return
            if not self._part.started:
                raise
            self._voice.say(f"{error}; stopping the workers of this node")
            self._leave_alone(error.exit_code, signal.SIGTERM)

    def _tend_scheduler(self, ready: set[int]) -> None:
        """
        A scheduler process that died is started again; the link waits for it, and the workers go
        on.
        """
        child = self._around.scheduler_child
        if child is None:
            return
        due = child.deadline()
        if (child.fileno() in ready or (due is not None and self._clock.monotonic() >= due)) and (
            line := child.tend()
        ):
            self._voice.say(line)

    def _heard(self, message: Message) -> None:
        match message:
            case Welcome() if not self._joined:
                self._welcome(message)
            case Waiting():
                self._voice.waiting(message)
            case Standby(reason):
                self._voice.standing_by(reason)
            case Notice(text):
                self._voice.notice(text)
            case Assign() if self._plan and self._output and not self._leave.departing:
                self._part.take(message, self._plan, self._output, self._run)
            case Start(generation) if self._plan and self._output:
                self._part.start(generation, self._plan, self._output)
            case StopWorkers():
                self._stop_workers(message)
            case ShowStacks(generation):
                self._reports.show_stacks(generation)
            case Refuse():
                self._refused(message)
            case Verdict():
                self._verdict(message)
            case _:
                pass

    def _welcome(self, message: Welcome) -> None:
        plan = self._plan
        if plan is None:
            plan = self._plan = self._planner(message)
            self._run = message.run
            self._crew.hire(plan)
            self._output = self._around.output(plan)
            self._voice.begin(plan, self._run, self._output)
            self._around.welcomed(plan, message)
        serves = self._around.scheduler_child is not None or plan.mode == "alone"
        self._leave.welcomed(message, serves=serves)
        self._leave.may_depart = (
            self._leave.may_depart and plan.spec.resources.elastic and not serves
        )
        self._reports.every = max(EVERY, message.heartbeat)
        self._joined = True
        self._link.send(
            Join(
                node=plan.node,
                node_rank=plan.spec.place.node_rank,
                workers=len(plan.workers),
                facts=dict(plan.facts),
                store=self._crew.stores.hold(plan.listen),
                spec=plan.spec.shared(),
            )
        )

    def _stop_workers(self, message: StopWorkers) -> None:
        group = self._part.group
        if group is not None and group.generation == message.generation and group.started:
            self._voice.stopping(message)
            group.stop(message.signal, message.grace)
        if self._leave.departing and message.reason.startswith("stopped by"):
            self._leave.departing = (
                False  # the job cannot go on without this node: it ends, with a verdict
            )
        self._leave.answer_by = None

    def _refused(self, refuse: Refuse) -> None:
        code = refuse.code or EXIT_UNAVAILABLE
        if refuse.rejoin and self._plan is not None and not self._leave.stops:
            first = "once its workers have ended, " if self._part.running else ""
            self._voice.say(
                f"the scheduler had given this node up: {refuse.reason}; {first}it joins again"
            )
            self._end_and_return(self._plan.spec.policy.grace)
            return
        if self._part.running:
            self._voice.say(
                f"the scheduler refused this node: {refuse.reason}; stopping its workers"
            )
            self._leave_alone(code, signal.SIGTERM)
            return
        error = RendezvousError(refuse.reason)
        error.exit_code = code
        raise error

    def _verdict(self, verdict: Verdict) -> None:
        self._leave.judged = True
        self._leave.answer_by = None
        self._leave.departing = False
        if self._part.running:
            self._leave_alone(verdict.code, signal.SIGTERM)
        else:
            self._code = verdict.code
        self._voice.verdict(verdict)
        self._link.send(Leave())

    # Without the scheduler
    # --------------------------------------------------------------------------------------------

    def _leave_alone(self, code: int, number: int) -> None:
        """End the workers with the job's grace; then leave with ``code``."""
        self._leave.code = code
        self._leave.answer_by = None
        if self._plan is not None:
            self._part.stop(number, self._plan.spec.policy.grace)

    def _stop_alone(self) -> None:
        """The user's stop was not answered."""
        number = self._leave.last
        if self._part.started:
            self._voice.say("the scheduler does not answer; stopping the workers of this node")
        self._leave_alone(128 + number, signal.SIGKILL if self._leave.stops > 1 else number)
        self._link.send(Leave(f"stopped by {signal.Signals(number).name}"))

    def _end_and_return(self, grace: float) -> None:
        """What this node does counts no more: end its workers; `_come_back` follows."""
        self._leave.returning = True
        self._leave.answer_by = None
        self._part.stop(signal.SIGTERM, grace)

    def _come_back(self) -> None:
        """Join as a new agent: nothing of the old one is left."""
        self._leave.returning = False
        self._joined = False
        self._part.forget()
        self._link.renew()

    def _lifeline_holds(self, lifeline: int) -> bool:
        data = os.read(lifeline, 4096)
        if FOR_ALL in data:
            self._leave.may_depart = False
        return bool(data)

    def _lifeline_cut(self) -> None:
        if self._crew.keeper is not None:
            self._crew.keeper.close()
        self._link.send(Leave("the process that started this agent has died"))
        self._code = EXIT_UNAVAILABLE

    # Signals
    # ----------------------------------------------------------------------------------------------------------

    def _signalled(self, number: int) -> None:
        if number in STOP:
            self._asked_to_stop(number)
        elif number == signal.SIGTSTP:
            self._pause()
        elif number in FORWARD:
            self._part.forward(number)

    def _asked_to_stop(self, number: int) -> None:
        """
        Once: ask the scheduler to stop the job with grace. Again: kill here and now, and have it
        kill elsewhere.
        """
        plan = self._plan
        leave = self._leave
        departs = leave.departs(number)
        leave.asked_at = leave.asked_at if leave.stops else self._clock.monotonic()
        leave.stops += 1
        leave.last = number
        name = signal.Signals(number).name
        if plan is None:
            self._code = 128 + number
            return
        again = leave.stops > 1
        grace = plan.spec.policy.grace
        leave.departing = departs or (leave.departing and number == signal.SIGTERM)
        self._voice.stop_asked(
            name, grace, again=again, running=self._part.running, leaves=leave.departing
        )
        if leave.departing and again:
            leave.answer_by = None
        elif leave.code is None:
            reason = f"{name} on {plan.node}"
            self._link.send(
                Depart(reason) if leave.departing else StopRequest(number, reason, force=again)
            )
            wait = answer_time(
                started=self._part.started, running=self._part.running, again=again, grace=grace
            )
            leave.answer_by = self._clock.monotonic() + wait
        if again:
            self._part.stop(signal.SIGKILL, 0.0)

    def _pause(self) -> None:
        """
        Ctrl-Z: stop the workers and this process; where other nodes count on its heartbeat that
        would be its end.
        """
        if self._plan is not None and self._plan.mode != "alone":
            self._voice.say("Ctrl-Z is not taken: the other nodes would count this one as lost")
            return
        self._part.forward(signal.SIGSTOP)
        self._signals.suspend()
        self._part.forward(signal.SIGCONT)
