"""
What travels between stages during a step: activations down the line, gradients back, and what
announces them.

The first micro-batch of each shape is preceded by a `Record`, which says what travels; from then on
both ends know. What a rank receives from another comes in the order in which that one sends it,
which both read off the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pdrun.errors import UsageError
from pdrun.parallel.pipeline.metadata import API_NAME, BoundaryRecord
from pdrun.parallel.pipeline.p2p import P2PLinks, PendingReceive
from pdrun.parallel.pipeline.schedules.schedule import PipelineSchedule, StageAction
from pdrun.parallel.pipeline.schedules.validate import list_messages
from pdrun.parallel.pipeline.split_backward import DeferredWeightGrad

ShapeKey = tuple[Any, ...]
"""
What the activations' form depends on: whether gradients are wanted, whether one trains, the shapes
of the batch.
"""
Received = tuple[BoundaryRecord | None, list[torch.Tensor]]
"""What a stage has been sent, and how it was announced; gradients need no announcement."""


@dataclass
class MicroBatchState:
    """
    A stage's part of a micro-batch, from its forward to the end of its backward.

    Attributes:
        told, taken: what came from the stage before; those tensors that want a gradient are leaves.
        sent: what was sent on; None on the last stage.
        roots: where the backward begins: the loss's sum, or the places in autograd's graph of what
            was sent.
        later: what a split backward has left to do.
    """

    record: BoundaryRecord | None
    inputs: list[torch.Tensor]
    sent_record: BoundaryRecord | None
    roots: list[Any] = field(default_factory=list)
    deferred: DeferredWeightGrad | None = None

    def input_gradients(self) -> list[torch.Tensor]:
        """
        Return the gradients of what was taken, as far as they are wanted; zeros where there are
        none.
        """
        pairs = zip(self.record.sent if self.record else (), self.inputs, strict=True)
        return [
            torch.zeros_like(x) if x.grad is None else x.grad for one, x in pairs if one.needs_grad
        ]


class StageExchange:
    """
    One rank's messages.

    Args:
        schedule: a sound one.
        links: to the other ranks.
        dynamic: announce every micro-batch.
    """

    def __init__(self, schedule: PipelineSchedule, links: P2PLinks, dynamic: bool) -> None:
        self.schedule = schedule
        self.links = links
        self.is_dynamic = dynamic
        self.rank = links.axis.index
        self.stage_ranks = schedule.stage_ranks
        self._order = {
            ends: [one.action for one in sent] for ends, sent in list_messages(schedule).items()
        }
        self._known_records: dict[tuple[int, ShapeKey], BoundaryRecord] = {}
        """How what a stage sends on looks."""
        self._next_message: dict[tuple[int, int], int] = {}
        self._arrived: dict[StageAction, tuple[BoundaryRecord, PendingReceive]] = {}
        self._from_own_stages: dict[StageAction, Received] = {}
        self._shape_keys: list[ShapeKey] = []

    def begin_step(self, batches: Sequence[Any], training: bool) -> None:
        """Begin a step on some micro-batches."""
        self._next_message = dict.fromkeys(self._order, 0)
        self._arrived.clear()
        self._from_own_stages.clear()
        mode = (torch.is_grad_enabled(), training)
        self._shape_keys = [
            (*mode, *map(_shape_of_leaf, pytree.tree_leaves(batch))) for batch in batches
        ]

    # ---- what is sent -------------------------------------------------------

    def send_output(
        self, action: StageAction, sent: BoundaryRecord, tensors: list[torch.Tensor]
    ) -> None:
        """
        Send what a forward made to the next stage.

        Raises:
            UsageError: it looks otherwise than for a micro-batch of the same shapes before.
        """
        stage = action.stage
        micro = action.micro
        place = self.stage_ranks[stage + 1]
        key = (stage, self._shape_keys[micro])
        known = self._known_records.setdefault(key, sent) if not self.is_dynamic else sent
        if known != sent:
            raise UsageError(
                f"stage {stage} ran other modules, or made other shapes, for micro-batch {micro} than for one before"
                f" of the same shapes: {_describe_difference(known, sent)}",
                where=API_NAME,
                hint="pipeline=Pipeline(dynamic=True), which announces every micro-batch",
            )
        if place == self.rank:
            self._from_own_stages[StageAction(stage + 1, "F", micro)] = (
                known,
                [x.detach() for x in tensors],
            )
            return
        label = f"stage {stage}'s output for micro-batch {micro}"
        if known is sent:
            self.links.send_record(sent, place, label)
        self.links.send_tensors(tensors, place, label)

    def send_gradients(self, action: StageAction, work: MicroBatchState) -> None:
        """Send the gradients of what a stage took to the stage before."""
        if action.stage == 0:
            return
        place = self.stage_ranks[action.stage - 1]
        grads = work.input_gradients()
        if place == self.rank:
            split = StageAction(action.stage - 1, "I", action.micro)
            here = split if split in self.schedule.rows[self.rank] else split._replace(kind="B")
            self._from_own_stages[here] = (None, grads)
        else:
            self.links.send_tensors(
                grads, place, f"stage {action.stage}'s gradients for micro-batch {action.micro}"
            )
        for x in work.inputs:
            x.grad = None

    def send_losses(self, sums: torch.Tensor) -> torch.Tensor:
        """
        Return the losses on the last rank, which gets them from that of the last stage; zeros on
        the others.
        """
        source = self.stage_ranks[-1]
        target = self.schedule.rank_count - 1
        if source != target and self.rank == source:
            self.links.send_tensors([sums], target, "the losses")
            return torch.zeros_like(sums)
        if source != target and self.rank == target:
            return self.links.wait_received(
                self.links.post_receives([(tuple(sums.shape), sums.dtype)], source), "the losses"
            )[0]
        return sums

    # ---- what arrives -------------------------------------------------------

    def _source_action(self, action: StageAction) -> StageAction | None:
        """
        Return the action of another rank whose message an action needs; None where there is none.
        """
        if action.kind == "W" or (action.kind == "F" and action.stage == 0):
            return None
        stage = action.stage + (-1 if action.kind == "F" else 1)
        if stage == self.schedule.stage_count or self.stage_ranks[stage] == self.rank:
            return None
        if action.kind == "F":
            return StageAction(stage, "F", action.micro)
        split = StageAction(stage, "I", action.micro)
        if split in self._order[self.stage_ranks[stage], self.rank]:
            return split
        return StageAction(stage, "B", action.micro)

    def post_receives(
        self, action: StageAction, live: dict[tuple[int, int], MicroBatchState], wait: bool
    ) -> None:
        """
        Begin to receive what an action needs, and whatever its sender sends before that.

        Args:
            live: what this rank has sent and has no gradients of yet.
            wait: whether to wait for announcements; without that, what isn't known yet is left for
                later.
        """
        source = self._source_action(action)
        while source is not None and source not in self._arrived:
            ends = (self.stage_ranks[source.stage], self.rank)
            coming = self._order[ends][self._next_message[ends]]
            record = self._expected_record(coming, ends[0], live, wait)
            if record is None:
                return
            shapes = [
                (one.shape, one.dtype)
                for one in record.sent
                if one.needs_grad or coming.kind == "F"
            ]
            self._arrived[coming] = (record, self.links.post_receives(shapes, ends[0]))
            self._next_message[ends] += 1

    def _expected_record(
        self,
        coming: StageAction,
        place: int,
        live: dict[tuple[int, int], MicroBatchState],
        wait: bool,
    ) -> BoundaryRecord | None:
        """Return what a message consists of; None where that would have to be waited for."""
        if coming.kind != "F":  # as this rank has sent it
            work = live.get((coming.stage - 1, coming.micro))
            return work.sent_record if work is not None else None
        key = (coming.stage, self._shape_keys[coming.micro])
        if key in self._known_records and not self.is_dynamic:
            return self._known_records[key]
        if not wait:
            return None
        label = f"stage {coming.stage}'s announcement of micro-batch {coming.micro}"
        self._known_records[key] = self.links.receive_record(place, label)
        return self._known_records[key]

    def take_received(self, action: StageAction) -> Received:
        """Return what an action needs from another stage."""
        if action in self._from_own_stages:
            return self._from_own_stages.pop(action)
        source = self._source_action(action)
        if source is None:
            return None, []
        record, arriving = self._arrived.pop(source)
        what = "output" if action.kind == "F" else "gradients"
        return record, self.links.wait_received(
            arriving, f"stage {source.stage}'s {what} for micro-batch {action.micro}"
        )

    def take_forward(self, action: StageAction) -> Received:
        """
        Return what a stage needs where there are forwards only, of all micro-batches one stage
        after the other.
        """
        source = self._source_action(action)
        if action not in self._from_own_stages and source is not None:
            record = self._expected_record(source, self.stage_ranks[source.stage], {}, wait=True)
            assert record is not None
            shapes = [(one.shape, one.dtype) for one in record.sent]
            self._arrived[source] = (
                record,
                self.links.post_receives(shapes, self.stage_ranks[source.stage]),
            )
        return self.take_received(action)


def _shape_of_leaf(leaf: Any) -> Any:
    """Return what of a leaf of a batch decides about shapes."""
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.dtype)
    return repr(leaf)[:99]


def _describe_difference(known: BoundaryRecord, now: BoundaryRecord) -> str:
    """Say in what two records differ."""
    if known.next_module != now.next_module:
        return f"left before {now.next_module}, not {known.next_module}"
    if known.sent != now.sent:
        return f"sends {[list(one.shape) for one in now.sent]}, not {[list(one.shape) for one in known.sent]}"
    if [name for name, _ in known.returned] != [name for name, _ in now.returned]:
        return "the modules that ran differ"
    if known.dropout_calls != now.dropout_calls:
        return "the number of dropouts differs"
    return "what modules returned differs"
