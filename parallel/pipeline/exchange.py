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
from pdrun.parallel.pipeline.metadata import WHERE, Record
from pdrun.parallel.pipeline.p2p import Arriving, Links
from pdrun.parallel.pipeline.schedules.schedule import Action, Schedule
from pdrun.parallel.pipeline.schedules.validate import messages
from pdrun.parallel.pipeline.split_backward import Later

Key = tuple[Any, ...]
"""
What the activations' form depends on: whether gradients are wanted, whether one trains, the shapes
of the batch.
"""
Came = tuple[Record | None, list[torch.Tensor]]
"""What a stage has been sent, and how it was announced; gradients need no announcement."""


@dataclass
class Work:
    """
    A stage's part of a micro-batch, from its forward to the end of its backward.

    Attributes:
        told, taken: what came from the stage before; those tensors that want a gradient are leaves.
        sent: what was sent on; None on the last stage.
        roots: where the backward begins: the loss's sum, or the places in autograd's graph of what
            was sent.
        later: what a split backward has left to do.
    """

    told: Record | None
    taken: list[torch.Tensor]
    sent: Record | None
    roots: list[Any] = field(default_factory=list)
    later: Later | None = None

    def gradients(self) -> list[torch.Tensor]:
        """
        Return the gradients of what was taken, as far as they are wanted; zeros where there are
        none.
        """
        pairs = zip(self.told.sent if self.told else (), self.taken, strict=True)
        return [torch.zeros_like(x) if x.grad is None else x.grad for one, x in pairs if one.grad]


class Traffic:
    """
    One rank's messages.

    Args:
        schedule: a sound one.
        links: to the other ranks.
        dynamic: announce every micro-batch.
    """

    def __init__(self, schedule: Schedule, links: Links, dynamic: bool) -> None:
        self.schedule = schedule
        self.links = links
        self.dynamic = dynamic
        self.rank = links.axis.index
        self.places = schedule.places
        self._order = {
            ends: [one.action for one in sent] for ends, sent in messages(schedule).items()
        }
        self._known: dict[tuple[int, Key], Record] = {}
        """How what a stage sends on looks."""
        self._at: dict[tuple[int, int], int] = {}
        self._arrived: dict[Action, tuple[Record, Arriving]] = {}
        self._local: dict[Action, Came] = {}
        self._keys: list[Key] = []

    def begin(self, batches: Sequence[Any], training: bool) -> None:
        """Begin a step on some micro-batches."""
        self._at = dict.fromkeys(self._order, 0)
        self._arrived.clear()
        self._local.clear()
        mode = (torch.is_grad_enabled(), training)
        self._keys = [(*mode, *map(_look, pytree.tree_leaves(batch))) for batch in batches]

    # ---- what is sent -------------------------------------------------------

    def send_on(self, action: Action, sent: Record, tensors: list[torch.Tensor]) -> None:
        """
        Send what a forward made to the next stage.

        Raises:
            UsageError: it looks otherwise than for a micro-batch of the same shapes before.
        """
        stage = action.stage
        micro = action.micro
        place = self.places[stage + 1]
        key = (stage, self._keys[micro])
        known = self._known.setdefault(key, sent) if not self.dynamic else sent
        if known != sent:
            raise UsageError(
                f"stage {stage} ran other modules, or made other shapes, for micro-batch {micro} than for one before"
                f" of the same shapes: {_difference(known, sent)}",
                where=WHERE,
                hint="pipeline=Pipeline(dynamic=True), which announces every micro-batch",
            )
        if place == self.rank:
            self._local[Action(stage + 1, "F", micro)] = (known, [x.detach() for x in tensors])
            return
        label = f"stage {stage}'s output for micro-batch {micro}"
        if known is sent:
            self.links.send_record(sent, place, label)
        self.links.send(tensors, place, label)

    def send_back(self, action: Action, work: Work) -> None:
        """Send the gradients of what a stage took to the stage before."""
        if action.stage == 0:
            return
        place = self.places[action.stage - 1]
        grads = work.gradients()
        if place == self.rank:
            split = Action(action.stage - 1, "I", action.micro)
            here = split if split in self.schedule.rows[self.rank] else split._replace(kind="B")
            self._local[here] = (None, grads)
        else:
            self.links.send(
                grads, place, f"stage {action.stage}'s gradients for micro-batch {action.micro}"
            )
        for x in work.taken:
            x.grad = None

    def send_losses(self, sums: torch.Tensor) -> torch.Tensor:
        """
        Return the losses on the last rank, which gets them from that of the last stage; zeros on
        the others.
        """
        source = self.places[-1]
        target = self.schedule.ranks - 1
        if source != target and self.rank == source:
            self.links.send([sums], target, "the losses")
            return torch.zeros_like(sums)
        if source != target and self.rank == target:
            return self.links.wait(
                self.links.post([(tuple(sums.shape), sums.dtype)], source), "the losses"
            )[0]
        return sums

    # ---- what arrives -------------------------------------------------------

    def _source(self, action: Action) -> Action | None:
        """
        Return the action of another rank whose message an action needs; None where there is none.
        """
        if action.kind == "W" or (action.kind == "F" and action.stage == 0):
            return None
        stage = action.stage + (-1 if action.kind == "F" else 1)
        if stage == self.schedule.stages or self.places[stage] == self.rank:
            return None
        if action.kind == "F":
            return Action(stage, "F", action.micro)
        split = Action(stage, "I", action.micro)
        if split in self._order[self.places[stage], self.rank]:
            return split
        return Action(stage, "B", action.micro)

    def post(self, action: Action, live: dict[tuple[int, int], Work], wait: bool) -> None:
        """
        Begin to receive what an action needs, and whatever its sender sends before that.

        Args:
            live: what this rank has sent and has no gradients of yet.
            wait: whether to wait for announcements; without that, what isn't known yet is left for
                later.
        """
        source = self._source(action)
        while source is not None and source not in self._arrived:
            ends = (self.places[source.stage], self.rank)
            coming = self._order[ends][self._at[ends]]
            record = self._announced(coming, ends[0], live, wait)
            if record is None:
                return
            shapes = [
                (one.shape, one.dtype) for one in record.sent if one.grad or coming.kind == "F"
            ]
            self._arrived[coming] = (record, self.links.post(shapes, ends[0]))
            self._at[ends] += 1

    def _announced(
        self, coming: Action, place: int, live: dict[tuple[int, int], Work], wait: bool
    ) -> Record | None:
        """Return what a message consists of; None where that would have to be waited for."""
        if coming.kind != "F":  # as this rank has sent it
            work = live.get((coming.stage - 1, coming.micro))
            return work.sent if work is not None else None
        key = (coming.stage, self._keys[coming.micro])
        if key in self._known and not self.dynamic:
            return self._known[key]
        if not wait:
            return None
        label = f"stage {coming.stage}'s announcement of micro-batch {coming.micro}"
        self._known[key] = self.links.receive_record(place, label)
        return self._known[key]

    def take(self, action: Action) -> Came:
        """Return what an action needs from another stage."""
        if action in self._local:
            return self._local.pop(action)
        source = self._source(action)
        if source is None:
            return None, []
        record, arriving = self._arrived.pop(source)
        what = "output" if action.kind == "F" else "gradients"
        return record, self.links.wait(
            arriving, f"stage {source.stage}'s {what} for micro-batch {action.micro}"
        )

    def take_forward(self, action: Action) -> Came:
        """
        Return what a stage needs where there are forwards only, of all micro-batches one stage
        after the other.
        """
        source = self._source(action)
        if action not in self._local and source is not None:
            record = self._announced(source, self.places[source.stage], {}, wait=True)
            assert record is not None
            shapes = [(one.shape, one.dtype) for one in record.sent]
            self._arrived[source] = (record, self.links.post(shapes, self.places[source.stage]))
        return self.take(action)


def _look(leaf: Any) -> Any:
    """Return what of a leaf of a batch decides about shapes."""
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.dtype)
    return repr(leaf)[:99]


def _difference(known: Record, now: Record) -> str:
    """Say in what two records differ."""
    if known.door != now.door:
        return f"left before {now.door}, not {known.door}"
    if known.sent != now.sent:
        return f"sends {[list(one.shape) for one in now.sent]}, not {[list(one.shape) for one in known.sent]}"
    if [name for name, _ in known.returned] != [name for name, _ in now.returned]:
        return "the modules that ran differ"
    if known.calls != now.calls:
        return "the number of dropouts differs"
    return "what modules returned differs"
