"""
The agent's handle of the supervisor process: start it, send requests, read events, clean up.

The agent is a sub-reaper, too. If the supervisor is killed, its workers die with it
(PR_SET_PDEATHSIG). Their descendants become children of the agent, which kills them.

Every wait is bounded. The supervisor gets a ping every PING_SECONDS (`send_ping`). If it leaves
MAX_UNANSWERED_PINGS unanswered, it is killed. Unanswered pings are counted instead of time, so that
a stall of the agent itself kills nothing.

A ping also contains the time at which the supervisor ends all workers if no later ping moves it: so
an agent that stands still does not keep workers beyond their lease. If agent and supervisor stand
still, the watchdog ends them.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pdrun import process_setup
from pdrun.errors import PdrunError
from pdrun.launcher.stdlib_only import process_tree, watchdog
from pdrun.launcher.supervisor import boot
from pdrun.launcher.supervisor.events import (
    Exited,
    ForkServerStatus,
    Spawned,
    SpawnFailed,
    SupervisorEvent,
    Swept,
    WorkerCommand,
    WorkersFenced,
)

if TYPE_CHECKING:
    from pdrun.launcher.supervisor.boot import Prestart
    from pdrun.launcher.supervisor.warm_client import BorrowedSupervisor

CLOSE_SECONDS = process_tree.KILL_SECONDS + 1.0
"""Time that the supervisor has to kill all descendants and exit."""
PING_SECONDS = 1.0
MAX_UNANSWERED_PINGS = 6
MAX_PACKET_BYTES = 1 << 17
PONG_PACKET = json.dumps({"ev": "pong"}).encode()
ENDED_PACKET = json.dumps({"ev": "ended"}).encode()


class SupervisorProcess:
    """
    A supervisor process; implements `pdrun.launcher.agent.interfaces.SupervisorHandle`.

    Args:
        python: interpreter that runs the supervisor.
        spared_pids: children of this process that are not killed if the supervisor dies (the
            scheduler, for example). Children that exist now are spared, too. More may be added
            later.
        borrowed: a supervisor that was forked from a warm process, with a fork server that is
            ready. No other one is started.
        prestart: a supervisor that is already running, and its fork server.

    Raises:
        PdrunError: the supervisor could not be started.
    """

    def __init__(
        self,
        *,
        python: str = sys.executable,
        spared_pids: Iterable[int] = (),
        borrowed: BorrowedSupervisor | None = None,
        prestart: Prestart | None = None,
    ) -> None:
        if sys.platform != "linux":
            raise PdrunError(
                f"workers cannot be started on {sys.platform}",
                hint="the supervisor process needs Linux",
            )
        self._death_reason: str = ""
        self._unanswered = 0
        self._ping_at = 0.0
        self._fence_at: float | None = None
        self._is_frozen = False
        self._borrowed = borrowed
        self._has_fork_server = borrowed is not None or prestart is not None
        if borrowed is None:
            process_tree.prctl(process_tree.PR_SET_CHILD_SUBREAPER, 1)
        if borrowed is not None:
            self.pid = borrowed.pid
            self.spared_pids = set(spared_pids)
            ours = borrowed.socket
        elif prestart is not None:
            self.pid = prestart.pid
            self.spared_pids = {*spared_pids, *_other_children(prestart.pid)}
            ours = prestart.socket
        else:
            self.spared_pids = {*spared_pids, *_other_children(0)}
            self.pid, ours = self._start_supervisor(python)
        self._socket: socket.socket | None = ours
        ours.setsockopt(
            socket.SOL_SOCKET,
            socket.SO_SNDTIMEO,
            struct.pack("ll", int(PING_SECONDS * MAX_UNANSWERED_PINGS), 0),
        )

    @staticmethod
    def _start_supervisor(python: str) -> tuple[int, socket.socket]:
        try:
            return boot.start_supervisor(python)
        except OSError as error:
            if process_setup.is_out_of_processes(error):
                raise process_setup.process_limit_error("pdrun") from error
            raise PdrunError(
                f"could not start the supervisor process: {error.strerror}", where=python
            ) from error

    def fileno(self) -> int:
        """Return the descriptor to poll for `read_events`; -1 after `close`."""
        return self._socket.fileno() if self._socket else -1

    def spawn(
        self,
        command: WorkerCommand,
        stdin: int,
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Request a process. The descriptors may be closed after the call."""
        body = _write_command(command)
        try:
            descriptors = [body, stdin, stdout, stderr, *pass_fds]
            start = "" if command.start == "exec" else command.start
            message = {
                "op": "spawn",
                "slot": command.slot,
                "count": len(descriptors),
                "start": start,
            }
            self._send_message(message, descriptors)
        finally:
            os.close(body)

    def start_fork_server(self, command: WorkerCommand) -> None:
        """Request a fork server, unless there is one. Answered by one ForkServerStatus."""
        if self._has_fork_server:
            return
        self._has_fork_server = True
        body = _write_command(command)
        try:
            self._send_message({"op": "prepare"}, [body])
        finally:
            os.close(body)

    def release_fork_server(self) -> None:
        """End the fork server once it has forked all requested workers."""
        self._send_message({"op": "dismiss"})

    def send_signal(self, slot: int, number: int, *, group: bool) -> None:
        """Send a signal to the process of a slot, or to its process group."""
        self._send_message({"op": "signal", "slot": slot, "number": int(number), "group": group})

    def sweep_descendants(self, slot: int | None) -> None:
        """Kill every descendant that a slot (None: any slot) has left. Answered by one Swept."""
        self._send_message({"op": "sweep", "slot": slot})

    def read_events(self) -> Iterable[SupervisorEvent]:
        """
        Return the events since the last call.

        Raises:
            WorkersFenced: it has ended at the time of the last ping (`send_ping`), or was killed
                then by its watchdog.
            PdrunError: the supervisor died. Its workers and their descendants have been killed.
        """
        found: list[SupervisorEvent] = []
        while self._socket is not None:
            try:
                data = self._socket.recv(MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if self._is_frozen and not found:
                    raise self._on_death() from None
                return found
            except OSError:
                data = b""
            if data:
                self._unanswered = 0
                self._is_frozen = False
                if data not in (PONG_PACKET, ENDED_PACKET):
                    found.append(_parse_event(json.loads(data)))
            elif found:
                return found  # the next call sees the end of the connection again
            else:
                raise self._on_death()
        if self._death_reason:
            raise PdrunError(self._death_reason)
        return found

    def send_ping(self, fence_at: float | None = None) -> float:
        """
        Send a ping if one is due; return when the next one is due (monotonic seconds).

        Call it after `read_events`, which counts the answers.

        Args:
            fence_at: monotonic time at which the supervisor ends all workers if no later ping moves
                it; None: never.
        """
        now = time.monotonic()
        is_due = now >= self._ping_at or (fence_at is not None and self._fence_at is None)
        if is_due and not self._is_frozen:
            self._is_frozen = self._unanswered >= MAX_UNANSWERED_PINGS
            if not self._is_frozen:
                self._unanswered += 1
                self._ping_at = now + PING_SECONDS
                self._fence_at = fence_at
                self._send_message({"op": "ping", "fence": fence_at})
        if self._is_frozen:
            return now
        return self._ping_at

    def lift_fence(self) -> None:
        """Cancel the ``fence_at`` of the last `send_ping`: no workers run."""
        if self._fence_at is not None:
            self._fence_at = None
            self._send_message({"op": "ping", "fence": None})

    def close(self) -> None:
        """
        End the supervisor with all descendants and wait for it.

        After CLOSE_SECONDS it is killed.
        """
        if self._socket is None:
            return
        ours = self._socket
        self._socket = None
        with suppress(OSError):
            ours.shutdown(socket.SHUT_WR)
        # A stopped supervisor would not see the end of the connection.
        self._signal_supervisor(signal.SIGCONT)
        code = self._wait_for_exit(CLOSE_SECONDS)
        if code != 0 or (self._borrowed is not None and not _has_reported_end(ours)):
            self._kill_orphans()
        ours.close()
        self._close_handle()

    def _send_message(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        if self._socket is None:
            return
        try:
            socket.send_fds(
                self._socket, [json.dumps(message).encode()], descriptors, socket.MSG_NOSIGNAL
            )
        except (BrokenPipeError, ConnectionResetError):
            pass  # `read_events` reports it
        except BlockingIOError:  # it has read nothing for SO_SNDTIMEO
            self._is_frozen = True

    def _signal_supervisor(self, number: int) -> None:
        """
        Signal the supervisor.

        The pid is still its own: a child has not been reaped, and for any other there is a pidfd.
        """
        try:
            if self._borrowed is not None:
                signal.pidfd_send_signal(self._borrowed.handle, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def _close_handle(self) -> None:
        """Close the pidfd of a borrowed supervisor."""
        if self._borrowed is not None:
            os.close(self._borrowed.handle)

    def _wait_for_exit(self, seconds: float) -> int:
        """
        Wait for the supervisor's exit, kill it after ``seconds``, and return its wait status.

        The status of a borrowed supervisor is not known, because it is no child: returns 0. It
        reports an orderly end with ENDED_PACKET.
        """
        handle = self._borrowed.handle if self._borrowed is not None else None
        if not _wait_exit(self.pid, seconds, handle):
            self._signal_supervisor(signal.SIGKILL)
            if not _wait_exit(self.pid, process_tree.KILL_SECONDS, handle):
                return int(signal.SIGKILL)
        if handle is not None:
            return 0
        return _reap_child(self.pid)

    def _on_death(self) -> PdrunError:
        """Kill what a dead or frozen supervisor has left, and return the error to raise."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        code = os.waitstatus_to_exitcode(self._wait_for_exit(0.0 if self._is_frozen else 1.0))
        self._kill_orphans()
        self._close_handle()
        if self._fence_at is not None and time.monotonic() >= self._fence_at:
            self._death_reason = (
                "the workers of this node were ended because its agent did not show in time that"
                " they may run (was it stopped?): the other nodes may continue without them"
            )
            return WorkersFenced(self._death_reason)
        how = self._describe_death(code)
        self._death_reason = (
            f"the supervisor process {self.pid} {how}; all workers on this node were killed"
        )
        error = PdrunError(
            self._death_reason, hint="no process of the job is left on this node; start it again"
        )
        if code < 0 or self._is_frozen:
            error.exit_code = 128 + max(-code, signal.SIGKILL)
        return error

    def _describe_death(self, code: int) -> str:
        if self._is_frozen:
            seconds = PING_SECONDS * MAX_UNANSWERED_PINGS
            return f"did not answer for {seconds:g} s (was it stopped?) and was killed"
        if self._borrowed is not None:
            return "ended or was killed"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def _kill_orphans(self) -> None:
        """Kill and reap what became this process's child when the supervisor died."""
        if self._borrowed is not None:
            watchdog.kill_marked(self._borrowed.mark)
            return
        myself = process_tree.find_process(os.getpid())
        give_up_at = time.monotonic() + process_tree.KILL_SECONDS
        while myself is not None and time.monotonic() < give_up_at:
            orphans = [
                child
                for child in process_tree.list_children(myself)
                if child.pid not in self.spared_pids
            ]
            if not orphans:
                return
            for member in process_tree.descendants(orphans):
                process_tree.kill_process(member)
            for orphan in orphans:
                try:
                    os.waitpid(orphan.pid, os.WNOHANG)
                except ChildProcessError:
                    pass
            time.sleep(process_tree.RETRY_SECONDS / 4)


def _other_children(supervisor_pid: int) -> list[int]:
    """Return the pids of this process's children except the supervisor."""
    myself = process_tree.find_process(os.getpid())
    if myself is None:
        return []
    children = process_tree.list_children(myself)
    return [child.pid for child in children if child.pid != supervisor_pid]


def _has_reported_end(connection: socket.socket) -> bool:
    """Return whether a supervisor that has ended reported that it had killed all descendants."""
    try:
        while data := connection.recv(MAX_PACKET_BYTES, socket.MSG_DONTWAIT):
            if data == ENDED_PACKET:
                return True
    except OSError:
        pass
    return False


def _parse_event(message: dict[str, Any]) -> SupervisorEvent:
    kind = message["ev"]
    slot = message["slot"]
    if kind == "spawned":
        return Spawned(slot, message["pid"])
    if kind == "failed":
        return SpawnFailed(slot, message["errno"], message["message"])
    if kind == "exited":
        return Exited(slot, message["pid"], message["status"], message["at"])
    if kind == "starter":
        return ForkServerStatus(slot, message["why"])
    return Swept(slot, tuple(message["processes"]), tuple(message["stuck"]))


def _write_command(command: WorkerCommand) -> int:
    return boot.write_command(
        command.argv, command.env, command.cwd, command.cpus, process_setup.user_nofile_limit()
    )


def _wait_exit(pid: int, seconds: float, known: int | None = None) -> bool:
    """
    Wait until a process has ended, without reaping it; return False after ``seconds``.

    ``known``: its pidfd, if it is not a child of this process.
    """
    try:
        handle = os.pidfd_open(pid) if known is None else known
    except OSError:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return True
            time.sleep(0.005)
        return False
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        if known is None:
            os.close(handle)


def _reap_child(pid: int) -> int:
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return 0
