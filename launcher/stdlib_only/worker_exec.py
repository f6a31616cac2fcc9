"""
The child's side of fork and exec: session, descriptors, folder, CPUs, limits, then the program.

Loaded in three ways, see `supervisor`. Standard library only.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn, Protocol

if TYPE_CHECKING or __package__:
    from pdrun.launcher.stdlib_only import process_tree, watchdog
elif "process_tree" not in globals():
    import process_tree
    import watchdog

_MAX_ERROR_CHARS = 4000
"""An error must fit into a pipe with one write."""


if TYPE_CHECKING:  # at run time typing is not imported

    class WorkerParent(Protocol):
        """The supervisor, as `fork_client` and `leftovers` use it."""

        token: str
        watchdog_pid: int
        wake_fd: int
        own_process: process_tree.ProcessInfo | None
        children: dict[int, ChildProcess]
        slot_by_pid: dict[int, int]

        def processes(self) -> list[ChildProcess]:
            """Return all processes of slots."""

        def add_child(self, child: ChildProcess) -> None:
            """Register a process whose pid is known."""

        def exec_request(self, slot: int, request: SpawnRequest) -> int:
            """Fork and execute a command; return the pid."""

        def on_report(self, child: ChildProcess) -> None:
            """Read a report pipe."""

        def report_failure(self, slot: int, request: SpawnRequest, error: OSError) -> None:
            """Tell the agent that a process could not be started."""

        def send_event(self, **event: Any) -> None:
            """Queue an event for the agent."""

        def send_signal(self, slot: int, number: int, to_group: bool) -> None:
            """Send a signal to the process of a slot."""

        def deliver_signal(self, child: ChildProcess, number: int, to_group: bool) -> None:
            """Send a signal now."""


class SpawnRequest:
    """
    A command and its descriptors, kept until a process has them.

    The first descriptor contains the command as JSON; see `boot.write_command`. ``must_fork``: fail
    rather than execute, if there is no fork server.
    """

    __slots__ = ("command", "descriptors", "must_fork")

    def __init__(self, descriptors: list[int], must_fork: bool = False) -> None:
        self.command: dict[str, Any] = {}
        self.descriptors = descriptors
        self.must_fork = must_fork

    def read_command(self, marker: str) -> None:
        """Read the command and add the marker to its environment."""
        self.command = json.loads(process_tree.read_file(f"/proc/self/fd/{self.descriptors[0]}"))
        self.command["env"][watchdog.MARKER_VARIABLE] = marker

    def close(self) -> None:
        """Close the descriptors; closing twice is allowed."""
        for number in self.descriptors:
            os.close(number)
        self.descriptors = []


DIRECT_SIGNALS: dict[int, float] = {signal.SIGUSR1: 2.0, signal.SIGUSR2: 2.0, signal.SIGTERM: 10.0}
"""
Signals of batch systems, and for how many seconds the same signal from the agent is a repetition.
The order to stop comes from the scheduler, which may be on another node.
"""
HOLD_SECONDS = 0.1
"""Time in which a signal of Slurm reaches all processes of a step."""


class DirectSignals:
    """
    Signals that a batch system sends to every process of a job: to the agent, to this process and
    to the workers. Slurm does so (proctrack/linuxproc and cgroup), and systemd.

    The agent passes its signal on to workers that have it already. This process is signalled like a
    worker, so it knows which ones those are. In Slurm, whose signals need some milliseconds from
    the first process to the last, a signal is held back until then.
    """

    def __init__(self, *, is_in_slurm: bool) -> None:
        self.hold_seconds = HOLD_SECONDS if is_in_slurm else 0.0
        self.received: dict[int, tuple[float, set[int]]] = {}
        """Signal -> when it was received, and the pids that have it and were not passed it."""
        self.held: list[tuple[float, int, int, bool]] = []
        """When to send, slot, signal, to the group."""

    def on_signal(self, number: int, pids: set[int], now: float) -> None:
        """This process has received a signal while the processes ``pids`` were running."""
        self.received[number] = (now, pids)

    def hold(self, slot: int, number: int, to_group: bool, now: float) -> bool:
        """Return whether a signal is held back: `take_due` returns it unless it is a repetition."""
        if number not in DIRECT_SIGNALS or not self.hold_seconds:
            return False
        self.held.append((now + self.hold_seconds, slot, number, to_group))
        return True

    def is_repetition(self, pid: int, number: int, now: float) -> bool:
        """Return whether a process has this signal already. Each counts once."""
        at, pids = self.received.get(number, (0.0, set()))
        if pid not in pids or now - at > DIRECT_SIGNALS[number]:
            return False
        pids.discard(pid)
        return True

    def on_exit(self, pid: int) -> None:
        """A process has ended: its pid, and its slot, may get another one."""
        for _, pids in self.received.values():
            pids.discard(pid)

    def take_due(self, now: float) -> list[tuple[int, int, bool]]:
        """Return (slot, signal, to the group) of the signals that are not held back any more."""
        due = [entry[1:] for entry in self.held if entry[0] <= now]
        self.held = [entry for entry in self.held if entry[0] > now]
        return due

    def wait_seconds(self, now: float) -> float | None:
        """Return the time until the next signal is due; None: none is held back."""
        if not self.held:
            return None
        return max(0.0, min(entry[0] for entry in self.held) - now)


class ChildProcess:
    """
    A process of a slot.

    Attributes:
        pid: 0 until the fork server has forked it.
        report_fd: read end of the pipe that exec closes, or that contains the error; -1: read.
        request: what the fork server was asked to fork, until it has.
        pending_signals: (number, to the group) of signals that arrived before exec. The child would
            not treat them as its program does.
        error: ``ERRNO TEXT`` if it could not be started.
    """

    __slots__ = ("error", "pending_signals", "pid", "report_fd", "request", "slot")

    def __init__(
        self, slot: int, pid: int, report_fd: int, request: SpawnRequest | None = None
    ) -> None:
        self.slot = slot
        self.pid = pid
        self.report_fd = report_fd
        self.request = request
        self.pending_signals: list[tuple[int, bool]] = []
        self.error = ""


def encode_text(text: str) -> bytes:
    """Return the bytes of a text that came as JSON; see `boot.write_command`."""
    return text.encode("utf-8", "surrogateescape")


def exec_program(argv: list[bytes], env: dict[bytes, bytes]) -> NoReturn:
    """
    Execute a program as execvpe does, with PATH of the new environment.

    If a folder of PATH refuses the program (EACCES), that error is raised rather than the ENOENT of
    a later folder.
    """
    if b"/" in argv[0]:
        os.execve(argv[0], argv, env)
    refused: OSError | None = None
    for folder in env.get(b"PATH", b"/usr/local/bin:/usr/bin:/bin").split(b":"):
        try:
            os.execve((folder or b".") + b"/" + argv[0], argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            refused = error
    raise refused or FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def remap_fds(descriptors: list[int], report_fd: int) -> int:
    """
    Move the descriptors to 0, 1, 2, ... and ``report_fd`` to the next number, which is returned.

    The others above are closed. All go through high numbers first, so that none is overwritten.
    """
    count = len(descriptors)
    high = max([*descriptors, report_fd]) + count + 1
    for offset, number in enumerate([*descriptors, report_fd]):
        os.dup2(number, high + offset, inheritable=False)
    for number in range(count):
        os.dup2(high + number, number, inheritable=True)
    os.dup2(high + count, count, inheritable=False)
    os.closerange(count + 1, high + count + 1)
    return count


def exec_child(
    command: dict[str, Any],
    descriptors: list[int],
    report_fd: int,
    supervisor_pid: int,
    is_hangup_ignored: bool,
) -> NoReturn:
    """
    Become the program of a command, in a child that was just forked; never returns.

    An error is written to ``report_fd`` as ``ERRNO STAGE: TEXT``. On success exec closes it.
    """
    stage = "session"
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        process_tree.prctl(process_tree.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor_pid:
            os._exit(127)  # it died before prctl took effect
        _reset_signals(is_hangup_ignored)
        report_fd = remap_fds(descriptors, report_fd)
        stage = command["cwd"]
        os.chdir(encode_text(command["cwd"]))
        if command["cpus"]:
            stage = f"CPUs {command['cpus']}"
            os.sched_setaffinity(0, command["cpus"])
        stage = command["argv"][0]
        env = {encode_text(name): encode_text(value) for name, value in command["env"].items()}
        if command["nofile"]:  # the user's own limit; pdrun's processes have a higher one
            resource.setrlimit(resource.RLIMIT_NOFILE, tuple(command["nofile"]))
        exec_program([encode_text(word) for word in command["argv"]], env)
    except OSError as error:
        text = f"{error.errno} {stage}: {os.strerror(error.errno or 0)}"
        os.write(report_fd, text[:_MAX_ERROR_CHARS].encode("utf-8", "replace"))
    except ValueError as error:
        text = f"{errno.EINVAL} {stage}: {error}"
        os.write(report_fd, text[:_MAX_ERROR_CHARS].encode("utf-8", "replace"))
    finally:
        os._exit(127)


def _reset_signals(is_hangup_ignored: bool) -> None:
    """Restore default actions and an empty mask; an ignored SIGHUP (nohup) stays ignored."""
    numbers = {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGQUIT,
        signal.SIGCHLD,
        signal.SIGPIPE,
        signal.SIGXFSZ,
    }
    if not is_hangup_ignored:
        numbers.add(signal.SIGHUP)
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
