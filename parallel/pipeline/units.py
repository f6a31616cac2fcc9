"""
Modules at stage boundaries, and modules whose weights are on another stage.

A module stays the same object under its name, and an instance of its class. Its class becomes a
subclass, which asks the running stage what a call means, and reads remote weights as placeholders.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from pdrun.errors import UsageError
from pdrun.parallel.pipeline.metadata import API_NAME


class PlaceholderMode(FakeTensorMode):
    """
    What computes with placeholders.

    A placeholder that is written into a real tensor is lost: the tensor keeps its old values. With
    a trace, the placeholder is the real value wherever that is used. Without one it is refused.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.refuses_writes = False

    def dispatch(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = MappingProxyType({})
    ) -> Any:
        """Run an operator without data; checks of values hold (those of torch's distributions)."""
        if self.refuses_writes and func._schema.is_mutable:
            for given, declared in zip(args, func._schema.arguments, strict=False):
                is_written = declared.alias_info is not None and declared.alias_info.is_write
                if is_written and isinstance(given, torch.Tensor):
                    self._check_written(func, given, args)
        found = super().dispatch(func, types, args, kwargs)
        if func is torch.ops.aten._is_all_true.default and isinstance(found, FakeTensor):
            found.constant = torch.ones((), dtype=torch.bool)
        return found

    def _check_written(self, func: Any, given: torch.Tensor, args: Any) -> None:
        if isinstance(given, (FakeTensor, nn.Buffer)):
            return
        if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(args)):
            raise UsageError(
                "a stage writes a value that an earlier stage computed into a tensor"
                f" ({func._schema.name})",
                where=API_NAME,
                hint="compute a new tensor (torch.cat, torch.where, x + y), or write inside of a"
                " module",
            )


class RunningForward(Protocol):
    """The forward pass of a stage, as the modules of the model see it."""

    def call_unit(
        self,
        unit: StageUnit,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Do what the call of a unit means in the stage."""
        ...

    def note_remote_read(self, name: str) -> None:
        """Note that a weight of another stage was read."""
        ...


FindRunning = Callable[[], RunningForward | None]
"""Returns the forward pass that runs now; None outside of one."""


class StageUnit:
    """
    What a module at which the model can be split knows.

    Attributes:
        lookup: returns the forward pass that runs now.
        name: of the module.
        stage: of the module.
        own_stages: the stages of this rank.
        is_called: the module runs, through ``module(x)`` or ``module.forward(x)``.
    """

    def __init__(
        self, lookup: FindRunning, name: str, stage: int, own_stages: tuple[int, ...]
    ) -> None:
        self.find_running = lookup
        self.name = name
        self.stage = stage
        self.own_stages = own_stages
        self.is_called = False

    def pass_call(
        self,
        running: RunningForward,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hooks: Iterable[Callable[..., Any]] = (),
    ) -> Any:
        """
        Have the running stage do what the call of this module means.

        Args:
            hooks: to call if the result is that of another stage.
        """
        is_computed = False

        def compute(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_computed
            self.is_called = is_computed = True
            try:
                return inner(*args, **kwargs)
            finally:
                self.is_called = False

        found = running.call_unit(self, compute, args, kwargs)
        if not is_computed:
            for hook in hooks:
                hook(args, found)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> StageUnit:
        """Return itself."""
        return self


@dataclass(frozen=True)
class RemoteTensor:
    """A weight or buffer of another stage."""

    name: str
    """In the full model."""
    find_running: FindRunning
    placeholder: torch.Tensor
    is_weight: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteTensor:
        """Return itself."""
        return self


class RemoteWeights:
    """A module whose weights are on another stage: they read as placeholders."""

    def __getattr__(self, name: str) -> Any:
        remote: dict[str, RemoteTensor] = self.__dict__.get("_pdrun_remote", {})
        if name not in remote:
            return super().__getattr__(name)  # type: ignore[misc]
        running = remote[name].find_running()
        if running is not None:
            running.note_remote_read(remote[name].name)
        return remote[name].placeholder

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """
        Return the weights of this stage; in a forward pass placeholders if it has none of them.

        Forwards read the type or device of a module from its first weight (``module.dtype`` of
        transformers).
        """
        found = super().named_parameters(prefix, recurse, remove_duplicate)  # type: ignore[misc]
        first = next(found, None)
        if first is None:
            yield from _remote_weights(self, prefix, recurse)
        else:
            yield first
            yield from found


def has_remote_tensors(module: nn.Module) -> bool:
    """Return whether a module or one inside it has weights or buffers of another stage."""
    return any("_pdrun_remote" in each.__dict__ for each in module.modules())


def _remote_weights(
    module: nn.Module, prefix: str, recurse: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the placeholders of a module's weights while a stage runs."""
    modules = module.named_modules(prefix=prefix) if recurse else [(prefix, module)]
    for name, each in modules:
        remote: dict[str, RemoteTensor] = each.__dict__.get("_pdrun_remote", {})
        for own, tensor in remote.items():
            if tensor.find_running() is None:
                return
            if tensor.is_weight:
                yield f"{name}.{own}" if name else own, tensor.placeholder


class StageModule(RemoteWeights):
    """A module at which the model can be split."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do what a call means in the running stage; outside of one, the normal call."""
        unit: StageUnit = self.__dict__["_pdrun_unit"]
        running = unit.find_running()
        if running is not None:
            call = super().__call__  # type: ignore[misc]
            return unit.pass_call(running, call, args, kwargs, _capturing_hooks(self))
        if unit.stage not in unit.own_stages:
            what = (
                f"{unit.name} is on stage {unit.stage}, and this rank has {list(unit.own_stages)}"
            )
            raise UsageError(
                what, where=API_NAME, hint="run.step and run.evaluate run a model in stages"
            )
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


def _capturing_hooks(module: Any) -> Iterator[Callable[..., Any]]:
    """
    Yield the hooks by which transformers collects a module's results, such as ``hidden_states``.

    They are chosen by index later: one that is left out would shift the others.
    """
    for hook in module._forward_hooks.values():
        if getattr(hook, "__module__", "") == "transformers.utils.output_capturing":
            yield functools.partial(hook, module)


def stage_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a module class for modules at which the model can be split."""
    return _mix_class(StageModule, kind)


def remote_class(kind: type[nn.Module]) -> type[nn.Module]:
    """
    Return the subclass of a module class for modules whose weights are on another stage, and for
    those with such modules only.
    """
    return _mix_class(RemoteWeights, kind)


_classes: dict[tuple[type, type], type[nn.Module]] = {}


def _mix_class(mixin: type, kind: type[nn.Module]) -> type[nn.Module]:
    if issubclass(kind, mixin):  # a second weight of the module is on another stage
        return kind
    if (mixin, kind) not in _classes:
        about: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        if mixin is StageModule:
            about["forward"] = _divert_forward(kind.forward)
        _classes[mixin, kind] = type(kind.__name__, (mixin, kind), about)
    return _classes[mixin, kind]


def _divert_forward(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a class's forward that is a call of the module where code calls it directly."""

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return own(self, *args, **kwargs)
        unit: StageUnit = self.__dict__["_pdrun_unit"]
        running = unit.find_running()
        if running is None or unit.is_called:
            return own(self, *args, **kwargs)
        return unit.pass_call(running, functools.partial(own, self), args, kwargs)

    return forward
