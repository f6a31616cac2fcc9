"""
Values of optimizers and schedulers that are not tensors, as JSON.

Tensors of one element, counters, tuples, dicts and code are marked by a key that starts with ``!``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from pdrun.errors import UsageError
from pdrun.parallel.checkpoint import storage


def encode_value(value: Any) -> Any:
    """
    Return a plain value as JSON can store it. Tensors of one element, tuples and dicts are marked.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return {"!tensor": value.item(), "type": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Counter):
        return {"!counter": [[encode_value(key), count] for key, count in value.items()]}
    if isinstance(value, (list, set)):
        return [encode_value(entry) for entry in value]
    if isinstance(value, tuple):
        return {"!tuple": [encode_value(entry) for entry in value]}
    if isinstance(value, dict):
        return {"!dict": [[encode_value(key), encode_value(entry)] for key, entry in value.items()]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if callable(value):
        return {"!code": True}
    raise UsageError(
        f"cannot save a {type(value).__name__} in the state of the optimizer or scheduler",
        where="pdrun.Run.save",
    )


def decode_value(value: Any) -> Any:
    """Return the value that `encode_value` encoded. Code is not saved: it becomes None."""
    if isinstance(value, list):
        return [decode_value(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    (mark, inner), *more = value.items()
    if mark == "!tensor":
        return torch.tensor(inner, dtype=storage.DTYPES[more[0][1]] if more else None)
    if mark == "!counter":
        return Counter({decode_value(key): count for key, count in inner})
    if mark == "!tuple":
        return tuple(decode_value(entry) for entry in inner)
    if mark == "!code":
        return None
    return {decode_value(key): decode_value(entry) for key, entry in inner}
