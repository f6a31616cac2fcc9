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
from pdrun.parallel.model.shards import tile_of
from pdrun.parallel.model.weights import Weight
from pdrun.parallel.zero.flat_layout import Segment

WHERE = "pdrun.parallelize"
RATE = 1e-2
"""Learning rate at which an optimizer is tried out."""
Part = tuple[nn.Parameter, "Segment | None"]
"""A tensor to train and the segment of the parameter that it is; None where it is all of it."""


def make(optimizer: Any, params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """
    Return the optimizer that a user's function makes, or the one that he gives.

    Raises:
        UsageError: it is no optimizer, trains a tensor that is not the model's, or needs a closure.
    """
    given = isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer)
    made = optimizer if given else optimizer(list(params))
    if not isinstance(made, torch.optim.Optimizer):
        raise UsageError(
            f"the optimizer is a {type(made).__name__}",
            where=WHERE,
            hint="optimizer=lambda params: AdamW(params, lr=3e-4)",
        )
    if isinstance(made, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS needs a closure, and a step of it several passes",
            where=WHERE,
            hint="use a first-order optimizer",
        )
    known = {id(param) for param in params}
    for group in made.param_groups:
        for param in group["params"]:
            if id(param) not in known:
                shape = tuple(param.shape)
                raise UsageError(
                    f"the optimizer trains a tensor of shape {shape} that is no trained weight of the model",
                    where=WHERE,
                    hint="make it from the parameters that it is given",
                )
    return made


def check_elementwise(
    made: torch.optim.Optimizer, device: torch.device, *, tiles_only: bool = False
) -> None:
    """
    Try out that the optimizer may work on parts of weights.

    Args:
        tiles_only: only groups that hold a weight that is cut over tensor axes need that.

    Raises:
        UsageError: it may not; names it.
    """
    for group in made.param_groups:
        if tiles_only and all(tile_of(param).is_whole for param in group["params"]):
            continue
        whole = _try_out(made, group, device, 1)
        parts = _try_out(made, group, device, 2)
        if whole is None or parts is None or not torch.equal(whole, parts):
            raise UsageError(
                f"{type(made).__name__} looks at more than one element at a time: its state cannot be cut",
                where=WHERE,
                hint=("" if tiles_only else "optimizer_level=0, or ")
                + "an elementwise optimizer such as AdamW or SGD",
            )


def _try_out(
    made: Any, group: Mapping[str, Any], device: torch.device, parts: int
) -> torch.Tensor | None:
    """
    Take two steps on a small matrix, in one part or in several.

    Return it, or None if the optimizer can't, or left it as it was: then nothing is known of it.
    """
    twin = _twin(made, group)
    seeded = torch.Generator().manual_seed(1)
    values = torch.randn(16, 8, generator=seeded)
    grads = torch.randn(2, 16, 8, generator=seeded)
    tensors = [nn.Parameter(part.to(device)) for part in _split(values.clone(), parts)]
    twin.param_groups[0]["params"] = tensors
    _start_state(twin, type(made), tensors)
    try:
        for grad in grads:
            for tensor, part in zip(tensors, _split(grad, parts), strict=True):
                tensor.grad = part.to(device)
            twin.step()
    except Exception:
        return None
    moved = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    return None if torch.equal(moved.cpu(), values.reshape(-1)) else moved


def _split(values: torch.Tensor, parts: int) -> Iterable[torch.Tensor]:
    return [values] if parts == 1 else values.reshape(-1).split(64)


def _twin(made: torch.optim.Optimizer, group: Mapping[str, Any]) -> Any:
    """
    Return an optimizer of the same kind with one group and no state; the original is not touched.
    """
    twin = object.__new__(type(made))
    twin.__dict__.update(made.__dict__)
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    ]
    rate = twin.param_groups[0].get("lr")
    if (
        rate is not None
    ):  # at the begin of a warm-up it may be nothing, at which every optimizer would look alike
        twin.param_groups[0]["lr"] = (
            torch.full_like(rate, RATE) if isinstance(rate, torch.Tensor) else RATE
        )
    return twin


def _start_state(twin: Any, kind: type, tensors: list[nn.Parameter]) -> None:
    """Give the twin the state that its kind makes at construction (Adagrad)."""
    if issubclass(kind, torch.optim.Adagrad):
        options = {
            key: value
            for key, value in twin.param_groups[0].items()
            if key in ("lr", "initial_accumulator_value")
        }
        twin.state.update(torch.optim.Adagrad(tensors, **options).state)


def state_bytes(made: torch.optim.Optimizer, device: torch.device) -> float:
    """
    Return the bytes of state an element that the optimizer keeps, tried out on a small tensor.
    """
    twin = _twin(made, made.param_groups[0])
    tensor = nn.Parameter(torch.zeros(256, device=device))
    twin.param_groups[0]["params"] = [tensor]
    _start_state(twin, type(made), [tensor])
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


def follow(
    made: torch.optim.Optimizer, names: Mapping[int, str], weights: Iterable[Weight]
) -> None:
    """
    Turn an optimizer that was made for the whole model to this rank's tiles; weights of other
    stages are dropped.

    Args:
        names: of the whole model's parameters, by identity.
        weights: what this rank has, under the same names.
    """
    now = {weight.name: weight.param for weight in weights}
    for group in made.param_groups:
        found = []
        for param in group["params"]:
            state = made.state.pop(param, None)
            part = now.get(names[id(param)])
            if part is None:
                continue
            found.append(part)
            if state:
                tile = tile_of(part)
                made.state[part] = {
                    key: tile.take(value)
                    if isinstance(value, torch.Tensor) and value.shape == tile.shape
                    else value
                    for key, value in state.items()
                }
        group["params"] = found


def retarget(made: torch.optim.Optimizer, parts_of: Callable[[nn.Parameter], list[Part]]) -> None:
    """
    Replace each parameter in the optimizer's groups by its parts, and cut the state that is there
    already.
    """
    for group in made.param_groups:
        found: list[nn.Parameter] = []
        for param in group["params"]:
            state = made.state.pop(param, None)
            for part, segment in parts_of(param):
                found.append(part)
                if state:
                    made.state[part] = {
                        key: _cut(value, param, part, segment) for key, value in state.items()
                    }
        group["params"] = found


def _cut(value: Any, param: nn.Parameter, part: nn.Parameter, segment: Segment | None) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != param.shape or segment is None:
        return value
    return value.reshape(-1)[segment.start : segment.stop].clone().view(part.shape).to(part.device)
