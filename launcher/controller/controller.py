"""
A process that starts one agent per node, shows their output and exits with their verdict.

    terminal <-- Console <-- pipes --- agent of node0 (scheduler inside) --- workers
                                  \\-- agent of node1 ---------------------- workers

`--local` starts them here (`run_local`), ``--hosts`` on other machines
(`pdrun.launcher.controller.ssh`).

The scheduler decides about the job, not the controller. The controller forwards signals and bounds
every wait:

* An agent that stays after another has ended gets SIGTERM, then its lifeline (stdin) is closed,
  then it is killed.
* When the controller dies in any way, the lifelines break. Every agent then exits with all its
  workers.
* A slow reader of the output blocks the agents, and a blocked agent is not stopped. This ends with
  the job: from the first stop signal on, agents are stopped nevertheless. From the second on, they
  are read without the reader. What remains at the end he can read as long as `Console.close` waits.
* Until workers are about to start (an agent reports it on its lifeline, a socket) the scheduler may
  not know an agent, or not run yet. Then the end of one agent ends the others immediately, and an
  agent that takes no signals yet is killed.
* If the job can go on without a node (MIN:MAX, spares, restarts), the scheduler handles the end of
  an agent. Only the end of node 0, which runs the scheduler, starts the timer of the others.
"""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType

from pdrun import process_setup
from pdrun.errors import ConfigError
from pdrun.launcher.common.signals import format_signal
from pdrun.launcher.controller import exit_policy
from pdrun.launcher.controller.agent_handle import (
    STOP_SIGNALS,
    AgentHandle,
    LocalAgentHandle,
    agent_command,
)
from pdrun.launcher.controller.exit_policy import ShutdownTimer, format_nodes, job_exit_code
from pdrun.launcher.controller.local import bind_scheduler, make_agent_starts
from pdrun.launcher.jobs.views.live_screen import show_live_line
from pdrun.launcher.output.console import STDERR, STDOUT, Console
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.rendezvous.protocol.security import Secret, find_secret, is_secret_named

FORWARDED_SIGNALS = (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)
POLL_SECONDS = 0.5
POLL_SECONDS_WHILE_BLOCKED = 0.02
"""While a reader of the output is behind: no descriptor signals when it reads again."""


def run_local(plan: LaunchPlan) -> int:
    """
    Start the agents of a plan of mode ``local``; return the job's exit code when all have ended.

    Raises:
        RendezvousError: loopback cannot be listened on.
    """
    console = Console()
    with bind_scheduler() as listener:
        process_data = {**console.to_json(), "nofile": process_setup.user_nofile_limit()}
        starts = make_agent_starts(
            plan,
            listener,
            _local_job_secret(plan),
            controller_pid=os.getpid(),
            process_data=process_data,
        )
        agents = [LocalAgentHandle(start, agent_command()) for start in starts]
        controller = Controller(
            agents, console, grace=plan.spec.policy.grace, can_restart=plan.spec.can_restart
        )
        controller.start()
    names = [agent.node for agent in agents]
    show_live_line(console, plan.spec.output, expected_nodes=names[: plan.nodes])
    return controller.run()


def _local_job_secret(plan: LaunchPlan) -> Secret:
    """
    Return the secret of a local job.

    It is the user's own if other nodes may join from another terminal, otherwise random.
    """
    if not plan.spec.can_restart:
        return Secret.random()
    try:
        return find_secret(plan.spec.place.token_file)[0]
    except ConfigError:
        if plan.spec.place.token_file:
            raise
        return Secret.random()  # no home folder: no other node can join


def job_secret(plan: LaunchPlan) -> Secret:
    """Return the job's secret: the one that the user has named, otherwise a random one."""
    token_file = plan.spec.place.token_file
    return find_secret(token_file)[0] if is_secret_named(token_file) else Secret.random()


class Controller:
    """Shows the output of the agents of one job and forwards signals to them."""

    def __init__(
        self,
        agents: Sequence[AgentHandle],
        console: Console,
        *,
        grace: float,
        can_restart: bool = False,
    ) -> None:
        """
        Prepare; nothing is started yet.

        Args:
            agents: the agents, that of node 0 first.
            console: where their output is shown.
            grace: the job's grace time in seconds.
            can_restart: the job can go on when an agent has ended.
        """
        self._can_restart = can_restart
        self._agents = agents
        self._console = console
        self._timer = ShutdownTimer(grace)
        self._stopped_nodes: set[str] = set()
        """Nodes whose agent this process has stopped or killed."""
        self._stop_signals: list[int] = []
        """Stop signals received so far."""
        self._has_read = False
        """Whether an agent's descriptor was ready in the last turn."""
        self._dropped_bytes = 0
        """Output read after a second stop signal and not shown: its reader was behind."""
        self._restore = ExitStack()
        self._signal_fd = -1

    def start(self) -> None:
        """Start every agent and send its payload; if one cannot start, end the others."""
        self._catch_signals()
        try:
            for agent in self._agents:
                agent.start()
            for agent in self._agents:
                agent.send_payload()
        except BaseException:
            self._close_lifelines()
            self._restore.close()
            raise

    def run(self) -> int:
        """Forward output and signals until every agent has ended; return the exit code."""
        try:
            while not self._is_finished():
                is_blocked = self._wait_for_events()
                self._check_exits()
                # agents may only be waiting for the reader of our output
                if not is_blocked or self._stop_signals:
                    self._stop_remaining(self._timer.next_step(time.monotonic()))
            return self._conclude()
        finally:
            self._close_lifelines()
            self._restore.close()

    @property
    def _is_running(self) -> bool:
        return any(agent.is_running for agent in self._agents)

    def _conclude(self) -> int:
        exits = []
        for agent in self._agents:
            if agent.exit is not None:
                exits.append((agent.exit.time, agent.node, agent.exit.code))
        exits.sort(key=lambda entry: entry[0])
        code, note = job_exit_code(
            [(node, code) for _, node, code in exits],
            stopped_nodes=tuple(self._stopped_nodes),
            stop_signals=self._stop_signals,
            head_node=self._agents[0].node if self._can_restart else "",
        )
        if note:
            self._console.print_line(f"pdrun: {note}")
        if self._dropped_bytes:
            self._console.print_line(
                f"pdrun: {self._dropped_bytes} bytes of output not shown: "
                "their reader was behind at the second stop signal"
            )
        self._console.close()
        return code

    def _is_finished(self) -> bool:
        """
        Return whether all agents have ended and their output is read.

        The output of an agent is awaited for a limited time: a stray child may keep a pipe open.
        What has come is read, also if this process stood still for that time, unless a stray child
        writes without an end.
        """
        open_since = -math.inf
        for agent in self._agents:
            if agent.exit is None:
                return False
            if not agent.is_drained():
                open_since = max(open_since, agent.exit.time)
        seconds = time.monotonic() - open_since
        limit = exit_policy.AFTER_CLOSE_SECONDS
        return seconds > (3 * limit if self._has_read else limit)

    def _wait_for_events(self) -> bool:
        """Wait for output, signals or a time-out; return whether a reader is behind."""
        poll = select.poll()
        poll.register(self._signal_fd, select.POLLIN)
        owners: dict[int, AgentHandle] = {}
        for agent in self._agents:
            is_behind = _never_behind if self._ignores_reader(agent) else self._console.is_behind
            for fd, mask in agent.poll_descriptors(is_behind):
                poll.register(fd, mask)
                owners[fd] = agent
        is_blocked = any(self._console.is_behind(stream) for stream in (STDOUT, STDERR))
        seconds = POLL_SECONDS_WHILE_BLOCKED if is_blocked else POLL_SECONDS
        self._has_read = False
        for fd, _ in poll.poll(seconds * 1000):
            if fd == self._signal_fd:
                self._read_signals()
            else:
                self._has_read = True
                for stream, data in owners[fd].read_output(fd):
                    self._show_output(owners[fd], stream, data)
        return is_blocked

    def _ignores_reader(self, agent: AgentHandle) -> bool:
        """
        Return whether an agent is read although a reader is behind.

        It has ended (a pipe contains little), or must end soon.
        """
        return agent.exit is not None or len(self._stop_signals) > 1

    def _show_output(self, agent: AgentHandle, stream: int, data: bytes) -> None:
        """Queue output for its reader; drop it if the reader is behind after a second stop."""
        is_ending = agent.exit is None and self._ignores_reader(agent)
        if is_ending and self._console.is_behind(stream):
            self._dropped_bytes += len(data)
        else:
            self._console.write(stream, data)

    def _check_exits(self) -> None:
        for agent in self._agents:
            if agent.exit is None:
                agent.check_exit()
                if agent.exit is not None:
                    self._on_exit(agent)

    def _on_exit(self, agent: AgentHandle) -> None:
        assert agent.exit is not None
        reason = agent.exit.reason
        if reason and agent.node not in self._stopped_nodes:
            when = "" if self._is_running else " before the job started; stopping the others"
            self._console.print_line(f"pdrun: {reason}{when}")
        if self._can_restart and self._is_running and agent is not self._agents[0]:
            return  # the scheduler decides
        self._timer.on_agent_exit(
            agent.exit.time, is_killed=bool(reason), has_workers=self._is_running
        )

    def _stop_remaining(self, step: str) -> None:
        """Carry out a step of the timer on the agents that have not ended."""
        remaining = [agent for agent in self._agents if agent.exit is None]
        if not step or not remaining:
            return
        names = format_nodes([agent.node for agent in remaining])
        self._stopped_nodes.update(agent.node for agent in remaining)
        if step == "term":
            self._console.print_line(f"pdrun: {names} did not end with the others: stopping")
            for agent in remaining:
                agent.send_signal(signal.SIGTERM)
        elif step == "close":
            self._close_lifelines()
        else:
            self._console.print_line(f"pdrun: killing the agent of {names}")
            for agent in remaining:
                agent.kill()

    def _close_lifelines(self) -> None:
        """Close the lifelines: agents that have not ended kill everything and exit."""
        for agent in self._agents:
            agent.close_lifeline()

    def _read_signals(self) -> None:
        for number in os.read(self._signal_fd, 64):
            if number in STOP_SIGNALS:
                self._stop_signals.append(number)
                if len(self._stop_signals) == 3:
                    self._timer.stop_now(time.monotonic())
            if number in FORWARDED_SIGNALS:
                self._forward_signal(number)

    def _forward_signal(self, number: int) -> None:
        """
        Send a signal to every agent.

        An agent that takes no signals yet has nothing to clean up: a stop signal kills it.
        """
        remaining = [agent for agent in self._agents if agent.exit is None]
        for agent in remaining:
            if agent.is_up:
                agent.send_signal(number)
            elif number in STOP_SIGNALS:
                self._stopped_nodes.add(agent.node)
                agent.kill()
        has_started = any(agent.is_up for agent in remaining)
        if number in STOP_SIGNALS and remaining and not has_started:
            self._console.print_line(
                f"pdrun: stopped by {format_signal(number)} before the job started"
            )

    def _catch_signals(self) -> None:
        """
        Turn signals into bytes on a pipe.

        A signal that was ignored when the process started (nohup) stays ignored.
        """
        self._signal_fd, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._restore.callback(_close_fds, self._signal_fd, write)
        previous = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._restore.callback(signal.set_wakeup_fd, previous)
        for number in (*FORWARDED_SIGNALS, signal.SIGCHLD):
            before = signal.getsignal(number)
            if before != signal.SIG_IGN or number == signal.SIGCHLD:
                signal.signal(number, _ignore_signal)
                after = process_setup.handler_after(
                    before if before is not None else signal.SIG_DFL
                )
                self._restore.callback(signal.signal, number, after)  # type: ignore[arg-type]


def _never_behind(stream: int) -> bool:
    """No reader is waited for."""
    return False


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """The wake-up descriptor has received the number already."""


def _close_fds(*fds: int) -> None:
    for fd in fds:
        os.close(fd)
