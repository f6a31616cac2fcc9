"""
The keeper: a small process between the agent and the workers, so that nothing outlives a job.

It is the parent of every worker and a sub-reaper: whatever a worker leaves behind, `setsid` or not,
comes back to it. The agent holds the other end of a socket; when that end closes, for whatever
reason (SIGKILL included), the keeper kills every descendant and leaves; a keeper that was stopped
is woken for that (its own PDEATHSIG is SIGCONT). Workers die with the keeper by PR_SET_PDEATHSIG,
and what they had started comes to the agent. Should both be killed in one instant, a child of the
keeper stands by, forked at the start: it ends every process that carries this keeper's mark. No
root and no cgroup is needed.

Where there is a starter (`starter_main`: a child of the keeper that has imported torch), workers
are forked from it and come to the keeper as to the nearest sub-reaper, so that nothing of this
differs. A starter that is not fit, or dies before it has forked a worker, costs its speed only: the
keeper still holds the command, and executes it.

Started as ``python -I -S -c BOOT supervisor.py FD TOKEN`` (`boot`), or forked from a warm process
(`warm_server`): standard library only, nothing of pdrun is imported (so all is in one file), and
nothing slow: dataclasses, typing and pathlib would double the 20 ms of its start, which every
launch waits for. Messages are JSON, one a SOCK_SEQPACKET packet; descriptors come with SCM_RIGHTS;
a command lies in the first of them.

Limits. The one that stands by does not find a process that has emptied its environment, nor helps
when it is killed in the same instant too. A set-user-ID worker loses its PDEATHSIG (the kernel
clears it), not the sweep. A process in uninterruptible sleep cannot be killed by anybody: it is
named, and waited for no longer than STUCK seconds. Only what descends from this process is ever
signalled: each is pinned by a pidfd and known by its start time before it is.
"""

from __future__ import annotations

import array
import ctypes
import errno
import json
import os
import resource
import select
import signal
import socket
import time
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MARKER_VARIABLE = "PDRUN_WORKER_OF"
"""
Variable in every worker's environment: ``TOKEN.SLOT``, by which a leftover that left its session is
known.
"""
SETTLE_SECONDS = 0.1
"""
Seconds in which what a worker left behind may end by itself (multiprocessing's resource tracker
cleans up then).
"""
KILL_SECONDS = 5.0
"""Seconds after which a process that SIGKILL does not end is given up."""
RETRY_SECONDS = 0.02
MAX_PACKET_BYTES = 1 << 16
MAX_LISTED_PROCESSES = 32
FORK_SERVER_SLOT = -(1 << 30)
"""The slot of the starter, by which leftovers of itself (not of its workers) are known."""
SLOT_DIGITS = 12
"""Digits of a slot in MARKER: a forked worker overwrites the starter's in place."""


def prctl(option: int, value: int) -> None:
    """Linux's prctl with one argument."""
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def read_file(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


class ProcessInfo:
    """
    What /proc/PID/stat says. ``start`` is in ticks since boot: with the pid, the identity of a
    process.
    """

    __slots__ = ("pid", "ppid", "session", "start", "state")

    def __init__(self, pid: int, stat: bytes) -> None:
        words = stat[stat.rindex(b")") + 2 :].split()
        self.pid = pid
        self.state = words[0].decode()
        self.start = words[19]
        self.ppid = int(words[1])
        self.session = int(words[3])

    def __str__(self) -> str:
        try:
            words = read_file(f"/proc/{self.pid}/cmdline").rstrip(b"\0").replace(b"\0", b" ")
            return f"{self.pid} {words[:200].decode(errors='replace') or '(no command)'}"
        except OSError:
            return f"{self.pid} (ended)"


def find_process(pid: int) -> ProcessInfo | None:
    """Return what /proc knows of a process, or None when there is none."""
    try:
        return ProcessInfo(pid, read_file(f"/proc/{pid}/stat"))
    except OSError:
        return None


def list_numbers(folder: str) -> list[int]:
    try:
        with os.scandir(folder) as entries:
            return [int(entry.name) for entry in entries if entry.name.isdecimal()]
    except OSError:
        return []


def _child_pids(pid: int) -> list[int]:
    """
    Pids of the children of all threads of a process; of all processes there are where that file is
    missing.
    """
    pids: list[int] = []
    for thread in list_numbers(f"/proc/{pid}/task"):
        try:
            pids += map(int, read_file(f"/proc/{pid}/task/{thread}/children").split())
        except FileNotFoundError:
            if thread == pid and find_process(pid) is not None:
                return list_numbers("/proc")
        except OSError:
            continue
    return pids


def list_children(parent: ProcessInfo) -> list[ProcessInfo]:
    """
    Children of exactly that process: nothing is returned when its pid has meanwhile been given to
    another.
    """
    found = [
        child
        for child in map(find_process, _child_pids(parent.pid))
        if child and child.ppid == parent.pid
    ]
    now = find_process(parent.pid)
    return found if now is not None and now.start == parent.start else []


def descendants(roots: list[ProcessInfo]) -> Iterator[ProcessInfo]:
    """Yield the roots and all their descendants, parents first."""
    todo = deque(roots)
    while todo:
        member = todo.popleft()
        yield member
        todo.extend(list_children(member))


def kill_process(target: ProcessInfo) -> None:
    """
    SIGKILL that very process, never one that has taken over its pid, as far as this machine can
    tell them apart.
    """
    try:
        handle = os.pidfd_open(target.pid)
    except ProcessLookupError:
        return
    except OSError:  # no descriptor is left, or the kernel has no pidfds
        handle = -1
    try:
        now = find_process(target.pid)  # None, too, where no descriptor is left to read it by
        if now is not None and now.start == target.start and handle >= 0:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        elif handle < 0 and (now is None or now.start == target.start):
            os.kill(target.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    finally:
        if handle >= 0:
            os.close(handle)


class ChildProcess:
    """
    A process that the keeper has started. ``report``: read end of the pipe that closes at exec or
    brings the error.

    ``waiting``: signals that came before exec, when the child does not yet stand as its program
    would. ``order``: what the starter was asked to fork, until it has; ``pid`` is 0 so long.
    """

    __slots__ = ("error", "pending_signals", "pid", "report_fd", "request", "slot")

    def __init__(self, slot: int, pid: int, report: int, order: SpawnRequest | None = None) -> None:
        self.slot = slot
        self.pid = pid
        self.report_fd = report
        self.request = order
        self.pending_signals: list[tuple[int, bool]] = []
        self.error = ""


class SpawnRequest:
    """
    A command with its descriptors, kept until a process has them; the first descriptor holds the
    command's text.
    """

    __slots__ = ("command", "descriptors", "must_fork")

    def __init__(self, command: dict[str, Any], descriptors: list[int], strict: bool) -> None:
        self.command = command
        self.descriptors = descriptors
        self.must_fork = strict

    def close(self) -> None:
        """Let go of the descriptors; once."""
        for number in self.descriptors:
            os.close(number)
        self.descriptors = []


class ForkServerLink:
    """
    The process that forks workers. ``waiting``: those that it will be asked for once it says that
    it is ready.
    """

    __slots__ = ("is_ready", "pid", "socket", "waiting_children")

    def __init__(self, pid: int, connection: socket.socket, ready: bool = False) -> None:
        self.pid = pid
        self.socket = connection
        self.is_ready = ready
        self.waiting_children: list[ChildProcess] = []


class Cleanup:
    """
    A request to end what a slot (None: every slot) has left; ``ended`` maps the pids killed so far
    to their text.
    """

    __slots__ = ("give_up_at", "kill_at", "killed", "slot")

    def __init__(self, slot: int | None, now: float) -> None:
        self.slot = slot
        self.kill_at = now + SETTLE_SECONDS
        self.give_up_at = now + KILL_SECONDS
        self.killed: dict[int, str] = {}


def exec_program(argv: list[bytes], env: dict[bytes, bytes]) -> NoReturn:
    """
    As execvpe, with PATH of the new environment; EACCES on the way is reported rather than a later
    ENOENT.
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


def remap_fds(descriptors: list[int], report: int) -> int:
    """
    Give the descriptors the numbers 0, 1, 2, ..., and ``report`` the next one, which is returned;
    close the rest.
    """
    count = len(descriptors)
    high = max([*descriptors, report]) + count + 1
    for offset, number in enumerate([*descriptors, report]):
        os.dup2(number, high + offset, inheritable=False)
    for number in range(count):
        os.dup2(high + number, number, inheritable=True)
    os.dup2(high + count, count, inheritable=False)
    os.closerange(count + 1, high + count + 1)
    return count


def exec_child(
    command: dict[str, Any], descriptors: list[int], report: int, keeper: int, hangup: bool
) -> NoReturn:
    """
    The child's side of a fork: take the command's surroundings, then its program; an error goes to
    ``report``.
    """
    stage = "session"
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(127)
        plain = {
            signal.SIGINT,
            signal.SIGTERM,
            signal.SIGQUIT,
            signal.SIGCHLD,
            signal.SIGPIPE,
            signal.SIGXFSZ,
        }
        for number in plain if hangup else plain | {signal.SIGHUP}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        report = remap_fds(descriptors, report)
        stage = command["cwd"]
        os.chdir(encode_text(command["cwd"]))
        if command["cpus"]:
            stage = f"CPUs {command['cpus']}"
            os.sched_setaffinity(0, command["cpus"])
        stage = command["argv"][0]
        env = {encode_text(name): encode_text(value) for name, value in command["env"].items()}
        if command["nofile"]:  # the user's own limit: this process has a higher one
            resource.setrlimit(resource.RLIMIT_NOFILE, tuple(command["nofile"]))
        exec_program([encode_text(word) for word in command["argv"]], env)
    except OSError as error:
        os.write(
            report,
            f"{error.errno} {stage}: {os.strerror(error.errno or 0)}"[:4000].encode(
                "utf-8", "replace"
            ),
        )
    except ValueError as error:
        os.write(report, f"{errno.EINVAL} {stage}: {error}"[:4000].encode("utf-8", "replace"))
    finally:
        os._exit(127)


def ignore_batch_signals() -> None:
    """
    Have the notices of a batch system do nothing here: Slurm signals every process of a job, the
    workers' keeper too.

    A handler, unlike SIG_IGN, does not outlive exec: workers have the default, or what they inherit
    as ignored.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, lambda *_: None)


def marker_value(token: str, slot: int) -> str:
    """
    The value of MARKER for the starter and what it forks: of one width, so that each can write its
    own in place.
    """
    return f"{token}.{slot:0{SLOT_DIGITS}d}"


def encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


class Supervisor:
    """One loop over the agent's socket, SIGCHLD and the pipes of children on their way to exec."""

    def __init__(self, agent: socket.socket, token: str) -> None:
        self.agent = agent
        self.token = token
        self.watchdog_pid = 0
        """Pid of the child that stands by; 0: none."""
        self.own_process = find_process(os.getpid())
        self.children: dict[int, ChildProcess] = {}
        self.pending: list[ChildProcess] = []
        self.starter: ForkServerLink | None = None
        self.no_fork_server_reason = "it was never asked for"
        self.is_released = False
        self.slot_by_pid: dict[int, int] = {}  # pid of a worker, ended ones too until swept -> slot
        self.cleanups: list[Cleanup] = []
        self.outbox: deque[bytes] = deque()
        self.is_hangup_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self.wake_fd, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(write, False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        ignore_batch_signals()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        prctl(PR_SET_CHILD_SUBREAPER, 1)

    def run(self) -> None:
        """Serve the agent until its end of the socket closes, then end everything."""
        try:
            while self.run_once():
                pass
        finally:
            self.kill_all()

    def run_once(self) -> bool:
        """Wait for one thing to happen and deal with it; False when the agent is gone."""
        poll = select.poll()
        poll.register(self.agent, select.POLLIN | (select.POLLOUT if self.outbox else 0))
        poll.register(self.wake_fd, select.POLLIN)
        execs = {
            child.report_fd: child
            for child in (*self.children.values(), *self.pending)
            if child.report_fd >= 0
        }
        for number in execs:
            poll.register(number, select.POLLIN)
        fork_server = self.starter
        if fork_server is not None:
            poll.register(fork_server.socket, select.POLLIN)
        for number, event in poll.poll(RETRY_SECONDS * 1000 if self.cleanups else None):
            if number == self.agent.fileno():
                if event & select.POLLOUT:
                    self.flush_outbox()
                if event & ~select.POLLOUT and not self.read_message():
                    return False
            elif number in execs:
                self.on_report(execs[number])
            elif (
                fork_server is not None
                and fork_server is self.starter
                and number == fork_server.socket.fileno()
            ):
                self.read_fork_server(fork_server)
        self.reap_children()
        self.cleanups = [sweep for sweep in self.cleanups if not self.step_cleanup(sweep)]
        return True

    def read_message(self) -> bool:
        """Take one message of the agent; False at the end of the connection."""
        descriptors = array.array("i")
        try:
            data, ancillary, _, _ = self.agent.recvmsg(
                MAX_PACKET_BYTES,
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
        message = json.loads(data)
        if message["op"] == "spawn":
            self.handle_spawn(message, list(descriptors))
        elif message["op"] == "prepare":
            self.start_fork_server(list(descriptors))
        elif message["op"] == "dismiss":
            self.is_released = True
            self.release_fork_server()
        elif message["op"] == "signal":
            self.send_signal(message["slot"], message["number"], message["group"])
        elif message["op"] == "sweep":
            self.cleanups.append(Cleanup(message["slot"], time.monotonic()))
        elif message["op"] == "ping":
            self.send_event(ev="pong")
        return True

    def send_event(self, **event: Any) -> None:
        """
        Queue an event for the agent; never blocks, so that the agent may block in its own sending.
        """
        self.outbox.append(json.dumps(event).encode())
        self.flush_outbox()

    def flush_outbox(self) -> None:
        """Send what the socket takes."""
        while self.outbox:
            try:
                self.agent.send(self.outbox[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self.outbox.clear()  # the agent is gone: `receive` sees it next
                return
            self.outbox.popleft()

    def handle_spawn(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """
        Start a process in a slot; whether that went well is known when its report pipe closes.
        """
        slot = message["slot"]
        order = SpawnRequest({}, descriptors, message.get("start") == "fork")
        try:
            if len(descriptors) != message["count"]:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if any(child.slot == slot for child in (*self.children.values(), *self.pending)):
                raise OSError(errno.EBUSY, f"slot {slot} is taken")
            order.command = json.loads(read_file(f"/proc/self/fd/{descriptors[0]}"))
            order.command["env"][MARKER_VARIABLE] = f"{self.token}.{slot}"
            if message.get("start") and self.starter is not None:
                self.request_fork(ChildProcess(slot, 0, -1, order))
            else:
                self.exec_unless_must_fork(slot, order)
        except OSError as error:
            self.report_failure(slot, order, error)

    def report_failure(self, slot: int, order: SpawnRequest, error: OSError) -> None:
        """Say that a process could not be started."""
        order.close()
        self.send_event(ev="failed", slot=slot, errno=error.errno, message=error.strerror)

    def exec_request(self, slot: int, order: SpawnRequest) -> int:
        """Fork and exec the order's command; return the pid."""
        report, write = os.pipe2(os.O_CLOEXEC)
        try:
            keeper = os.getpid()
            pid = os.fork()
            if pid == 0:
                exec_child(
                    order.command, order.descriptors[1:], write, keeper, self.is_hangup_ignored
                )
        except OSError:
            os.close(report)
            raise
        finally:
            os.close(write)
        order.close()
        self.children[pid] = ChildProcess(slot, pid, report)
        self.slot_by_pid[pid] = slot
        return pid

    # The starter
    # ------------------------------------------------------------------------------------------------------

    def start_fork_server(self, descriptors: list[int]) -> None:
        """
        Start the starter; its command is in the first descriptor, and it gets a socket to this
        process as fd 3.
        """
        order = SpawnRequest({}, descriptors, False)
        ours = None
        try:
            if not descriptors:  # the kernel could not give them to this process
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            order.command = json.loads(read_file(f"/proc/self/fd/{descriptors[0]}"))
            order.command["env"][MARKER_VARIABLE] = marker_value(self.token, FORK_SERVER_SLOT)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs, open(os.devnull, "r+b", buffering=0) as null:
                for _ in range(2):
                    order.descriptors.append(os.dup(null.fileno()))
                order.descriptors.append(os.memfd_create("pdrun-starter", os.MFD_CLOEXEC))
                order.descriptors.append(os.dup(theirs.fileno()))
                self.starter = ForkServerLink(self.exec_request(FORK_SERVER_SLOT, order), ours)
        except OSError as error:
            order.close()
            if ours is not None:
                ours.close()
            self.no_fork_server_reason = f"the starter could not be started: {error.strerror}"
            self.send_event(ev="starter", slot=FORK_SERVER_SLOT, why=self.no_fork_server_reason)

    def adopt_fork_server(self, pid: int, connection: socket.socket) -> None:
        """
        Take a child that was forked before this object was made for the starter; it will say that
        it is ready.
        """
        self.starter = ForkServerLink(pid, connection)
        self.children[pid] = ChildProcess(FORK_SERVER_SLOT, pid, -1)
        self.slot_by_pid[pid] = FORK_SERVER_SLOT

    def read_fork_server(self, starter: ForkServerLink) -> None:
        """
        It is ready, or says why it is not, or is gone; what waits for it is forked or executed.
        """
        try:
            said = starter.socket.recv(MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        why = (
            json.loads(said)["why"]
            if said
            else f"the starter ended{'' if starter.is_ready else ' before it was ready'}"
        )
        if said and not why:
            starter.is_ready = True
            self.send_event(ev="starter", slot=FORK_SERVER_SLOT, why="")
            for child in starter.waiting_children:
                self.request_waiting_fork(child)
            starter.waiting_children = []
            self.release_fork_server()
            return
        if not starter.is_ready or said:
            self.send_event(ev="starter", slot=FORK_SERVER_SLOT, why=why)
        self.no_fork_server_reason = why
        self.drop_fork_server(starter)

    def drop_fork_server(self, starter: ForkServerLink) -> None:
        """There is no starter from here on: execute what waited for it."""
        starter.socket.close()
        self.starter = None
        for child in starter.waiting_children:
            self.exec_instead(child)

    def release_fork_server(self) -> None:
        """
        No more workers will be wanted: the end of its socket, behind the last order, ends a
        starter.
        """
        if self.is_released and self.starter is not None and self.starter.is_ready:
            self.starter.socket.close()
            self.starter = None
            self.no_fork_server_reason = "it was dismissed"

    def request_fork(self, child: ChildProcess) -> None:
        """
        Ask the starter for a worker, now or as soon as it is ready; it is known by its pid when
        that has come.
        """
        starter = self.starter
        order = child.request
        assert order is not None
        if starter is None:
            self.exec_instead(child)
            return
        if starter.is_ready:  # first what may fail: then the slot is not taken
            child.report_fd, write = os.pipe2(os.O_CLOEXEC)
        if child not in self.pending:
            self.pending.append(child)
        if not starter.is_ready:
            starter.waiting_children.append(child)
            return
        try:
            facts = {"token": self.token, "slot": child.slot, "keeper": os.getpid()}
            socket.send_fds(
                starter.socket, [json.dumps(facts).encode()], [write, *order.descriptors]
            )
        except OSError:
            pass  # it is gone: the report's end says so
        finally:
            os.close(write)

    def request_waiting_fork(self, child: ChildProcess) -> None:
        """
        Ask for what waited until the starter was ready; where that fails its slot is free again.
        """
        try:
            self.request_fork(child)
        except OSError as error:
            self.pending.remove(child)
            assert child.request is not None
            self.report_failure(child.slot, child.request, error)

    def exec_instead(self, child: ChildProcess) -> None:
        """Execute what could not be forked."""
        self.pending.remove(child)
        order = child.request
        child.request = None
        assert order is not None
        try:
            self.exec_unless_must_fork(child.slot, order)
        except OSError as error:
            self.report_failure(child.slot, order, error)
        for number, group in child.pending_signals:
            self.send_signal(child.slot, number, group)

    def exec_unless_must_fork(self, slot: int, order: SpawnRequest) -> None:
        """Execute the order, unless it was to be a fork or nothing."""
        if order.must_fork:
            raise OSError(errno.EPERM, f"cannot be forked: {self.no_fork_server_reason}")
        self.exec_request(slot, order)

    def on_forked(self, child: ChildProcess, text: str) -> str:
        """The starter's word on a worker: its pid, or why there is none; return what follows it."""
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
            self.send_event(ev="failed", slot=child.slot, errno=int(number), message=message)
            return ""
        child.pid = int(head[4:])
        self.children[child.pid] = child
        self.slot_by_pid[child.pid] = child.slot
        for waiting, group in child.pending_signals:
            if waiting == signal.SIGKILL:
                self.deliver_signal(child, waiting, group)
        return rest

    def poll_pending(self) -> None:
        """
        Read every pid that is there to be read: what ends may be a worker whose pid is not known
        yet.
        """
        poll = select.poll()
        reports = {child.report_fd: child for child in self.pending if child.report_fd >= 0}
        for number in reports:
            poll.register(number, select.POLLIN)
        for number, _ in poll.poll(0):
            self.on_report(reports[number])

    def on_report(self, child: ChildProcess) -> None:
        """
        The report pipe has something: nothing but its end means that exec (or becoming a worker)
        went well.
        """
        text = os.read(child.report_fd, 4096).decode("utf-8", "replace")
        if child.request is not None:
            text = self.on_forked(child, text)
            if not text:
                return
        os.close(child.report_fd)
        child.report_fd = -1
        if text:
            child.error = text  # sent when it has been reaped: then its slot is free again
            return
        if child.slot == FORK_SERVER_SLOT:
            return
        self.send_event(ev="spawned", slot=child.slot, pid=child.pid)
        for signal_number, group in child.pending_signals:
            self.deliver_signal(child, signal_number, group)

    def send_signal(self, slot: int, number: int, group: bool) -> None:
        """Send a signal to the process of a slot; before exec only SIGKILL goes at once."""
        for child in [*self.children.values(), *self.pending]:
            if child.slot == slot:
                if child.pid == 0:
                    self.signal_pending(child, number, group)
                elif child.report_fd >= 0 and number != signal.SIGKILL:
                    child.pending_signals.append((number, group))
                else:
                    self.deliver_signal(child, number, group)

    def signal_pending(self, child: ChildProcess, number: int, group: bool) -> None:
        """
        A deadly signal for what the starter was not yet asked for ends it unstarted; others wait
        for the worker.
        """
        starter = self.starter
        deadly = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        if starter is None or child not in starter.waiting_children or number not in deadly:
            child.pending_signals.append((number, group))
            return
        starter.waiting_children.remove(child)
        self.pending.remove(child)
        if child.request is not None:
            child.request.close()
        self.send_event(ev="exited", slot=child.slot, pid=0, status=number, at=time.monotonic())

    @staticmethod
    def deliver_signal(child: ChildProcess, number: int, group: bool) -> None:
        """Send now. Its pid cannot be another's: it has not been reaped."""
        try:
            (os.killpg if group else os.kill)(child.pid, number)
        except ProcessLookupError:
            if group:  # before its setsid
                os.kill(child.pid, number)
        except PermissionError:
            pass

    def reap_children(self) -> None:
        """
        Collect every child that has ended; those of slots are reported with the time of this
        moment.
        """
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
                at = time.monotonic()
                if pid not in self.children:
                    self.poll_pending()
                child = self.children.pop(pid, None)
                if child is None:
                    continue
                if child.slot == FORK_SERVER_SLOT:
                    if child.report_fd >= 0:
                        os.close(child.report_fd)
                    continue
                if child.report_fd >= 0:
                    self.on_report(child)
                if child.error:
                    number, _, message = child.error.partition(" ")
                    self.send_event(
                        ev="failed", slot=child.slot, errno=int(number), message=message
                    )
                else:
                    self.send_event(ev="exited", slot=child.slot, pid=pid, status=status, at=at)
        except ChildProcessError:
            return

    def find_slot(self, root: ProcessInfo) -> int | None:
        """
        The slot that a direct child belongs to: by itself, by session, by the marker in its
        environment.
        """
        slot = self.slot_by_pid.get(root.pid, self.slot_by_pid.get(root.session))
        if slot is not None:
            return slot
        try:
            environment = read_file(f"/proc/{root.pid}/environ")
        except OSError:
            return None
        found = environment.partition(f"{MARKER_VARIABLE}={self.token}.".encode())[2].partition(
            b"\0"
        )[0]
        return int(found) if found.lstrip(b"-").isdigit() else None

    def step_cleanup(self, sweep: Cleanup) -> bool:
        """Take a sweep one step further; True when it is done and answered."""
        roots = (
            [root for root in list_children(self.own_process) if root.pid != self.watchdog_pid]
            if self.own_process
            else []
        )
        if sweep.slot is not None:
            everybody = (*self.children.values(), *self.pending)
            others = any(child.slot >= 0 and child.slot != sweep.slot for child in everybody)
            mine = (
                {sweep.slot} if others else {sweep.slot, None}
            )  # whose owner is unknown goes with the last worker
            roots = [root for root in roots if self.find_slot(root) in mine]
        now = time.monotonic()
        if roots and now < sweep.give_up_at:
            leaders = self.children.keys()
            if now >= sweep.kill_at or any(root.pid in leaders for root in roots):
                for member in descendants(roots):
                    if member.state != "Z" and member.pid not in leaders:
                        sweep.killed.setdefault(member.pid, str(member))
                    kill_process(member)
            return False
        stuck = [member for member in descendants(roots) if member.state != "Z"]
        swept = {
            pid: text
            for pid, text in sweep.killed.items()
            if pid not in {member.pid for member in stuck}
        }
        self.send_event(
            ev="swept",
            slot=sweep.slot,
            processes=limit_lines(list(swept.values())),
            stuck=limit_lines([f"{member} {member.state}" for member in stuck]),
        )
        alive = self.children.keys()
        done = [
            pid
            for pid, slot in self.slot_by_pid.items()
            if sweep.slot in (None, slot) and pid not in alive
        ]
        for pid in done:
            del self.slot_by_pid[pid]
        return True

    def kill_all(self) -> None:
        """SIGKILL all descendants until there is no child left, for at most STUCK seconds."""
        give_up_at = time.monotonic() + KILL_SECONDS
        poll = select.poll()
        poll.register(self.wake_fd, select.POLLIN)
        while self.own_process is not None and time.monotonic() < give_up_at:
            for member in descendants(list_children(self.own_process)):
                kill_process(member)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            poll.poll(RETRY_SECONDS * 1000)


def limit_lines(lines: list[str]) -> list[str]:
    if len(lines) <= MAX_LISTED_PROCESSES:
        return lines
    return [*lines[:MAX_LISTED_PROCESSES], f"... and {len(lines) - MAX_LISTED_PROCESSES} more"]


def find_marked(token: str) -> Iterator[ProcessInfo]:
    """Yield every living process that a worker of this keeper has started, or that is one."""
    mark = f"{MARKER_VARIABLE}={token}.".encode()
    for pid in list_numbers("/proc"):
        try:
            found = find_process(pid) if mark in read_file(f"/proc/{pid}/environ") else None
        except OSError:
            continue
        if found is not None and found.state not in "ZX":
            yield found


def kill_marked(token: str) -> None:
    """SIGKILL every process that is marked as one of this keeper's, for at most STUCK seconds."""
    give_up_at = time.monotonic() + KILL_SECONDS
    empty = 0
    while empty < 3 and time.monotonic() < give_up_at:  # what is being forked is not seen yet
        empty += 1
        for member in find_marked(token):
            kill_process(member)
            empty = 0
        time.sleep(RETRY_SECONDS)


def run_watchdog(token: str, keeper: int, agent: int = -1) -> NoReturn:
    """
    Wait for the end of pipe ``keeper``: the keeper was killed, for in order it ends this process
    first.

    ``agent``: its pidfd, where the keeper is no child of it and so has no PDEATHSIG: one that was
    stopped is woken.
    """
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        ignore_batch_signals()
        parent = os.getppid()
        poll = select.poll()
        for descriptor in (keeper, agent):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        while keeper not in {number for number, _ in poll.poll()}:
            poll.unregister(agent)
            if os.getppid() == parent:
                os.kill(parent, signal.SIGCONT)
        kill_marked(token)
    finally:
        os._exit(0)


def start_watchdog(sockets: tuple[int, ...], token: str, agent: int = -1) -> int:
    """
    Fork the process that stands by; return its pid, 0 where there can be none. It must not hold the
    ``sockets``.
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
    os.close(read)  # the other end stays open, here alone, for as long as this process lives
    return pid


def main(argv: list[str]) -> NoReturn:
    """Take the socket's descriptor and the token from the command line, and serve."""
    number = int(argv[1])
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    if (
        os.getsid(0) != os.getpid()
    ):  # `boot` has begun the session: a Ctrl-C must not meet the start of this process
        os.setsid()
    with open(os.devnull, "r+b", buffering=0) as null:
        os.dup2(null.fileno(), 0)
        os.dup2(null.fileno(), 1)
    os.set_inheritable(number, False)
    os.closerange(3, number)
    os.closerange(number + 1, 1 << 20)
    standby = start_watchdog((number,), argv[2])
    keeper = Supervisor(socket.socket(fileno=number), argv[2])
    keeper.watchdog_pid = standby
    keeper.run()
    os._exit(0)
