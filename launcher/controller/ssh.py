"""
``--hosts``: reaches every host at once, then starts an agent on each and shows what they print.

    connect, check  all hosts, at most WINDOW at once    every host that cannot serve is named, and nothing is started
    listen          the first host binds the scheduler's socket on the address by which the others reach it
    order           all agents start; from here on `pdrun.launcher.controller.controller` tends them

The connections stay: their end, however this process dies, ends everything on the other side.
"""

from __future__ import annotations

import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType

import pdrun
from pdrun.endpoint import Endpoint
from pdrun.errors import RendezvousError
from pdrun.launcher.adapters import ssh_command as sshcommand
from pdrun.launcher.common import network
from pdrun.launcher.controller.controller import Front, job_secret
from pdrun.launcher.controller.ssh_agent import RemoteAgent
from pdrun.launcher.output.console import Console
from pdrun.launcher.plan.hosts import WINDOW, node_spec
from pdrun.launcher.plan.model import FanHost, LaunchPlan

HELLO_TIMEOUT = 60.0
"""
Seconds from the start of ssh to the far end's hello: a login and the start of an interpreter,
perhaps over NFS.
"""
LISTEN_TIMEOUT = 30.0
LEAVE_TIMEOUT = 3.0
"""Seconds in which far ends that are not needed after all leave by themselves."""


@dataclass
class _Call:
    """One host that is being reached."""

    one: FanHost
    agent: RemoteAgent
    deadline: float = 0.0
    failure: tuple[str, str] | None = None
    """What is wrong, and a hint."""
    done: bool = False


@dataclass
class Reaching:
    """
    Connects to hosts; `everybody` returns once each has said hello, or raises with all that did
    not.
    """

    plan: LaunchPlan
    window: int = WINDOW
    timeout: float = HELLO_TIMEOUT
    calls: list[_Call] = field(default_factory=list)

    def everybody(self) -> list[RemoteAgent]:
        """
        Return the connections, in the order of the hosts.

        Raises:
            RendezvousError: a host cannot serve; each is named on stderr with its reason, and
                nothing is left anywhere.
        """
        assert self.plan.fan is not None
        self.calls = [_Call(one, RemoteAgent(one.node, one.argv)) for one in self.plan.fan.hosts]
        try:
            self._run(self.calls)
            if self.plan.spec.reach.ship:
                self._ship(
                    [
                        call
                        for call in self.calls
                        if call.failure and sshcommand.lacks_pdrun(call.failure[0])
                    ]
                )
            self._complain()
        except BaseException:
            leave(call.agent for call in self.calls)
            raise
        return [call.agent for call in self.calls]

    def _ship(self, lacking: list[_Call]) -> None:
        """Try again those that only lack pdrun, and take it along."""
        if not lacking:
            return
        from pdrun.launcher.controller.bundle import ShippingAgent, cargo

        assert self.plan.fan is not None
        leave(call.agent for call in lacking)
        load = cargo()
        for call in lacking:
            command = sshcommand.remote_command(self.plan.fan.python, sshcommand.BOOTSTRAP)
            argv = sshcommand.ssh_argv(
                self.plan.spec.reach.ssh, self.plan.spec.reach.ssh_opts, call.one.host, command
            )
            call.agent = ShippingAgent(call.one.node, argv, load)
            call.failure = None
            call.done = False
        self._run(lacking)

    def _run(self, calls: list[_Call]) -> None:
        waiting = list(reversed(calls))
        active = list[_Call]()
        while waiting or active:
            while waiting and len(active) < self.window:
                active.append(self._begin(waiting.pop()))
            _turn([call.agent for call in active])
            for call in active:
                self._look(call)
            active = [call for call in active if not call.done]

    def _begin(self, call: _Call) -> _Call:
        call.deadline = time.monotonic() + self.timeout
        try:
            call.agent.connect(self.plan.cwd)
        except OSError as error:
            call.failure = (f"{call.one.argv[0]} cannot be started: {error.strerror}", "see --ssh")
            call.done = True
        return call

    def _look(self, call: _Call) -> None:
        agent = call.agent
        if agent.hello is not None:
            version = str(agent.hello["version"])
            error = str(agent.hello["error"])
            if version != pdrun.__version__:
                what = f"{call.one.argv[0] if call.one.here else self._python()} there has pdrun {version}"
                call.failure = what, f"this is {pdrun.__version__}: install it there, or add --ship"
            elif error:
                call.failure = error, "choose another with --chdir"
            call.done = True
        elif not call.done and agent.status is not None and agent.drained():
            call.failure = self._why(call, agent.status)
            call.done = True
        elif time.monotonic() > call.deadline:
            call.failure = self._why(call, None)
            call.done = True

    def _why(self, call: _Call, code: int | None) -> tuple[str, str]:
        return sshcommand.failure(
            call.one.host, code, call.agent.said.decode("utf-8", "replace"), self._python()
        )

    def _python(self) -> str:
        assert self.plan.fan is not None
        return self.plan.fan.python

    def _complain(self) -> None:
        """Name all hosts that failed, then raise."""
        failed = [call for call in self.calls if call.failure]
        if not failed:
            return
        for call in failed:
            assert call.failure is not None
            what, hint = call.failure
            place = (
                f" ({call.one.host.where})" if call.one.host.where not in ("", "--hosts") else ""
            )
            print(
                f"pdrun: {call.one.host.name}{place}: {what}{f'; {hint}' if hint else ''}",
                file=sys.stderr,
                flush=True,
            )
        names = ", ".join(call.one.host.name for call in failed[:10]) + (
            " ..." if len(failed) > 10 else ""
        )
        raise RendezvousError(
            f"{len(failed)} of {len(self.calls)} host(s) cannot serve ({names}); nothing was started"
        )


def _turn(agents: Iterable[RemoteAgent], timeout: float = 0.5) -> None:
    """
    Wait until something comes from one of the agents, and take it; what they print now belongs to
    nobody.
    """
    poll = select.poll()
    owners = dict[int, RemoteAgent]()
    for agent in agents:
        for fd, mask in agent.descriptors(lambda stream: False):
            poll.register(fd, mask)
            owners[fd] = agent
    for fd, _ in poll.poll((timeout if owners else 0.02) * 1000):
        for _ in owners[fd].take(fd):
            pass


def leave(agents: Iterable[RemoteAgent]) -> None:
    """Close connections: each far end leaves by itself, and is cut off when it does not."""
    agents = list(agents)
    for agent in agents:
        agent.cut()
    deadline = time.monotonic() + LEAVE_TIMEOUT
    while time.monotonic() < deadline and (
        left := [one for one in agents if one.connected and not one.drained()]
    ):
        _turn(left, 0.05)
    for agent in agents:
        agent.drop()


def run_hosts(plan: LaunchPlan) -> int:
    """
    Do what a plan of mode ``hosts`` says; return the job's exit code.

    Raises:
        RendezvousError: a host cannot serve, or the first one cannot listen.
    """
    from pdrun.launcher.jobs.run_record import register, run_name

    assert plan.fan is not None
    console = Console()
    run = run_name(plan)
    agents = Reaching(plan).everybody()
    try:
        scheduler = _listen(plan, agents) if len(agents) > 1 else None
        for agent, env, order in zip(
            agents, _env(plan), _orders(plan, scheduler, console, run), strict=True
        ):
            agent.set_order(order, env)
        register(plan, run, str(scheduler or ""))
        front = Front(agents, console, grace=plan.spec.policy.grace, outlives=plan.spec.reopens)
        signal.signal(signal.SIGTSTP, _not_taken)
        front.start()
    except BaseException:
        leave(agents)
        raise
    return front.run()


def _not_taken(number: int, frame: FrameType | None) -> None:
    """Ctrl-Z: nobody would say on the connections any more that this process lives."""


def _listen(plan: LaunchPlan, agents: list[RemoteAgent]) -> Endpoint:
    """Have the first host bind the scheduler's socket; return where the others reach it."""
    assert plan.fan is not None
    first = agents[0]
    hosts = plan.fan.hosts
    far = not all(one.here for one in hosts)
    first.listen(_candidates(plan, agents), plan.spec.place.interface, far=far)
    deadline = time.monotonic() + LISTEN_TIMEOUT
    while first.listening is None:
        if first.status is not None or time.monotonic() > deadline:
            raise RendezvousError(
                "was lost before it could listen for the scheduler", where=hosts[0].host.name
            )
        _turn([first])
    if "error" in first.listening:
        raise RendezvousError(
            f"cannot listen for the scheduler: {first.listening['error']}", where=hosts[0].host.name
        )
    return Endpoint(str(first.listening["host"]), int(first.listening["port"]))


def _candidates(plan: LaunchPlan, agents: list[RemoteAgent]) -> list[str]:
    """
    Return addresses by which the others may reach the first host, the best first.

    What the user says; the address at which our ssh arrived there (or from which our connections
    come, where the first host is this machine); its name.
    """
    assert plan.fan is not None
    first = plan.fan.hosts[0]
    found = [first.host.address] if first.host.address else []
    for one, agent in zip(plan.fan.hosts, agents, strict=True):
        ends = (
            str(agent.hello["connection"]).split() if agent.hello else []
        )  # client, port, server, port
        if not one.here and len(ends) == 4 and (first.here or one is first):
            found.append(ends[0] if first.here else ends[2])
    if first.here:
        found.append(network.route(None))
    return list(dict.fromkeys(address for address in (*found, first.host.name) if address))


def _env(plan: LaunchPlan) -> Iterator[dict[str, str]]:
    assert plan.fan is not None
    for one in plan.fan.hosts:
        yield {} if one.here else dict(plan.fan.env)


def _orders(
    plan: LaunchPlan, scheduler: Endpoint | None, console: Console, run: str
) -> Iterator[dict[str, object]]:
    """
    Yield each agent's order (`pdrun.launcher.controller.local` has the form); the first one speaks
    for the job.
    """
    assert plan.fan is not None
    secret = job_secret(plan)
    told = {
        "place.scheduler": "--hosts",
        "place.node_rank": "--hosts",
        "place.node_name": "--hosts",
    }
    for index in range(len(plan.fan.hosts)):
        yield {
            "spec": node_spec(plan, index, scheduler).to_json(),
            "sources": {**plan.sources, **told},
            "secret": secret.reveal().hex(),
            "quiet": index > 0,
            "front": None,
            "run": run,
            **console.to_json(),
        }
