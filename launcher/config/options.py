"""
The options of ``pdrun run`` in pdrun's own spelling: one table that the command line, the
environment and docs read.

A row says what to type, what it means and how to read it; reading gives values for fields of the
JobSpec by path (``resources.nodes``). Paths that are no field (``scheduler.host``) are put together
later, in `pdrun.launcher.config.resolve`. torchrun's and msrun's spellings stand in
`pdrun.launcher.config.aliases`, in rows of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pdrun.endpoint import Endpoint
from pdrun.launcher.adapters.ssh_command import split_ssh_options, split_options
from pdrun.launcher.common import parsers, rank_lists
from pdrun.launcher.config.spec import BACKENDS
from pdrun.launcher.hosts import selection

FieldValues = Mapping[str, Any]
OptionReader = Callable[[str, str], FieldValues]
"""
(text, where) -> field path -> value; raises UsageError naming ``where``. The text of a flag is
empty.
"""

HELP_GROUPS = (
    "What runs",
    "How many of what",
    "Where the nodes meet",
    "Failure and time",
    "Output",
    "Look before you leap",
)


@dataclass(frozen=True)
class Option:
    """One row: an option and its twins in the environment."""

    names: tuple[str, ...]
    """Every spelling, the one to show first."""
    help: str
    read: OptionReader
    group: str = ""
    metavar: str = ""
    """Empty: a flag, which takes no value."""
    env: tuple[str, ...] = ()
    off_values: FieldValues = field(default_factory=dict)
    """What a flag's twin means when it says 0."""
    origin: Literal["pdrun", "torchrun", "msrun"] = "pdrun"
    note: str = ""
    """Said by --explain when the option is used: how its meaning is fulfilled."""
    is_in_short_help: bool = False
    """Whether it stands on the first screen of help."""


def store_parsed(path: str, parser: parsers.Parser) -> OptionReader:
    """Return a reader that puts the parsed value at ``path``."""
    return lambda text, where: {path: parser(text, where)}


def store_value(path: str, value: object) -> OptionReader:
    """Return the reader of a flag."""
    return lambda text, where: {path: value}


def endpoint_reader(path: str = "scheduler") -> Callable[[Endpoint], FieldValues]:
    """Return what an endpoint means: its host and its port, which other options may also give."""
    return lambda endpoint: {f"{path}.host": endpoint.host, f"{path}.port": endpoint.port}


def _read_scheduler(text: str, where: str) -> FieldValues:
    return endpoint_reader()(parsers.endpoint_parser()(text, where))


def _read_node_rank(text: str, where: str) -> FieldValues:
    if where == "--node_rank" and text == "-1":  # msrun's spelling of "not said"
        return {}
    return {"place.node_rank": parsers.int_parser(0)(text, where)}


def read_nodes(text: str, where: str) -> FieldValues:
    """
    Read ``N`` or ``MIN:MAX``. Both bounds are said, so that one source never completes another's.
    """
    least, most = parsers.parse_node_range(text, where)
    return {"resources.nodes": most, "resources.min_nodes": least}


def _read_mpirun(text: str, where: str) -> FieldValues:
    return {"reach.mpirun": parsers.parse_path(text, where), "place.launcher": "mpirun"}


def _read_launcher(text: str, where: str) -> FieldValues:
    from pdrun.launcher.adapters import names

    return {"place.launcher": names.check_launcher(text, where)}


def _read_env(text: str, where: str) -> FieldValues:
    name, value = parsers.parse_assignment(text, where)
    return {f"env.{name}": value}


RUN_OPTIONS = (
    Option(
        ("-m", "--module"),
        "run a module, as python -m does",
        store_value("program.kind", "module"),
        HELP_GROUPS[0],
        env=("PDRUN_MODULE", "PET_MODULE"),
        is_in_short_help=True,
    ),
    Option(
        ("--no-python", "--no_python"),
        "run any executable, without Python in front",
        store_value("program.kind", "command"),
        HELP_GROUPS[0],
        env=("PDRUN_NO_PYTHON", "PET_NO_PYTHON"),
        is_in_short_help=True,
    ),
    Option(
        ("--python",),
        "interpreter of the workers (default: the one that runs pdrun)",
        store_parsed("program.python", parsers.parse_path),
        HELP_GROUPS[0],
        "PATH",
        ("PDRUN_PYTHON",),
    ),
    Option(
        ("--start",),
        "fork workers from one import of torch, or exec each: auto, fork, exec",
        store_parsed("program.start", parsers.choice_parser("auto", "fork", "exec")),
        HELP_GROUPS[0],
        "HOW",
        ("PDRUN_START",),
    ),
    Option(
        ("--no-warm",),
        "leave a warm process (pdrun warm) unused",
        store_value("program.warm", False),
        HELP_GROUPS[0],
        env=("PDRUN_NO_WARM",),
        off_values={"program.warm": True},
    ),
    Option(
        ("--env",),
        "set a variable in every worker; may be repeated",
        _read_env,
        HELP_GROUPS[0],
        "NAME=VALUE",
    ),
    Option(
        ("--chdir",),
        "start the workers in this folder, as if typed there",
        store_parsed("chdir", parsers.parse_path),
        HELP_GROUPS[0],
        "DIR",
        ("PDRUN_CHDIR",),
    ),
    Option(
        ("--nodes",),
        "nodes (default 1); MIN:MAX: they may come and go",
        read_nodes,
        HELP_GROUPS[1],
        "N|MIN:MAX",
        ("PDRUN_NODES",),
        is_in_short_help=True,
    ),
    Option(
        ("--spares",),
        "further nodes that stand by to replace one that is lost (default: 0)",
        store_parsed("resources.spares", parsers.int_parser(0)),
        HELP_GROUPS[1],
        "N",
        ("PDRUN_SPARES",),
    ),
    Option(
        ("--devices",),
        "workers on each node (auto: one a device)",
        store_parsed("resources.devices", parsers.int_or_auto_parser()),
        HELP_GROUPS[1],
        "N|auto",
        ("PDRUN_DEVICES",),
        is_in_short_help=True,
    ),
    Option(
        ("--backend",),
        f"{', '.join(BACKENDS)}",
        store_parsed("resources.backend", parsers.choice_parser(*BACKENDS)),
        HELP_GROUPS[1],
        "NAME",
        ("PDRUN_BACKEND",),
        is_in_short_help=True,
    ),
    Option(
        ("--threads",),
        "OMP_NUM_THREADS of a worker (auto: its share of the CPUs)",
        store_parsed("resources.threads", parsers.int_or_auto_parser()),
        HELP_GROUPS[1],
        "N|auto",
        ("PDRUN_THREADS",),
    ),
    Option(
        ("--bind",),
        "bind workers to CPUs: auto, cores, numa, none",
        store_parsed("resources.bind", parsers.choice_parser("auto", "cores", "numa", "none")),
        HELP_GROUPS[1],
        "HOW",
        ("PDRUN_BIND",),
    ),
    Option(
        ("--local",),
        "simulate all nodes on this machine",
        store_value("place.local", True),
        HELP_GROUPS[1],
        env=("PDRUN_LOCAL",),
        off_values={"place.local": False},
        is_in_short_help=True,
    ),
    Option(
        ("--scheduler",),
        "where the first node answers; same on all nodes",
        _read_scheduler,
        HELP_GROUPS[2],
        "HOST:PORT",
        ("PDRUN_SCHEDULER",),
        is_in_short_help=True,
    ),
    Option(
        ("--hosts",),
        "the nodes: a,b or node[01-04]:DEVICES",
        store_parsed("hosts.all", selection.parse_hosts),
        HELP_GROUPS[2],
        "LIST",
        ("PDRUN_HOSTS",),
        is_in_short_help=True,
    ),
    Option(
        ("--hostfile",),
        "the same as a file, in any grammar (- is stdin)",
        store_parsed("hosts.file", parsers.parse_path),
        HELP_GROUPS[2],
        "FILE",
        ("PDRUN_HOSTFILE",),
        is_in_short_help=True,
    ),
    Option(
        ("--include",),
        "only these hosts and devices: a@b:0,2",
        store_parsed("hosts.include", selection.parse_host_choice),
        HELP_GROUPS[2],
        "LIST",
        ("PDRUN_INCLUDE",),
    ),
    Option(
        ("--exclude",),
        "not these hosts and devices: a@b:0,2",
        store_parsed("hosts.exclude", selection.parse_host_choice),
        HELP_GROUPS[2],
        "LIST",
        ("PDRUN_EXCLUDE",),
    ),
    Option(
        ("--rank-table",),
        "Ascend's rank table: hosts, devices and ranks",
        store_parsed("place.rank_table", parsers.parse_path),
        HELP_GROUPS[2],
        "FILE",
        ("PDRUN_RANK_TABLE",),
    ),
    Option(
        ("--launcher",),
        "whose variables to read: auto, none or a name that pdrun env shows",
        _read_launcher,
        HELP_GROUPS[2],
        "NAME",
        ("PDRUN_LAUNCHER",),
    ),
    Option(
        ("--serve",),
        "this node is the first one and runs the scheduler",
        store_value("place.serve", True),
        HELP_GROUPS[2],
        env=("PDRUN_SERVE",),
        off_values={"place.serve": False},
    ),
    Option(
        ("--no-serve",), "this node only joins", store_value("place.serve", False), HELP_GROUPS[2]
    ),
    Option(
        ("--node-rank", "--node_rank"),
        "place of this node, 0 to N-1 (default: by name)",
        _read_node_rank,
        HELP_GROUPS[2],
        "N",
        ("PDRUN_NODE_RANK", "PET_NODE_RANK"),
        is_in_short_help=True,
    ),
    Option(
        ("--node-name",),
        "name of this node in the job (default: the host name)",
        store_parsed("place.node_name", parsers.parse_node_name),
        HELP_GROUPS[2],
        "NAME",
        ("PDRUN_NODE_NAME",),
    ),
    Option(
        ("--interface",),
        "interface or address to listen on (default: the route to the scheduler)",
        store_parsed("place.interface", parsers.parse_interface),
        HELP_GROUPS[2],
        "NAME",
        ("PDRUN_INTERFACE",),
    ),
    Option(
        ("--job",),
        "name of the job; other jobs' nodes are refused",
        store_parsed("job", parsers.parse_job_name),
        HELP_GROUPS[2],
        "NAME",
        ("PDRUN_JOB",),
        is_in_short_help=True,
    ),
    Option(
        ("--token-file",),
        "file with the job's token (pdrun token create)",
        store_parsed("place.token_file", parsers.parse_path),
        HELP_GROUPS[2],
        "FILE",
        ("PDRUN_TOKEN_FILE",),
        is_in_short_help=True,
    ),
    Option(
        ("--forward",),
        "variables that other hosts get: names or patterns (NCCL_*), by commas",
        store_parsed("reach.forward", parsers.parse_patterns),
        HELP_GROUPS[2],
        "NAMES",
        ("PDRUN_FORWARD",),
    ),
    Option(
        ("--ssh",),
        "ssh program for --hosts (default: ssh)",
        store_parsed("reach.ssh", parsers.parse_path),
        HELP_GROUPS[2],
        "PROGRAM",
        ("PDRUN_SSH",),
    ),
    Option(
        ("--ssh-opts",),
        "its options, as one text: '-p 2222 -i KEY'",
        store_parsed("reach.ssh_opts", split_ssh_options),
        HELP_GROUPS[2],
        "TEXT",
        ("PDRUN_SSH_OPTS",),
    ),
    Option(
        ("--mpirun",),
        "start the nodes through this mpirun (as --launcher mpirun does)",
        _read_mpirun,
        HELP_GROUPS[2],
        "PROGRAM",
        ("PDRUN_MPIRUN",),
    ),
    Option(
        ("--mpirun-opts",),
        "more options for it, as one text",
        store_parsed("reach.mpirun_opts", split_options),
        HELP_GROUPS[2],
        "TEXT",
        ("PDRUN_MPIRUN_OPTS",),
    ),
    Option(
        ("--srun-opts",),
        "more options for srun, as one text",
        store_parsed("reach.srun_opts", split_options),
        HELP_GROUPS[2],
        "TEXT",
        ("PDRUN_SRUN_OPTS",),
    ),
    Option(
        ("--ship",),
        "copy pdrun to hosts that lack it, into a private cache folder",
        store_value("reach.ship", True),
        HELP_GROUPS[2],
        env=("PDRUN_SHIP",),
        off_values={"reach.ship": False},
    ),
    Option(
        ("--insecure",),
        "no encryption and no token: anyone who reaches the port may take part",
        store_value("place.insecure", True),
        HELP_GROUPS[2],
    ),
    Option(
        ("--start-timeout",),
        "longest wait for all nodes (default: 10m)",
        store_parsed("policy.start_timeout", parsers.parse_duration),
        HELP_GROUPS[3],
        "TIME",
        ("PDRUN_START_TIMEOUT",),
    ),
    Option(
        ("--grace",),
        "from the first signal to SIGKILL (default: 30s)",
        store_parsed("policy.grace", parsers.parse_duration_or_zero),
        HELP_GROUPS[3],
        "TIME",
        ("PDRUN_GRACE",),
        is_in_short_help=True,
    ),
    Option(
        ("--max-restarts", "--max_restarts"),
        "restarts of the whole job (default: 0)",
        store_parsed("policy.max_restarts", parsers.int_parser(0)),
        HELP_GROUPS[3],
        "N",
        ("PDRUN_MAX_RESTARTS", "PET_MAX_RESTARTS"),
        is_in_short_help=True,
    ),
    Option(
        ("--restart-window",),
        "only restarts of the last TIME count (default: all)",
        store_parsed("policy.restart_window", parsers.parse_duration),
        HELP_GROUPS[3],
        "TIME",
        ("PDRUN_RESTART_WINDOW",),
    ),
    Option(
        ("--restart-on",),
        "restart after these exit codes only: 1,3-5,SIGKILL",
        store_parsed("policy.restart_on", parsers.parse_exit_codes),
        HELP_GROUPS[3],
        "CODES",
        ("PDRUN_RESTART_ON",),
    ),
    Option(
        ("--no-restart-on",),
        "never restart after these exit codes",
        store_parsed("policy.no_restart_on", parsers.parse_exit_codes),
        HELP_GROUPS[3],
        "CODES",
        ("PDRUN_NO_RESTART_ON",),
    ),
    Option(
        ("--backoff",),
        "before the second of two quick restarts, then doubled (default: 1s)",
        store_parsed("policy.backoff", parsers.parse_duration_or_zero),
        HELP_GROUPS[3],
        "TIME",
        ("PDRUN_BACKOFF",),
    ),
    Option(
        ("--gather",),
        "MIN:MAX: quiet after which fewer than MAX nodes begin (default: 10s)",
        store_parsed("policy.gather", parsers.parse_duration_or_zero),
        HELP_GROUPS[3],
        "TIME",
        ("PDRUN_GATHER",),
    ),
    Option(
        ("--grow",),
        "MIN:MAX: restart with a late node after TIME (default: at the next restart)",
        store_parsed("policy.grow", parsers.parse_duration_or_zero),
        HELP_GROUPS[3],
        "TIME",
        ("PDRUN_GROW",),
    ),
    Option(
        ("--on-scheduler-loss",),
        "workers go on meanwhile, or stop: wait[=TIME], stop (default: wait=60s)",
        store_parsed("policy.scheduler_loss", parsers.parse_scheduler_loss),
        HELP_GROUPS[3],
        "HOW",
        ("PDRUN_ON_SCHEDULER_LOSS",),
    ),
    Option(
        ("--hang-timeout",),
        "without progress for TIME a worker hangs: show all stacks, then as a failure",
        store_parsed("policy.hang_timeout", parsers.parse_duration),
        HELP_GROUPS[3],
        "TIME",
        ("PDRUN_HANG_TIMEOUT",),
    ),
    Option(
        ("--time-limit",),
        "end the job after this time, with exit code 124",
        store_parsed("policy.time_limit", parsers.parse_duration),
        HELP_GROUPS[3],
        "TIME",
        ("PDRUN_TIME_LIMIT",),
    ),
    Option(
        ("--log-dir", "--log_dir"),
        "folder of the logs (default: pdrun-logs)",
        store_parsed("output.log_dir", parsers.parse_path),
        HELP_GROUPS[4],
        "DIR",
        ("PDRUN_LOG_DIR", "PET_LOG_DIR"),
        is_in_short_help=True,
    ),
    Option(
        ("--log-name",),
        "stem of a worker's files: {rank} {local_rank} {node} {ip} {hostname}",
        store_parsed("output.log_name", parsers.parse_log_name),
        HELP_GROUPS[4],
        "STEM",
        ("PDRUN_LOG_NAME",),
    ),
    Option(
        ("--no-files",),
        "no log files, only the terminal",
        store_value("output.files", False),
        HELP_GROUPS[4],
        env=("PDRUN_NO_FILES",),
        off_values={"output.files": True},
    ),
    Option(
        ("--show-ranks",),
        "all, none or 0,7-9; a failed rank is always shown",
        store_parsed("output.show_ranks", rank_lists.parse_ranks),
        HELP_GROUPS[4],
        "RANKS",
        ("PDRUN_SHOW_RANKS",),
        is_in_short_help=True,
    ),
    Option(
        ("--prefix",),
        "before each line: auto, rank, none",
        store_parsed("output.prefix", parsers.choice_parser("auto", "rank", "none")),
        HELP_GROUPS[4],
        "HOW",
        ("PDRUN_PREFIX",),
    ),
    Option(
        ("--dry-run",),
        "print the plan and start nothing",
        store_value("ask.dry_run", True),
        HELP_GROUPS[5],
        is_in_short_help=True,
    ),
    Option(
        ("--explain",),
        "print every value with its source, then run",
        store_value("ask.explain", True),
        HELP_GROUPS[5],
        is_in_short_help=True,
    ),
    Option(
        ("--json",),
        "the plan as JSON (with --dry-run)",
        store_value("ask.json", True),
        HELP_GROUPS[5],
    ),
)

OTHER_VARIABLES = (
    "PDRUN_TOKEN",
    "PDRUN_JOURNAL",
    "PDRUN_ROLE",
    "PDRUN_WORKER_NUM",
    "PDRUN_WORKERS",
    "PDRUN_NODE",
    "PDRUN_GENERATION",
    "PDRUN_DEVICE_KIND",
    "PDRUN_COLLECTIVE",
    "PDRUN_RANK",
    "PDRUN_RUN",
    "PDRUN_WORKER_ID",
    "PDRUN_WORKER_OF",
    "PDRUN_AGREED_STEP",
    "PDRUN_AGENT",
)
"""
Variables of pdrun that are no option's twin: the token, the dynamic cluster's, and what workers are
given.
"""
WORKER_VARIABLES = ("PDRUN_JOB",)
"""
Twins of options that `WorkerEnv` also sets: not read where an outer pdrun has set them for its
worker.
"""
