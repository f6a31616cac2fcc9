"""
Randomness that does not depend on the number of ranks.

*Dropout* is placed by global row: whether an element is dropped is a hash of (seed, step, how many dropouts came
before it in the forward pass, index of its row in the global batch, place in the row). No number of ranks or
micro-batches enters. While a step runs, the functions of ``torch.nn.functional`` that drop are replaced; modules call
them, so nothing in a model changes. The rows lie along dim 0 of the tensor, possibly flattened with what follows:
``[rows * k, ...]``.

*Everything else* that draws from torch's generators inside a step (noise, stochastic depth) is seeded by (seed, step,
slice): the same on any number of ranks that work on the same slices.

A recomputed forward pass must find its own masks again. Each dropout draws one number from torch's
generator; the order in which numbers first appear counts the dropouts. A checkpoint that restores
the generator, as torch's does, draws the same numbers again, and these are looked up, whatever
other micro-batches have come in between.

Where a tensor is cut over ranks, its mask is a part of the whole tensor's: whoever cuts it says so
with `region`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional

from pdrun.parallel import torch_compat
from pdrun.parallel.layouts.sequence_order import Ranges
from pdrun.parallel.rng.dropout_functions import REPLACEMENTS
from pdrun.parallel.rng.hashing import keep_elements, keep_mask, mix_bits
from pdrun.parallel.rng.shard_region import (
    apply_sequence,
    cuts_of,
    flat_indices,
    restore_regions,
    save_regions,
)

_active: StepRNG | None = None


def current_rng() -> StepRNG | None:
    """Return the randomness of the step that is being computed; None outside of one."""
    return _active


@dataclass(eq=False)
class DropoutState:
    """The dropouts of one forward pass."""

    step: int
    rows: torch.Tensor
    """Which rows of the global batch are computed, int32."""
    call_count: int
    """How many dropouts there have been, in the forward passes of the stages before too."""


class StepRNG:
    """
    The randomness of one run.

    Args:
        seed: the run's.
        native: leave dropout to torch's generators, seeded by slice: faster, equal for equal slices
            only.
    """

    def __init__(self, seed: int, native: bool = False) -> None:
        self.seed = seed
        self.is_native = native
        self._replacements: dict[str, tuple[Any, Callable[..., Any]]] = {}
        """
        Each replaced function and what drops in its place: made once, for compiled code relies on
        its identity.
        """
        self._forwards: dict[tuple[int, int], DropoutState] = {}
        self._forward: DropoutState | None = None
        self._step = -1
        self._calls_by_number: dict[int, tuple[DropoutState, int]] = {}
        """By what was drawn from the generator: which dropout of which forward pass it is."""
        self.is_used = False
        """Whether anything has been dropped yet."""

    @property
    def dropout_calls(self) -> int:
        """
        How many dropouts the newest forward pass has had so far, those of the stages before it
        included.
        """
        return self._forward.call_count if self._forward is not None else 0

    def begin_forward(
        self,
        step: int,
        index: int,
        rows: range,
        device: torch.device,
        *,
        part: int = 0,
        calls: int = 0,
    ) -> None:
        """
        Begin the forward pass of a micro-batch: slice ``index`` of ``step``, which is these rows of
        the global batch.

        Args:
            part: tells the parts of a model apart that compute the same slice in this process.
            calls: how many dropouts the parts before this one had.
        """
        seed = mix_bits(self.seed, step, index, 1, *([part] if part else []))
        torch.default_generator.manual_seed(seed)
        if device.type != "cpu":
            getattr(torch, device.type).manual_seed(seed)
        if (
            self._step != step
        ):  # not that of `_throw`, which is another step's where a copy has just entered
            self._forwards.clear()
            self._calls_by_number.clear()
            self._step = step
        old = self._forwards.get((index, part))
        if old is not None:
            self._calls_by_number = {
                drawn: call for drawn, call in self._calls_by_number.items() if call[0] is not old
            }
        numbers = torch.arange(rows.start, rows.stop, dtype=torch.int32, device=device)
        self._forward = self._forwards[index, part] = DropoutState(step, numbers, calls)

    @contextmanager
    def isolate_generators(self, device: torch.device) -> Iterator[None]:
        """
        While this lasts, torch's generators are the run's; then they go on as if it had drawn
        nothing.

        They are seeded by slice, so that ranks differ: what a program draws between two steps
        would, too.
        """
        kit = getattr(torch, device.type) if device.type != "cpu" else None
        host = torch.default_generator.get_state()
        state = kit.get_rng_state(device) if kit is not None else None
        try:
            yield
        finally:
            torch.default_generator.set_state(host)
            if kit is not None:
                kit.set_rng_state(state, device)

    @contextmanager
    def patched_dropout(self, training: bool = True) -> Iterator[None]:
        """While this lasts, ``torch.nn.functional`` drops by global row."""
        global _active
        if _active is self:  # whoever came first leaves last
            yield
            return
        before = _active
        _active = self
        old = {name: getattr(functional, name) for name in REPLACEMENTS}
        if training and not self.is_native:
            for name, make in REPLACEMENTS.items():
                if self._replacements.get(name, (None,))[0] is not old[name]:
                    self._replacements[name] = old[name], make(self.draw_keep_mask, old[name])
                setattr(functional, name, self._replacements[name][1])
        try:
            yield
        finally:
            _active = before
            for name, function in old.items():
                setattr(functional, name, function)

    @torch_compat.untraced
    def draw_keep_mask(
        self, like: torch.Tensor, p: float, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """
        Return which elements stay, as a boolean tensor of ``shape`` (default: that of ``like``).

        Inside a `region` it is the part of the whole tensor's mask.
        """
        shape = tuple(like.shape) if shape is None else shape
        drawn = self.draw_call()
        apart, cuts = apply_sequence(shape, len(drawn[0].rows), cuts_of(shape))
        return self.compute_mask(drawn, p, apart, cuts, like.device).view(shape)

    def compute_mask(
        self,
        drawn: tuple[DropoutState, int],
        p: float,
        shape: tuple[int, ...],
        cuts: Mapping[int, tuple[Ranges, int]],
        device: torch.device,
    ) -> torch.Tensor:
        """
        Return which elements of a part stay, of the dropout that `draw` has counted.

        Args:
            shape: of the part.
            cuts: for each dim that is cut the ranges that are here and the whole size.
        """
        self.is_used = True
        throw, call = drawn
        key = mix_bits(self.seed, throw.step, call, 2)
        limit = int(p * (1 << 31))
        rows = throw.rows if throw.rows.device == device else throw.rows.to(device)
        whole = tuple(cuts[dim][1] if dim in cuts else size for dim, size in enumerate(shape))
        if torch.Size(shape).numel() == 0:
            return torch.ones(shape, dtype=torch.bool, device=device)
        if len(rows) == 0 or (whole and whole[0] % len(rows)):
            rows = torch.zeros(
                1, dtype=torch.int32, device=device
            )  # no row of the batch: the same everywhere
        if 0 in cuts:  # rows themselves are cut: each element is looked up
            flat, _ = flat_indices(shape, cuts, device)
            width = torch.Size(whole).numel() // len(rows)
            return keep_elements(
                key, rows[flat // width], (flat % width).to(torch.int32), limit
            ).view(shape)
        if not cuts:
            places = torch.arange(
                torch.Size(shape).numel() // len(rows), dtype=torch.int32, device=device
            )
        else:
            inner = (shape[0] // len(rows), *shape[1:])  # of a row
            places = flat_indices(inner, cuts, device)[0].to(torch.int32)
        return keep_mask(key, rows, places, limit).view(shape)

    def save_state(self, device: torch.device) -> Any:
        """
        Return what `enter` needs to go on here later, when another forward or backward has come in
        between.
        """
        kit = getattr(torch, device.type)
        state = kit.get_rng_state(device) if device.type != "cpu" else None
        return torch.default_generator.get_state(), state, self._forward, save_regions()

    def restore_state(self, kept: Any, device: torch.device) -> None:
        """Go on where `leave` was called."""
        host, state, self._forward, regions = kept
        restore_regions(regions)
        torch.default_generator.set_state(host)
        if state is not None:
            getattr(torch, device.type).set_rng_state(state, device)

    def draw_call(self) -> tuple[DropoutState, int]:
        """Count a dropout; return which one of which forward pass it is."""
        with (
            unset_fake_temporarily()
        ):  # memory is estimated on tensors without data; this number is needed
            drawn = int(torch.randint(1 << 62, (), device="cpu", generator=torch.default_generator))
        found = self._calls_by_number.get(drawn)
        if found is None:
            assert self._forward is not None
            found = self._calls_by_number[drawn] = self._forward, self._forward.call_count
            self._forward.call_count += 1
        return found
