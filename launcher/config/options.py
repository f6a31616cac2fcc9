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
from pdrun.launcher.adapters.ssh_command import ssh_options, words
from pdrun.launcher.common import parsers
from pdrun.launcher.config.spec import BACKENDS
from pdrun.launcher.hosts import selection as hosts

Values = Mapping[str, Any]
Read = Callable[[str, str], Values]
"""
(text, where) -> field path -> value; raises UsageError naming ``where``. The text of a flag is
empty.
"""

GROUPS = (
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
    read: Read
    group: str = ""
    metavar: str = ""
    """Empty: a flag, which takes no value."""
    env: tuple[str, ...] = ()
    off: Values = field(default_factory=dict)
    """What a flag's twin means when it says 0."""
    origin: Literal["pdrun", "torchrun", "msrun"] = "pdrun"
    note: str = ""
    """Said by --explain when the option is used: how its meaning is fulfilled."""
    first: bool = False
    """Whether it stands on the first screen of help."""


def to(path: str, parser: parsers.Parser) -> Read:
    """Return a reader that puts the parsed value at ``path``."""
    return lambda text, where: {path: parser(text, where)}


def says(path: str, value: object) -> Read:
    """Return the reader of a flag."""
    return lambda text, where: {path: value}


def place_of(path: str = "scheduler") -> Callable[[Endpoint], Values]:
    """Return what an endpoint means: its host and its port, which other options may also give."""
    return lambda endpoint: {f"{path}.host": endpoint.host, f"{path}.port": endpoint.port}


def _scheduler(text: str, where: str) -> Values:
    return place_of()(parsers.endpoint()(text, where))


def _node_rank(text: str, where: str) -> Values:
    if where == "--node_rank" and text == "-1":  # msrun's spelling of "not said"
        return {}
    return {"place.node_rank": parsers.whole(0)(text, where)}


def nodes_of(text: str, where: str) -> Values:
    """
    Read ``N`` or ``MIN:MAX``. Both bounds are said, so that one source never completes another's.
    """
    least, most = parsers.node_range(text, where)
    return {"resources.nodes": most, "resources.min_nodes": least}


def _mpirun(text: str, where: str) -> Values:
    return {"reach.mpirun": parsers.path(text, where), "place.launcher": "mpirun"}


def _launcher(text: str, where: str) -> Values:
    from pdrun.launcher.adapters import names

    return {"place.launcher": names.check(text, where)}


def _variable(text: str, where: str) -> Values:
    name, value = parsers.assignment(text, where)
    return {f"env.{name}": value}


RUN = (
    Option(
        ("-m", "--module"),
        "run a module, as python -m does",
        says("program.kind", "module"),
        GROUPS[0],
        env=("PDRUN_MODULE", "PET_MODULE"),
        first=True,
    ),
    Option(
        ("--no-python", "--no_python"),
        "run any executable, without Python in front",
        says("program.kind", "command"),
        GROUPS[0],
        env=("PDRUN_NO_PYTHON", "PET_NO_PYTHON"),
        first=True,
    ),
    Option(
        ("--python",),
        "interpreter of the workers (default: the one that runs pdrun)",
        to("program.python", parsers.path),
        GROUPS[0],
        "PATH",
        ("PDRUN_PYTHON",),
    ),
    Option(
        ("--start",),
        "fork workers from one import of torch, or exec each: auto, fork, exec",
        to("program.start", parsers.choice("auto", "fork", "exec")),
        GROUPS[0],
        "HOW",
        ("PDRUN_START",),
    ),
    Option(
        ("--no-warm",),
        "leave a warm process (pdrun warm) unused",
        says("program.warm", False),
        GROUPS[0],
        env=("PDRUN_NO_WARM",),
        off={"program.warm": True},
    ),
    Option(
        ("--env",),
        "set a variable in every worker; may be repeated",
        _variable,
        GROUPS[0],
        "NAME=VALUE",
    ),
    Option(
        ("--chdir",),
        "start the workers in this folder, as if typed there",
        to("chdir", parsers.path),
        GROUPS[0],
        "DIR",
        ("PDRUN_CHDIR",),
    ),
    Option(
        ("--nodes",),
        "nodes (default 1); MIN:MAX: they may come and go",
        nodes_of,
        GROUPS[1],
        "N|MIN:MAX",
        ("PDRUN_NODES",),
        first=True,
    ),
    Option(
        ("--spares",),
        "further nodes that stand by to replace one that is lost (default: 0)",
        to("resources.spares", parsers.whole(0)),
        GROUPS[1],
        "N",
        ("PDRUN_SPARES",),
    ),
    Option(
        ("--devices",),
        "workers on each node (auto: one a device)",
        to("resources.devices", parsers.whole_or_auto()),
        GROUPS[1],
        "N|auto",
        ("PDRUN_DEVICES",),
        first=True,
    ),
    Option(
        ("--backend",),
        f"{', '.join(BACKENDS)}",
        to("resources.backend", parsers.choice(*BACKENDS)),
        GROUPS[1],
        "NAME",
        ("PDRUN_BACKEND",),
        first=True,
    ),
    Option(
        ("--threads",),
        "OMP_NUM_THREADS of a worker (auto: its share of the CPUs)",
        to("resources.threads", parsers.whole_or_auto()),
        GROUPS[1],
        "N|auto",
        ("PDRUN_THREADS",),
    ),
    Option(
        ("--bind",),
        "bind workers to CPUs: auto, cores, numa, none",
        to("resources.bind", parsers.choice("auto", "cores", "numa", "none")),
        GROUPS[1],
        "HOW",
        ("PDRUN_BIND",),
    ),
    Option(
        ("--local",),
        "simulate all nodes on this machine",
        says("place.local", True),
        GROUPS[1],
        env=("PDRUN_LOCAL",),
        off={"place.local": False},
        first=True,
    ),
    Option(
        ("--scheduler",),
        "where the first node answers; same on all nodes",
        _scheduler,
        GROUPS[2],
        "HOST:PORT",
        ("PDRUN_SCHEDULER",),
        first=True,
    ),
    Option(
        ("--hosts",),
        "the nodes: a,b or node[01-04]:DEVICES",
        to("hosts.all", hosts.parse_hosts),
        GROUPS[2],
        "LIST",
        ("PDRUN_HOSTS",),
        first=True,
    ),
    Option(
        ("--hostfile",),
        "the same as a file, in any grammar (- is stdin)",
        to("hosts.file", parsers.path),
        GROUPS[2],
        "FILE",
        ("PDRUN_HOSTFILE",),
        first=True,
    ),
    Option(
        ("--include",),
        "only these hosts and devices: a@b:0,2",
        to("hosts.include", hosts.parse_choice),
        GROUPS[2],
        "LIST",
        ("PDRUN_INCLUDE",),
    ),
    Option(
        ("--exclude",),
        "not these hosts and devices: a@b:0,2",
        to("hosts.exclude", hosts.parse_choice),
        GROUPS[2],
        "LIST",
        ("PDRUN_EXCLUDE",),
    ),
    Option(
        ("--rank-table",),
        "Ascend's rank table: hosts, devices and ranks",
        to("place.rank_table", parsers.path),
        GROUPS[2],
        "FILE",
        ("PDRUN_RANK_TABLE",),
    ),
    Option(
        ("--launcher",),
        "whose variables to read: auto, none or a name that pdrun env shows",
        _launcher,
        GROUPS[2],
        "NAME",
        ("PDRUN_LAUNCHER",),
    ),
    Option(
        ("--serve",),
        "this node is the first one and runs the scheduler",
        says("place.serve", True),
        GROUPS[2],
        env=("PDRUN_SERVE",),
        off={"place.serve": False},
    ),
    Option(("--no-serve",), "this node only joins", says("place.serve", False), GROUPS[2]),
    Option(
        ("--node-rank", "--node_rank"),
        "place of this node, 0 to N-1 (default: by name)",
        _node_rank,
        GROUPS[2],
        "N",
        ("PDRUN_NODE_RANK", "PET_NODE_RANK"),
        first=True,
    ),
    Option(
        ("--node-name",),
        "name of this node in the job (default: the host name)",
        to("place.node_name", parsers.node_name),
        GROUPS[2],
        "NAME",
        ("PDRUN_NODE_NAME",),
    ),
    Option(
        ("--interface",),
        "interface or address to listen on (default: the route to the scheduler)",
        to("place.interface", parsers.interface),
        GROUPS[2],
        "NAME",
        ("PDRUN_INTERFACE",),
    ),
    Option(
        ("--job",),
        "name of the job; other jobs' nodes are refused",
        to("job", parsers.name),
        GROUPS[2],
        "NAME",
        ("PDRUN_JOB",),
        first=True,
    ),
    Option(
        ("--token-file",),
        "file with the job's token (pdrun token create)",
        to("place.token_file", parsers.path),
        GROUPS[2],
        "FILE",
        ("PDRUN_TOKEN_FILE",),
        first=True,
    ),
    Option(
        ("--forward",),
        "variables that other hosts get: names or patterns (NCCL_*), by commas",
        to("reach.forward", parsers.patterns),
        GROUPS[2],
        "NAMES",
        ("PDRUN_FORWARD",),
    ),
    Option(
        ("--ssh",),
        "ssh program for --hosts (default: ssh)",
        to("reach.ssh", parsers.path),
        GROUPS[2],
        "PROGRAM",
        ("PDRUN_SSH",),
    ),
    Option(
        ("--ssh-opts",),
        "its options, as one text: '-p 2222 -i KEY'",
        to("reach.ssh_opts", ssh_options),
        GROUPS[2],
        "TEXT",
        ("PDRUN_SSH_OPTS",),
    ),
    Option(
        ("--mpirun",),
        "start the nodes through this mpirun (as --launcher mpirun does)",
        _mpirun,
        GROUPS[2],
        "PROGRAM",
        ("PDRUN_MPIRUN",),
    ),
    Option(
        ("--mpirun-opts",),
        "more options for it, as one text",
        to("reach.mpirun_opts", words),
        GROUPS[2],
        "TEXT",
        ("PDRUN_MPIRUN_OPTS",),
    ),
    Option(
        ("--srun-opts",),
        "more options for srun, as one text",
        to("reach.srun_opts", words),
        GROUPS[2],
        "TEXT",
        ("PDRUN_SRUN_OPTS",),
    ),
    Option(
        ("--ship",),
        "copy pdrun to hosts that lack it, into a private cache folder",
        says("reach.ship", True),
        GROUPS[2],
        env=("PDRUN_SHIP",),
        off={"reach.ship": False},
    ),
    Option(
        ("--insecure",),
        "no encryption and no token: anyone who reaches the port may take part",
        says("place.insecure", True),
        GROUPS[2],
    ),
    Option(
        ("--start-timeout",),
        "longest wait for all nodes (default: 10m)",
        to("policy.start_timeout", parsers.duration),
        GROUPS[3],
        "TIME",
        ("PDRUN_START_TIMEOUT",),
    ),
    Option(
        ("--grace",),
        "from the first signal to SIGKILL (default: 30s)",
        to("policy.grace", parsers.duration_or_zero),
        GROUPS[3],
        "TIME",
        ("PDRUN_GRACE",),
        first=True,
    ),
    Option(
        ("--max-restarts", "--max_restarts"),
        "restarts of the whole job (default: 0)",
        to("policy.max_restarts", parsers.whole(0)),
        GROUPS[3],
        "N",
        ("PDRUN_MAX_RESTARTS", "PET_MAX_RESTARTS"),
        first=True,
    ),
    Option(
        ("--restart-window",),
        "only restarts of the last TIME count (default: all)",
        to("policy.restart_window", parsers.duration),
        GROUPS[3],
        "TIME",
        ("PDRUN_RESTART_WINDOW",),
    ),
    Option(
        ("--restart-on",),
        "restart after these exit codes only: 1,3-5,SIGKILL",
        to("policy.restart_on", parsers.exit_codes),
        GROUPS[3],
        "CODES",
        ("PDRUN_RESTART_ON",),
    ),
    Option(
        ("--no-restart-on",),
        "never restart after these exit codes",
        to("policy.no_restart_on", parsers.exit_codes),
        GROUPS[3],
        "CODES",
        ("PDRUN_NO_RESTART_ON",),
    ),
    Option(
        ("--backoff",),
        "before the second of two quick restarts, then doubled (default: 1s)",
        to("policy.backoff", parsers.duration_or_zero),
        GROUPS[3],
        "TIME",
        ("PDRUN_BACKOFF",),
    ),
    Option(
        ("--gather",),
        "MIN:MAX: quiet after which fewer than MAX nodes begin (default: 10s)",
        to("policy.gather", parsers.duration_or_zero),
        GROUPS[3],
        "TIME",
        ("PDRUN_GATHER",),
    ),
    Option(
        ("--grow",),
        "MIN:MAX: restart with a late node after TIME (default: at the next restart)",
        to("policy.grow", parsers.duration_or_zero),
        GROUPS[3],
        "TIME",
        ("PDRUN_GROW",),
    ),
    Option(
        ("--on-scheduler-loss",),
        "workers go on meanwhile, or stop: wait[=TIME], stop (default: wait=60s)",
        to("policy.scheduler_loss", parsers.scheduler_loss),
        GROUPS[3],
        "HOW",
        ("PDRUN_ON_SCHEDULER_LOSS",),
    ),
    Option(
        ("--hang-timeout",),
        "without progress for TIME a worker hangs: show all stacks, then as a failure",
        to("policy.hang_timeout", parsers.duration),
        GROUPS[3],
        "TIME",
        ("PDRUN_HANG_TIMEOUT",),
    ),
    Option(
        ("--time-limit",),
        "end the job after this time, with exit code 124",
        to("policy.time_limit", parsers.duration),
        GROUPS[3],
        "TIME",
        ("PDRUN_TIME_LIMIT",),
    ),
    Option(
        ("--log-dir", "--log_dir"),
        "folder of the logs (default: pdrun-logs)",
        to("output.log_dir", parsers.path),
        GROUPS[4],
        "DIR",
        ("PDRUN_LOG_DIR", "PET_LOG_DIR"),
        first=True,
    ),
    Option(
        ("--log-name",),
        "stem of a worker's files: {rank} {local_rank} {node} {ip} {hostname}",
        to("output.log_name", parsers.log_name),
        GROUPS[4],
        "STEM",
        ("PDRUN_LOG_NAME",),
    ),
    Option(
        ("--no-files",),
        "no log files, only the terminal",
        says("output.files", False),
        GROUPS[4],
        env=("PDRUN_NO_FILES",),
        off={"output.files": True},
    ),
    Option(
        ("--show-ranks",),
        "all, none or 0,7-9; a failed rank is always shown",
        to("output.show_ranks", parsers.ranks),
        GROUPS[4],
        "RANKS",
        ("PDRUN_SHOW_RANKS",),
        first=True,
    ),
    Option(
        ("--prefix",),
        "before each line: auto, rank, none",
        to("output.prefix", parsers.choice("auto", "rank", "none")),
        GROUPS[4],
        "HOW",
        ("PDRUN_PREFIX",),
    ),
    Option(
        ("--dry-run",),
        "print the plan and start nothing",
        says("ask.dry_run", True),
        GROUPS[5],
        first=True,
    ),
    Option(
        ("--explain",),
        "print every value with its source, then run",
        says("ask.explain", True),
        GROUPS[5],
        first=True,
    ),
    Option(("--json",), "the plan as JSON (with --dry-run)", says("ask.json", True), GROUPS[5]),
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
GIVEN_TO_WORKERS = ("PDRUN_JOB",)
"""
Twins of options that `WorkerEnv` also sets: not read where an outer pdrun has set them for its
worker.
"""
