"""
The values that pass between the launcher's rooms. Data only: no module here does anything.

    JobSpec --facts--> Facts --plan()--> LaunchPlan --Assign--> WorkerCommand --keeper--> Spawned, Exited
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pdrun.endpoint import Endpoint
from pdrun.launcher.adapters.mpirun_command import Mpi
from pdrun.launcher.config.spec import JobSpec, Sources
from pdrun.launcher.hosts.selection import Host
from pdrun.launcher.supervisor.events import Warm
from pdrun.topology import CpuSet, Device


@dataclass(frozen=True)
class BackendFacts:
    """What one backend table found on this node."""

    name: str
    present: bool
    reason: str
    """Why it was refused, or what was found (``4 devices by /dev/nvidia*``)."""
    devices: tuple[Device, ...] = ()
    """Visible ones only: what an outer scheduler hid stays hidden."""
    broken: bool = False
    """
    The environment contradicts itself about this kind: an error once it is wanted, not a reason to
    try the next.
    """


@dataclass(frozen=True)
class ExternalLauncher:
    """The launcher that starts the agents, as it was found on this machine."""

    kind: Literal["mpirun", "srun"]
    program: str = ""
    mpi: Mpi | None = None
    kill_wait: float | None = None
    """Seconds between Slurm's SIGTERM and its SIGKILL; None: not known."""
    binds_tasks: bool = True
    """Whether this Slurm binds tasks to CPUs, which has to be switched off."""
    error: str = ""
    """Why it cannot be used, or empty."""


@dataclass(frozen=True)
class Facts:
    """What is true on this node. Gathered once, before planning; the plan reads nothing else."""

    hostname: str
    environ: Mapping[str, str]
    cwd: str
    python: str
    """Absolute path of the interpreter that runs pdrun."""
    python_version: str
    torch_version: str
    """From the installed metadata, without importing; empty when torch is not installed."""
    pdrun_version: str
    cpus: CpuSet
    backends: tuple[BackendFacts, ...]
    """In the order in which `auto` tries them; cpu, always present, is the last."""
    addresses: tuple[tuple[str, str], ...]
    """(interface, address) of every interface that is up, loopback included."""
    uid: int
    script_digest: str = ""
    """SHA-256 of the script file, or empty."""
    is_scheduler_local: bool | None = None
    """Whether the scheduler's host is this machine; None when no scheduler was named."""
    route_address: str = ""
    """The local address from which the scheduler is reached, or the first routable one."""
    program_error: str = ""
    """Why the program cannot be started here (missing, a directory, not readable), or empty."""
    program_error_code: int = 0
    """Exit code that goes with it: 2, 126 or 127."""
    log_error: str = ""
    """Why no log files can be made in the log folder, or empty."""
    is_loopback_name: bool = False
    """
    The scheduler's name is this machine's and loopback here; ``route_address`` is the address that
    others know.
    """
    scheduler_error: str = ""
    """Why the name of the scheduler's host leads nowhere, or empty."""
    mentions_torch: bool = False
    """
    Whether the script's text mentions torch: then the store is started at once instead of on first
    use.
    """
    imports_torch: bool = False
    """Whether the program, or a module of its own, imports torch or what is built on it."""
    uses_optimizer: bool = False
    """
    Whether the program's text mentions optimizers, compilation or trainers: what drags in
    torch._dynamo.
    """
    exec_reason: str = ""
    """
    Why the program needs an interpreter of its own (an archive, a folder, compiled), or empty.
    """
    local_hosts: tuple[str, ...] = ()
    """Which of ``place.hosts`` are this machine."""
    external_launcher: ExternalLauncher | None = None
    """The mpirun or srun that is to start the agents."""
    late_variable: str = ""
    """
    ``train.py:3 sets OMP_NUM_THREADS``: before its import of torch, which is too late in a fork; or
    empty.
    """
    warm: tuple[Warm, ...] = ()
    """
    Processes of this user that have imported torch already; looked for where workers may be forked.
    """


@dataclass(frozen=True)
class WorkerPlan:
    """One worker, before ranks are known."""

    local_rank: int
    argv: tuple[str, ...]
    device: Device | None
    cpus: tuple[int, ...]
    """CPUs that it is bound to; empty: not bound."""
    threads: int
    """Value of OMP_NUM_THREADS."""
    device_index: int = 0
    """Index of its device among those that the worker sees (`WorkerEnv.device_index`)."""


@dataclass(frozen=True)
class StartMethod:
    """How the workers of this node come to life."""

    how: Literal["fork", "exec"] = "exec"
    """
    fork: from a process that has imported torch; by exec all the same should that process turn out
    unfit.
    """
    reason: str = ""
    modules: tuple[str, ...] = ()
    """What that process imports."""
    strict: bool = False
    """The user asked for forks: never exec instead."""
    warm: str = ""
    """
    Socket of the warm process that the job's keeper is forked from; by an import of its own should
    that fail.
    """
    unused: str = ""
    """Why a warm process that is there is not used, or empty."""


@dataclass(frozen=True)
class HostLaunch:
    """One host of a fan."""

    node: str
    """Its name in the job."""
    host: Host
    is_local: bool
    """Whether it is this machine, which needs no ssh."""
    argv: tuple[str, ...]
    """What starts its far end."""


@dataclass(frozen=True)
class HostPlan:
    """What is started where."""

    hosts: tuple[HostLaunch, ...]
    python: str
    """Interpreter of the agents on other machines."""
    env: Mapping[str, str]
    """Variables of this process that the agents get."""

    def __repr__(self) -> str:
        return f"Fan(hosts={self.hosts!r}, python={self.python!r}, env={sorted(self.env)!r})"


@dataclass(frozen=True)
class ExternalLaunch:
    """What is started."""

    kind: Literal["mpirun", "srun"]
    title: str
    python: str
    """Interpreter of the agents."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Variables of this process that the agents get."""
    launcher_env: Mapping[str, str]
    """Variables for the launcher itself."""

    def __repr__(self) -> str:
        return f"Through(argv={self.argv!r}, env={sorted(self.env)!r})"


Mode = Literal["alone", "local", "first", "join", "hosts", "through"]


@dataclass(frozen=True)
class LaunchPlan:
    """
    Everything that will be done on this node: what `--dry-run` prints and what the agent executes.

    Modes. alone: one node, the scheduler is a library inside the agent, nothing listens. local:
    this process starts ``nodes`` agents on this machine and merges their output. first: this agent
    also runs the scheduler. join: this agent connects to a scheduler elsewhere. hosts: this process
    starts an agent on each host (`fan`). through: this process runs the scheduler, and mpirun or
    srun starts the agents (`through`).
    """

    mode: Mode
    job: str
    """
    Key by which agents recognise each other's job: the user's name, or one made from the command.
    """
    node: str
    """Name of this node."""
    nodes: int
    spec: JobSpec
    sources: Sources
    workers: tuple[WorkerPlan, ...]
    """Empty in modes local, hosts and through."""
    backend: str
    backend_reason: str
    visibility: Mapping[int, Mapping[str, str]]
    """local rank -> variables that limit the worker to its device."""
    collective: str
    base_env: Mapping[str, str]
    """
    Environment of every worker before its own variables: inherited, launcher variables of others
    scrubbed.
    """
    removed: tuple[str, ...]
    """Names that were taken out of the inherited environment."""
    scheduler: Endpoint | None
    """first: where it listens (port 0: the system chooses). join: where to connect."""
    listen: str
    """Address for this node's own listening sockets (the store)."""
    cwd: str
    compared: Mapping[str, str] = field(default_factory=dict)
    """What Join reports for comparison between nodes."""
    notes: tuple[str, ...] = ()
    """One line each; shown by --explain: why cpu, why this scheduler, what was ignored."""
    start_method: StartMethod = StartMethod()
    host_plan: HostPlan | None = None
    """Of mode hosts."""
    external_launch: ExternalLaunch | None = None
    """Of mode through."""
