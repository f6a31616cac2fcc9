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
    style_error,
    swap_class,
)

HEAD_COUNT_NAMES = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nhead", "heads")
KV_HEAD_COUNT_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
GROUP_SIZE_NAMES = ("num_key_value_groups", "num_queries_per_kv", "n_rep")
TOTAL_WIDTH_NAMES = ("split_size", "all_head_size", "inner_dim")
"""
Attributes in which modules store their numbers of heads, queries per key, and the width of all
heads together.
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
            raise style_error(
                name,
                f"the number of heads of a {type(module).__name__} is unknown",
                "give heads(axis, heads=...): the attribute with the number, or the number",
            )
        kv_heads = _find_head_count(name, module, self.kv_heads, KV_HEAD_COUNT_NAMES) or heads
        described = f"{heads} heads"
        if kv_heads != heads:
            described += f" with {kv_heads} of keys and values"
        fitting = [
            n
            for n in range(1, heads + 1)
            if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
        ]
        if parts not in fitting:
            raise style_error(
                name,
                f"{described} cannot be split over {parts} ranks ({format_axes(self.axis)})",
                f"these numbers of ranks fit: {', '.join(map(str, fitting))}",
            )
        return HeadCounts(heads, kv_heads, parts)

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
            raise style_error(
                name,
                f"heads shards all of torch's attention, but {next(iter(inside))} has a style, too",
                "leave its modules out of the globs",
            )
        row_widths = [
            linear.full_sizes(f"{name}.{key}", module.get_submodule(key))[0]
            for key, style in inside.items()
            if isinstance(style, linear.RowStyle)
        ]
        width = getattr(module, "head_dim", None)
        if not width and row_widths:
            width = row_widths[0] // counts.heads
        styles: dict[str, ModuleStyle] = {}
        for key, style in inside.items():
            if isinstance(style, linear.ColStyle):
                size = linear.full_sizes(f"{name}.{key}", module.get_submodule(key))[1]
                styles[key] = _column_style(f"{name}.{key}", style, size, counts, width)
        # attentions take lengths from their input, so it is gathered before their forward
        dims = {
            style.sequence
            for style in styles.values()
            if isinstance(style, (linear.ColStyle, linear.SharedColStyle))
        } - {None}
        if dims:
            styles[""] = replace(self, sequence=dims.pop())
        if dims:
            raise style_error(name, "its linear modules shard the sequence on different dims")
        return styles

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
        context = ModuleContext(axis, enter)
        if axis.size > 1:
            # dim 1 of the weights [rows, heads, queries, keys]
            shard_ranges: ShardRanges = {1: (low, low + counts.local_heads, counts.heads)}
            context = ModuleContext(axis, enter, identity, lambda x: shard_ranges)
        if isinstance(module, nn.MultiheadAttention):
            module._head_range = (low, counts.heads)
            # torch's encoder layers read this: False keeps them from using the weights directly
            module._qkv_same_embed_dim = False
            swap_class(module, multihead.MultiheadParallel, context)
        else:
            make_region(module, context)

    def _local_attributes(self, name: str, module: nn.Module, counts: HeadCounts) -> dict[str, int]:
        """
        Return the attributes that depend on the number of heads, with the values of this rank.
        """
        attributes: dict[str, int] = {}
        rows: tuple[tuple[Any, tuple[str, ...], int, int], ...] = (
            (self.heads, HEAD_COUNT_NAMES, counts.heads, counts.local_heads),
            (self.kv_heads, KV_HEAD_COUNT_NAMES, counts.kv, counts.local_kv),
            (
                None,
                GROUP_SIZE_NAMES,
                counts.heads // counts.kv,
                counts.local_heads // counts.local_kv,
            ),
        )
        for attribute, known, full, local in rows:
            if isinstance(attribute, str):
                known = (attribute,)
            for key in known:
                if getattr(module, key, None) == full:
                    attributes[key] = local
        width = getattr(module, "head_dim", None)
        for key in TOTAL_WIDTH_NAMES:
            if width and getattr(module, key, None) == counts.heads * width:
                attributes[key] = counts.local_heads * width
        for key in self.divide:
            value = getattr(module, key, None)
            if not isinstance(value, int) or value % counts.parts:
                raise style_error(
                    name, f"its {key} must be a multiple of {counts.parts}, got {value!r}"
                )
            attributes[key] = value // counts.parts
        return attributes


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
            raise style_error(name, f"its {given} must be a number of heads, got {value!r}")
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
    kv_heads = counts.kv
    if width is None:
        width = size // heads
    fused_size = (heads + 2 * kv_heads) * width
    if style.blocks != 1:
        if kv_heads < counts.parts:
            raise style_error(
                name,
                f"{kv_heads} heads of keys and values on {counts.parts} ranks are not supported"
                " with fused q, k and v",
            )
        uneven = [
            block for block in style.block_sizes(name, size) if block % (width * counts.parts)
        ]
        if uneven:
            raise style_error(
                name,
                f"a block of {uneven[0]} must be a multiple of {counts.parts} ranks times a head"
                f" width of {width}",
            )
        return replace(style, is_input_gathered=style.sequence is not None)
    if size == fused_size:
        raise style_error(
            name,
            "the order of q, k and v in its output is unknown",
            "col(axis, blocks=3) if all of q is first, then k and v; blocks=(size,) if each head"
            " has its q, k and v side by side",
        )
    if size == kv_heads * width and kv_heads < counts.parts:
        return linear.SharedColStyle(
            style.axis, style.sequence, kv_heads, style.sequence is not None
        )
    if size % (width * counts.parts):
        raise style_error(
            name,
            f"its output of {size} must be a multiple of {counts.parts} ranks times a head width"
            f" of {width}",
        )
    return replace(style, is_input_gathered=style.sequence is not None)
