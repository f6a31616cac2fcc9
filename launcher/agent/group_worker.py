"""One worker process of a `WorkerGroup`: its state, and what /proc shows about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pdrun.launcher.common import procfs
from pdrun.launcher.plan.model import WorkerPlan
from pdrun.launcher.supervisor.events import SpawnFailed
from pdrun.rendezvous.protocol.messages import Cause


@dataclass
class GroupWorker:
    """The state of one worker. Times are monotonic seconds."""

    plan: WorkerPlan
    rank: int
    pid: int = 0
    exit_status: int | None = None
    ended_at: float | None = None
    stopped_at: float | None = None
    """When pdrun decided to stop it."""
    sent_signals: list[int] = field(default_factory=list)
    """Signals sent to stop it."""
    signal_at: float | None = None
    """When a delayed signal is due."""
    delayed_signal: int = 0
    spawn_failure: SpawnFailed | None = None
    is_swept: bool = False
    """Whether its remaining descendants have been killed."""
    report_at: float = 0.0
    """When its exit is reported: after the sweep, then after the time to settle."""
    cause: Cause | None = None
    is_reported: bool = False

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.ended_at is None


def is_suspended(pid: int) -> bool:
    """Return whether a process is suspended (SIGSTOP): it handles no signal until continued."""
    if not pid:
        return False
    state = procfs.read_state(pid)
    return state is not None and state.letter == "T"


def is_dumping_core(pid: int) -> bool:
    """Return whether a process has crashed and is writing its core file."""
    try:
        return "CoreDumping:\t1" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
