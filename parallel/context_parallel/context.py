"""
Context parallel: ``parallelize(..., mesh=pdrun.mesh(cp=4), context=pdrun.ContextParallel())``.

Each rank along cp computes its part of every sequence. Computation per position needs no change.
Attention must see the full sequence: while the run computes,
``torch.nn.functional.scaled_dot_product_attention`` is a ring, an all-to-all, or both.

Code that depends on positions needs one of these:

    tables={"wpe.weight": 0, "*.rope.cos": 0}   tables whose first rows a model takes: table[:t]
    {"tokens": ..., "position_ids": ...}        position ids in the batch, sharded like the tokens
    pdrun.positions(t)                          in a model's code; arange(t) in one process
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional

from pdrun.errors import UsageError
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.context_parallel.library_models import (
    full_masks,
    hook_positions,
    use_torch_attention,
)
from pdrun.parallel.context_parallel.mixers import check_mixers
from pdrun.parallel.context_parallel.sequences import API_NAME, ShardedSequences
from pdrun.parallel.context_parallel.slices import SlicedSequences, check_sliceable
from pdrun.parallel.data.batch_structure import flatten_columns
from pdrun.parallel.layouts.sequence_order import ORDERS, count_positions
from pdrun.parallel.rng.shard_region import sharded_sequence

_current: ShardedSequences | None = None
"""The sequences of the forward or backward that is computed now."""


@dataclass(frozen=True)
class ContextParallel:
    """
    How sequences are sharded over the axis cp.

    Attributes:
        ulysses: number of ranks that exchange heads for positions (all-to-all); it divides the
            heads. The other factor, cp / ulysses, is a ring that passes keys and values on. 1: a
            ring only; -1: all-to-all only.
        order: "zigzag" or "contiguous". None: zigzag with a ring, so that all ranks have the same
            work under a causal mask.
        dims: the sequence dim of each tensor of a batch: by key for a dict, in order otherwise,
            None for a tensor that is not sharded. Default: dim 1 of the first tensor that has one,
            and of all tensors with the same size there.
        tables: globs of buffers and weights with a row per position, and the dim of their rows. A
            model that takes the first rows gets those of this rank's positions.
        elsewhere: compute attention with other sizes than those of the sequences unchanged, on each
            rank, and convolutions and recurrent layers; without it these are refused.
    """

    ulysses: int = 1
    order: str | None = None
    dims: Any = None
    tables: Mapping[str, int] = field(default_factory=dict)
    elsewhere: bool = False
    _bound: WeakKeyDictionary[MeshGroups, ShardedSequences] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )
    _slices: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        whole = isinstance(self.ulysses, int) and not isinstance(self.ulysses, bool)
        if not whole or (self.ulysses != -1 and self.ulysses < 1):
            raise UsageError(
                f"ulysses={self.ulysses!r} is neither -1 nor at least 1", where=API_NAME
            )
        if self.order not in (None, *ORDERS):
            raise UsageError(f"order={self.order!r}", where=API_NAME, hint=" or ".join(ORDERS))
        if not isinstance(self.tables, Mapping):
            what = f"tables={self.tables!r} is no dict"
            raise UsageError(what, where=API_NAME, hint='{"places.weight": 0}: the dim of the rows')

    def sliced(self, count: int) -> ContextParallel:
        """
        Return the same for sequences that pass a pipeline in slices, one after the other.

        Raises:
            UsageError: ``count`` is below 1.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            what = f"slices must be an integer of at least 1, got {count!r}"
            raise UsageError(what, where="pdrun.Pipeline")
        found = replace(self)
        object.__setattr__(found, "_slices", count)
        return found

    def slice_batch(self, batch: Any, axes: MeshGroups) -> list[Any]:
        """Return the slices of a batch, first positions first."""
        sequences = self.sequences(axes)
        assert isinstance(sequences, SlicedSequences)
        found = []
        for index in range(sequences.part_count):
            sequences.part_index = index
            found.append(self._cut_batch(batch, sequences))
        return found

    def sequences(self, axes: MeshGroups) -> ShardedSequences:
        """Return how sequences are sharded over the ranks of a run."""
        if axes not in self._bound and self._slices > 1:
            self._bound[axes] = SlicedSequences(axes, self._slices, self.elsewhere)
        if axes not in self._bound:
            ulysses = axes["cp"].size if self.ulysses == -1 else self.ulysses
            self._bound[axes] = ShardedSequences(axes, ulysses, self.order, self.elsewhere)
        return self._bound[axes]

    def apply(self, model: nn.Module, axes: MeshGroups, sample: Any = None) -> nn.Module:
        """
        Return the model; its tables give this rank's rows while a run computes.

        Raises:
            UsageError: a glob that matches nothing, a degree that does not divide, or a module
                that mixes positions without attention.
        """
        sequences = self.sequences(axes)
        if sequences.part_count > 1:
            if not self.elsewhere:
                check_mixers(model)
            if self._slices > 1:
                check_sliceable(model)
            use_torch_attention(model)
            hook_positions(model, lambda: _current, bool(self.tables))
        for pattern, dim in self.tables.items():
            found = [name for name, _ in _named_tensors(model) if fnmatchcase(name, pattern)]
            if not found:
                raise UsageError(
                    f"tables: {pattern!r} matches no weight and no buffer", where=API_NAME
                )
            for name in found:
                owner, _, attribute = name.rpartition(".")
                module = model.get_submodule(owner)
                shape = list(getattr(module, attribute).shape)
                if not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
                    what = f"tables: the rows of {name}, {shape}, are not along dim {dim!r}"
                    raise UsageError(what, where=API_NAME, hint=f"0 to {len(shape) - 1}")
                _make_table(module, attribute, dim, name)
                sequences.tables.append((module, attribute, name))
        return model

    def part(self, batch: Any, axes: MeshGroups) -> Any:
        """
        Return this rank's part of the sequences of a batch; tensors without positions are not
        changed.

        Raises:
            UsageError: the batch has no sequence, or sequences of different lengths.
        """
        sequences = self.sequences(axes)
        return batch if sequences.axis.size == 1 else self._cut_batch(batch, sequences)

    def _cut_batch(self, batch: Any, sequences: ShardedSequences) -> Any:
        leaves, rebuild = flatten_columns(batch)
        dims = _sequence_dims(batch, leaves, self.dims)
        lengths = {
            leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if dim is not None
        }
        if len(lengths) != 1:
            what = f"lengths {sorted(lengths)}" if lengths else "no tensor has a dim 1"
            raise UsageError(
                f"the batch has no sequence to cut: {what}",
                where=API_NAME,
                hint="set dims= to the sequence dim of each tensor",
            )
        sequences.set_length(lengths.pop())
        pairs = zip(leaves, dims, strict=True)
        cut = [leaf if dim is None else sequences.take_part(leaf, dim) for leaf, dim in pairs]
        return rebuild(cut)

    def join(self, x: torch.Tensor, axes: MeshGroups) -> torch.Tensor:
        """
        Return an output ``[rows, positions, ...]`` with all positions, on every rank along cp.

        Raises:
            UsageError: its dim 1 is not this rank's positions.
        """
        sequences = self.sequences(axes)
        mine = count_positions(sequences.own_positions)
        if x.dim() < 2 or x.shape[1] != mine:
            what = f"an output of shape {tuple(x.shape)} has no dim 1 of {mine} positions: each "
            what += "rank along cp has computed it from its part of the sequence"
            raise UsageError(what, where=API_NAME, hint="return outputs [rows, positions, ...]")
        return sequences.gather_positions(x, 1)

    def describe(self, axes: MeshGroups) -> str:
        """Return a description of how a run shards sequences."""
        return str(self.sequences(axes))

    @contextmanager
    def patched_attention(self, axes: MeshGroups) -> Iterator[None]:
        """Inside, attention is over full sequences and tables give this rank's rows."""
        global _current
        sequences = self.sequences(axes)
        before = _current
        if before is sequences or not sequences.is_active:
            yield
            return
        attention = functional.scaled_dot_product_attention
        heads = functional.multi_head_attention_forward
        _current = sequences
        functional.scaled_dot_product_attention = sequences.make_replacement(attention)
        functional.multi_head_attention_forward = _refuse_weights(heads)
        try:
            with (
                sharded_sequence(lambda: (sequences.own_positions, sequences.length)),
                full_masks(sequences),
            ):
                yield
        finally:
            _current = before
            functional.scaled_dot_product_attention = attention
            functional.multi_head_attention_forward = heads
        if not sequences.calls and axes["pp"].size == 1:
            what = (
                "the model did not call torch.nn.functional.scaled_dot_product_attention on its"
                " sequences"
            )
            raise UsageError(
                what,
                where=API_NAME,
                hint="attention that is written out would see this rank's positions only; call"
                ' model.set_attn_implementation("sdpa") if the model has it',
            )


def positions(count_here: int, device: Any = None) -> torch.Tensor:
    """
    Return the positions of ``count_here`` tokens on this rank; 0 to n - 1 in one process.

    Raises:
        UsageError: sequences are sharded, and this rank has another number of positions.
    """
    if _current is None:
        return torch.arange(count_here, device=device)
    mine = count_positions(_current.own_positions)
    if count_here != mine:
        what = f"positions of {count_here} tokens, where this rank has {mine} of {_current.length}"
        raise UsageError(
            what, where="pdrun.positions", hint="positions(x.shape[1]), of a tensor of the sequence"
        )
    return _current.position_ids(device)


# ---- batches ----------------------------------------------------------------


def _sequence_dims(batch: Any, leaves: list[Any], given: Any) -> list[int | None]:
    """Return the sequence dim of each leaf of a batch."""
    if isinstance(given, Mapping):
        if not isinstance(batch, Mapping) or set(given) - set(batch):
            unknown = ", ".join(
                map(str, set(given) - set(batch if isinstance(batch, Mapping) else ()))
            )
            raise UsageError(f"dims= names what the batch lacks: {unknown}", where=API_NAME)
        return [given.get(key) for key, value in batch.items() for _ in flatten_columns(value)[0]]
    if given is not None:
        if not isinstance(given, Sequence) or len(given) != len(leaves):
            raise UsageError(f"dims={given!r} for a batch of {len(leaves)} leaves", where=API_NAME)
        return list(given)
    sizes = [
        leaf.shape[1] if isinstance(leaf, torch.Tensor) and leaf.dim() > 1 else None
        for leaf in leaves
    ]
    length = next((size for size in sizes if size is not None), None)
    return [1 if size is not None and size == length else None for size in sizes]


# ---- tables -----------------------------------------------------------------


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _make_table(module: nn.Module, attribute: str, dim: int, name: str) -> None:
    """
    Have an attribute of a module give this rank's rows while a run computes; the module keeps the
    full table.
    """

    def rows(self: nn.Module) -> torch.Tensor:
        held: Any = self._parameters.get(attribute)
        held = self._buffers[attribute] if held is None else held
        if _current is None:
            return held
        if held.shape[dim] < _current.length:
            what = (
                f"the table {name} has {held.shape[dim]} rows along dim {dim}, and sequences have"
                f" {_current.length} positions"
            )
            raise UsageError(what, where=API_NAME)
        return _current.take_positions(held, dim)

    kind = type(module)
    module.__class__ = type(
        kind.__name__, (kind,), {attribute: property(rows), "__module__": kind.__module__}
    )


@functools.cache  # compiled code relies on the identity of the function
def _refuse_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse attention weights of `nn.MultiheadAttention`, which no rank has in full."""

    def forward(*args: Any, need_weights: bool = True, **kwargs: Any) -> Any:
        if need_weights:
            what = "MultiheadAttention returns weights, which no rank has whole"
            raise UsageError(what, where=API_NAME, hint="need_weights=False")
        return original(*args, need_weights=False, **kwargs)

    return forward
