"""
Wrappers around a module's forward that can be removed again, and hooks that copies of a module do
not have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Forward = Callable[..., Any]
COMPILED_MARK = "_pdrun_is_compiled"
"""Attribute of modules whose forward torch.compile compiles, also in copies without it."""
_ORIGINAL_ATTRIBUTE = "_pdrun_forward"


def wrap_forward(module: nn.Module, make: Callable[[Forward], Forward]) -> None:
    """Put a wrapper around a module's forward; hooks stay outside it."""
    vars(module).setdefault(_ORIGINAL_ATTRIBUTE, vars(module).get("forward"))
    module.forward = make(module.forward)


def unwrap_forwards(model: nn.Module) -> None:
    """Remove all wrappers from a model; a forward that the user had set is restored."""
    for module in model.modules():
        if _ORIGINAL_ATTRIBUTE in vars(module):
            own = vars(module).pop(_ORIGINAL_ATTRIBUTE)
            del module.forward
            if own is not None:
                module.forward = own


class RunHook:
    """A hook that belongs to one run; in a copy of its module it does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        """Call the function of the run."""
        return self.function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> RunHook:
        """Return a hook that does nothing."""
        return RunHook(ignore_call)

    def __reduce__(self) -> tuple[type[RunHook], tuple[Callable[..., Any]]]:
        """Pickle a hook that does nothing."""
        return RunHook, (ignore_call,)


def ignore_call(*args: Any) -> None:
    """Do nothing, as the hook of a copied module."""


def exclude_hooks() -> None:
    """Keep torch.compile, if a program uses it, from tracing hooks of runs."""
    call: Any = RunHook.__call__
    if "torch._dynamo" in sys.modules and not hasattr(call, "_torchdynamo_disable"):
        setattr(RunHook, "__call__", torch.compiler.disable(call))  # noqa: B010
