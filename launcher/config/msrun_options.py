"""
msrun's options: what each one means in pdrun, or why it is refused.

Checked against MindSpore 2.10 (parallel/cluster/run.py). The two worker counts and the two options
for CPU binding are stored as ``msrun.*`` and combined in `pdrun.launcher.config.combine`. Options
with the same name as pdrun's are in `pdrun.launcher.config.run_options`.
"""

from __future__ import annotations

import json
import re

from pdrun.errors import UsageError
from pdrun.launcher.common import parsers, rank_lists
from pdrun.launcher.config.options import (
    FieldValues,
    Option,
    OptionReader,
    refuse_option,
    store_parsed,
)

MSRUN_PORT = 8118
"""msrun's default port. All nodes must use the same one."""


def _parse_bool(text: str, where: str) -> bool:
    """Read a boolean of msrun: True or False."""
    if text in ("True", "true", "False", "false"):
        return text.lower() == "true"
    raise UsageError(f"must be True or False, got {parsers.quote_text(text)}", where=where)


def _read_join(text: str, where: str) -> FieldValues:
    if _parse_bool(text, where):
        return {}
    raise UsageError(
        "False is not supported: pdrun waits for its workers and returns their exit code",
        where=where,
        hint="use True, and run the command in the background",
    )


def _read_bind_core(text: str, where: str) -> FieldValues:
    """Read True, False, or ``{"device0": ["0-9"], "device1": ["10-19"]}``."""
    if text.lstrip().startswith("{"):
        return {"resources.bind": convert_cpu_map(text, where)}
    return {"msrun.bind_core": _parse_bool(text, where)}


def _read_bind_numa(text: str, where: str) -> FieldValues:
    if text.lstrip().startswith("{") or text.endswith(".json"):
        raise UsageError(
            "a map of memory nodes is not supported: pdrun does not bind memory",
            where=where,
            hint="use True, or lists of CPUs: --bind 0-9/10-19",
        )
    return {"msrun.bind_numa": _parse_bool(text, where)}


def convert_cpu_map(text: str, where: str) -> str:
    """
    Return pdrun's ``--bind`` for msrun's map: ``0-9/10-19``.

    The devices are those of the local ranks, in order. CPUs of msrun's scheduler are left out:
    that of pdrun needs none.

    Raises:
        UsageError: it is not such a map.
    """
    problem = ""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"is not JSON: {error}", where=where) from None
    names = [name for name in found if name != "scheduler"] if isinstance(found, dict) else []
    lists = [found[name] for name in names]
    if not names or names != [f"device{rank}" for rank in range(len(names))]:
        problem = "must name device0, device1 ... in this order"
    elif not all(
        isinstance(own, list) and own and all(isinstance(part, str) for part in own)
        for own in lists
    ):
        problem = 'must have a list of texts for each device, as ["0-9"]'
    if problem:
        raise UsageError(
            f"the map of CPUs {problem}",
            where=where,
            hint='example: {"device0": ["0-9"], "device1": ["10-19"]}, or --bind 0-9/10-19',
        )
    return rank_lists.parse_binding("/".join(",".join(own) for own in lists), where)


def _read_cluster_time_out(text: str, where: str) -> FieldValues:
    if re.fullmatch(r"-[0-9]+", text):
        raise UsageError(
            "an unlimited wait is not supported: a missing node must end the job",
            where=where,
            hint="set a time, at most 365d",
        )
    return {"policy.start_timeout": parsers.parse_duration(text, where)}


def _read_tail(text: str, where: str) -> FieldValues:
    if text == "-1":
        return {"output.show_ranks": "all"}
    return {"output.show_ranks": rank_lists.parse_ranks(text, where)}


def _read_log_stem(text: str, where: str) -> FieldValues:
    return {"output.log_name": parsers.parse_log_name(text + "_{rank}", where)}


def _read_rank_table(text: str, where: str) -> FieldValues:
    if not text:
        return {}
    return {"place.rank_table": parsers.parse_path(text, where)}


def _msrun_option(
    name: str, help: str, read: OptionReader, metavar: str, note: str = "", same_as: str = ""
) -> Option:
    return Option(
        ("--" + name,), help, read, metavar=metavar, origin="msrun", same_as=same_as, note=note
    )


MSRUN_OPTIONS = (
    _msrun_option(
        "worker_num",
        "workers of the job (default: 8)",
        store_parsed("msrun.workers", parsers.int_parser(1)),
        "N",
    ),
    _msrun_option(
        "local_worker_num",
        "--devices (default: 8)",
        store_parsed("msrun.local_workers", parsers.int_parser(1)),
        "N",
        same_as="--devices",
    ),
    _msrun_option("join", "True only", _read_join, "BOOL", "pdrun always waits for its workers"),
    _msrun_option(
        "cluster_time_out",
        "--start-timeout",
        _read_cluster_time_out,
        "S",
        same_as="--start-timeout",
    ),
    _msrun_option("bind_core", "True: --bind cores; or a map", _read_bind_core, "BOOL|MAP"),
    _msrun_option("bind_numa", "True: --bind numa", _read_bind_numa, "BOOL"),
    _msrun_option(
        "worker_log_name", "--log-name NAME_{rank}", _read_log_stem, "NAME", same_as="--log-name"
    ),
    _msrun_option(
        "tail_worker_log", "--show-ranks; -1: all", _read_tail, "RANKS", same_as="--show-ranks"
    ),
    _msrun_option(
        "rank_table_file", "--rank-table", _read_rank_table, "FILE", same_as="--rank-table"
    ),
    _msrun_option(
        "sim_level",
        "refused",
        refuse_option("it simulates MindSpore's compiler", "use --local or --dry-run"),
        "N",
    ),
    _msrun_option(
        "sim_rank_id",
        "refused",
        refuse_option("it simulates MindSpore's compiler", "use --local or --dry-run"),
        "N",
    ),
)
