"""
One command for the whole cluster: which hosts it starts agents on, and with which words. Pure.

    pdrun --hosts a,b --devices 8 train.py

Node ranks follow the list. The first host runs the scheduler. A host that is this machine needs no
ssh; the others get the connection of `pdrun.launcher.adapters.ssh_command`. What is sent to them
stands in the plan that ``--dry-run`` prints.
"""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pdrun.endpoint import Endpoint
from pdrun.errors import UsageError
from pdrun.launcher.adapters.ssh_command import REMOTE_MAIN_ARGS, check_python, build_remote_command, build_ssh_argv
from pdrun.launcher.config.spec import ClusterOptions, JobSpec, RemoteOptions, Sources, source_of
from pdrun.launcher.hosts.selection import Host
from pdrun.launcher.plan.environment import (
    display_value,
    is_launcher_variable,
    remove_launcher_variables,
)
from pdrun.launcher.plan.model import Facts, HostLaunch, HostPlan, LaunchPlan
from pdrun.launcher.plan.placement import resources_on_host
from pdrun.names import make_name

MAX_PARALLEL_CONNECTIONS = 64
"""Connections that are being made at once."""


def uses_ssh(spec: JobSpec) -> bool:
    """
    Whether one command starts all nodes: hosts are named, and nothing says that this node is one of
    them.
    """
    place = spec.place
    seat = place.scheduler, place.node_rank, place.serve, place.simulated
    return bool(place.hosts) and all(value is None for value in seat) and not place.local


def plan_hosts(
    spec: JobSpec, facts: Facts, sources: Sources, job: str, notes: tuple[str, ...]
) -> LaunchPlan:
    """
    Decide what is started on which host.

    Args:
        job: key of the job.

    Raises:
        UsageError: a host's name, the interpreter or a name to forward cannot be used.
    """
    python = check_python(
        spec.program.python or facts.python, where=source_of(sources, "program.python", "--python")
    )
    _, scrubbed = remove_launcher_variables(facts.environ)
    nodes = source_of(sources, "resources.nodes", "")
    count = len(spec.place.hosts)
    if nodes and spec.resources.nodes != count:
        raise UsageError(
            f"{spec.resources.nodes} node(s), but {count} host(s) are named",
            where=nodes,
            hint="leave it out",
        )
    for host in spec.place.hosts:
        where = source_of(sources, "resources.devices", "--devices")
        resources_on_host(spec.resources, host, where, exact=bool(spec.place.rank_table))
    return LaunchPlan(
        mode="hosts",
        job=job,
        node="",
        nodes=len(spec.place.hosts),
        spec=spec,
        sources=sources,
        workers=(),
        backend=spec.resources.backend,
        backend_reason="each host decides",
        visibility={},
        collective="",
        base_env={},
        removed=scrubbed,
        scheduler=None,
        listen="",
        cwd=facts.cwd,
        notes=tuple(filter(None, notes)),
        host_plan=HostPlan(
            tuple(
                _plan_host_launch(host, node, spec, facts, python)
                for host, node in name_hosts(spec.place.hosts)
            ),
            python,
            select_forwarded(
                spec.reach.forward, facts.environ, source_of(sources, "reach.forward", "--forward")
            ),
        ),
    )


def name_hosts(hosts: Sequence[Host]) -> list[tuple[Host, str]]:
    """Return each host with its name in the job: different for each, and fit for a path."""
    taken: set[str] = set()
    chosen = []
    for index, host in enumerate(hosts):
        name = make_name(host.name)
        while name in taken:
            name = make_name(f"{host.name[:40]}-{index}")
            index += len(hosts)
        taken.add(name)
        chosen.append((host, name))
    return chosen


def _plan_host_launch(
    host: Host, node: str, spec: JobSpec, facts: Facts, python: str
) -> HostLaunch:
    here = host.name in facts.local_hosts and not host.user and host.port is None
    if here:
        return HostLaunch(node, host, True, (facts.python, *REMOTE_MAIN_ARGS))
    return HostLaunch(
        node,
        host,
        False,
        build_ssh_argv(spec.reach.ssh, spec.reach.ssh_opts, host, build_remote_command(python)),
    )


def select_forwarded(
    patterns: Sequence[str], environ: Mapping[str, str], where: str
) -> dict[str, str]:
    """
    Return the variables that the patterns name; the token and launchers' own words never go
    anywhere.

    Raises:
        UsageError: a name without ``*`` or ``?`` is not set, or is one that is never forwarded.
    """
    chosen: dict[str, str] = {}
    for pattern in patterns:
        if not set("*?") & set(pattern):
            if is_launcher_variable(pattern):
                raise UsageError(
                    f"{pattern} is never forwarded: each launcher sets its own", where=where
                )
            if pattern not in environ:
                raise UsageError(
                    f"{pattern} is not set here",
                    where=where,
                    hint="set it, or use --env NAME=VALUE",
                )
        chosen |= {
            name: value for name, value in environ.items() if fnmatch.fnmatchcase(name, pattern)
        }
    return {name: value for name, value in sorted(chosen.items()) if not is_launcher_variable(name)}


def make_node_spec(plan: LaunchPlan, index: int, scheduler: Endpoint | None) -> JobSpec:
    """
    Return what the agent of host ``index`` is asked for; ``scheduler`` is None for the only node of
    a job.
    """
    assert plan.host_plan is not None
    spec = plan.spec
    one = plan.host_plan.hosts[index]
    many = scheduler is not None
    place = ClusterOptions(
        scheduler=scheduler,
        node_rank=index if many else None,
        node_name=one.node,
        serve=(index == 0) if many else None,
        interface=spec.place.interface,
        insecure=spec.place.insecure,
        rank_table=spec.place.rank_table,
    )
    resources = resources_on_host(
        spec.resources, one.host, source_of(plan.sources, "resources.devices", "--devices")
    )
    resources = replace(resources, nodes=plan.nodes)
    return replace(
        spec, resources=resources, place=place, reach=RemoteOptions(), job=plan.job, chdir=""
    )


def describe_hosts(plan: LaunchPlan) -> str:
    """Return the fan of a plan as lines for a terminal."""
    assert plan.host_plan is not None
    spec = plan.spec
    fan = plan.host_plan
    lines = [
        f"{'variables':<10} {' '.join(f'{name}={display_value(name, value)}' for name, value in fan.env.items()) or '-'}"
    ]
    for rank, one in enumerate(fan.hosts):
        count = resources_on_host(spec.resources, one.host, "--devices").devices
        what = "runs the scheduler, " if rank == 0 and len(fan.hosts) > 1 else ""
        lines += ["", f"{one.node}: node rank {rank}, {what}{count} worker(s)"]
        lines += [f"  {'here, no ssh: ' if one.is_local else ''}{shlex.join(one.argv)}"]
    return "\n".join(lines) + "\n"
