"""
Attention by heads: each rank computes some heads, in a module that reads its number of heads from
an attribute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.model.shards import Shard
from pdrun.parallel.tensor import linear, multihead
from pdrun.parallel.tensor.sequence_parallel import make_region
from pdrun.parallel.tensor.style import (
    AxisNames,
    GridPosition,
    ModuleContext,
    ModuleStyle,
    ShardRanges,
    SharedInput,
    check_forward,
    format_axes,
    identity,
    no_shard_ranges,
    style_error,
    swap_class,
)

HEAD_COUNT_NAMES = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nhead", "heads")
KV_HEAD_COUNT_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
GROUP_SIZE_NAMES = ("num_key_value_groups", "num_queries_per_kv", "n_rep")
TOTAL_WIDTH_NAMES = ("split_size", "all_head_size", "inner_dim")
"""
Attributes in which modules store their numbers of heads, queries per key, and the width of all
heads
together.
"""


@dataclass(frozen=True)
class HeadCounts:
    """The heads of an attention, in total and on this rank."""

    heads: int
    kv: int
    parts: int

    @property
    def local_heads(self) -> int:
        """Query heads of a rank."""
        return self.heads // self.parts

    @property
    def local_kv(self) -> int:
        """Key and value heads that a rank computes."""
        return max(1, self.kv // self.parts)


@dataclass(frozen=True)
class HeadsStyle(ModuleStyle):
    """See `pdrun.parallel.tensor.styles.heads`."""

    axis: AxisNames
    heads: int | str | None = None
    kv_heads: int | str | None = None
    divide: tuple[str, ...] = ()
    sequence: int | None = None
    """The dim on which the first argument is sharded, if the linear modules inside have one."""

    def __str__(self) -> str:
        return f"heads over {format_axes(self.axis)}"

    def count_heads(self, name: str, module: nn.Module, parts: int) -> HeadCounts:
        """
        Return the attention's heads.

        Raises:
            UsageError: their number is unknown, or ``parts`` ranks cannot share them.
        """
        heads = _find_head_count(name, module, self.heads, HEAD_COUNT_NAMES)
        if heads is None:
            hint = "heads(axis, heads=...): the attribute that has it, or the number"
            raise style_error(
                name, f"how many heads a {type(module).__name__} has is not known", hint
            )
        kv = _find_head_count(name, module, self.kv_heads, KV_HEAD_COUNT_NAMES) or heads
        what = f"{heads} heads" + (f" with {kv} of keys and values" if kv != heads else "")
        fits = [n for n in range(1, heads + 1) if heads % n == 0 and (kv % n == 0 or n % kv == 0)]
        if parts not in fits:
            hint = f"these fit: {', '.join(map(str, fits))}"
            raise style_error(
                name, f"{what} cannot be cut over {parts} ranks ({format_axes(self.axis)})", hint
            )
        return HeadCounts(heads, kv, parts)

    def style_inner_modules(
        self, name: str, module: nn.Module, inside: dict[str, ModuleStyle], position: GridPosition
    ) -> dict[str, ModuleStyle]:
        """
        Return the styles of the linear modules in the attention. They depend on the heads.

        Args:
            inside: the styles of the modules below this one, by their names within it.

        Raises:
            UsageError: the output of a linear module is not a number of heads.
        """
        counts = self.count_heads(name, module, position.part_count(self.axis))
        if isinstance(module, nn.MultiheadAttention) and inside:
            what = (
                f"torch's attention is cut as one, and {next(iter(inside))} has a style of its own"
            )
            raise style_error(name, what, "leave its modules out of the globs")
        rows = [
            linear.full_sizes(f"{name}.{key}", module.get_submodule(key))[0]
            for key, style in inside.items()
            if isinstance(style, linear.RowStyle)
        ]
        width = getattr(module, "head_dim", None) or (rows[0] // counts.heads if rows else None)
        found: dict[str, ModuleStyle] = {}
        for key, style in inside.items():
            if isinstance(style, linear.ColStyle):
                size = linear.full_sizes(f"{name}.{key}", module.get_submodule(key))[1]
                found[key] = _column_style(f"{name}.{key}", style, size, counts, width)
        # attentions take lengths from their input: it has to be whole before they see it
        dims = {
            style.sequence
            for style in found.values()
            if isinstance(style, (linear.ColStyle, linear.SharedColStyle))
        } - {None}
        if dims:
            found[""] = replace(self, sequence=dims.pop())
        if dims:
            raise style_error(name, "its linear modules cut the sequence along different dims")
        return found

    def shard_weights(
        self, name: str, module: nn.Module, position: GridPosition
    ) -> dict[str, Shard]:
        """
        Return the shards of torch's attention. Other attentions have no weights to shard here.
        """
        check_forward(name, module)
        self._local_attributes(
            name, module, self.count_heads(name, module, position.part_count(self.axis))
        )
        if isinstance(module, nn.MultiheadAttention):
            return multihead.shard_multihead(name, module, self.axis, position)
        return {}

    def apply_to(
        self, name: str, module: nn.Module, axis: AxisGroup, shared_input: SharedInput
    ) -> None:
        """Make the module count this rank's heads."""
        counts = self.count_heads(name, module, axis.size)
        for key, value in self._local_attributes(name, module, counts).items():
            setattr(module, key, value)
        enter = identity if self.sequence is None else shared_input
        low = axis.index * counts.local_heads
        here: ShardRanges = {
            1: (low, low + counts.local_heads, counts.heads)
        }  # of [rows, heads, queries, keys]
        place = ModuleContext(
            axis, enter, identity, no_shard_ranges if axis.size == 1 else lambda x: here
        )
        if isinstance(module, nn.MultiheadAttention):
            module._heads = (low, counts.heads)
            module._qkv_same_embed_dim = (
                False  # layers around it read this, and then leave its weights alone
            )
            swap_class(module, multihead.MultiheadParallel, place)
        else:
            make_region(module, place)

    def _local_attributes(self, name: str, module: nn.Module, counts: HeadCounts) -> dict[str, int]:
        """
        Return the attributes that depend on the number of heads, with the values of this rank.
        """
        found: dict[str, int] = {}
        given: tuple[tuple[Any, tuple[str, ...], int, int], ...] = (
            (self.heads, HEAD_COUNT_NAMES, counts.heads, counts.local_heads),
            (self.kv_heads, KV_HEAD_COUNT_NAMES, counts.kv, counts.local_kv),
            (
                None,
                GROUP_SIZE_NAMES,
                counts.heads // counts.kv,
                counts.local_heads // counts.local_kv,
            ),
        )
        for own, known, whole, local in given:
            for key in (own,) if isinstance(own, str) else known:
                if getattr(module, key, None) == whole:
                    found[key] = local
        width = getattr(module, "head_dim", None)
        for key in TOTAL_WIDTH_NAMES:
            if width and getattr(module, key, None) == counts.heads * width:
                found[key] = counts.local_heads * width
        for key in self.divide:
            value = getattr(module, key, None)
            if not isinstance(value, int) or value % counts.parts:
                raise style_error(
                    name, f"its {key}, {value!r}, cannot be divided by {counts.parts}"
                )
            found[key] = value // counts.parts
        return found


def _find_head_count(
    name: str, module: nn.Module, given: int | str | None, known: tuple[str, ...]
) -> int | None:
    """
    Return a number of heads: as given, from an attribute, or from a transformers configuration.
    """
    if isinstance(given, int):
        return given
    if isinstance(given, str):
        value = getattr(module, given, None)
        if not isinstance(value, int):
            raise style_error(name, f"its {given} is {value!r}, no number of heads")
        return value
    for source in (module, getattr(module, "config", None)):
        for key in known:
            value = getattr(source, key, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _column_style(
    name: str, style: linear.ColStyle, size: int, counts: HeadCounts, width: int | None
) -> ModuleStyle:
    """
    Return the style of a linear module with ``size`` outputs in an attention with heads of some
    width.
    """
    heads = counts.heads
    kv = counts.kv
    if width is None:
        width = size // heads
    fused = (heads + 2 * kv) * width
    if style.blocks != 1:
        if kv < counts.parts:
            raise style_error(
                name,
                f"{kv} heads of keys and values for {counts.parts} ranks need q, k and v by themselves",
            )
        uneven = [
            block for block in style.block_sizes(name, size) if block % (width * counts.parts)
        ]
        if uneven:
            raise style_error(
                name,
                f"a block of {uneven[0]} does not divide into {counts.parts} parts of heads of {width}",
            )
        return replace(style, is_input_gathered=style.sequence is not None)
    if size == fused:
        hint = "col(axis, blocks=3) where all of q comes first, then k and v; blocks=(size,) where each head has its own"
        raise style_error(name, "how q, k and v lie side by side in its output is not known", hint)
    if size == kv * width and kv < counts.parts:
        return linear.SharedColStyle(style.axis, style.sequence, kv, style.sequence is not None)
    if size % (width * counts.parts):
        raise style_error(
            name,
            f"its output of {size} does not divide into {counts.parts} parts of heads of {width}",
        )
    return replace(style, is_input_gathered=style.sequence is not None)
