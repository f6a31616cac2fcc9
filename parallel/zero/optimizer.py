"""
Moves an optimizer that was built for a model's parameters to other tensors: shards and masters.

The user's function gets the model's own parameters, so that groups can be formed by name, shape or
module. Then each parameter in the groups is replaced by the tensors that this rank trains for it.
That is correct for *elementwise* optimizers only, whose update of an element depends on that
element's gradient and state alone. Others are refused, or keep full weights if they are one of
several. A trial decides: two steps on a small
tensor, in one part and in two, must give the same bits.
"""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.model.shards import shard_of
from pdrun.parallel.model.weights import Weight
from pdrun.parallel.zero.flat_layout import FlatSegment

PARALLELIZE = "pdrun.parallelize"
TRIAL_LEARNING_RATE = 1e-2
"""Learning rate of the trial."""
TrainedPart = tuple[nn.Parameter, "FlatSegment | None"]
"""A tensor to train and its segment of the parameter; None: all of the parameter."""


class ComposedOptimizer(torch.optim.Optimizer):
    """
    Several optimizers as one, each for its own weights: ``optimizer=lambda params: [Muon(...),
    AdamW(...)]``.

    Args:
        optimizers: at least one; no weight is in two of them.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for each in optimizers for group in each.param_groups]
        super().__init__(groups, {})  # refuses a weight in two groups; keeps the dicts
        self.optimizers = list(optimizers)
        for each in self.optimizers:
            self.state.update(each.state)
            each.state = self.state

    def step(self, closure: None = None) -> None:
        """Step all optimizers, in their order."""
        for each in self.optimizers:
            each.step()

    def owner_of(self, group: Mapping[str, Any]) -> torch.optim.Optimizer:
        """Return the optimizer of a group."""
        return next(
            each for each in self.optimizers if any(own is group for own in each.param_groups)
        )


def compose_optimizers(optimizers: Sequence[Any]) -> torch.optim.Optimizer:
    """
    Return optimizers as one, whose type has their names.

    Raises:
        UsageError: one of them is not an optimizer, or two train one weight.
    """
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer) or isinstance(each, torch.optim.LBFGS):
            raise UsageError(
                f"optimizer has a {_kind_of(each)} in its list",
                where=PARALLELIZE,
                hint="a list of first-order optimizers",
            )
    if len(optimizers) == 1:
        only: torch.optim.Optimizer = optimizers[0]
        return only
    kind = type("+".join(type(each).__name__ for each in optimizers), (ComposedOptimizer,), {})
    try:
        made: torch.optim.Optimizer = kind(optimizers)
    except ValueError as error:
        raise UsageError(
            f"the optimizers cannot be combined: {error}",
            where=PARALLELIZE,
            hint="each weight in one optimizer",
        ) from None
    return made


def build_optimizer(optimizer: Any, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """
    Return the optimizer that a user's function builds, or the user's optimizer.

    Raises:
        UsageError: it is not an optimizer, trains a tensor that is not the model's, or needs a
            closure.
    """
    given = isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer)
    built = optimizer if given else optimizer(list(params))
    if isinstance(built, (list, tuple)) and built:
        built = compose_optimizers(built)
    if not isinstance(built, torch.optim.Optimizer):
        raise UsageError(
            "optimizer must be a torch.optim.Optimizer or a function that returns one, "
            f"got {_kind_of(built)}",
            where=PARALLELIZE,
            hint="optimizer=lambda params: AdamW(params, lr=3e-4)",
        )
    if isinstance(built, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS is not supported: its step runs the model several times",
            where=PARALLELIZE,
            hint="use a first-order optimizer",
        )
    known = {id(param) for param in params}
    for group in built.param_groups:
        for param in group["params"]:
            if id(param) not in known:
                shape = tuple(param.shape)
                raise UsageError(
                    f"optimizer has a tensor of shape {shape} that is not a trained weight of the "
                    "model",
                    where=PARALLELIZE,
                    hint="build it from the parameters that the function gets",
                )
    return built


def _kind_of(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def check_elementwise(
    optimizer: torch.optim.Optimizer, device: torch.device, *, tiles_only: bool = False
) -> None:
    """
    Try whether the optimizer can train parts of weights.

    Args:
        tiles_only: only groups with a weight that is sharded over tensor axes need that.

    Raises:
        UsageError: it cannot; names it.
    """
    for group in optimizer.param_groups:
        if tiles_only and all(shard_of(param).is_full for param in group["params"]):
            continue
        owner = _owner_of(optimizer, group)
        if not _is_elementwise(owner, group, device):
            raise UsageError(
                f"{type(owner).__name__} cannot be sharded: its update of an element depends "
                "on other elements",
                where=PARALLELIZE,
                hint=("" if tiles_only else "optimizer_level=0, ")
                + ("" if tiles_only else "a list of optimizers of which others shard theirs, or ")
                + "an elementwise optimizer such as AdamW or SGD",
            )


def keep_full_weights(
    optimizer: torch.optim.Optimizer, weights: Iterable[Weight], device: torch.device
) -> None:
    """
    Mark the weights of optimizers that need full weights (Muon): levels shard the other ones.

    Raises:
        UsageError: no optimizer can train parts of weights, or the weights are sharded over tensor
            axes.
    """
    found = [
        group
        for group in optimizer.param_groups
        if not _is_elementwise(_owner_of(optimizer, group), group, device)
    ]
    if not found:
        return
    if len(found) == len(optimizer.param_groups):
        check_elementwise(optimizer, device)
    check_elementwise(optimizer, device, tiles_only=True)
    full = {id(param) for group in found for param in group["params"]}
    for weight in weights:
        weight.needs_full = id(weight.param) in full


def _owner_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> torch.optim.Optimizer:
    return optimizer.owner_of(group) if isinstance(optimizer, ComposedOptimizer) else optimizer


def _is_elementwise(optimizer: Any, group: Mapping[str, Any], device: torch.device) -> bool:
    full = _try_two_steps(optimizer, group, device, 1)
    parts = _try_two_steps(optimizer, group, device, 2)
    return full is not None and parts is not None and torch.equal(full, parts)


def _try_two_steps(
    optimizer: Any, group: Mapping[str, Any], device: torch.device, parts: int
) -> torch.Tensor | None:
    """
    Take two steps on a small matrix, in one part or in several.

    Returns:
        the matrix; None if the optimizer cannot step or changes nothing: then nothing is known.
    """
    twin = _clone_optimizer(optimizer, group)
    seeded = torch.Generator().manual_seed(1)
    values = torch.randn(16, 8, generator=seeded)
    grads = torch.randn(2, 16, 8, generator=seeded)
    tensors = [nn.Parameter(part.to(device)) for part in _split_values(values.clone(), parts)]
    twin.param_groups[0]["params"] = tensors
    _init_state(twin, type(optimizer), tensors)
    try:
        for grad in grads:
            for tensor, part in zip(tensors, _split_values(grad, parts), strict=True):
                tensor.grad = part.to(device)
            twin.step()
    except Exception:
        return None
    moved = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return None if torch.equal(moved.cpu(), values.reshape(-1)) else moved


def _split_values(values: torch.Tensor, parts: int) -> Iterable[torch.Tensor]:
    return [values] if parts == 1 else values.reshape(-1).split(64)


def _clone_optimizer(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Any:
    """
    Return an optimizer of the same kind with one group and no state; the original is not changed.
    """
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler's, which steps the original
    twin._optimizer_step_pre_hooks = OrderedDict()  # a run's refuse steps outside of it
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    ]
    rate = twin.param_groups[0].get("lr")
    # at the start of a warm-up the rate may be 0, with which all optimizers are equal
    if rate is not None:
        twin.param_groups[0]["lr"] = (
            torch.full_like(rate, TRIAL_LEARNING_RATE)
            if isinstance(rate, torch.Tensor)
            else TRIAL_LEARNING_RATE
        )
    return twin


def _init_state(twin: Any, kind: type, tensors: list[nn.Parameter]) -> None:
    """Give the clone the state that its kind makes at construction (Adagrad)."""
    if issubclass(kind, torch.optim.Adagrad):
        options = {
            key: value
            for key, value in twin.param_groups[0].items()
            if key in ("lr", "initial_accumulator_value")
        }
        twin.state.update(torch.optim.Adagrad(tensors, **options).state)


def state_bytes_per_element(optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """Return the bytes of optimizer state per element, measured on a small tensor."""
    if isinstance(optimizer, ComposedOptimizer):
        sizes = [
            sum(param.numel() for group in each.param_groups for param in group["params"])
            for each in optimizer.optimizers
        ]
        needs = [state_bytes_per_element(each, device) for each in optimizer.optimizers]
        return float(sum(map(operator.mul, sizes, needs)) / max(sum(sizes), 1))
    twin = _clone_optimizer(optimizer, optimizer.param_groups[0])
    tensor = nn.Parameter(torch.zeros(256, device=device))
    twin.param_groups[0]["params"] = [tensor]
    _init_state(twin, type(optimizer), [tensor])
    tensor.grad = torch.ones_like(tensor)
    try:
        twin.step()
    except Exception:
        return 0.0
    kept = [
        value
        for value in twin.state[tensor].values()
        if isinstance(value, torch.Tensor) and value.shape == tensor.shape
    ]
    return float(sum(value.numel() * value.element_size() for value in kept) / tensor.numel())


def remap_params(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], weights: Iterable[Weight]
) -> None:
    """
    Move an optimizer of the full model to this rank's shards; weights of other stages are dropped.

    Args:
        names: of the full model's parameters, by identity.
        weights: what this rank has, under the same names.
    """
    now = {weight.name: weight.param for weight in weights}
    for group in optimizer.param_groups:
        found = []
        for param in group["params"]:
            state = optimizer.state.pop(param, None)
            part = now.get(names[id(param)])
            if part is None:
                continue
            found.append(part)
            if state:
                shard = shard_of(part)
                optimizer.state[part] = {
                    key: shard.take_from(value)
                    if isinstance(value, torch.Tensor) and value.shape == shard.shape
                    else value
                    for key, value in state.items()
                }
        group["params"] = found


def shard_param_groups(
    optimizer: torch.optim.Optimizer, parts_of: Callable[[nn.Parameter], list[TrainedPart]]
) -> None:
    """Replace each parameter in the optimizer's groups by its parts, and shard existing state."""
    for group in optimizer.param_groups:
        found: list[nn.Parameter] = []
        for param in group["params"]:
            state = optimizer.state.pop(param, None)
            for part, segment in parts_of(param):
                found.append(part)
                if state:
                    optimizer.state[part] = {
                        key: _shard_state(value, param, part, segment)
                        for key, value in state.items()
                    }
        group["params"] = found


def _shard_state(
    value: Any, param: nn.Parameter, part: nn.Parameter, segment: FlatSegment | None
) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != param.shape or segment is None:
        return value
    return value.reshape(-1)[segment.start : segment.stop].clone().view(part.shape).to(part.device)
