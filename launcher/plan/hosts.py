"""
Plan of a job that one command starts on all hosts over ssh (mode hosts). Pure.

    pdrun --hosts a,b --devices 8 train.py

Node ranks follow the list. The first host runs the scheduler. A host that is this machine needs no
ssh. The others are reached by the command of `pdrun.launcher.adapters.ssh_command`. ``--dry-run``
prints the commands and the variables that are sent.
"""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pdrun.endpoint import Endpoint
from pdrun.errors import UsageError
from pdrun.launcher.adapters.ssh_command import (
    REMOTE_MAIN_ARGS,
    build_remote_command,
    build_ssh_argv,
    check_python,
)
from pdrun.launcher.config.spec import ClusterOptions, JobSpec, RemoteOptions, Sources, source_of
from pdrun.launcher.hosts.selection import Host
from pdrun.launcher.plan.environment import (
    format_variables,
    is_launcher_variable,
    remove_launcher_variables,
)
from pdrun.launcher.plan.model import Facts, HostLaunch, HostPlan, LaunchPlan
from pdrun.launcher.plan.placement import resources_on_host
from pdrun.text import make_name
from pdrun.topology import recorded_interface_variables

MAX_PARALLEL_CONNECTIONS = 64
"""Number of connections that are opened at the same time."""


def uses_ssh(spec: JobSpec) -> bool:
    """
    Return whether this command starts the agents of all hosts: there is a host list, and no option
    places this node in the job.
    """
    place = spec.place
    if not place.hosts or place.local:
        return False
    own_place = (place.scheduler, place.node_rank, place.serve, place.simulated)
    return all(value is None for value in own_place)


def plan_hosts(
    spec: JobSpec, facts: Facts, sources: Sources, job: str, notes: tuple[str, ...]
) -> LaunchPlan:
    """
    Decide how the agent of each host is started.

    Args:
        job: key of the job.
        notes: notes about the specification. They are copied into the plan.

    Raises:
        UsageError: a host name, the interpreter or a variable to forward is invalid.
    """
    python = check_python(
        spec.program.python or facts.python, where=source_of(sources, "program.python", "--python")
    )
    _, removed = remove_launcher_variables(facts.environ)
    nodes = source_of(sources, "resources.nodes", "")
    count = len(spec.place.hosts)
    if nodes and spec.resources.nodes != count:
        raise UsageError(
            f"{spec.resources.nodes} node(s), but {count} host(s) are listed",
            where=nodes,
            hint="remove it",
        )
    devices = source_of(sources, "resources.devices", "--devices")
    for host in spec.place.hosts:
        resources_on_host(spec.resources, host, devices, exact=bool(spec.place.rank_table))
    launches = tuple(
        _plan_host_launch(host, node, spec, facts, python)
        for host, node in name_hosts(spec.place.hosts)
    )
    forward = source_of(sources, "reach.forward", "--forward")
    env = select_forwarded(spec.reach.forward, facts.environ, forward)
    return LaunchPlan(
        mode="hosts",
        job=job,
        node="",
        nodes=count,
        spec=spec,
        sources=sources,
        workers=(),
        backend=spec.resources.backend,
        backend_reason="each host decides",
        visibility={},
        collective="",
        base_env={},
        removed=removed,
        scheduler=None,
        listen="",
        cwd=facts.cwd,
        notes=tuple(filter(None, notes)),
        host_plan=HostPlan(launches, python, env),
    )


def name_hosts(hosts: Sequence[Host]) -> list[tuple[Host, str]]:
    """Return each host with its node name: unique, and valid as a folder name."""
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
    is_local = host.name in facts.local_hosts and not host.user and host.port is None
    if is_local:
        return HostLaunch(node, host, is_local, (facts.python, *REMOTE_MAIN_ARGS))
    command = build_remote_command(python)
    argv = build_ssh_argv(spec.reach.ssh, spec.reach.ssh_opts, host, command)
    return HostLaunch(node, host, is_local, argv)


def select_forwarded(
    patterns: Sequence[str], environ: Mapping[str, str], where: str
) -> dict[str, str]:
    """
    Return the variables that match the patterns. The token and launchers' variables are never sent.

    Raises:
        UsageError: a name without ``*`` or ``?`` is not set, or is never forwarded.
    """
    chosen: dict[str, str] = {}
    ours = recorded_interface_variables(environ)
    for pattern in patterns:
        if not set("*?") & set(pattern):
            if is_launcher_variable(pattern):
                raise UsageError(
                    f"{pattern} is never forwarded: each launcher sets it itself", where=where
                )
            if pattern not in environ:
                raise UsageError(
                    f"{pattern} is not set",
                    where=where,
                    hint="set it, or use --env NAME=VALUE",
                )
        for name, value in environ.items():
            is_removed = name in ours or is_launcher_variable(name)
            if fnmatch.fnmatchcase(name, pattern) and not is_removed:
                chosen[name] = value
    return dict(sorted(chosen.items()))


def make_node_spec(plan: LaunchPlan, index: int, scheduler: Endpoint | None) -> JobSpec:
    """
    Return the specification for the agent of host ``index``.

    Args:
        scheduler: address of the scheduler; None if the job has one node.
    """
    assert plan.host_plan is not None
    spec = plan.spec
    launch = plan.host_plan.hosts[index]
    node_rank = None
    node_names: tuple[str, ...] = ()
    serve = None
    if scheduler is not None:
        node_rank = index
        serve = index == 0
        if serve:
            node_names = tuple(host.node for host in plan.host_plan.hosts)
    place = ClusterOptions(
        scheduler=scheduler,
        store=spec.place.store,
        node_rank=node_rank,
        node_name=launch.node,
        node_names=node_names,
        serve=serve,
        interface=spec.place.interface,
        port_range=spec.place.port_range,
        insecure=spec.place.insecure,
        rank_table=spec.place.rank_table,
    )
    resources = resources_on_host(
        spec.resources, launch.host, source_of(plan.sources, "resources.devices", "--devices")
    )
    resources = replace(resources, nodes=plan.nodes)
    return replace(
        spec, resources=resources, place=place, reach=RemoteOptions(), job=plan.job, chdir=""
    )


def describe_hosts(plan: LaunchPlan) -> str:
    """Return the hosts of a plan as text for a terminal."""
    assert plan.host_plan is not None
    spec = plan.spec
    variables = format_variables(plan.host_plan.env)
    lines = [f"{'variables':<10} {variables}"]
    for rank, launch in enumerate(plan.host_plan.hosts):
        count = resources_on_host(spec.resources, launch.host, "--devices").devices
        role = ""
        if rank == 0 and len(plan.host_plan.hosts) > 1:
            role = "runs the scheduler, "
        command = shlex.join(launch.argv)
        if launch.is_local:
            command = f"this machine, no ssh: {command}"
        unit = "device(s)" if spec.program.is_per_node else "worker(s)"
        lines += ["", f"{launch.node}: node rank {rank}, {role}{count} {unit}", f"  {command}"]
    return "\n".join(lines) + "\n"
