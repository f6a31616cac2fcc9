"""
Models larger than memory: parameters without memory, filled where needed and sharded immediately.

Inside `empty_init` modules are built with parameters on torch's meta device. Buffers keep their
values, so that tables computed in a constructor (rotary positions, masks) are correct.

`parallelize` then fills one module after the other: the module initialises itself, and this rank
keeps its shard. Each module draws from a generator seeded by (seed, place in the model): the
weights are the same for any number of ranks, any level and any order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.model.shards import set_shard
from pdrun.parallel.model.weights import Weight
from pdrun.parallel.rng.hashing import mix_bits

API_NAME = "pdrun.parallelize"


@contextmanager
def empty_init() -> Iterator[None]:
    """Inside, modules get parameters without memory; buffers are not changed."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if (
            param is not None
            and param.device.type != "meta"
            and not isinstance(param, nn.UninitializedParameter)
        ):
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        original(module, name, param)

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = original


def _expand_buffers(model: nn.Module) -> None:
    """
    Give each element of a buffer its own memory: an expanded buffer (a mask, positions) cannot be
    written to.
    """
    copies: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and any(
                stride == 0 and size > 1
                for size, stride in zip(buffer.shape, _strides_of(buffer), strict=False)
            ):
                module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().contiguous())


def _strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout == torch.strided else ()


def move_model(model: nn.Module, device: torch.device, on_host: Sequence[nn.Module] = ()) -> bool:
    """
    Move what has memory to a device; return whether some parameter has none.

    Args:
        on_host: modules that stay on the host.

    Raises:
        UsageError: a buffer is on the meta device, so its value is unknown.
    """
    for name, buffer in model.named_buffers():
        if buffer.device.type == "meta":
            raise UsageError(
                f"the buffer {name} is on the meta device and has no value",
                where=API_NAME,
                hint="build the model inside pdrun.empty_init(), which leaves buffers alone",
            )
    _expand_buffers(model)
    empty = any(param.device.type == "meta" for param in model.parameters())
    if not empty and not on_host:
        model.to(device)
        return False
    staying = {id(part) for outer in on_host for part in outer.modules()}
    for module in model.modules():
        place = torch.device("cpu") if id(module) in staying else device
        for key, buffer in module.named_buffers(recurse=False):
            module._buffers[key] = buffer.to(place)
        for param in module.parameters(recurse=False):
            if param.device.type != "meta":
                param.data = param.data.to(place)
    return empty


class WeightInitializer:
    """
    Fills weights that are on the meta device.

    Args:
        model: the full model. The model that runs can have shards of its weights, under the same
            names.
        init: fills the parameters of a module; default: the module's ``reset_parameters``.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        seed: int,
        init: Callable[[nn.Module], Any] | None = None,
    ) -> None:
        self._device = device
        self._seed = seed
        self._init = init
        self._owners: dict[str, tuple[int, str, nn.Module]] = {}
        self._sharded_weights: dict[str, Weight] | None = None
        seen: dict[int, str] = {}
        for place, (name, module) in enumerate(model.named_modules()):
            for key, param in module.named_parameters(recurse=False):
                if param.device.type == "meta":
                    first = seen.setdefault(id(param), f"{name}.{key}" if name else key)
                    self._owners.setdefault(first, (place, name, module))

    def use_shards(self, weights: Sequence[Weight]) -> None:
        """
        Fill these weights with their shards of the model's weights; the model itself stays empty.
        """
        self._sharded_weights = {weight.name: weight for weight in weights}

    def fill_weights(self, weights: Sequence[Weight]) -> None:
        """
        Give these weights their first values; weights with values are not changed.

        Raises:
            UsageError: a module does not initialise itself, or not all of its parameters.
        """
        for weight in weights:
            if weight.param.device.type == "meta":
                place, name, module = self._owners[weight.name]
                if self._sharded_weights is None:
                    self._fill_module(place, name, module)
                else:
                    self._fill_shards(place, name, module)

    def _fill_module(self, place: int, name: str, module: nn.Module) -> None:
        made = {}
        for key, param in module.named_parameters(recurse=False):
            if param.device.type == "meta":
                torch.utils.swap_tensors(param, self._make_empty(param))
                made[key] = param
        self._init_module(place, name, module, made)

    def _fill_shards(self, place: int, name: str, module: nn.Module) -> None:
        """Fill a copy of a module and take this rank's shards from it."""
        stand_in = copy.copy(module)
        made = {
            key: self._make_empty(param) for key, param in module.named_parameters(recurse=False)
        }
        stand_in.__dict__["_parameters"] = {**module._parameters, **made}
        self._init_module(place, name, stand_in, made)
        for key, whole in made.items():
            weight = (self._sharded_weights or {}).get(f"{name}.{key}" if name else key)
            if weight is not None and weight.param.device.type == "meta":
                part = nn.Parameter(weight.shard.take_from(whole.detach()), weight.is_trained)
                torch.utils.swap_tensors(weight.param, part)
                set_shard(weight.param, weight.shard)

    def _make_empty(self, param: nn.Parameter) -> nn.Parameter:
        real = torch.empty(param.shape, dtype=param.dtype, device=self._device)
        return nn.Parameter(
            real.fill_(float("nan") if param.is_floating_point() else 0), param.requires_grad
        )

    def _init_module(
        self, place: int, name: str, module: nn.Module, made: dict[str, nn.Parameter]
    ) -> None:
        """Have a module fill its parameters, with a generator seeded for it."""
        init = (
            self._init
            or getattr(type(module), "reset_parameters", None)
            or getattr(type(module), "_reset_parameters", None)
        )
        if init is None:
            what = f"{name or 'the model'} ({type(module).__name__}) has no reset_parameters"
            raise UsageError(
                what, where=API_NAME, hint="init=lambda module: ... fills a module's own parameters"
            )
        kept = torch.get_rng_state()
        seed = mix_bits(self._seed, place, 6)
        torch.default_generator.manual_seed(seed)
        if self._device.type != "cpu":
            getattr(torch, self._device.type).manual_seed(seed)
        with torch.no_grad():
            init(module)
        torch.set_rng_state(kept)
        for key, param in made.items():
            if param.is_floating_point() and bool(torch.isnan(param).any()):
                raise UsageError(f"initialising {name} left {key} unfilled", where=API_NAME)
