"""
What a process's environment says about the launcher that started it: plain data, and the questions
that a reader of environments may ask this machine.

`pdrun.launcher.adapters.detect.detect` returns a `Found`; everything in it has the variables that
it came from, so that ``pdrun env`` and every complaint can name them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pdrun.names import make_name

LauncherKind = Literal["task", "allocation", "none"]
"""
task: an outer launcher started this process as one of several. allocation: hosts are ours, but this
process is not one of several (the body of a batch script). none: nothing says anything.
"""


@dataclass(frozen=True)
class AllocatedHost:
    """A host of an allocation."""

    name: str
    slots: int | None = None
    """
    Tasks or CPUs that the launcher counts there; never a number of accelerators. None: it does not
    say.
    """


@dataclass(frozen=True)
class IgnoredLauncher:
    """A launcher that left its words in the environment and is not the one that counts."""

    launcher: str
    why: str
    """
    ``stale: SLURM_TASK_PID=71 is no ancestor of this process``, ``outer: mpirun (Open MPI) is
    nearer``.
    """
    variables: tuple[str, ...] = ()


@dataclass(frozen=True)
class LauncherInfo:
    """
    The launcher that counts, the innermost one, and what it says. None, 0 and empty: it does not
    say.

    ``rank`` and ``world`` count the launcher's tasks, which are pdrun's nodes when there is one a
    node (``local_size`` 1), and its workers when a script without pdrun's agent runs in each.
    """

    launcher: str = "none"
    """
    A name of `pdrun.launcher.adapters.detect.LAUNCHERS`: ``slurm-step``, ``openmpi``, ``pbs``,
    ``none``.
    """
    title: str = "no launcher"
    """For people: ``srun (Slurm step)``."""
    kind: LauncherKind = "none"
    rank: int | None = None
    world: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = None
    nodes: int | None = None
    hosts: tuple[AllocatedHost, ...] = ()
    """In the launcher's order, each once."""
    head: str = ""
    """
    The host to meet at where no list of hosts is known: MASTER_ADDR, or where mpirun itself runs.
    """
    port: int | None = None
    """
    The port that the launcher reserves for meeting (MASTER_PORT); None: one is derived from the job
    id.
    """
    job_id: str = ""
    """Unique among the jobs of this launcher, as it writes it; of a Slurm step ``JOB.STEP``."""
    path: str = ""
    """The file that describes the whole job: Ascend's rank table."""
    attempt: int = 0
    """How often the launcher has started this job again."""
    time_limit: float | None = None
    """Seconds that the launcher gives the whole job."""
    ends_at: float | None = None
    """Wall clock (seconds since 1970) at which it ends the job."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Field -> the variable or variables that it came from."""
    ignored: tuple[IgnoredLauncher, ...] = ()
    notes: tuple[str, ...] = ()
    """Contradictions and how they were settled, one line each."""

    @property
    def job_name(self) -> str:
        """
        Launcher and job id, and the attempt when it is not the first, fit for a job's name; empty
        without an id.
        """
        if not self.job_id:
            return ""
        family = {"slurm-step": "slurm", "slurm-job": "slurm"}.get(self.launcher, self.launcher)
        text = self.job_id if self.job_id.startswith(family) else f"{family}-{self.job_id}"
        if len(text) > 50:  # a name has 63 characters at most; what is cut off still counts
            text = f"{text[:41]}-{zlib.crc32(text.encode('utf-8', 'surrogateescape')):08x}"
        return make_name(f"{text}-r{self.attempt}" if self.attempt else text)

    @property
    def has_one_task_per_node(self) -> bool:
        """Whether each task stands alone on its node, as agents must."""
        return self.kind == "task" and self.local_size == 1


def _raise_no_file(path: str) -> str:
    raise FileNotFoundError(2, "No such file or directory", path)


@dataclass(frozen=True)
class Probes:
    """
    Questions about this machine: real ones from `pdrun.launcher.adapters.probes.real`, fixed
    answers in tests.

    The defaults know nothing: no file is there, every host name may be ours, nobody can say whose
    children we are.
    """

    hostname: str = ""
    is_here: Callable[[str], bool] = lambda host: True
    """Whether a host name or address is this machine."""
    address_for: Callable[[str], str] = lambda host: host
    """The address of this machine that other machines reach by a host name."""
    is_ancestor: Callable[[int], bool | None] = lambda pid: None
    """
    Whether a pid is this process or one above it; None: a container hides the processes above.
    """
    is_under: Callable[[tuple[str, ...]], bool | None] = lambda commands: None
    """Whether a process above this one has one of these command names; None as above."""
    is_open: Callable[[int], bool] = lambda descriptor: False
    """Whether a descriptor is open in this process."""
    accepts_connections: Callable[[str, int], bool] = lambda host, port: False
    """Whether something accepts connections at a host and port of this machine."""
    option_above: Callable[[tuple[str, ...], str], str] = lambda commands, option: ""
    """
    The value of an option on the command line of the nearest process above with one of these
    command names.
    """
    peer_above: Callable[[tuple[str, ...], int], str] = lambda commands, descriptor: ""
    """
    The address at the other end of that TCP connection of the nearest process above with one of
    these names.
    """
    read_file: Callable[[str], str] = _raise_no_file
    """The text of a small file; raises OSError, ValueError when it is too long or no text."""
