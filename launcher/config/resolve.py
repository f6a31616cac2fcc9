"""
From wishes to one JobSpec: meanings that need two options at once, then the frozen specification
with its sources.

Pure. The pairs are few and stand one after another in `_DERIVED`: host and port of the scheduler,
msrun's two worker counts, torchrun's ``--redirects`` with ``--tee``, msrun's two ways of binding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdrun.endpoint import Endpoint, port_for
from pdrun.errors import UsageError
from pdrun.launcher.common.parsers import rank_text
from pdrun.launcher.config.aliases import MSRUN_PORT, TORCHRUN_PORT
from pdrun.launcher.config.job_key import job_key
from pdrun.launcher.config.settings import Level, Source, Wish, contradiction, settle
from pdrun.launcher.config.spec import (
    JobSpec,
    Output,
    Place,
    Policy,
    Program,
    Reach,
    Resources,
    Sources,
    field_paths,
)
from pdrun.launcher.hosts import selection as hosts
from pdrun.launcher.hosts.selection import Host
from pdrun.worker_env import refuse_owned

Settled = dict[str, Wish]
MSRUN_WORKERS = 8
"""msrun's default of both of its worker counts."""


@dataclass(frozen=True)
class Asked:
    """
    The specification, where each value came from, and what --explain says about the way to it.
    """

    spec: JobSpec
    sources: Sources
    notes: tuple[str, ...] = ()


def build(wishes: Iterable[Wish], notes: Iterable[str] = ()) -> Asked:
    """
    Return the specification that the wishes amount to.

    Raises:
        PdrunError: no program, a contradiction, or values that cannot stand together; names the
            places.
    """
    all_wishes = list(wishes)
    settled, _ = settle(all_wishes)
    said = list(notes)
    for derive in _DERIVED:
        more, new = derive(settled)
        all_wishes += more
        said += new
        settled, overridden = settle(all_wishes)
    return _met(Asked(_spec(settled), _sources(settled), (*said, *overridden)))


def _met(asked: Asked) -> Asked:
    """
    ``--launcher none`` with hosts: the same command runs on each, and they meet at the first one.
    """
    place = asked.spec.place
    if len(place.hosts) < 2 or place.launcher != "none" or place.scheduler or place.local:
        return asked
    meeting = Endpoint(place.hosts[0].reach, port_for(job_key(asked.spec)))
    spec = replace(asked.spec, place=replace(place, scheduler=meeting))
    note = f"{meeting} is the first host, with a port made from the job's name"
    return Asked(
        spec,
        {**asked.sources, "place.scheduler": asked.sources["place.hosts"]},
        (*asked.notes, note),
    )


Derived = tuple[Sequence[Wish], Sequence[str]]


def _hosts(settled: Settled) -> Derived:
    """
    The list of hosts, chosen from by ``--include`` and ``--exclude``, is the number of nodes.

    An allocation that was found is no wish: fewer ``--nodes`` take its first hosts, one node takes
    none.
    """
    whole = settled.get("hosts.all")
    nodes = settled.get("resources.nodes")
    chosen = settled.get("hosts.include")
    without = settled.get("hosts.exclude")
    if chosen and without:
        raise contradiction(without, chosen)
    choice = chosen or without
    if whole is None:
        if choice:
            raise choice.source.error(
                "chooses among hosts, and none are listed", "add --hosts or --hostfile"
            )
        return (), ()
    listed: tuple[Host, ...] = whole.value
    if choice:
        listed = _chosen(
            listed, choice, chosen is not None, _value(settled, "resources.devices", None)
        )
    found = whole.source.level is Level.FOUND
    if (
        nodes is not None
        and nodes.value != len(listed)
        and (nodes.value > len(listed) or not found)
    ):
        raise nodes.source.error(
            f"{nodes.value} node(s), but {len(listed)} host(s) by {whole.source.label}",
            "leave one of them out",
        )
    notes = []
    if nodes is not None and nodes.value < len(listed):
        notes = [
            f"{nodes.source.said()}: the first of the {len(listed)} hosts by {whole.source.label}"
        ]
        listed = listed[: nodes.value] if nodes.value > 1 else ()
    elif found and len(listed) == 1:
        listed = ()
    if not listed:
        return (), notes
    count = [] if nodes is not None else [Wish("resources.nodes", len(listed), whole.source)]
    return [Wish("place.hosts", listed, whole.source), *count], notes


def _chosen(
    listed: tuple[Host, ...], choice: Wish, only: bool, devices: object
) -> tuple[Host, ...]:
    label = choice.source.label
    try:
        if only:
            return hosts.include(listed, choice.value, label)
        return hosts.exclude(
            listed, choice.value, label, devices if isinstance(devices, int) else None
        )
    except UsageError as error:
        raise choice.source.blame(error) from None


def _standalone(settled: Settled) -> Derived:
    """
    torchrun passes over its endpoint when it is to stand alone; pdrun's own spellings contradict
    that.
    """
    alone = settled.get("torchrun.standalone")
    ours = [path for path in ("scheduler.host", "scheduler.port", "place.serve") if path in settled]
    for wish in (settled[path] for path in ours):
        own = wish.path == "place.serve" or wish.source.label in ("--scheduler", "PDRUN_SCHEDULER")
        if alone and own and wish.source.level <= alone.source.level:
            raise contradiction(alone, wish)
    return (), ()


def _scheduler(settled: Settled) -> Derived:
    """Put host and port together; a host alone gets the port that its launcher would have taken."""
    host = settled.get("scheduler.host")
    port = settled.get("scheduler.port")
    if alone := settled.get("torchrun.standalone"):
        said = dict.fromkeys(wish.source.said() for wish in (host, port) if wish)
        return (), [f"{text} is not used: {alone.source.said()} meets nobody" for text in said]
    if host is None:
        if port is not None and _nodes(settled) > 1 and not _value(settled, "place.local", False):
            raise port.source.error(
                "a port without a host", "add --master-addr with the first node's address"
            )
        return (), (
            [f"{port.source.said()} is not needed: nothing listens on a fixed port"] if port else []
        )
    if port is not None:
        return [Wish("place.scheduler", Endpoint(host.value, port.value), host.source)], ()
    number = (
        MSRUN_PORT
        if "msrun.workers" in settled or "msrun.local_workers" in settled
        else TORCHRUN_PORT
    )
    note = f"{host.source.said()} names no port; {number} is taken, as its launcher does"
    return [Wish("place.scheduler", Endpoint(host.value, number), host.source)], [note]


def _msrun_counts(settled: Settled) -> Derived:
    """
    ``--worker_num`` counts all workers, ``--local_worker_num`` those of a node: nodes is their
    quotient.
    """
    whole = settled.get("msrun.workers")
    local = settled.get("msrun.local_workers")
    given = whole or local
    if given is None:
        return (), ()
    notes = (
        []
        if whole and local
        else [f"msrun's default of {MSRUN_WORKERS} is taken for the other worker count"]
    )
    total = whole.value if whole else MSRUN_WORKERS
    each = local.value if local else MSRUN_WORKERS
    if (
        local is None
        and "resources.devices" in settled
        and settled["resources.devices"].value != "auto"
    ):
        each = settled["resources.devices"].value
    elif (
        local is None
        and "resources.nodes" in settled
        and total % settled["resources.nodes"].value == 0
    ):
        each = total // settled["resources.nodes"].value
    if not isinstance(each, int) or total % each:
        raise given.source.error(
            f"{total} workers do not divide into nodes of {each}",
            "give --worker_num (of the whole job) as a multiple of --local_worker_num (of each node)",
        )
    source = Source(given.source.label, given.source.level, given.source.text)
    per_node = local.source if local else source
    nodes = [Wish("resources.nodes", total // each, source), Wish("resources.min_nodes", 0, source)]
    return [*nodes, Wish("resources.devices", each, per_node)], notes


def _elastic(settled: Settled) -> Derived:
    """
    torchrun's ``--nnodes MIN:MAX`` takes late nodes in soon; its last_call_timeout is about such
    jobs alone.
    """
    if not _value(settled, "resources.min_nodes", 0):
        return (), ()
    pairs = (("torchrun.grow", "policy.grow"), ("torchrun.gather", "policy.gather"))
    said = [
        (settled[theirs], ours)
        for theirs, ours in pairs
        if theirs in settled and ours not in settled
    ]
    return [Wish(ours, wish.value, wish.source) for wish, ours in said], ()


def _binding(settled: Settled) -> Derived:
    """msrun's False means "do not", which only counts where the other does not say True."""
    pairs = (("msrun.bind_core", "cores"), ("msrun.bind_numa", "numa"))
    said = [(settled[path], word) for path, word in pairs if path in settled]
    true = [Wish("resources.bind", word, wish.source) for wish, word in said if wish.value]
    return true or [Wish("resources.bind", "none", wish.source) for wish, _ in said[:1]], ()


def _shown(settled: Settled) -> Derived:
    """
    torchrun's ``--redirects``, ``--tee`` and ``--local-ranks-filter``: which workers are seen on
    the terminal.

    A stream that is redirected and not teed goes to its file only. pdrun writes both streams of
    every worker to files anyway, and shows or hides a worker as a whole.
    """
    parts = [
        settled[path]
        for path in ("torchrun.redirects", "torchrun.tee", "torchrun.shown")
        if path in settled
    ]
    if not parts:
        return (), ()
    redirects = _value(settled, "torchrun.redirects", {"all": 0})
    tee = _value(settled, "torchrun.tee", {"all": 0})
    source = parts[0].source
    files = [
        Wish("output.files", True, part.source) for part in parts if part.path != "torchrun.shown"
    ]
    named = sorted({key for std in (redirects, tee) for key in std if key != "all"})
    hidden = {key: _hides(redirects, tee, key, source) for key in (*named, "all")}
    chosen = _value(settled, "torchrun.shown", None)
    per_node = _value(settled, "resources.devices", "auto")
    if chosen is None and not any(hidden.values()):
        return files, ()
    if chosen is None and not hidden["all"] and not isinstance(per_node, int):
        raise source.error(
            "needs to know how many workers a node has", "give --nproc-per-node as a number"
        )
    candidates = chosen if chosen is not None else named if hidden["all"] else range(per_node)
    local = [rank for rank in candidates if not hidden.get(rank, hidden["all"])]
    return [
        *files,
        Wish("output.show_ranks", _global(local, per_node, _nodes(settled), source), source),
    ], ()


def _hides(
    redirects: Mapping[Any, int], tee: Mapping[Any, int], rank: object, source: Source
) -> bool:
    gone = redirects.get(rank, redirects.get("all", 0)) & ~tee.get(rank, tee.get("all", 0))
    if gone in (1, 2):
        stream = "stdout" if gone == 1 else "stderr"
        raise source.error(
            f"hides {stream} alone, which is not supported: a worker is shown or hidden as a whole",
            "use 3 for both streams, or --show-ranks",
        )
    return gone == 3


def _global(local: Sequence[int], per_node: object, nodes: int, source: Source) -> str:
    """Return the global ranks that have these local ranks, as text for ``show_ranks``."""
    if not local:
        return "none"
    if nodes == 1:
        return rank_text(tuple(local))
    if not isinstance(per_node, int):
        raise source.error(
            "names local ranks of several nodes",
            "give --nproc-per-node as a number, or use --show-ranks",
        )
    return rank_text(
        tuple(node * per_node + rank for node in range(nodes) for rank in local if rank < per_node)
    )


_DERIVED: tuple[Callable[[Settled], Derived], ...] = (
    _hosts,
    _msrun_counts,
    _elastic,
    _standalone,
    _scheduler,
    _binding,
    _shown,
)


def _value(settled: Settled, path: str, default: Any) -> Any:
    return settled[path].value if path in settled else default


def _nodes(settled: Settled) -> int:
    return int(_value(settled, "resources.nodes", 1))


_GROUPS = ("program", "resources", "policy", "output", "place", "reach")


def _spec(settled: Settled) -> JobSpec:
    if "program.target" not in settled:
        raise UsageError(
            "no program to run", hint="write pdrun [OPTIONS] SCRIPT [ARGS]; see pdrun --help"
        )
    kinds: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
    kinds["program"]["kind"] = "script"
    single: dict[str, Any] = {}
    env: dict[str, str] = {}
    for path, wish in settled.items():
        group, _, name = path.partition(".")
        if group == "env":
            env[name] = wish.value
        elif group in kinds:
            kinds[group][name] = wish.value
        elif path in ("job", "chdir"):
            single[path] = wish.value
    _check(settled)
    return JobSpec(
        program=Program(**kinds["program"]),
        resources=Resources(**kinds["resources"]),
        policy=Policy(**kinds["policy"]),
        output=Output(**kinds["output"]),
        place=Place(**kinds["place"]),
        reach=Reach(**kinds["reach"]),
        env=env,
        **single,
    )


def _check(settled: Settled) -> None:
    """What no single value shows."""
    local = settled.get("place.local")
    nodes = _nodes(settled)
    if local and local.value:
        for path in (
            "place.scheduler",
            "place.node_rank",
            "place.serve",
            "place.interface",
            "place.node_name",
            "place.hosts",
            "place.rank_table",
        ):
            if path in settled and settled[path].source.level <= local.source.level:
                raise contradiction(settled[path], local)
    rank = settled.get("place.node_rank")
    serve = settled.get("place.serve")
    if rank and rank.value >= nodes:
        count = (
            settled["resources.nodes"].source.said() if "resources.nodes" in settled else "one node"
        )
        raise rank.source.error(
            f"{rank.value} is not a place among {nodes} node(s) ({count})", f"use 0 to {nodes - 1}"
        )
    apart = (
        serve is not None and serve.source.level is Level.FOUND
    )  # a launcher whose scheduler is no node of the job
    if rank and serve and serve.value != (rank.value == 0) and not apart:
        raise contradiction(serve, rank)
    _check_elastic(settled)
    _check_restarts(settled)
    launcher = settled.get("place.launcher")
    listed = {"hosts.all", "place.hosts"} & set(settled)
    if (
        launcher
        and launcher.value == "ssh"
        and not listed
        and launcher.source.level is not Level.ENVIRONMENT
    ):
        raise launcher.source.error(
            "ssh has no hosts to start agents on", "add --hosts a,b or --hostfile FILE"
        )
    for path, wish in settled.items():
        if path.startswith("env."):
            try:
                refuse_owned(path.removeprefix("env."), where=wish.source.label)
            except UsageError as error:
                raise wish.source.blame(error) from None
    name = settled.get("output.log_name")
    if (
        name
        and nodes > 1
        and "{rank}" not in name.value
        and "{node}" not in name.value
        and "{host" not in name.value
    ):
        raise name.source.error(f"{name.value!r} is the same on every node", "add {rank} or {node}")


def _check_elastic(settled: Settled) -> None:
    least = _value(settled, "resources.min_nodes", 0)
    elastic = 0 < least < _nodes(settled)
    for path in ("policy.gather", "policy.grow"):
        wish = settled.get(path)
        if wish and not elastic and wish.source.level is Level.COMMAND:
            raise wish.source.error("is about jobs that change their size", "write --nodes MIN:MAX")


def _check_restarts(settled: Settled) -> None:
    """
    What is about restarts needs some: 0 is the default, and said in words it switches them off on
    purpose.
    """
    for path in (
        "policy.restart_on",
        "policy.no_restart_on",
        "policy.restart_window",
        "policy.backoff",
    ):
        wish = settled.get(path)
        if wish and wish.source.level is Level.COMMAND and "policy.max_restarts" not in settled:
            raise wish.source.error(
                "is about restarts, and none are allowed", "add --max-restarts N"
            )
    only = settled.get("policy.restart_on")
    never = settled.get("policy.no_restart_on")
    both = sorted(
        {*_value(settled, "policy.restart_on", ())} & {*_value(settled, "policy.no_restart_on", ())}
    )
    if only and never and both:
        raise never.source.error(
            f"{never.source.text} contradicts {only.source.said()}: code {both[0]} is in both"
        )


def _sources(settled: Settled) -> dict[str, str]:
    """Return a place for every field of the specification, and for every variable of ``--env``."""
    labels = {path: wish.source.label for path, wish in settled.items()}
    if not _value(
        settled, "resources.min_nodes", 0
    ):  # one number was said: the least follows from the most
        labels.pop("resources.min_nodes", None)
    variables = {path: label for path, label in labels.items() if path.startswith("env.")}
    sources = {path: labels.get(path, "default") for path in field_paths()}
    if variables:
        sources["env"] = ", ".join(dict.fromkeys(variables.values()))
    return {**sources, **variables}
