"""
The plan: every action on this node, decided before the first one.

`make_plan` is a pure function of the specification and the facts of this machine. `--dry-run`
prints the same object that is executed. A job never becomes smaller than requested.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from pdrun.errors import ConfigError, PdrunError, UsageError
from pdrun.launcher.common.rank_lists import describe_ranks
from pdrun.launcher.config.job_key import format_command, make_job_key
from pdrun.launcher.config.spec import JobSpec, Sources, source_of
from pdrun.launcher.plan import external, hosts
from pdrun.launcher.plan.environment import remove_launcher_variables
from pdrun.launcher.plan.model import Facts, LaunchMode, LaunchPlan, WorkerPlan
from pdrun.launcher.plan.placement import (
    WorkerPlacement,
    choose_threads,
    place_workers,
    resources_on_host,
)
from pdrun.launcher.plan.program import program_argv
from pdrun.launcher.plan.scheduler_address import choose_scheduler, choose_store
from pdrun.launcher.plan.start_method import choose_start_method
from pdrun.text import make_name
from pdrun.topology import choose_interface_variables

MAX_SPEC_BYTES = (1 << 20) - (1 << 16)
"""Size limit of a rendezvous message, less a margin for its other fields."""


def make_plan(
    spec: JobSpec, facts: Facts, sources: Sources, notes: tuple[str, ...] = ()
) -> LaunchPlan:
    """
    Decide what this node does. Pure: equal arguments give equal plans.

    Args:
        notes: notes about the specification. They are copied into the plan.

    Raises:
        UsageError: the request is invalid; the message names its source. A missing program has the
            exit code of a shell.
        ConfigError: this machine cannot run the job.
    """
    _check_hosts_differ(facts, sources)
    launcher = external.external_launcher_for(spec, sources)
    members = max(spec.resources.max_members, len(spec.place.hosts))
    if launcher or members > 1 or spec.place.serve is not None:
        _check_spec_size(spec)
    is_controller = bool(launcher) or hosts.uses_ssh(spec) or (spec.place.local and members > 1)
    _check_stdin(spec, sources, is_controller=is_controller)
    if launcher:
        return external.plan_external(spec, facts, sources, make_job_key(spec), notes)
    if hosts.uses_ssh(spec):
        return hosts.plan_hosts(spec, facts, sources, make_job_key(spec), notes)
    spec, sources = spec_for_this_host(spec, facts, sources)
    return _plan_this_node(spec, facts, sources, notes)


def _plan_this_node(
    spec: JobSpec, facts: Facts, sources: Sources, notes: tuple[str, ...]
) -> LaunchPlan:
    """Decide what the agent of this node does, or the controller of simulated nodes."""
    choice = choose_scheduler(spec, facts, sources)
    store = choose_store(spec, facts, sources, choice)
    if store is not None and choice.mode == "head" and spec.place.node_rank is None:
        # torch's store is where the user said only if this node is node 0
        spec = replace(spec, place=replace(spec.place, node_rank=0))
    _check_startable(spec, facts, sources, choice.mode)
    base_env, removed = _base_environment(spec, facts)
    workers: tuple[WorkerPlan, ...] = ()
    visibility: Mapping[int, Mapping[str, str]] = {}
    if choice.mode == "local":
        placement = _place_simulated_nodes(spec, facts, sources)
    else:
        placement = place_workers(spec, facts, sources)
        visibility = _visibility_by_rank(placement)
    threads, thread_note = choose_threads(spec, facts.environ, placement.binding)
    if choice.mode != "local":
        workers = _plan_workers(spec, facts, placement, threads)
    if choice.mode == "single":
        _check_stdin(spec, sources, workers=len(workers))
    start_method = choose_start_method(spec, facts, sources, {**base_env, **spec.env}, visibility)
    all_notes = (
        *notes,
        *choice.reasons,
        *placement.notes,
        placement.binding.note,
        thread_note,
    )
    return LaunchPlan(
        mode=choice.mode,
        job=make_job_key(spec),
        node=choose_node_name(spec, facts),
        nodes=spec.resources.nodes,
        spec=spec,
        sources=sources,
        workers=workers,
        backend=placement.backend.name,
        backend_reason=placement.reason,
        visibility=visibility,
        collective=placement.backend.collective,
        base_env=base_env,
        removed=removed,
        scheduler=choice.scheduler,
        listen=choice.listen,
        cwd=facts.cwd,
        interfaces=_name_interfaces(
            choice.mode, choice.listen, facts, {**base_env, **spec.env}, placement
        ),
        compared=_facts_to_compare(spec, facts, placement.backend.name),
        notes=tuple(filter(None, all_notes)),
        start_method=start_method,
        server_cpus=placement.server_cpus,
        store=store,
    )


def _check_hosts_differ(facts: Facts, sources: Sources) -> None:
    """Refuse a host list in which one machine is two nodes."""
    if facts.same_machine:
        raise UsageError(
            f"{facts.same_machine}, but each host is another node",
            where=source_of(sources, "place.hosts", "--hosts"),
            hint="list it once, with the number of its devices (NAME:N)",
        )


def _check_spec_size(spec: JobSpec) -> None:
    """
    Refuse a specification that is too large to send to other nodes.

    A job of one node sends nothing. Only the limits of the system apply to it.
    """
    size = len(json.dumps(spec.to_shared_json()))
    if size > MAX_SPEC_BYTES:
        raise UsageError(
            "the script's arguments and the --env variables of a job with several nodes must be"
            f" at most {MAX_SPEC_BYTES:,} bytes, got {size:,}",
            hint="put long values into a file that every node reads",
        )


def _check_stdin(
    spec: JobSpec, sources: Sources, *, is_controller: bool = False, workers: int = 0
) -> None:
    """
    Refuse ``--stdin`` if no such rank can read the standard input of this process.

    Args:
        is_controller: this process starts the agents of several nodes.
        workers: number of workers of a job of one node; 0: not known yet.
    """
    rank = spec.program.stdin
    if rank is None:
        return
    source = source_of(sources, "program.stdin", "--stdin")
    if is_controller:
        raise UsageError(
            "no worker can read standard input in a job that one command starts on several nodes",
            where=source,
            hint="use one node, or start pdrun on each node",
        )
    if workers and rank >= workers:
        raise UsageError(f"there is no rank {rank}; {describe_ranks(workers)}", where=source)


def spec_for_this_host(spec: JobSpec, facts: Facts, sources: Sources) -> tuple[JobSpec, Sources]:
    """
    Return the specification with node rank and devices of this machine's entry in the host list.

    Raises:
        UsageError: this machine is not in the list.
    """
    place = spec.place
    if not place.hosts or place.simulated:
        return spec, sources
    label = sources.get("place.hosts", "--hosts")
    rank = place.node_rank
    if rank is None:
        names = [host.name for host in place.hosts]
        rank = next((names.index(name) for name in facts.local_hosts), None)
        if rank is None:
            raise UsageError(
                f"{facts.hostname} is not among the {len(names)} host(s)",
                where=label,
                hint="pdrun env shows the names of this machine",
            )
        place = replace(place, node_rank=rank)
        sources = {**sources, "place.node_rank": label}
    devices = source_of(sources, "resources.devices", "--devices")
    resources = resources_on_host(
        spec.resources, place.hosts[rank], devices, exact=bool(place.rank_table)
    )
    if resources.devices != spec.resources.devices:
        sources = {**sources, "resources.devices": place.hosts[rank].where or label}
    return replace(spec, place=place, resources=resources), sources


def plan_simulated_nodes(plan: LaunchPlan, facts: Facts) -> tuple[LaunchPlan, ...]:
    """
    Return the plan of each node that a ``local`` plan simulates, in order. Each is checked like the
    plan of a real node.
    """
    count = plan.spec.resources.max_members
    return tuple(_plan_simulated_node(plan, facts, index, count) for index in range(count))


def _plan_simulated_node(
    local_plan: LaunchPlan, facts: Facts, index: int, count: int
) -> LaunchPlan:
    rank = None  # a spare has no node rank
    if index < local_plan.nodes:
        rank = index
    place = replace(
        local_plan.spec.place,
        simulated=(index, count),
        node_rank=rank,
        scheduler=local_plan.scheduler,
        node_name="",
    )
    return make_plan(replace(local_plan.spec, place=place), facts, local_plan.sources)


def choose_node_name(spec: JobSpec, facts: Facts) -> str:
    """
    Return the name of this node in the job: the user's choice, or the host name.

    The scheduler runs on the machine of node 0. A node rank above 0 on this machine means several
    nodes on one machine, as in a trial run, so the name gets the rank as a suffix.
    """
    place = spec.place
    if place.simulated:
        return f"node{place.simulated[0]}"
    if place.node_name:
        return place.node_name
    suffix = ""
    if place.node_rank and facts.is_scheduler_local:
        suffix = f"-{place.node_rank}"
    return make_name(facts.hostname) + suffix


def _check_startable(spec: JobSpec, facts: Facts, sources: Sources, mode: LaunchMode) -> None:
    """
    Refuse a program or log folder that cannot be used.

    A node that joins reports this to the scheduler instead, before any worker starts (preflight).
    """
    if mode == "join":
        return
    if facts.program_error:
        error = UsageError(facts.program_error)
        error.exit_code = facts.program_error_code or error.exit_code
        raise error
    if facts.log_error:
        raise _log_dir_error(spec, facts, source_of(sources, "output.log_dir", "--log-dir"))


def _log_dir_error(spec: JobSpec, facts: Facts, source: str) -> PdrunError:
    return ConfigError(
        f"{spec.output.log_dir!r} {facts.log_error}",
        where=source,
        hint="use another folder, or --no-files",
    )


def _place_simulated_nodes(spec: JobSpec, facts: Facts, sources: Sources) -> WorkerPlacement:
    """Check the placement of every simulated node and return that of the first one."""
    count = spec.resources.max_members
    placements = [
        place_workers(
            replace(spec, place=replace(spec.place, simulated=(index, count))), facts, sources
        )
        for index in range(count)
    ]
    return placements[0]


def _plan_workers(
    spec: JobSpec, facts: Facts, placement: WorkerPlacement, threads: tuple[int, ...]
) -> tuple[WorkerPlan, ...]:
    return tuple(
        WorkerPlan(
            local_rank=rank,
            argv=program_argv(spec.program, facts.python, rank, placement.devices_per_worker),
            device=placement.devices[rank] if placement.devices else None,
            cpus=placement.binding.sets[rank],
            threads=threads[rank],
            device_index=placement.grants[rank].index,
        )
        for rank in range(placement.workers)
    )


def _visibility_by_rank(placement: WorkerPlacement) -> dict[int, Mapping[str, str]]:
    return {
        rank: dict(grant.variables)
        for rank, grant in enumerate(placement.grants)
        if grant.variables
    }


def _base_environment(spec: JobSpec, facts: Facts) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the environment that workers inherit, and the names of the removed variables."""
    base, removed = remove_launcher_variables(facts.environ)
    if not spec.place.rank_table and base.pop("RANK_TABLE_FILE", ""):
        removed = tuple(sorted((*removed, "RANK_TABLE_FILE")))  # its ranks are not this job's
    if isinstance(spec.resources.threads, int):
        base.pop("OMP_NUM_THREADS", None)  # an explicit --threads overrides the variable
    return base, removed


def _name_interfaces(
    mode: LaunchMode,
    listen: str,
    facts: Facts,
    environ: Mapping[str, str],
    placement: WorkerPlacement,
) -> dict[str, str]:
    """Return the variables that name this node's interface; empty for a job of one node."""
    if mode in ("single", "local"):
        return {}
    return choose_interface_variables(
        listen,
        facts.addresses,
        facts.physical_interfaces,
        environ,
        placement.backend.name,
    )


def _facts_to_compare(spec: JobSpec, facts: Facts, backend: str) -> dict[str, str]:
    """Return the values that nodes compare when they join; unknown values are omitted."""
    known = {
        "command": format_command(spec),
        "script": facts.script_digest,
        "python": "" if spec.program.python else facts.python_version,
        "torch": facts.torch_version,
        "pdrun": facts.pdrun_version,
        "device": backend,
        "host": facts.hostname,
    }
    return {key: value for key, value in known.items() if value}
