"""
Random numbers of a training step that are the same for any number of ranks.

*Dropout* depends on the global row. Whether an element is dropped is a hash of (seed, step, number
of the dropout in the forward pass, row in the global batch, position in the row). The number of
ranks or micro-batches does not enter. While a step runs, the dropout functions of
``torch.nn.functional`` are replaced; modules call them, so the model is not changed. The rows are
dim 0 of the tensor, possibly flattened with following dims: ``[rows * k, ...]``.

*Other random numbers* of a step (noise, stochastic depth) come from torch's generators, seeded by
(seed, step, slice). They are the same for any number of ranks that work on the same slices.

A recomputed forward pass must find its masks again. Each dropout draws one number from torch's
generator; the order in which numbers first appear counts the dropouts. A checkpoint that restores
the generator, as torch's does, draws the same numbers again, and the masks are looked up, even if
other micro-batches ran in between.

The code that shards a tensor over ranks declares the shard with `shard_region`; its mask is then a
part of the full tensor's mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
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

NO_CONTEXT = nullcontext()
_active: StepRNG | None = None


def current_rng() -> StepRNG | None:
    """Return the random numbers of the step that is computed; None outside of one."""
    return _active


@dataclass(eq=False)
class DropoutState:
    """The dropouts of one forward pass."""

    step: int
    row_range: range
    """Which rows of the global batch are computed."""
    device: torch.device
    call_count: int
    """How many dropouts there have been, in the forward passes of the stages before too."""

    @cached_property
    def rows(self) -> torch.Tensor:
        """The numbers of the rows, int32; many models drop nothing."""
        rows = self.row_range
        return torch.arange(rows.start, rows.stop, dtype=torch.int32, device=self.device)


class StepRNG:
    """
    The random numbers of one run.

    Args:
        seed: of the run.
        native: use torch's generators for dropout, seeded by slice. This is faster, and the same
            for equal slices only.
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
        """By the number drawn from the generator: the dropout and its forward pass."""
        self.is_used = False
        """Whether anything has been dropped yet."""

    @property
    def row_count(self) -> int:
        """Number of rows of the newest forward pass; 0 if it is not part of the step."""
        return len(self._forward.row_range) if self._forward is not None else 0

    @property
    def dropout_calls(self) -> int:
        """
        Number of dropouts in the newest forward pass so far, including those of earlier stages.
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
        Start the forward pass of a micro-batch: slice ``index`` of ``step``, with these global
        rows.

        Args:
            part: number of the part of a model, if several compute the same slice in this process.
            calls: number of dropouts in the parts before this one.
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
        self._forward = self._forwards[index, part] = DropoutState(step, rows, device, calls)

    @contextmanager
    def isolate_generators(self, device: torch.device) -> Iterator[None]:
        """
        Inside, torch's generators are the run's; afterwards they continue as if it had drawn
        nothing.

        They are seeded by slice and differ between ranks: numbers that a program draws between two
        steps would differ, too.
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

    def patched_dropout(self, training: bool = True) -> AbstractContextManager[None]:
        """Inside, ``torch.nn.functional`` drops by global row; the outermost context ends it."""
        return NO_CONTEXT if _active is self else self._replace_functions(training)

    @contextmanager
    def _replace_functions(self, training: bool) -> Iterator[None]:
        global _active
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

        Inside a `shard_region` it is a part of the full tensor's mask.
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
        Return which elements of a shard stay, for the dropout that `draw_call` has counted.

        Args:
            shape: of the shard.
            cuts: for each sharded dim the ranges of the shard and the full size.
        """
        self.is_used = True
        forward, call = drawn
        key = mix_bits(self.seed, forward.step, call, 2)
        limit = int(p * (1 << 31))
        rows = forward.rows.to(device)
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
        Return the state for `restore_state`, to continue here after another forward or backward.
        """
        kit = getattr(torch, device.type)
        state = kit.get_rng_state(device) if device.type != "cpu" else None
        return torch.default_generator.get_state(), state, self._forward, save_regions()

    def restore_state(self, kept: Any, device: torch.device) -> None:
        """Continue where `save_state` was called."""
        host, state, self._forward, regions = kept
        restore_regions(regions)
        torch.default_generator.set_state(host)
        if state is not None:
            getattr(torch, device.type).set_rng_state(state, device)

    def draw_call(self) -> tuple[DropoutState, int]:
        """Count a dropout; return its number and forward pass."""
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
