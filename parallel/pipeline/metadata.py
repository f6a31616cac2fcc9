"""
The record of a stage boundary: what the next stage must know in addition to the tensors. JSON text.

A record has:

* the module at whose call the stage ended, and the number of dropouts so far;
* which arguments of that call are tensors that are sent;
* the form of the results of all modules called so far. The next stage runs the model's ``forward``
  from the start, with placeholders of these forms.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from pdrun.errors import UsageError

API_NAME = "pdrun.Pipeline"
ValueForm = list[Any]
"""
The form of a value: ``["tensor", shape, dtype]``, ``["list", forms]``, ``["tuple", forms]``,
``["dict", keys, forms]``, ``["plain", value]``, or ``["object", module, class, keys, forms]`` of a
dataclass, a named tuple, or a dict of another class, such as ModelOutput of transformers.
"""


@dataclass(frozen=True)
class SentTensor:
    """
    A tensor that is sent: its index among the leaves of the arguments (-1: it is a skip), and
    whether it needs a gradient.
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
        skips: results that are sent in addition: (module, call, leaf), and their index in ``sent``.
    """

    next_module: str
    leaf_count: int
    sent: tuple[SentTensor, ...]
    dropout_calls: int
    returned: tuple[tuple[str, ValueForm], ...]
    skips: tuple[tuple[tuple[str, int, int], int], ...] = ()
    placeholders: dict[tuple[str, int], Any] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Placeholders of the returned values, created on first use; see `StageForward`."""

    def encode(self) -> torch.Tensor:
        """Return the record as a tensor of bytes."""
        sent = [[one.index, list(one.shape), str(one.dtype), one.needs_grad] for one in self.sent]
        text = json.dumps(
            [
                *(self.next_module, self.leaf_count, sent),
                *(self.dropout_calls, self.returned, self.skips),
            ]
        )
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    @staticmethod
    def decode(data: torch.Tensor) -> BoundaryRecord:
        """Return the record of a tensor of bytes."""
        door, leaves, sent, calls, returned, skips = json.loads(bytes(data.cpu().tolist()))
        tensors = tuple(
            SentTensor(index, tuple(shape), dtype_of(kind), grad)
            for index, shape, kind, grad in sent
        )
        return BoundaryRecord(
            door,
            leaves,
            tensors,
            calls,
            tuple((name, form) for name, form in returned),
            tuple((tuple(key), slot) for key, slot in skips),
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
    fields = _fields_of(value)
    if fields is not None:
        kind = type(value)
        forms = [form_of(one, name) for one in fields.values()]
        return ["object", kind.__module__, kind.__qualname__, list(fields), forms]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["plain", value]
    raise UsageError(
        f"{name} returns a {type(value).__name__}",
        where=API_NAME,
        hint=(
            "modules at stage boundaries must return tensors and plain values, in tuples, lists,"
            " dicts or dataclasses"
        ),
    )


def _fields_of(value: Any) -> dict[str, Any] | None:
    """Return the fields of an object from which an equal one can be made; None for others."""
    kind = type(value)
    if "<locals>" in kind.__qualname__:
        return None  # other ranks cannot find the class
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return dict(value)
    if dataclasses.is_dataclass(value):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if one.init}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return dict(zip(kind._fields, value, strict=True))
    return None


def flatten_result(value: Any) -> list[Any]:
    """Return the leaves of a module's result, in the order of its form."""
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in flatten_result(one)]
    if isinstance(value, dict):
        return [leaf for one in value.values() for leaf in flatten_result(one)]
    fields = _fields_of(value)
    if fields is not None:
        return [leaf for one in fields.values() for leaf in flatten_result(one)]
    return [value]


def _find_class(module: str, name: str) -> Any:
    """Return a class of a module that this rank has imported, as the other rank has."""
    found: Any = sys.modules.get(module)
    for piece in name.split("."):
        found = getattr(found, piece, None)
    is_known = isinstance(found, type) and (
        dataclasses.is_dataclass(found) or issubclass(found, (dict, tuple))
    )
    if not is_known:
        raise UsageError(
            f"another stage returned a {name} of {module}, which this rank has not imported",
            where=API_NAME,
            hint="import the module on every rank",
        )
    return found


def build_value(
    form: ValueForm,
    tensor: Callable[[tuple[int, ...], torch.dtype], Any],
    on_leaf: Callable[[], None] = lambda: None,
) -> Any:
    """
    Return a value of a form.

    Args:
        tensor: makes each tensor from shape and type.
        on_leaf: called before each leaf, in the order of `flatten_result`.
    """
    kind = form[0]
    if kind in ("tensor", "plain"):
        on_leaf()
    if kind == "tensor":
        return tensor(tuple(form[1]), dtype_of(form[2]))
    if kind == "plain":
        return form[1]
    values = [build_value(one, tensor, on_leaf) for one in form[-1]]
    if kind == "list":
        return values
    if kind == "tuple":
        return tuple(values)
    if kind == "object":
        return _find_class(form[1], form[2])(**dict(zip(form[3], values, strict=True)))
    return dict(zip(form[1], values, strict=True))
