"""
A process that starts one agent a node, shows what they print and leaves with their verdict.

    terminal <-- Console <-- pipes --- agent of node0 (scheduler inside) --- workers
                                  \\-- agent of node1 ---------------------- workers

`--local` starts them here (`run_local`), ``--hosts`` on other machines
(`pdrun.launcher.controller.ssh`).

It decides nothing about the job; the scheduler does. It passes signals on, and it bounds every
wait: an agent that stays after another has ended is asked to stop (SIGTERM), then loses its
lifeline (stdin), then is killed. When this process dies in any way, the lifelines break and every
agent ends with all its workers.

A reader that is behind holds the agents back, and an agent that waits for him is not asked to
leave. That ends with the job: from the first stop on agents are asked all the same, from the second
one on they are read without him, and what is left when all have ended he may take for as long as
`Console.close` waits.

Until the workers are about to start (an agent says so on its lifeline, a socket) the scheduler may
not know an agent, or not live yet: then the end of one agent ends the others at once, and one that
cannot take a signal is killed.

Where the job may go on without a node (MIN:MAX, spares, restarts) the end of an agent is the
scheduler's affair: only that of node 0, which runs the scheduler, sets the others a time.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType

from pdrun import process_setup
from pdrun.errors import EXIT_SOFTWARE, EXIT_UNAVAILABLE, ConfigError
from pdrun.launcher.common.signals import signal_name
from pdrun.launcher.controller.agent_handle import STOPPING, LocalAgent, Started, agent_command
from pdrun.launcher.controller.local import agent_starts, bind_scheduler
from pdrun.launcher.output.console import ERR, OUT, Console
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.rendezvous.protocol.security import Secret, find_secret, is_named

PASSED_ON = (*STOPPING, signal.SIGUSR1, signal.SIGUSR2)
AFTER_EXIT = 5.0
"""Seconds that others may stay after an agent has left by itself: a verdict reaches all at once."""
AFTER_KILL = 15.0
"""
Seconds, beside the grace, that others may stay after an agent was killed: the scheduler must notice
first.
"""
AFTER_CUT = 5.0
AFTER_EARLY = 1.0
"""
Seconds that others may stay after an agent has left by itself before there were workers, and then
after the cut.
"""
_TICK = 0.5


def run_local(plan: LaunchPlan) -> int:
    """
    Start the agents of a plan of mode ``local``; return the job's exit code when all have ended.

    Raises:
        RendezvousError: loopback cannot be listened on.
    """
    console = Console()
    with bind_scheduler() as listener:
        told = {**console.to_json(), "nofile": process_setup.user_nofile_limit()}
        starts = agent_starts(plan, listener, _secret(plan), front=os.getpid(), screen=told)
        agents = [LocalAgent(start, agent_command()) for start in starts]
        front = Front(agents, console, grace=plan.spec.policy.grace, outlives=plan.spec.reopens)
        front.start()
    return front.run()


def _secret(plan: LaunchPlan) -> Secret:
    """
    Return this job's secret: the user's own where others may join, from another terminal, else a
    random one.
    """
    if not plan.spec.reopens:
        return Secret.random()
    try:
        return find_secret(plan.spec.place.token_file)[0]
    except ConfigError:
        if plan.spec.place.token_file:
            raise
        return Secret.random()  # no home: then nobody joins


def job_secret(plan: LaunchPlan) -> Secret:
    """
    Return the job's own secret: one that the user has named, else a fresh one that only this job
    knows.
    """
    token_file = plan.spec.place.token_file
    return find_secret(token_file)[0] if is_named(token_file) else Secret.random()


class Patience:
    """
    When to do what about agents that stay after the first one has ended. Pure: times are monotonic
    seconds.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._steps: list[tuple[float, str]] = []

    def first_end(self, now: float, *, killed: bool, running: bool = True) -> None:
        """
        An agent has ended; only the first one sets the times. ``running``: there may be workers by
        now.
        """
        if self._steps:
            return
        if not running:
            cut = now if killed else now + AFTER_EARLY
            self._steps = [(cut, "cut"), (cut + AFTER_EARLY, "kill")]
        else:
            term = now + (AFTER_KILL + self._grace if killed else AFTER_EXIT)
            cut = term + self._grace + AFTER_CUT
            self._steps = [(term, "term"), (cut, "cut"), (cut + AFTER_CUT, "kill")]

    def hurry(self, now: float) -> None:
        """The user insists: cut the lifelines now."""
        self._steps = [(now, "cut"), (now + AFTER_CUT, "kill")]

    def due(self, now: float) -> str:
        """
        Return the next step when its time has come, once: ``term``, ``cut``, ``kill`` or nothing.
        """
        if self._steps and now >= self._steps[0][0]:
            return self._steps.pop(0)[1]
        return ""


def verdict_code(
    ends: Sequence[tuple[str, int | None]],
    *,
    asked: Sequence[str] = (),
    stops: Sequence[int] = (),
    leader: str = "",
) -> tuple[int, str]:
    """
    Return the exit code of a job and, when the agents do not agree about it, a line that says so.

    Args:
        ends: (node, code as Popen says it, None for one that was lost from sight) in the order in
            which they ended.
        asked: nodes whose agents ended only after this process had asked them to; theirs is no
            verdict.
        stops: signals by which the user has stopped the job, before all had ended.
        leader: node whose code is the job's, as the others may have left it earlier; empty: there
            is none.
    """
    if leader and leader not in asked:
        first = next((code for node, code in ends if node == leader), None)
        if first is not None and first >= 0:
            return first, ""
    free = [(node, code) for node, code in ends if node not in asked]
    said = [(node, code) for node, code in free if code is not None and code >= 0]
    stopped = [128 + number for number in stops]
    if stopped and (not said or any(code in stopped for _, code in said)):
        return next((code for _, code in said if code in stopped), stopped[0]), ""
    if not said:
        killed = [code for _, code in free if code is not None]
        return (128 - killed[0] if killed else EXIT_UNAVAILABLE if free else EXIT_SOFTWARE), ""
    code = next((code for _, code in said if code), 0)
    if len({code for _, code in said}) == 1:
        return code, ""
    listed = ", ".join(f"{node}: {code}" for node, code in said)
    return (
        code,
        f"the nodes ended with different codes ({listed}); this is the first that is not 0: {code}",
    )


class Front:
    """
    The agents of one job, as far as the terminal and the signals of this process are concerned.
    """

    def __init__(
        self, agents: Sequence[Started], console: Console, *, grace: float, outlives: bool = False
    ) -> None:
        """
        Prepare; nothing is started yet.

        Args:
            grace: the job's, in seconds.
            outlives: the job may go on when an agent has ended.
        """
        self._outlives = outlives
        self._agents = agents
        self._console = console
        self._patience = Patience(grace)
        self._asked: set[str] = set()
        self._stops: list[int] = []
        self._dropped = 0
        """Bytes that were read after a second stop and not shown, as their reader was behind."""
        self._restore = ExitStack()
        self._signals = -1

    def start(self) -> None:
        """
        Start every agent and give it its order; should one not start, those before it are cut off
        and end.
        """
        self._catch_signals()
        try:
            for agent in self._agents:
                agent.start()
            for agent in self._agents:
                agent.order()
        except BaseException:
            self._cut()
            self._restore.close()
            raise

    def run(self) -> int:
        """Pass output and signals on until every agent has ended; return the exit code."""
        try:
            while not self._finished():
                held = self._wait()
                self._reap()
                if (
                    not held or self._stops
                ):  # else they may only be waiting for the reader of our output
                    self._press(self._patience.due(time.monotonic()))
            return self._conclude()
        finally:
            self._cut()
            self._restore.close()

    @property
    def _running(self) -> bool:
        return any(agent.running for agent in self._agents)

    def _conclude(self) -> int:
        ends = sorted(
            ((agent.end.at, agent.node, agent.end.code) for agent in self._agents if agent.end),
            key=_when,
        )
        leader = self._agents[0].node if self._outlives else ""
        code, note = verdict_code(
            [(node, code) for _, node, code in ends],
            asked=tuple(self._asked),
            stops=self._stops,
            leader=leader,
        )
        if note:
            self._console.say(f"pdrun: {note}")
        if self._dropped:
            self._console.say(
                f"pdrun: {self._dropped} bytes not shown: their reader was behind at the second stop"
            )
        self._console.close()
        return code

    def _finished(self) -> bool:
        """
        All have ended, and what they wrote is here (a stray child may keep a pipe open: not for
        ever).
        """
        late = time.monotonic() - AFTER_CUT
        return all(
            agent.end is not None and (agent.drained() or agent.end.at < late)
            for agent in self._agents
        )

    def _wait(self) -> bool:
        """
        Sleep until something happens; read what is there; return whether output was held back.
        """
        poll = select.poll()
        poll.register(self._signals, select.POLLIN)
        owners: dict[int, Started] = {}
        for agent in self._agents:
            for fd, mask in agent.descriptors(
                _nothing_held if self._reads_on(agent) else self._console.held
            ):
                poll.register(fd, mask)
                owners[fd] = agent
        held = any(self._console.held(stream) for stream in (OUT, ERR))
        for fd, _ in poll.poll((0.02 if held else _TICK) * 1000):
            if fd == self._signals:
                self._take_signals()
            else:
                for stream, data in owners[fd].take(fd):
                    self._show(owners[fd], stream, data)
        return held

    def _reads_on(self, agent: Started) -> bool:
        """
        Whether an agent is read although a reader is behind: it has ended (a pipe holds little), or
        must soon.
        """
        return agent.end is not None or len(self._stops) > 1

    def _show(self, agent: Started, stream: int, data: bytes) -> None:
        """Queue output for its reader; what comes without end and he does not take is dropped."""
        if agent.end is None and self._reads_on(agent) and self._console.held(stream):
            self._dropped += len(data)
        else:
            self._console.write(stream, data)

    def _reap(self) -> None:
        for agent in self._agents:
            if agent.end is not None:
                continue
            agent.look()
            if agent.end is not None:
                if agent.end.fate and agent.node not in self._asked:
                    when = "" if self._running else " before the job began; stopping the others"
                    self._console.say(f"pdrun: {agent.end.fate}{when}")
                if not self._outlives or not self._running or agent is self._agents[0]:
                    self._patience.first_end(
                        agent.end.at, killed=bool(agent.end.fate), running=self._running
                    )

    def _press(self, step: str) -> None:
        left = [agent for agent in self._agents if agent.end is None]
        if not step or not left:
            return
        names = ", ".join(agent.node for agent in left)
        self._asked.update(agent.node for agent in left)
        if step == "term":
            self._console.say(f"pdrun: {names} did not end with the others: stopping")
            for agent in left:
                agent.signal(signal.SIGTERM)
        elif step == "cut":
            self._cut()
        else:
            self._console.say(f"pdrun: killing the agent of {names}")
            for agent in left:
                agent.kill()

    def _cut(self) -> None:
        """Close the lifelines: agents that are left kill everything and end."""
        for agent in self._agents:
            agent.cut()

    def _take_signals(self) -> None:
        for number in os.read(self._signals, 64):
            if number in STOPPING:
                self._stops.append(number)
                if len(self._stops) == 3:
                    self._patience.hurry(time.monotonic())
            if number in PASSED_ON:
                self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        """
        Give a signal to every agent; one that cannot take it yet has nothing to tidy up, and is
        killed by a stop.
        """
        left = [agent for agent in self._agents if agent.end is None]
        for agent in left:
            if agent.up:
                agent.signal(number)
            elif number in STOPPING:
                self._asked.add(agent.node)
                agent.kill()
        if number in STOPPING and left and not any(agent.up for agent in left):
            self._console.say(f"pdrun: stopped by {signal_name(number)} before the job began")

    def _catch_signals(self) -> None:
        """
        From here on signals are bytes on a pipe. One that was ignored when we started (nohup) stays
        ignored.
        """
        self._signals, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._restore.callback(_close_all, self._signals, write)
        self._restore.callback(
            signal.set_wakeup_fd, signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        )
        for number in (*PASSED_ON, signal.SIGCHLD):
            before = signal.getsignal(number)
            if before != signal.SIG_IGN or number == signal.SIGCHLD:
                signal.signal(number, _noted)
                after = process_setup.handler_after(
                    before if before is not None else signal.SIG_DFL
                )
                self._restore.callback(signal.signal, number, after)  # type: ignore[arg-type]


def _nothing_held(stream: int) -> bool:
    """Nobody is waited for."""
    return False


def _noted(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor has told already."""


def _close_all(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def _when(end: tuple[float, str, int | None]) -> float:
    return end[0]
