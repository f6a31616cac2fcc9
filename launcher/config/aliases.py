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
from pdrun.launcher.common import parsers
from pdrun.launcher.config.options import Option, Read, Values, nodes_of, place_of, to

TORCHRUN_PORT = 29500
C10D_PORT = 29400
MSRUN_PORT = 8118
"""
Ports that the other launchers take when none is named; all nodes must agree on it, so it is kept.
"""


def _refused(reason: str, hint: str = "leave it out") -> Read:
    """Return a reader that always refuses."""

    def read(text: str, where: str) -> Values:
        raise UsageError(f"is not supported: {reason}", where=where, hint=hint)

    return read


def _only(allowed: tuple[str, ...], reason: str) -> Read:
    """Return a reader that takes words which change nothing and refuses the others."""

    def read(text: str, where: str) -> Values:
        if text in allowed:
            return {}
        raise UsageError(
            f"{parsers.quoted(text)} is not supported: {reason}",
            where=where,
            hint=did_you_mean(text, allowed),
        )

    return read


def _per_node(text: str, where: str) -> Values:
    words: dict[str, Values] = {
        "auto": {"resources.devices": "accelerators-or-cpus"},
        "gpu": {"resources.devices": "accelerators"},
        "cpu": {"resources.devices": "cpus", "resources.backend": "cpu"},
        "xpu": {"resources.devices": "accelerators", "resources.backend": "xpu"},
    }
    if text in words:
        return words[text]
    if re.fullmatch(r"[A-Za-z]+", text):
        raise UsageError(
            f"{parsers.quoted(text)} is neither a number nor one of {', '.join(words)}",
            where=where,
            hint=did_you_mean(text, words),
        )
    return {"resources.devices": parsers.whole(1)(text, where)}


def _numa_binding(text: str, where: str) -> Values:
    if text != "node":
        raise UsageError(
            f"{parsers.quoted(text)} is not supported: only node is",
            where=where,
            hint="or use --bind",
        )
    return {"resources.bind": "numa"}


def _nnodes(text: str, where: str) -> Values:
    """
    torchrun opens a larger group soon after a node has come; it waits 30 s beyond MIN, as its
    last_call_timeout.
    """
    found = dict(nodes_of(text, where))
    if found["resources.min_nodes"]:
        return {**found, "torchrun.grow": 30.0}
    return found


def _rdzv_endpoint(text: str, where: str) -> Values:
    return place_of()(parsers.endpoint(C10D_PORT)(text, where))


def _rdzv_id(text: str, where: str) -> Values:
    return (
        {} if text == "none" else {"job": parsers.name(text, where)}
    )  # "none" is torchrun's default


def _nothing(parser: parsers.Parser) -> Read:
    """Return a reader that checks the text and changes nothing."""

    def read(text: str, where: str) -> Values:
        parser(text, where)
        return {}

    return read


_CONF: dict[str, Read] = {
    "join_timeout": to("policy.start_timeout", parsers.duration),
    "timeout": to("policy.start_timeout", parsers.duration),
    "is_host": to("place.serve", parsers.yes_no),
    "rank": to("place.node_rank", parsers.whole(0)),
    "last_call_timeout": to("torchrun.gather", parsers.duration),
}


def _rdzv_conf(text: str, where: str) -> Values:
    """Read ``KEY=VALUE,KEY=VALUE``; each key once, and only keys whose meaning pdrun has."""
    read: dict[str, object] = {}
    seen: set[str] = set()
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not key or not equals or not value:
            raise UsageError(
                f"{parsers.quoted(part)} is not KEY=VALUE",
                where=where,
                hint="write join_timeout=600",
            )
        if key in seen:
            raise UsageError(f"{parsers.quoted(key)} stands twice", where=where)
        if key not in _CONF:
            raise UsageError(
                f"{parsers.quoted(key)} is not a setting that pdrun's rendezvous has",
                where=where,
                hint=did_you_mean(key, _CONF) or f"known: {', '.join(_CONF)}",
            )
        seen.add(key)
        read.update(_CONF[key](value, f"{where} {key}"))
    return read


def std_map(text: str, where: str) -> dict[int | Literal["all"], int]:
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
                f"{parsers.quoted(part)} chooses no streams",
                where=where,
                hint="write 0 to 3, or LOCAL_RANK:0-3 separated by commas",
            )
        if int(match[1]) in found:
            raise UsageError(f"local rank {int(match[1])} stands twice", where=where)
        found[int(match[1])] = int(match[2])
    return found


def _true_false(text: str, where: str) -> bool:
    """Read msrun's booleans, which are Python's words."""
    if text in ("True", "true", "False", "false"):
        return text.lower() == "true"
    raise UsageError(f"{parsers.quoted(text)} is neither True nor False", where=where)


def _join(text: str, where: str) -> Values:
    if _true_false(text, where):
        return {}
    raise UsageError(
        "False is not supported: pdrun stays with its workers and ends with their exit code",
        where=where,
        hint="use True, and put the whole command into the background",
    )


def _bind(path: str) -> Read:
    def read(text: str, where: str) -> Values:
        if text.lstrip().startswith("{") or text.endswith(".json"):
            raise UsageError(
                "a map of CPUs is not supported: pdrun deals whole cores itself",
                where=where,
                hint="use True, --bind cores or --bind numa",
            )
        return {path: _true_false(text, where)}

    return read


def _cluster_time_out(text: str, where: str) -> Values:
    if re.fullmatch(r"-[0-9]+", text):
        raise UsageError(
            "waiting for ever is not supported: nodes that never come must end the job",
            where=where,
            hint="give seconds, at most 365d",
        )
    return {"policy.start_timeout": parsers.duration(text, where)}


def _tail(text: str, where: str) -> Values:
    return {"output.show_ranks": "all" if text == "-1" else parsers.ranks(text, where)}


def _log_stem(text: str, where: str) -> Values:
    return {"output.log_name": parsers.log_name(text + "_{rank}", where)}


def _rank_table(text: str, where: str) -> Values:
    return {"place.rank_table": parsers.path(text, where)} if text else {}


def _both(name: str) -> tuple[str, ...]:
    """Return torchrun's two spellings of a name, with dashes and with underscores."""
    if "-" in name:
        return ("--" + name, "--" + name.replace("-", "_"))
    return ("--" + name,)


def _torchrun(
    name: str, help: str, read: Read, metavar: str = "", note: str = "", short: str = ""
) -> Option:
    """Return a row of torchrun's; the twin is PET_NAME, as in torchrun."""
    names = (*((short,) if short else ()), *_both(name))
    return Option(
        names,
        help,
        read,
        metavar=metavar,
        env=(f"PET_{name.upper().replace('-', '_')}",),
        origin="torchrun",
        note=note,
    )


TORCHRUN = (
    _torchrun("nnodes", "--nodes; MIN:MAX means --grow 30s too", _nnodes, "N|MIN:MAX"),
    _torchrun("nproc-per-node", "--devices; a number, auto, gpu, cpu or xpu", _per_node, "N"),
    _torchrun("master-addr", "host of --scheduler", to("scheduler.host", parsers.host), "HOST"),
    _torchrun("master-port", "port of --scheduler", to("scheduler.port", parsers.port), "PORT"),
    _torchrun(
        "rdzv-endpoint",
        "--scheduler",
        _rdzv_endpoint,
        "HOST:PORT",
        f"without a port it means {C10D_PORT}, as with torchrun",
    ),
    _torchrun("rdzv-id", "--job", _rdzv_id, "NAME"),
    _torchrun(
        "rdzv-backend",
        "static or c10d",
        _only(("static", "c10d"), "pdrun brings its own rendezvous"),
        "NAME",
        "the nodes meet at pdrun's own scheduler",
    ),
    _torchrun(
        "rdzv-conf",
        "join_timeout, timeout, last_call_timeout, is_host, rank",
        _rdzv_conf,
        "K=V,..",
        "settings of torchrun's rendezvous were carried over to pdrun's",
    ),
    _torchrun(
        "standalone",
        "one node, nothing listens",
        lambda text, where: {**nodes_of("1", where), "torchrun.standalone": True},
    ),
    _torchrun(
        "monitor-interval",
        "no longer needed",
        _nothing(parsers.duration),
        "S",
        "workers are watched by events, so there is no interval between two looks",
    ),
    _torchrun(
        "start-method",
        "no effect on scripts",
        _only(("spawn", "fork", "forkserver"), "there is no such method"),
        "HOW",
        "scripts are started afresh, as with torchrun",
    ),
    _torchrun("role", "ROLE_NAME of the workers", to("env.ROLE_NAME", parsers.name), "NAME"),
    _torchrun(
        "redirects",
        "ranks that only go to files: 3, or 1:3,2:3",
        to("torchrun.redirects", std_map),
        "STD",
        "both streams of every rank go to files",
        "-r",
    ),
    _torchrun(
        "tee",
        "ranks that also show: 3, or 0:3,1:3",
        to("torchrun.tee", std_map),
        "STD",
        "both streams of every rank go to files",
        "-t",
    ),
    _torchrun(
        "local-ranks-filter", "local ranks to show", to("torchrun.shown", parsers.rank_set), "RANKS"
    ),
    _torchrun("local-addr", "--interface", to("place.interface", parsers.interface), "ADDR"),
    _torchrun("shutdown-timeout", "--grace", to("policy.grace", parsers.duration_or_zero), "S"),
    _torchrun("numa-binding", "node: --bind numa", _numa_binding, "HOW"),
    _torchrun(
        "event-log-handler", "null only", _only(("null",), "pdrun writes its own event log"), "NAME"
    ),
    _torchrun("run-path", "refused", _refused("a script always runs as python SCRIPT")),
    _torchrun(
        "logs-specs",
        "refused",
        _refused("log plug-ins of torch are not loaded", "use --log-dir and --log-name"),
        "NAME",
    ),
    _torchrun(
        "duplicate-stdout-filters",
        "refused",
        _refused("lines are not filtered by content", "use --show-ranks, and grep in the logs"),
        "WORDS",
    ),
    _torchrun(
        "duplicate-stderr-filters",
        "refused",
        _refused("lines are not filtered by content", "use --show-ranks, and grep in the logs"),
        "WORDS",
    ),
    _torchrun(
        "signals-to-handle",
        "refused",
        _refused("TERM, INT, QUIT and HUP end the job, USR1 and USR2 are forwarded, always"),
        "NAMES",
    ),
    _torchrun(
        "virtual-local-rank",
        "refused",
        _refused("LOCAL_RANK stays the number of the worker on its node"),
    ),
)


def _msrun(name: str, help: str, read: Read, metavar: str, note: str = "") -> Option:
    return Option(("--" + name,), help, read, metavar=metavar, origin="msrun", note=note)


MSRUN = (
    _msrun(
        "worker_num", "workers of the whole job (8)", to("msrun.workers", parsers.whole(1)), "N"
    ),
    _msrun("local_worker_num", "--devices (8)", to("msrun.local_workers", parsers.whole(1)), "N"),
    _msrun("join", "True only", _join, "BOOL", "pdrun always stays with its workers"),
    _msrun("cluster_time_out", "--start-timeout", _cluster_time_out, "S"),
    _msrun("bind_core", "True: --bind cores", _bind("msrun.bind_core"), "BOOL"),
    _msrun("bind_numa", "True: --bind numa", _bind("msrun.bind_numa"), "BOOL"),
    _msrun("worker_log_name", "--log-name NAME_{rank}", _log_stem, "NAME"),
    _msrun("tail_worker_log", "--show-ranks; -1 is all", _tail, "RANKS"),
    _msrun("rank_table_file", "--rank-table", _rank_table, "FILE"),
    _msrun(
        "sim_level",
        "refused",
        _refused("it simulates MindSpore's compiler", "use --local or --dry-run"),
        "N",
    ),
    _msrun(
        "sim_rank_id",
        "refused",
        _refused("it simulates MindSpore's compiler", "use --local or --dry-run"),
        "N",
    ),
)

ALIASES = (*TORCHRUN, *MSRUN)
__all__ = ["ALIASES", "MSRUN", "TORCHRUN", "std_map"]
