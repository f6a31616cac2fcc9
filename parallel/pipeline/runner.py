"""
Carrying a schedule out: this rank's actions in their order, activations and gradients from rank to rank.

The first micro-batch of each shape is preceded by a `Record`, which says what travels; from then on both ends know. The
target of a micro-batch is part of it, on every rank, and so is never paired with another's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pdrun.errors import UsageError
from pdrun.parallel.norms import wide_type
from pdrun.parallel.pipeline import deferred
from pdrun.parallel.pipeline.describe import describe
from pdrun.parallel.pipeline.links import Arriving, Links
from pdrun.parallel.pipeline.records import WHERE, Record
from pdrun.parallel.pipeline.schedule import Action, Schedule
from pdrun.parallel.pipeline.stage import Pass, Stages
from pdrun.parallel.pipeline.validate import messages

if TYPE_CHECKING:
    from pdrun.parallel.driver import MicroBatch
    from pdrun.parallel.run import Run

Key = tuple[Any, ...]
"""What the form of a micro-batch's activations depends on: the shapes of its batch, and whether gradients are wanted."""


@dataclass
class Work:
    """
    A stage's part of a micro-batch, from its forward to the end of its backward.

    Attributes:
        taken: what came from the stage before; those with a gradient are leaves.
        told: how `taken` was announced.
        outputs: what was sent on, or the loss's sum; `sent` is how it was announced.
    """

    taken: list[torch.Tensor] = field(default_factory=list)
    told: Record | None = None
    outputs: list[torch.Tensor] = field(default_factory=list)
    sent: Record | None = None
    later: deferred.Later | None = None

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of what was taken, as far as they were asked for; zeros where there are none."""
        told = self.told.sent if self.told else ()
        return [
            torch.zeros_like(x) if x.grad is None else x.grad
            for one, x in zip(told, self.taken, strict=True)
            if one.grad
        ]


class Runner:
    """
    What drives a pipeline: see `pdrun.parallel.driver.Driver`.

    Args:
        schedule: a sound one.
        stages: those that this rank holds.
        links: to the other ranks.
        dynamic: announce every micro-batch anew: for models whose branches depend on the data.
    """

    def __init__(self, schedule: Schedule, stages: Stages, links: Links, dynamic: bool = False) -> None:
        self.schedule, self.stages, self.links, self.dynamic = schedule, stages, links, dynamic
        self.rank, self._places = links.axis.index, schedule.places
        row = schedule.rows[self.rank]
        ends = {action.stage: place for place, action in enumerate(row) if action.kind in "BW"}
        self._mine = sorted(ends, key=lambda stage: -ends[stage])
        """The stages of this rank, as chunks 0, 1, ...: chunk 0 is done last."""
        self._owner = self._owners()
        self._extra: dict[nn.Parameter, torch.Tensor] = {}
        """Gradients of weights that belong to another chunk than the one that computed them."""
        self._known: dict[tuple[int, Key], Record] = {}
        """How activations between a stage and the next look."""
        self._order = {ends: [m.action for m in sent] for ends, sent in messages(schedule).items()}
        self._at: dict[tuple[int, int], int] = {}
        self._arrived: dict[Action, tuple[Record, Arriving]] = {}
        self._live: dict[tuple[int, int], Work] = {}
        self._keys: list[Key] = []
        self._batches: list[Any] = []
        self._local: dict[Action, tuple[Record | None, list[torch.Tensor]]] = {}

    def chunk_of(self, name: str) -> int:
        """Return in which of this rank's chunks a weight is; one that several stages use belongs to chunk 0."""
        return self._owner.get(self.stages.held[name], 0)

    def _owners(self) -> dict[nn.Parameter, int]:
        """Return to which chunk each weight belongs; those that stages share, to chunk 0 on every rank."""
        own = {weight: chunk for chunk, stage in enumerate(self._mine) for weight in self.stages.weights[stage]}
        return {weight: 0 if weight in self.stages.shared else chunk for weight, chunk in own.items()}

    def explain(self) -> str:
        """Return the stages, their shares and the schedule in words."""
        return describe(self.schedule, self.stages.cut)

    # ---- a step --------------------------------------------------------------------------------------------------

    def passes(self, run: Run, micros: Sequence[MicroBatch]) -> torch.Tensor:
        """
        Go forward and backward through all micro-batches.

        Returns:
            ``[microbatches, 2]``: sum and count of the loss of each, on the last rank; zeros on the others.
        """
        if len(micros) != self.schedule.microbatches:
            what = f"{len(micros)} micro-batches, and the schedule has {self.schedule.microbatches}"
            raise UsageError(what, where=WHERE)
        self._begin(run, micros)
        sums = torch.zeros(len(micros), 2, dtype=wide_type(run.device), device=run.device)
        row = self.schedule.rows[self.rank]
        done: dict[tuple[int, bool], int] = {}
        for place, action in enumerate(row):
            for soon in row[place : place + 2]:
                self._post(soon, wait=soon is action)
            if action.kind == "F":
                told = self._forward(run, action, micros[action.micro])
                if told is not None:
                    sums[action.micro] = torch.stack(told).to(sums.dtype)
            else:
                ends = action.kind != "I"
                count = done[action.stage, ends] = done.get((action.stage, ends), 0) + 1
                self._backward(run, action, count == 1, count == len(micros))
        sums = self._to_last(sums)
        self.links.settle()
        return sums

    def _to_last(self, sums: torch.Tensor) -> torch.Tensor:
        """Have the last rank know the losses, which the rank of the last stage has."""
        source, target = self._places[-1], self.schedule.ranks - 1
        if source != target and self.rank == source:
            self.links.send([sums], target, "the losses")
            return torch.zeros_like(sums)
        if source != target and self.rank == target:
            return self.links.wait(self.links.post([(tuple(sums.shape), sums.dtype)], source), "the losses")[0]
        return sums

    def evaluate(self, run: Run, micros: Sequence[MicroBatch]) -> list[Any]:
        """
        Go forward only, without gradients.

        Returns:
            what the model returned for each micro-batch, on the rank of the last stage; None for each on the others.
        """
        self._begin(run, micros)
        last = self.schedule.stages - 1
        found: list[Any] = [None] * len(micros)
        with torch.no_grad():
            for stage in sorted(self._mine):
                for micro in micros:
                    action = Action(stage, "F", micro.place)
                    work, output = self._stage(run, action, micro, self._evaluated(action))
                    self._hand_on(action, work)
                    if stage == last:
                        found[micro.place] = output
        self.links.settle()
        return found

    def _begin(self, run: Run, micros: Sequence[MicroBatch]) -> None:
        self._at = dict.fromkeys(self._order, 0)
        self._arrived.clear()
        self._live.clear()
        self._local.clear()
        self._extra.clear()
        grads = torch.is_grad_enabled()
        self._batches = [run.here(micro.batch) for micro in micros]
        self._keys = [(grads, *map(_look, pytree.tree_leaves(batch))) for batch in self._batches]

    # ---- forward -------------------------------------------------------------------------------------------------

    def _forward(self, run: Run, action: Action, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Do a forward; return the loss's sum and count on the last stage."""
        told, taken = self._take(action)
        work, output = self._stage(run, action, micro, (told, taken), judge=True)
        self._live[action.stage, action.micro] = work
        if action.stage < self.schedule.stages - 1:
            self._hand_on(action, work)
            return None
        total, count = output
        if not total.requires_grad:
            raise UsageError("the loss does not depend on a weight that is trained", where="pdrun.Run.step")
        if not micro.weight:
            total, count = total * 0.0, count * 0.0
        work.outputs = [total]
        return total.detach().to(wide_type(run.device)), count.to(wide_type(run.device))

    def _stage(
        self, run: Run, action: Action, micro: MicroBatch, came: tuple[Record | None, list[torch.Tensor]],
        judge: bool = False,
    ) -> tuple[Work, Any]:  # fmt: skip
        """Run a stage's part of the model; return what it sends on, and on the last stage the output or its loss."""
        told, taken = came
        batch = self._batches[micro.place]
        if told is not None:
            for sent, tensor in zip(told.sent, taken, strict=True):
                tensor.requires_grad_(sent.grad)
        part, calls = self._mine.index(action.stage), told.calls if told else 0
        # what lies before this stage's part in forward may have drawn numbers for blanks
        again = partial(run.dice.throw, run.steps, micro.index, micro.rows, run.device, part=part, calls=calls)
        one = Pass(self.stages, action.stage, batch, told, taken, again if told else lambda: None)
        with run.around(micro, part, calls), deferred.splitting(self.schedule.splits and torch.is_grad_enabled()):
            output = self.stages.run(one, lambda: run.objective.output(run.model, batch))
            last = action.stage == self.schedule.stages - 1
            if last and judge:
                output = run.objective.judge(output, batch, max(len(micro.rows), 1))
        return Work(taken, told, one.outputs, None if last else one.told(run.dice.calls)), output

    def _hand_on(self, action: Action, work: Work) -> None:
        """Send what a forward made to the next stage."""
        stage, micro = action.stage, action.micro
        if work.sent is None:
            return
        place, key = self._places[stage + 1], (stage, self._keys[micro])
        known = self._known.get(key)
        if known is not None and known != work.sent and not self.dynamic:
            raise UsageError(
                f"stage {stage} ran other modules, or made other shapes, for micro-batch {micro} than for one before"
                f" of the same shapes: {_difference(known, work.sent)}", where=WHERE,
                hint="pipeline=Pipeline(dynamic=True), which announces every micro-batch",
            )  # fmt: skip
        if place == self.rank:
            self._local[Action(stage + 1, "F", micro)] = (work.sent, [x.detach() for x in work.outputs])
        else:
            label = f"stage {stage}'s output for micro-batch {micro}"
            if known is None or self.dynamic:
                self.links.send_record(work.sent, place, label)
            self.links.send(work.outputs, place, label)
        self._known[key] = work.sent

    # ---- backward ------------------------------------------------------------------------------------------------

    def _backward(self, run: Run, action: Action, first: bool, last: bool) -> None:
        work = self._live[action.stage, action.micro]
        if action.kind == "W":
            self._weights(run, action, work, first, last)
            return
        roots, grads = self._roots(action, work)
        chunk = self._mine.index(action.stage)
        if action.kind == "I" or any(self._owner[weight] != chunk for weight in self.stages.weights[action.stage]):
            self._input(run, action, work, roots, grads)
            self._hand_back(action, work)
            if action.kind == "B":
                self._weights(run, action, work, first, last)
            return
        run.engine.begin(first=first, last=last, chunk=chunk)
        extra = self._borrowed(chunk) if last else {}
        if roots or extra:
            run.backward([*roots, *extra], [*grads, *extra.values()])
        self._hand_back(action, work)
        run.engine.backward_done()
        del self._live[action.stage, action.micro]

    def _borrowed(self, chunk: int) -> dict[nn.Parameter, torch.Tensor]:
        """Return what other chunks have computed for a chunk's weights."""
        return {weight: self._extra.pop(weight) for weight in list(self._extra) if self._owner[weight] == chunk}

    def _roots(self, action: Action, work: Work) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Return where a backward begins, and the gradients there."""
        if work.sent is None:
            return work.outputs, [None]
        grads = iter(self._take(action)[1])
        pairs = [(x, next(grads)) for one, x in zip(work.sent.sent, work.outputs, strict=True) if one.grad]
        work.outputs = []
        return [x for x, _ in pairs], [grad for _, grad in pairs]

    def _input(self, run: Run, action: Action, work: Work, roots: Any, grads: Any) -> None:
        """Go backward for the input, and keep what is left to do for the weights."""
        if work.sent is None and run.scale is not None:
            roots = [root * run.scale.value for root in roots]
        inputs = [x for x in work.taken if x.requires_grad]
        weights = list(dict.fromkeys(self.stages.weights[action.stage]))
        if roots:
            with run.dice.placed():
                found, work.later = deferred.backward_input(roots, grads, inputs, weights, self.schedule.splits)
            for x, grad in zip(inputs, found, strict=True):
                x.grad = grad
        work.outputs = []

    def _weights(self, run: Run, action: Action, work: Work, first: bool, last: bool) -> None:
        chunk = self._mine.index(action.stage)
        run.engine.begin(first=first, last=last, chunk=chunk)
        grads = work.later.finish() if work.later else {}
        for weight in [weight for weight in grads if self._owner[weight] != chunk]:
            grad = grads.pop(weight)
            self._extra[weight] = self._extra[weight] + grad if weight in self._extra else grad
        for weight, grad in (self._borrowed(chunk) if last else {}).items():
            grads[weight] = grads[weight] + grad if weight in grads else grad
        if grads:  # through autograd, so that what waits for a weight's gradient is told of it
            torch.autograd.backward(list(grads), list(grads.values()))
        run.engine.backward_done()
        del self._live[action.stage, action.micro]

    def _hand_back(self, action: Action, work: Work) -> None:
        """Send the gradients of what a stage took to the stage before."""
        if action.stage == 0:
            return
        place, grads = self._places[action.stage - 1], work.gradients()
        if place == self.rank:
            kind = self._kind_before(action)
            self._local[Action(action.stage - 1, kind, action.micro)] = (None, grads)
        else:
            self.links.send(grads, place, f"stage {action.stage}'s gradients for micro-batch {action.micro}")
        for x in work.taken:
            x.grad = None

    def _kind_before(self, action: Action) -> Any:
        before = Action(action.stage - 1, "I", action.micro)
        return "I" if before in self.schedule.rows[self.rank] else "B"

    # ---- what arrives --------------------------------------------------------------------------------------------

    def _source(self, action: Action) -> Action | None:
        """Return the action of another rank whose message an action needs; None where there is none."""
        if action.kind == "W" or (action.kind == "F" and action.stage == 0):
            return None
        stage = action.stage + (-1 if action.kind == "F" else 1)
        if stage == self.schedule.stages or self._places[stage] == self.rank:
            return None
        if action.kind == "F":
            return Action(stage, "F", action.micro)
        split = Action(stage, "I", action.micro)
        return split if split in self._order[self._places[stage], self.rank] else Action(stage, "B", action.micro)

    def _post(self, action: Action, wait: bool) -> None:
        """Begin to receive what an action needs, and whatever its sender sends before; unknown forms only if we wait."""
        source = self._source(action)
        if source is None or source in self._arrived:
            return
        ends = (self._places[source.stage], self.rank)
        order = self._order[ends]
        while source not in self._arrived:
            coming = order[self._at[ends]]
            record = self._announced(coming, ends[0], wait)
            if record is None:
                return
            shapes = [(one.shape, one.dtype) for one in record.sent if one.grad or coming.kind == "F"]
            self._arrived[coming] = (record, self.links.post(shapes, ends[0]))
            self._at[ends] += 1

    def _announced(self, coming: Action, place: int, wait: bool) -> Record | None:
        """Return what a message consists of; None where that would have to be waited for."""
        stage = coming.stage if coming.kind == "F" else coming.stage - 1
        key = (stage, self._keys[coming.micro])
        if coming.kind != "F":  # as this rank has sent it
            work = self._live.get((stage, coming.micro))
            return work.sent if work is not None else None
        if (key not in self._known or self.dynamic) and not wait:
            return None
        if key not in self._known or self.dynamic:
            self._known[key] = self.links.receive_record(place, f"what stage {stage} sends for {coming.micro}")
        return self._known[key]

    def _take(self, action: Action) -> tuple[Record | None, list[torch.Tensor]]:
        """Return what an action needs from another stage."""
        if action in self._local:
            return self._local.pop(action)
        source = self._source(action)
        if source is None:
            return None, []
        record, arriving = self._arrived.pop(source)
        what = "output" if action.kind == "F" else "gradients"
        return record, self.links.wait(arriving, f"stage {source.stage}'s {what} for micro-batch {action.micro}")

    def _evaluated(self, action: Action) -> tuple[Record | None, list[torch.Tensor]]:
        """Return what a stage needs in a pass without backwards, in which all micro-batches go through a stage in turn."""
        if action in self._local:
            return self._local.pop(action)
        source = self._source(action)
        if source is None:
            return None, []
        place = self._places[source.stage]
        record = self._announced(source, place, wait=True)
        assert record is not None
        arriving = self.links.post([(one.shape, one.dtype) for one in record.sent], place)
        return record, self.links.wait(arriving, f"stage {source.stage}'s output for micro-batch {action.micro}")


def _look(leaf: Any) -> Any:
    """Return what of a leaf of a batch decides about shapes."""
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)[:99]


def _difference(known: Record, now: Record) -> str:
    """Say in what two records differ."""
    if known.door != now.door:
        return f"left before {now.door}, not {known.door}"
    if known.sent != now.sent:
        return f"sends {[list(one.shape) for one in now.sent]}, not {[list(one.shape) for one in known.sent]}"
    if [name for name, _ in known.returned] != [name for name, _ in now.returned]:
        return "the modules that ran differ"
    return "the number of dropouts differs" if known.calls != now.calls else "what modules returned differs"
