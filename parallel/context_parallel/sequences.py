"""
How the sequences of a run are sharded over the ranks along cp, and the attention over them.

Rank ``r * ulysses + u`` of cp is member r of a ring and member u of an all-to-all group. The ring
shards a sequence in its order (see `sequence_order`), and each part is sharded once more over u.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.context_parallel import block_attention as block_attention
from pdrun.parallel.context_parallel.ring import ring_attention
from pdrun.parallel.context_parallel.ring_exchange import DropoutFactors
from pdrun.parallel.context_parallel.ulysses import heads_of, ulysses_attention
from pdrun.parallel.layouts.layout import shard_range
from pdrun.parallel.layouts.sequence_order import (
    CONTIGUOUS,
    ZIGZAG,
    Ranges,
    count_positions,
    positions_of,
    positions_within,
)
from pdrun.parallel.rng.shard_region import cuts_of
from pdrun.parallel.rng.step_rng import current_rng
from pdrun.parallel.torch_compat import untraced

API_NAME = "ContextParallel"
AttentionFunction = Callable[..., torch.Tensor]
"""torch's scaled_dot_product_attention."""


class ShardedSequences:
    """
    The sequences of a run.

    Args:
        axes: this rank's groups; the ranks along cp share one sequence.
        ulysses: size of an all-to-all group; the groups form a ring.
        order: "zigzag" or "contiguous"; None: zigzag with a ring.
        elsewhere: compute other attention unchanged.

    Attributes:
        length: positions of the sequences of the current step, 0 before the first.
    """

    def __init__(self, axes: MeshGroups, ulysses: int, order: str | None, elsewhere: bool) -> None:
        self.axis = axes["cp"]
        self.elsewhere = elsewhere
        degree = self.axis.size
        if degree % ulysses:
            what = f"ulysses={ulysses} does not divide the {degree} ranks along cp"
            raise UsageError(what, where=API_NAME, hint="what Ulysses leaves is the ring's")
        self.order = order or (ZIGZAG if ulysses < degree else CONTIGUOUS)
        place, member = divmod(self.axis.index, ulysses)
        ring = axes.make_subgroup(
            "cp", tuple(r * ulysses + member for r in range(degree // ulysses))
        )
        group = axes.make_subgroup("cp", tuple(place * ulysses + u for u in range(ulysses)))
        assert ring is not None and group is not None  # both hold this rank
        self.ring = ring
        self.ulysses = group
        self.part_count = degree
        """Parts of each sequence."""
        self.part_index = self.axis.index
        """The part that is computed here."""
        self.length = 0
        self.calls = 0
        self._replacement: tuple[AttentionFunction, AttentionFunction] | None = None
        self.positions_by_rank: tuple[Ranges, ...] = ()
        """Positions of each part, by index."""
        self.sizes: list[int] = []
        """Number of positions of each part."""
        self.tables: list[tuple[nn.Module, str, str]] = []
        """Modules whose attribute gives this rank's rows, and the name of the table."""

    # ---- positions ----------------------------------------------------------

    def set_length(self, length: int) -> None:
        """
        Set the length of the sequences of the step.

        Raises:
            UsageError: a rank would have no positions, or the strategy has replaced a module with a
            table.
        """
        for module, attribute, name in self.tables:
            if not isinstance(getattr(type(module), attribute, None), property):
                kind = type(module).__name__
                what = f"the table {name} is in a module that strategy= has replaced by {kind}"
                raise UsageError(what, where=API_NAME, hint="leave that module out of the strategy")
        if length == self.length:
            return
        positions = tuple(self._positions_of(length, index) for index in range(self.part_count))
        sizes = [count_positions(ranges) for ranges in positions]
        if min(sizes) == 0:
            what = f"sequences of {length} positions are too short for {self._describe_parts()}"
            raise UsageError(what, where=API_NAME, hint="fewer, or longer sequences")
        self.length = length
        self.positions_by_rank = positions
        self.sizes = sizes

    @property
    def own_positions(self) -> Ranges:
        """This rank's positions."""
        return self.positions_by_rank[self.part_index]

    @property
    def is_active(self) -> bool:
        """Whether what is computed now is a part of sequences."""
        return self.part_count > 1

    def _describe_parts(self) -> str:
        return f"{self.part_count} ranks along cp"

    def _positions_of(self, length: int, index: int) -> Ranges:
        """Return the positions of a rank along cp."""
        place, member = divmod(index, self.ulysses.size)
        ranges = positions_of(length, self.ring.size, place, self.order)
        return positions_within(
            ranges, *shard_range(count_positions(ranges), self.ulysses.size, member)
        )

    def position_ids(self, device: Any = None) -> torch.Tensor:
        """Return this rank's positions as integers, in memory order."""
        return torch.cat(
            [torch.arange(low, high, device=device) for low, high in self.own_positions]
        )

    def take_positions(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's positions of a tensor that has all of them along a dim."""
        return torch.cat([x.narrow(dim, low, high - low) for low, high in self.own_positions], dim)

    def take_part(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's positions of a tensor of the batch."""
        return self.take_positions(x, dim)

    def gather_positions(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """
        Return all positions of a tensor that has this rank's along a dim, in sequence order;
        without gradients.
        """
        sizes = self.sizes
        most = max(self.sizes)
        front = x.detach().transpose(0, dim)
        padded = torch.cat(
            [front, front.new_zeros(most - front.shape[0], *front.shape[1:])]
        ).contiguous()
        parts = self.axis.all_gather(padded, 0).unflatten(0, (self.axis.size, most))
        held = torch.cat([parts[index, :size] for index, size in enumerate(sizes)])
        order = [
            torch.arange(low, high, device=x.device)
            for ranges in self.positions_by_rank
            for low, high in ranges
        ]
        found = torch.empty_like(held)
        found[torch.cat(order)] = held
        return found.transpose(0, dim)

    def __str__(self) -> str:
        methods = []
        if self.ring.size > 1:
            methods.append(f"a ring of {self.ring.size}, {self.order}")
        if self.ulysses.size > 1:
            methods.append(f"all-to-all over {self.ulysses.size}")
        attention = " and ".join(methods) or "torch"
        return f"each sequence is sharded over {self.axis.size} ranks; attention by {attention}"

    # ---- attention ----------------------------------------------------------

    def make_replacement(self, original: AttentionFunction) -> AttentionFunction:
        """
        Return the replacement of torch's function: always the same one, which compiled code only
        calls.
        """
        if self._replacement is None or self._replacement[0] is not original:

            def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
                return self.run_attention(original, *args, **kwargs)

            self._replacement = original, untraced(attend)
        return self._replacement[1]

    def run_attention(
        self,
        original: AttentionFunction,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """
        Compute torch's scaled_dot_product_attention, whose arguments these are, on sharded
        sequences.
        """
        if not self._is_over_sequences(query.shape[-2], key.shape[-2], is_causal):
            return original(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        self.calls += 1
        return self.attend_sequences(
            original, query, key, value, attn_mask, dropout_p, is_causal, scale
        )

    def attend_sequences(
        self,
        original: AttentionFunction,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """Compute attention whose queries and keys are parts of sequences."""
        mask = None if attn_mask is None else self.localize_mask(attn_mask)
        drop = self._make_dropout(query, dropout_p) if dropout_p else None

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor | None
        ) -> torch.Tensor:
            if self.ring.size == 1 and drop is None:
                grouped = q.shape[-3] != k.shape[-3]
                return original(q, k, v, m, 0.0, is_causal, scale=scale, enable_gqa=grouped)
            return ring_attention(
                q,
                k,
                v,
                self.ring,
                length=self.length,
                order=self.order,
                causal=is_causal,
                scale=scale,
                mask=m,
                drop=drop,
            )

        if self.ulysses.size == 1:
            return attend(query, key, value, mask)
        held = count_positions(
            positions_of(
                self.length, self.ring.size, self.axis.index // self.ulysses.size, self.order
            )
        )
        return ulysses_attention(
            query, key, value, self.ulysses, length=held, mask=mask, attend=attend
        )

    def _make_dropout(self, query: torch.Tensor, p: float) -> DropoutFactors:
        """
        Return the dropout of the weights of one attention: each block is a part of the full mask.
        """
        run = current_rng()
        if run is None:
            what = "dropout of attention over cut sequences is that of a run"
            raise UsageError(what, where=API_NAME, hint="pdrun.parallelize(..., context=...)")
        drawn = run.draw_call()
        here = query.shape[-3]
        # of the heads here, which may be some of the model's (tensor parallel), an all-to-all
        # leaves this rank a part
        shape = (*query.shape[:-1], query.shape[-2])
        ranges, heads = cuts_of(shape).get(len(shape) - 3, (((0, here),), here))
        low, high = heads_of(self.ulysses, here)
        outer = (*query.shape[:-3], high - low)

        def drop(queries: Ranges, keys: Ranges) -> torch.Tensor:
            dims = (
                (positions_within(ranges, low, high), heads),
                (queries, self.length),
                (keys, self.length),
            )
            cuts = {len(outer) - 1 + place: cut for place, cut in enumerate(dims)}
            keep = run.compute_mask(
                drawn,
                p,
                (*outer, count_positions(queries), count_positions(keys)),
                cuts,
                query.device,
            )
            return keep.to(block_attention.accumulate_dtype(query.dtype)).mul_(
                0.0 if p >= 1 else 1 / (1 - p)
            )

        return drop

    def _is_over_sequences(self, queries: int, keys: int, causal: bool) -> bool:
        """
        Return whether an attention is over the sharded sequences, by its sizes; the same on all
        ranks.
        """
        mine = count_positions(self.own_positions)
        sizes = set(self.sizes)
        if queries == keys == mine:
            return True
        if (
            self.elsewhere
            and keys not in sizes
            and (queries not in sizes or (queries == mine and not causal))
        ):
            return False
        what = (
            f"attention of {queries} queries over {keys} keys, where this rank has {mine} positions"
            f" of {self.length}"
        )
        hint = (
            "elsewhere=True computes other attention unchanged; run.verify() shows whether that is"
            " right"
        )
        raise UsageError(what, where=API_NAME, hint=hint)

    def localize_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """
        Return a mask of a model with this rank's rows, or one for all, and all columns.

        Raises:
            UsageError: its meaning for the full sequence is not clear.
        """
        mask = mask if mask.dim() > 1 else mask[None]
        rows = mask.shape[-2]
        columns = mask.shape[-1]
        mine = count_positions(self.own_positions)
        if columns == self.length and rows in (1, mine):
            return mask
        if columns == self.length and rows == self.length:
            return self.take_positions(mask, mask.dim() - 2)
        if columns == mine and rows == 1 and not mask.requires_grad:
            return self.gather_positions(mask, mask.dim() - 1)
        what = (
            f"a mask of {rows} rows and {columns} columns, where this rank has {mine} positions of"
            f" {self.length}"
        )
        hint = (
            "use is_causal=True, a mask of the full sequence or of this rank's rows, or one row for"
            " this rank's keys"
        )
        raise UsageError(what, where=API_NAME, hint=hint)
