"""
The user's hooks on modules while a model is exported.

Hooks of the model itself run around its forward and stay out of the graph. Hooks of a submodule are
called with the inputs and outputs of its segment of the graph (`segments`). They can look at them.
They must not change them: the change would happen in the graph and around the segment. The backward
pass of a graph has no submodules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.operators.graph.constraints import ModuleSharding

OPERATORS_API = "pdrun.Operators"
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """
    While this lasts, a model can be called for an export: its own hooks are removed, those of
    submodules are watched.

    Raises:
        UsageError: a submodule has a backward hook, or a hook that changes its input or output.
    """
    saved: list[tuple[nn.Module, str, Any]] = []
    changed: list[str] = []
    try:
        for name, module in model.named_modules():
            for kind in (*FORWARD_HOOKS, *BACKWARD_HOOKS):
                hooks = getattr(module, kind)
                if name and hooks and kind in BACKWARD_HOOKS:
                    raise UsageError(
                        f"{name} has a backward hook, which pdrun.Operators does not support: the"
                        " backward pass of a graph calls no modules",
                        where=OPERATORS_API,
                        hint="use a hook on a tensor in forward, or pdrun.Strategy",
                    )
                saved.append((module, kind, hooks))
                own_keys = {
                    key
                    for key, hook in hooks.items()
                    if isinstance(getattr(hook, "__self__", None), ModuleSharding)
                }
                watched: OrderedDict[int, Callable[..., Any]] = OrderedDict()
                for key, hook in hooks.items():
                    if key in own_keys:
                        watched[key] = hook
                    elif name:
                        watched[key] = _watch_hook(hook, name, changed)
                setattr(module, kind, watched)
        yield
    finally:
        for module, kind, hooks in saved:
            setattr(module, kind, hooks)
    if changed:
        raise UsageError(
            f"{changed[0]} has a hook that changes its input or output, which pdrun.Operators does"
            " not support",
            where=OPERATORS_API,
            hint="move the change into forward; hooks can only look at tensors",
        )


def _watch_hook(hook: Callable[..., Any], name: str, changed: list[str]) -> Callable[..., Any]:
    def watched_hook(*args: Any, **kwargs: Any) -> Any:
        found = hook(*args, **kwargs)
        if found is not None:
            changed.append(name)
        return found

    return watched_hook
