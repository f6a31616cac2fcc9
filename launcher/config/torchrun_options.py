"""
torchrun's options: what each one means in pdrun, or why it is refused.

Checked against torch 2.11 to 2.14 (torch/distributed/run.py). Options that depend on each other
(``--redirects`` and ``--tee``) are stored as ``torchrun.*`` and combined in
`pdrun.launcher.config.combine`. Options with the same name as pdrun's (``--node-rank``,
``--max-restarts``, ``--log-dir``, ``-m``) are in `pdrun.launcher.config.run_options`.
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
    read_nodes,
    refuse_option,
    store_parsed,
)

TORCHRUN_PORT = 29500
C10D_PORT = 29400
"""torchrun's default ports, of --master-addr and --rdzv-endpoint. All nodes use the same one."""


def _accept_only(allowed: tuple[str, ...], reason: str) -> OptionReader:
    """Return a reader that accepts values without an effect and refuses all others."""

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
    modes: dict[str, FieldValues] = {
        "auto": {"resources.devices": "accelerators-or-cpus"},
        "gpu": {"resources.devices": "accelerators"},
        "cpu": {"resources.devices": "cpus", "resources.backend": "cpu"},
        "xpu": {"resources.devices": "accelerators", "resources.backend": "xpu"},
        "npu": {"resources.devices": "accelerators", "resources.backend": "npu"},
    }
    if text in modes:
        return modes[text]
    if re.fullmatch(r"[A-Za-z]+", text):
        raise UsageError(
            f"must be a number or one of {', '.join(modes)}, got {parsers.quote_text(text)}",
            where=where,
            hint=did_you_mean(text, modes),
        )
    return {"resources.devices": parsers.int_parser(1)(text, where)}


def _read_numa_binding(text: str, where: str) -> FieldValues:
    if text != "node":
        raise UsageError(
            f"must be node, got {parsers.quote_text(text)}; other modes are not supported",
            where=where,
            hint="use --bind",
        )
    return {"resources.bind": "numa"}


def _read_nnodes(text: str, where: str) -> FieldValues:
    """
    Read ``N`` or ``MIN:MAX``. torchrun includes a late node after its last_call_timeout of 30 s.
    """
    found = dict(read_nodes(text, where))
    if found["resources.min_nodes"]:
        return {**found, "torchrun.grow": 30.0}
    return found


def _read_master_port(text: str, where: str) -> FieldValues:
    """Read a port; with 0 the system chooses one, as without the option."""
    if text == "0":
        return {"torchrun.any_port": True}
    return {"store.port": parsers.parse_tcp_port(text, where)}


def _unless_empty(read: OptionReader) -> OptionReader:
    """Return a reader that accepts an empty text, torchrun's default, without an effect."""
    return lambda text, where: read(text, where) if text else {}


def _read_signals(text: str, where: str) -> FieldValues:
    names = {name.strip() for name in text.split(",")}
    if names == {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"}:
        return {}
    raise UsageError(
        "is not supported: TERM, INT, QUIT and HUP always end the job; USR1 and USR2 are forwarded",
        where=where,
        hint="leave it out",
    )


def _read_rdzv_endpoint(text: str, where: str) -> FieldValues:
    endpoint = parsers.endpoint_parser(C10D_PORT)(text, where)
    return {"store.host": endpoint.host, "store.port": endpoint.port}


def _read_rdzv_id(text: str, where: str) -> FieldValues:
    if text in ("", "none"):  # torchrun's default
        return {}
    return {"job": parsers.parse_job_name(text, where)}


def _check_only(parser: parsers.Parser) -> OptionReader:
    """Return a reader that checks the value and ignores it."""

    def read(text: str, where: str) -> FieldValues:
        parser(text, where)
        return {}

    return read


def _read_store_type(text: str, where: str) -> FieldValues:
    if text.lower() == "tcp":
        return {}
    raise UsageError(
        f"{parsers.quote_text(text)} is not supported: the nodes connect to pdrun's scheduler",
        where=where,
        hint="leave it out",
    )


_RDZV_SETTINGS: dict[str, OptionReader] = {
    "join_timeout": store_parsed("policy.start_timeout", parsers.parse_duration),
    "timeout": store_parsed("policy.start_timeout", parsers.parse_duration),
    "is_host": store_parsed("place.serve", parsers.parse_bool),
    "rank": store_parsed("place.node_rank", parsers.int_parser(0)),
    "last_call_timeout": store_parsed("torchrun.gather", parsers.parse_duration),
    "read_timeout": _check_only(parsers.parse_duration),
    "close_timeout": _check_only(parsers.parse_duration),
    "heartbeat_timeout": _check_only(parsers.parse_duration),
    "keep_alive_interval": _check_only(parsers.parse_duration),
    "keep_alive_max_attempt": _check_only(parsers.int_parser(1)),
    "use_libuv": _check_only(parsers.parse_bool),
    "store_type": _read_store_type,
}
"""
Keys of torchrun's rendezvous. The limits of single messages have no counterpart: pdrun watches its
connections itself.
"""


def _read_rdzv_conf(text: str, where: str) -> FieldValues:
    """Read ``KEY=VALUE,KEY=VALUE``: keys that pdrun supports, each once."""
    read: dict[str, object] = {}
    seen: set[str] = set()
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not key or not equals or not value:
            raise UsageError(
                f"must be KEY=VALUE, got {parsers.quote_text(part)}",
                where=where,
                hint="example: join_timeout=600",
            )
        if key in seen:
            raise UsageError(f"{parsers.quote_text(key)} is given twice", where=where)
        if key not in _RDZV_SETTINGS:
            raise UsageError(
                f"{parsers.quote_text(key)} is not supported by pdrun's rendezvous",
                where=where,
                hint=did_you_mean(key, _RDZV_SETTINGS) or f"known: {', '.join(_RDZV_SETTINGS)}",
            )
        seen.add(key)
        read.update(_RDZV_SETTINGS[key](value, f"{where} {key}"))
    return read


def parse_std_map(text: str, where: str) -> dict[int | Literal["all"], int]:
    """
    Read torchrun's streams: ``3`` for all local ranks, or ``0:3,11:1`` for single local ranks.

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
                f"must be LOCAL_RANK:0-3, got {parsers.quote_text(part)}",
                where=where,
                hint="use 0 to 3, or a comma-separated list of LOCAL_RANK:0-3",
            )
        if int(match[1]) in found:
            raise UsageError(f"local rank {int(match[1])} is given twice", where=where)
        found[int(match[1])] = int(match[2])
    return found


def _both_spellings(name: str) -> tuple[str, ...]:
    """Return torchrun's two forms of a name: with dashes and with underscores."""
    if "-" in name:
        return ("--" + name, "--" + name.replace("-", "_"))
    return ("--" + name,)


def _torchrun_option(
    name: str,
    help: str,
    read: OptionReader,
    metavar: str = "",
    note: str = "",
    short: str = "",
    same_as: str = "",
) -> Option:
    """Return an option of torchrun. Its environment variable is PET_NAME."""
    names = (*((short,) if short else ()), *_both_spellings(name))
    return Option(
        names,
        help,
        read,
        metavar=metavar,
        env=(f"PET_{name.upper().replace('-', '_')}",),
        origin="torchrun",
        same_as=same_as,
        note=note,
    )


TORCHRUN_OPTIONS = (
    _torchrun_option(
        "nnodes",
        "--nodes; MIN:MAX also sets --grow 30s",
        _read_nnodes,
        "N|MIN:MAX",
        same_as="--nodes",
    ),
    _torchrun_option(
        "nproc-per-node",
        "--devices; a number, auto, gpu, cpu, xpu or npu",
        _read_nproc_per_node,
        "N",
        same_as="--devices",
    ),
    _torchrun_option(
        "master-addr",
        "host of node 0: its scheduler and torch's store",
        store_parsed("store.host", parsers.parse_host),
        "HOST",
    ),
    _torchrun_option(
        "master-port",
        "port of torch's store on node 0",
        _read_master_port,
        "PORT",
    ),
    _torchrun_option(
        "rdzv-endpoint",
        "--master-addr and --master-port",
        _unless_empty(_read_rdzv_endpoint),
        "HOST:PORT",
        f"the default port is {C10D_PORT}, as with torchrun",
    ),
    _torchrun_option("rdzv-id", "--job", _read_rdzv_id, "NAME", same_as="--job"),
    _torchrun_option(
        "rdzv-backend",
        "static or c10d",
        _accept_only(("static", "c10d"), "pdrun has its own rendezvous"),
        "NAME",
        "the nodes connect to pdrun's scheduler",
    ),
    _torchrun_option(
        "rdzv-conf",
        "join_timeout, last_call_timeout, is_host and torchrun's other keys",
        _unless_empty(_read_rdzv_conf),
        "K=V,..",
        "settings of torchrun's rendezvous are applied to pdrun's rendezvous",
    ),
    _torchrun_option(
        "standalone",
        "one node, nothing listens",
        lambda text, where: {**read_nodes("1", where), "torchrun.standalone": True},
    ),
    _torchrun_option(
        "monitor-interval",
        "not needed",
        _check_only(parsers.parse_duration_or_zero),
        "S",
        "pdrun watches workers by events, without an interval",
    ),
    _torchrun_option(
        "start-method",
        "no effect on scripts",
        _accept_only(("spawn", "fork", "forkserver"), "unknown start method"),
        "HOW",
        "scripts run in new processes, as with torchrun",
    ),
    _torchrun_option(
        "role",
        "ROLE_NAME of the workers",
        store_parsed("env.ROLE_NAME", parsers.parse_job_name),
        "NAME",
    ),
    _torchrun_option(
        "redirects",
        "ranks written to files only: 3, or 1:3,2:3",
        store_parsed("torchrun.redirects", parse_std_map),
        "STD",
        "both streams of every rank are written to files",
        "-r",
    ),
    _torchrun_option(
        "tee",
        "ranks shown as well: 3, or 0:3,1:3",
        store_parsed("torchrun.tee", parse_std_map),
        "STD",
        "both streams of every rank are written to files",
        "-t",
    ),
    _torchrun_option(
        "local-ranks-filter",
        "local ranks to show",
        _unless_empty(store_parsed("torchrun.shown", rank_lists.parse_rank_list)),
        "RANKS",
    ),
    _torchrun_option(
        "local-addr",
        "--interface",
        store_parsed("place.interface", parsers.parse_interface),
        "ADDR",
        same_as="--interface",
    ),
    _torchrun_option(
        "shutdown-timeout",
        "--grace",
        store_parsed("policy.grace", parsers.parse_duration_or_zero),
        "S",
        same_as="--grace",
    ),
    _torchrun_option("numa-binding", "node: --bind numa", _read_numa_binding, "HOW"),
    _torchrun_option(
        "event-log-handler",
        "null only",
        _accept_only(("null",), "pdrun writes its own event log"),
        "NAME",
    ),
    _torchrun_option("run-path", "refused", refuse_option("a script always runs as python SCRIPT")),
    _torchrun_option(
        "logs-specs",
        "refused",
        refuse_option("log plug-ins of torch are not loaded", "use --log-dir and --log-name"),
        "NAME",
    ),
    _torchrun_option(
        "duplicate-stdout-filters",
        "refused",
        refuse_option(
            "lines are not filtered by content", "use --show-ranks, and grep in the logs"
        ),
        "WORDS",
    ),
    _torchrun_option(
        "duplicate-stderr-filters",
        "refused",
        refuse_option(
            "lines are not filtered by content", "use --show-ranks, and grep in the logs"
        ),
        "WORDS",
    ),
    _torchrun_option(
        "log-line-prefix-template",
        "refused",
        _unless_empty(
            refuse_option("the prefix of a line has one form", "use --prefix auto, rank or none")
        ),
        "TEXT",
    ),
    _torchrun_option(
        "print-completion",
        "refused",
        refuse_option("pdrun installs completion itself", "use pdrun completion install"),
        "SHELL",
    ),
    _torchrun_option(
        "signals-to-handle",
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT only",
        _read_signals,
        "NAMES",
    ),
    _torchrun_option(
        "use-env",
        "no --local-rank=N for the script (the default)",
        lambda text, where: {"torchrun.use_env": True},
    ),
    _torchrun_option(
        "virtual-local-rank",
        "refused",
        refuse_option("LOCAL_RANK is always the number of the worker on its node"),
    ),
)
