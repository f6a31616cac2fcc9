"""
The watchdog: a child of the supervisor that kills all marked processes if the supervisor is killed.

Workers die with the supervisor (PR_SET_PDEATHSIG). Their descendants move to the agent, which kills
them. If agent and supervisor are killed at the same moment, only the watchdog is left. It finds
their processes by a marker in the environment of each.

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
SLOT_DIGITS = 12
"""Digits of a slot in the marker. The width is fixed, because a forked worker overwrites the fork
server's marker in place."""


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
    Wait until the supervisor dies, kill the marked processes and exit.

    If the supervisor exits in order, it kills this process first.

    Args:
        token: the token of the marker.
        supervisor_pipe: read end of a pipe whose write end only the supervisor holds.
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
        while supervisor_pipe not in {number for number, _ in poll.poll()}:
            poll.unregister(agent)
            if os.getppid() == parent:
                os.kill(parent, signal.SIGCONT)
        kill_marked(token)
    finally:
        os._exit(0)


def start_watchdog(sockets: tuple[int, ...], token: str, agent: int = -1) -> int:
    """
    Fork the watchdog and return its pid, or 0 if no process or descriptor is left.

    The watchdog closes ``sockets``: the peers of the supervisor must see their end.
    """
    try:
        read, write = os.pipe2(os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        pid = os.fork()
    except OSError:
        os.close(read)
        os.close(write)
        return 0
    if pid == 0:
        os.close(write)
        for number in sockets:
            os.close(number)
        run_watchdog(token, read, agent)
    os.close(read)  # the write end stays open, only here, for as long as this process lives
    return pid
