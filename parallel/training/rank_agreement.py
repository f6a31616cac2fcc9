"""
Checks that all ranks call `parallelize` with the same arguments, model and optimizer, and make
their first step with the same batch.

The comparison uses torch's store and comes before anything else uses the values. With different
meshes or weights, ranks would wait for each other's messages, or end with a network error on a rank
that did nothing wrong. With different learning rates they would diverge silently. With different
batches (of a DistributedSampler, for example) most rows would be left out. Ranks fetch a digest,
independent of the model's size. Only a rank that differs fetches the text.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pdrun.errors import DeadlineExceeded, PeerLost, UsageError
from pdrun.parallel.comm.sharded import ShardedGroup
from pdrun.parallel.data.batch_structure import plain_structure
from pdrun.parallel.model.weights import Weight

PARALLELIZE = "pdrun.parallelize"
SAME_ARGUMENTS_HINT = "every rank calls it with the same arguments, model and optimizer"
ORDER_HINT = (
    "every rank needs the sampler of all rows, equally seeded: pdrun shards the rows itself; "
    'for rows of your own use dataset_strategy="data_parallel" and an iterable of batches'
)
MAX_HASHED_ELEMENTS = 1 << 16
"""Elements of a tensor that a comparison of contents reads."""
_calls = itertools.count()
"""Agreements of this process so far; every rank makes the same ones."""


class RankAgreement:
    """
    One call of `parallelize`, in which ranks compare their values.

    Args:
        rank: this one.
        store: torch's store of the job; None: one rank, nothing to compare.
        seconds: how long to wait for rank 0.
    """

    def __init__(self, rank: int, store: Any, seconds: float) -> None:
        self._rank = rank
        self._store = store
        self._seconds = seconds
        call = next(_calls)
        self._keys = (f"pdrun/agree/{call}/{part}" for part in itertools.count())

    def check_equal(
        self,
        what: Iterable[tuple[str, Any]],
        first: int = 0,
        where: str = PARALLELIZE,
        hint: str = SAME_ARGUMENTS_HINT,
    ) -> None:
        """
        Compare names and values with those of another rank; values are compared as `to_text`.

        Args:
            what: names and values.
            first: the rank to compare with; that rank itself compares nothing.
            where, hint: of the error.

        Raises:
            UsageError: the values differ; names the difference.
            DeadlineExceeded: the first rank did not arrive in time.
            PeerLost: the process of torch's store, rank 0's, has ended.
        """
        if self._store is None:
            return
        key = f"{next(self._keys)}/{first}"
        mine = {name: to_text(value) for name, value in what}
        payload = json.dumps(mine)
        digest = hashlib.sha256(payload.encode()).hexdigest()
        if self._rank == first:
            self._store.set(f"{key}/text", payload)
            self._store.set(key, digest)
            return
        begin = time.monotonic()
        try:
            self._store.wait([key], timedelta(seconds=self._seconds))
        except Exception as error:  # the type depends on torch's version
            if time.monotonic() - begin < 0.9 * self._seconds:
                raise PeerLost(
                    f"the store does not answer: {PeerLost.SIGN} ({error})", where=where
                ) from error
            message = (
                f"rank {first} did not arrive here within {self._seconds:g} s of rank {self._rank}"
            )
            raise DeadlineExceeded(message, where=where) from error
        if self._store.get(key).decode() != digest:
            theirs = json.loads(self._store.get(f"{key}/text").decode())
            raise UsageError(
                _describe_difference(self._rank, mine, first, theirs), where=where, hint=hint
            )


def _describe_difference(
    rank: int, mine: Mapping[str, str], first: int, theirs: Mapping[str, str]
) -> str:
    for name in (*mine, *theirs):
        here = mine.get(name)
        there = theirs.get(name)
        if here != there:
            one, other = (
                f"{name}={value}" if value is not None else f"no {name}" for value in (here, there)
            )
            return f"rank {rank} has {one}, rank {first} has {other}"
    # only the order differs
    return f"rank {rank} has {', '.join(mine)}, rank {first} has {', '.join(theirs)}"


def describe_model(model: nn.Module, weights: Sequence[Weight]) -> Iterator[tuple[str, str]]:
    """
    Yield what must be equal in all ranks' models: weights and buffers, without layerwise weights.
    """
    for weight in weights:
        if not weight.unsynced:
            yield (
                f"weight {weight.name}",
                _describe_tensor(weight.param)
                + ("" if weight.is_trained else ", frozen")
                + (", parallel_optimizer=False" if weight.opts_out else ""),
            )
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", _describe_tensor(buffer)


def _describe_tensor(tensor: torch.Tensor) -> str:
    return f"{' x '.join(map(str, tensor.shape)) or 'a'} {str(tensor.dtype).removeprefix('torch.')}"


def describe_optimizer(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """
    Yield what must be equal in all ranks' optimizers: kind, groups of weights and their settings.
    """
    yield "optimizer", type(optimizer).__qualname__
    for index, group in enumerate(getattr(optimizer, "param_groups", ())):
        of = f" of the optimizer's group {index}"
        yield f"weights{of}", len(group["params"])
        for name in sorted(group.keys() - {"params", "param_names"}):
            value = group[name]
            yield (
                f"{name}{of}",
                value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value,
            )


def describe_scheduler(scheduler: Any) -> Iterator[tuple[str, Any]]:
    """
    Yield what must be equal in all ranks' schedulers; only the kind of one that is not torch's.
    """
    yield "scheduler", None if scheduler is None else type(scheduler).__qualname__
    if type(scheduler).__module__.startswith("torch."):
        for name, value in sorted(vars(scheduler).items()):
            if isinstance(value, (int, float, str)) and not name.startswith("_"):
                yield f"{name} of the scheduler", value


def describe_batch(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield what must be equal in batches that ranks share: parts, shapes, types and contents."""
    found = pytree.tree_flatten_with_path(plain_structure(batch))[0]
    leaves = [(path, _as_tensor(leaf)) for path, leaf in found]
    for path, leaf in leaves:
        yield (
            f"batch{pytree.keystr(path)}",
            _describe_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf,
        )
    for path, leaf in leaves:
        if (
            isinstance(leaf, torch.Tensor)
            and leaf.layout == torch.strided
            and leaf.device.type != "meta"
        ):
            yield f"contents of batch{pytree.keystr(path)}", _hash_contents(leaf)


def _as_tensor(leaf: Any) -> Any:
    """
    Return an array of numbers as a tensor of the same memory; other leaves are returned unchanged.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(leaf, numpy.ndarray):
        try:
            return torch.as_tensor(leaf)
        except (TypeError, ValueError):  # strings, objects, or negative strides
            return leaf
    return leaf


def _hash_contents(tensor: torch.Tensor) -> str:
    """Return a short digest of a tensor's contents, of evenly spaced elements if there are many."""
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // MAX_HASHED_ELEMENTS)].cpu().contiguous()
    return hashlib.sha256(some.view(torch.uint8).numpy().tobytes()).hexdigest()[:8]


def to_text(value: Any) -> str:
    """
    Return the text by which ranks compare a value: equal on all of them if the same code made it.

    Functions, and objects of unknown classes, are compared by name only.
    """
    if isinstance(value, torch.device):
        return str(value.type)  # each rank has its own index
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        if not isinstance(value, str) or not value.isprintable():
            return repr(value)
        return value
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{to_text(key)}: {to_text(each)}" for key, each in value.items()) + "}"
        )
    if isinstance(value, Set):  # the order of a set depends on a process's hash seed
        return "{" + ", ".join(sorted(map(to_text, value))) + "}"
    if isinstance(value, Sequence):
        return "(" + ", ".join(map(to_text, value)) + ")"
    if isinstance(value, Enum):
        return str(value.name)
    if is_dataclass(value) and not isinstance(value, type):
        return _format_members(
            value, {each.name: getattr(value, each.name) for each in fields(value) if each.repr}
        )
    if _is_pdrun_object(value) and hasattr(value, "__dict__"):
        return _format_members(
            value, {name: each for name, each in vars(value).items() if not name.startswith("_")}
        )
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _is_pdrun_object(value: Any) -> bool:
    """Whether a value's class is one of pdrun's."""
    return type(value).__module__.partition(".")[0] == "pdrun"


def _format_members(value: Any, members: Mapping[str, Any]) -> str:
    parts = [f"{name}={to_text(each)}" for name, each in members.items()]
    return f"{type(value).__qualname__}({', '.join(parts)})"


class DataLink:
    """
    What the data feed of a run asks of the other ranks: see `pdrun.parallel.data.feed.FeedLink`.

    Args:
        job: all ranks.
        agreement: compares texts; None: nothing is compared.
    """

    def __init__(self, job: ShardedGroup, agreement: RankAgreement | None) -> None:
        self._job = job
        self._agreement = agreement

    def compare_order(self, batches: Any) -> None:
        """See `FeedLink.compare_order`."""
        if self._agreement is None or self._job.world == 1:
            return
        digest = hashlib.sha256(repr(batches).encode()).hexdigest()[:16]
        what = [("batches of the sampler", len(batches)), ("an order of indices", digest)]
        self._agreement.check_equal(what, 0, "pdrun.Run.data", ORDER_HINT)

    def largest(self, number: int) -> int:
        """See `FeedLink.largest`."""
        mine = torch.tensor([number], dtype=torch.int64, device=self._job.device)
        numbers, _ = self._job.exchange_numbers(mine, [False], "the next batch of run.data").wait()
        return int(numbers.max())

    def announce(self, text: str) -> None:
        """See `FeedLink.announce`."""
        if self._job.rank == 0:
            print(f"pdrun: {text}", file=sys.stderr, flush=True)
