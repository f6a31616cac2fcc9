"""
Data that the parts of the launcher exchange. It has no behaviour.

    JobSpec --gather_facts()--> Facts --make_plan()--> LaunchPlan --Assign--> WorkerCommand
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from pdrun.endpoint import Endpoint
from pdrun.launcher.adapters.mpirun_command import MpirunProgram
from pdrun.launcher.config.spec import JobSpec, Sources
from pdrun.launcher.hosts.selection import Host
from pdrun.launcher.supervisor.events import WarmProcess
from pdrun.quick_dataclass import dataclass
from pdrun.topology import CpuSet, Device


@dataclass(frozen=True)
class BackendFacts:
    """What one device backend found on this node."""

    name: str
    present: bool
    reason: str
    """Why it cannot be used, or what was found (``4 devices by /dev/nvidia*``)."""
    devices: tuple[Device, ...] = ()
    """Visible devices only: those that an outer scheduler hides are not included."""
    broken: bool = False
    """
    The environment contradicts itself about this backend. If the backend is selected, this is an
    error; the next backend is not tried.
    """


@dataclass(frozen=True)
class ExternalLauncher:
    """The mpirun or srun of this machine that starts the agents."""

    kind: Literal["mpirun", "srun"]
    program: str = ""
    mpi: MpirunProgram | None = None
    kill_wait: float | None = None
    """Seconds between Slurm's SIGTERM and its SIGKILL; None: unknown."""
    binds_tasks: bool = True
    """Whether this Slurm binds tasks to CPUs. pdrun switches that off."""
    error: str = ""
    """Why it cannot be used, or empty."""


@dataclass(frozen=True)
class Facts:
    """Facts of this node. They are gathered once; planning reads nothing else."""

    hostname: str
    environ: Mapping[str, str]
    cwd: str
    python: str
    """Absolute path of the interpreter that runs pdrun."""
    python_version: str
    torch_version: str
    """Read without importing torch; empty if torch is not installed."""
    pdrun_version: str
    cpus: CpuSet
    backends: tuple[BackendFacts, ...]
    """In the order of `auto`; cpu, which is always present, is the last."""
    addresses: tuple[tuple[str, str], ...]
    """(interface, address) of every interface that is up, including loopback."""
    uid: int
    physical_interfaces: tuple[str, ...] = ()
    """Names of the interfaces that are hardware; empty for a job of one machine."""
    script_digest: str = ""
    """SHA-256 of the script file, or empty."""
    is_scheduler_local: bool | None = None
    """Whether the scheduler's host is this machine; None without ``--scheduler``."""
    route_address: str = ""
    """The local address of the route to the scheduler, or the first routable address."""
    program_error: str = ""
    """Why the program cannot be started (missing, a directory, not readable), or empty."""
    program_error_code: int = 0
    """Exit code for ``program_error``: 2, 126 or 127."""
    log_error: str = ""
    """Why the log folder cannot be used, or empty."""
    same_machine: str = ""
    """Which two of ``place.hosts`` are one machine, or empty."""
    script_store_port: int = 0
    """Port of torch's store that the script contains as a number; 0: none."""
    script_store_source: str = ""
    """``train.py:12``, where it is."""
    is_store_local: bool | None = None
    """Whether the host of ``place.store`` is this machine. None: unknown, or it has no host."""
    is_store_loopback: bool = False
    """Whether that host is a loopback address, which only this machine reaches."""
    is_loopback_name: bool = False
    """
    Whether the scheduler's name is a loopback address on this machine. Other machines use
    ``route_address``.
    """
    scheduler_error: str = ""
    """Why the name of the scheduler's host cannot be resolved, or empty."""
    mentions_torch: bool = False
    """
    Whether the script's text mentions torch. Then the agent starts the store immediately instead
    of on first use.
    """
    imports_torch: bool = False
    """Whether the program or one of its modules imports torch or a library built on it."""
    uses_optimizer: bool = False
    """
    Whether the program's text mentions optimizers, compilation or trainers, which import
    torch._dynamo.
    """
    exec_reason: str = ""
    """
    Why the program cannot be forked (an archive, a folder, a compiled file), or empty.
    """
    local_hosts: tuple[str, ...] = ()
    """Names in ``place.hosts`` that are this machine."""
    external_launcher: ExternalLauncher | None = None
    """The mpirun or srun that starts the agents."""
    late_variable: str = ""
    """
    ``train.py:3 sets OMP_NUM_THREADS`` before the import of torch, which has no effect in a fork;
    or empty.
    """
    warm: tuple[WarmProcess, ...] = ()
    """
    Warm processes of this user. They are searched only if workers may be forked.
    """


@dataclass(frozen=True)
class WorkerPlan:
    """One worker of this node. Its rank is not known yet."""

    local_rank: int
    argv: tuple[str, ...]
    device: Device | None
    cpus: tuple[int, ...]
    """CPUs to which the worker is bound; empty: not bound."""
    threads: int
    """Value of OMP_NUM_THREADS."""
    device_index: int = 0
    """Index of its device among the devices visible to it (`WorkerEnv.device_index`)."""


@dataclass(frozen=True)
class StartMethod:
    """How the workers of this node are started."""

    how: Literal["fork", "exec"] = "exec"
    """
    fork: from a process that has imported torch, or by exec if that process cannot be used.
    """
    reason: str = ""
    modules: tuple[str, ...] = ()
    """Modules that this process imports."""
    strict: bool = False
    """``--start fork``: never exec instead."""
    warm: str = ""
    """
    Socket of the warm process from which the supervisor is forked. If that fails, the supervisor
    is started without it.
    """
    unused: str = ""
    """Why an existing warm process is not used, or empty."""


@dataclass(frozen=True)
class HostLaunch:
    """How the agent of one host is started."""

    node: str
    """Name of the node in the job."""
    host: Host
    is_local: bool
    """Whether the host is this machine, which needs no ssh."""
    argv: tuple[str, ...]
    """Command that starts the remote side."""


@dataclass(frozen=True)
class HostPlan:
    """How the agents of all hosts are started (mode hosts)."""

    hosts: tuple[HostLaunch, ...]
    python: str
    """Interpreter of the agents on other machines."""
    env: Mapping[str, str]
    """Variables of this process that the agents get."""

    def __repr__(self) -> str:
        return f"HostPlan(hosts={self.hosts!r}, python={self.python!r}, env={sorted(self.env)!r})"


@dataclass(frozen=True)
class ExternalLaunch:
    """The mpirun or srun command that starts the agents (mode external)."""

    kind: Literal["mpirun", "srun"]
    title: str
    python: str
    """Interpreter of the agents."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Variables of this process that the agents get."""
    launcher_env: Mapping[str, str]
    """Variables for mpirun or srun itself."""

    def __repr__(self) -> str:
        return f"ExternalLaunch(argv={self.argv!r}, env={sorted(self.env)!r})"


@dataclass(frozen=True)
class StoreListener:
    """Where torch's store of a job listens, if the user has set it. Only node 0 has one."""

    endpoint: Endpoint
    """Its host is MASTER_ADDR of the workers. Port 0: the system chooses one."""
    source: str
    """The option or variable, for messages."""
    is_required: bool = True
    """False: if the port is in use, another one is used."""


LaunchMode = Literal["single", "local", "head", "join", "hosts", "external"]


@dataclass(frozen=True)
class LaunchPlan:
    """
    Every action on this node. `--dry-run` prints it, and the agent executes it.

    The modes:

    * single: one node. The scheduler is a library inside the agent, and nothing listens.
    * local: this process starts ``nodes`` agents on this machine and merges their output.
    * head: this agent also runs the scheduler.
    * join: this agent connects to a scheduler elsewhere.
    * hosts: this process starts an agent on each host (`host_plan`).
    * external: this process runs the scheduler; mpirun or srun starts the agents
      (`external_launch`).
    """

    mode: LaunchMode
    job: str
    """
    Key of the job, equal on all of its nodes: the user's name, or a name derived from the command.
    """
    node: str
    """Name of this node."""
    nodes: int
    spec: JobSpec
    sources: Sources
    workers: tuple[WorkerPlan, ...]
    """Empty in modes local, hosts and external."""
    backend: str
    backend_reason: str
    visibility: Mapping[int, Mapping[str, str]]
    """local rank -> variables that limit the worker to its device."""
    collective: str
    base_env: Mapping[str, str]
    """
    Environment that every worker inherits, without the variables of other launchers.
    """
    removed: tuple[str, ...]
    """Names of the variables that were removed from the inherited environment."""
    scheduler: Endpoint | None
    """head: where it listens (port 0: the system chooses). join: where to connect."""
    listen: str
    """Address of this node's own listening sockets (the store)."""
    cwd: str
    interfaces: Mapping[str, str] = field(default_factory=dict)
    """Variables that name the interface of ``listen`` to the collectives."""
    compared: Mapping[str, str] = field(default_factory=dict)
    """Values that Join reports for comparison between nodes."""
    notes: tuple[str, ...] = ()
    """Lines of ``--explain``: the reasons for backend and scheduler, and what is ignored."""
    start_method: StartMethod = StartMethod()
    host_plan: HostPlan | None = None
    """Set in mode hosts."""
    external_launch: ExternalLaunch | None = None
    """Set in mode external."""
    server_cpus: tuple[tuple[int, ...], ...] = ()
    """CPUs of each parameter server of this node; empty: they are not bound."""
    store: StoreListener | None = None
    """Where this node serves torch's store. None: at ``listen``, on any port."""
