"""
Attention by heads: each rank computes some heads, in a module that reads its number of heads from
an attribute.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.model.shards import Shard
from pdrun.parallel.tensor import linear, multihead
from pdrun.parallel.tensor.head_counts import (
    HEAD_COUNT_NAMES,
    KV_HEAD_COUNT_NAMES,
    HeadCounts,
    find_head_count,
    find_head_width,
    local_attributes,
)
from pdrun.parallel.tensor.sequence_parallel import ReplicateStyle, SequenceRegion, first_parameter
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

RESHAPE_ERRORS = ("is invalid for input of size", "shape mismatch", "must match the size of tensor")
"""Parts of torch's errors about a view of other sizes than a tensor has."""


class HeadsRegion(SequenceRegion):
    """An attention that computes this rank's heads."""

    _head_inputs: Mapping[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]]
    """For arguments by head: their position and what takes this rank's part."""
    _site_name: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the attention with this rank's part of the arguments that are by head."""
        for key, (place, take_part) in self._head_inputs.items():
            if isinstance(kwargs.get(key), torch.Tensor):
                kwargs[key] = take_part(kwargs[key])
            elif place < len(args) and isinstance(args[place], torch.Tensor):
                args = (*args[:place], take_part(args[place]), *args[place + 1 :])
        try:
            return super().forward(*args, **kwargs)
        except RuntimeError as error:
            if not any(text in str(error) for text in RESHAPE_ERRORS):
                raise
            raise style_error(
                self._site_name,
                f"its forward does not compute with {self._context.axis.size} times fewer heads:"
                f" {error}",
                "reshape with the module's number of heads and the width of a head, and back with"
                " -1 or flatten; name other attributes that depend on the heads in"
                " heads(axis, divide=...), arguments in inputs=; or leave the module unsharded",
            ) from error


@dataclass(frozen=True)
class HeadsStyle(ModuleStyle):
    """See `pdrun.parallel.tensor.styles.heads`."""

    axis: AxisNames
    heads: int | str | None = None
    kv_heads: int | str | None = None
    divide: tuple[str, ...] = ()
    inputs: tuple[tuple[str, int], ...] = ()
    """Arguments of forward by head, and the dim of each that counts heads."""
    sequence: int | None = None
    """The dim on which the first argument is sharded, if the linear modules inside have one."""
    is_entrance: bool = False
    """Whether the first argument is brought in here, not by the linear modules inside."""
    width: int | None = None
    """Of a head, if the linear modules inside show it."""

    def __str__(self) -> str:
        return f"heads over {format_axes(self.axis)}"

    def count_heads(self, name: str, module: nn.Module, parts: int) -> HeadCounts:
        """
        Return the attention's heads.

        Raises:
            UsageError: their number is unknown, or ``parts`` ranks cannot share them.
        """
        heads = find_head_count(name, module, self.heads, HEAD_COUNT_NAMES)
        if heads is None:
            raise style_error(
                name,
                f"the number of heads of a {type(module).__name__} is unknown",
                "give heads(axis, heads=...): the attribute with the number, or the number",
            )
        kv_heads = find_head_count(name, module, self.kv_heads, KV_HEAD_COUNT_NAMES) or heads
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
        width = find_head_width(module)
        if not width and row_widths:
            width = row_widths[0] // counts.heads
        # what linear modules on every rank compute, each rank uses for its heads: gradients are
        # partial from the attention's input on
        is_entrance = any(
            isinstance(style, ReplicateStyle)
            and style.axis
            and isinstance(_module_at(module, key), nn.Linear)
            for key, style in inside.items()
        )
        styles: dict[str, ModuleStyle] = {}
        for key, style in inside.items():
            if isinstance(style, linear.ColStyle):
                inner = _module_at(module, key)
                if not linear.is_linear(inner):
                    _check_by_head(f"{name}.{key}", module, key, counts)
                    continue
                size = linear.full_sizes(f"{name}.{key}", module.get_submodule(key))[1]
                styles[key] = _column_style(
                    f"{name}.{key}", style, size, counts, width, is_entrance
                )
        # attentions take lengths from their input, so it is gathered before their forward
        dims = {
            style.sequence
            for style in styles.values()
            if isinstance(style, (linear.ColStyle, linear.SharedColStyle))
        } - {None}
        dim = dims.pop() if dims else None
        is_entrance = is_entrance or dim is not None
        styles[""] = replace(self, sequence=dim, is_entrance=is_entrance, width=width)
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
        enter = shared_input if self.is_entrance else identity
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
            arguments = list(inspect.signature(module.forward).parameters)
            module._head_inputs = {}
            for key, dim in self.inputs if axis.size > 1 else ():
                if key not in arguments:
                    raise style_error(name, f"its forward has no argument {key}")
                take_part = functools.partial(
                    _take_heads, dim=dim, low=low, counts=counts, name=name, key=key
                )
                module._head_inputs[key] = (arguments.index(key), take_part)
            module._first_parameter = first_parameter(module)
            module._site_name = name
            swap_class(module, HeadsRegion, context)

    def _local_attributes(self, name: str, module: nn.Module, counts: HeadCounts) -> dict[str, Any]:
        """
        Return the attributes that depend on the number of heads, with the values of this rank.
        """
        given = (self.heads, self.kv_heads)
        width = find_head_width(module) or self.width
        return local_attributes(name, module, counts, given, self.divide, width)


def _take_heads(
    x: torch.Tensor, dim: int, low: int, counts: HeadCounts, name: str, key: str
) -> torch.Tensor:
    """
    Return this rank's heads of a tensor whose dim has all heads, or rows times heads.

    A tensor without this dim, or with size 1 there, is for all heads.
    """
    if not -x.dim() <= dim < x.dim() or x.shape[dim] == 1:
        return x
    dim %= x.dim()
    size = x.shape[dim]
    if size % counts.heads:
        raise style_error(
            name, f"dim {dim} of its argument {key} must count {counts.heads} heads, got {size}"
        )
    parts = x.unflatten(dim, (-1, counts.heads)).narrow(dim + 1, low, counts.local_heads)
    return parts.flatten(dim, dim + 1)


def _module_at(module: nn.Module, key: str) -> nn.Module | None:
    """Return the module inside another, None if the name is that of a weight."""
    try:
        return module.get_submodule(key)
    except AttributeError:
        return None


def _check_by_head(name: str, module: nn.Module, key: str, counts: HeadCounts) -> None:
    """Raise UsageError if a weight or an embedding inside an attention is not by head."""
    inner = _module_at(module, key)
    if inner is None:
        size = int(module.get_parameter(key).shape[0])
    elif isinstance(inner, nn.Embedding):
        size = inner.embedding_dim
    else:
        raise style_error(name, f"a {type(inner).__name__} has no columns", "use replicate(axis)")
    if size % counts.heads:
        raise style_error(
            name,
            f"its size of {size} must be a multiple of {counts.heads} heads to be sharded by head",
            "replicate(axis) if each rank uses it for its heads",
        )


def _column_style(
    name: str,
    style: linear.ColStyle,
    size: int,
    counts: HeadCounts,
    width: int | None,
    is_entrance: bool,
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
    is_entrance = is_entrance or style.sequence is not None
    if style.blocks != 1:
        if kv_heads < counts.parts:
            blocks = style.block_sizes(name, size)
            if blocks != (heads * width, kv_heads * width, kv_heads * width):
                raise style_error(
                    name,
                    f"{kv_heads} heads of keys and values on {counts.parts} ranks are supported in"
                    " one matrix if all of q is first, then k and v",
                    f"col(axis, blocks=({heads * width}, {kv_heads * width}, {kv_heads * width}))",
                )
            sizes = ((heads, counts.parts), (kv_heads, kv_heads), (kv_heads, kv_heads))
            return linear.SharedColStyle(style.axis, style.sequence, sizes, width, is_entrance)
        uneven = [
            block for block in style.block_sizes(name, size) if block % (width * counts.parts)
        ]
        if uneven:
            raise style_error(
                name,
                f"a block of {uneven[0]} must be a multiple of {counts.parts} ranks times a head"
                f" width of {width}",
            )
        return replace(style, is_input_gathered=is_entrance)
    if size == fused_size:
        raise style_error(
            name,
            "the order of q, k and v in its output is unknown",
            "col(axis, blocks=3) if all of q is first, then k and v; blocks=(size,) if each head"
            " has its q, k and v side by side",
        )
    if size == kv_heads * width and kv_heads < counts.parts:
        return linear.SharedColStyle(
            style.axis, style.sequence, ((kv_heads, kv_heads),), width, is_entrance
        )
    # heads of another width than those of the result: q and k of latent attention
    is_by_head = size % heads == 0
    if size % (width * counts.parts) and not is_by_head:
        raise style_error(
            name,
            f"its output of {size} must be a multiple of {counts.parts} ranks times a head width"
            f" of {width}",
        )
    return replace(style, is_input_gathered=is_entrance)
