"""
What the user asked for: one frozen JobSpec, however it was said (command line, environment, job
file, Python call).

A spec holds wishes, never findings: `auto` stays `auto` here and becomes a number in the plan. Each
value keeps the place that it came from (`Sources`), so that `--explain` and every complaint can
name it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from pdrun.endpoint import Endpoint
from pdrun.errors import UsageError
from pdrun.launcher.hosts.selection import Host
from pdrun.names import check_name

Sources = Mapping[str, str]
"""
Field path (``resources.devices``) -> where its value came from (``--devices``, ``job.yaml:3``,
``default``).
"""

ProgramKind = Literal["script", "module", "command", "function"]
BACKENDS = ("auto", "cpu", "cuda", "rocm", "npu", "xpu", "mps")


@dataclass(frozen=True)
class Program:
    """What every worker runs."""

    kind: ProgramKind
    """
    script: a Python file. module: ``python -m``. command: any executable, without Python in front.
    function: a file made by `pdrun.launch`.
    """
    target: str
    """Path, module name or executable, as the user typed it."""
    args: tuple[str, ...] = ()
    python: str = ""
    """Interpreter; empty means the one that runs pdrun."""
    start: Literal["auto", "fork", "exec"] = "auto"
    """
    fork: from one process a node that has imported torch. exec: an interpreter each. auto: fork
    where it is safe.
    """
    warm: bool = True
    """Whether a warm process of this user's may be used (`pdrun warm`)."""


@dataclass(frozen=True)
class Resources:
    """How many of what."""

    nodes: int = 1
    """Nodes that take part at most."""
    min_nodes: int = 0
    """``--nodes MIN:MAX``: the job runs with at least so many; 0: with ``nodes`` only."""
    spares: int = 0
    """Nodes beyond ``nodes`` that stand by to replace one that is lost."""
    devices: int | Literal["auto", "accelerators", "cpus", "accelerators-or-cpus"] = "auto"
    """
    Workers on each node. auto: every accelerator that is visible, one where there is none. The
    others are torchrun's ``--nproc-per-node gpu``, ``cpu`` (one a usable CPU) and ``auto`` (the
    first, else the second).
    """
    backend: str = "auto"
    """One of BACKENDS."""
    indices: tuple[int, ...] | None = None
    """
    Which of the visible devices the workers of this node use (``host:0,2``); None: the first ones.
    """
    threads: int | Literal["auto"] = "auto"
    """OMP_NUM_THREADS of a worker; auto: the CPUs bound to it."""
    bind: Literal["auto", "cores", "numa", "none"] = "auto"
    """CPU binding. auto: cores where the node has at least one core a worker, else none."""

    @property
    def required_nodes(self) -> int:
        """Nodes with which the job runs at least."""
        return self.min_nodes or self.nodes

    @property
    def max_members(self) -> int:
        """Nodes that may be there at once, those that stand by included."""
        return self.nodes + self.spares

    @property
    def is_elastic(self) -> bool:
        """Whether the job goes on without a node that leaves."""
        return self.required_nodes < self.nodes or self.spares > 0

    @property
    def node_range(self) -> str:
        """The nodes as one types them: ``4``, or ``2:4``."""
        if self.required_nodes < self.nodes:
            return f"{self.required_nodes}:{self.nodes}"
        return str(self.nodes)


@dataclass(frozen=True)
class Policy:
    """Times in seconds, and what a failure leads to."""

    start_timeout: float = 600.0
    grace: float = 30.0
    """Between the first signal and SIGKILL, on every path."""
    max_restarts: int = 0
    """Restarts after failures, of the whole job."""
    restart_window: float | None = None
    """Only restarts of the last so many seconds count; None: all."""
    restart_on: tuple[int, ...] = ()
    """Exit codes after which to restart; empty: all but ``no_restart_on``."""
    no_restart_on: tuple[int, ...] = ()
    backoff: float = 1.0
    """
    Before the second of two restarts in quick succession; doubled for each further one, at most 30.
    """
    gather: float = 10.0
    """Elastic: with fewer than the most nodes, quiet after which to form."""
    grow: float | None = None
    """
    Elastic: how soon after a late joiner a larger generation is opened; None: it waits for the next
    one.
    """
    scheduler_loss: float = 60.0
    """How long to wait for a lost scheduler with the workers going on; 0: stop at once."""
    hang_timeout: float | None = None
    """Without progress for so long a worker hangs; None: only what certainly hangs does."""
    time_limit: float | None = None
    """Of the whole job; None: no limit."""


@dataclass(frozen=True)
class Output:
    """Where the workers' output goes."""

    log_dir: str = "pdrun-logs"
    show_ranks: str = "all"
    """
    Ranks whose output is shown on the terminal: ``all``, ``none`` or ``0,7-9``. A failed rank is
    always shown.
    """
    prefix: Literal["auto", "rank", "none"] = "auto"
    """auto: ``host:rank|`` before each line, nothing when the job has one worker."""
    files: bool = True
    """False: no log files, only the terminal."""
    log_name: str = "rank_{rank}"
    """
    Stem of the file names; ``{rank}``, ``{local_rank}``, ``{node}``, ``{ip}`` and ``{hostname}``
    are filled in.
    """


@dataclass(frozen=True)
class ClusterOptions:
    """Where this process stands in the cluster, and where the scheduler is."""

    scheduler: Endpoint | None = None
    node_rank: int | None = None
    node_name: str = ""
    """
    Name of this node in the job (``--node-name``); empty: the host name. Two nodes of a job never
    share a name.
    """
    local: bool = False
    """All nodes are simulated on this machine."""
    simulated: tuple[int, int] | None = None
    """
    (index, count): this agent is one of several on one machine and takes its share of CPUs and
    devices.
    """
    interface: str = ""
    """Address or interface name to listen on; empty: the route to the scheduler."""
    serve: bool | None = None
    """Whether this node runs the scheduler; None: decided from addresses."""
    token_file: str = ""
    insecure: bool = False
    hosts: tuple[Host, ...] = ()
    """
    Hosts of the job in rank order (``--hosts``, ``--hostfile``); empty: the nodes come by
    themselves.
    """
    rank_table: str = ""
    """Path of Ascend's rank table, which the workers get as RANK_TABLE_FILE."""
    launcher: str = ""
    """
    The launcher that counts, or what starts the hosts (``--launcher``); none: nobody; empty: found
    out.
    """


@dataclass(frozen=True)
class RemoteOptions:
    """How one command starts the agents of other hosts (`pdrun.launcher.plan.hosts`)."""

    ssh: str = "ssh"
    """The program."""
    ssh_opts: tuple[str, ...] = ()
    """Its options, before pdrun's own."""
    forward: tuple[str, ...] = ()
    """
    Names, or patterns of names, of variables that the agents get from this process's environment.
    """
    ship: bool = False
    """Copy pdrun to hosts that lack it, into a private cache folder."""
    mpirun: str = ""
    """The program of ``--launcher mpirun``; empty: the first of mpirun, mpiexec and jsrun."""
    mpirun_opts: tuple[str, ...] = ()
    srun_opts: tuple[str, ...] = ()
    """More words for mpirun or srun."""


@dataclass(frozen=True)
class JobSpec:
    """Everything that the user asked for."""

    program: Program
    resources: Resources = field(default_factory=Resources)
    policy: Policy = field(default_factory=Policy)
    output: Output = field(default_factory=Output)
    place: ClusterOptions = field(default_factory=ClusterOptions)
    reach: RemoteOptions = field(default_factory=RemoteOptions)
    job: str = ""
    """
    The user's name for the job (``--job``, ``--rdzv-id``); empty: made from the program
    (`plan.job_key`).
    """
    env: Mapping[str, str] = field(default_factory=dict)
    """``--env NAME=VALUE``: set in every worker; not the variables that `WorkerEnv` writes."""
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
                raise UsageError(f"{value} is below {least}", where=name)
        if self.resources.min_nodes > self.resources.nodes:
            least = self.resources.min_nodes
            most = self.resources.nodes
            raise UsageError(
                f"at least {least} nodes are more than at most {most}", where="--nodes"
            )
        if self.resources.backend not in BACKENDS:
            raise UsageError(
                f"{self.resources.backend!r} is not one of {', '.join(BACKENDS)}", where="--backend"
            )
        rank = self.place.node_rank
        if rank is not None and not 0 <= rank < self.resources.nodes:
            raise UsageError(
                f"{rank} is not a place among {self.resources.nodes} node(s)",
                where="--node-rank",
                hint=f"use 0 to {self.resources.nodes - 1}",
            )

    def to_json(self) -> str:
        """Return the spec as one line of JSON, for agents on other nodes; holds no secret."""
        return json.dumps(asdict(self), sort_keys=True)

    def to_shared_json(self) -> str:
        """Return the spec as other nodes get it: JSON, without where this node stands."""
        return replace(self, place=ClusterOptions()).to_json()

    @classmethod
    def from_json(cls, text: str) -> JobSpec:
        """Inverse of `to_json`; unknown or missing keys raise ValueError or TypeError."""
        data: dict[str, Any] = json.loads(text)
        place = dict(data.pop("place"))
        scheduler = place.pop("scheduler")
        simulated = place.pop("simulated")
        hosts = place.pop("hosts")
        reach: dict[str, Any] = {
            name: tuple(said) if isinstance(said, list) else said
            for name, said in data.pop("reach").items()
        }
        policy: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in data.pop("policy").items()
        }
        program = dict(data.pop("program"))
        resources = dict(data.pop("resources"))
        return cls(
            program=Program(**{**program, "args": tuple(program["args"])}),
            resources=Resources(**{**resources, "indices": _to_tuple(resources["indices"])}),
            policy=Policy(**policy),
            output=Output(**data.pop("output")),
            place=ClusterOptions(
                scheduler=Endpoint(**scheduler) if scheduler else None,
                simulated=(simulated[0], simulated[1]) if simulated else None,
                hosts=tuple(Host(**{**host, "indices": _to_tuple(host["indices"])}) for host in hosts),
                **place,
            ),
            reach=RemoteOptions(**reach),
            **data,
        )


def source_of(sources: Sources, path: str, option: str) -> str:
    """Return where a field was set, for a complaint about it; ``option`` where nobody did."""
    source = sources.get(path, "default")
    return option if source == "default" else source


def _to_tuple(values: list[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def list_field_paths() -> tuple[str, ...]:
    """Every field path of a spec, in the order of `--explain`: ``program.kind``, ... ``chdir``."""
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
