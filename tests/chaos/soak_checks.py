"""
What must hold of a job of the soak, whatever has happened to it: read from its workers' notes and
its event log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pdrun.ui.replay import replay_events
from tests.chaos.jobs import Bed

OVERLAP = 0.3
"""
Seconds of tolerance between the last life sign of one generation and the start of the next (its
poll, its note).
"""
THAW = 8.0
"""Seconds within which the workers of a host that was frozen are gone after it thaws."""


def violations(bed: Bed, thawed: Mapping[str, Sequence[float]], *, ended: bool) -> Iterator[str]:
    """
    Yield what does not hold, in words.

    Args:
        thawed: when each host was thawed.
        ended: whether the job came to its end; False: its first node, and the scheduler with it,
            was lost.
    """
    starts = bed.notes("start")
    assigned = {int(event.data["generation"]): event for event in bed.events("assigned")}
    for generation in sorted({note.generation for note in starts}):
        here = [note for note in starts if note.generation == generation]
        ranks = [note.rank for note in here]
        if len(set(ranks)) != len(ranks):
            yield f"generation {generation} has a rank twice: {sorted(ranks)}"
        if len({(note.world, note.restarts) for note in here}) != 1:
            yield f"generation {generation} does not agree on size and restarts: {here}"
        if generation not in assigned or here[0].world != len(assigned[generation].data["nodes"]):
            yield f"generation {generation} of {here[0].world} is not the one that the log tells"
        yield from _beside(bed, generation, min(note.at for note in here), thawed)
    counts = [note.restarts for note in sorted(starts, key=lambda note: note.generation)]
    if counts != sorted(counts):
        yield f"the restart count fell: {counts}"
    if ended and len(bed.events("verdict")) != 1:
        yield f"{len(bed.events('verdict'))} verdicts"
    if ended and (state := replay_events(bed.events()).state) != "done":
        yield f"the log ends with a job that is {state}"


def _beside(
    bed: Bed, generation: int, first: float, thawed: Mapping[str, Sequence[float]]
) -> Iterator[str]:
    """
    No worker of an earlier generation may run after ``first``; one that was frozen has a moment to
    go.
    """
    for life in bed.lives():
        if life.generation < generation and life.last > first + OVERLAP:
            woke = [at for at in thawed.get(life.host, ()) if at <= life.last]
            if not woke or life.last > woke[-1] + THAW:
                yield f"{life} ran {life.last - first:.2f} s into generation {generation}"
