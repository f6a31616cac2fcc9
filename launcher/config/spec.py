"""
JobSpec: everything that the user requested, from the command line, the environment, a job file or a
Python call. Frozen.

A spec contains requests only: `auto` stays `auto` here and becomes a number in the plan. `Sources`
has the source of each value, so that `--explain` and error messages can name it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, field, fields, replace
from typing import Any, Literal

from pdrun.endpoint import Endpoint
from pdrun.errors import UsageError
from pdrun.launcher.hosts.selection import Host
from pdrun.quick_dataclass import dataclass
from pdrun.text import check_name

Sources = Mapping[str, str]
"""
Field path (``resources.devices``) -> source of its value (``--devices``, ``job.yaml:3``,
``default``).
"""

ProgramKind = Literal["script", "module", "command", "function"]
BACKENDS = ("auto", "cpu", "cuda", "rocm", "npu", "xpu", "mps")


@dataclass(frozen=True)
class Program:
    """What every worker runs."""

    kind: ProgramKind
    """
    script: a Python file. module: ``python -m``. command: any executable, run without Python.
    function: a file written by `pdrun.launch`.
    """
    target: str
    """Path, module name or executable, as the user typed it."""
    args: tuple[str, ...] = ()
    python: str = ""
    """Interpreter; empty means the one that runs pdrun."""
    start: Literal["auto", "fork", "exec"] = "auto"
    """
    fork: from one process per node that has imported torch. exec: a new interpreter per worker.
    auto: fork where it is safe.
    """
    warm: bool = True
    """Whether a warm process of this user may be used (`pdrun warm`)."""
    local_rank_arg: str = ""
    """
    Option that each worker gets with its local rank, before ``args``: ``--local-rank``
    (torch.distributed.launch) or ``--local_rank`` (deepspeed). Empty: none.
    """
    stdin: int | None = None
    """
    Rank that reads the standard input of pdrun. None: rank 0 reads a file or a pipe, the only rank
    that is shown reads a terminal.
    """
    prober: str = ""
    """Settings of the prober of a server (`pdrun serve`) as JSON; empty: it is no server."""
    is_per_node: bool = False
    """Whether a node has one worker, which sees all of its devices."""


@dataclass(frozen=True)
class Resources:
    """Number of nodes and workers, devices, threads and CPU binding."""

    nodes: int = 1
    """Largest number of nodes that run workers."""
    min_nodes: int = 0
    """MIN of ``--nodes MIN:MAX``; 0: the job runs with exactly ``nodes`` nodes."""
    spares: int = 0
    """Additional idle nodes that replace lost ones."""
    servers: str = ""
    """Parameter servers of the job (``2``) or of each node (``1/node``); empty: none."""
    devices: int | Literal["auto", "accelerators", "cpus", "accelerators-or-cpus"] = "auto"
    """
    Workers per node. auto: one per visible accelerator, else one. The others are torchrun's
    ``--nproc-per-node gpu``, ``cpu`` (one per usable CPU) and ``auto`` (gpu, else cpu).
    """
    backend: str = "auto"
    """One of BACKENDS."""
    indices: tuple[int, ...] | None = None
    """
    Indices of the visible devices that the workers of this node use (``host:0,2``); None: the
    first ones.
    """
    threads: int | Literal["auto"] = "auto"
    """OMP_NUM_THREADS of a worker; auto: the CPUs bound to it."""
    bind: str = "auto"
    """
    CPU binding: auto, cores, numa, none, or the CPUs of each local rank (``0-3/4-7``). auto: cores
    if the node has at least one core per worker, otherwise none.
    """

    @property
    def required_nodes(self) -> int:
        """Smallest number of nodes with which the job runs."""
        return self.min_nodes or self.nodes

    @property
    def max_members(self) -> int:
        """Largest number of nodes that are members at the same time, spares included."""
        return self.nodes + self.spares

    @property
    def is_elastic(self) -> bool:
        """Whether the job continues after a node leaves."""
        return self.required_nodes < self.nodes or self.spares > 0

    @property
    def node_range(self) -> str:
        """The value of ``--nodes``: ``4``, or ``2:4``."""
        if self.required_nodes < self.nodes:
            return f"{self.required_nodes}:{self.nodes}"
        return str(self.nodes)


@dataclass(frozen=True)
class Policy:
    """Time limits in seconds, and the reaction to failures."""

    start_timeout: float = 600.0
    grace: float = 30.0
    """Seconds between the first signal and SIGKILL, for every kind of shutdown."""
    max_restarts: int = 0
    """Largest number of restarts of the whole job after failures."""
    restart_window: float | None = None
    """Seconds; older restarts do not count. None: all count."""
    restart_on: tuple[int, ...] = ()
    """Exit codes after which the job restarts; empty: all except ``no_restart_on``."""
    no_restart_on: tuple[int, ...] = ()
    backoff: float = 1.0
    """
    Delay before the second of two restarts in quick succession. It doubles for each further
    restart, up to 30.
    """
    gather: float = 10.0
    """Elastic: with fewer than MAX nodes, the job starts after this time without a new node."""
    grow: float | None = None
    """
    Elastic: delay between a late join and a larger generation. None: the node waits for the next
    generation.
    """
    scheduler_loss: float = 60.0
    """How long workers continue after the scheduler is lost; 0: they stop immediately."""
    hang_timeout: float | None = None
    """A worker without progress for this time hangs; None: only certain hangs are reported."""
    time_limit: float | None = None
    """Of the whole job; None: no limit."""


@dataclass(frozen=True)
class Output:
    """Where the workers' output goes."""

    log_dir: str = "pdrun-logs"
    show_ranks: str = "all"
    """
    Ranks that the terminal shows: ``all``, ``none`` or ``0,7-9``. The output of a failed rank is
    always shown.
    """
    show_stderr: str = ""
    """Ranks whose stderr the terminal shows; empty: ``show_ranks`` applies to both streams."""
    prefix: Literal["auto", "rank", "none"] = "auto"
    """auto: ``host:rank|`` before each line, no prefix if the job has one worker."""
    files: bool = True
    """False: no log files, only the terminal."""
    screen: Literal["auto", "line", "none"] = "auto"
    """auto: a line with step, loss and time left below the output, on a terminal."""
    log_name: str = "rank_{rank}"
    """
    Stem of the file names. ``{rank}``, ``{local_rank}``, ``{node}``, ``{ip}`` and ``{hostname}``
    are replaced.
    """


@dataclass(frozen=True)
class ClusterOptions:
    """The hosts of the job, this node's place among them, and where the scheduler is."""

    scheduler: Endpoint | None = None
    store: Endpoint | None = None
    """
    Where torch's store listens on node 0 (``--master-addr``, ``--rdzv-endpoint``, MASTER_PORT). No
    host: an address of node 0. Port 0: the system chooses. None: both.
    """
    node_rank: int | None = None
    node_name: str = ""
    """
    Name of this node in the job (``--node-name``); empty: the host name. Names are unique within
    a job.
    """
    local: bool = False
    """All nodes are simulated on this machine."""
    simulated: tuple[int, int] | None = None
    """
    (index, count): this agent is one of ``count`` agents on one machine and uses its share of the
    CPUs and devices.
    """
    interface: str = ""
    """Address or interface name to listen on; empty: the route to the scheduler."""
    port_range: tuple[int, int] | None = None
    """First and last port on which pdrun's processes listen; None: the system chooses."""
    serve: bool | None = None
    """Whether this node runs the scheduler; None: the addresses decide."""
    token_file: str = ""
    insecure: bool = False
    hosts: tuple[Host, ...] = ()
    """
    Hosts of the job in rank order (``--hosts``, ``--hostfile``); empty: each node starts pdrun
    itself.
    """
    node_names: tuple[str, ...] = ()
    """
    For the scheduler of nodes that one command starts: the names of all in rank order, so that
    messages name those that are missing.
    """
    rank_table: str = ""
    """Path of the Ascend rank table. Workers get it as RANK_TABLE_FILE."""
    launcher: str = ""
    """
    Value of ``--launcher``: the launcher whose variables are read, or the program that starts the
    agents. none: no launcher is read; empty: it is detected.
    """


@dataclass(frozen=True)
class RemoteOptions:
    """How one command starts the agents on other hosts (`pdrun.launcher.plan.hosts`)."""

    ssh: str = "ssh"
    """The program."""
    ssh_opts: tuple[str, ...] = ()
    """Its options, before pdrun's own."""
    ssh_window: int = 0
    """Logins at the same time; 0: pdrun's default."""
    forward: tuple[str, ...] = ()
    """
    Names of the environment variables of this process that the agents get; ``*`` and ``?`` match.
    """
    ship: bool = False
    """Copy pdrun into a private cache folder on hosts where it is not installed."""
    mpirun: str = ""
    """The program of ``--launcher mpirun``; empty: the first of mpirun, mpiexec and jsrun."""
    mpirun_opts: tuple[str, ...] = ()
    srun_opts: tuple[str, ...] = ()
    """Additional options for mpirun or srun."""


@dataclass(frozen=True)
class JobSpec:
    """Everything that the user requested."""

    program: Program
    resources: Resources = field(default_factory=Resources)
    policy: Policy = field(default_factory=Policy)
    output: Output = field(default_factory=Output)
    place: ClusterOptions = field(default_factory=ClusterOptions)
    reach: RemoteOptions = field(default_factory=RemoteOptions)
    job: str = ""
    """
    Name of the job (``--job``, ``--rdzv-id``); empty: derived from the program
    (`pdrun.launcher.config.job_key`).
    """
    env: Mapping[str, str] = field(default_factory=dict)
    """``--env NAME=VALUE``: set in every worker. Variables that `WorkerEnv` sets are refused."""
    chdir: str = ""

    @property
    def can_restart(self) -> bool:
        """Whether a generation of workers may be followed by another one."""
        return self.policy.max_restarts > 0 or self.resources.is_elastic

    def __post_init__(self) -> None:
        if self.job:
            check_name(self.job, where="--job")
        whole = (
            ("--nodes", self.resources.nodes, 1),
            ("--nodes", self.resources.min_nodes, 0),
            ("--spares", self.resources.spares, 0),
            ("--devices", self.resources.devices, 1),
            ("--threads", self.resources.threads, 1),
            ("--max-restarts", self.policy.max_restarts, 0),
        )
        for name, value, least in whole:
            if isinstance(value, int) and value < least:
                raise UsageError(f"must be at least {least}, got {value}", where=name)
        if self.resources.min_nodes > self.resources.nodes:
            least = self.resources.min_nodes
            most = self.resources.nodes
            raise UsageError(f"MIN must not exceed MAX, got {least}:{most}", where="--nodes")
        if self.resources.backend not in BACKENDS:
            raise UsageError(
                f"must be one of {', '.join(BACKENDS)}, got {self.resources.backend!r}",
                where="--backend",
            )
        rank = self.place.node_rank
        if rank is not None and not 0 <= rank < self.resources.nodes:
            raise UsageError(
                f"must be 0 to {self.resources.nodes - 1}, got {rank}",
                where="--node-rank",
            )

    def to_json(self) -> str:
        """Return the spec as one line of JSON for agents on other nodes. It contains no secret."""
        return json.dumps(asdict(self), sort_keys=True)

    def to_shared_json(self) -> str:
        """Return the JSON that other nodes get: the spec without the place of this node."""
        shared = ClusterOptions(port_range=self.place.port_range)
        return replace(self, place=shared).to_json()

    @classmethod
    def from_json(cls, text: str) -> JobSpec:
        """Inverse of `to_json`; unknown or missing keys raise ValueError or TypeError."""
        data: dict[str, Any] = json.loads(text)
        place = dict(data.pop("place"))
        scheduler = place.pop("scheduler")
        store = place.pop("store")
        simulated = place.pop("simulated")
        port_range = place.pop("port_range")
        hosts = place.pop("hosts")
        node_names = tuple(place.pop("node_names"))
        reach = _lists_to_tuples(data.pop("reach"))
        policy = _lists_to_tuples(data.pop("policy"))
        program = dict(data.pop("program"))
        resources = dict(data.pop("resources"))
        return cls(
            program=Program(**{**program, "args": tuple(program["args"])}),
            resources=Resources(**{**resources, "indices": _to_tuple(resources["indices"])}),
            policy=Policy(**policy),
            output=Output(**data.pop("output")),
            place=ClusterOptions(
                scheduler=Endpoint(**scheduler) if scheduler else None,
                store=Endpoint(**store) if store else None,
                simulated=(simulated[0], simulated[1]) if simulated else None,
                port_range=(port_range[0], port_range[1]) if port_range else None,
                hosts=tuple(
                    Host(**{**host, "indices": _to_tuple(host["indices"])}) for host in hosts
                ),
                node_names=node_names,
                **place,
            ),
            reach=RemoteOptions(**reach),
            **data,
        )


def source_of(sources: Sources, path: str, option: str) -> str:
    """Return the source of a field for an error message; ``option`` if it has the default."""
    source = sources.get(path, "default")
    if source == "default":
        return option
    return source


def _lists_to_tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of a dataclass with tuples in the place of JSON's lists."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
    }


def _to_tuple(values: list[int] | None) -> tuple[int, ...] | None:
    if values is None:
        return None
    return tuple(values)


def list_field_paths() -> tuple[str, ...]:
    """Return the field paths of a spec in the order of `--explain`: ``program.kind`` ..."""
    groups = {
        "program": Program,
        "resources": Resources,
        "policy": Policy,
        "output": Output,
        "place": ClusterOptions,
        "reach": RemoteOptions,
    }
    paths: list[str] = []
    for item in fields(JobSpec):
        group = groups.get(item.name)
        paths += [f"{item.name}.{sub.name}" for sub in fields(group)] if group else [item.name]
    return tuple(paths)
