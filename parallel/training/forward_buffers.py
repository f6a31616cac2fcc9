"""
Buffers that a forward changes: running statistics, counters, codebooks, states that are kept.

One process would change them once per step, by all rows. A rank has the rows of a slice, and a step
has a forward for each micro-batch. As in DDP, every rank continues with rank 0's value, so that the
ranks stay equal. After the first step they are compared: what differs from one process is said.

States in plain attributes, such as that of a recurrent network, are found in the second forward.
They belong to the rows of a forward, so that the next one must have the same rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from pdrun.errors import UsageError
from pdrun.parallel.comm.sharded import ShardedGroup
from pdrun.parallel.model.digest import digest_values
from pdrun.parallel.model.released import reads_values
from pdrun.parallel.model.sync_batchnorm import SyncedBatchNorm

RUN_STEP = "pdrun.Run.step"
MAX_NAMES = 3
HINT = "update it in run.on_step instead, from values that are summed over the ranks"


class ForwardBuffers:
    """
    The buffers of a model, without those of batch norms that synchronise their own.

    Args:
        model: what this rank runs.
        group: the data axes: their ranks have other rows.
        forwards: micro-batches of a step.
        recomputed: names of modules whose forwards are computed again.
    """

    def __init__(
        self, model: nn.Module, group: ShardedGroup, forwards: int, recomputed: Sequence[str]
    ) -> None:
        self._group = group
        self._forwards = forwards
        self._places = list(_find_buffers(model))
        self._again = [
            any(path.startswith(f"{name}.") for name in recomputed) for path, _, _ in self._places
        ]
        self._before: list[tuple[torch.Tensor | None, int]] = []
        self._shared: list[tuple[int, torch.Size]] | None = None
        """Buffers that take rank 0's value after each step; None before the first."""
        self._own: set[int] = set()
        """Buffers whose shape follows the rows of a slice: each rank keeps its own."""

    def __len__(self) -> int:
        return len(self._places)

    def begin_step(self) -> None:
        """Note the buffers before the forwards of a step."""
        self._before = [
            (tensor, -1 if tensor is None else tensor._version)
            for _, module, name in self._places
            for tensor in (module._buffers.get(name),)
        ]

    def end_step(self) -> None:
        """
        Give buffers that forwards change rank 0's value; every rank calls this.

        Raises:
            UsageError: one of them has another shape than in the first step.
        """
        if not self._places:
            return
        changed = [index for index in range(len(self._places)) if self._is_changed(index)]
        if self._shared is None:
            self._shared = self._compare_ranks(changed)
        known = self._own | {index for index, _ in self._shared}
        late = [
            (index, tensor.shape)
            for index in changed
            if index not in known and (tensor := self._tensor_of(index)) is not None
            if (before := self._before[index][0]) is not None and before.shape == tensor.shape
        ]
        for index, shape in [*self._shared, *late]:
            tensor = self._tensor_of(index)
            if tensor is None or tensor.shape != shape:
                found = "None" if tensor is None else f"shape {tuple(tensor.shape)}"
                raise UsageError(
                    f"the buffer {self._places[index][0]} is {found} after this step, and had shape"
                    f" {tuple(shape)} after the first: the ranks cannot keep it equal",
                    where=RUN_STEP,
                    hint="keep what depends on the rows of a slice in an attribute",
                )
            self._group.broadcast_first(tensor.detach(), "a buffer")
        self._before = []

    def _tensor_of(self, index: int) -> torch.Tensor | None:
        _, module, name = self._places[index]
        return module._buffers.get(name)

    def _is_changed(self, index: int) -> bool:
        """Whether a buffer was written or replaced since `begin_step`."""
        before, version = self._before[index]
        now = self._tensor_of(index)
        return now is not before or (now is not None and now._version != version)

    def _compare_ranks(self, changed: Sequence[int]) -> list[tuple[int, torch.Size]]:
        """
        Return the buffers that a forward changes on any rank, and say which ones differ from one
        process.
        """
        rows = []
        for index in range(len(self._places)):
            before, now = self._before[index][0], self._tensor_of(index)
            if index not in changed or now is None:
                rows.append([int(index in changed), 0, 0])
            elif before is None or before.shape != now.shape:
                rows.append([1, 1, 0])
            else:
                rows.append([1, 0, *digest_values([now])])
        content = torch.tensor(rows, dtype=torch.int64).view(-1).view(torch.uint8)
        found = self._group.gather_bytes(content, "which buffers have changed")
        ranks = torch.stack([each.view(torch.int64).view(-1, 3) for each in found])
        is_changed = ranks[:, :, 0].any(0).tolist()
        has_own_shape = ranks[:, :, 1].any(0).tolist()
        differs = (ranks != ranks[:1]).any(2).any(0).tolist()
        places = [index for index in range(len(self._places)) if is_changed[index]]
        self._own = {index for index in places if has_own_shape[index]}
        if self._group.rank == 0:
            self._report(places, has_own_shape, differs)
        return [
            (index, tensor.shape)
            for index in places
            if not has_own_shape[index] and (tensor := self._tensor_of(index)) is not None
        ]

    def _report(self, places: list[int], has_own_shape: list[bool], differs: list[bool]) -> None:
        """Say which buffers will not have the values that they have in one process."""
        mine = [
            index for index in places if not isinstance(self._places[index][1], _BatchNorm)
        ]  # what a batch norm computes is the user's choice, see sync_batchnorm=
        several = self._group.world * self._forwards > 1
        own = [index for index in mine if has_own_shape[index] and several]
        by_rows = [index for index in mine if differs[index] and index not in own]
        often = [
            index
            for index in mine
            if (self._forwards > 1 or self._again[index]) and index not in own + by_rows
        ]
        self._say(by_rows, "changed by each forward with the rows of a slice; rank 0's value stays")
        times = f"{self._forwards} forwards of a step"
        if any(self._again[index] for index in often):
            times += ", and again where they are recomputed"
        self._say(often, f"changed by each of the {times}; one process changes it once")
        self._say(own, "given another shape by a forward; every rank keeps its own")

    def _say(self, indices: Sequence[int], what: str) -> None:
        if not indices:
            return
        names = ", ".join(self._places[index][0] for index in indices[:MAX_NAMES])
        if len(indices) > MAX_NAMES:
            names += f" and {len(indices) - MAX_NAMES} more"
        print(
            f"pdrun: buffer {names}: {what}; results differ from one process. {HINT}",
            file=sys.stderr,
            flush=True,
        )


def _find_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (path, module, name) of each buffer, also of those that are None."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, SyncedBatchNorm):
            continue
        for name, tensor in module._buffers.items():
            if tensor is not None and id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield f"{prefix}.{name}" if prefix else name, module, name


class _ReadRecorder(TorchFunctionMode):
    """Notes which of some tensors functions of torch read."""

    def __init__(self, watched: set[int]) -> None:
        super().__init__()
        self._watched = watched
        self.read: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if reads_values(func, args):
            self.read |= self._watched.intersection(
                map(id, _find_tensors([*args, *(kwargs or {}).values()]))
            )
        return func(*args, **(kwargs or {}))


class KeptStates:
    """
    Tensors in plain attributes of modules that a forward reads and then replaces.

    Args:
        model: what this rank runs.
        group: the data axes: their ranks have other rows.
        forwards: micro-batches of a step.
        recomputed: names of modules whose forwards are computed again.
    """

    def __init__(
        self, model: nn.Module, group: ShardedGroup, forwards: int, recomputed: Sequence[str]
    ) -> None:
        self._model = model
        self._group = group
        self._forwards = forwards
        self._recomputed = tuple(recomputed)
        self._has_begun = False
        self.is_done = False

    @contextmanager
    def watch_forward(self, rows: int) -> Iterator[None]:
        """
        Return the context manager of one of the first two forwards, of so many rows.

        Raises:
            UsageError: the second one reads a state of the first one's rows, and has others.
        """
        before = self._list_attributes()
        if not self._has_begun:
            self._has_begun = True
            yield
            now = self._list_attributes()
            # no mode for models without such a state: compiled modules would be traced within it
            self.is_done = all(_is_same(kept, before.get(name, [])) for name, kept in now.items())
            return
        self.is_done = True
        watched = {id(tensor) for kept in before.values() for tensor, _ in kept}
        with _ReadRecorder(watched) as recorder:
            yield
        now = self._list_attributes()
        found = {
            name: [tensor for tensor, _ in kept]
            for name, kept in before.items()
            if any(id(tensor) in recorder.read for tensor, _ in kept)
            and not _is_same(kept, now.get(name, []))
        }
        for name, tensors in found.items():
            has_rows = any(tensor.dim() > 1 and rows in tensor.shape[:2] for tensor in tensors)
            self._judge_state(name, has_rows)

    def _judge_state(self, name: str, has_rows: bool) -> None:
        if any(name.startswith(f"{outer}.") for outer in self._recomputed):
            what = f"{name} is a state that the forward changes, and recompute= runs it again"
            raise UsageError(
                what, where=RUN_STEP, hint="leave its module out of recompute= (globs of others)"
            )
        if has_rows and self._forwards > 1:
            raise UsageError(
                f"{name} is a state of the rows of one forward, which the next one reads: a step"
                f" has {self._forwards} forwards, each of other rows",
                where=RUN_STEP,
                hint="use accumulate=1, or reset the state in each forward"
                " (forward=lambda model, batch: ...)",
            )
        if not has_rows and self._group.world * self._forwards > 1 and self._group.rank == 0:
            print(
                f"pdrun: attribute {name}: kept by each forward of the rows of a slice, and read by"
                f" the next; results differ from one process. {HINT}",
                file=sys.stderr,
                flush=True,
            )

    def _list_attributes(self) -> dict[str, list[tuple[torch.Tensor, int]]]:
        """Return the tensors in plain attributes of modules."""
        found = {}
        for prefix, module in self._model.named_modules():
            for name, value in vars(module).items():
                if name in MODULE_ATTRIBUTES:
                    continue
                tensors = [(one, one._version) for one in _find_tensors(value)]
                if tensors:
                    found[f"{prefix}.{name}" if prefix else name] = tensors
        return found


MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def _find_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dicts, without parameters."""
    if isinstance(value, torch.Tensor):
        if not isinstance(value, nn.Parameter) and not value.is_inference():
            yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _find_tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _find_tensors(each)


def _is_same(kept: list[tuple[torch.Tensor, int]], now: list[tuple[torch.Tensor, int]]) -> bool:
    return len(kept) == len(now) and all(
        a is b and before == after for (a, before), (b, after) in zip(kept, now, strict=True)
    )
