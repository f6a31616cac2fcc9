"""The status of a job, its nodes and its workers, as the event log leads to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class NodeStatus:
    """Status of a node."""

    name: str
    state: str
    """joined, standby, running, suspect, lost, left or done."""
    index: int = -1
    workers: int = 0


class RankStatus(NamedTuple):
    """Status of a worker."""

    rank: int
    node: str
    state: str
    """running, done, failed, or stopped (by pdrun, after another failure)."""
    code: int | None = None
    cause: str = ""


@dataclass(frozen=True)
class JobStatus:
    """Status of a job: the replay of its log."""

    job: str = ""
    run: str = ""
    state: str = "gathering"
    """gathering, running, restarting, stopping or done."""
    generation: int = 0
    restarts: int = 0
    expected: int = 0
    """Nodes that the job waits for."""
    started_at: float = 0.0
    ended_at: float | None = None
    code: int | None = None
    reason: str = ""
    hints: tuple[str, ...] = ()
    """What a user can do about the first cause."""
    nodes: Mapping[str, NodeStatus] = field(default_factory=dict)
    ranks: Mapping[int, RankStatus] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    """The newest warnings; see `pdrun.ui.deferred_lines.MAX_WARNINGS`."""
    step: int = -1
    """Step of the slowest worker; -1: no worker has reported one."""
    step_at: float = 0.0
    """Wall clock of the last report of steps."""
    total: int = 0
    """Steps of the whole run; 0: not known."""
    values: Mapping[str, tuple[float | None, int, int]] = field(default_factory=dict)
    """Reported number -> mean, rank of the largest, first rank with a value that is not finite."""
    bad_steps: Mapping[str, int] = field(default_factory=dict)
    """Of the numbers that are not finite: the first step with such a value, where it is known."""
    usage: Mapping[str, tuple[float, float, int]] = field(default_factory=dict)
    """CPU, memory and devices, the last sample: name -> mean, largest, rank of the largest."""
    plan: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """What rank 0 says about its run: name -> value, where it came from."""
    saved: int = -1
    """Last step that all workers have saved; -1: none."""
