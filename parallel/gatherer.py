"""
Level 3: the weights of a unit are gathered just before it computes and released just after, forward and backward.

Every rank must start the same gathers in the same order, whatever its data make it compute. So there is one sequence,
the order in which rank 0 first ran the units, and a pass over it forward and one backward. A unit that a rank leaves
out is gathered and released all the same when a later one comes, or at the end. While a unit computes, the next one is
on its way.

Weights that belong to no unit, or to several (tied), are there from the start of the forward to the end of the
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pdrun.parallel.comm import Comm
from pdrun.parallel.cuts import Cut


class Gatherer:
    """
    Opens and closes the cuts of each unit around its computations.

    Args:
        model: the model; hooks are put on it and on the units.
        cuts: by unit, those of the model itself under the empty string.
        units: names of the units in registration order.
        left_out: called in the backward pass with a unit that this rank did not run: its gradients are complete.
    """

    def __init__(
        self,
        model: nn.Module,
        cuts: Mapping[str, Sequence[Cut]],
        units: Sequence[str],
        comm: Comm,
        left_out: Callable[[int], None],
    ) -> None:
        self._left_out = left_out
        self._ran: set[int] = set()
        """Units that this rank has run in this forward pass."""
        self._root = list(cuts.get("", []))
        self._units = [list(cuts[name]) for name in units]
        self._comm = comm
        self._seen: list[int] | None = []
        """Units in the order of their first run, until the ranks have agreed on one; then None."""
        self._order = list(range(len(units)))
        self._place = list(range(len(units)))
        self._next = 0
        self._phase = "idle"
        self.paused = False
        """Whether the hooks do nothing, since they were copied with the model."""
        self._frozen = [any(not w.trained for cut in unit for w in cut.weights) for unit in self._units]
        model.register_forward_pre_hook(self._enter_model, prepend=True)
        model.register_forward_hook(self._leave_model)
        for index, name in enumerate(units):
            module = model.get_submodule(name)
            module.register_forward_pre_hook(self._entering(index), prepend=True)
            module.register_forward_hook(self._leaving(index))

    def __deepcopy__(self, memo: dict[int, Any]) -> Gatherer:
        """Return itself: a copy of a model has no units of its own."""
        return self

    # ---- passes --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a forward pass."""
        for unit in self._units:
            _close(unit)
        self._phase, self._next = "forward", 0
        self._ran.clear()
        _start(self._root)
        self._prefetch()
        _ready(self._root)

    def end_forward(self) -> None:
        """Gather what this rank has left out, and agree on the order after the first pass."""
        self._skip_to(len(self._units))
        if self._seen is not None and self._phase == "forward":
            self._agree()
        self._phase, self._next = "between", 0

    def end_backward(self) -> None:
        """Gather what this rank has left out of the backward pass, and release everything."""
        if self._phase != "backward":
            self._phase, self._next = "backward", 0
        self._skip_to(len(self._units))
        self.end()

    def end(self) -> None:
        """Release everything: nothing stays in memory."""
        self._phase = "idle"
        for unit in [*self._units, self._root]:
            _close(unit)

    def release(self, unit: int) -> None:
        """Give a unit's memory back: its gradients are complete."""
        if self._phase == "backward" and not self._frozen[unit]:
            _close(self._units[unit])

    def _agree(self) -> None:
        """
        Take over the order in which rank 0 ran the units; one that it left out follows the unit registered before
        it.
        """
        assert self._seen is not None
        order = list(self._seen)
        for index in range(len(self._units)):
            if index not in order:
                order.insert(order.index(index - 1) + 1 if index else 0, index)
        told = torch.tensor(order, dtype=torch.int64, device=self._comm.device)
        if order:
            self._comm.from_first(told, "the order of the units")
        self._order = told.tolist()
        self._place = [0] * len(order)
        for place, index in enumerate(self._order):
            self._place[index] = place
        self._seen = None

    # ---- the sequence --------------------------------------------------------------------------------------------

    def _at(self, place: int) -> int:
        """Return the unit at a place of the pass; backward passes count from the end."""
        return self._order[place] if self._phase == "forward" else self._order[-1 - place]

    @property
    def places(self) -> list[int]:
        """The place of each unit in the forward pass, as far as the ranks have agreed on one."""
        return self._place

    def _skip_to(self, place: int) -> None:
        while self._next < place:
            index = self._at(self._next)
            _start(self._units[index])
            _close(self._units[index])
            self._next += 1
            if self._phase == "backward" and index not in self._ran:
                self._left_out(index)  # before this rank waits for anything that the others do only after it

    def _prefetch(self) -> None:
        if self._next < len(self._units):
            _start(self._units[self._at(self._next)])

    def _open(self, index: int) -> None:
        """Have a unit's weights there, keeping to the sequence."""
        place = self._place[index] if self._phase == "forward" else len(self._units) - 1 - self._place[index]
        if place >= self._next:
            self._skip_to(place)
            _start(self._units[index])
            self._next = place + 1
            self._prefetch()
        _start(self._units[index])
        _ready(self._units[index])

    # ---- hooks ---------------------------------------------------------------------------------------------------

    def _enter_model(self, module: nn.Module, args: Any) -> None:
        if not self.paused and self._phase in ("idle", "between"):  # called outside of a step
            self.begin()
            self._phase = "forward"

    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._phase == "forward" and not self.paused and not torch.is_grad_enabled():
            self.end_forward()
            self.end()

    def _entering(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            if self.paused:
                return
            if self._phase == "backward":  # a recomputed forward
                _start(self._units[index])
                _ready(self._units[index])
                return
            if self._seen is not None and index not in self._seen:
                self._seen.append(index)
            self._ran.add(index)
            self._open(index)
            if self._frozen[index]:
                _on_grad(args, lambda: self._close_if_backward(index))

        return hook

    def _leaving(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self.paused or self._phase != "forward":
                return
            _close(self._units[index])
            if torch.is_grad_enabled():
                _on_grad(output, lambda: self._before_backward(index))

        return hook

    def _before_backward(self, index: int) -> None:
        if self._phase != "backward":
            self._phase, self._next = "backward", 0
        self._open(index)

    def _close_if_backward(self, index: int) -> None:
        if self._phase == "backward":
            _close(self._units[index])


def _start(unit: Sequence[Cut]) -> None:
    for cut in unit:
        cut.start()


def _ready(unit: Sequence[Cut]) -> None:
    for cut in unit:
        cut.ready()


def _close(unit: Sequence[Cut]) -> None:
    for cut in unit:
        cut.close()


def _on_grad(values: Any, call: Callable[[], None]) -> None:
    """Have something called when the gradient of any tensor in a structure is there."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(lambda grad: call())
