"""
`--local` with several nodes: this process starts one agent a node, shows what they print, leaves with their verdict.

    terminal <-- Console <-- pipes --- agent of node0 (scheduler inside) --- workers
                                  \\-- agent of node1 ---------------------- workers

It decides nothing about the job; the scheduler does. It passes signals on, and it bounds every wait: an agent that
stays after another has ended is asked to stop (SIGTERM), then loses its lifeline (stdin), then is killed. When this
process dies in any way, the lifelines break and every agent ends with all its workers.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from pdrun.launcher.adapters.local import AgentStart, agent_command, agent_starts, bind_scheduler
from pdrun.launcher.console import ERR, OUT, Console
from pdrun.launcher.model import LaunchPlan
from pdrun.rendezvous.security import Secret

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (*STOPPING, signal.SIGUSR1, signal.SIGUSR2)
AFTER_EXIT = 5.0
"""Seconds that others may stay after an agent has left by itself: a verdict reaches all at once."""
AFTER_KILL = 15.0
"""Seconds, beside the grace, that others may stay after an agent was killed: the scheduler must notice first."""
AFTER_CUT = 5.0
_TICK = 0.5
_HELD_LINE = 1 << 20


def run_local(plan: LaunchPlan) -> int:
    """
    Start the agents of a plan of mode ``local``; return the job's exit code when all have ended.

    Raises:
        RendezvousError: loopback cannot be listened on.
    """
    console = Console()
    with bind_scheduler() as listener:
        starts = agent_starts(plan, listener, Secret.random(), front=os.getpid(), screen=console.to_json())
        front = Front(starts, console, grace=plan.spec.policy.grace)
        front.start()
    return front.run()


@dataclass
class _Agent:
    node: str
    process: subprocess.Popen[bytes]
    streams: dict[int, int] = field(default_factory=dict)
    """Open descriptor -> OUT or ERR."""
    halves: dict[int, bytes] = field(default_factory=dict)
    code: int | None = None
    """As Popen says it: negative for a signal."""
    ended: float = 0.0


class Patience:
    """When to do what about agents that stay after the first one has ended. Pure: times are monotonic seconds."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._steps: list[tuple[float, str]] = []

    def first_end(self, now: float, *, killed: bool) -> None:
        """An agent has ended; only the first one sets the times."""
        if not self._steps:
            term = now + (AFTER_KILL + self._grace if killed else AFTER_EXIT)
            cut = term + self._grace + AFTER_CUT
            self._steps = [(term, "term"), (cut, "cut"), (cut + AFTER_CUT, "kill")]

    def hurry(self, now: float) -> None:
        """The user insists: cut the lifelines now."""
        self._steps = [(now, "cut"), (now + AFTER_CUT, "kill")]

    def due(self, now: float) -> str:
        """Return the next step when its time has come, once: ``term``, ``cut``, ``kill`` or nothing."""
        return self._steps.pop(0)[1] if self._steps and now >= self._steps[0][0] else ""


def verdict_code(ends: Sequence[tuple[str, int]], *, asked: Sequence[str] = ()) -> tuple[int, str]:
    """
    Return the exit code of a job and, when the agents do not agree about it, a line that says so.

    Args:
        ends: (node, code as Popen says it) in the order in which the agents ended.
        asked: nodes whose agents ended only after this process had asked them to; theirs is no verdict.
    """
    own = [(node, code) for node, code in ends if code >= 0]
    said = [(node, code) for node, code in own if node not in asked] or own
    if not said:
        return 128 - ends[0][1], ""
    code = next((code for _, code in said if code), 0)
    if len({code for _, code in said}) == 1:
        return code, ""
    listed = ", ".join(f"{node}: {code}" for node, code in said)
    return code, f"the nodes ended with different codes ({listed}); this is the first that is not 0: {code}"


class Front:
    """The agents of one job on this machine."""

    def __init__(self, starts: Sequence[AgentStart], console: Console, *, grace: float) -> None:
        """Prepare; nothing is started yet. ``grace`` is the job's, in seconds."""
        self._starts, self._console = starts, console
        self._agents: list[_Agent] = []
        self._patience = Patience(grace)
        self._asked: list[str] = []
        self._stops = 0
        self._restore = ExitStack()
        self._signals = -1

    def start(self, command: Sequence[str] | None = None) -> None:
        """Start every agent; should one not start, those before it lose their lifeline and end."""
        self._catch_signals()
        try:
            for start in self._starts:
                self._agents.append(_spawn(command or agent_command(), start))
            for agent, start in zip(self._agents, self._starts, strict=True):
                _tell(agent, start.line)
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
                if not held:  # else they may only be waiting for the reader of our output
                    self._press(self._patience.due(time.monotonic()))
        finally:
            self._cut()
            self._restore.close()
        ends = sorted(self._agents, key=lambda agent: agent.ended)
        code, note = verdict_code([(agent.node, agent.code or 0) for agent in ends], asked=self._asked)
        if note:
            self._console.say(f"pdrun: {note}")
        self._console.close()
        return code

    def _finished(self) -> bool:
        """All have ended, and what they wrote is here (a stray child may keep a pipe open: not for ever)."""
        late = time.monotonic() - AFTER_CUT
        held = any(self._console.held(stream) for stream in (OUT, ERR))
        return all(
            agent.code is not None and (not agent.streams or (agent.ended < late and not held))
            for agent in self._agents
        )

    def _wait(self) -> bool:
        """Sleep until something happens; read what is there; return whether output was held back."""
        poll = select.poll()
        poll.register(self._signals, select.POLLIN)
        for agent in self._agents:
            for fd, stream in agent.streams.items():
                if not self._console.held(stream):
                    poll.register(fd, select.POLLIN)
        held = any(self._console.held(stream) for stream in (OUT, ERR))
        for fd, _ in poll.poll((0.02 if held else _TICK) * 1000):
            if fd == self._signals:
                self._take_signals()
            else:
                self._read(fd)
        return held

    def _read(self, fd: int) -> None:
        agent = next(agent for agent in self._agents if fd in agent.streams)
        data = os.read(fd, 1 << 18)
        whole = agent.halves.get(fd, b"") + data
        # agents write whole lines; what is left over was cut by the pipe (or is a prompt of a job with one worker)
        cut = len(whole) if not data or len(whole) > _HELD_LINE else whole.rfind(b"\n") + 1
        self._console.write(agent.streams[fd], whole[:cut])
        agent.halves[fd] = whole[cut:]
        if not data:
            os.close(fd)
            del agent.streams[fd]

    def _reap(self) -> None:
        for agent in self._agents:
            if agent.code is None and (code := agent.process.poll()) is not None:
                agent.code, agent.ended = code, time.monotonic()
                if code < 0:
                    self._console.say(f"pdrun: the agent of {agent.node} was killed by {_signal_name(-code)}")
                self._patience.first_end(agent.ended, killed=code < 0)

    def _press(self, step: str) -> None:
        left = [agent for agent in self._agents if agent.code is None]
        if not step or not left:
            return
        names = ", ".join(agent.node for agent in left)
        if step == "term":
            self._console.say(f"pdrun: {names} did not end with the others: stopping")
            self._asked += [agent.node for agent in left]
            for agent in left:
                agent.process.send_signal(signal.SIGTERM)
        elif step == "cut":
            self._cut()
        else:
            self._console.say(f"pdrun: killing the agent of {names}")
            for agent in left:
                agent.process.kill()

    def _cut(self) -> None:
        """Close the lifelines: agents that are left kill everything and end."""
        for agent in self._agents:
            if agent.process.stdin:
                try:
                    agent.process.stdin.close()
                except OSError:  # a line that it never read
                    pass

    def _take_signals(self) -> None:
        for number in os.read(self._signals, 64):
            if number in STOPPING:
                self._stops += 1
                if self._stops == 3:
                    self._patience.hurry(time.monotonic())
            if number in PASSED_ON:
                for agent in self._agents:
                    if agent.code is None:
                        agent.process.send_signal(number)

    def _catch_signals(self) -> None:
        """From here on signals are bytes on a pipe. One that was ignored when we started (nohup) stays ignored."""
        self._signals, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._restore.callback(_close_all, self._signals, write)
        self._restore.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(write, warn_on_full_buffer=False))
        for number in (*PASSED_ON, signal.SIGCHLD):
            before = signal.getsignal(number)
            if before != signal.SIG_IGN or number == signal.SIGCHLD:
                signal.signal(number, _noted)
                self._restore.callback(signal.signal, number, before if before is not None else signal.SIG_DFL)


def _spawn(command: Sequence[str], start: AgentStart) -> _Agent:
    """Start an agent in a session of its own: a Ctrl-C reaches it once, through this process."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
        pass_fds=start.pass_fds, start_new_session=True,
    )  # fmt: skip
    assert process.stdout and process.stderr
    # descriptors of our own: closed by `_read` at the end of the stream
    streams = {os.dup(process.stdout.fileno()): OUT, os.dup(process.stderr.fileno()): ERR}
    process.stdout.close()
    process.stderr.close()
    return _Agent(start.node, process, streams)


def _tell(agent: _Agent, line: str) -> None:
    """Give an agent its orders; one that is gone already is found by `_reap`."""
    stdin: Any = agent.process.stdin
    data = memoryview(line.encode())
    try:
        while data:
            data = data[stdin.write(data) :]
    except BrokenPipeError:
        pass


def _noted(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor has told already."""


def _close_all(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


