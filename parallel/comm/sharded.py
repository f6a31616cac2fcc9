"""
The collectives of the engine: sums of flat buffers to full or sharded results, and gathers.

The ranks along some axes (the data axes, as a rule) form shard groups of consecutive ranks. Ranks
with the same shard in different groups are replicas. The rank with index ``i * shards + j`` is
member j of group i. Without sharding a group has one rank; with full sharding there is one group.

Two ways to sum:

* *native*: torch's all-reduce and reduce-scatter. The order of additions depends on the position of
  an element in the buffer.
* *ordered*: each rank receives its part from all ranks and adds the parts in rank order. The bits
  of a sum depend neither on the buffer nor on the sharding. It sends the same bytes and adds one
  local pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pdrun.parallel import torch_compat
from pdrun.parallel.comm.axis_members import AxisMembers
from pdrun.parallel.comm.communicator import AxisGroup
from pdrun.parallel.comm.p2p.copier import MIN_SHARD_BYTES, PIECE_BYTES, LazyCopier, P2PCopier
from pdrun.parallel.comm.p2p.exchanges import (
    start_flat_all_reduce,
    start_flat_gather,
    start_flat_sum,
)
from pdrun.parallel.startup.group_exit import ClosedGroup, register_holder

MAX_CHUNK_BYTES = 16 << 20
"""Bytes per rank in one collective of `ShardedGroup.gather_bytes`."""


class PendingResult:
    """
    A started collective: `wait` ends it and returns its result, and can be called more than once.
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
        """Wait for the result and return it. On an accelerator the current stream waits."""
        if self._then is not None:
            for work in self._works:
                self._comm.watchdog.wait(work, self._label)
            self._result = self._then()
            self._then = None
            self._works = []
        return self._result


class ShardedGroup:
    """
    This rank's shard and replica groups along some axes, and the engine's collectives there.

    Args:
        axis: the axes.
        shards: size of a shard group.
        own: create separate process groups, so that the collectives of other users can run between
            the collectives here on some ranks only.

    Attributes:
        world, rank: number of ranks, and the index of this one.
        ranks: their numbers in the job.
        calls, nbytes: collectives started, and bytes of this rank's input to them, by name.
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
        self.group: Any = axis.group
        if own and self.world > 1:
            self.group = self._make_group(self.ranks)
        self._shard_group, self._copy_group = self._make_subgroups()
        self._rank_copies = LazyCopier(self._members_of(axis, self.ranks, self.rank, self.group))
        self._shard_copies = LazyCopier(
            self._members_of(axis, self.shard_ranks, self.shard, self._shard_group)
        )
        config = dist.get_backend_config() if self.world > 1 else ""
        self._host_group = self.device.type == "cpu" or "gloo" in str(config)
        register_holder(self)

    def drop_groups(self) -> None:
        """Drop the process groups: the job is left."""
        if self.world > 1:
            self.group = self._shard_group = self._copy_group = ClosedGroup()

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """The ranks of the job with which this one shares its shards."""
        return tuple(self.ranks[self.replica * self.shards :][: self.shards])

    @staticmethod
    def _members_of(axis: AxisGroup, ranks: tuple[int, ...], index: int, group: Any) -> AxisMembers:
        return AxisMembers(axis.names, ranks, index, group, axis.device, axis.grid, axis.rank)

    @staticmethod
    def _find_copier(copies: LazyCopier, shard: torch.Tensor, size: int) -> P2PCopier | None:
        """Return the memory for copies of shards; None to use torch's collectives."""
        if shard.device.type != "cuda" or shard.nbytes < MIN_SHARD_BYTES:
            return None
        return copies.find(max(PIECE_BYTES // (size - 1), MIN_SHARD_BYTES))

    def _make_subgroups(self) -> tuple[Any, Any]:
        """Return the groups of this rank's shards and of its replicas; None for a single rank."""
        everyone = self.group
        if self.shards == 1 or self.replicas == 1:
            return (everyone if self.shards > 1 else None), (
                everyone if self.replicas > 1 else None
            )
        row = self.shard_ranks
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

    def sum_shards(self, flat: torch.Tensor, label: str, spare: int = 0) -> PendingResult:
        """
        Sum a buffer over all ranks natively; the result is this rank's shard of it.

        ``flat`` is overwritten: it must not be used before or after the end.

        Args:
            spare: elements at the end of a buffer without shards that are not gradients: their
                bytes are not counted.
        """
        if self.world == 1:
            return self._start_pending("none", label, [], lambda: flat)
        if self.shards == 1:
            work: Any = self._start_all_reduce(flat)
            self.nbytes["all_reduce"] = (
                self.nbytes.get("all_reduce", 0) - spare * flat.element_size()
            )
            return self._start_pending("all_reduce", label, [work], lambda: flat, flat)
        own = flat.new_empty(flat.numel() // self.shards)
        copier = self._find_copier(self._shard_copies, own, self.shards)
        if copier is not None:
            work = start_flat_sum(copier, own, flat)
        else:
            work = torch_compat.reduce_scatter_flat(own, flat, self._shard_group)
        if self.replicas == 1:
            return self._start_pending("reduce_scatter", label, [work], lambda: own, flat)
        self.watchdog.wait(work, label)
        again = dist.all_reduce(own, group=self._copy_group, async_op=True)
        return self._start_pending("reduce_scatter", label, [again], lambda: own, flat)

    def _start_all_reduce(self, flat: torch.Tensor) -> Any:
        if flat.is_contiguous() and flat.numel() % self.world == 0:
            shard = flat.view(-1)[: flat.numel() // self.world]
            copier = self._find_copier(self._rank_copies, shard, self.world)
            if copier is not None:
                return start_flat_all_reduce(copier, flat)
        return dist.all_reduce(flat, group=self.group, async_op=True)

    def sum_parts(
        self, flat: torch.Tensor, label: str, onto: torch.Tensor | None, dtype: torch.dtype
    ) -> PendingResult:
        """
        Sum a buffer over all ranks in rank order; the result is this rank's part, one of ``world``.

        Args:
            onto: start value of the sum, changed and returned; None: zero.
            dtype: type of the additions, if ``flat`` was rounded to a narrower type for sending.
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
        """Gather the parts of `sum_parts` into this rank's shard, ``out`` if given."""
        if self.replicas == 1:
            return self._start_pending("none", label, [], lambda: part)
        own = part.new_empty(part.numel() * self.replicas) if out is None else out
        work = torch_compat.all_gather_flat(own, part, self._copy_group)
        return self._start_pending("join", label, [work], lambda: own, part)

    # ---- gathers ------------------------------------------------------------

    def gather_shards(self, full: torch.Tensor, shard: torch.Tensor, label: str) -> PendingResult:
        """
        Fill a buffer from the shards of this rank's group; ``shard`` can be a part of ``full``.
        """
        if self.shards == 1:
            if full.data_ptr() != shard.data_ptr():
                full.copy_(shard)
            return self._start_pending("none", label, [], lambda: full)
        copier = self._find_copier(self._shard_copies, shard, self.shards)
        if copier is not None:
            work: Any = start_flat_gather(copier, full, shard)
        else:
            parts = torch_compat.as_sendable(full), torch_compat.as_sendable(shard)
            work = torch_compat.all_gather_flat(*parts, self._shard_group)
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
        Return ``[world, *numbers.shape]``, the numbers of every rank, and which flags any rank has
        set.

        On a CPU one message has both. On an accelerator the flags are sent between hosts, so that
        they do not wait for the device's queue.
        """
        if self.world == 1:
            return self._start_pending("none", label, [], lambda: (numbers.unsqueeze(0), flags))
        sent_flags = torch.tensor(flags, dtype=numbers.dtype)
        if self.device.type != "cpu":
            return self._exchange_apart(numbers, sent_flags, label)
        row = torch.cat([numbers.reshape(-1), sent_flags])
        rows = row.new_empty(self.world, row.numel())
        work = torch_compat.all_gather_flat(rows.view(-1), row, self.group)

        def finish() -> tuple[torch.Tensor, list[bool]]:
            values, marks = rows.split([numbers.numel(), len(flags)], dim=1)
            return values.reshape(self.world, *numbers.shape), (marks.amax(0) > 0).tolist()

        return self._start_pending("exchange", label, [work], finish)

    def _exchange_apart(
        self, numbers: torch.Tensor, flags: torch.Tensor, label: str
    ) -> PendingResult:
        rows = numbers.new_empty(self.world, *numbers.shape)
        works = [
            torch_compat.all_gather_flat(
                rows.view(-1), numbers.reshape(-1).contiguous(), self.group
            )
        ]
        there = flags.to(torch.uint8) if self._host_group else flags.to(self.device)
        works.append(dist.all_reduce(there, op=dist.ReduceOp.MAX, group=self.group, async_op=True))
        return self._start_pending("exchange", label, works, lambda: (rows, (there > 0).tolist()))

    def gather_bytes(self, content: torch.Tensor, label: str) -> list[torch.Tensor]:
        """
        Return the bytes of every rank, by index, on the host.

        Args:
            content: bytes on the host; ranks can have different numbers of them.
        """
        if self.world == 1:
            return [content]
        size = torch.tensor([content.numel()], dtype=torch.int64, device=self.device)
        sizes = size.new_empty(self.world)
        self.watchdog.wait(torch_compat.all_gather_flat(sizes, size, self.group), label)
        counts = sizes.tolist()
        found: list[list[torch.Tensor]] = [[] for _ in counts]
        for start in range(0, max(counts), MAX_CHUNK_BYTES):
            length = min(MAX_CHUNK_BYTES, max(counts) - start)
            chunk = content[start : start + length]
            sent = content.new_zeros(length, device=self.device)
            sent[: chunk.numel()] = chunk
            rows = sent.new_empty(self.world, length)
            self.watchdog.wait(torch_compat.all_gather_flat(rows.view(-1), sent, self.group), label)
            self.calls["gather_bytes"] = self.calls.get("gather_bytes", 0) + 1
            for index, row in enumerate(rows.cpu()):
                found[index].append(row[: max(0, min(length, counts[index] - start))])
        return [torch.cat(parts) for parts in found]

    def broadcast_first(self, tensor: torch.Tensor, label: str) -> None:
        """Give every rank the tensor of the rank with index 0."""
        self.start_broadcast(tensor, 0, label).wait()

    def start_broadcast(self, tensor: torch.Tensor, index: int, label: str) -> PendingResult:
        """Start giving every rank the tensor of the rank with that index, in place."""
        if self.world == 1:
            return self._start_pending("none", label, [], lambda: tensor)

        # A transfer ignores strides: for a slice it would send and overwrite the elements between.
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
    """Add in order, in place, onto the first part if ``onto`` is not given."""
    total = parts[0] if onto is None else onto.add_(parts[0])
    for part in parts[1:]:
        total.add_(part)
    return total
