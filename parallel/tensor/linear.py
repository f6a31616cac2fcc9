"""
Linear modules sharded by columns or rows (Shoeybi et al., Megatron-LM, 2019; sequence parallel:
Korthikanti et al., 2022).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from pdrun.parallel.comm.autograd import all_gather, all_reduce, slice_to_shard
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.fp8 import product
from pdrun.parallel.fp8.modules import scales_of
from pdrun.parallel.model.shards import Shard, shard_of
from pdrun.parallel.tensor.probes import check_embedding, check_linear_forward
from pdrun.parallel.tensor.style import (
    AxisNames,
    GridPosition,
    ModuleContext,
    ModuleStyle,
    SharedInput,
    check_forward,
    format_axes,
    identity,
    reduce_scatter_parts,
    style_error,
    swap_class,
)


def is_transposed(module: nn.Module) -> bool:
    """
    Return whether a module is Conv1D of transformers (GPT-2): a linear module with a weight ``[in,
    out]``.
    """
    return (
        type(module).__name__.endswith("Conv1D") and hasattr(module, "nf") and hasattr(module, "nx")
    )


def is_linear(module: nn.Module | None) -> bool:
    """Return whether a module is linear by its class."""
    return module is not None and (isinstance(module, nn.Linear) or is_transposed(module))


def out_dim(name: str, module: nn.Module) -> int:
    """
    Return the dim of a linear module's weight that makes its output.

    Raises:
        UsageError: the module is not linear, or overrides forward.
    """
    check_forward(name, module)
    if not is_transposed(module):
        if not isinstance(module, nn.Linear):
            raise style_error(
                name,
                f"a {type(module).__name__} is not a linear module",
                "use it for nn.Linear, or Conv1D of transformers",
            )
        check_linear_forward(name, module)
    weights = {key for key, _ in module.named_parameters(recurse=False)}
    if weights - {"bias"} != {"weight"}:
        raise style_error(
            name, f"its weights must be weight and bias, got {', '.join(sorted(weights)) or 'none'}"
        )
    if is_transposed(module):
        return 1
    return 0


def full_sizes(name: str, module: nn.Module) -> tuple[int, int]:
    """Return the sizes of a linear module's full input and output."""
    dim = out_dim(name, module)
    shape = shard_of(module.weight).shape
    return shape[1 - dim], shape[dim]


def set_sizes(module: nn.Module, in_size: int, out_size: int) -> None:
    """Set the sizes that a linear module takes and returns, if its class stores them."""
    keys = ("nx", "nf") if is_transposed(module) else ("in_features", "out_features")
    for key, value in zip(keys, (in_size, out_size), strict=True):
        setattr(module, key, value)


def bring_in_checked(
    x: torch.Tensor, enter: Callable[[torch.Tensor], torch.Tensor], name: str, width: int, hint: str
) -> torch.Tensor:
    """
    Bring in an input and check its width. A module before it can have left it sharded or full.
    """
    x = enter(x)
    if x.shape[-1] != width:
        raise style_error(name, f"it takes {width} features on this rank, got {x.shape[-1]}", hint)
    return x


# ---- columns ----------------------------------------------------------------


class ColumnParallel:
    """A linear module that computes this rank's shard of the output."""

    _context: ModuleContext
    serves_fp8 = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[..., out / parts]`` of ``[..., in]``, or the full output if it is gathered."""
        context = self._context
        scales = scales_of(self)
        if scales is None:
            return context.leave(super().forward(context.enter(x)))  # type: ignore[misc]
        weight, bias = self.weight, self.bias  # type: ignore[attr-defined]
        return context.leave(product.linear(context.enter(x), weight, bias, scales))


@dataclass(frozen=True)
class ColStyle(ModuleStyle):
    """See `pdrun.parallel.tensor.col`."""

    axis: AxisNames
    gather: bool = False
    sequence: int | None = None
    blocks: int | tuple[int, ...] = 1
    is_input_gathered: bool = False
    """Whether the module around it has brought the input in."""

    def __str__(self) -> str:
        text = f"columns over {format_axes(self.axis)}"
        if self.gather:
            text += ", gathered"
        return text

    def block_sizes(self, name: str, total: int) -> tuple[int, ...]:
        """
        Return the sizes of the matrices side by side in an output of ``total``; the empty tuple for
        one.
        """
        if isinstance(self.blocks, tuple):
            if sum(self.blocks) != total:
                raise style_error(
                    name, f"blocks must add up to its output of {total}, got {self.blocks}"
                )
            return self.blocks
        if total % self.blocks:
            raise style_error(
                name, f"its output of {total} must be a multiple of blocks={self.blocks}"
            )
        if self.blocks == 1:
            return ()
        return (total // self.blocks,) * self.blocks

    def shard_weights(
        self, name: str, module: nn.Module, position: GridPosition
    ) -> dict[str, Shard]:
        """Shard the weight and the bias on the output; an embedding on its width."""
        if isinstance(module, nn.Embedding):
            check_embedding(name, module)
            shape = tuple(module.weight.shape)
            return {"weight": position.shard_weight(name, shape, 1, self.axis)}
        dim = out_dim(name, module)
        blocks = self.block_sizes(name, module.weight.shape[dim])
        return {
            key: position.shard_weight(
                name, tuple(param.shape), dim if key == "weight" else 0, self.axis, blocks
            )
            for key, param in module.named_parameters(recurse=False)
        }

    def apply_to(
        self, name: str, module: nn.Module, axis: AxisGroup, shared_input: SharedInput
    ) -> None:
        """Compute a shard of the output; gather it if wanted."""
        if isinstance(module, nn.Embedding):
            self._apply_to_embedding(module, axis)
            return
        in_size, out_size = full_sizes(name, module)
        local_size = int(module.weight.shape[out_dim(name, module)])
        leave: Callable[[torch.Tensor], torch.Tensor] = identity
        if self.gather:
            leave = functools.partial(all_gather, axis=axis, dim=-1, total=out_size)
        # Conv1D reshapes its product to nf, so that this stays the local size
        if self.gather and not is_transposed(module):
            set_sizes(module, in_size, out_size)
        else:
            set_sizes(module, in_size, local_size)
        enter = functools.partial(
            bring_in_checked,
            enter=identity if self.is_input_gathered else shared_input,
            name=name,
            width=in_size,
            hint="col takes a full input: use row after col, or col(axis, gather=True) before it",
        )
        swap_class(module, ColumnParallel, ModuleContext(axis, enter, leave))

    def _apply_to_embedding(self, module: nn.Embedding, axis: AxisGroup) -> None:
        """Look up a shard of each row; ids need no collective."""
        leave: Callable[[torch.Tensor], torch.Tensor] = identity
        if self.gather:
            leave = functools.partial(all_gather, axis=axis, dim=-1, total=module.embedding_dim)
        else:
            module.embedding_dim = int(module.weight.shape[1])
        swap_class(module, ColumnParallel, ModuleContext(axis, identity, leave))


# ---- columns that fewer than all ranks need ---------------------------------


class SharedColumnParallel:
    """
    A linear module with its full weight that computes the part of the output which this rank needs.
    """

    _context: ModuleContext
    _ranges: tuple[tuple[int, int], ...]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of this rank's ranges for ``[..., in]``."""
        bias = self.bias  # type: ignore[attr-defined]
        if bias is not None:
            bias = torch.cat([bias[low:high] for low, high in self._ranges])
        weight = self.weight  # type: ignore[attr-defined]
        weight = torch.cat([weight[low:high] for low, high in self._ranges])
        return functional.linear(self._context.enter(x), weight, bias)


@dataclass(frozen=True)
class SharedColStyle(ModuleStyle):
    """
    Key and value heads of grouped-query attention, fewer than ranks: each rank has all and computes
    one.

    `ColStyle` becomes this within `HeadsStyle`; users do not choose it. Each rank has gradients for
    the heads that it used, so the weight's gradients are partial sums over the axis.

    Attributes:
        blocks: for each matrix in the output: its heads, and the number of different parts that
            ranks use, neighbours the same one.
        width: of a head.
    """

    axis: AxisNames
    sequence: int | None
    blocks: tuple[tuple[int, int], ...]
    width: int
    is_input_gathered: bool = False

    def __str__(self) -> str:
        axes = format_axes(self.axis)
        heads = self.blocks[-1][0]
        return f"replicated over {axes}, each rank computes one of {heads} heads"

    def shard_weights(
        self, name: str, module: nn.Module, position: GridPosition
    ) -> dict[str, Shard]:
        """Keep the full weight, with gradients to be summed."""
        if out_dim(name, module):
            raise style_error(
                name, "fewer key and value heads than ranks are supported for nn.Linear only"
            )
        params = module.named_parameters(recurse=False)
        return {key: position.keep_full(tuple(param.shape), self.axis) for key, param in params}

    def apply_to(
        self, name: str, module: nn.Module, axis: AxisGroup, shared_input: SharedInput
    ) -> None:
        """Compute this rank's heads."""
        in_size, _ = full_sizes(name, module)
        ranges = []
        start = 0
        for heads, parts in self.blocks:
            size = heads // parts * self.width
            low = start + axis.index * parts // axis.size * size
            ranges.append((low, low + size))
            start += heads * self.width
        swap_class(
            module,
            SharedColumnParallel,
            ModuleContext(axis, identity if self.is_input_gathered else shared_input, identity),
        )
        module._ranges = tuple(ranges)
        set_sizes(module, in_size, sum(high - low for low, high in ranges))


# ---- rows -------------------------------------------------------------------


class RowParallel:
    """
    A linear module that takes this rank's shard of the input. The bias is added once, after the
    sum.
    """

    _context: ModuleContext
    serves_fp8 = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[..., out]`` of ``[..., in / parts]``."""
        context = self._context
        bias = self.bias  # type: ignore[attr-defined]
        weight = self.weight  # type: ignore[attr-defined]
        scales = scales_of(self)
        x = context.enter(x)
        if scales is None:
            y = context.leave(functional.linear(x, weight))
        else:
            y = context.leave(product.linear(x, weight, None, scales))
        if bias is None:
            return y
        return y + bias


class TransposedRowParallel(RowParallel):
    """The same with a weight of ``[in, out]``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[..., out]`` of ``[..., in / parts]``."""
        context = self._context
        weight = self.weight  # type: ignore[attr-defined]
        return context.leave(context.enter(x) @ weight) + self.bias  # type: ignore[attr-defined]


@dataclass(frozen=True)
class RowStyle(ModuleStyle):
    """See `pdrun.parallel.tensor.row`."""

    axis: AxisNames
    cut: bool = False
    sequence: int | None = None

    def __str__(self) -> str:
        text = f"rows over {format_axes(self.axis)}"
        if self.sequence is not None:
            text += ", reduce-scattered on the sequence"
        return text

    def shard_weights(
        self, name: str, module: nn.Module, position: GridPosition
    ) -> dict[str, Shard]:
        """
        Shard the weight on the input.

        With sequence parallel each rank adds the bias to its shard, so the bias's gradients are
        partial sums.
        """
        shards = {
            "weight": position.shard_weight(
                name, tuple(module.weight.shape), 1 - out_dim(name, module), self.axis
            )
        }
        if module.bias is not None and self.sequence is not None:
            shards["bias"] = position.keep_full(tuple(module.bias.shape), self.axis)
        elif module.bias is not None:
            shards["bias"] = position.keep_full(tuple(module.bias.shape))
        return shards

    def apply_to(
        self, name: str, module: nn.Module, axis: AxisGroup, shared_input: SharedInput
    ) -> None:
        """
        Take a shard of the input, or slice the full one. All-reduce the result, or reduce-scatter
        it on the sequence.
        """
        in_size, out_size = full_sizes(name, module)
        local_size = int(module.weight.shape[1 - out_dim(name, module)])
        take_shard: Callable[[torch.Tensor], torch.Tensor] = identity
        if self.cut:
            take_shard = functools.partial(slice_to_shard, axis=axis, dim=-1)
            set_sizes(module, in_size, out_size)
        else:
            set_sizes(module, local_size, out_size)
        enter = functools.partial(
            bring_in_checked,
            enter=take_shard,
            name=name,
            width=local_size,
            hint="row takes a shard: use col before it, or row(axis, cut=True) for a full input",
        )
        leave = functools.partial(all_reduce, axis=axis)
        if self.sequence is not None:
            leave = functools.partial(reduce_scatter_parts, axis=axis, dim=self.sequence, name=name)
        kind = TransposedRowParallel if is_transposed(module) else RowParallel
        swap_class(module, kind, ModuleContext(axis, enter, leave))
