"""Wrappers around a module's forward, which can be taken off again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Forward = Callable[..., Any]
_NOTE = "_pdrun_forward"


def wrap(module: nn.Module, make: Callable[[Forward], Forward]) -> None:
    """Put a wrapper around a module's forward; hooks stay outside of it."""
    vars(module).setdefault(_NOTE, vars(module).get("forward"))
    module.forward = make(module.forward)


def unwrap(model: nn.Module) -> None:
    """Take all wrappers off a model; what a user had put there comes to light again."""
    for module in model.modules():
        if _NOTE in vars(module):
            own = vars(module).pop(_NOTE)
            del module.forward
            if own is not None:
                module.forward = own
