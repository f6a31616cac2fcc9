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

from pdrun.endpoint import Endpoint, port_for_job
from pdrun.errors import UsageError
from pdrun.launcher.common.parsers import rank_text
from pdrun.launcher.config.aliases import MSRUN_PORT, TORCHRUN_PORT
from pdrun.launcher.config.job_key import make_job_key
from pdrun.launcher.config.settings import Priority, Source, Setting, conflict_error, resolve_conflicts
from pdrun.launcher.config.spec import (
    JobSpec,
    Output,
    ClusterOptions,
    Policy,
    Program,
    RemoteOptions,
    Resources,
    Sources,
    list_field_paths,
)
from pdrun.launcher.hosts import selection as hosts
from pdrun.launcher.hosts.selection import Host
from pdrun.worker_env import refuse_reserved

SettingsByPath = dict[str, Setting]
MSRUN_DEFAULT_WORKERS = 8
"""msrun's default of both of its worker counts."""


@dataclass(frozen=True)
class ResolvedSpec:
    """
    The specification, where each value came from, and what --explain says about the way to it.
    """

    spec: JobSpec
    sources: Sources
    notes: tuple[str, ...] = ()


def resolve_spec(wishes: Iterable[Setting], notes: Iterable[str] = ()) -> ResolvedSpec:
    """
    Return the specification that the wishes amount to.

    Raises:
        PdrunError: no program, a contradiction, or values that cannot stand together; names the
            places.
    """
    all_wishes = list(wishes)
    settled, _ = resolve_conflicts(all_wishes)
    said = list(notes)
    for derive in _RESOLVERS:
        more, new = derive(settled)
        all_wishes += more
        said += new
        settled, overridden = resolve_conflicts(all_wishes)
    return _with_default_scheduler(ResolvedSpec(_build_spec(settled), _collect_sources(settled), (*said, *overridden)))


def _with_default_scheduler(asked: ResolvedSpec) -> ResolvedSpec:
    """
    ``--launcher none`` with hosts: the same command runs on each, and they meet at the first one.
    """
    place = asked.spec.place
    if len(place.hosts) < 2 or place.launcher != "none" or place.scheduler or place.local:
        return asked
    meeting = Endpoint(place.hosts[0].reach, port_for_job(make_job_key(asked.spec)))
    spec = replace(asked.spec, place=replace(place, scheduler=meeting))
    note = f"{meeting} is the first host, with a port made from the job's name"
    return ResolvedSpec(
        spec,
        {**asked.sources, "place.scheduler": asked.sources["place.hosts"]},
        (*asked.notes, note),
    )


DerivedSettings = tuple[Sequence[Setting], Sequence[str]]


def _resolve_hosts(settled: SettingsByPath) -> DerivedSettings:
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
        raise conflict_error(without, chosen)
    choice = chosen or without
    if whole is None:
        if choice:
            raise choice.source.make_error(
                "chooses among hosts, and none are listed", "add --hosts or --hostfile"
            )
        return (), ()
    listed: tuple[Host, ...] = whole.value
    if choice:
        listed = _filter_hosts(
            listed, choice, chosen is not None, _value_of(settled, "resources.devices", None)
        )
    found = whole.source.priority is Priority.DETECTED
    if (
        nodes is not None
        and nodes.value != len(listed)
        and (nodes.value > len(listed) or not found)
    ):
        raise nodes.source.make_error(
            f"{nodes.value} node(s), but {len(listed)} host(s) by {whole.source.label}",
            "leave one of them out",
        )
    notes = []
    if nodes is not None and nodes.value < len(listed):
        notes = [
            f"{nodes.source.describe()}: the first of the {len(listed)} hosts by {whole.source.label}"
        ]
        listed = listed[: nodes.value] if nodes.value > 1 else ()
    elif found and len(listed) == 1:
        listed = ()
    if not listed:
        return (), notes
    count = [] if nodes is not None else [Setting("resources.nodes", len(listed), whole.source)]
    return [Setting("place.hosts", listed, whole.source), *count], notes


def _filter_hosts(
    listed: tuple[Host, ...], choice: Setting, only: bool, devices: object
) -> tuple[Host, ...]:
    label = choice.source.label
    try:
        if only:
            return hosts.include(listed, choice.value, label)
        return hosts.exclude(
            listed, choice.value, label, devices if isinstance(devices, int) else None
        )
    except UsageError as error:
        raise choice.source.convert_error(error) from None


def _check_standalone(settled: SettingsByPath) -> DerivedSettings:
    """
    torchrun passes over its endpoint when it is to stand alone; pdrun's own spellings contradict
    that.
    """
    alone = settled.get("torchrun.standalone")
    ours = [path for path in ("scheduler.host", "scheduler.port", "place.serve") if path in settled]
    for wish in (settled[path] for path in ours):
        own = wish.path == "place.serve" or wish.source.label in ("--scheduler", "PDRUN_SCHEDULER")
        if alone and own and wish.source.priority <= alone.source.priority:
            raise conflict_error(alone, wish)
    return (), ()


def _resolve_scheduler(settled: SettingsByPath) -> DerivedSettings:
    """Put host and port together; a host alone gets the port that its launcher would have taken."""
    host = settled.get("scheduler.host")
    port = settled.get("scheduler.port")
    if alone := settled.get("torchrun.standalone"):
        said = dict.fromkeys(wish.source.describe() for wish in (host, port) if wish)
        return (), [f"{text} is not used: {alone.source.describe()} meets nobody" for text in said]
    if host is None:
        if port is not None and _node_count(settled) > 1 and not _value_of(settled, "place.local", False):
            raise port.source.make_error(
                "a port without a host", "add --master-addr with the first node's address"
            )
        return (), (
            [f"{port.source.describe()} is not needed: nothing listens on a fixed port"] if port else []
        )
    if port is not None:
        return [Setting("place.scheduler", Endpoint(host.value, port.value), host.source)], ()
    number = (
        MSRUN_PORT
        if "msrun.workers" in settled or "msrun.local_workers" in settled
        else TORCHRUN_PORT
    )
    note = f"{host.source.describe()} names no port; {number} is taken, as its launcher does"
    return [Setting("place.scheduler", Endpoint(host.value, number), host.source)], [note]


def _resolve_msrun_counts(settled: SettingsByPath) -> DerivedSettings:
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
        else [f"msrun's default of {MSRUN_DEFAULT_WORKERS} is taken for the other worker count"]
    )
    total = whole.value if whole else MSRUN_DEFAULT_WORKERS
    each = local.value if local else MSRUN_DEFAULT_WORKERS
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
        raise given.source.make_error(
            f"{total} workers do not divide into nodes of {each}",
            "give --worker_num (of the whole job) as a multiple of --local_worker_num (of each node)",
        )
    source = Source(given.source.label, given.source.priority, given.source.text)
    per_node = local.source if local else source
    nodes = [Setting("resources.nodes", total // each, source), Setting("resources.min_nodes", 0, source)]
    return [*nodes, Setting("resources.devices", each, per_node)], notes


def _resolve_elastic(settled: SettingsByPath) -> DerivedSettings:
    """
    torchrun's ``--nnodes MIN:MAX`` takes late nodes in soon; its last_call_timeout is about such
    jobs alone.
    """
    if not _value_of(settled, "resources.min_nodes", 0):
        return (), ()
    pairs = (("torchrun.grow", "policy.grow"), ("torchrun.gather", "policy.gather"))
    said = [
        (settled[theirs], ours)
        for theirs, ours in pairs
        if theirs in settled and ours not in settled
    ]
    return [Setting(ours, wish.value, wish.source) for wish, ours in said], ()


def _resolve_binding(settled: SettingsByPath) -> DerivedSettings:
    """msrun's False means "do not", which only counts where the other does not say True."""
    pairs = (("msrun.bind_core", "cores"), ("msrun.bind_numa", "numa"))
    said = [(settled[path], word) for path, word in pairs if path in settled]
    true = [Setting("resources.bind", word, wish.source) for wish, word in said if wish.value]
    return true or [Setting("resources.bind", "none", wish.source) for wish, _ in said[:1]], ()


def _resolve_shown_ranks(settled: SettingsByPath) -> DerivedSettings:
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
    redirects = _value_of(settled, "torchrun.redirects", {"all": 0})
    tee = _value_of(settled, "torchrun.tee", {"all": 0})
    source = parts[0].source
    files = [
        Setting("output.files", True, part.source) for part in parts if part.path != "torchrun.shown"
    ]
    named = sorted({key for std in (redirects, tee) for key in std if key != "all"})
    hidden = {key: _is_hidden(redirects, tee, key, source) for key in (*named, "all")}
    chosen = _value_of(settled, "torchrun.shown", None)
    per_node = _value_of(settled, "resources.devices", "auto")
    if chosen is None and not any(hidden.values()):
        return files, ()
    if chosen is None and not hidden["all"] and not isinstance(per_node, int):
        raise source.make_error(
            "needs to know how many workers a node has", "give --nproc-per-node as a number"
        )
    candidates = chosen if chosen is not None else named if hidden["all"] else range(per_node)
    local = [rank for rank in candidates if not hidden.get(rank, hidden["all"])]
    return [
        *files,
        Setting("output.show_ranks", _format_global_ranks(local, per_node, _node_count(settled), source), source),
    ], ()


def _is_hidden(
    redirects: Mapping[Any, int], tee: Mapping[Any, int], rank: object, source: Source
) -> bool:
    gone = redirects.get(rank, redirects.get("all", 0)) & ~tee.get(rank, tee.get("all", 0))
    if gone in (1, 2):
        stream = "stdout" if gone == 1 else "stderr"
        raise source.make_error(
            f"hides {stream} alone, which is not supported: a worker is shown or hidden as a whole",
            "use 3 for both streams, or --show-ranks",
        )
    return gone == 3


def _format_global_ranks(local: Sequence[int], per_node: object, nodes: int, source: Source) -> str:
    """Return the global ranks that have these local ranks, as text for ``show_ranks``."""
    if not local:
        return "none"
    if nodes == 1:
        return rank_text(tuple(local))
    if not isinstance(per_node, int):
        raise source.make_error(
            "names local ranks of several nodes",
            "give --nproc-per-node as a number, or use --show-ranks",
        )
    return rank_text(
        tuple(node * per_node + rank for node in range(nodes) for rank in local if rank < per_node)
    )


_RESOLVERS: tuple[Callable[[SettingsByPath], DerivedSettings], ...] = (
    _resolve_hosts,
    _resolve_msrun_counts,
    _resolve_elastic,
    _check_standalone,
    _resolve_scheduler,
    _resolve_binding,
    _resolve_shown_ranks,
)


def _value_of(settled: SettingsByPath, path: str, default: Any) -> Any:
    return settled[path].value if path in settled else default


def _node_count(settled: SettingsByPath) -> int:
    return int(_value_of(settled, "resources.nodes", 1))


_SPEC_GROUPS = ("program", "resources", "policy", "output", "place", "reach")


def _build_spec(settled: SettingsByPath) -> JobSpec:
    if "program.target" not in settled:
        raise UsageError(
            "no program to run", hint="write pdrun [OPTIONS] SCRIPT [ARGS]; see pdrun --help"
        )
    kinds: dict[str, dict[str, Any]] = {group: {} for group in _SPEC_GROUPS}
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
    _check_combinations(settled)
    return JobSpec(
        program=Program(**kinds["program"]),
        resources=Resources(**kinds["resources"]),
        policy=Policy(**kinds["policy"]),
        output=Output(**kinds["output"]),
        place=ClusterOptions(**kinds["place"]),
        reach=RemoteOptions(**kinds["reach"]),
        env=env,
        **single,
    )


def _check_combinations(settled: SettingsByPath) -> None:
    """What no single value shows."""
    local = settled.get("place.local")
    nodes = _node_count(settled)
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
            if path in settled and settled[path].source.priority <= local.source.priority:
                raise conflict_error(settled[path], local)
    rank = settled.get("place.node_rank")
    serve = settled.get("place.serve")
    if rank and rank.value >= nodes:
        count = (
            settled["resources.nodes"].source.describe() if "resources.nodes" in settled else "one node"
        )
        raise rank.source.make_error(
            f"{rank.value} is not a place among {nodes} node(s) ({count})", f"use 0 to {nodes - 1}"
        )
    apart = (
        serve is not None and serve.source.priority is Priority.DETECTED
    )  # a launcher whose scheduler is no node of the job
    if rank and serve and serve.value != (rank.value == 0) and not apart:
        raise conflict_error(serve, rank)
    _check_elastic(settled)
    _check_restarts(settled)
    launcher = settled.get("place.launcher")
    listed = {"hosts.all", "place.hosts"} & set(settled)
    if (
        launcher
        and launcher.value == "ssh"
        and not listed
        and launcher.source.priority is not Priority.ENVIRONMENT
    ):
        raise launcher.source.make_error(
            "ssh has no hosts to start agents on", "add --hosts a,b or --hostfile FILE"
        )
    for path, wish in settled.items():
        if path.startswith("env."):
            try:
                refuse_reserved(path.removeprefix("env."), where=wish.source.label)
            except UsageError as error:
                raise wish.source.convert_error(error) from None
    name = settled.get("output.log_name")
    if (
        name
        and nodes > 1
        and "{rank}" not in name.value
        and "{node}" not in name.value
        and "{host" not in name.value
    ):
        raise name.source.make_error(f"{name.value!r} is the same on every node", "add {rank} or {node}")


def _check_elastic(settled: SettingsByPath) -> None:
    least = _value_of(settled, "resources.min_nodes", 0)
    elastic = 0 < least < _node_count(settled)
    for path in ("policy.gather", "policy.grow"):
        wish = settled.get(path)
        if wish and not elastic and wish.source.priority is Priority.COMMAND:
            raise wish.source.make_error("is about jobs that change their size", "write --nodes MIN:MAX")


def _check_restarts(settled: SettingsByPath) -> None:
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
        if wish and wish.source.priority is Priority.COMMAND and "policy.max_restarts" not in settled:
            raise wish.source.make_error(
                "is about restarts, and none are allowed", "add --max-restarts N"
            )
    only = settled.get("policy.restart_on")
    never = settled.get("policy.no_restart_on")
    both = sorted(
        {*_value_of(settled, "policy.restart_on", ())} & {*_value_of(settled, "policy.no_restart_on", ())}
    )
    if only and never and both:
        raise never.source.make_error(
            f"{never.source.text} contradicts {only.source.describe()}: code {both[0]} is in both"
        )


def _collect_sources(settled: SettingsByPath) -> dict[str, str]:
    """Return a place for every field of the specification, and for every variable of ``--env``."""
    labels = {path: wish.source.label for path, wish in settled.items()}
    if not _value_of(
        settled, "resources.min_nodes", 0
    ):  # one number was said: the least follows from the most
        labels.pop("resources.min_nodes", None)
    variables = {path: label for path, label in labels.items() if path.startswith("env.")}
    sources = {path: labels.get(path, "default") for path in list_field_paths()}
    if variables:
        sources["env"] = ", ".join(dict.fromkeys(variables.values()))
    return {**sources, **variables}
