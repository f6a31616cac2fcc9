"""
Modules with a router and a list of equal experts: ``nn.ModuleList`` and a linear module.

What such a module computes is written in its forward, which calls the experts that have tokens.
On several ranks every rank must take part, so that its forward is replaced. Before that, a copy is
compared with it on random numbers: a module that routes in another way is refused, and so is one
that does more in training: adds noise, drops tokens, or keeps a loss in an attribute.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pdrun.parallel.experts.balance import LoadCounter
from pdrun.parallel.experts.dispatch import ExpertGroups, compute_experts, exchange_experts
from pdrun.parallel.experts.grouped import ExpertRows
from pdrun.parallel.experts.routing import RoutingRule, route_tokens
from pdrun.parallel.model.shards import Shard
from pdrun.parallel.tensor.style import (
    AxisNames,
    GridPosition,
    axis_names,
    style_error,
    swap_class,
)
from pdrun.parallel.torch_compat import untraced

TOP_K_NAMES = (
    "top_k",
    "num_experts_per_tok",
    "num_experts_per_token",
    "topk",
    "k",
    "experts_top_k",
)
"""Attributes that can have the number of experts per token."""
PROBE_ROWS, PROBE_LENGTH = 3, 5
"""Shape of the tokens that modules are compared with."""
PROBE_TOLERANCE = 1e-8
"""In fp64."""
MODULE_TABLES = frozenset(vars(nn.Module()))
"""Attributes of every module."""


@dataclass(frozen=True)
class ListParts:
    """The parts of a module, by their names in it."""

    experts: str
    router: str
    others: tuple[str, ...]
    """Modules that every token uses."""


def find_expert_list(module: nn.Module) -> str:
    """Return the name of a module's list of equal experts; empty without one."""
    found = [
        name
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and len(child) > 1 and _are_equal(child)
    ]
    return found[0] if len(found) == 1 else ""


def _are_equal(experts: nn.ModuleList) -> bool:
    shapes = [
        [(name, tuple(param.shape)) for name, param in expert.named_parameters()]
        for expert in experts
    ]
    kinds = {type(expert) for expert in experts}
    return bool(shapes[0]) and len(kinds) == 1 and all(each == shapes[0] for each in shapes)


def find_parts(name: str, module: nn.Module) -> ListParts:
    """
    Return the parts of a module.

    Raises:
        UsageError: it has no router, or several.
    """
    experts = find_expert_list(module)
    count = len(module.get_submodule(experts))
    routers = [
        key
        for key, child in module.named_children()
        if isinstance(child, nn.Linear) and child.out_features == count
    ]
    if len(routers) != 1:
        what = f"it must have one linear router of {count} outputs, got {len(routers)}"
        raise style_error(name, what, "use pdrun.MoE")
    direct = [key for key, _ in module.named_parameters(recurse=False)]
    if direct:
        raise style_error(name, f"its weight {direct[0]} is not known", "use pdrun.MoE")
    others = tuple(
        key
        for key, child in module.named_children()
        if key not in (experts, routers[0]) and any(True for _ in child.parameters())
    )
    return ListParts(experts, routers[0], others)


class ListAdapter:
    """
    Cuts a list of experts.

    Args:
        top_k: experts per token; None: an attribute of the module has it.
    """

    def __init__(self, top_k: int | None) -> None:
        self.top_k = top_k

    def count_experts(self, module: nn.Module) -> int:
        """See `ExpertAdapter`."""
        return len(module.get_submodule(find_expert_list(module)))

    def shard_weights(
        self, name: str, module: nn.Module, position: GridPosition, axis: AxisNames
    ) -> dict[str, Shard]:
        """See `ExpertAdapter`; each expert is full on the ranks that have it."""
        self._find_rule(name, module, find_parts(name, module))
        prefix = find_expert_list(module)
        return {
            f"{prefix}.{key}": replace(
                position.keep_full(tuple(param.shape)), own_axes=axis_names(axis)
            )
            for key, param in module.get_submodule(prefix).named_parameters()
        }

    def apply_to(self, name: str, module: nn.Module, groups: ExpertGroups) -> None:
        """See `ExpertAdapter`."""
        parts = find_parts(name, module)
        rule, returns_logits = self._find_rule(name, module, parts)
        experts: Any = module.get_submodule(parts.experts)
        each = len(experts) // groups.experts.size
        first = groups.experts.index * each
        module.expert_loads = LoadCounter(len(experts))
        module._local_experts = range(first, first + each)
        module._routing = parts, rule, returns_logits
        for index in range(len(experts)):
            if index not in module._local_experts:
                experts[index] = RemoteExpert()
        swap_class(module, ParallelExpertList, groups)

    def _find_rule(
        self, name: str, module: nn.Module, parts: ListParts
    ) -> tuple[RoutingRule, bool]:
        """Return how a module routes, and whether it returns its router's output, too."""
        count = self.count_experts(module)
        top_k = self.top_k
        if top_k is None:
            found = [getattr(module, key, None) for key in TOP_K_NAMES]
            known = [value for value in found if type(value) is int and 1 <= value <= count]
            if not known:
                what = "no attribute says how many experts a token goes to"
                raise style_error(name, what, "experts(axis, top_k=2)")
            top_k = known[0]
        if top_k > count:
            raise style_error(name, f"top_k={top_k} is more than its {count} experts")
        wanted, tokens, probe = _probe_module(name, module, parts)
        output = wanted[0] if isinstance(wanted, tuple) else wanted
        for rule in _candidate_rules(count, top_k):
            mine = _compute_alone(probe, parts, rule, tokens)
            is_near = output.shape == mine.shape and torch.allclose(
                output, mine, rtol=PROBE_TOLERANCE, atol=PROBE_TOLERANCE
            )
            if is_near:
                _check_training(name, probe, parts, tokens)
                return rule, isinstance(wanted, tuple)
        what = f"it does not compute the sum of the {top_k} best experts of a softmax or sigmoid"
        raise style_error(name, what, "name its top_k=, or use pdrun.MoE")


def _candidate_rules(count: int, top_k: int) -> Iterator[RoutingRule]:
    for score in ("softmax", "sigmoid"):
        for normalize in (True, False):
            yield RoutingRule(count, top_k, score, normalize)


def _probe_module(name: str, module: nn.Module, parts: ListParts) -> tuple[Any, Any, nn.Module]:
    """Return what a copy of a module with random weights computes, of what, and the copy."""
    made = copy.deepcopy(module).to_empty(device="cpu").double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in [*made.parameters(), *made.buffers()]:
            if weight.is_floating_point():
                weight.copy_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) / 4)
    router: Any = made.get_submodule(parts.router)
    shape = PROBE_ROWS, PROBE_LENGTH, router.in_features
    tokens = torch.randn(shape, generator=generator, dtype=torch.float64)
    return _call_probe(name, made, tokens), tokens, made


def _call_probe(name: str, probe: nn.Module, tokens: torch.Tensor) -> Any:
    try:
        with torch.no_grad():
            found = probe(tokens)
    except Exception as error:
        what = f"it cannot be called with one tensor of shape {list(tokens.shape)}: {error}"
        raise style_error(name, what, "use pdrun.MoE") from None
    return found


def _check_training(name: str, probe: nn.Module, parts: ListParts, tokens: torch.Tensor) -> None:
    """Refuse a module that does something in training that its replacement would not do."""
    tokens = tokens / 2  # others than before: what a forward keeps of them is seen to change
    before = _state_of(probe)
    probe.train()
    for other in parts.others:  # called as they are
        probe.get_submodule(other).eval()
    found = _call_probe(name, probe, tokens)
    after = _state_of(probe)
    wanted = _call_probe(name, probe.eval(), tokens)
    changed = [key for key in after if key not in before or not _is_same(before[key], after[key])]
    if changed:
        what = f"its forward sets {changed[0]}, which would stay as it is"
        raise style_error(name, what, "use pdrun.MoE, with pdrun.Balance for a balance loss")
    one, other = (each[0] if isinstance(each, tuple) else each for each in (found, wanted))
    if not torch.allclose(one, other, rtol=PROBE_TOLERANCE, atol=PROBE_TOLERANCE):
        what = "it computes something else in training than in evaluation"
        raise style_error(name, what, "use it without noise, dropout and capacity, or pdrun.MoE")


def _state_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes and buffers of a module itself, copies of those that can change."""
    found = {key: value for key, value in vars(module).items() if key not in MODULE_TABLES}
    found |= dict(module.named_buffers(recurse=False))
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
        for key, value in found.items()
    }


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return bool(torch.equal(one, other))
    if isinstance(one, (list, dict, set)) and type(one) is type(other):
        return len(one) == len(other)
    is_plain = isinstance(one, (int, float, str))
    return one is other or (is_plain and bool(one == other))


def _compute_alone(
    module: nn.Module, parts: ListParts, rule: RoutingRule, x: torch.Tensor
) -> torch.Tensor:
    tokens = x.reshape(-1, x.shape[-1])
    experts: Any = module.get_submodule(parts.experts)
    with torch.no_grad():
        routing = route_tokens(module.get_submodule(parts.router)(tokens), rule, None)
        compute = _caller_of(list(experts))
        out = compute_experts(tokens, routing.index, routing.weights, rule.experts, compute, False)
        for other in parts.others:
            out = out + module.get_submodule(other)(tokens)
    return out.view(*x.shape[:-1], out.shape[-1])


def _caller_of(experts: list[nn.Module]) -> Callable[[torch.Tensor, ExpertRows], torch.Tensor]:
    """Return a function that gives each expert its rows, also none."""
    return functools.partial(_call_experts, experts)


@untraced
def _call_experts(experts: list[nn.Module], x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
    pieces = x.split(rows.sizes)
    return torch.cat([expert(piece) for expert, piece in zip(experts, pieces, strict=True)])


class RemoteExpert(nn.Module):
    """An expert that other ranks have."""

    def forward(self, *args: Any) -> Any:
        """Refuse."""
        raise style_error("experts", "this expert is on another rank")


class ParallelExpertList(nn.Module):
    """A module whose list of experts is on several ranks."""

    _context: ExpertGroups
    _routing: tuple[ListParts, RoutingRule, bool]
    _local_experts: range
    expert_loads: LoadCounter

    def forward(self, x: torch.Tensor) -> Any:
        """Return what the module returned."""
        parts, rule, returns_logits = self._routing
        tokens = x.reshape(-1, x.shape[-1])
        logits = self.get_submodule(parts.router)(tokens)
        routing = route_tokens(
            logits.to(torch.promote_types(logits.dtype, torch.float32)), rule, None
        )
        self.expert_loads.add(routing.index, self.training)
        experts: Any = self.get_submodule(parts.experts)
        compute = _caller_of([experts[index] for index in self._local_experts])
        out, _ = exchange_experts(
            tokens, routing.index, routing.weights, rule.experts, compute, self._context
        )
        for other in parts.others:
            out = out + self.get_submodule(other)(tokens)
        out = out.view(*x.shape[:-1], out.shape[-1])
        return (out, logits) if returns_logits else out
