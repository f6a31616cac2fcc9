"""
The watchdog: a child of the supervisor that kills all marked processes if the supervisor is killed
or stands still beyond the fence.

Workers die with the supervisor (PR_SET_PDEATHSIG). Their descendants move to the agent, which kills
them. If agent and supervisor are killed at the same moment, only the watchdog is left. It finds
their processes by a marker in the environment of each.

The fence is the time at which all workers must have ended unless the agent moves it (`Fence`). The
supervisor passes it on. If it stands still at that time, the watchdog kills it and the workers.

Loaded in three ways, see `supervisor`. Standard library only.

Limits: a process that has emptied its environment is not found. Nothing helps if the watchdog is
killed at the same moment, too.
"""

from __future__ import annotations

import os
import select
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import NoReturn

if TYPE_CHECKING or __package__:
    from pdrun.launcher.stdlib_only import process_tree
elif "process_tree" not in globals():
    import process_tree

MARKER_VARIABLE = "PDRUN_WORKER_OF"
"""
Set in every worker's environment to ``TOKEN.SLOT``, and inherited by its children. Identifies
leftovers that have left the worker's session.
"""
FENCE_DELAY_SECONDS = 0.3
"""Time after the fence that the supervisor has before the watchdog acts."""
STALL_SECONDS = 1.5
"""A wait that ends so much too late is a standstill of this process."""
RECHECK_SECONDS = 2.0
"""After a standstill: time for the agent, which may have stood still too, to move the fence."""
MAX_WAIT_SECONDS = 1.0
"""Longest wait with a fence; a longer one would hide a standstill."""
SLOT_DIGITS = 12
"""Digits of a slot in the marker. The width is fixed, because a forked worker overwrites the fork
server's marker in place."""


class Fence:
    """
    The time at which the workers must end, as one process judges it.

    Times are monotonic: the agent's clock is that of all processes of its machine.
    """

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.fence_at: float | None = None
        self.recheck_until = 0.0
        self.wake_at = float("inf")

    def move(self, fence_at: float | None) -> None:
        """Set the time; None: no end."""
        self.fence_at = fence_at

    def wait_seconds(self, now: float) -> float | None:
        """Return the longest time to wait for anything else, or None."""
        if self.fence_at is None:
            self.wake_at = float("inf")
            return None
        due = max(self.fence_at + self.delay, self.recheck_until)
        wait = min(MAX_WAIT_SECONDS, max(0.0, due - now))
        self.wake_at = now + wait
        return wait

    def is_over(self, now: float) -> bool:
        """
        Return whether the workers must end now; call it after each wait.

        If the whole machine stood still, its agent first gets the time to move the fence.
        """
        if self.fence_at is None:
            return False
        is_late = now >= self.fence_at + self.delay
        has_stalled = now - self.wake_at > STALL_SECONDS
        if has_stalled or (is_late and self.wake_at == float("inf")):
            # An unlimited wait, until the first fence arrived, shows no standstill.
            self.recheck_until = now + RECHECK_SECONDS
        return is_late and now >= self.recheck_until


def marker_value(token: str, slot: int) -> str:
    """Return the marker of the fork server and of workers forked from it, of fixed width."""
    return f"{token}.{slot:0{SLOT_DIGITS}d}"


def ignore_batch_signals() -> None:
    """
    Ignore the signals that a batch system sends to every process of a job (Slurm: SIGUSR1, USR2).

    A handler is used instead of SIG_IGN, because exec resets handlers. Workers therefore have the
    default action, or inherit what was ignored before.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, lambda *_: None)


def find_marked(token: str) -> Iterator[process_tree.ProcessInfo]:
    """Yield the living processes whose marker has this supervisor's token."""
    marker = f"{MARKER_VARIABLE}={token}.".encode()
    for pid in process_tree.list_numbers("/proc"):
        try:
            if marker not in process_tree.read_file(f"/proc/{pid}/environ"):
                continue
        except OSError:
            continue
        found = process_tree.find_process(pid)
        if found is not None and found.state not in "ZX":
            yield found


def kill_marked(token: str) -> None:
    """Kill every process with this supervisor's marker, for at most KILL_SECONDS."""
    give_up_at = time.monotonic() + process_tree.KILL_SECONDS
    empty_rounds = 0
    # Three rounds without a find: a process that is just being forked is not in /proc yet.
    while empty_rounds < 3 and time.monotonic() < give_up_at:
        empty_rounds += 1
        for member in find_marked(token):
            process_tree.kill_process(member)
            empty_rounds = 0
        time.sleep(process_tree.RETRY_SECONDS)


def run_watchdog(token: str, supervisor_pipe: int, agent: int = -1) -> NoReturn:
    """
    Wait until the supervisor dies or the fence is over, kill the marked processes and exit.

    If the supervisor exits in order, it kills this process first.

    Args:
        token: the token of the marker.
        supervisor_pipe: read end of a pipe whose write end only the supervisor holds; it carries
            the fence (`write_fence`).
        agent: pidfd of the agent, if the supervisor is not its child and so has no PDEATHSIG. When
            the agent dies, a stopped supervisor is continued.
    """
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        ignore_batch_signals()
        parent = os.getppid()
        poll = select.poll()
        for descriptor in (supervisor_pipe, agent):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        fence = Fence(FENCE_DELAY_SECONDS)
        while True:
            wait = fence.wait_seconds(time.monotonic())
            ready = {number for number, _ in poll.poll(None if wait is None else wait * 1000)}
            if supervisor_pipe in ready and not read_fence(supervisor_pipe, fence):
                break
            if agent in ready:
                poll.unregister(agent)
                if os.getppid() == parent:
                    os.kill(parent, signal.SIGCONT)
            if fence.is_over(time.monotonic()):
                if os.getppid() == parent:
                    os.kill(parent, signal.SIGKILL)
                break
        kill_marked(token)
    finally:
        os._exit(0)


def read_fence(pipe: int, fence: Fence) -> bool:
    """Read what `write_fence` has written; return False at the end of the pipe."""
    data = os.read(pipe, 1 << 16)
    lines = data.decode("ascii").split("\n")[:-1]
    if lines:
        fence.move(float(lines[-1]) if lines[-1] else None)
    return bool(data)


def write_fence(pipe: int, fence_at: float | None) -> None:
    """Pass the fence on to the watchdog: one line, which is written whole or not at all."""
    if pipe < 0:
        return
    try:
        os.write(pipe, f"{fence_at:.3f}\n".encode() if fence_at is not None else b"\n")
    except OSError:
        pass  # it has ended, or has stood still for hours


def start_watchdog(sockets: tuple[int, ...], token: str, agent: int = -1) -> tuple[int, int]:
    """
    Fork the watchdog; return its pid and the pipe to it, or 0 and -1 if nothing is left for it.

    The watchdog closes ``sockets``: the peers of the supervisor must see their end.
    """
    try:
        read, write = os.pipe2(os.O_CLOEXEC)
    except OSError:
        return 0, -1
    try:
        pid = os.fork()
    except OSError:
        os.close(read)
        os.close(write)
        return 0, -1
    if pid == 0:
        os.close(write)
        for number in sockets:
            os.close(number)
        run_watchdog(token, read, agent)
    os.close(read)  # the write end stays open, only here, for as long as this process lives
    os.set_blocking(write, False)
    return pid, write
