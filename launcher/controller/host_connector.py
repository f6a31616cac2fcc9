"""
Connects to all hosts of ``--hosts`` and asks each whether it can serve.

At most ``--ssh-window`` logins are in progress at the same time. An sshd drops logins at random if
too many are in progress (MaxStartups, 10 by default), and behind a jump host all logins meet one
sshd. Such a login is repeated after a pause, and the window becomes smaller. Every host that cannot
serve is named, and then nothing is started.
"""

from __future__ import annotations

import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pdrun
from pdrun.errors import RendezvousError
from pdrun.launcher.adapters import ssh_command
from pdrun.launcher.controller.ssh_agent import RemoteAgentHandle
from pdrun.launcher.hosts.nodelist import compress_names
from pdrun.launcher.hosts.selection import Host
from pdrun.launcher.plan.hosts import MAX_PARALLEL_CONNECTIONS
from pdrun.launcher.plan.model import HostLaunch, LaunchPlan
from pdrun.text import plural

HELLO_SECONDS = 60.0
"""
From the start of ssh to the remote server's hello: a login and the start of an interpreter, perhaps
from NFS.
"""
DISCONNECT_SECONDS = 3.0
"""Time for remote servers that are not needed to exit."""
POLL_SECONDS = 0.5
MAX_LOGINS = 5
"""Attempts to log in to a host whose sshd closes the connection during the login."""
FIRST_PAUSE_SECONDS = 0.5
"""Before the second attempt. It doubles for each further one, with up to a half more at random."""
MIN_WINDOW = 2
WINDOW_CUT_SECONDS = 1.0
"""Time between two cuts of the window: logins that were in progress are dropped together."""
JUMP_SECONDS = 5.0
"""Time for ``ssh -G``, which reads files only."""
MAX_NAMES_SHOWN = 10
MAX_NAMES_CHARACTERS = 200
MIN_HOSTS_TOGETHER = 4
"""From this number on, hosts with the same failure share one message."""


@dataclass
class HostConnection:
    """One host that is being connected to."""

    launch: HostLaunch
    make_agent: Callable[[], RemoteAgentHandle]
    """Makes a connection that is not opened yet."""
    agent: RemoteAgentHandle
    deadline: float = 0.0
    logins: int = 0
    """Attempts so far."""
    start_at: float = 0.0
    """Monotonic time before which it is not tried again."""
    failure: tuple[str, str] | None = None
    """What is wrong, and a hint."""
    is_done: bool = False


@dataclass
class HostConnector:
    """Connects to the hosts of a plan."""

    plan: LaunchPlan
    max_parallel: int = 0
    """Logins at the same time; 0: by ``--ssh-window``, or MAX_PARALLEL_CONNECTIONS."""
    timeout: float = HELLO_SECONDS
    connections: list[HostConnection] = field(default_factory=list)

    def connect_all(self) -> list[RemoteAgentHandle]:
        """
        Return the connections, in the order of the hosts.

        Raises:
            RendezvousError: a host cannot serve. Each is named on stderr with its reason, and
                nothing stays on any host.
        """
        assert self.plan.host_plan is not None
        window = self.plan.spec.reach.ssh_window or MAX_PARALLEL_CONNECTIONS
        self.max_parallel = self.max_parallel or window
        self._window_cut_at = float("-inf")
        self.connections = []
        for launch in self.plan.host_plan.hosts:
            make_agent = partial(RemoteAgentHandle, launch.node, launch.argv)
            self.connections.append(HostConnection(launch, make_agent, make_agent()))
        try:
            self._connect(self.connections)
            if self.plan.spec.reach.ship:
                self._send_bundle()
            self._raise_failures()
        except BaseException:
            disconnect([connection.agent for connection in self.connections])
            raise
        return [connection.agent for connection in self.connections]

    def _send_bundle(self) -> None:
        """Connect again to the hosts that only lack pdrun, and send it to them."""
        lacking = [
            connection
            for connection in self.connections
            if connection.failure and ssh_command.lacks_pdrun(connection.failure[0])
        ]
        if not lacking:
            return
        from pdrun.launcher.controller.bundle import BundledAgentHandle, build_bundle

        disconnect([connection.agent for connection in lacking])
        bundle = build_bundle()
        remote = self.plan.spec.reach
        for connection in lacking:
            launch = connection.launch
            command = ssh_command.build_remote_command(
                self._remote_python(), ssh_command.BOOTSTRAP_ARGS
            )
            argv = ssh_command.build_ssh_argv(remote.ssh, remote.ssh_opts, launch.host, command)
            connection.make_agent = partial(BundledAgentHandle, launch.node, argv, bundle)
            connection.agent = connection.make_agent()
            connection.logins = 0
            connection.failure = None
            connection.is_done = False
        self._connect(lacking)

    def _connect(self, connections: Sequence[HostConnection]) -> None:
        waiting = list(connections)
        active: list[HostConnection] = []
        while waiting or active:
            now = time.monotonic()
            due = [connection for connection in waiting if connection.start_at <= now]
            for connection in due[: max(0, self.max_parallel - len(active))]:
                waiting.remove(connection)
                self._start_connection(connection)
                active.append(connection)
            pauses = [connection.start_at - now for connection in waiting if connection not in due]
            pause = (
                min([POLL_SECONDS, *pauses]) if len(active) < self.max_parallel else POLL_SECONDS
            )
            wait_for_agents([connection.agent for connection in active], pause)
            for connection in active:
                self._check_connection(connection)
                if self._should_repeat(connection):
                    self._repeat_later(connection)
                    waiting.append(connection)
            active = [one for one in active if not one.is_done and one not in waiting]

    def _should_repeat(self, connection: HostConnection) -> bool:
        """Return whether an sshd closed the connection during the login, perhaps by chance."""
        return (
            connection.is_done
            and connection.agent.hello is None
            and connection.agent.ssh_status == ssh_command.SSH_FAILED
            and connection.logins < MAX_LOGINS
            and ssh_command.is_dropped_login(self._stderr_of(connection))
        )

    def _repeat_later(self, connection: HostConnection) -> None:
        now = time.monotonic()
        is_behind_jump = ssh_command.is_behind_proxy(self._stderr_of(connection))
        if is_behind_jump and now - self._window_cut_at >= WINDOW_CUT_SECONDS:
            self._window_cut_at = now
            self.max_parallel = min(self.max_parallel, max(MIN_WINDOW, self.max_parallel // 2))
        disconnect([connection.agent])
        pause = FIRST_PAUSE_SECONDS * 2 ** (connection.logins - 1)
        connection.start_at = now + pause * random.uniform(1.0, 1.5)
        connection.agent = connection.make_agent()
        connection.failure = None
        connection.is_done = False

    @staticmethod
    def _stderr_of(connection: HostConnection) -> str:
        return connection.agent.stderr.decode("utf-8", "replace")

    def _start_connection(self, connection: HostConnection) -> None:
        connection.deadline = time.monotonic() + self.timeout
        connection.logins += 1
        try:
            connection.agent.connect(self.plan.cwd)
        except OSError as error:
            program = connection.launch.argv[0]
            connection.failure = (f"{program} cannot be started: {error.strerror}", "see --ssh")
            connection.is_done = True

    def _check_connection(self, connection: HostConnection) -> None:
        """Decide whether a host can serve, once it has answered, failed or timed out."""
        agent = connection.agent
        if agent.hello is not None:
            connection.failure = self._check_hello(connection, agent.hello)
            connection.is_done = True
        elif not connection.is_done and agent.ssh_status is not None and agent.is_drained():
            connection.failure = self._explain_failure(connection, agent.ssh_status)
            connection.is_done = True
        elif time.monotonic() > connection.deadline:
            connection.failure = self._explain_failure(connection, None)
            connection.is_done = True

    def _check_hello(
        self, connection: HostConnection, hello: dict[str, object]
    ) -> tuple[str, str] | None:
        """Return why a host that answered cannot serve, and a hint; None: it can."""
        version = str(hello["version"])
        if version != pdrun.__version__:
            launch = connection.launch
            python = launch.argv[0] if launch.is_local else self._remote_python()
            hint = f"this is {pdrun.__version__}: install it there, or add --ship"
            return f"{python} there has pdrun {version}", hint
        if hello["error"]:
            return str(hello["error"]), "choose another with --chdir"
        return None

    def _explain_failure(self, connection: HostConnection, code: int | None) -> tuple[str, str]:
        remote = self.plan.spec.reach
        stderr = self._stderr_of(connection)
        jump = ""
        if code == ssh_command.SSH_FAILED and (
            ssh_command.is_dropped_login(stderr) or ssh_command.is_behind_proxy(stderr)
        ):
            jump = find_jump_host(remote.ssh, remote.ssh_opts, connection.launch.host)
        return ssh_command.explain_failure(
            connection.launch.host,
            code,
            stderr,
            self._remote_python(),
            (remote.ssh, *remote.ssh_opts),
            logins=connection.logins,
            jump=jump,
        )

    def _remote_python(self) -> str:
        assert self.plan.host_plan is not None
        return self.plan.host_plan.python

    def _raise_failures(self) -> None:
        """Print every host that failed, then raise."""
        failed = []
        alike: dict[tuple[str, str], list[HostConnection]] = {}
        for connection in self.connections:
            if connection.failure is not None:
                name = connection.launch.host.name
                failed.append(name)
                what, hint = connection.failure
                key = what.replace(name, "{host}"), hint.replace(name, "{host}")
                alike.setdefault(key, []).append(connection)
        for connections in alike.values():
            together = len(connections) >= MIN_HOSTS_TOGETHER
            for group in [connections] if together else [[one] for one in connections]:
                _print_failure(group)
        if failed:
            names = ", ".join(failed[:MAX_NAMES_SHOWN])
            if len(failed) > MAX_NAMES_SHOWN:
                names += " ..."
            raise RendezvousError(
                f"{len(failed)} of {len(self.connections)} host(s) cannot serve ({names}); "
                "nothing was started"
            )


def find_jump_host(program: str, options: Sequence[str], host: Host) -> str:
    """Return the jump host (or proxy command) by which ssh reaches a host, or an empty string."""
    target = f"{host.user}@{host.name}" if host.user else host.name
    port = ["-p", str(host.port)] if host.port is not None else []
    try:
        found = subprocess.run(
            [program, *options, *port, "-G", "--", target],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=JUMP_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    for line in found.stdout.decode("utf-8", "replace").splitlines():
        name, _, value = line.strip().partition(" ")
        if name in ("proxyjump", "proxycommand") and value not in ("", "none"):
            return value
    return ""


def _print_failure(connections: Sequence[HostConnection]) -> None:
    """Print the failure that these hosts have in common, with the words of the first one."""
    first = connections[0]
    assert first.failure is not None
    what, hint = first.failure
    host = first.launch.host
    name = host.name
    if host.where not in ("", "--hosts"):
        name += f" ({host.where})"
    if len(connections) > 1:
        names = compress_names([other.launch.host.name for other in connections[1:]])
        if len(names) > MAX_NAMES_CHARACTERS:
            names = names[:MAX_NAMES_CHARACTERS] + "..."
        name += f" and {plural(len(connections) - 1, 'more host')} ({names})"
    if hint:
        what += f"; {hint}"
    print(f"pdrun: {name}: {what}", file=sys.stderr, flush=True)


def wait_for_agents(agents: Iterable[RemoteAgentHandle], timeout: float = POLL_SECONDS) -> None:
    """Wait for data from one of the agents and process it; their output is dropped."""
    poll = select.poll()
    owners: dict[int, RemoteAgentHandle] = {}
    for agent in agents:
        for fd, mask in agent.poll_descriptors(lambda stream: False):
            poll.register(fd, mask)
            owners[fd] = agent
    seconds = timeout if owners else min(timeout, 0.02)
    for fd, _ in poll.poll(seconds * 1000):
        for _ in owners[fd].read_output(fd):
            pass


def disconnect(agents: Sequence[RemoteAgentHandle]) -> None:
    """Close connections: remote servers exit on their own, and ssh is killed otherwise."""
    for agent in agents:
        agent.close_lifeline()
    deadline = time.monotonic() + DISCONNECT_SECONDS
    while time.monotonic() < deadline:
        remaining = [agent for agent in agents if agent.is_connected and not agent.is_drained()]
        if not remaining:
            break
        wait_for_agents(remaining, 0.05)
    for agent in agents:
        agent.abort()
