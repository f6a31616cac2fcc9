"""
Layouts that a user gives inside a model. In one process they change nothing; the operator engine
reads them.

    x = pdrun.constrain(x, L("dp", "tp", None))  # in a forward: the layout of x from here on
    pdrun.shard(  # a module: its arguments, its result and a weight
        model.mlp, in_=(L("dp", None, None),), out=L("dp", None, None), weight=L("tp", None)
    )
    attend = pdrun.shard(attend, in_=(L("dp", "tp"), None))  # a function: its arguments
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pdrun.errors import UsageError
from pdrun.parallel.layouts.device_matrix import DeviceMatrixLayout, is_counts
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L

LayoutSpec = L | DeviceMatrixLayout | tuple[int, ...]
"""A layout as a user gives it: by mesh axes, on a device matrix, or as counts per dim."""
T = TypeVar("T", bound=Callable[..., Any])

OP_LIBRARY = torch.library.Library("pdrun", "DEF")
OP_LIBRARY.define("constrain(Tensor x, str layout) -> Tensor")
OP_LIBRARY.define("stop(Tensor x) -> Tensor")


def _clone_input(x: torch.Tensor, *layout: str) -> torch.Tensor:
    return x.clone()


OP_LIBRARY.impl("constrain", _clone_input, "CompositeExplicitAutograd")
OP_LIBRARY.impl("stop", _clone_input, "CompositeExplicitAutograd")
torch.library.register_autograd(
    "pdrun::constrain", lambda ctx, gradient: (gradient, None), lib=OP_LIBRARY
)
torch.library.register_autograd("pdrun::stop", lambda ctx, gradient: gradient, lib=OP_LIBRARY)


def is_layout(value: Any) -> bool:
    """Return whether a value is a `LayoutSpec`."""
    return isinstance(value, (L, DeviceMatrixLayout)) or (is_counts(value) and len(value) > 0)


def encode_layout(layout: LayoutSpec) -> str:
    """Return a layout as text, the form in which it passes through an export."""
    if isinstance(layout, tuple):
        return json.dumps({"counts": layout})
    if isinstance(layout, L):
        return json.dumps({"dims": layout.dims, "sums": layout.sums})
    plain = layout.layout
    grid = [layout.grid.names, layout.grid.sizes]
    return json.dumps({"dims": plain.dims, "sums": plain.sums, "grid": grid})


def decode_layout(text: str) -> LayoutSpec:
    """Return the layout of a text; see `encode_layout`."""
    found = json.loads(text)
    if "counts" in found:
        return tuple(found["counts"])
    layout = L(*map(tuple, found["dims"]), sums=tuple(found["sums"]))
    if "grid" not in found:
        return layout
    names, sizes = found["grid"]
    return DeviceMatrixLayout(Grid(tuple(names), tuple(sizes)), layout)


def _count_dims(layout: LayoutSpec) -> int:
    if isinstance(layout, DeviceMatrixLayout):
        return len(layout.layout.dims)
    if isinstance(layout, L):
        return len(layout.dims)
    return len(layout)


def constrain(x: torch.Tensor, layout: LayoutSpec) -> torch.Tensor:
    """
    Return ``x``. The operator engine gives it this layout; without the engine nothing happens.

    Raises:
        UsageError: ``layout`` is not a layout, or is for another number of dims.
    """
    if not is_layout(layout):
        raise UsageError(
            f"layout must be an L, a pdrun.Layout or a tuple of counts, got {layout!r}",
            where="pdrun.constrain",
            hint='for example L("dp", None, "tp")',
        )
    if not isinstance(x, torch.Tensor):
        raise UsageError(
            f"x must be a tensor, got {type(x).__name__}",
            where="pdrun.constrain",
            hint="constrain(tensor, L(...))",
        )
    if _count_dims(layout) != x.dim():
        what = f"{layout} is for {_count_dims(layout)} dims, but x is {list(x.shape)}"
        raise UsageError(what, where="pdrun.constrain")
    if not torch.compiler.is_exporting():
        return x
    result: torch.Tensor = torch.ops.pdrun.constrain(x, encode_layout(layout))
    return result


@dataclass
class ModuleSharding:
    """
    The layouts that `shard` sets for a module or function.

    Attributes:
        in_: a layout per tensor argument; None leaves it open.
        out: of the result, or one per result.
        weights: by name of the parameter, relative to the module.
    """

    in_: tuple[LayoutSpec | None, ...] = ()
    out: tuple[LayoutSpec | None, ...] | None = None
    weights: dict[str, LayoutSpec] = field(default_factory=dict)

    def constrain_inputs(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Forward pre-hook: constrain the arguments."""
        if not torch.compiler.is_exporting():
            return args
        constrained: tuple[Any, ...] = _constrain_each(args, self.in_)
        return constrained

    def constrain_results(
        self, module: nn.Module | None, args: tuple[Any, ...], result: Any
    ) -> Any:
        """Forward hook: constrain the result."""
        if self.out is None or not torch.compiler.is_exporting():
            return result
        return _constrain_each(result, self.out)


def _constrain_each(values: Any, layouts: tuple[LayoutSpec | None, ...]) -> Any:
    """Return nested values with their tensors constrained, in order."""
    flat, structure = pytree.tree_flatten(values)
    wanted = iter(layouts)
    found = []
    for value in flat:
        if isinstance(value, torch.Tensor):
            layout = next(wanted, None)
            if layout is not None:
                value = constrain(value, layout)
        found.append(value)
    return pytree.tree_unflatten(found, structure)


def _as_layouts(value: Any) -> tuple[LayoutSpec | None, ...]:
    """Return a layout per tensor. A tuple of counts is one layout."""
    if value is None:
        return ()
    if is_layout(value):
        return (value,)
    return tuple(value)


def shard(
    target: T,
    in_: LayoutSpec | tuple[LayoutSpec | None, ...] | None = None,
    out: LayoutSpec | tuple[LayoutSpec | None, ...] | None = None,
    **weights: LayoutSpec,
) -> T:
    """
    Set the layouts of a module's or a function's tensors. The rest follows by propagation.

    Args:
        target: a module, which is marked and returned, or a function, for which a new one is
            returned.
        in_: a layout per tensor argument, in order; None leaves one open.
        out: the same for results.
        weights: a module's parameters by name (``weight=L("tp", None)``).

    Raises:
        UsageError: a module lacks such a parameter, or a parameter is given for a function.
    """
    for name, value in (("in_", in_), ("out", out), *weights.items()):
        has_several = (
            isinstance(value, (tuple, list)) and name in ("in_", "out") and not is_layout(value)
        )
        specs: Any = value if has_several else (value,)
        if not all(spec is None or is_layout(spec) for spec in specs):
            what = f"{name} must be a layout, got {value!r}"
            raise UsageError(
                what, where="pdrun.shard", hint='L("dp", None, "tp"), or a tuple of them'
            )
    if not callable(target):
        raise UsageError(
            f"target must be a module or a function, got {target!r}", where="pdrun.shard"
        )
    sharding = ModuleSharding(
        _as_layouts(in_), None if out is None else _as_layouts(out), dict(weights)
    )
    if isinstance(target, nn.Module):
        known = dict(target.named_parameters())
        for name in weights:
            if name not in known:
                names = ", ".join(known) or "none"
                what = f"{type(target).__name__} has no parameter {name!r}"
                raise UsageError(what, where="pdrun.shard", hint=f"it has {names}")
        target.register_forward_pre_hook(sharding.constrain_inputs)
        target.register_forward_hook(sharding.constrain_results)
        target._pdrun_sharding = sharding
        return target
    if weights:
        raise UsageError(
            f"a function has no parameters ({', '.join(weights)})", where="pdrun.shard"
        )

    @functools.wraps(target)
    def sharded(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_exporting():
            return target(*args, **kwargs)
        args, kwargs = _constrain_each((args, kwargs), sharding.in_)
        return sharding.constrain_results(None, args, target(*args, **kwargs))

    return cast(T, sharded)
