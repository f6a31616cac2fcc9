"""
Where the scheduler listens, whether this node runs it, and where this node's sockets listen. Pure.
"""

from __future__ import annotations

from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.config.spec import JobSpec, Sources
from pdrun.launcher.plan.model import Facts, Mode

LOOPBACK_ADDRESS = "127.0.0.1"


SchedulerChoice = tuple[Mode, Endpoint | None, str, tuple[str, ...]]
"""Mode, scheduler, the address to listen on, and why."""


def choose_scheduler(spec: JobSpec, facts: Facts, sources: Sources) -> SchedulerChoice:
    """
    Return the mode of this node, the scheduler, the address to listen on, and why.

    Raises:
        UsageError: the node has to join a scheduler, and no address says where it is.
        ConfigError: this machine has no address that others can reach.
    """
    where = spec.place
    nodes = spec.resources.max_members
    if where.simulated is not None:
        index, _ = where.simulated
        return (
            "first" if index == 0 else "join",
            where.scheduler or Endpoint(LOOPBACK_ADDRESS, 0),
            LOOPBACK_ADDRESS,
            (),
        )
    if where.local and nodes > 1:
        why = (
            f"{sources.get('place.scheduler')} is not used: --local meets on loopback"
            if where.scheduler
            else ""
        )
        return (
            "local",
            Endpoint(LOOPBACK_ADDRESS, 0),
            LOOPBACK_ADDRESS,
            ("all nodes are simulated here, on loopback only", why),
        )
    if nodes == 1 and (
        where.local or where.serve is None or (where.serve is False and where.scheduler is None)
    ):
        why = "one node: the scheduler is part of this process and nothing listens"
        unused = (
            (f"{sources.get('place.scheduler')} {where.scheduler} is not used",)
            if where.scheduler
            else ()
        )
        return "alone", None, LOOPBACK_ADDRESS, (why, *unused)
    listen = choose_listen_address(spec, facts, sources)
    if where.scheduler is None:
        return _choose_unnamed(spec, sources, listen)
    serves, why = _runs_scheduler(spec, facts, sources)
    if not serves:
        if where.scheduler.port == 0:
            raise UsageError(
                f"{where.scheduler} has port 0, which only the first node can choose",
                where=sources.get("place.scheduler", "--scheduler"),
                hint="give the port that it printed",
            )
        meant = (
            Endpoint(listen, where.scheduler.port) if facts.is_loopback_name else where.scheduler
        )
        return "join", meant, listen, (why, facts.scheduler_error)
    if facts.is_loopback_name:
        outer = f"{where.scheduler.host} is loopback here, where nobody else comes: listening on {listen} in its place"
        return "first", Endpoint(listen, where.scheduler.port), listen, (why, outer)
    if facts.is_scheduler_local is False:
        outer = f"{where.scheduler.host} is not an address of this machine: listening on {listen} in its place"
        return "first", Endpoint(listen, where.scheduler.port), listen, (why, outer)
    return "first", where.scheduler, listen, (why,)


def _choose_unnamed(spec: JobSpec, sources: Sources, listen: str) -> SchedulerChoice:
    """No scheduler was named: this node is the first one, unless that contradicts what was said."""
    rank = spec.place.node_rank
    if spec.place.serve is False or rank not in (None, 0):
        words = f"--node-rank {rank}" if rank not in (None, 0) else "--no-serve"
        raise UsageError(
            f"{words} joins another node, but nothing says where that is",
            where=sources.get("resources.nodes", "--nodes"),
            hint="add --scheduler HOST:PORT",
        )
    why = "no scheduler was named: this node is the first, and prints the line to run on the others"
    return "first", Endpoint(listen, 0), listen, (why,)


def _runs_scheduler(spec: JobSpec, facts: Facts, sources: Sources) -> tuple[bool, str]:
    """Return whether this node runs the scheduler, and why."""
    where = spec.place
    if where.serve is not None:
        return (
            where.serve,
            f"{sources.get('place.serve', '--serve')} decides whether this node runs the scheduler",
        )
    if where.node_rank == 0 and facts.is_scheduler_local is False and not facts.is_loopback_name:
        return (
            False,
            f"node rank 0, but {where.scheduler} is another machine: join it (--serve: run it here)",
        )
    if where.node_rank is not None:
        return where.node_rank == 0, f"node rank {where.node_rank}: node 0 runs the scheduler"
    if facts.is_scheduler_local:
        return (
            True,
            f"{where.scheduler} is on this machine: run the scheduler here, or join where it already runs",
        )
    return False, f"{where.scheduler} is another machine: join it"


def choose_listen_address(spec: JobSpec, facts: Facts, sources: Sources) -> str:
    """Return the one address on which this node's own sockets listen; never all of them."""
    wanted = spec.place.interface
    source = sources.get("place.interface", "--interface")
    if not wanted:
        if facts.route_address:
            return facts.route_address
        if facts.scheduler_error:
            raise ConfigError(
                facts.scheduler_error,
                where=sources.get(
                    "place.scheduler" if spec.place.scheduler else "place.hosts", "--scheduler"
                ),
                hint="check it, or give the address",
            )
        raise ConfigError(
            "this machine has no route to other machines",
            hint="name an address with --interface, or use --local",
        )
    found = [address for name, address in facts.addresses if wanted in (name, address)]
    if found:
        return found[0]
    known = ", ".join(dict.fromkeys(name for name, _ in facts.addresses))
    raise UsageError(
        f"{wanted!r} is no interface or address of this machine",
        where=source,
        hint=f"there are {known}",
    )
