"""
torchrun's and msrun's spellings: each with its meaning here, or with the reason why it is refused.

One table, read by the command line, its help and the tests. A row is as in
`pdrun.launcher.config.options`: reading gives values of the JobSpec by path. Meanings that need two
options at once (``--redirects`` with ``--tee``, ``--worker_num`` with ``--local_worker_num``) leave
their parts under ``torchrun.*`` and ``msrun.*`` for `derive`. Spellings that pdrun shares
(``--node-rank``, ``--max-restarts``, ``--log-dir``, ``-m``) stand in `options`.

Checked against torch 2.13 (torch/distributed/run.py) and MindSpore 2.10 (parallel/cluster/run.py).
"""

from __future__ import annotations

import re
from typing import Literal

from pdrun.errors import UsageError, did_you_mean
from pdrun.launcher.common import parsers, rank_lists
from pdrun.launcher.config.options import (
    FieldValues,
    Option,
    OptionReader,
    endpoint_reader,
    read_nodes,
    store_parsed,
)

TORCHRUN_PORT = 29500
C10D_PORT = 29400
MSRUN_PORT = 8118
"""
Ports that the other launchers take when none is named; all nodes must agree on it, so it is kept.
"""


def _refuse_option(reason: str, hint: str = "leave it out") -> OptionReader:
    """Return a reader that always refuses."""

    def read(text: str, where: str) -> FieldValues:
        raise UsageError(f"is not supported: {reason}", where=where, hint=hint)

    return read


def _accept_only(allowed: tuple[str, ...], reason: str) -> OptionReader:
    """Return a reader that takes words which change nothing and refuses the others."""

    def read(text: str, where: str) -> FieldValues:
        if text in allowed:
            return {}
        raise UsageError(
            f"{parsers.quote_text(text)} is not supported: {reason}",
            where=where,
            hint=did_you_mean(text, allowed),
        )

    return read


def _read_nproc_per_node(text: str, where: str) -> FieldValues:
    words: dict[str, FieldValues] = {
        "auto": {"resources.devices": "accelerators-or-cpus"},
        "gpu": {"resources.devices": "accelerators"},
        "cpu": {"resources.devices": "cpus", "resources.backend": "cpu"},
        "xpu": {"resources.devices": "accelerators", "resources.backend": "xpu"},
    }
    if text in words:
        return words[text]
    if re.fullmatch(r"[A-Za-z]+", text):
        raise UsageError(
            f"{parsers.quote_text(text)} is neither a number nor one of {', '.join(words)}",
            where=where,
            hint=did_you_mean(text, words),
        )
    return {"resources.devices": parsers.int_parser(1)(text, where)}


def _read_numa_binding(text: str, where: str) -> FieldValues:
    if text != "node":
        raise UsageError(
            f"{parsers.quote_text(text)} is not supported: only node is",
            where=where,
            hint="or use --bind",
        )
    return {"resources.bind": "numa"}


def _read_nnodes(text: str, where: str) -> FieldValues:
    """
    torchrun opens a larger group soon after a node has come; it waits 30 s beyond MIN, as its
    last_call_timeout.
    """
    found = dict(read_nodes(text, where))
    if found["resources.min_nodes"]:
        return {**found, "torchrun.grow": 30.0}
    return found


def _read_rdzv_endpoint(text: str, where: str) -> FieldValues:
    return endpoint_reader()(parsers.endpoint_parser(C10D_PORT)(text, where))


def _read_rdzv_id(text: str, where: str) -> FieldValues:
    return (
        {} if text == "none" else {"job": parsers.parse_job_name(text, where)}
    )  # "none" is torchrun's default


def _check_only(parser: parsers.Parser) -> OptionReader:
    """Return a reader that checks the text and changes nothing."""

    def read(text: str, where: str) -> FieldValues:
        parser(text, where)
        return {}

    return read


_RDZV_SETTINGS: dict[str, OptionReader] = {
    "join_timeout": store_parsed("policy.start_timeout", parsers.parse_duration),
    "timeout": store_parsed("policy.start_timeout", parsers.parse_duration),
    "is_host": store_parsed("place.serve", parsers.parse_bool),
    "rank": store_parsed("place.node_rank", parsers.int_parser(0)),
    "last_call_timeout": store_parsed("torchrun.gather", parsers.parse_duration),
}


def _read_rdzv_conf(text: str, where: str) -> FieldValues:
    """Read ``KEY=VALUE,KEY=VALUE``; each key once, and only keys whose meaning pdrun has."""
    read: dict[str, object] = {}
    seen: set[str] = set()
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not key or not equals or not value:
            raise UsageError(
                f"{parsers.quote_text(part)} is not KEY=VALUE",
                where=where,
                hint="write join_timeout=600",
            )
        if key in seen:
            raise UsageError(f"{parsers.quote_text(key)} stands twice", where=where)
        if key not in _RDZV_SETTINGS:
            raise UsageError(
                f"{parsers.quote_text(key)} is not a setting that pdrun's rendezvous has",
                where=where,
                hint=did_you_mean(key, _RDZV_SETTINGS) or f"known: {', '.join(_RDZV_SETTINGS)}",
            )
        seen.add(key)
        read.update(_RDZV_SETTINGS[key](value, f"{where} {key}"))
    return read


def parse_std_map(text: str, where: str) -> dict[int | Literal["all"], int]:
    """
    Read torchrun's choice of streams: ``3`` for all local ranks, or ``0:3,11:1``, a choice for
    each.

    Returns:
        local rank (or "all") -> 0 neither, 1 stdout, 2 stderr, 3 both.
    """
    if re.fullmatch("[0-3]", text):
        return {"all": int(text)}
    found: dict[int | Literal["all"], int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6}):([0-3])", part)
        if match is None:
            raise UsageError(
                f"{parsers.quote_text(part)} chooses no streams",
                where=where,
                hint="write 0 to 3, or LOCAL_RANK:0-3 separated by commas",
            )
        if int(match[1]) in found:
            raise UsageError(f"local rank {int(match[1])} stands twice", where=where)
        found[int(match[1])] = int(match[2])
    return found


def _parse_bool(text: str, where: str) -> bool:
    """Read msrun's booleans, which are Python's words."""
    if text in ("True", "true", "False", "false"):
        return text.lower() == "true"
    raise UsageError(f"{parsers.quote_text(text)} is neither True nor False", where=where)


def _read_join(text: str, where: str) -> FieldValues:
    if _parse_bool(text, where):
        return {}
    raise UsageError(
        "False is not supported: pdrun stays with its workers and ends with their exit code",
        where=where,
        hint="use True, and put the whole command into the background",
    )


def _binding_reader(path: str) -> OptionReader:
    def read(text: str, where: str) -> FieldValues:
        if text.lstrip().startswith("{") or text.endswith(".json"):
            raise UsageError(
                "a map of CPUs is not supported: pdrun deals whole cores itself",
                where=where,
                hint="use True, --bind cores or --bind numa",
            )
        return {path: _parse_bool(text, where)}

    return read


def _read_cluster_time_out(text: str, where: str) -> FieldValues:
    if re.fullmatch(r"-[0-9]+", text):
        raise UsageError(
            "waiting for ever is not supported: nodes that never come must end the job",
            where=where,
            hint="give seconds, at most 365d",
        )
    return {"policy.start_timeout": parsers.parse_duration(text, where)}


def _read_tail(text: str, where: str) -> FieldValues:
    return {"output.show_ranks": "all" if text == "-1" else rank_lists.parse_ranks(text, where)}


def _read_log_stem(text: str, where: str) -> FieldValues:
    return {"output.log_name": parsers.parse_log_name(text + "_{rank}", where)}


def _read_rank_table(text: str, where: str) -> FieldValues:
    return {"place.rank_table": parsers.parse_path(text, where)} if text else {}


def _both_spellings(name: str) -> tuple[str, ...]:
    """Return torchrun's two spellings of a name, with dashes and with underscores."""
    if "-" in name:
        return ("--" + name, "--" + name.replace("-", "_"))
    return ("--" + name,)


def _torchrun_option(
    name: str, help: str, read: OptionReader, metavar: str = "", note: str = "", short: str = ""
) -> Option:
    """Return a row of torchrun's; the twin is PET_NAME, as in torchrun."""
    names = (*((short,) if short else ()), *_both_spellings(name))
    return Option(
        names,
        help,
        read,
        metavar=metavar,
        env=(f"PET_{name.upper().replace('-', '_')}",),
        origin="torchrun",
        note=note,
    )


TORCHRUN_OPTIONS = (
    _torchrun_option("nnodes", "--nodes; MIN:MAX means --grow 30s too", _read_nnodes, "N|MIN:MAX"),
    _torchrun_option(
        "nproc-per-node", "--devices; a number, auto, gpu, cpu or xpu", _read_nproc_per_node, "N"
    ),
    _torchrun_option(
        "master-addr",
        "host of --scheduler",
        store_parsed("scheduler.host", parsers.parse_host),
        "HOST",
    ),
    _torchrun_option(
        "master-port",
        "port of --scheduler",
        store_parsed("scheduler.port", parsers.parse_tcp_port),
        "PORT",
    ),
    _torchrun_option(
        "rdzv-endpoint",
        "--scheduler",
        _read_rdzv_endpoint,
        "HOST:PORT",
        f"without a port it means {C10D_PORT}, as with torchrun",
    ),
    _torchrun_option("rdzv-id", "--job", _read_rdzv_id, "NAME"),
    _torchrun_option(
        "rdzv-backend",
        "static or c10d",
        _accept_only(("static", "c10d"), "pdrun brings its own rendezvous"),
        "NAME",
        "the nodes meet at pdrun's own scheduler",
    ),
    _torchrun_option(
        "rdzv-conf",
        "join_timeout, timeout, last_call_timeout, is_host, rank",
        _read_rdzv_conf,
        "K=V,..",
        "settings of torchrun's rendezvous were carried over to pdrun's",
    ),
    _torchrun_option(
        "standalone",
        "one node, nothing listens",
        lambda text, where: {**read_nodes("1", where), "torchrun.standalone": True},
    ),
    _torchrun_option(
        "monitor-interval",
        "no longer needed",
        _check_only(parsers.parse_duration),
        "S",
        "workers are watched by events, so there is no interval between two looks",
    ),
    _torchrun_option(
        "start-method",
        "no effect on scripts",
        _accept_only(("spawn", "fork", "forkserver"), "there is no such method"),
        "HOW",
        "scripts are started afresh, as with torchrun",
    ),
    _torchrun_option(
        "role",
        "ROLE_NAME of the workers",
        store_parsed("env.ROLE_NAME", parsers.parse_job_name),
        "NAME",
    ),
    _torchrun_option(
        "redirects",
        "ranks that only go to files: 3, or 1:3,2:3",
        store_parsed("torchrun.redirects", parse_std_map),
        "STD",
        "both streams of every rank go to files",
        "-r",
    ),
    _torchrun_option(
        "tee",
        "ranks that also show: 3, or 0:3,1:3",
        store_parsed("torchrun.tee", parse_std_map),
        "STD",
        "both streams of every rank go to files",
        "-t",
    ),
    _torchrun_option(
        "local-ranks-filter",
        "local ranks to show",
        store_parsed("torchrun.shown", rank_lists.parse_rank_list),
        "RANKS",
    ),
    _torchrun_option(
        "local-addr",
        "--interface",
        store_parsed("place.interface", parsers.parse_interface),
        "ADDR",
    ),
    _torchrun_option(
        "shutdown-timeout",
        "--grace",
        store_parsed("policy.grace", parsers.parse_duration_or_zero),
        "S",
    ),
    _torchrun_option("numa-binding", "node: --bind numa", _read_numa_binding, "HOW"),
    _torchrun_option(
        "event-log-handler",
        "null only",
        _accept_only(("null",), "pdrun writes its own event log"),
        "NAME",
    ),
    _torchrun_option(
        "run-path", "refused", _refuse_option("a script always runs as python SCRIPT")
    ),
    _torchrun_option(
        "logs-specs",
        "refused",
        _refuse_option("log plug-ins of torch are not loaded", "use --log-dir and --log-name"),
        "NAME",
    ),
    _torchrun_option(
        "duplicate-stdout-filters",
        "refused",
        _refuse_option(
            "lines are not filtered by content", "use --show-ranks, and grep in the logs"
        ),
        "WORDS",
    ),
    _torchrun_option(
        "duplicate-stderr-filters",
        "refused",
        _refuse_option(
            "lines are not filtered by content", "use --show-ranks, and grep in the logs"
        ),
        "WORDS",
    ),
    _torchrun_option(
        "signals-to-handle",
        "refused",
        _refuse_option("TERM, INT, QUIT and HUP end the job, USR1 and USR2 are forwarded, always"),
        "NAMES",
    ),
    _torchrun_option(
        "virtual-local-rank",
        "refused",
        _refuse_option("LOCAL_RANK stays the number of the worker on its node"),
    ),
)


def _msrun_option(name: str, help: str, read: OptionReader, metavar: str, note: str = "") -> Option:
    return Option(("--" + name,), help, read, metavar=metavar, origin="msrun", note=note)


MSRUN_OPTIONS = (
    _msrun_option(
        "worker_num",
        "workers of the whole job (8)",
        store_parsed("msrun.workers", parsers.int_parser(1)),
        "N",
    ),
    _msrun_option(
        "local_worker_num",
        "--devices (8)",
        store_parsed("msrun.local_workers", parsers.int_parser(1)),
        "N",
    ),
    _msrun_option("join", "True only", _read_join, "BOOL", "pdrun always stays with its workers"),
    _msrun_option("cluster_time_out", "--start-timeout", _read_cluster_time_out, "S"),
    _msrun_option("bind_core", "True: --bind cores", _binding_reader("msrun.bind_core"), "BOOL"),
    _msrun_option("bind_numa", "True: --bind numa", _binding_reader("msrun.bind_numa"), "BOOL"),
    _msrun_option("worker_log_name", "--log-name NAME_{rank}", _read_log_stem, "NAME"),
    _msrun_option("tail_worker_log", "--show-ranks; -1 is all", _read_tail, "RANKS"),
    _msrun_option("rank_table_file", "--rank-table", _read_rank_table, "FILE"),
    _msrun_option(
        "sim_level",
        "refused",
        _refuse_option("it simulates MindSpore's compiler", "use --local or --dry-run"),
        "N",
    ),
    _msrun_option(
        "sim_rank_id",
        "refused",
        _refuse_option("it simulates MindSpore's compiler", "use --local or --dry-run"),
        "N",
    ),
)

ALIAS_OPTIONS = (*TORCHRUN_OPTIONS, *MSRUN_OPTIONS)
__all__ = ["ALIAS_OPTIONS", "MSRUN_OPTIONS", "TORCHRUN_OPTIONS", "parse_std_map"]
