"""
The warm process: it has imported torch and waits for jobs; each gets a keeper and a starter that
are forked from it.

    warm process --fork--> keeper of a job --fork--> starter --fork--> worker 0..n
                              ^-- the connection that the job's agent made is the keeper's socket from then on

So a job holds on to nothing here but a parent: its keeper hears its agent, is sub-reaper and parent
of its workers and ends them with the agent, as a keeper that the agent started does (`keeper`); the
warm process may be stopped or killed meanwhile. What such a keeper lacks, being no child of the
agent, is made up for: it takes on what the agent has inherited, or refuses (`inherited`); its
standby wakes it when it was stopped and the agent has died; what a killed keeper's workers leave
comes to the warm process, the sub-reaper above it, and is ended there.

One thread, one loop, no signal handler (workers must find none). It speaks with processes of its
own user alone, one JSON packet each way; it never sees a job's command, environment, descriptors or
token: those go to the keeper.

    {"ask": "hello"}                       -> what was imported, and whether it is still so
    {"ask": "keeper", "inherited": {...}}  -> {"keeper": PID, "mark": ...} with a pidfd, from the keeper; or {"refused"}
    {"ask": "stop"}                        -> {"stopping": PID}

Loaded by path in the workers' interpreter by `starter_main`: standard library only.
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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    from pdrun.launcher.stdlib_only.import_tracker import EnvironLookups, ImportedFiles

MAX_PACKET_BYTES = 1 << 16
FORK_SERVER_FD = 3
MAX_CLIENTS = 64
"""Connections that may wait with their question; more are closed at once."""
REQUEST_SECONDS = 5.0
"""Seconds that a connection may take to ask."""
REPLY_SECONDS = 2.0
"""Seconds that an answer may take."""


class WarmServer:
    """
    See the module. `serve` returns in the starter of a job only: its socket to that job's keeper.

    Args:
        listener: a bound socket, not yet listening; its name is removed at the end.
        idle: seconds without a job after which it ends.
        unfit: says why this process must not fork.
        lookups: made by what was imported, and ``environ`` the environment then.
        tools: the modules `keeper`, `inherited`, `importtime` and `forked`.
    """

    def __init__(
        self,
        listener: socket.socket,
        path: str,
        idle: float,
        why_not_forkable: Callable[[], str],
        lookups: EnvironLookups,
        environ: dict[str, str],
        files: ImportedFiles,
        tools: dict[str, ModuleType],
    ) -> None:
        self.listener = listener
        self.path = path
        self.idle_seconds = idle
        self.why_not_forkable = why_not_forkable
        self.lookups = lookups
        self.environ = environ
        self.files = files
        self.fork_client = tools["fork_client"]
        self.process_tree = tools["process_tree"]
        self.supervisor = tools["supervisor"]
        self.watchdog = tools["watchdog"]
        self.inherited_state = tools["inherited_state"]
        self.import_env = tools["import_env"]
        self.forked_worker = tools["forked_worker"]
        self.clients: dict[socket.socket, float] = {}
        self.supervisors: dict[int, int] = {}
        """Pid of a keeper -> its pidfd; -1 where there was no descriptor left."""
        self.stuck: set[int] = set()
        """Orphans that even SIGKILL did not end."""
        self.served_jobs = 0
        self.started_at = time.time()
        self.used_at = time.monotonic()
        self.process_tree.prctl(self.process_tree.PR_SET_CHILD_SUBREAPER, 1)
        listener.listen(MAX_CLIENTS)
        listener.setblocking(False)
        self.inode = os.stat(path).st_ino

    def serve_until_idle(self) -> socket.socket:
        """
        Answer until it is stopped or has been idle for too long; returns in a job's starter only.
        """
        while True:
            ready = self.wait_ready()
            if self.listener.fileno() in ready:
                self.accept_client()
            self.reap_supervisors()
            for client in [client for client in self.clients if client.fileno() in ready]:
                found = self.handle_client(client)
                if found is not None:
                    return found
            now = time.monotonic()
            for client in [client for client, until in self.clients.items() if now >= until]:
                self.drop_client(client)
            if not self.supervisors and now - self.used_at >= self.idle_seconds:
                self.shut_down()

    def wait_ready(self) -> set[int]:
        """
        Sleep until somebody speaks, a keeper ends, or something is due; return the readable
        descriptors.
        """
        poll = select.poll()
        for number in (self.listener.fileno(), *(client.fileno() for client in self.clients)):
            poll.register(number, select.POLLIN)
        for handle in self.supervisors.values():
            if handle >= 0:
                poll.register(handle, select.POLLIN)
        due = [
            *self.clients.values(),
            *([] if self.supervisors else [self.used_at + self.idle_seconds]),
        ]
        # at most a day: poll counts milliseconds in an int
        wait = min(max(0.0, min(due) - time.monotonic()), 86400.0) * 1000 + 1 if due else None
        return {number for number, _ in poll.poll(wait)}

    def accept_client(self) -> None:
        """Take a connection of this user's; nobody else is answered."""
        try:
            client, _ = self.listener.accept()
        except OSError:
            return
        _, user, _ = peer_credentials(client)
        if user != os.geteuid() or len(self.clients) >= MAX_CLIENTS:
            client.close()
            return
        client.setblocking(False)
        self.clients[client] = time.monotonic() + REQUEST_SECONDS

    def drop_client(self, client: socket.socket) -> None:
        """Close a connection."""
        self.clients.pop(client, None)
        client.close()

    def handle_client(self, client: socket.socket) -> socket.socket | None:
        """Answer the one question of a connection; whatever is no question ends it."""
        try:
            data, _, flags, _ = client.recvmsg(
                MAX_PACKET_BYTES
            )  # descriptors that come with it are closed by the kernel
            asked = json.loads(data) if data and not flags & socket.MSG_TRUNC else {}
            what = asked.get("ask") if isinstance(asked, dict) else None
        except BlockingIOError:
            return None
        except (OSError, ValueError, RecursionError):
            what = None
        if what == "hello":
            self.send_reply(client, self.describe_process())
        elif what == "stop":
            self.send_reply(client, {"stopping": os.getpid()})
            self.shut_down()
        elif what == "keeper" and isinstance(asked.get("inherited"), dict):
            return self.lend_supervisor(client, asked["inherited"])
        self.drop_client(client)
        return None

    @staticmethod
    def send_reply(
        client: socket.socket, reply: dict[str, Any], handles: tuple[int, ...] = ()
    ) -> None:
        """Send one packet; one who does not take it does without."""
        try:
            client.settimeout(REPLY_SECONDS)
            socket.send_fds(client, [json.dumps(reply).encode()], handles, socket.MSG_NOSIGNAL)
        except OSError:
            pass

    def shut_down(self) -> None:
        """End. Keepers of running jobs go on."""
        try:
            if os.stat(self.path).st_ino == self.inode:
                os.unlink(self.path)
        except OSError:
            pass
        os._exit(0)

    def describe_process(self) -> dict[str, Any]:
        """
        Return what a job needs to know before it uses this process, and what ``pdrun warm status``
        shows.
        """
        torch = sys.modules.get("torch")
        return {
            "pid": os.getpid(),
            "python": sys.executable,
            "torch": str(getattr(torch, "__version__", "")),
            "modules": [name for name in sys.argv[1].split(",") if name in sys.modules],
            "variables": self.import_variables(),
            "all": self.lookups.has_unknown_walk,
            "changed": self.files.find_changed(),
            "unfit": self.why_not_forkable(),
            "inherited": self.inherited_state.read_state(),
            "started": self.started_at,
            "unused": time.monotonic() - self.used_at,
            "idle": self.idle_seconds,
            "running": len(self.supervisors),
            "served": self.served_jobs,
            "memory": memory_bytes(),
        }

    def import_variables(self) -> dict[str, str | None]:
        """Return the variables on which the import depended; None: looked up and not there."""
        names = (
            self.lookups.names
            | {name for name in self.environ if self.import_env.is_import_variable(name)}
            | {"HOME"}
        )
        if self.lookups.has_unknown_walk:
            names |= {
                name for name in self.environ if not self.import_env.is_session_variable(name)
            }
        names -= {self.watchdog.MARKER_VARIABLE}
        return {name: self.environ.get(name) for name in sorted(names)}

    # One job
    # ----------------------------------------------------------------------------------------------------------

    def lend_supervisor(
        self, client: socket.socket, wanted: dict[str, Any]
    ) -> socket.socket | None:
        """
        Fork the keeper of a job, which takes the connection over; returns a socket in the job's
        starter only.
        """
        why = self.why_not_forkable()
        agent = -1
        try:
            if not why:
                agent = os.pidfd_open(peer_credentials(client)[0])
                pid = os.fork()
        except (OSError, ValueError) as error:
            why = str(error)
        if why:
            if agent >= 0:
                os.close(agent)
            self.send_reply(client, {"refused": why})
            self.drop_client(client)
            return None
        if pid == 0:
            return self.become_supervisor(client, wanted, agent)
        os.close(agent)
        self.served_jobs, self.used_at = self.served_jobs + 1, time.monotonic()
        self.drop_client(client)
        try:
            self.supervisors[pid] = os.pidfd_open(pid)
        except OSError:
            self.supervisors[pid] = -1
        return None

    def become_supervisor(
        self, client: socket.socket, wanted: dict[str, Any], agent: int
    ) -> socket.socket:
        """
        The child's side: serve the agent as its keeper; returns in the starter that is forked on
        the way.
        """
        try:
            self.close_inherited(client)
            os.setsid()
            why = self.inherited_state.adopt_state(wanted)
            if why:
                self.send_reply(client, {"refused": f"{why} cannot be made what it is here"})
                os._exit(0)
            mark = os.urandom(8).hex()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            supervisor = os.getpid()
            starter = os.fork()
            if starter == 0:
                ours.close()
                client.close()
                os.close(agent)
                self.become_fork_server(supervisor, mark)
                # where a starter that is executed has it: descriptors that come with an order get
                # higher numbers
                number = theirs.detach()
                if number != FORK_SERVER_FD:
                    os.dup2(number, FORK_SERVER_FD, inheritable=False)
                    os.close(number)
                return socket.socket(fileno=FORK_SERVER_FD)
            theirs.close()
            self.run_supervisor(client, ours, starter, mark, agent)
        except BaseException:
            os._exit(1)
        os._exit(0)

    def close_inherited(self, client: socket.socket) -> None:
        """Close what is the warm process's own."""
        self.listener.close()
        for other in self.clients:
            if other is not client:
                other.close()
        for handle in self.supervisors.values():
            if handle >= 0:
                os.close(handle)
        client.setblocking(True)

    def become_fork_server(self, keeper: int, mark: str) -> None:
        """As `keeper.become` does for one that is executed."""
        os.setsid()
        self.process_tree.prctl(self.process_tree.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(127)
        slot = self.watchdog.marker_value(mark, self.fork_client.FORK_SERVER_SLOT)
        self.forked_worker.set_command_line([], f"{self.watchdog.MARKER_VARIABLE}={slot}".encode())

    def run_supervisor(
        self, client: socket.socket, ours: socket.socket, starter: int, mark: str, agent: int
    ) -> None:
        """Run the keeper until the agent has gone."""
        watchdog_pid = self.watchdog.start_watchdog((client.fileno(), ours.fileno()), mark, agent)
        os.close(agent)
        made = self.supervisor.Supervisor(client, mark)
        made.watchdog_pid = watchdog_pid
        made.forks.adopt_fork_server(starter, ours)
        myself = os.pidfd_open(os.getpid())
        self.send_reply(client, {"keeper": os.getpid(), "mark": mark}, (myself,))
        os.close(myself)
        client.setblocking(True)
        made.run()
        made.send_event(ev="ended")

    def reap_supervisors(self) -> None:
        """
        Collect keepers that have ended; what the workers of a killed one have left came here, and
        is ended.
        """
        try:
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                handle = self.supervisors.pop(pid, None)
                if handle is not None:
                    self.used_at = time.monotonic()
                    if handle >= 0:
                        os.close(handle)
        except ChildProcessError:
            return
        self.kill_orphans()

    def kill_orphans(self) -> None:
        """SIGKILL whatever descends from here and not from a keeper, for at most STUCK seconds."""
        myself = self.process_tree.find_process(os.getpid())
        give_up_at = time.monotonic() + self.process_tree.KILL_SECONDS
        while myself is not None and time.monotonic() < give_up_at:
            spared = self.supervisors.keys() | self.stuck
            orphans = [
                child
                for child in self.process_tree.list_children(myself)
                if child.pid not in spared
            ]
            if not orphans:
                return
            for member in self.process_tree.descendants(orphans):
                self.process_tree.kill_process(member)
            for orphan in orphans:
                try:
                    os.waitpid(orphan.pid, os.WNOHANG)
                except ChildProcessError:
                    pass
            time.sleep(self.process_tree.RETRY_SECONDS / 4)
        if myself is not None:
            self.stuck |= {
                child.pid for child in self.process_tree.list_children(myself)
            } - self.supervisors.keys()


def peer_credentials(connection: socket.socket) -> tuple[int, int, int]:
    """
    Return (pid, user, group) of the process at the other end of a unix socket, as the kernel knows
    them.
    """
    size = struct.calcsize("3i")
    pid, user, group = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return pid, user, group


def memory_bytes() -> int:
    """
    Return this process's proportional share of memory in bytes; 0 where the kernel does not tell.
    """
    try:
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0
