"""
The protocols between the agent and its surroundings: what is real in production is a fake in a
test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pdrun import async_writer
from pdrun.clock import Clock, SystemClock
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.launcher.supervisor.events import SupervisorEvent, WorkerCommand
from pdrun.rendezvous.protocol.messages import Message, Welcome


class Link(Protocol):
    """
    The agent's end of its connection to the scheduler (`pdrun.rendezvous.scheduler.local_link`).

    Nothing here blocks. The link greets (Hello), beats and watches the scheduler's echo by itself,
    inside `poll`.
    """

    def fileno(self) -> int:
        """
        A descriptor that becomes readable when `poll` may have something; -1 when there is none (in
        process).
        """
        ...

    def send(self, message: Message) -> None:
        """Queue a message; messages arrive in order or the link is lost."""
        ...

    def poll(self) -> Sequence[Message]:
        """
        Return what has arrived and keep the connection alive. Call whenever `fileno` is readable
        and at `deadline`.

        Raises:
            AuthenticationError: the scheduler holds another token.
            RendezvousError: nobody answered, or the scheduler was lost for longer than the
                `patience` of its Welcome.
        """
        ...

    def deadline(self) -> float | None:
        """
        Monotonic time at which `poll` wants to be called although nothing arrived; None: no such
        time.
        """
        ...

    def silent_for(self) -> float:
        """
        Seconds since the scheduler was last heard, without those in which this process itself stood
        still.
        """
        ...

    def cut_off_for(self) -> float:
        """
        As `silent_for`, but a scheduler whose machine still takes connections is only away: it is
        being started again.

        More than the `lease` of its Welcome: a new generation may have been formed without this
        node.
        """
        ...

    def renew(self) -> None:
        """
        Begin again as a new agent, after a Refuse with `rejoin`: nothing said before is repeated.

        The next `poll` that has anything begins with a Welcome, as the first one did.
        """
        ...

    def close(self, timeout: float = 1.0) -> None:
        """Hand over what is queued, for at most ``timeout`` seconds, and close."""
        ...


class SupervisorHandle(Protocol):
    """
    The agent's handle of the keeper process, parent of all workers
    (`pdrun.launcher.supervisor.client`).

    Should the agent die in any way, the keeper ends every descendant and leaves.
    """

    def fileno(self) -> int:
        """Readable when `events` may have something."""
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
        Ask for a process. The descriptors are copied to the keeper and may be closed after the
        call.

        In the child, ``pass_fds`` keep the numbers 3, 4, ... in the order given.
        """
        ...

    def start_fork_server(self, command: WorkerCommand) -> None:
        """
        Start the process that workers are forked from (`WorkerCommand.start`); answered by one
        StarterState.
        """
        ...

    def release_fork_server(self) -> None:
        """
        Let that process go once it has forked what it was asked for: no more workers will be
        wanted.
        """
        ...

    def send_signal(self, slot: int, number: int, *, group: bool) -> None:
        """
        Send a signal to the process of a slot, or to its whole process group; a slot that has ended
        is no error.
        """
        ...

    def sweep_descendants(self, slot: int | None) -> None:
        """
        SIGKILL every descendant of a slot (None: of all slots) that is left; answered by one Swept.
        """
        ...

    def read_events(self) -> Iterable[SupervisorEvent]:
        """
        Return what has happened since the last call.

        Raises:
            PdrunError: the keeper itself died, or was silent for too long (see `beat`) and was
                ended; every worker has
                been told to die with it.
        """
        ...

    def send_ping(self) -> float | None:
        """
        Have the keeper show that it lives; return when to call again (monotonic seconds), None: no
        need to.
        """
        ...

    def close(self) -> None:
        """End all descendants, the keeper with them, and wait for it (bounded)."""
        ...


class WorkerOutput(Protocol):
    """
    Reads the workers' pipes; writes log files and the terminal (`pdrun.launcher.output.router`).

    It never blocks on a file or the terminal, and no line of one worker is ever torn by another's.
    """

    def prepare_folder(self) -> None:
        """
        Make the log folder, or find out that it cannot be used: part of the preflight.

        Raises:
            ConfigError: names the folder and the reason.
        """
        ...

    def begin_generation(self, run: str, world_size: int) -> None:
        """
        A generation starts: needed before `open`; names the folder, and tells whether lines need a
        prefix.
        """
        ...

    def show_hidden_tail(self, rank: int) -> None:
        """A worker failed: show the last lines of one that --show-ranks hides; once."""
        ...

    def open_pipes(self, rank: int, local_rank: int, generation: int) -> tuple[int, int]:
        """
        Make the two pipes of a worker; return the write ends (stdout, stderr), which the caller
        closes.
        """
        ...

    def watched_fds(self) -> Iterable[int]:
        """
        The read ends that are to be watched now (none of a worker whose output is being held back).
        """
        ...

    def read_pipe(self, fd: int) -> None:
        """Take what a readable pipe holds, at most one buffer, and pass it on."""
        ...

    def drain_worker(self, rank: int, timeout: float) -> None:
        """
        A worker has ended: take what is left in its pipes (until EOF or ``timeout``), write out a
        last half line.
        """
        ...

    def last_lines(self, rank: int) -> tuple[str, ...]:
        """The last lines of a worker, stderr after stdout, for a summary."""
        ...

    def recent_stderr(self, rank: int) -> str:
        """
        The last 16 KiB that a worker printed on stderr: an abort's reason may stand above a long
        stack.
        """
        ...

    def last_traceback(self, rank: int) -> tuple[float, str] | None:
        """
        The last Python traceback that a worker printed on stderr, when nothing but its own lines
        followed.

        Returns:
            (monotonic seconds of its first byte, text), or None.
        """
        ...

    def has_survived(self, rank: int) -> bool:
        """
        Whether a worker's output tells that it went on after the traceback that `traceback`
        returns.
        """
        ...

    def last_output_at(self, rank: int) -> float:
        """Monotonic seconds at which something that a worker printed was last read; 0: never."""
        ...

    def log_path(self, rank: int) -> str:
        """
        Path of the log that tells why the worker ended, or the empty string when no files are
        written.
        """
        ...

    def print_line(self, text: str) -> None:
        """
        Print a line of pdrun's own on the terminal (stderr), in order with the workers' lines.
        """
        ...

    def close(self, timeout: float = 2.0) -> tuple[str, ...]:
        """Flush files and terminal, bounded; return one line for each thing that was dropped."""
        ...


class SchedulerProcess(Protocol):
    """The scheduler process, as far as the agent needs to know it."""

    def fileno(self) -> int:
        """Readable when `tend` is due; -1: see `deadline`."""
        ...

    def deadline(self) -> float | None:
        """
        Monotonic time at which `tend` is due although nothing is readable; None: no such time.
        """
        ...

    def restart_if_dead(self) -> str:
        """
        Start it again when it has died; never waits. Return a line for the user, or the empty
        string.

        Raises:
            RendezvousError: it has ended for good.
        """
        ...


def _nothing(plan: LaunchPlan, welcome: Welcome) -> None:
    """The default of `Surroundings.welcomed`."""


def _unheard(mark: bytes) -> None:
    """The default of `Surroundings.reached`."""


@dataclass(frozen=True)
class AgentDeps:
    """See the module."""

    start_supervisor: Callable[[LaunchPlan], SupervisorHandle]
    make_output: Callable[[LaunchPlan], WorkerOutput]
    clock: Clock = field(default_factory=SystemClock)
    on_welcome: Callable[[LaunchPlan, Welcome], None] = _nothing
    """Called once, when the run's name is known."""
    scheduler_process: SchedulerProcess | None = None
    """The scheduler process of this node, if it has it."""
    lifeline: int | None = None
    """
    A descriptor whose end means: whoever started this agent is gone, end everything at once. May
    say FOR_ALL.
    """
    stdin: int | None = None
    """What rank 0 reads as its standard input; None: nothing."""
    address: str = ""
    """``HOST:PORT`` by which other nodes join; for messages."""
    event_log: str = ""
    """
    Path of the event log that the scheduler process writes; what it notes is shown. Empty: none.
    """
    on_progress: Callable[[bytes], None] = _unheard
    """Called with UP once signals are taken, with RUNNING before workers are started."""
    print_line: Callable[[str], None] = async_writer.write_message
    """Says a line of pdrun's own before there is an output; must not block."""
    is_quiet: bool = False
    """Another agent prints what is printed once a job."""
