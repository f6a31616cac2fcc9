"""
A pipeline schedule is data: for each rank its actions, in order.

    2F5     forward of stage 2 on micro-batch 5
    2B5     backward
    2I5     backward for the input only
    2W5     later backward for the weights (with 2I5 instead of 2B5)

Stages are numbered along the model from 0; a rank can have several (*chunks*). Transfers follow
from the list: the output of ``2F5`` is sent to the rank of stage 3, the gradient of its input
(``2B5``, ``2I5``) to that of stage 1. `pdrun.parallel.pipeline.schedules.builders` makes the usual
schedules; `parse_schedule` reads a user's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from pdrun.errors import UsageError

ActionKind = Literal["F", "B", "I", "W"]
API_NAME = "pdrun.Pipeline"
_ACTION_PATTERN = re.compile(r"(\d+)([FBIW])(\d+)")


class StageAction(NamedTuple):
    """A stage's forward (F), backward (B), or backward for input (I) or weights (W) alone."""

    stage: int
    kind: ActionKind
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


@dataclass(frozen=True)
class PipelineSchedule:
    """
    The actions of all ranks.

    Attributes:
        name: of the schedule, as given by the user.
        rows: each rank's actions.
        slices: parts of the sequences of a micro-batch; the ``micro`` of an action is then a piece,
            ``micro-batch * slices + slice``.
    """

    name: str
    rows: tuple[tuple[StageAction, ...], ...]
    slices: int = 1

    @property
    def rank_count(self) -> int:
        """Number of ranks along the axis pp."""
        return len(self.rows)

    @property
    def stage_count(self) -> int:
        """Number of stages: ranks times chunks."""
        return 1 + max((action.stage for row in self.rows for action in row), default=-1)

    @property
    def piece_count(self) -> int:
        """Number of pieces: micro-batches times slices of their sequences."""
        return 1 + max((action.micro for row in self.rows for action in row), default=-1)

    @property
    def microbatch_count(self) -> int:
        """Number of micro-batches."""
        return -(-self.piece_count // self.slices)

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is split into input and weights."""
        return any(action.kind in "IW" for row in self.rows for action in row)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank of each stage; -1 for a stage without a rank."""
        found = [-1] * self.stage_count
        for rank, row in enumerate(self.rows):
            for action in row:
                found[action.stage] = rank
        return tuple(found)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in the order of the model."""
        return tuple(sorted({action.stage for action in self.rows[rank]}))

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)


def parse_schedule(
    value: str | Sequence[Sequence[str | tuple[int, str, int]]],
    name: str = "custom",
    slices: int = 1,
) -> PipelineSchedule:
    """
    Return the schedule that a user wrote.

    Args:
        value: one line of actions per rank, ``"0F0 0F1 0B0 0B1"``; or one list per rank, of
            ``"0F0"`` or ``(0, "F", 0)``.
        slices: of the sequences of a micro-batch; see `PipelineSchedule`.

    Raises:
        UsageError: an invalid action, with its rank and position. `validate_schedule` checks the
        rest.
    """
    lines = (
        [line.split() for line in value.splitlines() if line.strip()]
        if isinstance(value, str)
        else value
    )
    rows = [
        tuple(_parse_action(one, rank, place) for place, one in enumerate(line))
        for rank, line in enumerate(lines)
    ]
    if not any(rows):
        raise UsageError(
            "the schedule has no actions",
            where=API_NAME,
            hint='write one line per rank, such as "0F0 0B0"',
        )
    return PipelineSchedule(name, tuple(rows), slices)


def _parse_action(value: str | tuple[int, str, int], rank: int, place: int) -> StageAction:
    text = value if isinstance(value, str) else "".join(map(str, value))
    found = _ACTION_PATTERN.fullmatch(text)
    if found is None:
        what = f"{value!r}, action {place} of rank {rank}, is not an action"
        raise UsageError(
            what, where=API_NAME, hint="STAGE, then F, B, I or W, then MICROBATCH, as in 2F5"
        )
    return StageAction(int(found[1]), cast(ActionKind, found[2]), int(found[3]))


def prerequisites_of(action: StageAction, stages: int, splits: bool) -> list[StageAction]:
    """
    Return the actions that must be complete before an action.

    Args:
        stages: of the schedule.
        splits: whether the next stage has I instead of B for this micro-batch.
    """
    stage, kind, micro = action
    if kind == "F":
        return [StageAction(stage - 1, "F", micro)] if stage else []
    if kind == "W":
        return [StageAction(stage, "I", micro)]
    found = [StageAction(stage, "F", micro)]
    if stage + 1 < stages:
        found.append(StageAction(stage + 1, "I" if splits else "B", micro))
    return found
