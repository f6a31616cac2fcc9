"""
What the supervisor is asked for and what it reports: commands, events, warm processes. Data only.

    WorkerCommand --supervisor--> Spawned or SpawnFailed, then Exited and Swept
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class WarmProcess:
    """
    A process that stays between jobs with torch imported (`pdrun warm`), as it describes itself.
    """

    socket: str
    """Path of the socket on which it answers."""
    pid: int
    python: str
    """The interpreter, by the path it was started with."""
    torch_version: str
    modules: tuple[str, ...]
    """What it has imported."""
    variables: Mapping[str, str | None]
    """Environment variables that counted in that import, with their values; None: not set."""
    depends_on_all: bool = False
    """Whether something went through the whole environment, so that all of it counts."""
    unfit: str = ""
    """
    Why it is of no use to any job from here (a module's file has changed, another namespace), or
    empty.
    """
    memory_bytes: int = 0
    """Bytes, its proportional share."""
    started_at: float = 0.0
    """Wall-clock seconds."""
    unused_seconds: float = 0.0
    """Seconds since the last job, or its start."""
    idle_seconds: float = 0.0
    """Seconds without a job after which it ends."""
    running_jobs: int = 0
    served_jobs: int = 0


@dataclass(frozen=True)
class WorkerCommand:
    """One process for the keeper to start. `slot` names it in every later event."""

    slot: int
    """The local rank, or STORE_SLOT."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    cpus: tuple[int, ...] = ()
    start: Literal["exec", "auto", "fork"] = "exec"
    """auto: forked where there is a starter. fork: forked or not at all."""


STORE_SLOT = -1
"""The slot of the process that serves torch's store."""


@dataclass(frozen=True)
class Spawned:
    """The keeper has started a process; it runs its program (exec succeeded)."""

    slot: int
    pid: int


@dataclass(frozen=True)
class SpawnFailed:
    """The keeper could not start a process."""

    slot: int
    errno: int
    message: str


@dataclass(frozen=True)
class Exited:
    """A process of the keeper ended. ``status`` is what waitpid gave."""

    slot: int
    pid: int
    status: int
    at: float
    """Monotonic seconds."""


@dataclass(frozen=True)
class Swept:
    """Descendants of workers that had outlived them were ended: one ``pid command`` each."""

    slot: int
    processes: tuple[str, ...]
    stuck: tuple[str, ...] = ()
    """Those that even SIGKILL did not end (uninterruptible sleep), as ``pid command state``."""


@dataclass(frozen=True)
class ForkServerStatus:
    """The starter is ready (``why`` is empty), or says why the workers will be executed instead."""

    slot: int
    why: str


SupervisorEvent = Spawned | SpawnFailed | Exited | Swept | ForkServerStatus
