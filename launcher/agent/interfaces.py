"""
What the agent uses: its protocols, and `AgentDeps`, which passes the implementations. Tests pass
fakes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from typing import Protocol

from pdrun import async_writer
from pdrun.clock import Clock, SystemClock
from pdrun.launcher.common.standard_input import StandardInput
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.launcher.supervisor.events import SupervisorEvent, WorkerCommand
from pdrun.quick_dataclass import dataclass
from pdrun.rendezvous.protocol.messages import Message, Verdict, Welcome


class Link(Protocol):
    """
    The agent's end of its connection to the scheduler (`pdrun.rendezvous.scheduler.local_link`).

    Nothing here blocks. Inside `poll` the link sends Hello and heartbeats, and watches the
    scheduler's answers.
    """

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` may have messages; -1: in process."""
        ...

    def send(self, message: Message) -> None:
        """Queue a message. Messages arrive in order, or the link is lost."""
        ...

    def poll(self) -> Sequence[Message]:
        """
        Return new messages and keep the connection alive.

        Call it whenever `fileno` is readable, and at `deadline`.

        Raises:
            AuthenticationError: the scheduler has another token.
            RendezvousError: no answer, or the scheduler was lost for longer than the `patience` of
                its Welcome.
        """
        ...

    def deadline(self) -> float | None:
        """Return the monotonic time at which `poll` is due although nothing arrived, or None."""
        ...

    def silent_for(self) -> float:
        """
        Return the seconds since the scheduler's last message.

        Time in which this process was suspended does not count.
        """
        ...

    def cut_off_for(self) -> float:
        """
        Return the seconds for which this node has been cut off from the scheduler.

        As `silent_for`, but a connection that the scheduler's machine accepts counts as a sign of
        life: then the scheduler is only being restarted. After more than the `lease` of its
        Welcome, the other nodes may have formed a generation without this node.
        """
        ...

    def fence_at(self) -> float:
        """
        Return the monotonic time by which the workers must have ended without a newer contact.

        It is a margin before the time at which the scheduler may mark this node lost, whatever
        happens to this process from now on.
        """
        ...

    def renew(self) -> None:
        """
        Start as a new agent after a Refuse with `rejoin`; nothing sent before is repeated.

        The next messages of `poll` begin with a Welcome again.
        """
        ...

    def close(self, timeout: float = 1.0) -> None:
        """Send what is queued, for at most ``timeout`` seconds, and close."""
        ...


class SupervisorHandle(Protocol):
    """
    The supervisor process, parent of all workers (`pdrun.launcher.supervisor.client`).

    If the agent dies, the supervisor kills all descendants and exits.
    """

    def fileno(self) -> int:
        """Return a descriptor that is readable when `read_events` may have something."""
        ...

    def spawn(
        self,
        command: WorkerCommand,
        stdin: int,
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """
        Ask for a process.

        The supervisor gets copies of the descriptors, so the caller may close them. In the child,
        ``pass_fds`` get the numbers 3, 4, ... in the given order.
        """
        ...

    def start_fork_server(self, command: WorkerCommand) -> None:
        """
        Start the fork server, from which workers are forked (`WorkerCommand.start`).

        One event answers whether it is ready.
        """
        ...

    def release_fork_server(self) -> None:
        """Let the fork server exit after its pending forks: no more workers are needed."""
        ...

    def send_signal(self, slot: int, number: int, *, group: bool) -> None:
        """
        Send a signal to the process of a slot, or to its process group.

        A slot that has ended is ignored.
        """
        ...

    def sweep_descendants(self, slot: int | None) -> None:
        """
        Send SIGKILL to every remaining descendant of a slot (None: of all slots).

        One Swept event answers.
        """
        ...

    def read_events(self) -> Iterable[SupervisorEvent]:
        """
        Return the events since the last call.

        Raises:
            WorkersFenced: it ended with all workers at the time of the last `send_ping`.
            PdrunError: the supervisor died, or did not answer for too long (see `send_ping`) and
                was killed. All workers die with it.
        """
        ...

    def send_ping(self, fence_at: float | None = None) -> float | None:
        """
        Check that the supervisor is alive, and show it that this agent is.

        Args:
            fence_at: monotonic time at which the supervisor ends all workers if no later ping moves
                it; None: never.

        Returns:
            When to call again (monotonic seconds), or None for no need.
        """
        ...

    def lift_fence(self) -> None:
        """Cancel the ``fence_at`` of the last `send_ping`: no workers run."""
        ...

    def close(self) -> None:
        """Kill all descendants and the supervisor, and wait for its end (bounded)."""
        ...


class WorkerOutput(Protocol):
    """
    Reads the workers' pipes; writes log files and the terminal (`pdrun.launcher.output.router`).

    It never blocks on a file or the terminal. Lines of different workers are never mixed.
    """

    def prepare_folder(self) -> None:
        """
        Make the log folder; part of the preflight.

        Raises:
            ConfigError: the folder cannot be used.
        """
        ...

    def begin_generation(self, run: str, world_size: int) -> None:
        """
        Start a generation; needed before `open_pipes`.

        Args:
            run: name of the run: names the log folder.
            world_size: decides whether lines need a prefix.
        """
        ...

    def show_hidden_tail(self, rank: int) -> None:
        """Print the last lines of a failed worker that --show-ranks hides; once."""
        ...

    def open_pipes(self, rank: int, local_rank: int, generation: int) -> tuple[int, int]:
        """
        Make the two pipes of a worker.

        Returns:
            The write ends (stdout, stderr), which the caller closes.
        """
        ...

    def watched_fds(self) -> Iterable[int]:
        """Return the read ends to wait for; a worker that must wait has none."""
        ...

    def read_pipe(self, fd: int) -> None:
        """Read a readable pipe, at most one buffer, and pass the data on."""
        ...

    def drain_worker(self, rank: int, timeout: float) -> None:
        """
        Read the pipes of an ended worker until EOF or ``timeout`` seconds.

        A last partial line is printed, too.
        """
        ...

    def last_lines(self, rank: int) -> tuple[str, ...]:
        """Return the last lines of a worker for a summary: stdout, then stderr."""
        ...

    def recent_stderr(self, rank: int) -> str:
        """
        Return the last 16 KiB of a worker's stderr.

        The reason of an abort may be printed before a long stack.
        """
        ...

    def last_traceback(self, rank: int) -> tuple[float, str] | None:
        """
        Return the last Python traceback on a worker's stderr, if only its own lines followed.

        Returns:
            (monotonic seconds of its first byte, text), or None.
        """
        ...

    def has_survived(self, rank: int) -> bool:
        """Return whether the output shows that a worker continued after its `last_traceback`."""
        ...

    def last_output_at(self, rank: int) -> float:
        """Return the monotonic time of the last output of a worker; 0: none yet."""
        ...

    def log_path(self, rank: int) -> str:
        """Return the log that shows why the worker ended; empty if no files are written."""
        ...

    def print_line(self, text: str) -> None:
        """Print a line of pdrun on the terminal (stderr), in order with the workers' lines."""
        ...

    def close(self, timeout: float = 2.0) -> tuple[str, ...]:
        """Flush files and terminal (bounded); return one line for each loss."""
        ...


class SchedulerProcess(Protocol):
    """The scheduler process of this node."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `restart_if_dead` is due, or -1."""
        ...

    def deadline(self) -> float | None:
        """Return the monotonic time at which `restart_if_dead` is due in any case, or None."""
        ...

    def is_restarting(self) -> bool:
        """Return whether it has died, or was killed, and its successor does not listen yet."""
        ...

    def kill_if_silent(self) -> None:
        """Kill it early if it does not answer: a stop waits for it."""
        ...

    def keep_verdict(self, verdict: Verdict) -> None:
        """Keep the verdict, for nodes that do not know it if the process dies before they do."""
        ...

    def restart_if_dead(self) -> str:
        """
        Check that it is alive; restart it if it died or stands still; never waits.

        Returns:
            A line for the user, or an empty string.

        Raises:
            RendezvousError: it cannot be restarted.
        """
        ...


def _ignore_welcome(plan: LaunchPlan, welcome: Welcome) -> None:
    """The default of `AgentDeps.on_welcome`."""


def _ignore_progress(mark: bytes) -> None:
    """The default of `AgentDeps.on_progress`."""


def _make_random_key(run: str) -> bytes:
    """The default of `AgentDeps.make_server_key`, for a job of one node."""
    return secrets.token_bytes(32)


@dataclass(frozen=True)
class AgentDeps:
    """What an agent is given: real implementations in production, fakes in a test."""

    start_supervisor: Callable[[LaunchPlan], SupervisorHandle]
    make_output: Callable[[LaunchPlan], WorkerOutput]
    clock: Clock = field(default_factory=SystemClock)
    on_welcome: Callable[[LaunchPlan, Welcome], None] = _ignore_welcome
    """Called once, when the name of the run is known."""
    scheduler_process: SchedulerProcess | None = None
    """The scheduler process, if this node runs it."""
    lifeline: int | None = None
    """
    A descriptor to the process that started this agent. At its end everything is stopped
    immediately. FOR_ALL may arrive on it.
    """
    stdin: StandardInput | None = None
    """The standard input of one worker; None: all workers have an empty one."""
    address: str = ""
    """``HOST:PORT`` by which other nodes join; for messages."""
    event_log: str = ""
    """Path of the scheduler process's event log, whose notes are printed; empty: none."""
    on_progress: Callable[[bytes], None] = _ignore_progress
    """Called with UP when signals are handled, and with RUNNING before workers are started."""
    print_line: Callable[[str], None] = async_writer.write_message
    """Prints a line of pdrun before the output is open; must not block."""
    is_quiet: bool = False
    """Another agent prints what concerns the whole job."""
    is_pod: bool = False
    """This node is a pod of Kubernetes: see `Join.is_pod`."""
    make_server_key: Callable[[str], bytes] = _make_random_key
    """Returns the key of a run's parameter servers, equal on all nodes of the job."""
