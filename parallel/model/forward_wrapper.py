"""Wrappers around a module's forward that can be removed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
