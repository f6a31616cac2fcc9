"""
msrun.

Checked against MindSpore 2.10 (mindspore/parallel/cluster/run.py, process_entity).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdrun.endpoint import parse_endpoint
from pdrun.launcher.common.parsers import quote_text
from pdrun.launcher.common.python_command import is_python_name
from pdrun.launcher.config.msrun_options import convert_cpu_map
from pdrun.launcher.translate.model import Translation
from pdrun.launcher.translate.option_table import (
    ForeignCommand,
    choice_of,
    parse_table,
    read_command,
)

MSRUN_TABLE = """
--worker_num N
--local_worker_num N
--master_addr HOST
--master_port PORT
--node_rank N
--log_dir DIR
--join BOOL
--cluster_time_out S
--bind_core BOOL
--bind_numa BOOL
--worker_log_name NAME
--tail_worker_log RANKS
--sim_level N
--sim_rank_id N
--rank_table_file FILE
"""
DEFAULT_WORKERS = 8
"""Of the job, and per node."""
DEFAULT_PORT = "8118"


def translate_msrun(words: Sequence[str], environ: Mapping[str, str]) -> Translation:
    """Translate ``msrun WORDS``."""
    command = read_command("msrun", parse_table(MSRUN_TABLE), words)
    result = Translation("msrun")
    nodes = _add_counts(command, result)
    host = command.text_of("master_addr", "127.0.0.1")
    port = command.text_of("master_port", DEFAULT_PORT)
    rank = command.count_of("node_rank", -1, least=-1)
    if nodes > 1:  # nothing of pdrun listens on one node
        result.add("--scheduler", str(parse_endpoint(f"{host}:{port}", where="msrun")))
        if rank >= 0:
            result.add("--node-rank", str(rank))
    _add_logs(command, result)
    if command.text_of("cluster_time_out").startswith("-"):
        raise command.make_error(
            "cluster_time_out", "an unlimited wait is not supported", "set a time"
        )
    if seconds := command.count_of("cluster_time_out"):
        result.add("--start-timeout", f"{seconds}s")
    _add_binding(command, result)
    if command.has("sim_level"):
        raise command.make_error(
            "sim_level", "is not supported: it simulates MindSpore's compiler", "use --dry-run"
        )
    if path := command.text_of("rank_table_file"):
        result.add("--rank-table", path)
    if command.parse("join", choice_of("true", "false"), "") == "false":
        result.runs_in_background = True
    elif not command.has("join"):
        result.notes.append(
            "msrun returns at once; pdrun waits for its workers (else: nohup ... &)"
        )
    _set_program(command, result)
    result.left_out = command.list_left_out({})
    return result


def _add_binding(command: ForeignCommand, result: Translation) -> None:
    cores = command.last_use("bind_core")
    if cores is not None and cores.values[0].lstrip().startswith("{"):
        result.add("--bind", convert_cpu_map(cores.values[0], cores.name))
        command.parse("bind_numa", choice_of("false"), "false")
        return
    for key, how in (("bind_core", "cores"), ("bind_numa", "numa")):
        if command.parse(key, choice_of("true", "false"), "false") == "true":
            result.add("--bind", how)


def _add_counts(command: ForeignCommand, result: Translation) -> int:
    """Add nodes and workers per node; return the number of nodes."""
    total = command.count_of("worker_num", DEFAULT_WORKERS)
    local = command.count_of("local_worker_num", DEFAULT_WORKERS)
    if local > total:
        raise command.make_error(
            "worker_num",
            f"{total} workers in total, but {local} on this node",
            f"set --local_worker_num (default: {DEFAULT_WORKERS})",
        )
    if total % local:
        raise command.make_error(
            "worker_num",
            f"{total} workers cannot be divided into nodes of {local}",
            f"list the hosts: pdrun --hosts a:{local},b:{total % local} ...",
        )
    result.add("--nodes", str(total // local), "--devices", str(local))
    return total // local


def _add_logs(command: ForeignCommand, result: Translation) -> None:
    if folder := command.text_of("log_dir"):
        result.add("--log-dir", folder)
    if name := command.text_of("worker_log_name"):
        result.add("--log-name", f"{name}_{{rank}}")
    if ranks := command.text_of("tail_worker_log"):
        result.add("--show-ranks", "all" if ranks == "-1" else ranks)


def _set_program(command: ForeignCommand, result: Translation) -> None:
    """msrun starts ``python``, ``python3`` and ``pytest`` as commands, all others with Python."""
    first = command.words[:1]
    if first and "/" in first[0] and is_python_name(first[0]):
        raise command.make_error(
            "", f"{quote_text(first[0])} would be run as a script by msrun", "write python"
        )
    if first == ("pytest",) or (first and is_python_name(first[0])):
        result.set_command(command.words)
    else:
        result.set_program(command.words, is_module=False, is_command=False)
