"""
An optimizer made for a model's parameters, turned to other tensors: shards and masters.

The user's function gets the model's own parameters, so that groups may be formed by name, shape or
module. Then each parameter in the groups is replaced by the tensors that this rank trains for it.
That is right for *elementwise* optimizers only, whose update of an element depends on that
element's gradient and state alone; others are refused. Whether one is elementwise is tried out: two
steps on a small tensor, whole and in two parts, must give the same bits.
"""

from __future__ import annotations

import copy
from collections import defaultdict
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
"""Learning rate at which an optimizer is tried out."""
TrainedPart = tuple[nn.Parameter, "FlatSegment | None"]
"""A tensor to train and the segment of the parameter that it is; None where it is all of it."""


def build_optimizer(optimizer: Any, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """
    Return the optimizer that a user's function makes, or the one that he gives.

    Raises:
        UsageError: it is no optimizer, trains a tensor that is not the model's, or needs a closure.
    """
    given = isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer)
    built = optimizer if given else optimizer(list(params))
    if not isinstance(built, torch.optim.Optimizer):
        raise UsageError(
            f"the optimizer is a {type(built).__name__}",
            where=PARALLELIZE,
            hint="optimizer=lambda params: AdamW(params, lr=3e-4)",
        )
    if isinstance(built, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS needs a closure, and a step of it several passes",
            where=PARALLELIZE,
            hint="use a first-order optimizer",
        )
    known = {id(param) for param in params}
    for group in built.param_groups:
        for param in group["params"]:
            if id(param) not in known:
                shape = tuple(param.shape)
                raise UsageError(
                    f"the optimizer trains a tensor of shape {shape} that is no trained weight of the model",
                    where=PARALLELIZE,
                    hint="make it from the parameters that it is given",
                )
    return built


def check_elementwise(
    optimizer: torch.optim.Optimizer, device: torch.device, *, tiles_only: bool = False
) -> None:
    """
    Try out that the optimizer may work on parts of weights.

    Args:
        tiles_only: only groups that hold a weight that is cut over tensor axes need that.

    Raises:
        UsageError: it may not; names it.
    """
    for group in optimizer.param_groups:
        if tiles_only and all(shard_of(param).is_full for param in group["params"]):
            continue
        whole = _try_two_steps(optimizer, group, device, 1)
        parts = _try_two_steps(optimizer, group, device, 2)
        if whole is None or parts is None or not torch.equal(whole, parts):
            raise UsageError(
                f"{type(optimizer).__name__} looks at more than one element at a time: its state cannot be cut",
                where=PARALLELIZE,
                hint=("" if tiles_only else "optimizer_level=0, or ")
                + "an elementwise optimizer such as AdamW or SGD",
            )


def _try_two_steps(
    optimizer: Any, group: Mapping[str, Any], device: torch.device, parts: int
) -> torch.Tensor | None:
    """
    Take two steps on a small matrix, in one part or in several.

    Return it, or None if the optimizer can't, or left it as it was: then nothing is known of it.
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
    Return an optimizer of the same kind with one group and no state; the original is not touched.
    """
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    ]
    rate = twin.param_groups[0].get("lr")
    if (
        rate is not None
    ):  # at the begin of a warm-up it may be nothing, at which every optimizer would look alike
        twin.param_groups[0]["lr"] = (
            torch.full_like(rate, TRIAL_LEARNING_RATE)
            if isinstance(rate, torch.Tensor)
            else TRIAL_LEARNING_RATE
        )
    return twin


def _init_state(twin: Any, kind: type, tensors: list[nn.Parameter]) -> None:
    """Give the twin the state that its kind makes at construction (Adagrad)."""
    if issubclass(kind, torch.optim.Adagrad):
        options = {
            key: value
            for key, value in twin.param_groups[0].items()
            if key in ("lr", "initial_accumulator_value")
        }
        twin.state.update(torch.optim.Adagrad(tensors, **options).state)


def state_bytes_per_element(optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """
    Return the bytes of state an element that the optimizer keeps, tried out on a small tensor.
    """
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
    Turn an optimizer that was made for the whole model to this rank's tiles; weights of other
    stages are dropped.

    Args:
        names: of the whole model's parameters, by identity.
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
                tile = shard_of(part)
                optimizer.state[part] = {
                    key: tile.take_from(value)
                    if isinstance(value, torch.Tensor) and value.shape == tile.shape
                    else value
                    for key, value in state.items()
                }
        group["params"] = found


def shard_param_groups(
    optimizer: torch.optim.Optimizer, parts_of: Callable[[nn.Parameter], list[TrainedPart]]
) -> None:
    """
    Replace each parameter in the optimizer's groups by its parts, and cut the state that is there
    already.
    """
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
