"""
MindSpore and Ascend: the variables of MSJob, AscendJob and msrun, and Ascend rank tables.

    AscendJob, msrun     MS_ROLE=MS_WORKER MS_SCHED_HOST=10.0.0.1 MS_SCHED_PORT=8118
                         MS_WORKER_NUM=16 MS_NODE_RANK=1 MS_LOCAL_WORKER=8
    MSJob                MS_NODE_ID and no MS_LOCAL_WORKER: one process per pod
    rank table           RANK_TABLE_FILE=/user/serverid/devindex/config/hccl.json XDL_IP=10.0.0.5
"""

from __future__ import annotations

import re

from pdrun.errors import ConfigError
from pdrun.launcher.adapters.model import LauncherInfo, Probes
from pdrun.launcher.adapters.parsing import (
    Environ,
    LauncherAdapter,
    check_below,
    read_number,
    read_port,
    require_number,
)
from pdrun.launcher.common.parsers import quote_text


def _read_mindspore(environ: Environ, probes: Probes) -> LauncherInfo:
    role = environ.get("MS_ROLE", "")
    if role not in ("MS_WORKER", ""):
        hint = "start only workers with pdrun run"
        if role == "MS_SCHED":
            hint = "run pdrun scheduler in this pod"
        elif role in ("MS_PSERVER", "MS_SERVER"):
            hint = "leave these pods out: pdrun starts MS_SERVER_NUM servers in the worker pods"
        raise ConfigError(f"must be MS_WORKER, got {quote_text(role)}", where="MS_ROLE", hint=hint)
    workers = require_number(environ, "MS_WORKER_NUM", "MS_ROLE", 1)
    servers = read_number(environ, "MS_SERVER_NUM", 0)
    local_workers = read_number(environ, "MS_LOCAL_WORKER", 1)
    per_node = local_workers or 1
    if workers % per_node:
        raise ConfigError(
            f"must be a multiple of MS_LOCAL_WORKER={per_node}, got {workers}",
            where="MS_WORKER_NUM",
        )
    name = "MS_NODE_RANK" if "MS_NODE_RANK" in environ else "MS_NODE_ID"
    text = environ.get(name, "")
    node_rank = None
    notes: tuple[str, ...] = ()
    if re.fullmatch(r"[0-9]{1,9}", text):
        node_rank = int(text)
    elif text:
        notes = (f"{name}={text[:60]} is not a number: nodes are ordered by name",)
    check_below(node_rank, workers // per_node, name, "MS_WORKER_NUM")
    return LauncherInfo.one_per_node(
        "mindspore",
        "MindSpore's variables (MS_*)",
        node_rank,
        workers // per_node,
        head=environ.get("MS_SCHED_HOST", ""),
        port=read_port(environ, "MS_SCHED_PORT"),
        workers_per_node=local_workers,
        servers=servers,
        has_own_scheduler=bool(role),
        notes=notes,
        sources={
            "node_rank": "" if node_rank is None else name,
            "rank": name,
            "world": "MS_WORKER_NUM",
            "nodes": "MS_WORKER_NUM, MS_LOCAL_WORKER" if per_node > 1 else "MS_WORKER_NUM",
            "head": "MS_SCHED_HOST",
            "port": "MS_SCHED_PORT",
            "workers_per_node": "MS_LOCAL_WORKER",
            "servers": "MS_SERVER_NUM",
        },
    )


def check_no_rank(environ: Environ) -> None:
    """Raise ConfigError if this process is already one rank of the table."""
    if "RANK_ID" in environ:
        raise ConfigError(
            f"is {environ['RANK_ID'][:20]!r}: this process is already one rank of RANK_TABLE_FILE",
            where="RANK_ID",
            hint="run pdrun once per server, or use --launcher none for a job on this node only",
        )


def _read_ascend(environ: Environ, probes: Probes) -> LauncherInfo:
    """Return the path of the rank table. `pdrun.launcher.ranktables` reads the table."""
    check_no_rank(environ)
    return LauncherInfo(
        "ascend",
        "a rank table of Ascend (RANK_TABLE_FILE)",
        "allocation",
        path=environ["RANK_TABLE_FILE"],
        sources={"hosts": "RANK_TABLE_FILE"},
    )


MINDSPORE_ADAPTER = LauncherAdapter(
    "mindspore",
    "MindSpore's variables",
    lambda environ: (
        "MS_ROLE" in environ or ("MS_WORKER_NUM" in environ and "MS_LOCAL_WORKER" in environ)
    ),
    _read_mindspore,
    prefixes=("MS_",),
)
ASCEND_ADAPTER = LauncherAdapter(
    "ascend",
    "a rank table of Ascend",
    lambda environ: "RANK_TABLE_FILE" in environ,
    _read_ascend,
    prefixes=("RANK_TABLE_FILE", "XDL_IP"),
)
