"""
The collectives along some axes of a mesh, without autograd (`autograd` adds it).

Collectives return new tensors unless stated otherwise, and are counted. Along an axis of size 1
they return their input and count nothing.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.distributed as dist

from pdrun.parallel import torch_compat
from pdrun.parallel.comm.axis_transport import AxisTransport, PendingTensor, keeps_result
from pdrun.parallel.comm.p2p.copier import P2PCopier
from pdrun.parallel.comm.p2p.exchanges import P2PAllGather, P2PReduceScatter


class AxisGroup(AxisTransport):
    """The ranks along some axes of a mesh, and their collectives."""

    def __deepcopy__(self, memo: dict[int, Any]) -> AxisGroup:
        """Return itself: a copy of a model uses the same group."""
        return self

    @keeps_result
    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Return the elementwise sum ("sum"), maximum ("max") or minimum ("min") over the ranks."""
        if self.size == 1:
            return x
        if torch.compiler.is_compiling():
            return torch.ops.pdrun_axis.all_reduce(x, self.axis_id, op)
        out = x.clone(memory_format=torch.contiguous_format)
        start = functools.partial(
            dist.all_reduce, out, op=_REDUCE_OPS[op], group=self.group, async_op=True
        )
        self.run_collective("all_reduce", x, start, result=out)
        return out

    @keeps_result
    def all_gather(self, x: torch.Tensor, dim: int, total: int | None = None) -> torch.Tensor:
        """
        Return the ranks' tensors, concatenated along ``dim``.

        Args:
            total: size of ``dim`` of the result if shards can differ by one (see `shard_range`);
                default: all ranks have the size of ``x``.
        """
        if self.size == 1:
            return x
        if torch.compiler.is_compiling():
            return torch.ops.pdrun_axis.all_gather(x, self.axis_id, dim, total)
        x = x.detach()
        dim = dim % x.dim()
        sizes = self.shard_sizes(x.shape[dim], dim, total)
        if min(sizes) == max(sizes):
            copier = self.copier_along(x, dim)
            if copier is not None:
                return self._all_gather_p2p(copier, x, dim)
            if self.sends_rows(x, dim):
                return self._all_gather_rows(x)
        return self._all_gather_flat(x, dim, sizes)

    def _all_gather_p2p(self, copier: P2PCopier, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Gather equal shards by copies between the devices of one host."""
        full = x.new_empty(*x.shape[:dim], self.size * x.shape[dim], *x.shape[dim + 1 :])
        x = x.contiguous()
        rows = x.view(math.prod(x.shape[:dim]), -1)
        out = full.view(len(rows), self.size, -1)
        start = functools.partial(P2PAllGather, copier, out, rows)
        self.run_collective("all_gather", x, start, result=full)
        return full

    def _all_gather_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Gather equal shards along dim 1 row by row: each row is received in its place."""
        full = x.new_empty(x.shape[0], self.size * x.shape[1], *x.shape[2:])
        x = x.contiguous()
        start = functools.partial(torch_compat.gather_rows, full, x, self.group)
        self.run_collective("all_gather", x, start, result=full)
        return full

    def _all_gather_flat(self, x: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        """Gather shards with ``dim`` in front, padded to the largest."""
        largest = max(sizes)
        is_even = self.is_sorted and min(sizes) == largest
        front = x.transpose(0, dim)
        if front.shape[0] < largest:
            padding = front.new_zeros(largest - front.shape[0], *front.shape[1:])
            front = torch.cat([front, padding])
        front = front.contiguous()
        out = front.new_empty(self.size, *front.shape)
        start = functools.partial(
            torch_compat.all_gather_flat, out.view(-1), front.view(-1), self.group
        )
        result = out if dim == 0 and is_even else None
        self.run_collective("all_gather", front, start, result=result, counted=x)
        if is_even:
            full = out.flatten(0, 1)
        else:
            shards = [out[self.group_positions[i]][:size] for i, size in enumerate(sizes)]
            full = torch.cat(shards)
        return full.transpose(0, dim).contiguous()

    @keeps_result
    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's shard (see `shard_range`) along ``dim`` of the sum over the ranks."""
        if self.size == 1:
            return x
        if torch.compiler.is_compiling():
            return torch.ops.pdrun_axis.reduce_scatter(x, self.axis_id, dim)
        x = x.detach()
        dim = dim % x.dim()
        if x.shape[dim] % self.size == 0:
            copier = self.copier_along(x.narrow(dim, 0, x.shape[dim] // self.size), dim)
            if copier is not None:
                return self._reduce_scatter_p2p(copier, x, dim)
            if self.sends_rows(x, dim):
                return self._reduce_scatter_rows(x)
        return self._reduce_scatter_flat(x, dim)

    def _reduce_scatter_p2p(self, copier: P2PCopier, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Sum equal shards by copies between the devices of one host."""
        shard = x.new_empty(*x.shape[:dim], x.shape[dim] // self.size, *x.shape[dim + 1 :])
        x = x.contiguous()
        rows = x.view(math.prod(x.shape[:dim]), self.size, -1)
        start = functools.partial(
            P2PReduceScatter, copier, shard.view(len(rows), -1), lambda index: rows[:, index]
        )
        self.run_collective("reduce_scatter", x, start, result=shard)
        return shard

    def _reduce_scatter_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Sum equal shards along dim 1 row by row: no copy brings the rows together."""
        shard = x.new_empty(x.shape[0], x.shape[1] // self.size, *x.shape[2:])
        x = x.contiguous()
        start = functools.partial(torch_compat.scatter_rows, shard, x, self.group)
        self.run_collective("reduce_scatter", x, start, result=shard)
        return shard

    def _reduce_scatter_flat(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Sum shards with ``dim`` in front, padded to the largest."""
        bounds = self.shard_bounds(x.shape[dim])
        largest = bounds[0][1] - bounds[0][0]
        front = x.transpose(0, dim)
        inner = front.shape[1:]
        if not self.is_sorted or x.shape[dim] % self.size:
            padded = front.new_zeros(self.size, largest, *inner)
            for index, (low, high) in enumerate(bounds):
                padded[self.group_positions[index], : high - low] = front[low:high]
            front = padded
        front = front.contiguous()
        out = front.new_empty(largest, *inner)
        start = functools.partial(
            torch_compat.reduce_scatter_flat, out.view(-1), front.view(-1), self.group
        )
        result = out if dim == 0 else None
        self.run_collective("reduce_scatter", front, start, result=result, counted=x)
        low, high = bounds[self.index]
        return out[: high - low].transpose(0, dim).contiguous()

    @keeps_result
    def all_to_all(
        self, x: torch.Tensor, split_dim: int, concat_dim: int, total: int
    ) -> torch.Tensor:
        """
        Shard a tensor along ``split_dim`` that is sharded along ``concat_dim`` (of size ``total``).
        """
        if self.size == 1:
            return x
        if torch.compiler.is_compiling():
            return torch.ops.pdrun_axis.all_to_all(x, self.axis_id, split_dim, concat_dim, total)
        bounds = self.shard_bounds(x.shape[split_dim])
        shards = [x.narrow(split_dim, low, high - low) for low, high in bounds]
        own_low, own_high = bounds[self.index]
        shapes = []
        for low, high in self.shard_bounds(total):
            shape = list(x.shape)
            shape[split_dim] = own_high - own_low
            shape[concat_dim] = high - low
            shapes.append(tuple(shape))
        return torch.cat(self.all_to_all_lists(shards, shapes), dim=concat_dim)

    def all_to_all_lists(
        self, inputs: list[torch.Tensor], shapes: list[tuple[int, ...]]
    ) -> list[torch.Tensor]:
        """
        Send ``inputs[i]`` to the rank with index i; return what each rank sent to this one.

        Args:
            shapes: of the received tensors, by index.
        """
        if self.size == 1:
            return [inputs[0]]
        # torch's group is sorted: tensors are sent in the order of its positions
        by_position = [self.group_positions.index(position) for position in range(self.size)]
        send = torch.cat([inputs[index].reshape(-1) for index in by_position])
        received = [torch.Size(shapes[index]).numel() for index in by_position]
        sent = [inputs[index].numel() for index in by_position]
        out = send.new_empty(sum(received))
        start = functools.partial(
            dist.all_to_all_single, out, send, received, sent, group=self.group, async_op=True
        )
        self.run_collective("all_to_all", send, start)
        outputs = dict(zip(by_position, out.split(received), strict=True))
        return [outputs[index].view(shapes[index]) for index in range(self.size)]

    def broadcast(self, x: torch.Tensor, index: int = 0) -> torch.Tensor:
        """Fill ``x`` with the tensor of the rank with that index, and return it."""
        if self.size > 1:
            start = functools.partial(
                dist.broadcast,
                torch_compat.as_sendable(x),
                src=self.ranks[index],
                group=self.group,
                async_op=True,
            )
            self.run_collective("broadcast", x, start)
        return x

    def shift(self, x: torch.Tensor, by: int = 1) -> torch.Tensor:
        """Send ``x`` to the rank ``by`` places on in a ring; return the tensor received."""
        return self.start_shift(x, by).wait()

    def start_shift(
        self, x: torch.Tensor, by: int = 1, shape: tuple[int, ...] | None = None
    ) -> PendingTensor:
        """
        Start a `shift`.

        Args:
            shape: of the received tensor, if it differs from that of ``x``.
        """
        if self.size == 1:
            return PendingTensor(x)
        x = x.detach().contiguous()
        out = x.new_empty(x.shape if shape is None else shape)
        if self.state.is_dry_run:
            return PendingTensor(out)
        target = self.ranks[(self.index + by) % self.size]
        source = self.ranks[(self.index - by) % self.size]
        transfers = []
        if x.numel():
            transfers.append(dist.P2POp(dist.isend, x, target, self.group))
        if out.numel():
            transfers.append(dist.P2POp(dist.irecv, out, source, self.group))
        works = dist.batch_isend_irecv(transfers) if transfers else []
        self.state.count_collective("shift", self.names, x.nbytes)
        return PendingTensor(out, tuple(works), x, self.state, f"a shift {self.label}")


_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
