"""
Messages between stages during a step: activations, gradients, and boundary records.

A `BoundaryRecord` precedes the first micro-batch of each shape and describes the tensors that
follow; later micro-batches need none. A rank receives messages in the order of the sender, which
both read from the schedule.
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
"""The inputs that determine the form of activations: gradient mode, training mode, batch shapes."""
Received = tuple[BoundaryRecord | None, list[torch.Tensor]]
"""The tensors that a stage received, and their record; gradients need no record."""


@dataclass
class MicroBatchState:
    """
    A stage's part of a micro-batch, from its forward to the end of its backward.

    Attributes:
        record, inputs: received from the stage before; tensors that need a gradient are leaves.
        sent_record: describes what was sent on; None on the last stage.
        roots: where the backward starts: the sum of the loss, or the gradient edges of what was
            sent.
        deferred: the remaining work of a split backward.
    """

    record: BoundaryRecord | None
    inputs: list[torch.Tensor]
    sent_record: BoundaryRecord | None
    roots: list[Any] = field(default_factory=list)
    deferred: DeferredWeightGrad | None = None

    def input_gradients(self) -> list[torch.Tensor]:
        """Return the gradients of the inputs that need one; zeros for unused inputs."""
        pairs = zip(self.record.sent if self.record else (), self.inputs, strict=True)
        return [
            torch.zeros_like(x) if x.grad is None else x.grad for one, x in pairs if one.needs_grad
        ]


class StageExchange:
    """
    The messages of one rank.

    Args:
        schedule: a valid one.
        links: to the other ranks.
        dynamic: send a record for every micro-batch.
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
        """The records of what each stage sends."""
        self._next_message: dict[tuple[int, int], int] = {}
        self._arrived: dict[StageAction, tuple[BoundaryRecord, PendingReceive]] = {}
        self._from_own_stages: dict[StageAction, Received] = {}
        self._shape_keys: list[ShapeKey] = []

    def begin_step(self, batches: Sequence[Any], training: bool) -> None:
        """Start a step on some micro-batches."""
        self.links.open_mailboxes()
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
        Send the output of a forward to the next stage.

        Raises:
            UsageError: it differs from that of an earlier micro-batch of the same shapes.
        """
        stage = action.stage
        micro = action.micro
        place = self.stage_ranks[stage + 1]
        key = (stage, self._shape_keys[micro])
        known = self._known_records.setdefault(key, sent) if not self.is_dynamic else sent
        if known != sent:
            raise UsageError(
                f"stage {stage} ran other modules, or made other shapes, for micro-batch {micro}"
                " than for an earlier one of the same shapes:"
                f" {_describe_difference(known, sent)}",
                where=API_NAME,
                hint="use pipeline=Pipeline(dynamic=True), which describes every micro-batch",
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
        """Send the gradients of a stage's inputs to the stage before."""
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
        Return the losses on the last rank, received from that of the last stage; zeros on the
        others.
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
        """Return the action of another rank whose message an action needs; None without one."""
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
        Start to receive the message of an action, and all earlier messages of its sender.

        Args:
            live: micro-batches of this rank whose backward is not complete.
            wait: whether to wait for records; otherwise messages of unknown form are left for
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
        """Return the record of a message; None if it has not arrived and must not be waited for."""
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
        """Return the tensors that an action needs from another stage."""
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
        Return the input of a stage when there are forwards only, of all micro-batches stage by
        stage.
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
    """Return the part of a leaf of a batch that determines shapes."""
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.dtype)
    return repr(leaf)[:99]


def _describe_difference(known: BoundaryRecord, now: BoundaryRecord) -> str:
    """Return the difference of two records."""
    if known.next_module != now.next_module:
        return f"left before {now.next_module}, not {known.next_module}"
    if known.sent != now.sent:
        now_shapes = [list(one.shape) for one in now.sent]
        known_shapes = [list(one.shape) for one in known.sent]
        return f"sends {now_shapes}, not {known_shapes}"
    if [name for name, _ in known.returned] != [name for name, _ in now.returned]:
        return "the modules that ran differ"
    if known.dropout_calls != now.dropout_calls:
        return "the number of dropouts differs"
    return "what modules returned differs"
