"""
The plan: everything that will be done on this node, decided before anything is done.

`plan` is a pure function of what was asked and what is true; `--dry-run` prints the very object
that is executed. How the scheduler is found, first hit wins: one node needs none; ``--local`` has
it on loopback; ``--scheduler`` says where (this node runs it when it is told to, or when that host
is this machine and no other node is node 0). Without it this node is the first and prints the line
that the others need. Nothing ever falls back to a smaller job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from pdrun.errors import ConfigError, PdrunError, UsageError
from pdrun.launcher.config.job_key import format_command, make_job_key
from pdrun.launcher.config.spec import JobSpec, Sources, source_of
from pdrun.launcher.plan import external as through
from pdrun.launcher.plan import hosts as fan
from pdrun.launcher.plan.environment import remove_launcher_variables
from pdrun.launcher.plan.model import Facts, LaunchPlan, Mode, WorkerPlan
from pdrun.launcher.plan.placement import (
    Placement,
    choose_threads,
    place_workers,
    resources_on_host,
)
from pdrun.launcher.plan.program import program_argv
from pdrun.launcher.plan.scheduler_address import choose_scheduler
from pdrun.launcher.plan.start_method import choose_start_method
from pdrun.names import make_name

MAX_SPEC_BYTES = (1 << 20) - (1 << 16)
"""
Bytes of a specification that fit into a message of the rendezvous, with what stands around them
there.
"""


def make_plan(
    spec: JobSpec, facts: Facts, sources: Sources, notes: tuple[str, ...] = ()
) -> LaunchPlan:
    """
    Decide what this node does. Pure: equal arguments give equal plans.

    Args:
        notes: what was found on the way to the specification; goes into the plan's own notes.

    Raises:
        UsageError: what was asked for cannot be, with its place; a program that is not there has
            its shell's code.
        ConfigError: this machine cannot do it.
    """
    started = through.external_launcher_for(spec, sources)
    if (
        started
        or max(spec.resources.max_members, len(spec.place.hosts)) > 1
        or spec.place.serve is not None
    ):
        _check_spec_size(spec)
    if started:
        return through.plan_external(spec, facts, sources, make_job_key(spec), notes)
    if fan.uses_ssh(spec):
        return fan.plan_hosts(spec, facts, sources, make_job_key(spec), notes)
    spec, sources = spec_for_this_host(spec, facts, sources)
    mode, scheduler, listen, reasons = choose_scheduler(spec, facts, sources)
    _check_startable(spec, facts, sources, mode)
    placement = (
        place_workers(spec, facts, sources)
        if mode != "local"
        else _place_simulated_nodes(spec, facts, sources)
    )
    counts, thread_note = choose_threads(spec, facts.environ, placement.binding)
    base, scrubbed = _base_environment(spec, facts)
    visibility = {} if mode == "local" else _visibility_by_rank(placement)
    return LaunchPlan(
        mode=mode,
        job=make_job_key(spec),
        node=choose_node_name(spec, facts),
        nodes=spec.resources.nodes,
        spec=spec,
        sources=sources,
        workers=() if mode == "local" else _plan_workers(spec, facts, placement, counts),
        backend=placement.backend.name,
        backend_reason=placement.reason,
        visibility=visibility,
        collective=placement.backend.collective,
        base_env=base,
        removed=scrubbed,
        scheduler=scheduler,
        listen=listen,
        cwd=facts.cwd,
        compared=_facts_to_compare(spec, facts, placement.backend.name),
        notes=tuple(
            filter(None, (*notes, *reasons, *placement.notes, placement.binding.note, thread_note))
        ),
        start_method=choose_start_method(spec, facts, sources, {**base, **spec.env}, visibility),
    )


def _check_spec_size(spec: JobSpec) -> None:
    """
    Refuse what no node could be told. Within one node nothing is sent, and the system's own limits
    count.
    """
    size = len(json.dumps(spec.to_shared_json()))
    if size > MAX_SPEC_BYTES:
        raise UsageError(
            f"the script's arguments and the variables of --env make {size:,} bytes, of which nodes can be told "
            f"{MAX_SPEC_BYTES:,}",
            hint="put what is long into a file that every node reads",
        )


def spec_for_this_host(spec: JobSpec, facts: Facts, sources: Sources) -> tuple[JobSpec, Sources]:
    """
    Return the specification of the node that this machine is among the listed hosts: its rank and
    its devices.

    Raises:
        UsageError: it is none of them.
    """
    where = spec.place
    if not where.hosts or where.simulated:
        return spec, sources
    label = sources.get("place.hosts", "--hosts")
    rank = where.node_rank
    if rank is None:
        names = [host.name for host in where.hosts]
        rank = next((names.index(name) for name in facts.local_hosts), None)
        if rank is None:
            raise UsageError(
                f"{facts.hostname} is none of the {len(names)} host(s)",
                where=label,
                hint="see pdrun env for its names",
            )
        where = replace(where, node_rank=rank)
        sources = {**sources, "place.node_rank": label}
    devices = source_of(sources, "resources.devices", "--devices")
    resources = resources_on_host(
        spec.resources, where.hosts[rank], devices, exact=bool(where.rank_table)
    )
    if resources.devices != spec.resources.devices:
        sources = {**sources, "resources.devices": where.hosts[rank].where or label}
    return replace(spec, place=where, resources=resources), sources


def plan_simulated_nodes(plan: LaunchPlan, facts: Facts) -> tuple[LaunchPlan, ...]:
    """
    Return the plan of each node that a ``local`` plan simulates, in order; all are as strict as a
    real one.
    """
    count = plan.spec.resources.max_members
    return tuple(_plan_simulated_node(plan, facts, index, count) for index in range(count))


def _plan_simulated_node(whole: LaunchPlan, facts: Facts, index: int, count: int) -> LaunchPlan:
    rank = index if index < whole.nodes else None  # a spare has no place of its own
    place = replace(
        whole.spec.place,
        simulated=(index, count),
        node_rank=rank,
        scheduler=whole.scheduler,
        node_name="",
    )
    return make_plan(replace(whole.spec, place=place), facts, whole.sources)


def choose_node_name(spec: JobSpec, facts: Facts) -> str:
    """
    Return the name of this node in the job: what the user said, else the host's.

    A node rank above 0 on the machine of the scheduler, which is node 0's, means several nodes on
    one machine, as they are started to try things out: such a node's name carries its rank.
    """
    where = spec.place
    if where.simulated:
        return f"node{where.simulated[0]}"
    rank = f"-{where.node_rank}" if where.node_rank and facts.is_scheduler_local else ""
    return where.node_name or make_name(facts.hostname) + rank


def _check_startable(spec: JobSpec, facts: Facts, sources: Sources, mode: Mode) -> None:
    """
    Refuse what cannot start. A node that joins says so to the job instead, before anything runs
    (preflight).
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
        hint="use another, or --no-files",
    )


def _place_simulated_nodes(spec: JobSpec, facts: Facts, sources: Sources) -> Placement:
    """Check every simulated node's placement, and return the first one's."""
    count = spec.resources.max_members
    placements = [
        place_workers(
            replace(spec, place=replace(spec.place, simulated=(index, count))), facts, sources
        )
        for index in range(count)
    ]
    return placements[0]


def _plan_workers(
    spec: JobSpec, facts: Facts, placement: Placement, threads: tuple[int, ...]
) -> tuple[WorkerPlan, ...]:
    argv = program_argv(spec.program, facts.python)
    return tuple(
        WorkerPlan(
            local_rank=rank,
            argv=argv,
            device=placement.devices[rank] if placement.devices else None,
            cpus=placement.binding.sets[rank],
            threads=threads[rank],
            device_index=placement.grants[rank].index,
        )
        for rank in range(placement.workers)
    )


def _visibility_by_rank(placement: Placement) -> dict[int, Mapping[str, str]]:
    return {
        rank: dict(grant.variables)
        for rank, grant in enumerate(placement.grants)
        if grant.variables
    }


def _base_environment(spec: JobSpec, facts: Facts) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return what workers inherit, and what was taken out."""
    base, scrubbed = remove_launcher_variables(facts.environ)
    if isinstance(spec.resources.threads, int):
        base.pop(
            "OMP_NUM_THREADS", None
        )  # an explicit --threads counts before the inherited variable
    return base, scrubbed


def _facts_to_compare(spec: JobSpec, facts: Facts, backend: str) -> dict[str, str]:
    """Return what nodes compare when they meet; what is not known here is left out."""
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
