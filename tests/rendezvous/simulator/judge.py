"""
What must be true of every life of a job, seen from outside: workers, codes, verdicts, not the
machine's state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pdrun.rendezvous.protocol.messages import Verdict

if TYPE_CHECKING:
    from .agent import Run, SimAgent

THAW = 3.0
"""Seconds in which a node that was frozen through its own funeral must have ended its workers."""
LEASE = 8.0
"""
Seconds after a connection was *reset*, with all well on both sides, in which its node may not know
that it was given up: a kernel resets the connections of a process that died, and the job does not
wait for the lease of each of those.
"""


class Violation(AssertionError):
    """Something happened that never may."""


class Judge:
    """Looks at each start of workers while it happens, and at everything at the end."""

    def __init__(self, most_restarts: int | None, elastic: bool) -> None:
        """
        ``most_restarts``: of the whole life; None where those of a window count: `invariants` looks
        at these.
        """
        self.runs: list[Run] = []
        self.most_restarts = most_restarts
        self.elastic = elastic
        self.thawed: dict[str, float] = {}
        """node -> when it was last frozen no more"""
        self._holders: dict[tuple[int, int], str] = {}
        self._agreed = -1

    def started(self, run: Run) -> None:
        """A node starts its workers of a generation."""
        generation, now = run.assign.generation, run.began
        for other in self.runs:
            if other.ended is not None and other.ended <= now:
                continue
            if other.assign.generation == generation:
                continue
            if other.agent.frozen and other.agent.whole:
                continue
            if (
                now - self.thawed.get(other.agent.node, float("-inf")) < THAW
                or now - other.agent.reset_at < LEASE
            ):
                continue
            raise Violation(
                f"generation {generation} starts on {run.agent.node} while workers of generation "
                f"{other.assign.generation} run on {other.agent.node} (since {other.began:.2f})"
            )
        for rank in run.living:
            holder = self._holders.setdefault((generation, rank), run.agent.agent)
            if holder != run.agent.agent:
                raise Violation(f"rank {rank} of generation {generation} was given twice")
            if rank >= run.assign.world_size:
                raise Violation(f"rank {rank} in a world of {run.assign.world_size}")
        if self.most_restarts is not None and run.assign.restarts > self.most_restarts:
            raise Violation(f"{run.assign.restarts} restarts of {self.most_restarts}")
        self._check_agreed(run)
        self.runs.append(run)

    def _check_agreed(self, run: Run) -> None:
        """Nobody is told to go on at a step that was never saved."""
        agreed = run.assign.agreed_step
        if agreed >= 0 and not any(agreed <= other.saved for other in self.runs):
            raise Violation(f"step {agreed} is called agreed, and nobody had saved it")

    def at_the_end(self, agents: Iterable[SimAgent], verdict: Verdict | None) -> None:
        """Everybody has gone, or had a very long time."""
        agents = list(agents)
        staying = [f"{agent.node} ({agent.agent[:6]})" for agent in agents if agent.alive]
        if staying:
            raise Violation(f"{', '.join(staying)} never ended")
        if verdict is None:
            raise Violation("there is no verdict")
        for agent in agents:
            if not agent.alive and not agent.dead and "are called" in agent.refusal:
                raise Violation(f"{agent.node} was started again and refused: {agent.refusal}")
            if agent.verdict is None:
                continue
            told = (agent.verdict.code, agent.verdict.reason)
            if told != (verdict.code, verdict.reason):
                raise Violation(
                    f"{agent.node} got {told}, the scheduler sent {verdict.code}, {verdict.reason}"
                )
            if agent.code is not None and agent.code != verdict.code and not agent.departing:
                raise Violation(
                    f"{agent.node} left with {agent.code}, the verdict was {verdict.code}"
                )
        # A supervisor that stood still may have been killed before it started any worker.
        self._check_truth(verdict, [run for agent in agents for run in agent.runs])

    def _check_truth(self, verdict: Verdict, runs: list[Run]) -> None:
        last = max((run.assign.generation for run in runs), default=-1)
        runs = [run for run in runs if run.assign.generation == last]
        if verdict.code == 0:
            ranks = {rank: cause for run in runs for rank, cause in run.exits.items()}
            world = runs[0].assign.world_size if runs else -1
            bad = [rank for rank, cause in ranks.items() if cause.kind != "ok"]
            if bad or len(ranks) != world:
                raise Violation(
                    f"success, but {len(ranks)} of {world} workers ended, {bad} of them badly"
                )
        if verdict.first:
            rank, cause = verdict.first.rank, verdict.first.cause
            kinds = {run.exits[rank].kind for run in runs if rank in run.exits}
            happened = cause.kind in kinds or (
                cause.kind == "hang" and any(rank in run.hung for run in runs)
            )
            if not happened:
                raise Violation(
                    f"rank {rank} is blamed for {cause.kind}, which did not happen to it"
                )
