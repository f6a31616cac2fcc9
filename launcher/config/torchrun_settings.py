"""
Combine torchrun's options that depend on each other, as torchrun does: which streams are shown,
which address counts, and the local rank as an argument. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pdrun.launcher.common.rank_lists import format_ranks
from pdrun.launcher.config.settings import (
    Setting,
    SettingsByPath,
    Source,
    node_count,
    value_of,
)

STDOUT_BIT = 1
STDERR_BIT = 2
"""torchrun's numbers of the streams."""
_ENDPOINT_NAMES = frozenset(("--rdzv-endpoint", "--rdzv_endpoint", "PET_RDZV_ENDPOINT"))
_MASTER_NAMES = frozenset(
    (
        *("--master-addr", "--master_addr", "PET_MASTER_ADDR"),
        *("--master-port", "--master_port", "PET_MASTER_PORT"),
    )
)
_SCHEDULER_NAMES = ("--scheduler", "PDRUN_SCHEDULER")

Resolved = tuple[Sequence[Setting], Sequence[str]]


def ignore_master_beside_endpoint(
    settings: Iterable[Setting],
) -> tuple[list[Setting], tuple[str, ...]]:
    """
    Return the settings without ``--master-addr`` and ``--master-port`` if ``--rdzv-endpoint`` is
    given, and a note for each. torchrun ignores them in this case.
    """
    listed = list(settings)
    endpoints = [one for one in listed if one.source.label in _ENDPOINT_NAMES]
    if not endpoints:
        return listed, ()
    priority = min(one.source.priority for one in endpoints)
    ignored = [
        one
        for one in listed
        if one.source.label in _MASTER_NAMES and one.source.priority >= priority
    ]
    endpoint = endpoints[0].source.describe()
    notes = [f"{one.source.describe()} is not used: {endpoint} is" for one in ignored]
    return [one for one in listed if one not in ignored], tuple(dict.fromkeys(notes))


def check_store_port(settings: SettingsByPath) -> Resolved:
    """Refuse ``--master-port 0`` for several nodes: each would get another port."""
    free = settings.get("torchrun.any_port")
    if free is None or value_of(settings, "place.local", False) or node_count(settings) == 1:
        return (), ()
    scheduler = settings.get("scheduler.host")
    is_named = scheduler is not None and scheduler.source.label in _SCHEDULER_NAMES
    if is_named or "hosts.all" in settings:
        return (), ()
    raise free.source.make_error(
        "0 is a different port on every node", "set a port, the same on all nodes"
    )


def resolve_local_rank_arg(settings: SettingsByPath) -> Resolved:
    """Give the script ``--local-rank=N`` with ``--launch-compat``, but not with ``--use-env``."""
    compat = settings.get("torchrun.launch_compat")
    if compat is None or not compat.value:
        return (), ()
    if value_of(settings, "torchrun.use_env", False):
        return (), ("the script gets no --local-rank: --use-env",)
    return [Setting("program.local_rank_arg", "--local-rank", compat.source)], ()


def resolve_shown_ranks(settings: SettingsByPath) -> Resolved:
    """
    Compute the shown ranks from torchrun's ``--redirects``, ``--tee`` and ``--local-ranks-filter``.

    With torchrun, a stream that is redirected and not teed is only written to its file. pdrun
    writes both streams of every worker to files.
    """
    parts = [
        settings[path]
        for path in ("torchrun.redirects", "torchrun.tee", "torchrun.shown")
        if path in settings
    ]
    if not parts:
        return (), ()
    redirects = value_of(settings, "torchrun.redirects", {"all": 0})
    tee = value_of(settings, "torchrun.tee", {"all": 0})
    source = parts[0].source
    derived = [
        Setting("output.files", True, part.source)
        for part in parts
        if part.path != "torchrun.shown"
    ]
    named = sorted(({*redirects} | {*tee}) - {"all"})
    hidden = {key: _hidden_streams(redirects, tee, key) for key in (*named, "all")}
    shown = [
        _format_shown(settings, {key: bool(bits & bit) for key, bits in hidden.items()}, source)
        for bit in (STDOUT_BIT, STDERR_BIT)
    ]
    if shown[0] != "all" or "torchrun.shown" in settings or shown[1] != "all":
        derived.append(Setting("output.show_ranks", shown[0], source))
    if shown[1] != shown[0]:
        derived.append(Setting("output.show_stderr", shown[1], source))
    return derived, ()


def _hidden_streams(redirects: Mapping[Any, int], tee: Mapping[Any, int], rank: object) -> int:
    """Return the bits of the streams of a local rank that are only written to files."""
    redirected = redirects.get(rank, redirects.get("all", 0))
    return redirected & ~tee.get(rank, tee.get("all", 0))


def _format_shown(settings: SettingsByPath, hidden: Mapping[Any, bool], source: Source) -> str:
    """Return the ranks that show one stream, as text for ``show_ranks``."""
    chosen = value_of(settings, "torchrun.shown", None)
    per_node = value_of(settings, "resources.devices", "auto")
    if chosen is None and not any(hidden.values()):
        return "all"
    if chosen is None and not hidden["all"] and not isinstance(per_node, int):
        raise source.make_error(
            "requires the number of workers per node", "set --nproc-per-node to a number"
        )
    candidates = chosen
    if chosen is None:
        candidates = sorted({*hidden} - {"all"}) if hidden["all"] else range(per_node)
    local = [rank for rank in candidates if not hidden.get(rank, hidden["all"])]
    return _format_global_ranks(local, per_node, node_count(settings), source)


def _format_global_ranks(local: Sequence[int], per_node: object, nodes: int, source: Source) -> str:
    """Return the global ranks of these local ranks on all nodes, as text for ``show_ranks``."""
    if not local:
        return "none"
    if nodes == 1:
        return format_ranks(tuple(local))
    if not isinstance(per_node, int):
        raise source.make_error(
            "names local ranks of several nodes, which requires the number of workers per node",
            "set --nproc-per-node to a number, or use --show-ranks",
        )
    return format_ranks(
        tuple(node * per_node + rank for node in range(nodes) for rank in local if rank < per_node)
    )
