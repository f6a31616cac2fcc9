"""
Values that pass over stages: results of a module that a later stage uses in addition to the
arguments of its first module, such as the skips of a U-Net.

They are found once, before the first step: the model's forward runs on fake tensors, which remember
from which modules they come.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pdrun.parallel.model.copies import copy_attributes
from pdrun.parallel.model.forward_wrapper import wrap_forward
from pdrun.parallel.pipeline.metadata import flatten_result
from pdrun.parallel.pipeline.split import StageSplit
from pdrun.parallel.pipeline.units import PlaceholderMode

ResultKey = tuple[str, int, int]
"""A tensor that a module returned: the module's name, which of its calls, which of its leaves."""
SOURCES = "_pdrun_sources"


@dataclass(frozen=True)
class StageSkip:
    """
    A result that crosses stage boundaries on its own.

    Attributes:
        key: the result.
        source: the stage that computes it.
        last: the last stage that uses it.
        users: all stages that use it.
        is_changed: code between units changes it in place after its unit has returned it.
    """

    key: ResultKey
    source: int
    last: int
    users: frozenset[int]
    is_changed: bool = False

    def crosses(self, stage: int) -> bool:
        """Return whether a stage sends it to the next one."""
        return self.source <= stage < self.last


@dataclass(frozen=True)
class ForwardTrace:
    """
    What one forward did.

    Attributes:
        skips: in a fixed order.
        calls: the units in the order in which they were first called.
        error: why the forward could not be traced; empty if it was.
    """

    skips: tuple[StageSkip, ...] = ()
    calls: tuple[str, ...] = ()
    error: str = ""


class _ForwardCaller(nn.Module):
    """A model and how it is called, as one module."""

    def __init__(self, model: nn.Module, forward: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.call_model = forward

    def forward(self, batch: Any) -> Any:
        return self.call_model(self.model, batch)


READS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        *("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"),
        *("nonzero", "unique", "masked_select"),
    )
)
"""What code reads values or shapes that depend on values with."""


class _SourceTracker(TorchFunctionMode):
    """Gives each result of a function the sources of its arguments, outside of units."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0
        """Number of units that are running."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = tensors_of((args, kwargs))
        sources = frozenset().union(*(sources_of(x) for x in given))
        if sources and func in READS and not isinstance(given[0], FakeTensor):
            raise RuntimeError(f"{func.__name__} reads a result of {min(sources)[0]}")
        result = func(*args, **(kwargs or {}))
        if self.depth:
            return result
        if sources:
            # an assignment to a part returns nothing: its first argument has changed
            for tensor in tensors_of(result) or given[:1]:
                setattr(tensor, SOURCES, sources)
        return result


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def sources_of(tensor: torch.Tensor) -> frozenset[ResultKey]:
    """Return the results from which a tensor was computed between units."""
    found: frozenset[ResultKey] = getattr(tensor, SOURCES, frozenset())
    return found


class _ForwardTracer:
    """Records which stage needs which results, while a forward runs."""

    def __init__(self, split: StageSplit) -> None:
        self.split = split
        self.clear()

    def clear(self) -> None:
        """Forget the last forward."""
        self.tracker = _SourceTracker()
        self.running: set[str] = set()
        """Units whose calls or forwards have begun."""
        self.calls: dict[str, None] = {}
        self.users: dict[ResultKey, set[int]] = {}
        self._counts = Counter[str]()
        self._entrance_ids: dict[int, set[int]] = {}
        self._kept: list[Any] = []
        """Arguments of entrances: their ids stay theirs."""
        self._returned: list[tuple[ResultKey, torch.Tensor, int]] = []
        """Results of units with their versions."""

    def enter_unit(self, name: str, stage: int, args: Any, kwargs: Any) -> None:
        """Note what a unit takes."""
        self.running.add(name)
        self.tracker.depth += 1
        if self.tracker.depth > 1:
            return
        self.calls.setdefault(name)
        tensors = tensors_of((args, kwargs))
        if stage not in self._entrance_ids:
            if self._entrance_ids:  # the stage before computes what this one is given
                self.note_use(max(self._entrance_ids), tensors)
            self._entrance_ids[stage] = {id(x) for x in tensors}
            self._kept.append(tensors)
        else:
            self.note_use(stage, tensors)

    def note_use(self, stage: int, tensors: Iterable[torch.Tensor]) -> None:
        """Note that a stage uses tensors."""
        for tensor in tensors:
            if id(tensor) in self._entrance_ids.get(stage, ()):
                continue
            for key in sources_of(tensor):
                if self.split.unit_stages[key[0]] < stage:
                    self.users.setdefault(key, set()).add(stage)

    def leave_unit(self, name: str, output: Any) -> None:
        """Give the results of a unit their keys."""
        self.running.discard(name)
        self.tracker.depth -= 1
        if self.tracker.depth:
            return
        call = self._counts[name]
        self._counts[name] += 1
        for place, leaf in enumerate(flatten_result(output)):
            if isinstance(leaf, torch.Tensor):
                setattr(leaf, SOURCES, frozenset({(name, call, place)}))
                self._returned.append(((name, call, place), leaf, leaf._version))

    def list_skips(self) -> tuple[StageSkip, ...]:
        """Return what later stages use, in a fixed order."""
        stages = self.split.unit_stages
        changed = {key for key, leaf, version in self._returned if leaf._version != version}
        return tuple(
            StageSkip(key, stages[key[0]], max(users), frozenset(users), key in changed)
            for key, users in sorted(self.users.items())
        )


def trace_forward(
    model: nn.Module,
    split: StageSplit,
    forward: Callable[[nn.Module, Any], Any],
    batch: Any,
    device: torch.device,
) -> ForwardTrace:
    """
    Return the skips of a model, found on fake tensors.

    Args:
        model: the full model; its weights can be on the meta device. Hooks are added to it.
        forward: calls it with a batch.
        batch: the first micro-batch.
    """
    caller = _ForwardCaller(model, forward)
    dtypes = [param.dtype for param in model.parameters() if param.is_floating_point()]

    def widen(x: torch.Tensor) -> torch.Tensor:
        # the batch has the type in which the run computes, the copy that of the given model
        is_narrow = x.is_floating_point() and bool(dtypes) and x.itemsize < dtypes[0].itemsize
        return x.to(dtypes[0]) if is_narrow else x

    batch = pytree.tree_map_only(torch.Tensor, widen, batch)
    tracer = _ForwardTracer(split)
    for name, stage in split.unit_stages.items():
        _add_hooks(model.get_submodule(name), name, stage, tracer)
    error = _run_on_fakes(caller, batch, device, tracer, is_all_fake=True)
    if error:  # a decision on the batch: what depends on nothing else is computed
        tracer.clear()
        error = _run_on_fakes(caller, batch, device, tracer, is_all_fake=False)
    if error:
        return ForwardTrace(error=error)
    return ForwardTrace(tracer.list_skips(), tuple(tracer.calls))


def _run_on_fakes(
    caller: _ForwardCaller,
    batch: Any,
    device: torch.device,
    tracer: _ForwardTracer,
    is_all_fake: bool,
) -> str:
    """Run the forward; return why it could not run, or nothing."""
    fake_mode = PlaceholderMode()
    generators: dict[str, Any] = {"devices": []}
    if device.type != "cpu":
        generators = {"devices": [device], "device_type": device.type}
    try:
        with torch.random.fork_rng(**generators), torch.no_grad():
            with fake_mode:
                state = {
                    name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
                    for name, x in caller.named_parameters()
                }
            for name, x in caller.named_parameters():
                copy_attributes(x, state[name])
            mode = fake_mode if is_all_fake else contextlib.nullcontext()
            with mode, tracer.tracker:
                output = functional_call(caller, state, (batch,))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    tracer.note_use(tracer.split.stage_count - 1, tensors_of_result(output))
    return ""


def tensors_of_result(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a module's result, whatever containers it has."""
    return [leaf for leaf in flatten_result(value) if isinstance(leaf, torch.Tensor)]


def _add_hooks(module: nn.Module, name: str, stage: int, tracer: _ForwardTracer) -> None:
    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        tracer.enter_unit(name, stage, args, kwargs)

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tracer.leave_unit(name, output)

    def divert(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if name in tracer.running:
                return own(*args, **kwargs)
            enter(module, args, kwargs)  # code calls module.forward(x): no hook runs
            output = own(*args, **kwargs)
            leave(module, args, kwargs, output)
            return output

        return forward

    wrap_forward(module, divert)
    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, with_kwargs=True)
