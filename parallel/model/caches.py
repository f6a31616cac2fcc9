"""
Caches of keys and values, which models of the transformers library fill by default.

Training does not read them. Recomputation would fill a cache twice, and an exported graph cannot
return one, so both compute without: ``config.use_cache`` is False then.
"""

from __future__ import annotations

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
