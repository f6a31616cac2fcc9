"""
Is a schedule sound? Complete, in an order that can be carried out, and how much of it lives at
once.

Sends and receives need no check of their own: both ends derive them from the same list (see
`messages`), so that each has its counterpart, in the same order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pdrun.errors import UsageError
from pdrun.parallel.pipeline.schedules.schedule import Action, Schedule
from pdrun.parallel.pipeline.schedules.timeline import simulate

TOLD = 4
"""Faults that one error tells of."""


@dataclass(frozen=True)
class Checked:
    """
    What `validate` found out.

    Attributes:
        live: for each rank the largest number of (stage, micro-batch) pairs whose activations it
            holds at once, from
            F until B or W.
    """

    live: tuple[int, ...]


def validate(schedule: Schedule) -> Checked:
    """
    Hold a schedule against what a step is: each stage goes forward and backward once through each
    micro-batch.

    Raises:
        UsageError: something is missing, twice, on two ranks or before what it needs, or ranks
            would wait for each
            other for ever; names the actions.
    """
    faults = _incomplete(schedule) or _disordered(schedule)
    if not faults:
        stuck = simulate(schedule).stuck
        faults = [f"rank {rank} stands at {a}, which needs {b}" for rank, (a, b) in stuck.items()]
        faults = [f"the ranks would wait for ever: {'; '.join(faults)}"] if faults else []
    if faults:
        more = f" and {len(faults) - TOLD} more" if len(faults) > TOLD else ""
        raise UsageError(
            f"{'; '.join(faults[:TOLD])}{more}", where=f"the pipeline schedule {schedule.name!r}"
        )
    return Checked(tuple(_live(row) for row in schedule.rows))


def _incomplete(schedule: Schedule) -> list[str]:
    """Return what is missing, double, or on two ranks."""
    found: list[str] = []
    ranks_of: dict[int, set[int]] = {}
    for rank, row in enumerate(schedule.rows):
        for action in row:
            ranks_of.setdefault(action.stage, set()).add(rank)
    found += [
        f"ranks {sorted(ranks)} share stage {stage}"
        for stage, ranks in ranks_of.items()
        if len(ranks) > 1
    ]
    found += [f"rank {rank} has nothing to do" for rank, row in enumerate(schedule.rows) if not row]
    counts = Counter(action for row in schedule.rows for action in row)
    found += [f"{action} is there {count} times" for action, count in counts.items() if count > 1]
    for stage in range(schedule.stages):
        for micro in range(schedule.microbatches):
            kinds = "".join(kind for kind in "FBIW" if Action(stage, kind, micro) in counts)  # type: ignore[arg-type]
            if kinds not in ("FB", "FIW"):
                what = f"has {' and '.join(kinds) or 'nothing'}, not F and B or F, I and W"
                found.append(f"stage {stage} with micro-batch {micro} {what}")
    return found


def _disordered(schedule: Schedule) -> list[str]:
    """Return what comes before that which it needs on the same rank."""
    found = []
    for rank, row in enumerate(schedule.rows):
        at = {action: place for place, action in enumerate(row)}
        for action in row:
            first = Action(action.stage, "I" if action.kind == "W" else "F", action.micro)
            if at[first] > at[action]:
                found.append(f"rank {rank} has {action} before {first}")
    return found


def _live(row: tuple[Action, ...]) -> int:
    now = most = 0
    for action in row:
        now += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
        most = max(most, now)
    return most


@dataclass(frozen=True)
class Message:
    """
    What goes from one rank to another: the output of an F, or the gradient of the input of a B or
    I.
    """

    action: Action
    source: int
    target: int


def ends(schedule: Schedule) -> set[tuple[int, int]]:
    """
    Return the pairs of ranks that send something to each other: messages, and the losses to the
    last rank.
    """
    losses = (schedule.places[-1], schedule.ranks - 1)
    return {*messages(schedule), *({losses} if losses[0] != losses[1] else ())}


def messages(schedule: Schedule) -> dict[tuple[int, int], list[Message]]:
    """
    Return what each rank sends to each other rank, in the order in which it does: both ends go by
    this list.
    """
    places = schedule.places
    found = dict[tuple[int, int], list[Message]]()
    for rank, row in enumerate(schedule.rows):
        for action in row:
            to = action.stage + (1 if action.kind == "F" else -1)
            if action.kind != "W" and 0 <= to < schedule.stages and places[to] != rank:
                found.setdefault((rank, places[to]), []).append(Message(action, rank, places[to]))
    return found
