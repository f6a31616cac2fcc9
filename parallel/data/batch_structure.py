"""
The structure of a batch: which of its parts have rows, and how they are cut and put together.

A *leaf* is a tensor, an array, a list of samples, a packed sequence or any other value. Containers
around leaves are tuples, lists, dicts and their kind (BatchEncoding), and dataclasses. A list of
samples has one entry per row: strings, dicts (targets of a detector), or tensors. A list of tensors
can also be columns, as torch's collate returns them. Which one it is follows from the sizes; what
is ambiguous is refused.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.utils import rnn
from torch.utils import _pytree as pytree

from pdrun.errors import UsageError

DATASET_STRATEGY = "dataset_strategy"
LEAF_TYPES = frozenset((torch.Tensor, str, bytes, bool, int, float, type(None)))
"""Types that are no containers; others are looked at."""
Rebuild = Callable[[Sequence[Any]], Any]
"""Puts leaves back into the containers of a batch."""


class SampleList(list[Any]):
    """Some rows of a list of samples: they stay samples, also if all have one length."""


class SampleTuple(tuple[Any, ...]):
    """Some rows of a tuple of samples."""


def is_string_list(value: Any) -> bool:
    """
    Whether a value is a list or tuple of strings, which torch's collate makes of string samples.
    """
    return (
        type(value) in (list, tuple)
        and bool(value)
        and all(isinstance(each, (str, bytes)) for each in value)
    )


def is_sample_list(value: Any) -> bool:
    """
    Whether a value is certainly a list of samples: of dicts, or of tensors of different lengths.
    """
    if is_taken_as_samples(value):
        return True
    return _is_tensor_list(value) and (
        len({each.shape[0] for each in value}) > 1 and len({each.dtype for each in value}) == 1
    )


def is_taken_as_samples(batch: Any) -> bool:
    """
    Whether rows of a batch were taken as samples, so that a model gets the list itself.

    Tensors of different lengths alone do not show it: they can be columns with a ``dim`` each.
    """
    return isinstance(batch, (SampleList, SampleTuple)) or (
        type(batch) in (list, tuple)
        and bool(batch)
        and all(isinstance(each, Mapping) for each in batch)
    )


def _is_tensor_list(value: Any) -> bool:
    return (
        type(value) in (list, tuple)
        and len(value) > 0
        and all(isinstance(each, torch.Tensor) and each.dim() > 0 for each in value)
        and len({each.dim() for each in value}) == 1
    )


def flatten_batch(
    batch: Any, forward: Callable[[Any, Any], Any] | None = None, rows: int | None = None
) -> tuple[list[Any], Rebuild]:
    """
    Take a batch apart into its leaves.

    Args:
        forward: of `parallelize`; shows whether a batch that is a list of tensors has samples.
        rows: number of rows, if it is known.

    Raises:
        UsageError: a list of tensors could be samples or columns.
    """
    if count_plain_rows(batch, forward, rows) is not None:
        return _open_exact(batch)
    has_samples = passes_list(forward, batch)
    is_ragged = is_sample_list(batch) and _is_tensor_list(batch)
    if (
        is_string_list(batch)
        or has_samples
        or isinstance(batch, (SampleList, SampleTuple))
        or (is_sample_list(batch) and (not is_ragged or has_samples is None))
    ):
        return [batch], lambda leaves: leaves[0]
    if rows is not None:
        columns, rebuild, _ = _flatten(batch, is_top=True, with_lists=False)
        if rows in {length_of(leaf) for leaf in columns} and _is_consistent(columns):
            return columns, rebuild
        if _is_tensor_list(batch) and len(batch) == rows:
            return [batch], lambda leaves: leaves[0]
    elif has_samples is None:
        raise _ambiguous_list(batch)
    leaves, rebuild, lists = _flatten(batch, is_top=True, with_lists=True)
    if not lists:
        return leaves, rebuild
    columns, rebuild_columns, _ = _flatten(batch, is_top=True, with_lists=False)
    fits = _is_consistent(leaves), _is_consistent(columns)
    if all(fits):
        raise _ambiguous_list(lists[0])
    return (leaves, rebuild) if fits[0] else (columns, rebuild_columns)


def count_plain_rows(
    batch: Any, forward: Callable[[Any, Any], Any] | None, rows: int | None = None
) -> int | None:
    """
    Return the rows of a batch that is one tensor, or a tuple or dict of tensors with as many rows:
    what nearly all batches are, in each step. None if it is anything else.

    Args:
        forward, rows: as for `flatten_batch`.
    """
    kind = type(batch)
    if kind is torch.Tensor:
        return batch.shape[0] if batch.dim() and not batch.is_nested else None
    if kind is dict:
        tensors = list(batch.values())
    elif kind is tuple or (kind is list and forward is None):
        tensors = batch
    else:
        return None
    first = rows
    for tensor in tensors:
        if type(tensor) is not torch.Tensor or not tensor.dim() or tensor.is_nested:
            return None
        if first is None:
            first = tensor.shape[0]
        if tensor.shape[0] != first:
            return None
    return first if tensors else None


def _open_exact(batch: Any) -> tuple[list[Any], Rebuild]:
    """Return the entries of a tensor, tuple, list or dict, and a function that puts them back."""
    kind = type(batch)
    if kind is dict:
        return list(batch.values()), lambda leaves: dict(zip(batch, leaves, strict=True))
    if kind in (tuple, list):
        return list(batch), kind
    return [batch], lambda leaves: leaves[0]


def _ambiguous_list(tensors: Sequence[torch.Tensor]) -> UsageError:
    what = f"a list of {len(tensors)} tensors in the batch can be {len(tensors)} samples, or "
    what += f"columns of {tensors[0].shape[0]} rows"
    hint = "samples: a list of dicts, or one stacked tensor; columns: a tuple or a dict, or "
    hint += "dataset_strategy= with a dim for each tensor"
    return UsageError(what, where=DATASET_STRATEGY, hint=hint)


def flatten_columns(batch: Any) -> tuple[list[Any], Rebuild]:
    """Take a batch apart into its leaves; lists of tensors are columns."""
    leaves, rebuild, _ = _flatten(batch, is_top=True, with_lists=False)
    return leaves, rebuild


def _flatten(
    value: Any, *, is_top: bool, with_lists: bool
) -> tuple[list[Any], Rebuild, list[Sequence[torch.Tensor]]]:
    """
    Return the leaves of a value, a function that puts them back, and the lists of tensors that are
    among the leaves as samples.

    Args:
        with_lists: whether lists of tensors inside of other containers are samples.
    """
    if is_string_list(value) or (not is_top and is_sample_list(value)):
        return [value], lambda leaves: leaves[0], []
    if not is_top and with_lists and _is_tensor_list(value):
        return [value], lambda leaves: leaves[0], [value]
    opened = _open_container(value)
    if opened is None:
        return [value], lambda leaves: leaves[0], []
    children, close = opened
    parts = [_flatten(child, is_top=False, with_lists=with_lists) for child in children]

    def rebuild(leaves: Sequence[Any]) -> Any:
        made = []
        start = 0
        for found, inner, _ in parts:
            made.append(inner(leaves[start : start + len(found)]))
            start += len(found)
        return close(made)

    lists = [each for _, _, inner in parts for each in inner]
    return [leaf for found, _, _ in parts for leaf in found], rebuild, lists


def _open_container(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return the children of a container, and a function that puts others in their places."""
    kind = type(value)
    if kind in (tuple, list, dict):
        return _open_exact(value)
    if kind in LEAF_TYPES or isinstance(value, (torch.Tensor, rnn.PackedSequence)):
        return None
    if isinstance(value, UserDict):
        names = list(value.data)

        def fill(children: list[Any]) -> Any:
            made = copy.copy(value)
            made.data = dict(zip(names, children, strict=True))
            return made

        return list(value.data.values()), fill
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [each.name for each in dataclasses.fields(value) if each.init]
        if type(value) not in pytree.SUPPORTED_NODES:
            return [getattr(value, name) for name in fields], lambda children: dataclasses.replace(
                value, **dict(zip(fields, children, strict=True))
            )
    children, form = pytree.tree_flatten(value, is_leaf=lambda each: each is not value)
    if form.is_leaf():
        return None
    return children, lambda given: pytree.tree_unflatten(given, form)


def _is_consistent(leaves: Sequence[Any]) -> bool:
    """Whether all leaves that must have rows have the same number of them."""
    return (
        len(
            {
                length_of(leaf)
                for leaf in leaves
                if _must_have_rows(leaf) and length_of(leaf) is not None
            }
        )
        == 1
    )


def _must_have_rows(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, rnn.PackedSequence)) or (
        isinstance(leaf, (list, tuple)) and not is_string_list(leaf)
    )


def shape_of(leaf: Any) -> tuple[int, ...] | None:
    """Return the shape of a leaf that can be sliced, None of any other."""
    if type(leaf) is torch.Tensor and not leaf.is_nested:
        return tuple(leaf.shape) or None
    numpy = sys.modules.get("numpy")
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return (leaf.size(0),)
    if isinstance(leaf, torch.Tensor) or (numpy is not None and isinstance(leaf, numpy.ndarray)):
        return tuple(leaf.shape) or None
    if isinstance(leaf, rnn.PackedSequence):
        return (int(leaf.batch_sizes[0]),)
    if is_string_list(leaf) or is_sample_list(leaf) or _is_tensor_list(leaf):
        return (len(leaf),)
    return None


def length_of(leaf: Any) -> int | None:
    """Return the number of rows of a leaf; None if it has none."""
    shape = shape_of(leaf)
    return None if shape is None else shape[0]


def has_rows(leaf: Any) -> bool:
    """Whether a leaf defines the number of rows: strings and arrays may be something else."""
    return _must_have_rows(leaf) and length_of(leaf) is not None


def narrow_leaf(leaf: Any, dim: int, rows: range) -> Any:
    """Return some rows of a leaf."""
    if isinstance(leaf, rnn.PackedSequence):
        samples = rnn.unpack_sequence(leaf)[rows.start : rows.stop]
        return rnn.pack_sequence(samples, enforce_sorted=leaf.sorted_indices is None)
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        parts = list(leaf.unbind())[rows.start : rows.stop]
        return torch.nested.as_nested_tensor(parts, layout=leaf.layout)
    if isinstance(leaf, torch.Tensor):
        return leaf.narrow(dim, rows.start, len(rows))
    part = slice(rows.start, rows.stop)
    if is_string_list(leaf):
        return leaf[part]
    if isinstance(leaf, (list, tuple)):
        kind = SampleList if isinstance(leaf, list) else SampleTuple
        return kind(leaf[part])
    return leaf[(slice(None),) * dim + (part,)]


def map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a batch with other tensors; packed sequences keep their sizes."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, rnn.PackedSequence):
        data = change(batch.data)
        indices = [None if index is None else index.to(data.device) for index in batch[2:]]
        return rnn.PackedSequence(data, batch.batch_sizes, *indices)
    if isinstance(batch, (SampleList, SampleTuple)):
        return type(batch)(map_tensors(sample, change) for sample in batch)
    opened = _open_container(batch)
    if opened is None:
        return batch
    children, close = opened
    return close([map_tensors(child, change) for child in children])


def plain_structure(batch: Any) -> Any:
    """Return the content of a batch in dicts and lists that torch's pytrees know."""
    if isinstance(batch, rnn.PackedSequence):
        return {"data": batch.data, "batch_sizes": batch.batch_sizes}
    if isinstance(batch, torch.Tensor):
        return list(batch.unbind()) if batch.is_nested else batch
    if isinstance(batch, UserDict):
        return {name: plain_structure(child) for name, child in batch.data.items()}
    opened = _open_container(batch)
    if opened is None:
        return batch
    children, close = opened
    plain = [plain_structure(child) for child in children]
    if dataclasses.is_dataclass(batch) and type(batch) not in pytree.SUPPORTED_NODES:
        return {
            each.name: child
            for each, child in zip(
                (each for each in dataclasses.fields(batch) if each.init), plain, strict=True
            )
        }
    return close(plain)


def passes_list(forward: Callable[[Any, Any], Any] | None, batch: Any) -> bool | None:
    """
    Whether ``forward=`` gives a batch that is a list of tensors to the model as it is: then its
    entries are samples. None if that cannot be seen.
    """
    if forward is None or not _is_tensor_list(batch):
        return False
    if len({each.dtype for each in batch}) > 1:
        return False
    is_uniform = not is_sample_list(batch)
    if is_uniform and (type(batch) is tuple or len({each.shape for each in batch}) > 1):
        return False
    try:
        known = _seen_calls.setdefault(forward, {})
    except TypeError:  # cannot be hashed, or have a weak reference
        known = {}
    if is_uniform not in known:
        known[is_uniform] = _watch_call(forward, batch)
    return known[is_uniform]


_seen_calls: WeakKeyDictionary[Any, dict[bool, bool | None]] = WeakKeyDictionary()
"""By ``forward=``: its answer for lists of tensors of different lengths, and of one length."""


def _watch_call(forward: Callable[[Any, Any], Any], batch: Any) -> bool | None:
    """Call ``forward=`` with a stand-in for the model; once per run, since it is the user's."""
    watched = _WatchedList(batch)
    try:
        forward(_Recorder(), watched)
    except _CalledWithError as call:
        if any(each is watched for each in (*call.args[0], *call.args[1].values())):
            return True
    except Exception:
        return None
    return False if watched.has_index else None


class _WatchedList(list[Any]):
    """A list that notes whether one of its entries is read by its index."""

    has_index = False

    def __getitem__(self, index: Any) -> Any:
        self.has_index = self.has_index or isinstance(index, int)
        return super().__getitem__(index)


class _CalledWithError(Exception):
    """Carries the arguments of a call of the model."""


class _Recorder:
    """Stands for a model in `passes_list`: its first call, or one of a part of it, ends there."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _CalledWithError(args, kwargs)
