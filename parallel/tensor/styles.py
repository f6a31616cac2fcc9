"""
The functions with which users create styles.

    col        linear, sharded on its output          replicated -> sharded
    row        linear, sharded on its input           sharded -> replicated
    vocab      embedding or head, by vocabulary       replicated -> replicated
    heads      attention, with col and row inside     replicated -> replicated
    seq        modules on shards of the sequence      sharded on the sequence -> the same
    replicate  anything, full on every rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdrun.errors import UsageError
from pdrun.parallel.tensor.attention import HeadsStyle
from pdrun.parallel.tensor.linear import ColStyle, RowStyle
from pdrun.parallel.tensor.sequence_parallel import ReplicateStyle, SeqStyle
from pdrun.parallel.tensor.style import STRATEGY_API, AxisNames
from pdrun.parallel.tensor.vocabulary import VocabStyle


def col(
    axis: AxisNames,
    *,
    gather: bool = False,
    sequence: int | None = None,
    blocks: int | Sequence[int] = 1,
) -> ColStyle:
    """
    Shard a linear module by columns: each rank computes a part of the output.

    Modules of one parent that are called with the same tensor (q, k and v; gate and up) share one
    collective.

    Args:
        axis: the tensor axis, or several, major first.
        gather: return the full output on every rank.
        sequence: the dim on which the input is sharded over the same axis: it is gathered first.
        blocks: the number of equal matrices side by side in the output, each of which is sharded (3
            for fused q, k and v, 2 for fused gate and up), or their sizes.

    Raises:
        UsageError: ``blocks`` is invalid, or is combined with ``gather``.
    """
    checked = _check_blocks(blocks)
    if gather and checked != 1:
        raise UsageError(
            "gather=True is not supported with blocks",
            where=f"{STRATEGY_API}, col",
            hint="remove one of them",
        )
    return ColStyle(_check_axis(axis, "col"), gather, _check_dim(sequence, "col"), checked)


def row(axis: AxisNames, *, cut: bool = False, sequence: int | None = None) -> RowStyle:
    """
    Shard a linear module by rows: each rank takes its shard of the input, and the results are
    summed.

    Args:
        axis: the tensor axis, or several, major first.
        cut: the input is full on every rank and is sliced here; default: a column-parallel module
            has left it sharded.
        sequence: the dim on which the sum is scattered over the same axis; default: every rank gets
            the full sum.
    """
    return RowStyle(_check_axis(axis, "row"), cut, _check_dim(sequence, "row"))


def vocab(axis: AxisNames, *, gather: bool = True, sequence: int | None = None) -> VocabStyle:
    """
    Shard an embedding or a head over the vocabulary.

    Args:
        axis: the tensor axis, or several, major first.
        gather: False leaves a head's logits sharded, for `pdrun.parallel.tensor.cross_entropy`.
        sequence: the dim on which an embedding's result is sharded, and a head's input is.
    """
    return VocabStyle(_check_axis(axis, "vocab"), gather, _check_dim(sequence, "vocab"))


def heads(
    axis: AxisNames,
    *,
    heads: int | str | None = None,
    kv_heads: int | str | None = None,
    divide: Sequence[str] = (),
    inputs: Mapping[str, int] | None = None,
) -> HeadsStyle:
    """
    Shard an attention by heads. Its linear modules have their styles; this one makes it count a
    rank's heads.

    Attributes of the module with a number of heads get the rank's number. The usual names are
    known, and so is the configuration of models of transformers. If there are fewer key and value
    heads than ranks, each rank has all of them.

    Args:
        axis: the tensor axis, or several, major first.
        heads: the attribute with the number of query heads, or the number.
        kv_heads: the same for keys and values; default: as many as query heads.
        divide: further attributes that the number of ranks divides, such as the width of all heads
            together.
        inputs: arguments of its forward that have an entry per head, such as a bias of the scores,
            and the dim: ``{"alibi": 0}``. The dim can be rows times heads, or 1.
    """
    found = tuple((inputs or {}).items())
    return HeadsStyle(_check_axis(axis, "heads"), heads, kv_heads, tuple(divide), found)


def seq(
    axis: AxisNames,
    *,
    dim: int = 1,
    cut: bool = False,
    gather: bool = False,
    total: int | None = None,
) -> SeqStyle:
    """
    Make a module work on shards of the sequence: norms and dropouts between row-parallel and
    column-parallel modules.

    Dropouts use the masks of the full tensor. For one between a column-parallel and a row-parallel
    module the dim is ``dim=-1``.

    Args:
        axis: the tensor axis, or several, major first.
        dim: the sharded dim of its tensors.
        cut: its first argument is full on every rank and is sliced here.
        gather: its result is gathered.
        total: size of the full dim, for a dropout on shards that differ by one; default: all have
            one size.
    """
    return SeqStyle(_check_axis(axis, "seq"), dim, cut, gather, total)


def replicate(axis: AxisNames = ()) -> ReplicateStyle:
    """
    Keep weights replicated.

    Args:
        axis: axes over which each rank uses them for another part (a norm over a head's width):
            gradients are summed. Default: all ranks use them alike.
    """
    return ReplicateStyle(_check_axis(axis, "replicate") if axis else ())


def _check_axis(axis: Any, style: str) -> AxisNames:
    names = (axis,) if isinstance(axis, str) else axis
    if (
        not isinstance(names, (tuple, list))
        or not names
        or not all(isinstance(name, str) for name in names)
    ):
        raise UsageError(
            f"axis must be the name of a tensor axis, or several, got {axis!r}",
            where=f"{STRATEGY_API}, {style}",
            hint=f'{style}("tp")',
        )
    if len(names) == 1:
        return names[0]
    return tuple(names)


def _check_dim(dim: Any, style: str) -> int | None:
    if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int)):
        raise UsageError(
            f"sequence must be a dim, got {dim!r}",
            where=f"{STRATEGY_API}, {style}",
            hint="the sharded dim: 1 for [rows, length, width]",
        )
    return dim


def _check_blocks(blocks: Any) -> int | tuple[int, ...]:
    sizes = [blocks] if isinstance(blocks, int) else list(blocks)
    if not sizes or any(
        isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes
    ):
        raise UsageError(
            f"blocks must be a count or a tuple of sizes, got {blocks!r}",
            where=f"{STRATEGY_API}, col",
            hint="blocks=3",
        )
    if isinstance(blocks, int):
        return blocks
    return tuple(sizes)
