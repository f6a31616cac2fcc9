"""
The collectives of the engine: sums of flat buffers that end up whole or in shards, and gathers of
shards.

The ranks along some axes of the mesh (the data axes, as a rule) are cut into shard groups of
consecutive ranks; those that hold the same shard in different groups replicate each other. The rank
with index ``i * shards + j`` is member j of group i. No sharding is one shard a group, full
sharding is one group.

Two ways to sum. *Native*: torch's all-reduce and reduce-scatter, whose order of additions depends
on where in the buffer an element lies. *Ordered*: each rank receives its part from everybody and
adds the parts in the order of the ranks, so that the bits of a sum depend neither on the buffer nor
on the sharding; it costs the same bytes and one local pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pdrun.parallel import torch_compat
from pdrun.parallel.comm.communicator import AxisGroup


class PendingResult:
    """
    A collective on its way: `wait` ends it and returns what it was for. May be waited for more than
    once.
    """

    def __init__(
        self, comm: ShardedGroup, works: list[Any], label: str, then: Callable[[], Any]
    ) -> None:
        self._comm = comm
        self._works = works
        self._label = label
        self._then: Callable[[], Any] | None = then
        self._result: Any = None

    def wait(self) -> Any:
        """
        Return the result once it is there; on an accelerator, once the current stream will see it.
        """
        if self._then is not None:
            for work in self._works:
                self._comm.watchdog.wait(work, self._label)
            self._result = self._then()
            self._then = None
            self._works = []
        return self._result


class ShardedGroup:
    """
    This process's place along some axes of the mesh, and the engine's collectives there.

    Args:
        axis: the place.
        shards: size of a shard group.
        own: make process groups that nobody else uses, so that what others send may come in between
            on some ranks only.

    Attributes:
        world, rank: how many ranks there are, and this one's index; ``ranks`` are their numbers in the job.
    """

    def __init__(self, axis: AxisGroup, shards: int = 1, *, own: bool = False) -> None:
        self.ranks = axis.ranks
        self.world = axis.size
        self.rank = axis.index
        self.shards = shards
        self.device = axis.device
        self.watchdog = axis.state.watchdog
        self.replicas = self.world // shards
        self.replica, self.shard = divmod(self.rank, shards)
        self.calls: dict[str, int] = {}
        """Collectives started so far, by name."""
        self.nbytes: dict[str, int] = {}
        """Bytes that this rank gave to sums and gathers, by name."""
        self.group = self._make_group(self.ranks) if own and self.world > 1 else axis.group
        self._shard_group, self._copy_group = self._make_subgroups()
        config = dist.get_backend_config() if self.world > 1 else ""
        self._host_group = self.device.type == "cpu" or "gloo" in str(config)

    def _make_subgroups(self) -> tuple[Any, Any]:
        """
        Return the groups of this rank's shards and of its replicas; None for one of a single rank.
        """
        everyone = self.group
        if self.shards == 1 or self.replicas == 1:
            return (everyone if self.shards > 1 else None), (
                everyone if self.replicas > 1 else None
            )
        row = self.ranks[self.replica * self.shards :][: self.shards]
        column = self.ranks[self.shard :: self.shards]
        return self._make_group(row), self._make_group(column)

    def _make_group(self, ranks: tuple[int, ...]) -> Any:
        return torch_compat.new_group(list(ranks), self.watchdog.seconds, self)

    def _start_pending(
        self,
        name: str,
        label: str,
        works: list[Any],
        then: Callable[[], Any],
        sent: torch.Tensor | None = None,
    ) -> PendingResult:
        self.calls[name] = self.calls.get(name, 0) + bool(works)
        if sent is not None:
            self.nbytes[name] = self.nbytes.get(name, 0) + sent.numel() * sent.element_size()
        return PendingResult(self, works, label, then)

    # ---- sums ---------------------------------------------------------------

    def sum_shards(self, flat: torch.Tensor, label: str) -> PendingResult:
        """
        Sum a buffer over all ranks natively; the result is this rank's shard of it (all of it where
        there is one shard).

        ``flat`` is used up: it must not be touched before the end, and holds nothing useful after
        it.
        """
        if self.world == 1:
            return self._start_pending("none", label, [], lambda: flat)
        if self.shards == 1:
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            return self._start_pending("all_reduce", label, [work], lambda: flat, flat)
        own = flat.new_empty(flat.numel() // self.shards)
        work = torch_compat.reduce_scatter_flat(own, flat, self._shard_group)
        if self.replicas == 1:
            return self._start_pending("reduce_scatter", label, [work], lambda: own, flat)
        self.watchdog.wait(work, label)
        again = dist.all_reduce(own, group=self._copy_group, async_op=True)
        return self._start_pending("reduce_scatter", label, [again], lambda: own, flat)

    def sum_parts(
        self, flat: torch.Tensor, label: str, onto: torch.Tensor | None, dtype: torch.dtype
    ) -> PendingResult:
        """
        Sum a buffer over all ranks in their order; the result is this rank's part, one of ``world``
        equal ones.

        Args:
            onto: what the sum starts from, or None for nothing; it is changed and returned.
            dtype: type in which to add, where ``flat`` has been rounded to a narrower one for the
                wire.
        """
        if self.world == 1:
            return self._start_pending(
                "none", label, [], lambda: _add_in_order([flat.to(dtype)], onto)
            )
        send = flat
        if (
            1 < self.shards < self.world
        ):  # the part of shard j that copy i sums belongs to rank i * shards + j
            send = flat.view(self.shards, self.replicas, -1).transpose(0, 1).contiguous().view(-1)
        received = torch.empty_like(send)
        work = dist.all_to_all_single(received, send, group=self.group, async_op=True)

        def finish() -> torch.Tensor:
            return _add_in_order([part.to(dtype) for part in received.view(self.world, -1)], onto)

        return self._start_pending("all_to_all", label, [work], finish, send)

    def join_parts(
        self, part: torch.Tensor, label: str, out: torch.Tensor | None = None
    ) -> PendingResult:
        """
        Gather the parts of `sum_parts` into this rank's shard, which is ``out`` where that is
        given.
        """
        if self.replicas == 1:
            return self._start_pending("none", label, [], lambda: part)
        own = part.new_empty(part.numel() * self.replicas) if out is None else out
        work = torch_compat.all_gather_flat(own, part, self._copy_group)
        return self._start_pending("join", label, [work], lambda: own, part)

    # ---- gathers ------------------------------------------------------------

    def gather_shards(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> PendingResult:
        """
        Fill a buffer from the shards of this rank's group; ``shard`` may be this rank's part of
        ``full`` itself.
        """
        if self.shards == 1:
            if full.data_ptr() != shard.data_ptr():
                full.copy_(shard)
            return self._start_pending("none", label, [], lambda: full)
        work = torch_compat.all_gather_flat(full, shard, self._shard_group)
        return self._start_pending("all_gather", label, [work], lambda: full, shard)

    def sum_small(
        self, value: torch.Tensor, label: str, *, shards_only: bool = False
    ) -> PendingResult:
        """Sum a small tensor over the axis, or over this rank's shard group only."""
        group = self._shard_group if shards_only else self.group
        if group is None:
            return self._start_pending("none", label, [], lambda: value)
        work = dist.all_reduce(value, group=group, async_op=True)
        return self._start_pending("sum_small", label, [work], lambda: value)

    def exchange_numbers(
        self, numbers: torch.Tensor, flags: list[bool], label: str
    ) -> PendingResult:
        """
        Return ``[world, *numbers.shape]``, the numbers of every rank, and which flags are set on
        any.

        On a CPU one message holds both. On an accelerator the flags go from host to host, past the
        device's queue.
        """
        if self.world == 1:
            return self._start_pending("none", label, [], lambda: (numbers.unsqueeze(0), flags))
        told = torch.tensor(flags, dtype=numbers.dtype)
        if self.device.type != "cpu":
            return self._exchange_apart(numbers, told, label)
        row = torch.cat([numbers.reshape(-1), told])
        rows = row.new_empty(self.world, row.numel())
        work = torch_compat.all_gather_flat(rows.view(-1), row, self.group)

        def finish() -> tuple[torch.Tensor, list[bool]]:
            values, marks = rows.split([numbers.numel(), len(flags)], dim=1)
            return values.reshape(self.world, *numbers.shape), (marks.amax(0) > 0).tolist()

        return self._start_pending("exchange", label, [work], finish)

    def _exchange_apart(
        self, numbers: torch.Tensor, told: torch.Tensor, label: str
    ) -> PendingResult:
        rows = numbers.new_empty(self.world, *numbers.shape)
        works = [
            torch_compat.all_gather_flat(
                rows.view(-1), numbers.reshape(-1).contiguous(), self.group
            )
        ]
        there = told.to(torch.uint8) if self._host_group else told.to(self.device)
        works.append(dist.all_reduce(there, op=dist.ReduceOp.MAX, group=self.group, async_op=True))
        return self._start_pending("exchange", label, works, lambda: (rows, (there > 0).tolist()))

    def broadcast_first(self, tensor: torch.Tensor, label: str) -> None:
        """Give every rank what the one with index 0 has."""
        self.start_broadcast(tensor, 0, label).wait()

    def start_broadcast(self, tensor: torch.Tensor, index: int, label: str) -> PendingResult:
        """Start giving every rank what the one with that index has, in place."""
        if self.world == 1:
            return self._start_pending("none", label, [], lambda: tensor)
        # the network knows memory, not strides: of a slice it would send and overwrite what lies
        # between, too
        sent = tensor.contiguous()
        work = dist.broadcast(
            torch_compat.as_sendable(sent), src=self.ranks[index], group=self.group, async_op=True
        )

        def finish() -> torch.Tensor:
            if sent is not tensor:
                with torch.no_grad():
                    tensor.copy_(sent)
            return tensor

        return self._start_pending("broadcast", label, [work], finish)


def _add_in_order(parts: list[torch.Tensor], onto: torch.Tensor | None) -> torch.Tensor:
    """Add in order, in place, onto the first one where ``onto`` is None."""
    total = parts[0] if onto is None else onto.add_(parts[0])
    for part in parts[1:]:
        total.add_(part)
    return total
