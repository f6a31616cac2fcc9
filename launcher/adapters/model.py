"""
Data about the launcher that started this process, and the probes that a reader may use.

`pdrun.launcher.adapters.detect.detect_launcher` returns a `LauncherInfo`. It has the variable of
every value, for ``pdrun env`` and for error messages.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Literal

from pdrun.quick_dataclass import dataclass
from pdrun.text import make_name

HOST_NAME = "host name"
"""Source of a value that comes from the name of this machine instead of a variable."""

LauncherKind = Literal["task", "allocation", "none"]
"""
task: a launcher started this process as one of several. allocation: hosts are reserved, but this
process is not one of several (the body of a batch script). none: no launcher was detected.
"""


@dataclass(frozen=True)
class AllocatedHost:
    """A host of an allocation."""

    name: str
    slots: int | None = None
    """
    Tasks or CPUs of the host by the launcher's count, not accelerators. None: unknown.
    """


@dataclass(frozen=True)
class IgnoredLauncher:
    """A launcher whose variables are set but not used."""

    launcher: str
    why: str
    """
    ``stale: SLURM_TASK_PID=71 is not an ancestor of this process``, ``outer: mpirun (Open MPI)
    takes precedence``.
    """
    variables: tuple[str, ...] = ()


@dataclass(frozen=True)
class LauncherInfo:
    """
    The values of the innermost launcher. None, 0 and empty: unknown.

    ``rank`` and ``world`` count the launcher's tasks. With one task per node (``local_size`` 1) the
    tasks are pdrun's nodes. If each task runs a script without an agent, they are the workers.
    """

    launcher: str = "none"
    """
    Name of an adapter in `pdrun.launcher.adapters.detect.ADAPTERS`, for example ``slurm-step``, or
    ``none``.
    """
    title: str = "no launcher"
    """Name for messages: ``srun (a step of Slurm)``."""
    kind: LauncherKind = "none"
    rank: int | None = None
    world: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = None
    nodes: int | None = None
    hosts: tuple[AllocatedHost, ...] = ()
    """In the launcher's order, without duplicates."""
    head: str = ""
    """
    Host of the scheduler if there is no list of hosts: MASTER_ADDR, or the host of mpirun.
    """
    port: int | None = None
    """
    Port that the launcher reserves (MASTER_PORT). None: it is derived from the job id.
    """
    job_id: str = ""
    """Job id of the launcher, unique among its jobs; for a Slurm step ``JOB.STEP``."""
    path: str = ""
    """Path of the file that describes the job: an Ascend rank table."""
    attempt: int = 0
    """How often the launcher has restarted this job."""
    time_limit: float | None = None
    """Time limit of the whole job in seconds."""
    ends_at: float | None = None
    """Wall clock (seconds since 1970) at which the launcher ends the job."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Field -> the variables that it comes from."""
    workers_per_node: int | None = None
    """Number of workers that the launcher wants on each node. None: unknown."""
    servers: int | None = None
    """Parameter servers that the launcher wants for the job. None: unknown."""
    has_own_scheduler: bool = False
    """Whether a pod apart from the nodes runs the scheduler."""
    ignored: tuple[IgnoredLauncher, ...] = ()
    notes: tuple[str, ...] = ()
    """Contradictions and how they were resolved, one line each."""

    @classmethod
    def one_per_node(
        cls,
        launcher: str,
        title: str,
        rank: int | None,
        nodes: int | None,
        hosts: tuple[AllocatedHost, ...] = (),
        **fields: Any,
    ) -> LauncherInfo:
        """
        Return the values of a launcher that starts one task per node: tasks and nodes are the same.

        Args:
            rank: of this node; None: unknown.
            fields: all other attributes.
        """
        return cls(
            launcher,
            title,
            "task",
            rank,
            nodes,
            local_size=1,
            node_rank=rank,
            nodes=nodes,
            hosts=hosts,
            **fields,
        )

    @property
    def job_name(self) -> str:
        """
        Job name made of launcher, job id and, after a restart, attempt; empty without a job id.
        """
        if not self.job_id:
            return ""
        family = {"slurm-step": "slurm", "slurm-job": "slurm"}.get(self.launcher, self.launcher)
        text = self.job_id if self.job_id.startswith(family) else f"{family}-{self.job_id}"
        if len(text) > 50:  # a name has at most 63 characters; the checksum covers the rest
            text = f"{text[:41]}-{zlib.crc32(text.encode('utf-8', 'surrogateescape')):08x}"
        return make_name(f"{text}-r{self.attempt}" if self.attempt else text)

    @property
    def has_one_task_per_node(self) -> bool:
        """Whether there is one task per node, as agents need it."""
        return self.kind == "task" and self.local_size == 1


def _raise_no_file(path: str) -> str:
    raise FileNotFoundError(2, "No such file or directory", path)


@dataclass(frozen=True)
class Probes:
    """
    Functions that examine this machine. `pdrun.launcher.adapters.probes.make_probes` makes the real
    ones; tests use fixed answers.

    By default no file exists, every host name may be this machine, and ancestors are unknown.
    """

    hostname: str = ""
    is_here: Callable[[str], bool] = lambda host: True
    """Whether a host name or address is this machine."""
    address_for: Callable[[str], str] = lambda host: host
    """The address of this machine that other machines reach by a host name."""
    is_ancestor: Callable[[int], bool | None] = lambda pid: None
    """
    Whether a pid is this process or an ancestor. None: a container hides the ancestors.
    """
    is_under: Callable[[tuple[str, ...]], bool | None] = lambda commands: None
    """Whether an ancestor has one of these command names; None as above."""
    is_open: Callable[[int], bool] = lambda descriptor: False
    """Whether a descriptor is open in this process."""
    accepts_connections: Callable[[str, int], bool] = lambda host, port: False
    """Whether a process accepts connections on a host and port of this machine."""
    option_above: Callable[[tuple[str, ...], str], str] = lambda commands, option: ""
    """
    Value of an option on the command line of the nearest ancestor with one of these command names.
    """
    peer_above: Callable[[tuple[str, ...], int], str] = lambda commands, descriptor: ""
    """
    Remote address of the TCP connection with this descriptor in the nearest ancestor with one of
    these command names.
    """
    read_file: Callable[[str], str] = _raise_no_file
    """The text of a small file. Raises OSError; ValueError if it is too long or not text."""
