"""
Level 3: the weights of a unit are gathered just before it computes and released when they aren't
needed.

    "pass"      a unit is there for one forward or one backward through it
    "step"      from its first forward of a step to its last backward: gathered once, however many passes there are

Weights that belong to no unit, or to several (tied), are there from the first forward of their
chunk to its last backward. A *chunk* is a part of a pipeline's stage; a model that isn't cut is
one. The order of gathers is that of `lanes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pdrun.errors import UsageError
from pdrun.parallel import torch_compat
from pdrun.parallel.comm.sharded import ShardedGroup
from pdrun.parallel.zero.gather_order import Lane, close, ready, start
from pdrun.parallel.zero.shards import Cut


class Gatherer:
    """
    Opens and closes the cuts of each unit around its computations.

    Args:
        model: the model; hooks are put on it and on the units.
        cuts: by unit, those of the model itself under the empty string.
        units: names of the units in registration order.
        keeps: whether units stay for a step.
        left_out: called in the backward pass with a unit that this rank did not run: its gradients
            are complete.
    """

    def __init__(
        self,
        model: nn.Module,
        cuts: Mapping[str, Sequence[Cut]],
        units: Sequence[str],
        comm: ShardedGroup,
        keeps: bool,
        left_out: Callable[[int], None],
    ) -> None:
        self._units = [list(cuts[name]) for name in units]
        self._comm = comm
        self._keeps = keeps
        self._lanes = _lanes(self._units, cuts.get("", []), left_out)
        self._lane_of = {index: lane for lane in self._lanes.values() for index in lane.units}
        self._phase = "idle"
        self._now: list[Lane] = []
        """
        The lanes that the pass at hand goes over: one, or all where the model is called outside of
        a step.
        """
        self._ran: dict[tuple[int, int], set[int]] = {}
        """Units that this rank has run forward, by chunk and micro-batch."""
        self._mine: set[int] = set()
        """Those of the pass at hand."""
        self._last = self._outside = False
        self.paused = False
        """Whether the hooks do nothing, since they were copied with the model."""
        self._frozen = [
            any(not w.is_trained for cut in unit for w in cut.weights) for unit in self._units
        ]
        model.register_forward_pre_hook(self._enter_model, prepend=True)
        model.register_forward_hook(self._leave_model)
        for index, name in enumerate(units):
            module = model.get_submodule(name)
            module.register_forward_pre_hook(self._entering(index), prepend=True)
            module.register_forward_hook(self._leaving(index))

    def __deepcopy__(self, memo: dict[int, Any]) -> Gatherer:
        """Return itself: a copy of a model has no units of its own."""
        return self

    # ---- passes -------------------------------------------------------------

    def begin_forward(self, chunk: int, micro: int) -> None:
        """Begin the forward pass of a micro-batch through a chunk."""
        self._outside, self._mine = False, set()
        self._ran[chunk, micro] = self._mine
        self._begin("forward", [self._lane(chunk)])

    def end_forward(self) -> None:
        """Gather what this rank has left out, and agree on the order after the first pass."""
        for lane in self._now:
            lane.rest(self._mine)
            lane.agree(self._comm)
            lane.whole = self._keeping
        self._phase = "idle"
        self._now = []

    def begin_backward(self, chunk: int, micro: int, last: bool, for_input: bool) -> None:
        """
        Begin the backward pass of a micro-batch through a chunk.

        Args:
            last: whether it is the chunk's last one of the step.
            for_input: whether no weight gets its gradient in it.
        """
        lane = self._lane(chunk)
        ran = self._ran.pop((chunk, micro), set())
        self._outside = False
        self._last = last
        self._mine = (
            set(lane.units) if for_input else ran
        )  # whose gradients don't come now aren't missed
        self._begin("backward", [lane])

    def rest(self) -> None:
        """In a backward pass, gather what this rank has left out of it."""
        if self._phase == "backward":
            for lane in self._now:
                lane.rest(self._mine)

    def end_backward(self) -> None:
        """End a backward pass; after the last one nothing of the chunk stays in memory."""
        self.rest()
        for lane in self._now:
            if self._last:
                self._close(lane)
            elif not self._keeping:
                lane.close()
        self._phase = "idle"
        self._now = []

    def release(self, unit: int) -> None:
        """Give a unit's memory back if it is not needed again: its gradients are complete."""
        if (
            self._phase == "backward"
            and not self._frozen[unit]
            and (self._last or not self._keeping)
        ):
            close(self._units[unit])

    def end(self, chunk: int | None = None) -> None:
        """Release what a chunk holds; None: everything, so that nothing stays in memory."""
        self._phase = "idle"
        self._now = []
        self._outside = False
        for index, lane in self._lanes.items():
            if chunk in (None, index):
                self._close(lane)
        if chunk is None:
            self._ran.clear()

    def _begin(self, phase: str, lanes: list[Lane]) -> None:
        self._phase = phase
        self._now = lanes
        for lane in lanes:
            lane.active = True
            start(lane.root)
            lane.begin(backward=phase == "backward", keeps=self._keeping)
        for lane in lanes:
            ready(lane.root)

    def _close(self, lane: Lane) -> None:
        lane.active = lane.whole = False
        lane.close()
        used = {id(cut) for other in self._lanes.values() if other.active for cut in other.root}
        close(cut for cut in lane.root if id(cut) not in used)

    def _lane(self, chunk: int) -> Lane:
        return self._lanes.setdefault(
            chunk, Lane({}, [], lambda unit: None)
        )  # a chunk of which nothing is cut

    @property
    def _keeping(self) -> bool:
        return self._keeps and not self._outside

    def place(self, unit: int) -> int:
        """
        Return the place of a unit in forward passes through its chunk, as far as the ranks have
        agreed on one.
        """
        return self._lane_of[unit].place(unit)

    # ---- hooks --------------------------------------------------------------

    def _enter_model(self, module: nn.Module, args: Any) -> None:
        again = self._outside and self._phase == "backward"
        if not self.paused and (again or self._phase == "idle"):  # called outside of a step
            self._outside, self._mine = True, set()
            self._begin("forward", list(self._lanes.values()))

    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._outside and not self.paused and not torch.is_grad_enabled():
            self.end_forward()
            self.end()

    def _entering(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if self.paused:
                return
            if self._phase == "backward":  # a recomputed forward
                start(self._units[index])
                ready(self._units[index])
                return
            self._mine.add(index)
            self._lane_of[index].run(index, self._mine)

        return hook

    def _leaving(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self.paused or self._phase != "forward" or self._keeping:
                return
            close(self._units[index])
            if torch.is_grad_enabled():
                _on_grad(output, lambda: self._before_backward(index))

        return hook

    def _refuse_twice(self) -> None:
        """
        Refuse a gradient that is taken in a forward pass and has one of its own: it needs all
        weights again.
        """
        what = "a gradient with create_graph=True inside of a forward pass, whose units are there for one pass each"
        hint = 'gather="step" has them there from their first forward to their last backward'
        raise UsageError(what, where="pdrun.Run.step", hint=hint)

    def _before_backward(self, index: int) -> None:
        if self._phase == "forward" and not self._outside and torch.is_grad_enabled():
            self._refuse_twice()
        if self._phase != "backward":  # of a call outside of a step
            self._begin("backward", list(self._lanes.values()))
        self._lane_of[index].run(index, self._mine)


def _lanes(
    units: Sequence[list[Cut]], root: Sequence[Cut], left_out: Callable[[int], None]
) -> dict[int, Lane]:
    """Return a lane for each chunk."""
    chunks = {chunk for cuts in [*units, root] for cut in cuts for chunk in cut.chunks}
    mine = {index: cuts[0].chunks[0] for index, cuts in enumerate(units)}
    return {
        chunk: Lane(
            {index: units[index] for index in mine if mine[index] == chunk},
            [cut for cut in root if chunk in cut.chunks],
            left_out,
        )
        for chunk in sorted(chunks)
    }


def _on_grad(values: Any, call: Callable[[], None]) -> None:
    """
    Have something called when the first gradient of what a computation has made is there.

    The gradient of a tensor that it only passed on comes later; weights, which it may pass on too,
    outlive the pass.
    """
    called = False

    def came(grad: torch.Tensor) -> None:
        nonlocal called
        if not called:
            called = True
            call()

    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and torch_compat.is_transformed(leaf):
            what = "a unit is called inside torch.func (vmap, grad), which does not tell when its backward begins"
            hint = 'gather="step" has units there from their first forward to their last backward'
            raise UsageError(what, where="pdrun.Run.step", hint=hint)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf:
            leaf.register_hook(came)
