"""
What one stage tells the next about a micro-batch, besides the tensors: text, never code.

A record says at which module the model was left and how many dropouts came before; which of the
arguments of that module's call are tensors that travel; and what every module called so far
returned, so that the next stage, which runs the model's ``forward`` from its beginning, has
something of the same shape to put in their places.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from pdrun.errors import UsageError

API_NAME = "pdrun.Pipeline"
ValueForm = list[Any]
"""
The form of a value: ``["tensor", shape, dtype]``, ``["list", forms]``, ``["tuple", forms]``,
``["dict", keys, forms]`` or ``["plain", value]``.
"""


@dataclass(frozen=True)
class SentTensor:
    """
    A tensor that travels: its place among the leaves of the arguments, and whether its gradient
    comes back.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool


@dataclass(frozen=True)
class BoundaryRecord:
    """
    What a stage tells the next.

    Attributes:
        door: the module at whose call the model was left.
        leaves: number of leaves of the call's arguments.
        sent: those that travel.
        calls: dropouts so far.
        returned: (module, form of what it returned), in the order of the calls.
    """

    next_module: str
    leaf_count: int
    sent: tuple[SentTensor, ...]
    dropout_calls: int
    returned: tuple[tuple[str, ValueForm], ...]
    placeholders: dict[tuple[str, int], Any] = field(
        default_factory=dict, compare=False, repr=False
    )
    """What stands for the returned values, made when it is first wanted; see `Pass`."""

    def encode(self) -> torch.Tensor:
        """Return the record as bytes, in a tensor."""
        sent = [[one.index, list(one.shape), str(one.dtype), one.needs_grad] for one in self.sent]
        text = json.dumps(
            [self.next_module, self.leaf_count, sent, self.dropout_calls, self.returned]
        )
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    @staticmethod
    def decode(told: torch.Tensor) -> BoundaryRecord:
        """Return the record that bytes stand for."""
        door, leaves, sent, calls, returned = json.loads(bytes(told.cpu().tolist()))
        tensors = tuple(
            SentTensor(index, tuple(shape), dtype_of(kind), grad)
            for index, shape, kind, grad in sent
        )
        return BoundaryRecord(
            door, leaves, tensors, calls, tuple((name, form) for name, form in returned)
        )


def dtype_of(text: str) -> torch.dtype:
    """Return the type that ``str(dtype)`` told of."""
    found = getattr(torch, text.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found


def form_of(value: Any, name: str) -> ValueForm:
    """
    Return the form of what a module returned.

    Raises:
        UsageError: it is something else than tensors and plain values in lists, tuples and dicts.
    """
    if isinstance(value, torch.Tensor):
        return ["tensor", list(value.shape), str(value.dtype)]
    if type(value) in (list, tuple):
        return [
            "list" if isinstance(value, list) else "tuple",
            [form_of(one, name) for one in value],
        ]
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return ["dict", list(value), [form_of(one, name) for one in value.values()]]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["plain", value]
    raise UsageError(
        f"{name} returns a {type(value).__name__}",
        where=API_NAME,
        hint="modules at which a model is cut return tensors and plain values, in tuples, lists or dicts",
    )


def build_value(form: ValueForm, tensor: Callable[[tuple[int, ...], torch.dtype], Any]) -> Any:
    """Return a value of a form, with what ``tensor`` makes of shape and type for each tensor."""
    kind = form[0]
    if kind == "tensor":
        return tensor(tuple(form[1]), dtype_of(form[2]))
    if kind == "plain":
        return form[1]
    values = [build_value(one, tensor) for one in form[-1]]
    if kind == "list":
        return values
    if kind == "tuple":
        return tuple(values)
    return dict(zip(form[1], values, strict=True))
