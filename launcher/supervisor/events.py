"""
What the supervisor is asked for and what it reports: commands, events, warm processes. Data only.

    WorkerCommand --supervisor--> Spawned or SpawnFailed, then Exited and Swept
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pdrun.errors import RendezvousError
from pdrun.quick_dataclass import dataclass


@dataclass(frozen=True)
class WarmProcess:
    """
    A process that stays between jobs with torch imported (`pdrun warm`), as it describes itself.
    """

    socket: str
    """Path of its socket."""
    pid: int
    python: str
    """Path of its interpreter."""
    torch_version: str
    modules: tuple[str, ...]
    """Modules that it has imported."""
    variables: Mapping[str, str | None]
    """Environment variables that the imports looked up; None: not set."""
    depends_on_all: bool = False
    """Whether an import iterated over the whole environment, so that every variable matters."""
    unfit: str = ""
    """Why no job of this shell can use it (a file has changed, another namespace), or empty."""
    memory_bytes: int = 0
    """Proportional set size."""
    started_at: float = 0.0
    """Wall clock, seconds since the epoch."""
    unused_seconds: float = 0.0
    """Time since the last job, or since its start."""
    idle_seconds: float = 0.0
    """Time without a job after which it exits."""
    running_jobs: int = 0
    served_jobs: int = 0


@dataclass(frozen=True)
class WorkerCommand:
    """A process that the supervisor starts. ``slot`` identifies it in later events."""

    slot: int
    """The local rank, or STORE_SLOT and below, or SERVER_SLOT and below."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    cpus: tuple[int, ...] = ()
    start: Literal["exec", "auto", "fork"] = "exec"
    """auto: forked if there is a fork server. fork: fails without one."""


STORE_SLOT = -1
"""Slot of the process that serves the TCPStore."""
SERVER_SLOT = -(1 << 20)
"""Slot of the first parameter server; each generation has MAX_SERVERS slots."""
MAX_SERVERS = 1024
NOTE_VARIABLE = "PDRUN_SERVER_NOTE"
"""
Names the file in which a parameter server notes where its tables were written. A server that has
one can continue alone, from these tables.
"""
LOST_AT_VARIABLE = "PDRUN_SERVER_LOST_AT"
"""Tells such a server when its earlier process was lost, in seconds since the epoch."""


def slot_of_server(generation: int, server: int) -> int:
    """Return the slot of a server: a new one, since the last generation's may not be reaped."""
    return SERVER_SLOT - generation * MAX_SERVERS - server


def server_of_slot(slot: int) -> int:
    """Return the number of the server in a slot."""
    return (SERVER_SLOT - slot) % MAX_SERVERS


@dataclass(frozen=True)
class Spawned:
    """A process has started: exec succeeded, or the forked worker runs its program."""

    slot: int
    pid: int


@dataclass(frozen=True)
class SpawnFailed:
    """A process could not be started."""

    slot: int
    errno: int
    message: str


@dataclass(frozen=True)
class Exited:
    """A process has ended. ``status`` is its wait status."""

    slot: int
    pid: int
    status: int
    at: float
    """Monotonic seconds."""


@dataclass(frozen=True)
class Swept:
    """Leftovers of workers were killed; each is listed as ``pid command``."""

    slot: int
    processes: tuple[str, ...]
    stuck: tuple[str, ...] = ()
    """Leftovers that SIGKILL did not end (uninterruptible sleep), as ``pid command state``."""


@dataclass(frozen=True)
class ForkServerStatus:
    """The fork server is ready (``why`` is empty), or workers are executed for this reason."""

    slot: int
    why: str


class WorkersFenced(RendezvousError):
    """The workers were ended because their agent did not show in time that they may run."""


SupervisorEvent = Spawned | SpawnFailed | Exited | Swept | ForkServerStatus
