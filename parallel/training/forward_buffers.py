"""
Buffers that a forward changes: running statistics, counters, codebooks, states that are kept.

One process would change them once per step, by all rows. A rank has the rows of a slice, and a step
has a forward for each micro-batch. As in DDP, every rank continues with rank 0's value, so that the
ranks stay equal. After the first step they are compared: what differs from one process is said.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pdrun.errors import UsageError
from pdrun.parallel.comm.sharded import ShardedGroup
from pdrun.parallel.model.digest import digest_values
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
