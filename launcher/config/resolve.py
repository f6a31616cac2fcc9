"""
From settings to one JobSpec with the source of every value. Pure.

`pdrun.launcher.config.combine` handles the options that depend on each other. The checks here
compare values that are valid alone but not together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pdrun.endpoint import Endpoint, port_for_job
from pdrun.errors import UsageError
from pdrun.launcher.common.rank_lists import RankSet, describe_ranks
from pdrun.launcher.config.combine import RESOLVERS
from pdrun.launcher.config.job_key import make_job_key
from pdrun.launcher.config.settings import (
    Priority,
    Setting,
    SettingsByPath,
    conflict_error,
    node_count,
    resolve_conflicts,
    value_of,
)
from pdrun.launcher.config.spec import (
    ClusterOptions,
    JobSpec,
    Output,
    Policy,
    Program,
    RemoteOptions,
    Resources,
    Sources,
    list_field_paths,
)
from pdrun.quick_dataclass import dataclass
from pdrun.worker_env import refuse_reserved


@dataclass(frozen=True)
class ResolvedSpec:
    """The specification, the source of each value, and notes for ``--explain``."""

    spec: JobSpec
    sources: Sources
    notes: tuple[str, ...] = ()


def resolve_spec(settings: Iterable[Setting], notes: Iterable[str] = ()) -> ResolvedSpec:
    """
    Return the specification that the settings describe.

    Raises:
        PdrunError: no program, or values that exclude each other; the message names their sources.
    """
    all_settings = list(settings)
    resolved, _ = resolve_conflicts(all_settings)
    all_notes = list(notes)
    for resolve in RESOLVERS:
        more_settings, more_notes = resolve(resolved)
        all_settings += more_settings
        all_notes += more_notes
        resolved, overridden = resolve_conflicts(all_settings)
    spec = _build_spec(resolved)
    return _with_default_scheduler(
        ResolvedSpec(spec, _collect_sources(resolved), (*all_notes, *overridden))
    )


def _with_default_scheduler(request: ResolvedSpec) -> ResolvedSpec:
    """
    With ``--launcher none`` and hosts, the same command runs on each host, and the first host runs
    the scheduler.
    """
    place = request.spec.place
    if len(place.hosts) < 2 or place.launcher != "none" or place.scheduler or place.local:
        return request
    port = port_for_job(make_job_key(request.spec), place.port_range)
    meeting = Endpoint(place.hosts[0].peer_address, port)
    spec = replace(request.spec, place=replace(place, scheduler=meeting))
    note = f"{meeting} is the first host, with a port derived from the job's name"
    return ResolvedSpec(
        spec,
        {**request.sources, "place.scheduler": request.sources["place.hosts"]},
        (*request.notes, note),
    )


_SPEC_GROUPS = ("program", "resources", "policy", "output", "place", "reach")


def _build_spec(settings: SettingsByPath) -> JobSpec:
    if "program.target" not in settings:
        raise UsageError(
            "no program to run", hint="usage: pdrun [OPTIONS] SCRIPT [ARGS]; see pdrun --help"
        )
    groups: dict[str, dict[str, Any]] = {group: {} for group in _SPEC_GROUPS}
    groups["program"]["kind"] = "script"
    top_level: dict[str, Any] = {}
    env: dict[str, str] = {}
    for path, setting in settings.items():
        group, _, name = path.partition(".")
        if group == "env":
            env[name] = setting.value
        elif group in groups:
            groups[group][name] = setting.value
        elif path in ("job", "chdir"):
            top_level[path] = setting.value
    _check_combinations(settings)
    return JobSpec(
        program=Program(**groups["program"]),
        resources=Resources(**groups["resources"]),
        policy=Policy(**groups["policy"]),
        output=Output(**groups["output"]),
        place=ClusterOptions(**groups["place"]),
        reach=RemoteOptions(**groups["reach"]),
        env=env,
        **top_level,
    )


def _check_combinations(settings: SettingsByPath) -> None:
    """Refuse values that are valid alone but not together."""
    _check_local(settings)
    _check_node_rank(settings)
    _check_elastic(settings)
    _check_restarts(settings)
    _check_launcher(settings)
    _check_worker_env(settings)
    _check_log_name(settings)
    _check_ranks(settings)


def _check_local(settings: SettingsByPath) -> None:
    local = settings.get("place.local")
    if local is None or not local.value:
        return
    for path in (
        "place.scheduler",
        "place.node_rank",
        "place.serve",
        "place.interface",
        "place.node_name",
        "place.hosts",
        "place.rank_table",
    ):
        if path in settings and settings[path].source.priority <= local.source.priority:
            raise conflict_error(settings[path], local)


def _check_node_rank(settings: SettingsByPath) -> None:
    nodes = node_count(settings)
    rank = settings.get("place.node_rank")
    serve = settings.get("place.serve")
    if rank and rank.value >= nodes:
        count = "one node"
        if "resources.nodes" in settings:
            count = settings["resources.nodes"].source.describe()
        raise rank.source.make_error(f"must be 0 to {nodes - 1} ({count}), got {rank.value}")
    # the scheduler may run outside of the job's nodes: where a launcher put it, or, by --no-serve,
    # the user, while the launcher only numbers the nodes
    is_separate = serve is not None and serve.source.priority is Priority.DETECTED
    if rank and serve and not serve.value and rank.source.priority is Priority.DETECTED:
        is_separate = True
    if rank and serve and serve.value != (rank.value == 0) and not is_separate:
        raise conflict_error(serve, rank)


def _check_launcher(settings: SettingsByPath) -> None:
    launcher = settings.get("place.launcher")
    if launcher is None or launcher.value != "ssh":
        return
    has_hosts = "hosts.all" in settings or "place.hosts" in settings
    if not has_hosts and launcher.source.priority is not Priority.ENVIRONMENT:
        raise launcher.source.make_error(
            "ssh needs a list of hosts", "add --hosts a,b or --hostfile FILE"
        )


def _check_worker_env(settings: SettingsByPath) -> None:
    for path, setting in settings.items():
        if path.startswith("env."):
            try:
                refuse_reserved(path.removeprefix("env."), where=setting.source.label)
            except UsageError as error:
                raise setting.source.convert_error(error) from None


def _check_log_name(settings: SettingsByPath) -> None:
    name = settings.get("output.log_name")
    if name is None or node_count(settings) == 1:
        return
    if not any(field in name.value for field in ("{rank}", "{node}", "{host")):
        raise name.source.make_error(
            f"{name.value!r} gives the same file names on every node", "add {rank} or {node}"
        )


def _check_ranks(settings: SettingsByPath) -> None:
    """
    Refuse ``--stdin`` and ``--show-stderr`` with ranks that the job cannot have, if its size is
    known. Otherwise the agent warns of them. Lists that torchrun's options give are not the user's.
    """
    theirs = {one.source for path, one in settings.items() if path.startswith("torchrun.")}
    size = _known_world_size(settings)
    for path in ("program.stdin", "output.show_stderr"):
        setting = settings.get(path)
        if setting is None or setting.source in theirs:
            continue
        unknown = RankSet(str(setting.value)).unmatched_parts(range(size))
        if size and unknown:
            raise setting.source.make_error(f"there is no rank {unknown}; {describe_ranks(size)}")


def _known_world_size(settings: SettingsByPath) -> int:
    """Return the largest number of workers that one command starts; 0: not known yet."""
    devices = value_of(settings, "resources.devices", "auto")
    per_node = devices if isinstance(devices, int) else 0
    counts = [per_node] * node_count(settings)
    if hosts := value_of(settings, "place.hosts", ()):
        counts = [host.devices or len(host.indices or ()) or per_node for host in hosts]
    elif len(counts) > 1 and not value_of(settings, "place.local", False):
        return 0  # each node has its own command
    return sum(counts) if all(counts) else 0


def _check_elastic(settings: SettingsByPath) -> None:
    min_nodes = value_of(settings, "resources.min_nodes", 0)
    is_elastic = 0 < min_nodes < node_count(settings)
    for path in ("policy.gather", "policy.grow"):
        setting = settings.get(path)
        if setting and not is_elastic and setting.source.priority is Priority.COMMAND:
            raise setting.source.make_error("applies to elastic jobs only", "use --nodes MIN:MAX")


def _check_restarts(settings: SettingsByPath) -> None:
    """
    Refuse options about restarts in a job without restarts.

    An explicit ``--max-restarts 0`` is accepted: the user switches restarts off on purpose.
    """
    for path in (
        "policy.restart_on",
        "policy.no_restart_on",
        "policy.restart_window",
        "policy.backoff",
    ):
        setting = settings.get(path)
        is_explicit = setting is not None and setting.source.priority is Priority.COMMAND
        if setting and is_explicit and "policy.max_restarts" not in settings:
            raise setting.source.make_error(
                "applies to restarts only, and the job has none", "add --max-restarts N"
            )
    only = settings.get("policy.restart_on")
    never = settings.get("policy.no_restart_on")
    if only is None or never is None:
        return
    both = sorted({*only.value} & {*never.value})
    if both:
        raise never.source.make_error(
            f"{never.source.text} contradicts {only.source.describe()}:"
            f" both contain exit code {both[0]}"
        )


def _collect_sources(settings: SettingsByPath) -> dict[str, str]:
    """Return the source of every field of the specification and of every ``--env`` variable."""
    labels = {path: setting.source.label for path, setting in settings.items()}
    if not value_of(settings, "resources.min_nodes", 0):
        labels.pop("resources.min_nodes", None)  # --nodes N: the minimum follows from N
    variables = {path: label for path, label in labels.items() if path.startswith("env.")}
    sources = {path: labels.get(path, "default") for path in list_field_paths()}
    if variables:
        sources["env"] = ", ".join(dict.fromkeys(variables.values()))
    return {**sources, **variables}
