"""
Which node runs the scheduler, its address, and the address of this node's own sockets. Pure.

The first rule that applies:

1. One node: no scheduler process, nothing listens.
2. ``--local``: the scheduler listens on loopback.
3. ``--scheduler HOST:PORT``: this node runs the scheduler with ``--serve`` or as node 0, or if HOST
   is this machine and no node ranks are set. Otherwise it joins.
4. No address: this node runs the scheduler and prints the command for the other nodes.
"""

from __future__ import annotations

from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.config.spec import JobSpec, Sources, source_of
from pdrun.launcher.plan.model import Facts, LaunchMode, StoreListener
from pdrun.quick_dataclass import dataclass

LOOPBACK_ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class SchedulerChoice:
    """Where the scheduler is, and what this node does about it."""

    mode: LaunchMode
    scheduler: Endpoint | None
    """head: where the scheduler listens. join: where to connect."""
    listen: str
    """Address of this node's own listening sockets."""
    reasons: tuple[str, ...] = ()
    """Notes for ``--explain``."""


def choose_scheduler(spec: JobSpec, facts: Facts, sources: Sources) -> SchedulerChoice:
    """
    Decide whether this node runs the scheduler, and where the scheduler and this node listen.

    Raises:
        UsageError: the node has to join a scheduler, but its address is not known.
        ConfigError: this machine has no address that other machines can reach.
    """
    place = spec.place
    scheduler = place.scheduler
    members = spec.resources.max_members
    if place.simulated is not None:
        index, _ = place.simulated
        mode: LaunchMode = "head" if index == 0 else "join"
        return SchedulerChoice(mode, scheduler or Endpoint(LOOPBACK_ADDRESS, 0), LOOPBACK_ADDRESS)
    if place.local and members > 1:
        return _choose_loopback(spec, sources)
    is_served_here = place.serve is True
    is_joining = place.serve is False and scheduler is not None
    if members == 1 and (place.local or not (is_served_here or is_joining)):
        reasons = ["one node: the scheduler is part of this process and nothing listens"]
        if scheduler:
            reasons.append(f"{sources.get('place.scheduler')} {scheduler} is not used")
        return SchedulerChoice("single", None, LOOPBACK_ADDRESS, tuple(reasons))
    listen = choose_listen_address(spec, facts, sources)
    if scheduler is None:
        return _choose_without_address(spec, sources, listen)
    runs_scheduler, reason = _runs_scheduler(spec, scheduler, facts, sources)
    if runs_scheduler:
        return _choose_head(scheduler, facts, listen, reason)
    if scheduler.port == 0:
        raise UsageError(
            f"{scheduler} must have a port other than 0 on a node that joins",
            where=sources.get("place.scheduler", "--scheduler"),
            hint="use the port that the first node printed",
        )
    if facts.is_loopback_name:
        scheduler = Endpoint(listen, scheduler.port)
    return SchedulerChoice("join", scheduler, listen, (reason, facts.scheduler_error))


def _choose_loopback(spec: JobSpec, sources: Sources) -> SchedulerChoice:
    reasons = ["all nodes are simulated on this machine, on loopback only"]
    if spec.place.scheduler:
        reasons.append(f"{sources.get('place.scheduler')} is not used: --local uses loopback")
    return SchedulerChoice("local", Endpoint(LOOPBACK_ADDRESS, 0), LOOPBACK_ADDRESS, tuple(reasons))


def _choose_head(scheduler: Endpoint, facts: Facts, listen: str, reason: str) -> SchedulerChoice:
    """This node runs the scheduler: listen on the named address if other machines can use it."""
    problem = ""
    if facts.is_loopback_name:
        problem = f"{scheduler.host} is a loopback address on this machine"
    elif facts.is_scheduler_local is False:
        problem = f"{scheduler.host} is not an address of this machine"
    if not problem:
        return SchedulerChoice("head", scheduler, listen, (reason,))
    note = f"{problem}: the scheduler listens on {listen} instead"
    return SchedulerChoice("head", Endpoint(listen, scheduler.port), listen, (reason, note))


def _choose_without_address(spec: JobSpec, sources: Sources, listen: str) -> SchedulerChoice:
    """Without ``--scheduler`` this node runs the scheduler, unless another option excludes it."""
    rank = spec.place.node_rank
    if spec.place.serve is False or rank not in (None, 0):
        option = "--no-serve"
        if rank not in (None, 0):
            option = f"--node-rank {rank}"
        raise UsageError(
            f"{option} joins another node, but the scheduler's address is not set",
            where=sources.get("resources.nodes", "--nodes"),
            hint="add --scheduler HOST:PORT",
        )
    reason = "no --scheduler: this node runs the scheduler and prints the command for other nodes"
    return SchedulerChoice("head", Endpoint(listen, 0), listen, (reason,))


def _runs_scheduler(
    spec: JobSpec, scheduler: Endpoint, facts: Facts, sources: Sources
) -> tuple[bool, str]:
    """Return whether this node runs the scheduler, and why."""
    place = spec.place
    if place.serve is not None:
        option = sources.get("place.serve", "--serve")
        return place.serve, f"{option} decides whether this node runs the scheduler"
    if place.node_rank == 0 and facts.is_scheduler_local is False and not facts.is_loopback_name:
        return (
            False,
            f"node rank 0, but {scheduler} is another machine: join it"
            " (--serve: run the scheduler here)",
        )
    if place.node_rank is not None:
        return place.node_rank == 0, f"node rank {place.node_rank}: node 0 runs the scheduler"
    if facts.is_scheduler_local:
        return (
            True,
            f"{scheduler} is on this machine: run the scheduler here, or join one that runs there",
        )
    return False, f"{scheduler} is another machine: join it"


def choose_store(
    spec: JobSpec, facts: Facts, sources: Sources, choice: SchedulerChoice
) -> StoreListener | None:
    """
    Return where node 0 serves torch's store by the user's choice; None on every other node.

    In a job of one node, a port that the script contains is such a choice. torchrun serves its own
    default port there.

    Raises:
        ConfigError: the host is not this machine, which is node 0.
    """
    place = spec.place
    if place.store is None and choice.mode == "single" and facts.script_store_port:
        endpoint = Endpoint(choice.listen, facts.script_store_port)
        return StoreListener(endpoint, facts.script_store_source, is_required=False)
    if place.store is None or not serves_store(spec, choice.mode):
        return None
    source = source_of(sources, "place.store", "--master-addr")
    host = place.store.host
    if host in ("0.0.0.0", "::"):
        host = ""
    is_forwarded = place.serve is True and place.scheduler and place.scheduler.host == host
    if host and facts.is_store_local is False and not is_forwarded:
        what = "node 0"
        hint = "use an address of node 0"
        if spec.resources.nodes == 1:
            what = "the only node of the job"
            hint = "set the number of nodes (--nodes), or unset it for a job on this machine"
        raise ConfigError(
            f"torch's store cannot listen on {host}: it is not an address of this machine"
            f" ({facts.hostname}), which is {what}",
            where=source,
            hint=hint,
        )
    is_usable = choice.mode in ("single", "local") or not facts.is_store_loopback
    address = choice.listen
    if host and is_usable and (facts.is_store_local or choice.mode in ("head", "join")):
        address = host
    return StoreListener(Endpoint(address, place.store.port), source)


def serves_store(spec: JobSpec, mode: LaunchMode) -> bool:
    """
    Return whether this node is node 0: by its rank, or because it runs the scheduler and no node
    has a rank.
    """
    if mode in ("hosts", "external"):
        return False
    if mode == "join":
        return spec.place.node_rank == 0
    return spec.place.node_rank in (None, 0)


def choose_listen_address(spec: JobSpec, facts: Facts, sources: Sources) -> str:
    """Return the address on which this node's own sockets listen. It is never a wildcard."""
    interface = spec.place.interface
    if interface:
        for name, address in facts.addresses:
            if interface in (name, address):
                return address
        known = ", ".join(dict.fromkeys(name for name, _ in facts.addresses))
        raise UsageError(
            f"{interface!r} is not an interface or address of this machine",
            where=sources.get("place.interface", "--interface"),
            hint=f"interfaces: {known}",
        )
    if facts.route_address:
        return facts.route_address
    if facts.scheduler_error:
        field = "place.scheduler" if spec.place.scheduler else "place.hosts"
        raise ConfigError(
            facts.scheduler_error,
            where=sources.get(field, "--scheduler"),
            hint="check the name, or use the address",
        )
    raise ConfigError(
        "this machine has no route to other machines",
        hint="set an address with --interface, or use --local",
    )
