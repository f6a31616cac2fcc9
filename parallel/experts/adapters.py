"""
The kinds of modules whose experts can be cut: what their weights are, and what they compute.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from pdrun.parallel.experts.dispatch import ExpertGroups, exchange_experts
from pdrun.parallel.experts.fused import FusedAdapter, is_fused
from pdrun.parallel.experts.listed import ListAdapter, find_expert_list
from pdrun.parallel.experts.moe import MoE
from pdrun.parallel.model.shards import Shard
from pdrun.parallel.tensor.style import AxisNames, GridPosition, style_error, swap_class


class ExpertAdapter(Protocol):
    """Cuts the experts of one kind of module."""

    def count_experts(self, module: nn.Module) -> int:
        """Return the number of experts."""
        ...

    def shard_weights(
        self, name: str, module: nn.Module, position: GridPosition, axis: AxisNames
    ) -> dict[str, Shard]:
        """Return this rank's shard of each weight of the experts, by name within the module."""
        ...

    def apply_to(self, name: str, module: nn.Module, groups: ExpertGroups) -> None:
        """Make the module compute with its shards, which it has already."""
        ...


def find_adapter(name: str, module: nn.Module, top_k: int | None) -> ExpertAdapter:
    """
    Return what cuts the experts of a module.

    Args:
        top_k: experts per token of a module with a list of experts; None: the module says it.

    Raises:
        UsageError: it has no experts of a known kind, or ``top_k`` would have no effect.
    """
    is_moe = isinstance(module, MoE)
    if is_moe or is_fused(module):
        if top_k is not None:
            what = f"top_k={top_k} has no effect: a {type(module).__name__} is routed by the model"
            raise style_error(name, what, "leave top_k out of experts(...)")
        return MoEAdapter() if is_moe else FusedAdapter()
    if find_expert_list(module):
        return ListAdapter(top_k)
    what = f"a {type(module).__name__} has no experts of a known kind"
    hint = "use it for pdrun.MoE, for fused experts of transformers (*.mlp.experts), or for a"
    hint += " module with a router and an nn.ModuleList of equal experts"
    raise style_error(name, what, hint)


class MoEAdapter:
    """Cuts a `MoE`."""

    def count_experts(self, module: nn.Module) -> int:
        """See `ExpertAdapter`."""
        assert isinstance(module, MoE)
        return module.rule.experts

    def shard_weights(
        self, name: str, module: nn.Module, position: GridPosition, axis: AxisNames
    ) -> dict[str, Shard]:
        """See `ExpertAdapter`."""
        return {
            key: position.shard_weight(name, tuple(module.get_parameter(key).shape), 0, axis)
            for key in ("up", "down")
        }

    def apply_to(self, name: str, module: nn.Module, groups: ExpertGroups) -> None:
        """See `ExpertAdapter`."""
        if groups.experts.size > 1:
            swap_class(module, ParallelMoE, groups)


class ParallelMoE(MoE):
    """A `MoE` whose experts are on several ranks."""

    _context: ExpertGroups

    def compute_tokens(
        self, tokens: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """See `MoE.compute_tokens`."""
        shared: Any = None
        if self.shared_up is not None:
            shared = self.compute_shared
        out, other = exchange_experts(
            tokens,
            index,
            weights,
            self.rule.experts,
            self.compute_rows,
            self._context,
            None if shared is None else lambda: shared(tokens),
        )
        return out if other is None else out + other
