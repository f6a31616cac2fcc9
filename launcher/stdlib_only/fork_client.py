"""
The supervisor's side of the fork server: start it, request workers, execute what it cannot fork.

The fork server (`fork_server`) is a child of the supervisor that has imported torch. Workers that
it forks become children of the supervisor, the nearest sub-reaper. A fork server that is not fit to
fork, or ends before it has forked a worker, costs its speed only: the supervisor still has the
command, and executes it.

Loaded in three ways, see `supervisor`. Standard library only.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pdrun.launcher.stdlib_only.worker_exec import ChildProcess, WorkerParent

if TYPE_CHECKING or __package__:
    from pdrun.launcher.stdlib_only import watchdog, worker_exec
elif "worker_exec" not in globals():
    import watchdog
    import worker_exec

FORK_SERVER_SLOT = -(1 << 30)
"""Slot of the fork server. Marks its own leftovers, not those of its workers."""
MAX_PACKET_BYTES = 1 << 16
_DEADLY_SIGNALS = (
    signal.SIGKILL,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
)


class ForkServerLink:
    """
    The fork server's process and socket.

    ``waiting_children``: workers that are requested once it has reported that it is ready.
    """

    __slots__ = ("is_ready", "pid", "socket", "waiting_children")

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.socket = connection
        self.is_ready = False
        self.waiting_children: list[ChildProcess] = []


class ForkClient:
    """
    Requests workers from the fork server.

    Attributes:
        link: the fork server, or None.
        pending: workers that were requested and whose pid is not known yet.
        no_link_reason: why there is no fork server.
    """

    def __init__(self, supervisor: WorkerParent) -> None:
        self.supervisor = supervisor
        self.link: ForkServerLink | None = None
        self.pending: list[ChildProcess] = []
        self.no_link_reason = "no fork server was requested"
        self.is_released = False

    def start_fork_server(self, descriptors: list[int]) -> None:
        """
        Start the fork server, with a socket to this process as descriptor 3.

        The first descriptor contains its command. On failure the agent gets the reason.
        """
        request = worker_exec.SpawnRequest(descriptors)
        ours = None
        try:
            if not descriptors:  # this process has no free descriptor: the kernel dropped it
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            request.read_command(watchdog.marker_value(self.supervisor.token, FORK_SERVER_SLOT))
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs, open(os.devnull, "r+b", buffering=0) as null:
                for _ in range(2):
                    request.descriptors.append(os.dup(null.fileno()))
                request.descriptors.append(os.memfd_create("pdrun-fork-server", os.MFD_CLOEXEC))
                request.descriptors.append(os.dup(theirs.fileno()))
                pid = self.supervisor.exec_request(FORK_SERVER_SLOT, request)
                self.link = ForkServerLink(pid, ours)
        except OSError as error:
            request.close()
            if ours is not None:
                ours.close()
            self.no_link_reason = f"the fork server could not be started: {error.strerror}"
            self.send_status(self.no_link_reason)

    def adopt_fork_server(self, pid: int, connection: socket.socket) -> None:
        """Use a child that was forked before; it will report that it is ready."""
        self.link = ForkServerLink(pid, connection)
        self.supervisor.add_child(worker_exec.ChildProcess(FORK_SERVER_SLOT, pid, -1))

    def send_status(self, why: str) -> None:
        """Report that the fork server is ready (empty), or why it is not used."""
        self.supervisor.send_event(ev="starter", slot=FORK_SERVER_SLOT, why=why)

    def read_fork_server(self, link: ForkServerLink) -> None:
        """
        Read the fork server's status: it is ready, it gives up with a reason, or it has ended.

        Then request the workers that wait for it, or execute them.
        """
        try:
            data = link.socket.recv(MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            why = json.loads(data)["why"]
        elif link.is_ready:
            why = "the fork server ended"
        else:
            why = "the fork server ended before it was ready"
        if not why:
            link.is_ready = True
            self.send_status("")
            for child in link.waiting_children:
                self.request_waiting(child)
            link.waiting_children = []
            self.close_if_released()
            return
        if not link.is_ready or data:
            self.send_status(why)
        self.no_link_reason = why
        self.drop_fork_server(link)

    def drop_fork_server(self, link: ForkServerLink) -> None:
        """Do without the fork server from now on; execute what waits for it."""
        link.socket.close()
        self.link = None
        for child in link.waiting_children:
            self.exec_instead(child)

    def release_fork_server(self) -> None:
        """End the fork server once it has been asked for all workers that wait for it."""
        self.is_released = True
        self.close_if_released()

    def close_if_released(self) -> None:
        """Close the socket if no further worker is wanted; the fork server ends at its end."""
        if self.is_released and self.link is not None and self.link.is_ready:
            self.link.socket.close()
            self.link = None
            self.no_link_reason = "the fork server was released"

    def request_fork(self, child: ChildProcess) -> None:
        """
        Request a worker, now or as soon as the fork server is ready.

        Raises:
            OSError: no descriptor is left; the slot is not taken.
        """
        link = self.link
        request = child.request
        assert request is not None
        if link is None:
            self.exec_instead(child)
            return
        if link.is_ready:  # before the slot is taken, because this may fail
            child.report_fd, write = os.pipe2(os.O_CLOEXEC)
        if child not in self.pending:
            self.pending.append(child)
        if not link.is_ready:
            link.waiting_children.append(child)
            return
        facts = {"token": self.supervisor.token, "slot": child.slot, "keeper": os.getpid()}
        try:
            socket.send_fds(
                link.socket, [json.dumps(facts).encode()], [write, *request.descriptors]
            )
        except OSError:
            pass  # the fork server has ended: the end of the report pipe shows it
        finally:
            os.close(write)

    def request_waiting(self, child: ChildProcess) -> None:
        """Request a worker that waited for the fork server; on failure its slot is free again."""
        try:
            self.request_fork(child)
        except OSError as error:
            self.pending.remove(child)
            assert child.request is not None
            self.supervisor.report_failure(child.slot, child.request, error)

    def exec_instead(self, child: ChildProcess) -> None:
        """Execute a worker that could not be forked."""
        self.pending.remove(child)
        request = child.request
        child.request = None
        assert request is not None
        try:
            self.exec_unless_must_fork(child.slot, request)
        except OSError as error:
            self.supervisor.report_failure(child.slot, request, error)
        for number, to_group in child.pending_signals:
            self.supervisor.send_signal(child.slot, number, to_group)

    def exec_unless_must_fork(self, slot: int, request: worker_exec.SpawnRequest) -> None:
        """
        Execute a request without the fork server.

        Raises:
            OSError: it must be forked (``--start fork``), or cannot be executed.
        """
        if request.must_fork:
            raise OSError(errno.EPERM, f"cannot be forked: {self.no_link_reason}")
        self.supervisor.exec_request(slot, request)

    def on_forked(self, child: ChildProcess, text: str) -> str:
        """
        Handle the fork server's report of a worker: its pid, an error, or nothing (it ended).

        Returns:
            what follows the pid in the report: an error of the worker itself, or empty.
        """
        if not text:
            os.close(child.report_fd)
            self.exec_instead(child)
            return ""
        self.pending.remove(child)
        assert child.request is not None
        child.request.close()
        child.request = None
        head, _, rest = text.partition("\n")
        if not head.startswith("pid "):
            os.close(child.report_fd)
            number, _, message = head.partition(" ")
            self.supervisor.send_event(
                ev="failed", slot=child.slot, errno=int(number), message=message
            )
            return ""
        child.pid = int(head[4:])
        self.supervisor.add_child(child)
        for waiting, to_group in child.pending_signals:
            if waiting == signal.SIGKILL:
                self.supervisor.deliver_signal(child, waiting, to_group)
        return rest

    def poll_pending(self) -> None:
        """
        Read every report that has arrived.

        Called before an unknown pid is reaped: it may be a worker whose pid is in such a report.
        """
        poll = select.poll()
        reports = {child.report_fd: child for child in self.pending if child.report_fd >= 0}
        for number in reports:
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(0):
            self.supervisor.on_report(reports[number])

    def signal_pending(self, child: ChildProcess, number: int, to_group: bool) -> None:
        """
        Signal a worker that is not forked yet.

        A deadly signal cancels a worker that was not requested yet. Other signals wait for its pid.
        """
        link = self.link
        is_waiting = link is not None and child in link.waiting_children
        if link is None or not is_waiting or number not in _DEADLY_SIGNALS:
            child.pending_signals.append((number, to_group))
            return
        link.waiting_children.remove(child)
        self.pending.remove(child)
        if child.request is not None:
            child.request.close()
        self.supervisor.send_event(
            ev="exited", slot=child.slot, pid=0, status=number, at=time.monotonic()
        )
