"""
``--hosts``: connects to every host, then starts an agent on each and shows their output.

    connect, check  all hosts in parallel: every host that cannot serve is named, nothing is started
    listen          the first host binds the scheduler's socket on an address the others can reach
    payload         all agents start; from here on `pdrun.launcher.controller.controller` runs

The connections stay open. Their end, however this process dies, ends everything on the other side.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from pdrun.endpoint import Endpoint
from pdrun.errors import RendezvousError
from pdrun.launcher.common import network
from pdrun.launcher.controller.controller import Controller, job_secret
from pdrun.launcher.controller.host_connector import HostConnector, disconnect, wait_for_agents
from pdrun.launcher.controller.ssh_agent import RemoteAgentHandle
from pdrun.launcher.jobs.run_record import make_run_name, register_run
from pdrun.launcher.jobs.views.live_screen import show_live_line
from pdrun.launcher.output.console import Console
from pdrun.launcher.plan.hosts import make_node_spec
from pdrun.launcher.plan.model import LaunchPlan

LISTEN_SECONDS = 30.0
"""Time for the first host to bind the scheduler's socket."""


def run_hosts(plan: LaunchPlan) -> int:
    """
    Carry out a plan of mode ``hosts``; return the job's exit code.

    Raises:
        RendezvousError: a host cannot serve, or the first one cannot listen.
    """
    assert plan.host_plan is not None
    console = Console()
    run = make_run_name(plan)
    agents = HostConnector(plan).connect_all()
    try:
        scheduler = _bind_scheduler(plan, agents) if len(agents) > 1 else None
        payloads = _make_payloads(plan, scheduler, console, run)
        for agent, launch, payload in zip(agents, plan.host_plan.hosts, payloads, strict=True):
            env = {} if launch.is_local else dict(plan.host_plan.env)
            agent.set_payload(payload, env)
        register_run(plan, run, str(scheduler or ""))
        controller = Controller(
            agents, console, grace=plan.spec.policy.grace, can_restart=plan.spec.can_restart
        )
        signal.signal(signal.SIGTSTP, _ignore_ctrl_z)
        controller.start()
        names = [launch.host.name for launch in plan.host_plan.hosts]
        show_live_line(console, plan.spec.output, expected_nodes=names[: plan.nodes])
    except BaseException:
        disconnect(agents)
        raise
    return controller.run()


def _ignore_ctrl_z(number: int, frame: FrameType | None) -> None:
    """Stay awake: a stopped process would send no ALIVE frames."""


def _bind_scheduler(plan: LaunchPlan, agents: Sequence[RemoteAgentHandle]) -> Endpoint:
    """Have the first host bind the scheduler's socket; return its address for the others."""
    assert plan.host_plan is not None
    hosts = plan.host_plan.hosts
    head_name = hosts[0].host.name
    head = agents[0]
    has_remote_hosts = not all(launch.is_local for launch in hosts)
    place = plan.spec.place
    head.listen(
        _head_addresses(plan, agents),
        place.interface,
        far=has_remote_hosts,
        ports=place.port_range,
    )
    deadline = time.monotonic() + LISTEN_SECONDS
    while head.listening is None:
        if head.ssh_status is not None or time.monotonic() > deadline:
            raise RendezvousError(
                "was lost before it could listen for the scheduler", where=head_name
            )
        wait_for_agents([head])
    answer = head.listening
    if "error" in answer:
        raise RendezvousError(
            f"cannot listen for the scheduler: {answer['error']}", where=head_name
        )
    return Endpoint(str(answer["host"]), int(answer["port"]))


def _head_addresses(plan: LaunchPlan, agents: Sequence[RemoteAgentHandle]) -> list[str]:
    """
    Return addresses by which the others may reach the first host, the best first.

    In this order: the address that the user gives; the address at which our ssh arrived there, or
    the source address of our connections if the first host is this machine; its name.
    """
    assert plan.host_plan is not None
    head = plan.host_plan.hosts[0]
    addresses = [head.host.address]
    for launch, agent in zip(plan.host_plan.hosts, agents, strict=True):
        # SSH_CONNECTION: client address and port, server address and port
        ends = str(agent.hello["connection"]).split() if agent.hello else []
        if launch.is_local or len(ends) != 4:
            continue
        if head.is_local:
            addresses.append(ends[0])
        elif launch is head:
            addresses.append(ends[2])
    if head.is_local:
        addresses.append(network.find_local_address(None))
    addresses.append(head.host.name)
    return list(dict.fromkeys(address for address in addresses if address))


def _make_payloads(
    plan: LaunchPlan, scheduler: Endpoint | None, console: Console, run: str
) -> Iterator[dict[str, object]]:
    """
    Yield each agent's payload (`pdrun.launcher.controller.local` describes it).

    The first agent prints what is printed once per job.
    """
    assert plan.host_plan is not None
    secret = job_secret(plan)
    sources = {
        **plan.sources,
        "place.scheduler": "--hosts",
        "place.node_rank": "--hosts",
        "place.node_name": "--hosts",
    }
    for index in range(len(plan.host_plan.hosts)):
        yield {
            "spec": make_node_spec(plan, index, scheduler).to_json(),
            "sources": sources,
            "secret": secret.reveal().hex(),
            "quiet": index > 0,
            "front": None,
            "run": run,
            **console.to_json(),
        }
