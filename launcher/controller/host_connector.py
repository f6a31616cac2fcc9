"""
Connects to all hosts of ``--hosts`` and asks each whether it can serve.

At most MAX_PARALLEL_CONNECTIONS hosts are connected to at the same time. Every host that cannot
serve is named, and then nothing is started.
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pdrun
from pdrun.errors import RendezvousError
from pdrun.launcher.adapters import ssh_command
from pdrun.launcher.controller.ssh_agent import RemoteAgentHandle
from pdrun.launcher.hosts.nodelist import compress_names
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
MAX_NAMES_SHOWN = 10
MAX_NAMES_CHARACTERS = 200
MIN_HOSTS_TOGETHER = 4
"""From this number on, hosts with the same failure share one message."""


@dataclass
class HostConnection:
    """One host that is being connected to."""

    launch: HostLaunch
    agent: RemoteAgentHandle
    deadline: float = 0.0
    failure: tuple[str, str] | None = None
    """What is wrong, and a hint."""
    is_done: bool = False


@dataclass
class HostConnector:
    """Connects to the hosts of a plan."""

    plan: LaunchPlan
    max_parallel: int = MAX_PARALLEL_CONNECTIONS
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
        self.connections = [
            HostConnection(launch, RemoteAgentHandle(launch.node, launch.argv))
            for launch in self.plan.host_plan.hosts
        ]
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
            connection.agent = BundledAgentHandle(launch.node, argv, bundle)
            connection.failure = None
            connection.is_done = False
        self._connect(lacking)

    def _connect(self, connections: Sequence[HostConnection]) -> None:
        waiting = list(reversed(connections))
        active: list[HostConnection] = []
        while waiting or active:
            while waiting and len(active) < self.max_parallel:
                connection = waiting.pop()
                self._start_connection(connection)
                active.append(connection)
            wait_for_agents([connection.agent for connection in active])
            for connection in active:
                self._check_connection(connection)
            active = [connection for connection in active if not connection.is_done]

    def _start_connection(self, connection: HostConnection) -> None:
        connection.deadline = time.monotonic() + self.timeout
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
        return ssh_command.explain_failure(
            connection.launch.host,
            code,
            connection.agent.stderr.decode("utf-8", "replace"),
            self._remote_python(),
            (self.plan.spec.reach.ssh, *self.plan.spec.reach.ssh_opts),
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
    seconds = timeout if owners else 0.02
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
