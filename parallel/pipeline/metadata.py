"""
The record of a stage boundary: what the next stage must know in addition to the tensors. JSON text.

A record has:

* the module at whose call the stage ended, and the number of dropouts so far;
* which arguments of that call are tensors that are sent;
* the form of the results of all modules called so far. The next stage runs the model's ``forward``
  from the start, with placeholders of these forms.
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
    A tensor that is sent: its index among the leaves of the arguments, and whether it needs a
    gradient.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool


@dataclass(frozen=True)
class BoundaryRecord:
    """
    The description of a stage boundary.

    Attributes:
        next_module: the module at whose call the stage ended.
        leaf_count: number of leaves of the call's arguments.
        sent: those that are sent.
        dropout_calls: dropouts so far.
        returned: (module, form of its result), in the order of the calls.
    """

    next_module: str
    leaf_count: int
    sent: tuple[SentTensor, ...]
    dropout_calls: int
    returned: tuple[tuple[str, ValueForm], ...]
    placeholders: dict[tuple[str, int], Any] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Placeholders of the returned values, created on first use; see `StageForward`."""

    def encode(self) -> torch.Tensor:
        """Return the record as a tensor of bytes."""
        sent = [[one.index, list(one.shape), str(one.dtype), one.needs_grad] for one in self.sent]
        text = json.dumps(
            [self.next_module, self.leaf_count, sent, self.dropout_calls, self.returned]
        )
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    @staticmethod
    def decode(data: torch.Tensor) -> BoundaryRecord:
        """Return the record of a tensor of bytes."""
        door, leaves, sent, calls, returned = json.loads(bytes(data.cpu().tolist()))
        tensors = tuple(
            SentTensor(index, tuple(shape), dtype_of(kind), grad)
            for index, shape, kind, grad in sent
        )
        return BoundaryRecord(
            door, leaves, tensors, calls, tuple((name, form) for name, form in returned)
        )


def dtype_of(text: str) -> torch.dtype:
    """Return the type with this ``str(dtype)``."""
    found = getattr(torch, text.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found


def form_of(value: Any, name: str) -> ValueForm:
    """
    Return the form of a module's result.

    Raises:
        UsageError: it is not made of tensors and plain values in lists, tuples and dicts.
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
        hint=(
            "modules at stage boundaries must return tensors and plain values, in tuples, lists or"
            " dicts"
        ),
    )


def build_value(form: ValueForm, tensor: Callable[[tuple[int, ...], torch.dtype], Any]) -> Any:
    """Return a value of a form; ``tensor`` makes each tensor from shape and type."""
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
