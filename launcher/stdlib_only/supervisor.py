"""
The supervisor: a small process between the agent and the workers, so that no process outlives a
job.

* It is the parent of every worker and a sub-reaper. Whatever a worker leaves behind, `setsid` or
  not, becomes its child.
* The agent is at the other end of a socket. When the agent's end closes for any reason (SIGKILL
  included), the supervisor kills all descendants and exits. A stopped supervisor is continued for
  that: its own PDEATHSIG is SIGCONT.
* If the supervisor is killed, workers die by PR_SET_PDEATHSIG. Their descendants move to the agent,
  which kills them.
* If both are killed at the same moment, the `watchdog` kills every process with their marker.
* If the agent stands still, the supervisor kills all descendants at the time that the agent's last
  ping contains, and exits: other nodes may start the same ranks soon after. If both stand still,
  the watchdog does it.

No root and no cgroup is needed. Workers are executed (`worker_exec`), or forked from a process that
has imported torch (`fork_client`). `leftovers` kills what a worker leaves behind.

Started as ``python -I -S -c BOOT_CODE supervisor.py FD TOKEN`` (`boot`), or forked from a warm
process (`warm_server`). Every launch waits for its start (20 ms). It imports only the standard
library, and neither dataclasses, typing nor pathlib, which would double that time. The files of
this folder are loaded in three ways:

    as modules of pdrun      pdrun's own processes, tests
    by name                  BOOT_CODE has put this folder on sys.path
    by path                  `fork_server.load_sibling`, which passes the siblings in as globals

Messages are JSON, one per SOCK_SEQPACKET packet. Descriptors are passed with SCM_RIGHTS. The first
descriptor contains a command.

Limits: a set-user-ID worker loses its PDEATHSIG (the kernel clears it), but not the cleanup. A
process in uninterruptible sleep cannot be killed. It is named, and given up after KILL_SECONDS.
Only descendants of this process are signalled: each is pinned by a pidfd and identified by its
start time.
"""

from __future__ import annotations

import array
import errno
import json
import os
import select
import signal
import socket
import time
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

if TYPE_CHECKING or __package__:
    from pdrun.launcher.stdlib_only import (
        fork_client,
        leftovers,
        process_tree,
        watchdog,
        worker_exec,
    )
elif "process_tree" not in globals():
    import fork_client
    import leftovers
    import process_tree
    import watchdog
    import worker_exec


class Supervisor:
    """
    One loop over the agent's socket, SIGCHLD, the fork server and the report pipes of children.

    Attributes:
        children: running processes by pid, the fork server included.
        slot_by_pid: slots of workers, also of ended ones until their cleanup.
        watchdog_pid: 0 if there is no watchdog.
        watchdog_pipe: passes the fence on to the watchdog; -1 without one.
    """

    def __init__(self, agent: socket.socket, token: str) -> None:
        self.agent = agent
        self.token = token
        self.watchdog_pid = 0
        self.watchdog_pipe = -1
        self.fence = watchdog.Fence()
        self.own_process = process_tree.find_process(os.getpid())
        self.children: dict[int, worker_exec.ChildProcess] = {}
        self.slot_by_pid: dict[int, int] = {}
        self.forks = fork_client.ForkClient(self)
        self.cleanups: list[leftovers.Cleanup] = []
        self.outbox: deque[bytes] = deque()
        self.is_hangup_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self.wake_fd, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(write, False)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        self.direct = worker_exec.DirectSignals(is_in_slurm="SLURM_JOB_ID" in os.environ)
        for direct in worker_exec.DIRECT_SIGNALS:
            if direct == signal.SIGTERM or signal.getsignal(direct) != signal.SIG_IGN:
                signal.signal(direct, self.on_direct_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        process_tree.prctl(process_tree.PR_SET_CHILD_SUBREAPER, 1)

    def run(self) -> None:
        """Serve the agent until its end closes or the fence is over; then kill all descendants."""
        try:
            while self.run_once():
                pass
        finally:
            leftovers.kill_all(self)

    def processes(self) -> list[worker_exec.ChildProcess]:
        """Return all processes of slots: those that run, and those that are being forked."""
        return [*self.children.values(), *self.forks.pending]

    def run_once(self) -> bool:
        """Wait for events and handle them; return False when all workers must end."""
        poll = select.poll()
        agent_events = select.POLLIN | select.POLLOUT if self.outbox else select.POLLIN
        poll.register(self.agent, agent_events)
        poll.register(self.wake_fd, select.POLLIN)
        reports = {child.report_fd: child for child in self.processes() if child.report_fd >= 0}
        for number in reports:
            poll.register(number, select.POLLIN)
        link = self.forks.link
        if link is not None:
            poll.register(link.socket, select.POLLIN)
        wait = self.fence.wait_seconds(time.monotonic())
        if self.cleanups:
            wait = process_tree.RETRY_SECONDS
        held = self.direct.wait_seconds(time.monotonic())
        if held is not None:
            wait = held if wait is None else min(wait, held)
        for number, event in poll.poll(None if wait is None else wait * 1000):
            if number == self.agent.fileno():
                if event & select.POLLOUT:
                    self.flush_outbox()
                if event & ~select.POLLOUT and not self.read_message():
                    return False
            elif number in reports:
                self.on_report(reports[number])
            # An event before may have closed the socket, whose number may be another's now.
            elif link is not None and link is self.forks.link and number == link.socket.fileno():
                self.forks.read_fork_server(link)
        self.reap_children()
        for slot, sent, to_group in self.direct.take_due(time.monotonic()):
            self.send_to_slot(slot, sent, to_group)
        self.cleanups = [
            cleanup for cleanup in self.cleanups if not leftovers.step_cleanup(self, cleanup)
        ]
        return not self.fence.is_over(time.monotonic())

    # Messages
    # ----------------------------------------------------------------------------------------------

    def read_message(self) -> bool:
        """Read and handle one message of the agent; return False at the end of the connection."""
        descriptors = array.array("i")
        try:
            data, ancillary, _, _ = self.agent.recvmsg(
                fork_client.MAX_PACKET_BYTES,
                socket.CMSG_SPACE(64 * 4),
                socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT,
            )
        except BlockingIOError:
            return True
        except OSError:
            return False
        for _, _, block in ancillary:
            descriptors.frombytes(block[: len(block) - len(block) % descriptors.itemsize])
        if not data:
            return False
        self.handle_message(json.loads(data), list(descriptors))
        return True

    def handle_message(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Do what the agent asks for."""
        operation = message["op"]
        if operation == "spawn":
            self.handle_spawn(message, descriptors)
        elif operation == "prepare":
            self.forks.start_fork_server(descriptors)
        elif operation == "dismiss":
            self.forks.release_fork_server()
        elif operation == "signal":
            self.send_signal(message["slot"], message["number"], message["group"])
        elif operation == "sweep":
            self.cleanups.append(leftovers.Cleanup(message["slot"], time.monotonic()))
        elif operation == "ping":
            self.fence.move(message["fence"])
            watchdog.write_fence(self.watchdog_pipe, message["fence"])
            self.send_event(ev="pong")

    def send_event(self, **event: Any) -> None:
        """
        Queue an event for the agent and send what the socket takes.

        Never blocks: the agent may be blocked while it sends to this process.
        """
        self.outbox.append(json.dumps(event).encode())
        self.flush_outbox()

    def flush_outbox(self) -> None:
        """Send events until the socket takes no more."""
        while self.outbox:
            try:
                self.agent.send(self.outbox[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self.outbox.clear()  # the agent is gone; `read_message` sees it next
                return
            self.outbox.popleft()

    # Processes
    # ----------------------------------------------------------------------------------------------

    def handle_spawn(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Start a process in a slot. The end of its report pipe shows whether it has started."""
        slot = message["slot"]
        request = worker_exec.SpawnRequest(descriptors, message.get("start") == "fork")
        try:
            if len(descriptors) != message["count"]:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if any(child.slot == slot for child in self.processes()):
                raise OSError(errno.EBUSY, f"slot {slot} is in use")
            request.read_command(f"{self.token}.{slot}")
            if message.get("start") and self.forks.link is not None:
                self.forks.request_fork(worker_exec.ChildProcess(slot, 0, -1, request))
            else:
                self.forks.exec_unless_must_fork(slot, request)
        except OSError as error:
            self.report_failure(slot, request, error)

    def report_failure(self, slot: int, request: worker_exec.SpawnRequest, error: OSError) -> None:
        """Tell the agent that a process could not be started."""
        request.close()
        self.send_event(ev="failed", slot=slot, errno=error.errno, message=error.strerror)

    def exec_request(self, slot: int, request: worker_exec.SpawnRequest) -> int:
        """Fork and execute a command; return the pid."""
        report_fd, write = os.pipe2(os.O_CLOEXEC)
        try:
            supervisor_pid = os.getpid()
            pid = os.fork()
            if pid == 0:
                worker_exec.exec_child(
                    request.command,
                    request.descriptors[1:],
                    write,
                    supervisor_pid,
                    self.is_hangup_ignored,
                )
        except OSError:
            os.close(report_fd)
            raise
        finally:
            os.close(write)
        request.close()
        self.add_child(worker_exec.ChildProcess(slot, pid, report_fd))
        return pid

    def add_child(self, child: worker_exec.ChildProcess) -> None:
        """Register a process whose pid is known."""
        self.children[child.pid] = child
        self.slot_by_pid[child.pid] = child.slot

    def on_report(self, child: worker_exec.ChildProcess) -> None:
        """
        Read a report pipe.

        Its end without data means success: exec closed it, or the forked worker did.
        """
        text = os.read(child.report_fd, 4096).decode("utf-8", "replace")
        if child.request is not None:
            text = self.forks.on_forked(child, text)
            if not text:
                return
        os.close(child.report_fd)
        child.report_fd = -1
        if text:
            child.error = text  # sent when the child is reaped: then its slot is free
            return
        if child.slot == fork_client.FORK_SERVER_SLOT:
            return
        self.send_event(ev="spawned", slot=child.slot, pid=child.pid)
        for number, to_group in child.pending_signals:
            self.deliver_signal(child, number, to_group)

    def reap_children(self) -> None:
        """Reap every child that has ended, and report those of slots with the time of now."""
        try:
            while os.read(self.wake_fd, 512):
                pass
        except BlockingIOError:
            pass
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self.on_exit(pid, status, time.monotonic())
        except ChildProcessError:
            return

    def on_exit(self, pid: int, status: int, at: float) -> None:
        """Report the end of a process, if it is one of a slot."""
        if pid not in self.children:
            self.forks.poll_pending()
        child = self.children.pop(pid, None)
        if child is None:
            return
        self.direct.on_exit(pid)
        if child.slot == fork_client.FORK_SERVER_SLOT:
            if child.report_fd >= 0:
                os.close(child.report_fd)
            return
        if child.report_fd >= 0:
            self.on_report(child)
        if child.error:
            number, _, message = child.error.partition(" ")
            self.send_event(ev="failed", slot=child.slot, errno=int(number), message=message)
        else:
            self.send_event(ev="exited", slot=child.slot, pid=pid, status=status, at=at)

    # Signals
    # ----------------------------------------------------------------------------------------------

    def send_signal(self, slot: int, number: int, to_group: bool) -> None:
        """Send a signal to the process of a slot, unless a batch system has done so."""
        if not self.direct.hold(slot, number, to_group, time.monotonic()):
            self.send_to_slot(slot, number, to_group)

    def on_direct_signal(self, number: int, frame: object) -> None:
        """Note a signal of a batch system, which all processes that run now have received."""
        pids = {child.pid for child in self.children.values() if child.report_fd < 0}
        self.direct.on_signal(number, pids, time.monotonic())

    def send_to_slot(self, slot: int, number: int, to_group: bool) -> None:
        """Send a signal to the process of a slot; until exec only SIGKILL is sent immediately."""
        for child in self.processes():
            if child.slot != slot or self.direct.is_repetition(child.pid, number, time.monotonic()):
                continue
            if child.pid == 0:
                self.forks.signal_pending(child, number, to_group)
            elif child.report_fd >= 0 and number != signal.SIGKILL:
                child.pending_signals.append((number, to_group))
            else:
                self.deliver_signal(child, number, to_group)

    @staticmethod
    def deliver_signal(child: worker_exec.ChildProcess, number: int, to_group: bool) -> None:
        """Send a signal now. The pid is still the child's, because it has not been reaped."""
        try:
            if to_group:
                os.killpg(child.pid, number)
            else:
                os.kill(child.pid, number)
        except ProcessLookupError:
            if to_group:  # the child has not called setsid yet
                os.kill(child.pid, number)
        except PermissionError:
            pass


def main(argv: list[str]) -> NoReturn:
    """Serve the socket whose descriptor and token are on the command line."""
    number = int(argv[1])
    token = argv[2]
    process_tree.prctl(process_tree.PR_SET_PDEATHSIG, signal.SIGCONT)
    if (
        os.getsid(0) != os.getpid()
    ):  # `boot` starts a session, so that Ctrl-C does not end the start
        os.setsid()
    with open(os.devnull, "r+b", buffering=0) as null:
        os.dup2(null.fileno(), 0)
        os.dup2(null.fileno(), 1)
    os.set_inheritable(number, False)
    os.closerange(3, number)
    os.closerange(number + 1, 1 << 20)
    # Before the supervisor's own handlers and descriptors exist: the watchdog must have none.
    watchdog_pid, watchdog_pipe = watchdog.start_watchdog((number,), token)
    supervisor = Supervisor(socket.socket(fileno=number), token)
    supervisor.watchdog_pid = watchdog_pid
    supervisor.watchdog_pipe = watchdog_pipe
    supervisor.run()
    os._exit(0)
