"""
Caches of keys and values, which models of the transformers library fill by default.

Training does not read them. Recomputation would fill a cache twice, and an exported graph cannot
return one, so both compute without: ``config.use_cache`` is False then. Some models (XLM) make a
cache whatever it says. An empty one has nothing to read: a layer that can do without gets none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

CACHE_OPTION = "use_cache"


def turn_off_caches(model: nn.Module) -> list[str]:
    """
    Set ``config.use_cache = False`` on a model and its submodules, where it is True.

    Returns:
        The names of the modules, "" for the model.
    """
    changed = []
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if getattr(config, CACHE_OPTION, None) is True:
            setattr(config, CACHE_OPTION, False)
            changed.append(name)
    return changed


def is_cache(value: Any) -> bool:
    """Return whether an argument of a layer is a cache of the transformers library."""
    return (
        type(value).__name__.endswith("Cache")
        and callable(getattr(value, "update", None))
        and callable(getattr(value, "get_seq_length", None))
    )


def leave_out_caches(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """
    Return the arguments of a layer with None for each empty cache that it can do without.

    Args:
        forward: of the layer.
    """
    signature = inspect.signature(forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:  # the call itself will say why
        return args, kwargs
    for name, value in bound.arguments.items():
        if is_cache(value) and signature.parameters[name].default is None and _is_empty(value):
            bound.arguments[name] = None
    return bound.args, bound.kwargs


def _is_empty(cache: Any) -> bool:
    try:
        return int(cache.get_seq_length()) == 0
    except Exception:  # a class of a user's own, with other arguments
        return False
