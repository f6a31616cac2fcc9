"""
The warm process: it has imported torch and waits for jobs. It forks a supervisor for each job.

    warm process --fork--> supervisor of a job --fork--> fork server --fork--> worker 0..n

The connection that the job's agent has supervisor becomes the supervisor's socket. From then on the
warm process may be stopped or killed: the supervisor serves its agent, is the parent and sub-reaper
of the workers, and kills them with the agent, as a supervisor that the agent has started does. It
is not a child of the agent, which is compensated for:

* It adopts what the agent has inherited (limits, priority, CPUs), or refuses (`inherited_state`).
* Its watchdog continues it if it was stopped and the agent has died.
* If it is killed, its workers' leftovers become children of the warm process, the sub-reaper above
  it, and are killed here.

One thread, one loop, no signal handler: workers must not inherit one. It answers processes of its
own user only, one JSON packet each way. It never gets a job's command, environment, descriptors or
token, which are sent to the supervisor.

    {"ask": "hello"}                       -> what was imported, and whether that is unchanged
    {"ask": "keeper", "inherited": {...}}  -> {"keeper": PID, "mark": TOKEN} and a pidfd, sent by
                                              the supervisor; or {"refused": REASON}
    {"ask": "stop"}                        -> {"stopping": PID}

Loaded by path in the workers' interpreter (`fork_server`). Standard library only.
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
"""Open connections; more are closed immediately."""
REQUEST_SECONDS = 5.0
"""Time that a client may take to send its request."""
REPLY_SECONDS = 2.0
"""Time that sending an answer may take."""


class WarmServer:
    """
    Serves the clients of a warm process.

    Args:
        listener: a bound socket that does not listen yet; its path is removed at the end.
        path: path of the socket.
        idle: seconds without a job after which the process exits.
        why_not_forkable: returns why this process must not fork.
        lookups: the variables that the imports looked up.
        environ: the environment during the imports.
        files: the files that were imported.
        siblings: the modules of `fork_server.load_warm_siblings`.
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
        siblings: dict[str, ModuleType],
    ) -> None:
        self.listener = listener
        self.path = path
        self.idle_seconds = idle
        self.why_not_forkable = why_not_forkable
        self.lookups = lookups
        self.environ = environ
        self.files = files
        self.fork_client = siblings["fork_client"]
        self.process_tree = siblings["process_tree"]
        self.supervisor = siblings["supervisor"]
        self.watchdog = siblings["watchdog"]
        self.inherited_state = siblings["inherited_state"]
        self.import_env = siblings["import_env"]
        self.forked_worker = siblings["forked_worker"]
        self.clients: dict[socket.socket, float] = {}
        self.supervisors: dict[int, int] = {}
        """Pid of a supervisor -> its pidfd; -1 if no descriptor was left."""
        self.stuck: set[int] = set()
        """Orphans that SIGKILL did not end."""
        self.served_jobs = 0
        self.started_at = time.time()
        self.used_at = time.monotonic()
        self.process_tree.prctl(self.process_tree.PR_SET_CHILD_SUBREAPER, 1)
        listener.listen(MAX_CLIENTS)
        listener.setblocking(False)
        self.inode = os.stat(path).st_ino

    def serve_until_idle(self) -> socket.socket:
        """
        Answer clients until a client stops this process or it has been idle for too long.

        Returns in a job's fork server only: its socket to the job's supervisor.
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
        Wait for a client, the end of a supervisor, or a time-out; return readable descriptors.
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
        # At most a day: poll takes milliseconds as a C int.
        wait = min(max(0.0, min(due) - time.monotonic()), 86400.0) * 1000 + 1 if due else None
        return {number for number, _ in poll.poll(wait)}

    def accept_client(self) -> None:
        """Accept a connection of this user; close all others."""
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
        """Answer the request of a connection and close it; also if the request is not valid."""
        try:
            # No room for descriptors: the kernel closes any that are sent.
            data, _, flags, _ = client.recvmsg(MAX_PACKET_BYTES)
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
        """Send one packet, if the client reads it in time."""
        try:
            client.settimeout(REPLY_SECONDS)
            socket.send_fds(client, [json.dumps(reply).encode()], handles, socket.MSG_NOSIGNAL)
        except OSError:
            pass

    def shut_down(self) -> None:
        """Exit. Supervisors of running jobs continue."""
        try:
            if os.stat(self.path).st_ino == self.inode:
                os.unlink(self.path)
        except OSError:
            pass
        os._exit(0)

    def describe_process(self) -> dict[str, Any]:
        """Return what a job must know before it uses this process, and what status shows."""
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
        """Return the variables on which the imports depended; None: looked up and not set."""
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
    # ----------------------------------------------------------------------------------------------

    def lend_supervisor(
        self, client: socket.socket, wanted: dict[str, Any]
    ) -> socket.socket | None:
        """
        Fork the supervisor of a job, which takes over the connection.

        Returns in the job's fork server its socket, in this process None.
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
        Serve the agent as its supervisor, in a child that was just forked.

        Forks the fork server, and returns in that one only.
        """
        try:
            self.close_inherited(client)
            os.setsid()
            why = self.inherited_state.adopt_state(wanted)
            if why:
                self.send_reply(client, {"refused": f"{why} of the agent cannot be adopted"})
                os._exit(0)
            mark = os.urandom(8).hex()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            supervisor_pid = os.getpid()
            fork_server_pid = os.fork()
            if fork_server_pid == 0:
                ours.close()
                client.close()
                os.close(agent)
                self.become_fork_server(supervisor_pid, mark)
                # The number that an executed fork server has: descriptors that are received with a
                # request must get higher ones.
                number = theirs.detach()
                if number != FORK_SERVER_FD:
                    os.dup2(number, FORK_SERVER_FD, inheritable=False)
                    os.close(number)
                return socket.socket(fileno=FORK_SERVER_FD)
            theirs.close()
            self.run_supervisor(client, ours, fork_server_pid, mark, agent)
        except BaseException:
            os._exit(1)
        os._exit(0)

    def close_inherited(self, client: socket.socket) -> None:
        """Close the descriptors of the warm process."""
        self.listener.close()
        for other in self.clients:
            if other is not client:
                other.close()
        for handle in self.supervisors.values():
            if handle >= 0:
                os.close(handle)
        client.setblocking(True)

    def become_fork_server(self, supervisor_pid: int, mark: str) -> None:
        """Set session, death signal and marker, as `worker_exec.exec_child` does."""
        os.setsid()
        self.process_tree.prctl(self.process_tree.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor_pid:
            os._exit(127)
        slot = self.watchdog.marker_value(mark, self.fork_client.FORK_SERVER_SLOT)
        self.forked_worker.set_command_line([], f"{self.watchdog.MARKER_VARIABLE}={slot}".encode())

    def run_supervisor(
        self,
        client: socket.socket,
        ours: socket.socket,
        fork_server_pid: int,
        mark: str,
        agent: int,
    ) -> None:
        """Run the supervisor until the agent has closed its end."""
        watchdog_pid, watchdog_pipe = self.watchdog.start_watchdog(
            (client.fileno(), ours.fileno()), mark, agent
        )
        os.close(agent)
        supervisor = self.supervisor.Supervisor(client, mark)
        supervisor.watchdog_pid = watchdog_pid
        supervisor.watchdog_pipe = watchdog_pipe
        supervisor.forks.adopt_fork_server(fork_server_pid, ours)
        myself = os.pidfd_open(os.getpid())
        self.send_reply(client, {"keeper": os.getpid(), "mark": mark}, (myself,))
        os.close(myself)
        client.setblocking(True)
        supervisor.run()
        supervisor.send_event(ev="ended")

    def reap_supervisors(self) -> None:
        """Reap supervisors that have ended, and kill what a killed one has left."""
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
        """Kill descendants that belong to no supervisor, for at most KILL_SECONDS."""
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
    """Return (pid, user, group) of the process at the other end of a unix socket."""
    size = struct.calcsize("3i")
    pid, user, group = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    )
    return pid, user, group


def memory_bytes() -> int:
    """Return this process's proportional set size in bytes; 0: unknown."""
    try:
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0
