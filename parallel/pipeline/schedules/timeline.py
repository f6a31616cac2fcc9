"""
When each action of a schedule runs, for given costs: the bubble, and a drawing.

Pure arithmetic on the order of the schedule: an action starts when its rank is free and its inputs
have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdrun.parallel.pipeline.schedules.schedule import (
    PipelineSchedule,
    StageAction,
    prerequisites_of,
)


@dataclass(frozen=True)
class ActionCosts:
    """
    Durations of actions, in any unit of time.

    Attributes:
        forward, input, weight: of a stage of average size; a full backward takes input + weight.
        send: from one rank to another.
        shares: relative size of each stage; empty: equal.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    send: float = 0.0
    shares: tuple[float, ...] = ()

    def cost_of(self, action: StageAction) -> float:
        """Return the duration of an action."""
        plain = {
            "F": self.forward,
            "B": self.input + self.weight,
            "I": self.input,
            "W": self.weight,
        }[action.kind]
        if not self.shares:
            return plain
        return plain * (self.shares[action.stage] * len(self.shares) / sum(self.shares))


@dataclass(frozen=True)
class ScheduleTimeline:
    """
    A schedule in time.

    Attributes:
        spans: (start, end) of each action.
        stuck: for each rank in a deadlock its next action, and the action it waits for; empty
            without one.
    """

    schedule: PipelineSchedule
    spans: dict[StageAction, tuple[float, float]]
    stuck: dict[int, tuple[StageAction, StageAction]]

    @property
    def duration(self) -> float:
        """Time from the first action to the end of the last."""
        return max((end for _, end in self.spans.values()), default=0.0)

    @property
    def bubble_share(self) -> float:
        """Share of the ranks' time in which they wait, from 0 to 1."""
        busy = sum(end - begin for begin, end in self.spans.values())
        return 1 - busy / (self.duration * self.schedule.rank_count) if self.duration else 0.0


def simulate_schedule(
    schedule: PipelineSchedule, costs: ActionCosts | None = None
) -> ScheduleTimeline:
    """Return when each action runs; in a deadlock `ScheduleTimeline.stuck` names the actions."""
    costs = costs or ActionCosts()
    places = schedule.stage_ranks
    split = {(a.stage, a.micro) for row in schedule.rows for a in row if a.kind == "I"}
    spans: dict[StageAction, tuple[float, float]] = {}
    clock = [0.0] * schedule.rank_count
    at = [0] * schedule.rank_count
    stuck: dict[int, tuple[StageAction, StageAction]] = {}
    moved = True
    while moved:
        moved = False
        stuck = {}
        for rank, row in enumerate(schedule.rows):
            while at[rank] < len(row):
                action = row[at[rank]]
                wanted = prerequisites_of(
                    action, schedule.stage_count, (action.stage + 1, action.micro) in split
                )
                missing = next((one for one in wanted if one not in spans), None)
                if missing is not None:
                    stuck[rank] = (action, missing)
                    break
                ready = [spans[one][1] + costs.send * (places[one.stage] != rank) for one in wanted]
                begin = max([clock[rank], *ready])
                clock[rank] = begin + costs.cost_of(action)
                spans[action] = (begin, clock[rank])
                at[rank] += 1
                moved = True
    return ScheduleTimeline(schedule, spans, stuck)


def bubble_share(schedule: PipelineSchedule, costs: ActionCosts | None = None) -> float:
    """Return the share of the ranks' time in which they wait."""
    return simulate_schedule(schedule, costs).bubble_share


def draw_schedule(schedule: PipelineSchedule, costs: ActionCosts | None = None) -> str:
    """
    Draw a schedule: one line per rank, time to the right, a dot for each unit of waiting.

    A backward is drawn over its full length (``B3 -``). With several chunks per rank, letters
    distinguish them: ``Fa3``. With slices, ``F3.1`` is slice 1 of micro-batch 3.
    """
    costs = costs or ActionCosts()
    found = simulate_schedule(schedule, costs)
    unit = min((end - begin for begin, end in found.spans.values() if end > begin), default=1.0)
    width = 1 + max((len(_action_label(schedule, action)) for action in found.spans), default=1)
    lines = []
    for rank, row in enumerate(schedule.rows):
        cells: list[str] = ["."] * round(found.duration / unit)
        for action in row:
            if action not in found.spans:
                break
            begin, end = (round(value / unit) for value in found.spans[action])
            cells[begin:end] = [_action_label(schedule, action), *["-"] * (end - begin - 1)]
        lines.append(f"rank {rank}  " + "".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)


def _action_label(schedule: PipelineSchedule, action: StageAction) -> str:
    """Return an action's name on its rank, with a letter for the chunk if there are several."""
    mine: Sequence[int] = schedule.stages_of(schedule.stage_ranks[action.stage])
    chunk = chr(ord("a") + mine.index(action.stage)) if len(mine) > 1 else ""
    micro, piece = divmod(action.micro, schedule.slices)
    return f"{action.kind}{chunk}{micro}" + (f".{piece}" if schedule.slices > 1 else "")
