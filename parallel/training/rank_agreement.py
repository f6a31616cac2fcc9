"""
All ranks of a job call `parallelize` with the same arguments, model and optimizer, and make their
first step with the same batch, or hear at once who has others.

Told through torch's store before anything of it is used: with other meshes or other weights the
ranks would wait for each other's messages, or end with the network's error on a rank that has done
nothing wrong; with another learning rate they would drift apart without a word, and with other
batches (a DistributedSampler's, say) leave most rows out. What the other ranks fetch is a digest,
however large the model: only who differs fetches the text.
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
from pdrun.parallel.model.weights import Weight

PARALLELIZE = "pdrun.parallelize"
SAME_ARGUMENTS_HINT = "every rank calls it with the same arguments, model and optimizer"
MAX_HASHED_ELEMENTS = 1 << 16
"""Elements of a tensor that a comparison of contents looks at."""
_calls = itertools.count()
"""Agreements of this process so far; every rank makes the same ones."""


class RankAgreement:
    """
    One call of `parallelize`, in which ranks compare what they have.

    Args:
        rank: this one.
        store: torch's store of the job; None: there is one rank, which agrees with itself.
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
        Compare names and values with those of another rank; of a value counts what `text` says of
        it.

        Args:
            what: names and values.
            first: whose; that rank itself compares nothing.
            where, hint: of the error.

        Raises:
            UsageError: the first one has something else; names what differs.
            DeadlineExceeded: the first one has not come so far.
            PeerLost: the process that keeps torch's store, rank 0's, is gone.
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
        except Exception as error:  # torch's kind of it depends on the version
            if time.monotonic() - begin < 0.9 * self._seconds:
                raise PeerLost(
                    f"the store cannot be asked: {PeerLost.SIGN} ({error})", where=where
                ) from error
            message = (
                f"rank {first} has not come here within {self._seconds:g} s of rank {self._rank}"
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
    # the order alone
    return f"rank {rank} has {', '.join(mine)}, rank {first} has {', '.join(theirs)}"


def describe_model(model: nn.Module, weights: Sequence[Weight]) -> Iterator[tuple[str, str]]:
    """
    Yield what all ranks' models must share: weights and buffers, but for what a rank keeps to
    itself.
    """
    for weight in weights:
        if not weight.unsynced:
            yield (
                f"weight {weight.name}",
                _describe_tensor(weight.param) + ("" if weight.is_trained else ", frozen"),
            )
    for name, buffer in model.named_buffers():
        yield f"buffer {name}", _describe_tensor(buffer)


def _describe_tensor(tensor: torch.Tensor) -> str:
    return f"{' x '.join(map(str, tensor.shape)) or 'a'} {str(tensor.dtype).removeprefix('torch.')}"


def describe_optimizer(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield what all ranks' optimizers must share: kind, groups of weights and their settings."""
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
    Yield what all ranks' schedulers must share; what is in one that torch does not have, nobody can
    tell.
    """
    yield "scheduler", None if scheduler is None else type(scheduler).__qualname__
    if type(scheduler).__module__.startswith("torch."):
        for name, value in sorted(vars(scheduler).items()):
            if isinstance(value, (int, float, str)) and not name.startswith("_"):
                yield f"{name} of the scheduler", value


def describe_batch(batch: Any) -> Iterator[tuple[str, Any]]:
    """
    Yield what ranks that compute with one batch must share: its parts, their shapes and types, what
    is in them.
    """
    leaves = [(path, _as_tensor(leaf)) for path, leaf in pytree.tree_flatten_with_path(batch)[0]]
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
    """Return an array of numbers as a tensor of the same memory, anything else as it is."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(leaf, numpy.ndarray):
        try:
            return torch.as_tensor(leaf)
        except (TypeError, ValueError):  # of strings or objects, or turned about
            return leaf
    return leaf


def _hash_contents(tensor: torch.Tensor) -> str:
    """Tell contents from others, by evenly spaced elements where there are many."""
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // MAX_HASHED_ELEMENTS)].cpu().contiguous()
    return hashlib.sha256(some.view(torch.uint8).numpy().tobytes()).hexdigest()[:8]


def to_text(value: Any) -> str:
    """
    Return what ranks can compare of a value: equal on all of them if it was made by the same code.

    Of functions, and of objects whose inside is not known here, only the name counts.
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
    if isinstance(value, Set):  # their order depends on a process's hash seed
        return "{" + ", ".join(sorted(map(to_text, value))) + "}"
    if isinstance(value, Sequence):
        return "(" + ", ".join(map(to_text, value)) + ")"
    if isinstance(value, Enum):
        return str(value.name)
    if is_dataclass(value) and not isinstance(value, type):
        return _format_members(
            value, {field.name: getattr(value, field.name) for field in fields(value)}
        )
    if _is_pdrun_object(value) and hasattr(value, "__dict__"):
        return _format_members(
            value, {name: each for name, each in vars(value).items() if not name.startswith("_")}
        )
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _is_pdrun_object(value: Any) -> bool:
    """Whether its class is one of pdrun's."""
    return type(value).__module__.partition(".")[0] == "pdrun"


def _format_members(value: Any, members: Mapping[str, Any]) -> str:
    return f"{type(value).__qualname__}({', '.join(f'{name}={to_text(each)}' for name, each in members.items())})"
