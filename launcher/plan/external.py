"""
Plan of a job whose agents are started by mpirun or srun (mode external). Pure.

    pdrun --launcher mpirun --hostfile H --devices 8 train.py
    pdrun train.py                                     in the body of a Slurm batch script

This process runs the scheduler and starts ``mpirun ... task_main``, one task per node. Each task
reads its specification from PDRUN_ORDER and the secret from PDRUN_TOKEN, both passed by name, and
joins. The exit code is that of the scheduler's verdict, not that of mpirun.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from pdrun import process_setup
from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.adapters import mpirun_command
from pdrun.launcher.adapters.parsing import read_host_list
from pdrun.launcher.adapters.slurm import HET_NODE_LISTS
from pdrun.launcher.config.spec import ClusterOptions, JobSpec, RemoteOptions, Sources, source_of
from pdrun.launcher.hosts import nodelist
from pdrun.launcher.hosts.selection import Host
from pdrun.launcher.plan.environment import format_variables, remove_launcher_variables
from pdrun.launcher.plan.hosts import select_forwarded
from pdrun.launcher.plan.model import ExternalLaunch, ExternalLauncher, Facts, LaunchPlan
from pdrun.launcher.plan.placement import resources_on_host
from pdrun.launcher.plan.scheduler_address import choose_listen_address

TASK_MAIN_ARGS = ("-P", "-m", "pdrun.launcher.launch.task_main")
PAYLOAD_VARIABLE = "PDRUN_ORDER"
TOKEN_VARIABLE = process_setup.TOKEN_VARIABLE
_SLURM_SOURCES = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", HET_NODE_LISTS)
"""Sources of the hosts of an allocation of Slurm."""
KILL_MARGIN_SECONDS = 5.0
"""Seconds of Slurm's KillWait that are reserved for the last output, before its SIGKILL."""


def external_launcher_for(spec: JobSpec, sources: Sources) -> Literal["", "mpirun", "srun"]:
    """
    Return the launcher that starts the agents: ``--launcher``, or srun in an allocation of Slurm.
    Empty: pdrun starts them.
    """
    place = spec.place
    own_place = (place.scheduler, place.node_rank, place.serve, place.simulated)
    if place.local or any(value is not None for value in own_place):
        return ""
    if place.launcher == "mpirun":
        return "mpirun"
    if place.launcher == "srun":
        return "srun"
    is_automatic = place.launcher in ("", "auto")
    is_allocation = sources.get("place.hosts", "") in _SLURM_SOURCES
    if is_automatic and place.hosts and is_allocation:
        return "srun"
    return ""


def plan_external(
    spec: JobSpec, facts: Facts, sources: Sources, job: str, notes: tuple[str, ...]
) -> LaunchPlan:
    """
    Decide how the launcher starts the agents.

    Raises:
        ConfigError: the launcher is missing or unknown.
        UsageError: the launcher does not support a host, or a variable cannot be forwarded.
    """
    launcher = facts.external_launcher
    assert launcher is not None
    if launcher.error:
        raise ConfigError(launcher.error, where=f"--launcher {launcher.kind}")
    nodes = len(spec.place.hosts) or spec.resources.nodes
    where = source_of(sources, "resources.nodes", "")
    if where and spec.resources.nodes != nodes:
        raise UsageError(
            f"{spec.resources.nodes} node(s), but {nodes} host(s) are listed",
            where=where,
            hint="remove it",
        )
    for host in spec.place.hosts:
        resources_on_host(spec.resources, host, "--devices")
    listen = choose_listen_address(spec, facts, sources)
    python = spec.program.python or facts.python
    env = select_forwarded(
        spec.reach.forward, facts.environ, source_of(sources, "reach.forward", "--forward")
    )
    spec, note = fit_grace(spec, launcher.kill_wait, sources)
    build = _launch_by_srun
    if launcher.kind == "mpirun":
        build = _launch_by_mpirun
    _, removed = remove_launcher_variables(facts.environ)
    return LaunchPlan(
        mode="external",
        job=job,
        node="",
        nodes=nodes,
        spec=spec,
        sources=sources,
        workers=(),
        backend=spec.resources.backend,
        backend_reason="each node decides",
        visibility={},
        collective="",
        base_env={},
        removed=removed,
        scheduler=Endpoint(listen, 0),
        listen=listen,
        cwd=facts.cwd,
        compared={"host": facts.hostname},
        notes=tuple(filter(None, (*notes, note))),
        external_launch=build(spec, launcher, nodes, (python, *TASK_MAIN_ARGS), env, facts),
    )


def fit_grace(spec: JobSpec, wait: float | None, sources: Sources) -> tuple[JobSpec, str]:
    """
    Return the specification with a grace period that ends before Slurm's SIGKILL, and a note.

    A grace period that the user set is not changed.

    Args:
        wait: seconds from Slurm's SIGTERM to its SIGKILL; None: unknown.
    """
    grace = spec.policy.grace
    if wait is None or wait - KILL_MARGIN_SECONDS >= grace:
        return spec, ""
    killed = f"Slurm kills {wait:g} s after its SIGTERM"
    if sources.get("policy.grace", "default") != "default":
        return spec, f"{killed}, before the grace period of {grace:g} s ends"
    fits = max(1.0, wait - KILL_MARGIN_SECONDS)
    return replace(spec, policy=replace(spec.policy, grace=fits)), f"grace {fits:g} s: {killed}"


def _launch_by_mpirun(
    spec: JobSpec,
    launcher: ExternalLauncher,
    nodes: int,
    task: tuple[str, ...],
    env: Mapping[str, str],
    facts: Facts,
) -> ExternalLaunch:
    assert launcher.mpi is not None
    mpi = launcher.mpi
    names = (PAYLOAD_VARIABLE,) if spec.place.insecure else (PAYLOAD_VARIABLE, TOKEN_VARIABLE)
    argv = mpirun_command.build_mpirun_command(
        mpi, spec.place.hosts, nodes, names, spec.reach.mpirun_opts, task, root=facts.uid == 0
    )
    title = f"{mpirun_command.MPI_TITLES[mpi.family]} ({mpi.version})"
    return ExternalLaunch(
        "mpirun", title, task[0], argv, env, mpirun_command.mpirun_environment(mpi)
    )


def _launch_by_srun(
    spec: JobSpec,
    launcher: ExternalLauncher,
    nodes: int,
    task: tuple[str, ...],
    env: Mapping[str, str],
    facts: Facts,
) -> ExternalLaunch:
    names = [host.name for host in spec.place.hosts]
    binding = ["--cpu-bind=none"] if launcher.binds_tasks else []
    argv = [launcher.program]
    for group, members in _split_by_group(names, facts.environ):
        count = len(members) or nodes
        argv += [
            *([":"] if len(argv) > 1 else []),
            *group,
            f"--nodes={count}",
            f"--ntasks={count}",
            "--ntasks-per-node=1",
            *_nodelist_option(members),
            "--distribution=block",
            "--export=ALL",
            *binding,
            "--mpi=none",
            "--kill-on-bad-exit=0",
            "--wait=0",
            "--unbuffered",
            f"--chdir={facts.cwd}",
            *spec.reach.srun_opts,
            *task,
        ]
    return ExternalLaunch("srun", "srun, one task per node", task[0], tuple(argv), env, {})


def _split_by_group(
    names: list[str], environ: Mapping[str, str]
) -> list[tuple[tuple[str, ...], list[str]]]:
    """
    Return srun's option for each group of a heterogeneous job, and the hosts that the job uses of
    it. There is one entry without groups, or with a host that is in none of them.
    """
    found: list[tuple[tuple[str, ...], list[str]]] = []
    left = set(names)
    groups = environ.get("SLURM_HET_SIZE", "")
    for number in range(int(groups) if re.fullmatch("[0-9]{1,4}", groups) else 0):
        hosts = read_host_list(environ, f"SLURM_JOB_NODELIST_HET_GROUP_{number}")
        members = [host.name for host in hosts if host.name in left]
        left.difference_update(members)
        if members:
            found.append(((f"--het-group={number}",), members))
    return [((), names)] if left or not found else found


def _nodelist_option(names: list[str]) -> tuple[str, ...]:
    if not names:
        return ()
    listed = nodelist.compress_names(names)
    if re.search(r"\][^,]", listed):  # Slurm does not accept text after a bracket
        listed = ",".join(names)
    return (f"--nodelist={listed}",)


def make_task_spec(plan: LaunchPlan, scheduler: Endpoint) -> JobSpec:
    """
    Return the specification for every task. The task determines its node rank itself
    (`pdrun.launcher.launch.task_main`).
    """
    place = ClusterOptions(
        scheduler=scheduler,
        store=plan.spec.place.store,
        serve=False,
        interface=plan.spec.place.interface,
        port_range=plan.spec.place.port_range,
        insecure=plan.spec.place.insecure,
        hosts=plan.spec.place.hosts,
    )
    resources = replace(plan.spec.resources, nodes=plan.nodes)
    return replace(
        plan.spec, resources=resources, place=place, reach=RemoteOptions(), job=plan.job, chdir=""
    )


def find_node_rank(hosts: tuple[Host, ...], local_names: tuple[str, ...], rank: int) -> int:
    """
    Return the node rank of a task: the index of its host in the list, or the launcher's rank if the
    host is not unique in the list.
    """
    names = [host.name for host in hosts]
    indices = [names.index(name) for name in local_names if name in names]
    if len(indices) == 1:
        return indices[0]
    return rank


def describe_external(plan: LaunchPlan) -> str:
    """Return the launcher's command of a plan as text for a terminal."""
    assert plan.external_launch is not None
    launch = plan.external_launch
    assignments = [f"{name}={value} " for name, value in launch.launcher_env.items()]
    lines = [
        f"{'variables':<10} {format_variables(launch.env)}",
        f"{'starts by':<10} {launch.title}",
        "",
        "".join(assignments) + shlex.join(launch.argv),
    ]
    if plan.spec.place.hosts:
        lines.append("")
    for rank, host in enumerate(plan.spec.place.hosts):
        count = resources_on_host(plan.spec.resources, host, "--devices").devices
        unit = "device(s)" if plan.spec.program.is_per_node else "worker(s)"
        lines.append(f"{host.name}: node rank {rank}, {count} {unit}")
    return "\n".join(lines) + "\n"
