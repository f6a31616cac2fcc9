"""
Linear modules sharded over two or three tensor axes (Xu and You, "An Efficient 2D Method for
Training Super-Large Deep Learning Models", 2021; Bian et al., "Maximizing Parallelism in
Distributed Training for Huge Neural Networks", 2021; the layouts are MindSpore's).

    style                    input               weight, as [in, out]    output
    linear2d("x", "y")       (None, ("x","y"))   ("x", "y")              (None, ("y","x"))
    linear3d("x", "y", "z")  (("z","y"), "x")    (("x","z"), "y")        (("z","x"), "y")

The input is gathered over y, in 3D the weight over z, and the sums are scattered over x. The layout
of the output is that of the input with x and y exchanged: the next module is ``linear2d("y",
"x")``. With b*s rows, h inputs and e outputs a rank sends, forward and backward together,

    2D   2 * b*s * (e*(x-1) + h*(y-1)) / (x*y)
    3D   2 * (b*s*e*(x-1) + b*s*h*(y-1) + h*e*(z-1)) / (x*y*z)

elements, where one axis of P ranks takes 2 * (P-1) * b*s*h / P.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pdrun.errors import UsageError
from pdrun.parallel.comm.autograd import all_gather_sum_grad, reduce_scatter
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.redistribute import redistribute
from pdrun.parallel.layouts.layout import L, shard_range
from pdrun.parallel.model.shards import Shard, make_shard
from pdrun.parallel.tensor.linear import out_dim
from pdrun.parallel.tensor.style import (
    STRATEGY_API,
    GridPosition,
    ModuleStyle,
    SharedInput,
    style_error,
    swap_class,
)


def linear2d(x: str, y: str, *, cut: bool = False, gather: bool = False) -> HighDimStyle:
    """
    Shard a linear module over two axes: the last dim of its input over both, each dim of its weight
    over one.

    Args:
        x: the axis over which sums are scattered; the input is sharded over it first.
        y: the axis over which the input is gathered.
        cut: the input is full on every rank and is sliced here; default: a module before has left
            it sharded.
        gather: return the full output on every rank.

    Raises:
        UsageError: an axis is given twice.
    """
    return HighDimStyle(_check_distinct("linear2d", x, y), None, cut, gather)


def linear3d(
    x: str, y: str, z: str, *, rows: int = 0, cut: bool = False, gather: bool = False
) -> HighDimStyle:
    """
    Shard a linear module over three axes: rows and columns of its input, and its weight.

    Args:
        x: the axis over which sums are scattered.
        y: the axis over which rows are gathered.
        z: the axis over which the weight is gathered.
        rows: the dim of the input that is sharded over z and y (z and x afterwards); it must be a
            multiple of their sizes.
        cut: the input is full on every rank and is sliced here; default: a module before has left
            it sharded.
        gather: return the full output on every rank.

    Raises:
        UsageError: an axis is given twice, or ``rows`` is not a dim.
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
        raise UsageError(
            f"rows must be a dim, got {rows!r}",
            where=f"{STRATEGY_API}, linear3d",
            hint="0 for the first",
        )
    return HighDimStyle(_check_distinct("linear3d", x, y, z), rows, cut, gather)


def _check_distinct(style: str, *axes: str) -> tuple[str, ...]:
    if len(set(axes)) != len(axes) or not all(isinstance(axis, str) and axis for axis in axes):
        raise UsageError(
            f"axes must be different tensor axes, got {axes}",
            where=f"{STRATEGY_API}, {style}",
            hint=f'{style}("x", "y", ...)',
        )
    return axes


@dataclass(frozen=True)
class HighDimStyle(ModuleStyle):
    """See `linear2d` and `linear3d`; a 2D style has no ``rows``."""

    axis: tuple[str, ...]
    rows: int | None
    cut: bool
    gather: bool

    def __str__(self) -> str:
        return f"{len(self.axis)}D over {' x '.join(self.axis)}"

    @property
    def weight_layout(self) -> L:
        """Layout of a weight as torch stores it, ``[out, in]``."""
        x, y, *z = self.axis
        return L(y, (x, *z))

    def bias_layout(self) -> tuple[L, tuple[str, ...]]:
        """
        Return the layout of a bias, and the axes over which its gradient is a partial sum: those of
        the rows.
        """
        x, y, *z = self.axis
        if z:
            return L(y), (*z, x)
        return L((y, x)), ()

    def tensor_layout(self, dims: int, after: bool = False) -> L:
        """Return the layout of an input with ``dims`` dims, or of the output."""
        x, y, *z = self.axis
        if after:
            x, y = y, x
        dims_of_layout: list[Any] = [None] * dims
        if self.rows is None:
            dims_of_layout[-1] = (x, y)
        else:
            dims_of_layout[self.rows], dims_of_layout[-1] = (*z, y), x
        return L(*dims_of_layout)

    def shard_weights(
        self, name: str, module: nn.Module, position: GridPosition
    ) -> dict[str, Shard]:
        """Shard the weight over all axes, and the bias like the output."""
        if out_dim(name, module) != 0:
            raise style_error(name, "a weight of [in, out] is not supported", "use nn.Linear")
        layouts: dict[str, tuple[L, tuple[str, ...]]] = {
            "weight": (self.weight_layout, ()),
            "bias": self.bias_layout(),
        }
        shards = {}
        for key, param in module.named_parameters(recurse=False):
            layout, sums = layouts[key]
            for size, axes in zip(param.shape, layout.dims, strict=True):
                parts = position.part_count(axes)
                if size < parts:
                    raise style_error(
                        name, f"{size} cannot be split into {parts} parts over {' x '.join(axes)}"
                    )
            shards[key] = make_shard(
                tuple(param.shape), layout, position.grid, position.rank, sum_axes=sums
            )
        return shards

    def apply_to(
        self, name: str, module: nn.Module, axis: AxisGroup, shared_input: SharedInput
    ) -> None:
        """Gather, multiply and scatter."""
        in_size = int(module.in_features)
        out_size = int(module.out_features)
        swap_class(
            module, HighDimLinear, HighDimContext(self, shared_input.axes, name, in_size, out_size)
        )


@dataclass(frozen=True)
class HighDimContext:
    """
    What a sharded module knows of the mesh.

    Attributes:
        style: how it is sharded.
        axes: this rank's groups.
        name: of the module.
        in_size, out_size: sizes of the full input and output.
    """

    style: HighDimStyle
    axes: MeshGroups
    name: str
    in_size: int
    out_size: int

    def __deepcopy__(self, memo: dict[int, Any]) -> HighDimContext:
        return self

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` gathered over y. It is sliced before if it is full."""
        style = self.style
        y = self.axes[self.style.axis[1]]
        if style.cut:
            full = L(*[None] * x.dim())
            layout = style.tensor_layout(x.dim())
            if style.rows is not None:
                self._check_rows(x, style.rows, layout.dims[style.rows])
            x = redistribute(x, full, layout, self.axes, tuple(x.shape))
        if style.rows is not None:
            return all_gather_sum_grad(x, y, style.rows)
        return all_gather_sum_grad(x, y, -1, self._local_size(self.in_size, style.axis[0]))

    def gather_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight gathered over z."""
        x, _, *z = self.style.axis
        if z:
            return all_gather_sum_grad(
                weight, self.axes[z[0]], 1, self._local_size(self.in_size, x)
            )
        return weight

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        """Return the sums over x, scattered."""
        style = self.style
        x = self.axes[self.style.axis[0]]
        if style.rows is not None:
            self._check_rows(y, style.rows, (style.axis[0],))
        dim = -1 if style.rows is None else style.rows
        return reduce_scatter(y, x, dim)

    def gather_output(self, y: torch.Tensor) -> torch.Tensor:
        """Return the output, gathered if wanted."""
        style = self.style
        if not style.gather:
            return y
        layout = style.tensor_layout(y.dim(), after=True)
        shape = list(y.shape)
        shape[-1] = self.out_size
        if style.rows is not None:
            shape[style.rows] *= self.axes.grid.group_size(layout.dims[style.rows])
        return redistribute(y, layout, L(*[None] * y.dim()), self.axes, tuple(shape))

    def _local_size(self, size: int, axis: str) -> int:
        """Return the length of this rank's shard along one axis."""
        low, high = shard_range(size, self.axes.grid.degree(axis), self.axes.coordinate[axis])
        return high - low

    def _check_rows(self, x: torch.Tensor, dim: int, axes: tuple[str, ...]) -> None:
        if dim >= x.dim() - 1:
            raise style_error(
                self.name, f"rows must be a dim before the last of {list(x.shape)}, got {dim}"
            )
        parts = self.axes.grid.group_size(axes)
        if x.shape[dim] % parts:
            raise style_error(
                self.name,
                f"dim {dim} of {list(x.shape)} must be a multiple of {parts}, the size of"
                f" {' x '.join(axes)}",
                "choose another dim with rows=, or another number of rows",
            )


class HighDimLinear:
    """A linear module over two or three axes."""

    _context: HighDimContext

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        Return this rank's shard of the output for its shard of the input, or the full output if
        wanted.
        """
        context = self._context
        bias = self.bias  # type: ignore[attr-defined]
        weight = context.gather_weight(self.weight)  # type: ignore[attr-defined]
        y = context.leave(functional.linear(context.enter(x), weight))
        if bias is not None:
            y = y + bias
        return context.gather_output(y)
