"""
One command that has another launcher start the agents: mpirun, or srun in an allocation of Slurm.
Pure.

    pdrun --launcher mpirun --hostfile H --devices 8 train.py          pdrun train.py     in the body of a batch script

This process runs the scheduler and starts ``mpirun ... task_main``, one task a node; each task
takes what it is to do from PDRUN_ORDER and the secret from PDRUN_TOKEN, both passed by name, and
joins. The job's end is the scheduler's verdict; what mpirun makes of exit codes does not matter.
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
from pdrun.launcher.config.spec import ClusterOptions, JobSpec, RemoteOptions, Sources, source_of
from pdrun.launcher.hosts import nodelist
from pdrun.launcher.hosts.selection import Host
from pdrun.launcher.plan.environment import display_value, remove_launcher_variables
from pdrun.launcher.plan.hosts import select_forwarded
from pdrun.launcher.plan.model import ExternalLaunch, ExternalLauncher, Facts, LaunchPlan
from pdrun.launcher.plan.placement import resources_on_host
from pdrun.launcher.plan.scheduler_address import choose_listen_address

TASK_MAIN_ARGS = ("-P", "-m", "pdrun.launcher.launch.task_main")
PAYLOAD_VARIABLE = "PDRUN_ORDER"
TOKEN_VARIABLE = process_setup.TOKEN_VARIABLE
KILL_MARGIN_SECONDS = 5.0
"""Seconds of Slurm's KillWait that are kept for the last words, before its SIGKILL."""


def external_launcher_for(spec: JobSpec, sources: Sources) -> Literal["", "mpirun", "srun"]:
    """
    Return which other launcher starts the agents: the one that was named, or srun for an allocation
    of Slurm.
    """
    place = spec.place
    seat = place.scheduler, place.node_rank, place.serve, place.simulated
    if place.local or any(value is not None for value in seat):
        return ""
    if place.launcher in ("mpirun", "srun"):
        return "mpirun" if place.launcher == "mpirun" else "srun"
    if (
        place.launcher in ("", "auto")
        and place.hosts
        and sources.get("place.hosts", "") in ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
    ):
        return "srun"
    return ""


def plan_external(
    spec: JobSpec, facts: Facts, sources: Sources, job: str, notes: tuple[str, ...]
) -> LaunchPlan:
    """
    Decide what is started.

    Raises:
        ConfigError: the launcher is not there, or is none that is known.
        UsageError: a host or a variable cannot be passed on.
    """
    starter = facts.external_launcher
    assert starter is not None
    if starter.error:
        raise ConfigError(starter.error, where=f"--launcher {starter.kind}")
    nodes = len(spec.place.hosts) or spec.resources.nodes
    where = source_of(sources, "resources.nodes", "")
    if where and spec.resources.nodes != nodes:
        raise UsageError(
            f"{spec.resources.nodes} node(s), but {nodes} host(s) are named",
            where=where,
            hint="leave it out",
        )
    for host in spec.place.hosts:
        resources_on_host(spec.resources, host, "--devices")
    listen = choose_listen_address(spec, facts, sources)
    python = spec.program.python or facts.python
    env = select_forwarded(
        spec.reach.forward, facts.environ, source_of(sources, "reach.forward", "--forward")
    )
    spec, more = fit_grace(spec, starter.kill_wait, sources)
    build = _launch_by_mpirun if starter.kind == "mpirun" else _launch_by_srun
    _, scrubbed = remove_launcher_variables(facts.environ)
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
        removed=scrubbed,
        scheduler=Endpoint(listen, 0),
        listen=listen,
        cwd=facts.cwd,
        compared={"host": facts.hostname},
        notes=tuple(filter(None, (*notes, more))),
        external_launch=build(spec, starter, nodes, (python, *TASK_MAIN_ARGS), env, facts),
    )


def fit_grace(spec: JobSpec, wait: float | None, sources: Sources) -> tuple[JobSpec, str]:
    """
    Return the specification whose grace ends before Slurm's patience does, and why; the user's own
    choice is kept.

    Args:
        wait: seconds from Slurm's SIGTERM to its SIGKILL; None: not known.
    """
    grace = spec.policy.grace
    if wait is None or wait - KILL_MARGIN_SECONDS >= grace:
        return spec, ""
    killed = f"Slurm kills {wait:g} s after its SIGTERM"
    if sources.get("policy.grace", "default") != "default":
        return spec, f"{killed}, before the grace of {grace:g} s is over"
    fits = max(1.0, wait - KILL_MARGIN_SECONDS)
    return replace(spec, policy=replace(spec.policy, grace=fits)), f"grace {fits:g} s: {killed}"


def _launch_by_mpirun(
    spec: JobSpec,
    starter: ExternalLauncher,
    nodes: int,
    task: tuple[str, ...],
    env: Mapping[str, str],
    facts: Facts,
) -> ExternalLaunch:
    assert starter.mpi is not None
    mpi = starter.mpi
    names = (PAYLOAD_VARIABLE,) if spec.place.insecure else (PAYLOAD_VARIABLE, TOKEN_VARIABLE)
    argv = mpirun_command.build_mpirun_command(
        mpi, spec.place.hosts, nodes, names, spec.reach.mpirun_opts, task, root=facts.uid == 0
    )
    title = f"{mpirun_command.MPI_TITLES[mpi.family]} ({mpi.version})"
    return ExternalLaunch("mpirun", title, task[0], argv, env, mpirun_command.mpirun_environment(mpi))


def _launch_by_srun(
    spec: JobSpec,
    starter: ExternalLauncher,
    nodes: int,
    task: tuple[str, ...],
    env: Mapping[str, str],
    facts: Facts,
) -> ExternalLaunch:
    names = [host.name for host in spec.place.hosts]
    listed = nodelist.compress_names(names)
    if re.search(r"\][^,]", listed):  # Slurm takes no text behind a bracket
        listed = ",".join(names)
    argv = (
        starter.program,
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        *([f"--nodelist={listed}"] if names else []),
        "--distribution=block",
        "--export=ALL",
        *(["--cpu-bind=none"] if starter.binds_tasks else []),
        "--mpi=none",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--unbuffered",
        f"--chdir={facts.cwd}",
        *spec.reach.srun_opts,
        *task,
    )
    return ExternalLaunch("srun", "srun, one task a node", task[0], argv, env, {})


def make_task_spec(plan: LaunchPlan, scheduler: Endpoint) -> JobSpec:
    """
    Return what every task is asked for; its node rank it finds itself
    (`pdrun.launcher.launch.task_main`).
    """
    place = ClusterOptions(
        scheduler=scheduler,
        serve=False,
        interface=plan.spec.place.interface,
        insecure=plan.spec.place.insecure,
        hosts=plan.spec.place.hosts,
    )
    resources = replace(plan.spec.resources, nodes=plan.nodes)
    return replace(
        plan.spec, resources=resources, place=place, reach=RemoteOptions(), job=plan.job, chdir=""
    )


def find_node_rank(hosts: tuple[Host, ...], here: tuple[str, ...], rank: int) -> int:
    """
    Return the node rank of a task: its host's place in the list, or the launcher's rank where that
    says nothing.
    """
    names = [host.name for host in hosts]
    mine = [names.index(name) for name in here if name in names]
    return mine[0] if len(mine) == 1 else rank


def describe_external(plan: LaunchPlan) -> str:
    """Return what a plan starts as lines for a terminal."""
    assert plan.external_launch is not None
    through = plan.external_launch
    env = " ".join(f"{name}={display_value(name, value)}" for name, value in through.env.items())
    command = "".join(
        f"{name}={value} " for name, value in through.launcher_env.items()
    ) + shlex.join(through.argv)
    lines = [f"{'variables':<10} {env or '-'}", f"{'starts by':<10} {through.title}", "", command]
    for rank, host in enumerate(plan.spec.place.hosts):
        count = resources_on_host(plan.spec.resources, host, "--devices").devices
        lines += [*([""] if rank == 0 else []), f"{host.name}: node rank {rank}, {count} worker(s)"]
    return "\n".join(lines) + "\n"
