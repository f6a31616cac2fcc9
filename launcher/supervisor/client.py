"""
The agent's handle of the keeper process: starts it, speaks to it, and cleans up should the keeper
itself be killed.

The agent makes itself a sub-reaper as well: when the keeper dies, its workers die with it
(PR_SET_PDEATHSIG) and what they had started comes to the agent, which ends it. Everything here is
bounded; nothing waits for a keeper that hangs: it is asked for a sign of life every PING seconds
(`beat`), and one that leaves PINGS of them unanswered is ended. What counts are questions that it
had PING seconds to answer, not time, so that a stall of the agent itself ends nothing.
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
from pdrun.launcher.stdlib_only import supervisor
from pdrun.launcher.supervisor import boot
from pdrun.launcher.supervisor.events import (
    Exited,
    ForkServerStatus,
    Spawned,
    SpawnFailed,
    SupervisorEvent,
    Swept,
    WorkerCommand,
)

if TYPE_CHECKING:
    from pdrun.launcher.supervisor.boot import Prestart
    from pdrun.launcher.supervisor.warm_client import BorrowedSupervisor

CLOSE_SECONDS = supervisor.KILL_SECONDS + 1.0
PING_SECONDS = 2.0
MAX_UNANSWERED_PINGS = 5
PONG_PACKET = json.dumps({"ev": "pong"}).encode()
ENDED_PACKET = json.dumps({"ev": "ended"}).encode()


class SupervisorProcess:
    """
    Implements `pdrun.launcher.agent.interfaces.Keeper`.

    Args:
        python: interpreter to run the keeper with.
        spare: children of this process that are not the keeper's and must outlive it (the
            scheduler, say);
            those that exist now are spared anyway. May be added to later.
        lent: one that was forked from a warm process, its starter ready (`warm.borrow`); none is
            started then.
        ahead: one that was started beforehand, and its starter (`ahead.take`).

    Raises:
        PdrunError: the keeper could not be started.
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
                f"workers cannot be started on {sys.platform}", hint="pdrun's keeper needs Linux"
            )
        self._death_reason: str = ""
        self._unanswered = 0
        self._ping_at = 0.0
        self._is_frozen = False
        self._borrowed = borrowed
        self._has_fork_server = borrowed is not None or prestart is not None
        if borrowed is None:
            supervisor.prctl(supervisor.PR_SET_CHILD_SUBREAPER, 1)
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
                f"could not start the keeper: {error.strerror}", where=python
            ) from error

    def fileno(self) -> int:
        """Readable when `events` may have something; -1 after `close`."""
        return self._socket.fileno() if self._socket else -1

    def spawn(
        self,
        command: WorkerCommand,
        stdin: int,
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Ask for a process; the descriptors may be closed after the call."""
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
        """Start the starter, where there is none yet; answered by one StarterState."""
        if self._has_fork_server:
            return
        self._has_fork_server = True
        body = _write_command(command)
        try:
            self._send_message({"op": "prepare"}, [body])
        finally:
            os.close(body)

    def release_fork_server(self) -> None:
        """Let the starter go once it has forked what it was asked for."""
        self._send_message({"op": "dismiss"})

    def send_signal(self, slot: int, number: int, *, group: bool) -> None:
        """Send a signal to the process of a slot, or to its process group."""
        self._send_message({"op": "signal", "slot": slot, "number": int(number), "group": group})

    def sweep_descendants(self, slot: int | None) -> None:
        """
        SIGKILL every descendant of a slot (None: of all slots) that is left; answered by one Swept.
        """
        self._send_message({"op": "sweep", "slot": slot})

    def read_events(self) -> Iterable[SupervisorEvent]:
        """
        Return what has happened since the last call.

        Raises:
            PdrunError: the keeper died; its workers and their descendants have been ended.
        """
        found: list[SupervisorEvent] = []
        while self._socket is not None:
            try:
                data = self._socket.recv(1 << 17, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if self._is_frozen and not found:
                    raise self._on_death() from None
                return found
            except OSError:
                data = b""
            if data:
                self._unanswered = 0
                self._is_frozen = False
                if data != PONG_PACKET:
                    found.append(_parse_event(json.loads(data)))
            elif found:
                return found  # the end of the connection is seen again by the next call
            else:
                raise self._on_death()
        if self._death_reason:
            raise PdrunError(self._death_reason)
        return found

    def send_ping(self) -> float:
        """
        Ask for a sign of life, when that is due; return when it is due next. Call after `events`,
        which hears it.
        """
        now = time.monotonic()
        if now >= self._ping_at and not self._is_frozen:
            self._is_frozen = self._unanswered >= MAX_UNANSWERED_PINGS
            if not self._is_frozen:
                self._unanswered = self._unanswered + 1
                self._ping_at = now + PING_SECONDS
                self._send_message({"op": "ping"})
        return now if self._is_frozen else self._ping_at

    def close(self) -> None:
        """
        End all descendants, the keeper with them, and wait for it (at most 6 s, then it is killed).
        """
        if self._socket is None:
            return
        ours = self._socket
        self._socket = None
        with suppress(OSError):
            ours.shutdown(socket.SHUT_WR)
        self._signal_supervisor(
            signal.SIGCONT
        )  # one that was stopped would not see the end of the connection
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
            pass  # `events` says so
        except BlockingIOError:  # it has read nothing for as long as SO_SNDTIMEO says
            self._is_frozen = True

    def _signal_supervisor(self, number: int) -> None:
        """
        Signal the keeper; its pid cannot be another's: as a child it was not reaped, else there is
        a pidfd.
        """
        try:
            if self._borrowed is not None:
                signal.pidfd_send_signal(self._borrowed.handle, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def _close_handle(self) -> None:
        """Close the pidfd of a keeper that is no child."""
        if self._borrowed is not None:
            os.close(self._borrowed.handle)

    def _wait_for_exit(self, seconds: float) -> int:
        """
        Wait for the keeper's end, kill it after that many seconds, and return how it ended, as
        waitpid does.

        How one that is no child ended is not known: 0 then, and it says itself that all is in order
        ("ended").
        """
        handle = self._borrowed.handle if self._borrowed is not None else None
        if not _wait_exit(self.pid, seconds, handle):
            self._signal_supervisor(signal.SIGKILL)
            if not _wait_exit(self.pid, supervisor.KILL_SECONDS, handle):
                return int(signal.SIGKILL)
        return _reap_child(self.pid) if handle is None else 0

    def _on_death(self) -> PdrunError:
        """
        The keeper is gone without having been asked: end what it had started, and say how it went.
        """
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        code = os.waitstatus_to_exitcode(self._wait_for_exit(0.0 if self._is_frozen else 1.0))
        self._kill_orphans()
        self._close_handle()
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        if self._borrowed is not None:
            how = "ended or was killed"
        if self._is_frozen:
            how = f"did not answer for {PING_SECONDS * MAX_UNANSWERED_PINGS:g} s (was it stopped?) and was ended"
        self._death_reason = (
            f"the keeper process {self.pid} {how}; every worker on this node has been ended"
        )
        return PdrunError(
            self._death_reason, hint="nothing of the job is left here; start it again"
        )

    def _kill_orphans(self) -> None:
        """
        SIGKILL and reap what came to this process when the keeper died, for at most STUCK seconds.
        """
        if self._borrowed is not None:
            return supervisor.kill_marked(self._borrowed.mark)
        myself = supervisor.find_process(os.getpid())
        give_up_at = time.monotonic() + supervisor.KILL_SECONDS
        while myself is not None and time.monotonic() < give_up_at:
            orphans = [
                child
                for child in supervisor.list_children(myself)
                if child.pid not in self.spared_pids
            ]
            if not orphans:
                return None
            for member in supervisor.descendants(orphans):
                supervisor.kill_process(member)
            for orphan in orphans:
                try:
                    os.waitpid(orphan.pid, os.WNOHANG)
                except ChildProcessError:
                    pass
            time.sleep(supervisor.RETRY_SECONDS / 4)
        return None


def _other_children(keeper: int) -> list[int]:
    """Return the children that this process has beside a keeper."""
    myself = supervisor.find_process(os.getpid())
    return [
        child.pid
        for child in (supervisor.list_children(myself) if myself else ())
        if child.pid != keeper
    ]


def _has_reported_end(connection: socket.socket) -> bool:
    """Whether the last word of a keeper that has ended was that nothing is left of its workers."""
    try:
        while data := connection.recv(1 << 17, socket.MSG_DONTWAIT):
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
    Wait until a child, or one whose pidfd is known, has ended (not reaped here); False: it has not
    in that time.
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
