"""Outputs of an evaluation: what has one entry per row, taken from slices and put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pdrun.errors import UsageError
from pdrun.parallel.data.batch_structure import map_tensors

RUN_EVALUATE = "pdrun.Run.evaluate"
OUTPUTS_HINT = "outputs=lambda output, batch: tensors with one entry per row, such as output.logits"


def take_outputs(value: Any, rows: int, join: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """
    Return the outputs of a slice in dicts, tuples, tensors on the CPU and lists of rows.

    Args:
        join: makes full sequences of parts.

    Raises:
        UsageError: a part of them does not have one entry per row.
    """
    if isinstance(value, torch.Tensor):
        if getattr(value, "_pdrun_vocab_shard", None) is not None:
            raise UsageError(
                "the logits are sharded over the vocabulary: no rank has all of a row",
                where=RUN_EVALUATE,
                hint="vocab(axis) without gather=False, or metrics with pdrun.cross_entropy",
            )
        if value.dim() == 0 or value.shape[0] != rows:
            raise _no_rows(f"a tensor of shape {tuple(value.shape)}", rows)
        return join(value).detach().cpu()
    if isinstance(value, Mapping):
        return {key: take_outputs(each, rows, join) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(take_outputs(each, rows, join) for each in value)
    if isinstance(value, list) and len(value) == rows:
        return [_to_cpu(each) for each in value]
    what = f"a list of {len(value)}" if isinstance(value, list) else f"a {type(value).__name__}"
    raise _no_rows(what, rows)


def _no_rows(what: str, rows: int) -> UsageError:
    text = f"outputs must have one entry per row, got {what} for {rows} rows"
    return UsageError(text, where=RUN_EVALUATE, hint=OUTPUTS_HINT)


def _to_cpu(value: Any) -> Any:
    return map_tensors(value, lambda x: x.detach().cpu())


def join_outputs(parts: Sequence[Any]) -> Any:
    """Return the rows of all parts: a tensor if all rows have one shape, else a list of rows."""
    first = parts[0]
    if isinstance(first, dict):
        return {key: join_outputs([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        return tuple(join_outputs(each) for each in zip(*parts, strict=True))
    if isinstance(first, list):
        return [row for part in parts for row in part]
    if len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(list(parts))
    return [row for part in parts for row in part.unbind()]
