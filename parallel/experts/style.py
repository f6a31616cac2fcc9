"""
The style of modules with experts: `experts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.comm.mesh import EXPERT_AXIS
from pdrun.parallel.experts.adapters import ExpertAdapter, find_adapter
from pdrun.parallel.experts.dispatch import ExpertGroups
from pdrun.parallel.model.shards import Shard
from pdrun.parallel.tensor.style import (
    STRATEGY_API,
    AxisNames,
    GridPosition,
    ModuleStyle,
    SharedInput,
    axis_names,
    check_forward,
    format_axes,
    style_error,
)
from pdrun.parallel.torch_compat import exclude_untraced


@dataclass(frozen=True)
class ExpertsStyle(ModuleStyle):
    """See `experts`."""

    axis: AxisNames
    top_k: int | None = None
    cuts_experts: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"experts over {format_axes(self.axis)}"

    def shard_weights(
        self, name: str, module: nn.Module, position: GridPosition
    ) -> dict[str, Shard]:
        """Give each rank its experts; all other weights stay full."""
        check_forward(name, module)
        names = axis_names(self.axis)
        order = [each for each in position.grid.names if each in names]
        if list(names) != order:
            what = f"axes must be in the order of the mesh, {tuple(order)}, got {names}"
            raise style_error(name, what)
        adapter = self._adapter(name, module)
        parts = position.part_count(self.axis)
        count = adapter.count_experts(module)
        if count % parts:
            what = f"{count} experts cannot be split evenly over {parts} ranks"
            fits = [str(n) for n in range(1, count + 1) if count % n == 0]
            raise style_error(
                name, f"{what} ({format_axes(self.axis)})", f"these fit: {', '.join(fits)}"
            )
        if EXPERT_AXIS in names and position.grid.degree(EXPERT_AXIS) == 1:
            names = tuple(each for each in names if each != EXPERT_AXIS)  # no group of its own
        return adapter.shard_weights(name, module, position, names)

    def apply_to(
        self, name: str, module: nn.Module, axis: AxisGroup, shared_input: SharedInput
    ) -> None:
        """Make the module exchange rows with the ranks that have the other experts."""
        tensor = tuple(each for each in axis_names(self.axis) if each != EXPERT_AXIS)
        groups = ExpertGroups(axis, shared_input.axes[tensor])
        exclude_untraced()  # sizes of what travels are known when it runs, whoever compiles it
        self._adapter(name, module).apply_to(name, module, groups)

    def _adapter(self, name: str, module: nn.Module) -> ExpertAdapter:
        return find_adapter(name, module, self.top_k)


def experts(axis: AxisNames, *, top_k: int | None = None) -> ExpertsStyle:
    """
    Cut the experts of a module over ranks; tokens travel to the ranks that have their experts.

    For `pdrun.MoE`, for the fused experts of models of transformers (``*.mlp.experts``), and for a
    module with a router and an nn.ModuleList of equal experts.

    Args:
        axis: "ep", whose ranks have other rows; a tensor axis, whose ranks have the same rows and
            take a part of the tokens each; or both, ``("ep", "tp")``.
        top_k: experts per token of a module with a list of experts, if no attribute says it.

    Raises:
        UsageError: axis is not a name or names of axes.
    """
    names = axis_names(axis) if isinstance(axis, (str, tuple, list)) else ()
    if not names or not all(isinstance(each, str) and each for each in names):
        what = f"axis must be the name of an axis, or several, got {axis!r}"
        raise UsageError(what, where=f"{STRATEGY_API}, experts")
    if top_k is not None and (type(top_k) is not int or top_k < 1):
        what = f"top_k must be a count of at least 1, got {top_k!r}"
        raise UsageError(what, where=f"{STRATEGY_API}, experts")
    return ExpertsStyle(names if len(names) > 1 else names[0], top_k)
