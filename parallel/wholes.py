"""Weights and gradients of an engine as wholes, and the ranges of them that this rank has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pdrun.parallel.weights import Weight

if TYPE_CHECKING:
    from pdrun.parallel.engine import Engine


@dataclass(frozen=True)
class Held:
    """A range of a weight that this rank trains, or keeps where it isn't trained."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    part: torch.Tensor
    trained: bool
    owner: int | None
    """The only rank that saves it, or None: one rank of those that hold it, by its index."""
    index: int

    def saved_by(self, world: int, rank: int) -> bool:
        """Whether a rank is the one that saves it."""
        return rank == (self.index % world if self.owner is None else self.owner)


def held(engine: Engine) -> Iterator[Held]:
    """Yield every range of a weight that is on this rank."""
    cut_names = set()
    for cut in engine.cuts:
        cut_names |= {weight.name for weight in cut.weights}
        owner = cut.comm.rank % cut.comm.shards  # the first copy
        for segment, part in zip(cut.segments, cut.parts, strict=True):
            weight = cut.weights[segment.slot]
            yield Held(
                weight.name, weight.shape, segment.start, segment.stop, part, weight.trained, owner, weight.index
            )
    for weight in engine.weights:
        if weight.name not in cut_names:
            part = engine.masters.get(weight.index, weight.param)
            name = f"{weight.name}@{engine.whole.rank}" if weight.alone else weight.name
            only = engine.whole.rank if weight.alone else None
            yield Held(name, weight.shape, 0, weight.numel, part, weight.trained, only, weight.index)


def full_weights(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each weight's name and whole value in the optimizer's type; every rank must read all of them."""
    cut_names = set()
    for cut in engine.cuts:
        full = torch.empty(cut.layout.numel, dtype=cut.master.dtype, device=cut.comm.device)
        cut.comm.gather(full, cut.master.detach().to(full.device), cut.label).wait()
        for slot in cut.layout.slots:
            cut_names.add(slot.name)
            yield slot.name, full[slot.start : slot.stop].view(slot.shape)
    for weight in engine.weights:
        if weight.name not in cut_names:
            yield weight.name, engine.masters.get(weight.index, weight.param).detach().to(engine.whole.device)


def in_order(engine: Engine) -> list[Weight]:
    """Return the weights in the order of `full_weights`."""
    cut = [weight for part in engine.cuts for weight in part.weights]
    return cut + [weight for weight in engine.weights if weight not in set(cut)]


def gradients(engine: Engine) -> Iterator[tuple[str, torch.Tensor | None]]:
    """
    Yield each weight's name and whole gradient, between `finish` and `step`; every rank must read all of
    them.
    """
    for index, part in enumerate(engine.bundles):
        total = part.finish()
        if index in engine.cut_of:
            full = total.new_empty(part.layout.numel)
            total = part.comm.gather(full, total, "the gradients").wait()
        for slot, used in zip(part.layout.slots, part.used, strict=True):
            yield slot.name, total[slot.start : slot.stop].view(slot.shape) if used else None
    for weight in engine.alone:
        grad = engine.masters.get(weight.index, weight.param).grad
        yield weight.name, grad


def storages(engine: Engine) -> set[int]:
    """Return the identities of the storages in which the model's weights lie."""
    cuts = {cut.full.untyped_storage()._cdata for cut in engine.cuts}
    return cuts | {weight.param.untyped_storage()._cdata for weight in engine.weights}
