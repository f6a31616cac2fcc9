"""
torchrun, torch.distributed.launch, and colossalai, which starts torchrun.

Checked against torch 2.11 to 2.14 (torch/distributed/run.py, launch.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pdrun.endpoint import parse_endpoint
from pdrun.errors import UsageError
from pdrun.launcher.common import parsers
from pdrun.launcher.translate.model import Translation
from pdrun.launcher.translate.option_table import (
    ForeignCommand,
    choice_of,
    parse_table,
    read_command,
)

TORCHRUN_TABLE = """
--nnodes N
--nproc-per-node --nproc_per_node N
--rdzv-backend --rdzv_backend NAME
--rdzv-endpoint --rdzv_endpoint H
--rdzv-id --rdzv_id NAME
--rdzv-conf --rdzv_conf TEXT
--standalone
--max-restarts --max_restarts N
--monitor-interval --monitor_interval S
--start-method --start_method HOW
--event-log-handler --event_log_handler NAME
--role NAME
-m --module
--no-python --no_python
--run-path --run_path
--log-dir --log_dir DIR
-r --redirects STD
-t --tee STD
--local-ranks-filter --local_ranks_filter RANKS
--duplicate-stdout-filters --duplicate_stdout_filters TEXT
--duplicate-stderr-filters --duplicate_stderr_filters TEXT
--node-rank --node_rank N
--master-addr --master_addr HOST
--master-port --master_port PORT
--local-addr --local_addr HOST
--logs-specs --logs_specs NAME
--numa-binding --numa_binding HOW
--signals-to-handle --signals_to_handle NAMES
--shutdown-timeout --shutdown_timeout S
--virtual-local-rank --virtual_local_rank
--log-line-prefix-template --log_line_prefix_template TEXT
--print-completion --print_completion SHELL
"""
LAUNCH_TABLE = TORCHRUN_TABLE + "--use-env --use_env\n"
COLOSSALAI_TABLE = """
-H -host --host HOSTS
--hostfile FILE
--include HOSTS
--exclude HOSTS
--num_nodes N
--nproc_per_node N
--master_port PORT
--master_addr HOST
--extra_launch_args TEXT
--ssh-port PORT
-m
"""
MASTER_PORT = "29500"
C10D_PORT = 29400
DEFAULT_SIGNALS = {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"}
LOCAL_RANK_MACRO = re.compile(r"(?<!\$)(?:\$\$)*\$(?:local_rank\b|\{local_rank\})")
LOCAL_RANK_ARGUMENT = re.compile(r"--([A-Za-z][\w-]*)=\$(?:local_rank|\{local_rank\})")
"""What torchrun replaces in arguments."""
GROW_TIME = "30s"
"""torchrun includes a late node after this time."""
_SAME_MEANING = {
    "max_restarts": ("--max-restarts", "0"),
    "role": ("--role", "default"),
    "log_dir": ("--log-dir", ""),
    "redirects": ("--redirects", "0"),
    "tee": ("--tee", "0"),
    "local_ranks_filter": ("--local-ranks-filter", ""),
    "local_addr": ("--interface", ""),
    "shutdown_timeout": ("--grace", ""),
    "rdzv_id": ("--job", "none"),
    "numa_binding": ("--numa-binding", ""),
    "logs_specs": ("--logs-specs", ""),
    "duplicate_stdout_filters": ("--duplicate-stdout-filters", ""),
    "duplicate_stderr_filters": ("--duplicate-stderr-filters", ""),
    "log_line_prefix_template": ("--log-line-prefix-template", ""),
    "print_completion": ("--print-completion", ""),
}
"""torchrun's key -> pdrun's option, and the value that has no effect."""


def translate_torchrun(words: Sequence[str], environ: Mapping[str, str]) -> Translation:
    """Translate ``torchrun WORDS``."""
    command = read_command("torchrun", parse_table(TORCHRUN_TABLE), words)
    result = _translate_options(command, environ)
    _set_script(command, result)
    result.left_out = command.list_left_out({})
    return result


def translate_launch(words: Sequence[str], environ: Mapping[str, str]) -> Translation:
    """Translate ``python -m torch.distributed.launch WORDS``, which adds ``--local-rank=N``."""
    command = read_command("torch.distributed.launch", parse_table(LAUNCH_TABLE), words)
    result = _translate_options(command, environ)
    if not command.has("use_env"):
        if command.has("no_python"):
            raise command.make_error("no_python", "requires --use-env", "add --use-env")
        result.add("--launch-compat")
    _set_script(command, result)
    result.left_out = command.list_left_out({})
    return result


def _set_script(command: ForeignCommand, result: Translation) -> None:
    result.set_program(
        _replace_macros(command.words, result),
        is_module=command.has("module"),
        is_command=command.has("no_python"),
    )


def _replace_macros(words: Sequence[str], result: Translation) -> list[str]:
    """
    Return the program and its arguments as torchrun passes them: ``$$`` is ``$``, and $local_rank
    the local rank, which pdrun can pass as ``--NAME=N`` in front of the other arguments only.
    """
    replaced = list(words[:1])
    for number, word in enumerate(words[1:]):
        match = LOCAL_RANK_ARGUMENT.fullmatch(word)
        if match and number == 0 and "--launch-compat" not in result.options:
            result.add("--local-rank-arg", match[1])
        elif LOCAL_RANK_MACRO.search(word):
            raise UsageError(
                f"{parsers.quote_text(word)} is replaced by torchrun",
                where=result.launcher,
                hint="read LOCAL_RANK in the script, or write --NAME=$local_rank first",
            )
        else:
            replaced.append(word.replace("$$", "$"))
    return replaced


def _translate_options(command: ForeignCommand, environ: Mapping[str, str]) -> Translation:
    result = Translation(command.launcher)
    nodes = _add_counts(command, environ, result)
    keys = ("rdzv_endpoint", "master_addr", "master_port", "rdzv_backend", "standalone")
    is_typed = any(command.has(key) for key in keys)
    has_variables = any(f"PET_{key.upper()}" in environ for key in ("nnodes", *keys))
    if is_typed or not has_variables:  # otherwise pdrun reads the variables
        add_meeting(
            result,
            nodes,
            is_static=command.text_of("rdzv_backend", "static").lower() == "static",
            endpoint=command.text_of("rdzv_endpoint"),
            host=command.text_of("master_addr"),
            port=command.text_of("master_port"),
            is_alone=command.has("standalone"),
        )
    rank = command.text_of("node_rank")
    if rank and (nodes != "1" or _is_another_node(command, rank)):
        result.add("--node-rank", rank)
    _check_ignored(command)
    add_shared_options(command, result)
    return result


def _is_another_node(command: ForeignCommand, rank: str) -> bool:
    """Return whether a rank contradicts a job of one node: ``--nnodes`` was forgotten."""
    is_used = command.text_of("rdzv_backend", "static").lower() == "static"
    return rank != "0" and is_used and not command.has("standalone")


def _add_counts(command: ForeignCommand, environ: Mapping[str, str], result: Translation) -> str:
    """Add nodes and workers per node, with torchrun's defaults of 1; return the nodes."""
    nodes = command.text_of("nnodes", environ.get("PET_NNODES", "1:1"))
    if command.has("standalone"):
        nodes = "1"
    least, colon, most = nodes.partition(":")
    if colon and least == most:
        nodes = least
    if command.has("nnodes") or command.has("standalone") or "PET_NNODES" not in environ:
        result.add("--nodes", nodes)
        if ":" in nodes:
            result.add("--grow", GROW_TIME)
    workers = command.text_of("nproc_per_node")
    if re.fullmatch("[A-Za-z]+", workers):
        result.add("--nproc-per-node", workers)
    elif workers or "PET_NPROC_PER_NODE" not in environ:
        result.add("--devices", workers or "1")
    return nodes


def add_meeting(
    result: Translation,
    nodes: str,
    *,
    is_static: bool,
    endpoint: str = "",
    host: str = "",
    port: str = "",
    is_alone: bool = False,
) -> None:
    """
    Add where the nodes meet, and the port that the workers get.

    Args:
        result: the translation.
        nodes: number of nodes, ``N`` or ``MIN:MAX``.
        is_static: the static backend: workers meet at the endpoint, or at host and port.
        endpoint: of the rendezvous; host and port are then ignored.
        host: of node 0.
        port: of node 0; 0: the system chooses.
        is_alone: ``--standalone``: all of them are ignored.
    """
    if is_alone:
        return
    if endpoint and (nodes != "1" or is_static):
        default = None if is_static else C10D_PORT
        where = f"{result.launcher}: --rdzv-endpoint"
        if endpoint.endswith(":0") and nodes == "1":
            return
        place = parse_endpoint(endpoint, where=where, default_port=default)
        if not is_static:
            result.add("--scheduler", str(place))
            return
        host, port = place.host, str(place.port)
    if endpoint and not is_static:
        return
    if nodes == "1":
        if port not in ("", "0"):
            if host not in ("", "localhost", "127.0.0.1"):
                result.add("--master-addr", host)
            result.add("--master-port", port)
        return
    if port == "0":
        raise UsageError(
            "port 0 is different on every node", where=result.launcher, hint="set a port"
        )
    if is_static or host:
        result.add("--master-addr", host or "127.0.0.1", "--master-port", port or MASTER_PORT)


def add_shared_options(command: ForeignCommand, result: Translation) -> None:
    """Add the options that accelerate shares with torchrun, and those of torchrun only."""
    command.parse("monitor_interval", parsers.parse_duration_or_zero, 0.1)  # pdrun has no interval
    for key, (option, default) in _SAME_MEANING.items():
        value = command.text_of(key, default)
        if value:
            result.add_unless_default(option, value, default)
    if conf := command.text_of("rdzv_conf"):
        result.add("--rdzv-conf", conf)
    for key in ("run_path", "virtual_local_rank"):
        if command.has(key):
            result.add(f"--{key.replace('_', '-')}")
    signals = command.text_of("signals_to_handle")
    if signals and set(signals.split(",")) != DEFAULT_SIGNALS:
        result.add("--signals-to-handle", signals)


def _check_ignored(command: ForeignCommand) -> None:
    """Check values that pdrun does not need."""
    command.parse("start_method", choice_of("spawn", "fork", "forkserver"), "spawn")
    command.parse("rdzv_backend", choice_of("static", "c10d"), "static")
    if command.text_of("event_log_handler", "null") != "null":
        raise command.make_error(
            "event_log_handler", "is not supported: pdrun writes its own event log", "leave it out"
        )


def translate_colossalai(words: Sequence[str], environ: Mapping[str, str]) -> Translation:
    """Translate ``colossalai run WORDS``, which starts torchrun on each host."""
    command = read_command("colossalai", parse_table(COLOSSALAI_TABLE), words, abbreviates=False)
    result = Translation("colossalai")
    hosts = command.text_of("host")
    hostfile = command.text_of("hostfile")
    if hosts and hostfile:
        raise command.make_error("host", "and --hostfile exclude each other", "remove one of them")
    if hosts:
        result.add("--hosts", hosts)
    elif hostfile:
        result.add("--hostfile", hostfile)
        for key in ("include", "exclude"):
            if chosen := command.text_of(key):
                result.add(f"--{key}", chosen.replace(",", "@"))
        if nodes := command.count_of("num_nodes", least=-1):
            result.add_unless_default("--nodes", str(nodes), "-1")
    else:
        result.add("--nodes", "1")
    workers = command.count_of("nproc_per_node")
    if not workers:
        raise command.make_error("nproc_per_node", "--nproc_per_node is required")
    result.add("--devices", str(workers))
    if (hosts or hostfile) and (port := command.text_of("ssh_port")):
        result.add("--ssh-opts", f"-p {port}")
    address = command.text_of("master_addr", may_be_empty=True)
    if address not in ("", "127.0.0.1"):  # its default stands for the first host
        result.add("--master-addr", address)
    if port := command.text_of("master_port"):
        result.add("--master-port", port)
    if extra := command.text_of("extra_launch_args"):
        raise command.make_error(
            "extra_launch_args",
            f"is not translated: {parsers.quote_text(extra)}",
            "write these options behind pdrun, in torchrun's spelling",
        )
    result.set_program(command.words, is_module=command.has("m"), is_command=False)
    result.left_out = command.list_left_out({})
    return result
