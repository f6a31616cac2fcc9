"""
Checks of a schedule: complete, without deadlock, and how many activations are live.

Sends and receives need no check: both ends derive them from the same list (`list_messages`), so
that each has its counterpart, in the same order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pdrun.errors import UsageError
from pdrun.parallel.pipeline.schedules.schedule import ActionKind, PipelineSchedule, StageAction
from pdrun.parallel.pipeline.schedules.timeline import simulate_schedule

KINDS: tuple[ActionKind, ...] = ("F", "B", "I", "W")
MAX_REPORTED_FAULTS = 4
"""Number of faults that one error lists."""


@dataclass(frozen=True)
class ScheduleCheck:
    """
    The result of `validate_schedule`.

    Attributes:
        live: for each rank the largest number of (stage, micro-batch) pairs with live activations,
            from F until B or W.
    """

    live: tuple[int, ...]


def validate_schedule(schedule: PipelineSchedule) -> ScheduleCheck:
    """
    Check that each stage runs forward and backward once on each micro-batch, in a possible order.

    Raises:
        UsageError: an action is missing, twice, on two ranks or before its inputs, or there is a
            deadlock; names the actions.
    """
    faults = _find_incomplete(schedule) or _find_disordered(schedule)
    if not faults:
        stuck = simulate_schedule(schedule).stuck
        waits = [f"rank {rank} waits at {a} for {b}" for rank, (a, b) in stuck.items()]
        if waits:
            faults = [f"the ranks would deadlock: {'; '.join(waits)}"]
    if faults:
        more = (
            f" and {len(faults) - MAX_REPORTED_FAULTS} more"
            if len(faults) > MAX_REPORTED_FAULTS
            else ""
        )
        raise UsageError(
            f"{'; '.join(faults[:MAX_REPORTED_FAULTS])}{more}",
            where=f"the pipeline schedule {schedule.name!r}",
        )
    return ScheduleCheck(tuple(_peak_live(row) for row in schedule.rows))


def _find_incomplete(schedule: PipelineSchedule) -> list[str]:
    """Return actions that are missing, double, or on two ranks."""
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
    found += [f"{action} is listed {count} times" for action, count in counts.items() if count > 1]
    for stage in range(schedule.stage_count):
        for micro in range(schedule.piece_count):
            kinds = "".join(kind for kind in KINDS if StageAction(stage, kind, micro) in counts)
            if kinds not in ("FB", "FIW"):
                what = f"has {' and '.join(kinds) or 'nothing'}, not F and B or F, I and W"
                found.append(f"stage {stage} with micro-batch {micro} {what}")
    return found


def _find_disordered(schedule: PipelineSchedule) -> list[str]:
    """Return actions that precede their input on the same rank."""
    found = []
    for rank, row in enumerate(schedule.rows):
        at = {action: place for place, action in enumerate(row)}
        for action in row:
            first = StageAction(action.stage, "I" if action.kind == "W" else "F", action.micro)
            if at[first] > at[action]:
                found.append(f"rank {rank} has {action} before {first}")
            other = _other_slice(action, schedule.slices)
            if other is not None and at.get(other, -1) > at[action]:
                found.append(f"rank {rank} has {action} before {other}, another slice of its rows")
    return found


def _other_slice(action: StageAction, slices: int) -> StageAction | None:
    """
    Return the action of the neighbour slice that must precede: forwards see the keys of earlier
    slices, backwards get the gradients of later ones.
    """
    place = action.micro % slices
    if action.kind == "F":
        return action._replace(micro=action.micro - 1) if place else None
    if action.kind == "W":
        return None
    return action._replace(micro=action.micro + 1) if place < slices - 1 else None


def _peak_live(row: tuple[StageAction, ...]) -> int:
    now = most = 0
    for action in row:
        now += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
        most = max(most, now)
    return most


@dataclass(frozen=True)
class StageMessage:
    """A message between ranks: the output of an F, or the gradient of the input of a B or I."""

    action: StageAction
    source: int
    target: int


def connected_ranks(schedule: PipelineSchedule) -> set[tuple[int, int]]:
    """Return the pairs of ranks with messages, including the losses to the last rank."""
    losses = (schedule.stage_ranks[-1], schedule.rank_count - 1)
    return {*list_messages(schedule), *({losses} if losses[0] != losses[1] else ())}


def list_messages(schedule: PipelineSchedule) -> dict[tuple[int, int], list[StageMessage]]:
    """Return the messages of each pair of ranks, in order; both ends use this list."""
    places = schedule.stage_ranks
    found = dict[tuple[int, int], list[StageMessage]]()
    for rank, row in enumerate(schedule.rows):
        for action in row:
            to = action.stage + (1 if action.kind == "F" else -1)
            if action.kind != "W" and 0 <= to < schedule.stage_count and places[to] != rank:
                found.setdefault((rank, places[to]), []).append(
                    StageMessage(action, rank, places[to])
                )
    return found
