"""
A weight without memory (level 3): its shape can be read, its values cannot.

While its unit is released, a parameter is an instance of a subclass of its class. Any function of
torch that needs values asks the weight's owner first: it gathers the weight, or raises an error
that names it. Values are never wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pdrun.errors import UsageError
from pdrun.parallel.comm.watchdog import find_user_frame

VALUE_ATTRIBUTES = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Attributes of tensors that are values; the others describe a tensor."""
SHAPE_FUNCTIONS = {
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "stride",
    "__len__",
    "__hash__",
    "__repr__",
    "element_size",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "is_contiguous",
    "get_device",
    "requires_grad_",
    "retain_grad",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "backward",
    "grad",
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_tensor",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
}
"""Functions that need no value of a tensor."""
EDGE_FUNCTIONS = {"view_as", "expand_as"}
ReadHandler = Callable[[str], None]
"""Gathers the weight of a name, whose values are read; or raises."""


class ReleasedWeight:
    """The part of a released parameter's class that notices reads."""

    _pdrun_name: str
    _pdrun_read: ReadHandler

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Gather the weights whose values a function reads, then call it."""
        kwargs = kwargs or {}
        if not reads_values(func, args):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, ReleasedWeight):
                leaf._pdrun_read(leaf._pdrun_name)
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        """Describe the weight without its values."""
        shape = tuple(self.shape)  # type: ignore[attr-defined]
        return f"Parameter({self._pdrun_name}, shape={shape}, released)"


def reads_values(func: Any, args: Any) -> bool:
    """Return whether a function of torch reads values of its tensors, not only their shapes."""
    owner: Any = getattr(func, "__self__", None)
    if type(owner).__name__ == "getset_descriptor":
        return owner.__name__ in VALUE_ATTRIBUTES
    if isinstance(owner, property):
        return getattr(owner.fget, "__name__", "") in VALUE_ATTRIBUTES
    name = getattr(func, "__name__", "")
    if name in EDGE_FUNCTIONS and len(args) == 2 and args[0] is args[1]:
        return False  # the way to a leaf's place in the graph of autograd
    return name not in SHAPE_FUNCTIONS


_classes: dict[type, type] = {}


def mark_released(param: nn.Parameter, name: str, read: ReadHandler) -> None:
    """
    Make a parameter report reads of its values.

    Args:
        read: called before a read; it must call `mark_gathered`, or raise.
    """
    kind = type(param)
    if issubclass(kind, ReleasedWeight):
        return
    if kind not in _classes:
        about = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _classes[kind] = type(kind.__name__, (ReleasedWeight, kind), about)
    released: Any = param
    released._pdrun_name, released._pdrun_read = name, read
    released.__class__ = _classes[kind]


def exclude_released() -> None:
    """Keep torch.compile, if a program uses it, from tracing code that reads a released weight."""
    if "torch._dynamo" in sys.modules:
        excluded = getattr(torch._dynamo.config, "nontraceable_tensor_subclasses", None)
        if excluded is not None:
            excluded.update(_classes.values())


def mark_gathered(param: nn.Parameter) -> None:
    """Make a parameter an ordinary one again."""
    kind: Any = type(param)
    if issubclass(kind, ReleasedWeight):
        gathered: Any = param
        gathered.__class__ = kind.__mro__[2]
        del gathered._pdrun_name, gathered._pdrun_read


def refuse_read(name: str) -> UsageError:
    """Return the error about a read outside of a forward pass."""
    what = f"{name} is read outside of a forward pass, when level 3 has only shards of it"
    hint = "on every rank, put the code into `with run.gathered_weights():`, or use "
    hint += "run.full_weights(), run.export(FILE) or run.model(...)"
    return UsageError(what, where=find_user_line() or "pdrun.Run", hint=hint)


def find_user_line() -> str:
    """Return the file and line of the caller's program, or empty text."""
    frame = find_user_frame(sys._getframe(1))
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
