"""
The plain collectives along an axis of a mesh.

They know nothing of autograd (`collectives` does), return new tensors unless they say otherwise,
and are counted. Along an axis of one device they cost nothing and count nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pdrun.errors import UsageError
from pdrun.parallel import torch_compat as compat
from pdrun.parallel.comm import custom_ops as traced
from pdrun.parallel.comm.p2p_copy import LEAST, Gather, Peers, Sum, open_peers
from pdrun.parallel.layouts.layout import shard_range

if TYPE_CHECKING:
    from pdrun.parallel.comm.groups import Axes


@dataclass
class Count:
    """How often a collective ran, and the bytes of this rank's input to it."""

    calls: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Pending:
    """
    A tensor that is on its way.

    Attributes:
        out: what comes; not to be read before `wait`.
        works: torch's handles; none where nothing travels.
        sent: what goes, which has to live as long.
    """

    out: torch.Tensor
    works: tuple[Any, ...] = ()
    sent: torch.Tensor | None = None
    axes: Axes | None = None
    label: str = ""

    def wait(self) -> torch.Tensor:
        """
        Return what came, when it is there (on an accelerator: for what is put on its stream from
        now on).
        """
        if self.axes is not None and self.works:
            self.axes.pause()
            for work in self.works:
                self.axes.watch.wait(work, self.label)
        return self.out


ROW = 1 << 18
"""Bytes of a row that is worth a transfer of its own."""


class Axis:
    """
    One rank's place along some axes, and the collectives there.

    Attributes:
        names: the axes, major first.
        ranks: who is there, in the order of their index.
        index: this rank's place among them.
        group: torch's process group; None where this rank is alone.
    """

    def __init__(
        self, axes: Axes, names: tuple[str, ...], ranks: tuple[int, ...], index: int, group: Any
    ) -> None:
        self.axes = axes
        self.names = names
        self.ranks = ranks
        self.index = index
        self.group = group
        self.size = len(ranks)
        self._label = f"along {'/'.join(names)}"
        ordered = sorted(ranks)
        self._order = [ordered.index(rank) for rank in ranks]
        self.sorted = ordered == list(ranks)
        """Whether torch's group has the ranks in this order."""
        self._number = traced.number(self)
        self._peers: Peers | None = None
        self._reached = True
        """Whether the devices can write into each other's memory, as far as is known."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        """Return itself: a copy of a model works at the same place."""
        return self

    # ---- collectives --------------------------------------------------------

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """
        Return the sum ("sum"), largest ("max") or smallest ("min") over the ranks, element by
        element.
        """
        if self.size == 1:
            return x
        if torch.compiler.is_compiling():
            return torch.ops.pdrun_axis.all_reduce(x, self._number, op)
        out = x.clone(memory_format=torch.contiguous_format)
        start = functools.partial(
            dist.all_reduce, out, op=_OPS[op], group=self.group, async_op=True
        )
        self._run("all_reduce", x, start, comes=out)
        return out

    def all_gather(self, x: torch.Tensor, dim: int, total: int | None = None) -> torch.Tensor:
        """
        Return the ranks' tensors, one after the other along ``dim``.

        Args:
            total: size of ``dim`` of the result where parts may differ by one (see `cut`); default:
                all are like ``x``.
        """
        if self.size == 1:
            return x
        if torch.compiler.is_compiling():
            return torch.ops.pdrun_axis.all_gather(x, self._number, dim, total)
        x, dim = x.detach(), dim % x.dim()
        sizes = self._sizes(x.shape[dim], dim, total)
        most = max(sizes)
        if min(sizes) == most and (peers := self._reaching(x, dim)):
            whole = x.new_empty(*x.shape[:dim], self.size * most, *x.shape[dim + 1 :])
            x = x.contiguous()
            rows = x.view(math.prod(x.shape[:dim]), -1)
            start = functools.partial(Gather, peers, whole.view(len(rows), self.size, -1), rows)
            self._run("all_gather", x, start, comes=whole)
            return whole
        if self._by_rows(x, dim) and min(sizes) == most:
            whole = x.new_empty(x.shape[0], self.size * most, *x.shape[2:])
            x = x.contiguous()
            self._run(
                "all_gather", x, lambda: compat.gather_rows(whole, x, self.group), comes=whole
            )
            return whole
        front = x.transpose(0, dim)
        if front.shape[0] < most:
            front = torch.cat([front, front.new_zeros(most - front.shape[0], *front.shape[1:])])
        front = front.contiguous()
        out = front.new_empty(self.size, *front.shape)
        as_it_comes = dim == 0 and self.sorted and min(sizes) == most
        start = functools.partial(compat.all_gather_flat, out.view(-1), front.view(-1), self.group)
        self._run("all_gather", front, start, comes=out if as_it_comes else None, given=x)
        parts = [out[self._order[place]][:size] for place, size in enumerate(sizes)]
        plain = out.flatten(0, 1) if self.sorted and min(sizes) == most else torch.cat(parts)
        return plain.transpose(0, dim).contiguous()

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part (see `cut`) along ``dim`` of the sum over the ranks."""
        if self.size == 1:
            return x
        if torch.compiler.is_compiling():
            return torch.ops.pdrun_axis.reduce_scatter(x, self._number, dim)
        x, dim = x.detach(), dim % x.dim()
        bounds = [shard_range(x.shape[dim], self.size, place) for place in range(self.size)]
        most = bounds[0][1] - bounds[0][0]
        if x.shape[dim] % self.size == 0 and (peers := self._reaching(x.narrow(dim, 0, most), dim)):
            part = x.new_empty(*x.shape[:dim], most, *x.shape[dim + 1 :])
            x = x.contiguous()
            rows = x.view(math.prod(x.shape[:dim]), self.size, -1)
            start = functools.partial(
                Sum, peers, part.view(len(rows), -1), lambda place: rows[:, place]
            )
            self._run("reduce_scatter", x, start, comes=part)
            return part
        if self._by_rows(x, dim) and x.shape[dim] % self.size == 0:
            part = x.new_empty(x.shape[0], most, *x.shape[2:])
            x = x.contiguous()
            self._run(
                "reduce_scatter", x, lambda: compat.scatter_rows(part, x, self.group), comes=part
            )
            return part
        front = x.transpose(0, dim)
        if not self.sorted or x.shape[dim] % self.size:
            padded = front.new_zeros(self.size, most, *front.shape[1:])
            for place, (low, high) in enumerate(bounds):
                padded[self._order[place], : high - low] = front[low:high]
            front = padded
        front = front.contiguous()
        out = front.new_empty(most, *front.shape[2:] if front.dim() > x.dim() else front.shape[1:])
        start = functools.partial(
            compat.reduce_scatter_flat, out.view(-1), front.view(-1), self.group
        )
        self._run("reduce_scatter", front, start, comes=out if dim == 0 else None, given=x)
        low, high = bounds[self.index]
        return out[: high - low].transpose(0, dim).contiguous()

    def all_to_all(
        self, parts: list[torch.Tensor], shapes: list[tuple[int, ...]]
    ) -> list[torch.Tensor]:
        """
        Send ``parts[i]`` to the rank with index i; return what each rank sent here.

        Args:
            shapes: of what is received, by index.
        """
        if self.size == 1:
            return [parts[0]]
        inverse = [self._order.index(place) for place in range(self.size)]
        send = torch.cat([parts[place].reshape(-1) for place in inverse])
        counts = [torch.Size(shapes[place]).numel() for place in inverse]
        out = send.new_empty(sum(counts))
        given = [parts[place].numel() for place in inverse]
        options: dict[str, Any] = {"group": self.group, "async_op": True}
        self._run(
            "all_to_all", send, lambda: dist.all_to_all_single(out, send, counts, given, **options)
        )
        found = dict(zip(inverse, out.split(counts), strict=True))
        return [found[place].view(shapes[place]) for place in range(self.size)]

    def swap(self, x: torch.Tensor, cut_dim: int, whole_dim: int, total: int) -> torch.Tensor:
        """
        Return a tensor that is cut along ``whole_dim``, of ``total`` elements, cut along
        ``cut_dim`` instead.
        """
        if self.size == 1:
            return x
        if torch.compiler.is_compiling():
            return torch.ops.pdrun_axis.all_to_all(x, self._number, cut_dim, whole_dim, total)
        bounds = [shard_range(x.shape[cut_dim], self.size, place) for place in range(self.size)]
        parts = [x.narrow(cut_dim, low, high - low) for low, high in bounds]
        shapes = []
        mine = bounds[self.index][1] - bounds[self.index][0]
        for place in range(self.size):
            low, high = shard_range(total, self.size, place)
            shape = list(x.shape)
            shape[cut_dim], shape[whole_dim] = mine, high - low
            shapes.append(tuple(shape))
        return torch.cat(self.all_to_all(parts, shapes), dim=whole_dim)

    def broadcast(self, x: torch.Tensor, index: int = 0) -> torch.Tensor:
        """Fill ``x`` with what the rank with that index has, and return it."""
        if self.size > 1:
            source = self.ranks[index]
            raw = compat.sendable(x)
            self._run(
                "broadcast",
                x,
                lambda: dist.broadcast(raw, src=source, group=self.group, async_op=True),
            )
        return x

    def shift(self, x: torch.Tensor, by: int = 1) -> torch.Tensor:
        """
        Send ``x`` to the rank ``by`` places on, in a ring; return what came, which has the same
        shape.
        """
        return self.start_shift(x, by).wait()

    def start_shift(
        self, x: torch.Tensor, by: int = 1, shape: tuple[int, ...] | None = None
    ) -> Pending:
        """
        Start a `shift`; what comes is there when the result's ``wait()`` has returned.

        Args:
            shape: of what comes, where it differs from that of ``x``.
        """
        if self.size == 1:
            return Pending(x)
        x = x.detach().contiguous()
        out = x.new_empty(x.shape if shape is None else shape)
        if self.axes.pretends:
            return Pending(out)
        to = self.ranks[(self.index + by) % self.size]
        source = self.ranks[(self.index - by) % self.size]
        moves = [dist.P2POp(dist.isend, x, to, self.group)] if x.numel() else []
        moves += [dist.P2POp(dist.irecv, out, source, self.group)] if out.numel() else []
        works = dist.batch_isend_irecv(moves) if moves else []
        self._count("shift", _nbytes(x))
        return Pending(out, tuple(works), x, self.axes, f"a shift {self._label}")

    def peers(self, part: torch.Tensor) -> Peers | None:
        """
        Return the memory through which sums of such parts go, or None where they are torch's.

        All ranks of the axis ask for the same parts in the same order.
        """
        nbytes = _nbytes(part)
        if nbytes < LEAST or not self._reached or self.axes.pretends:
            return None
        if self._peers is None or self._peers.nbytes < nbytes:
            self._peers = open_peers(self, nbytes)
            self._reached = self._peers is not None
        return self._peers

    def begin(
        self,
        name: str,
        nbytes: int,
        start: Callable[[], Any],
        comes: torch.Tensor,
        *,
        whole: bool,
        sent: torch.Tensor | None = None,
    ) -> None:
        """
        Start a collective and wait for it, or leave that to whoever `deferring` is.

        Args:
            nbytes: what this rank gives to it.
            start: returns what can be waited for.
            comes: where the result comes.
            whole: whether nothing is done to it afterwards.
            sent: what has to stay until then.
        """
        self._count(name, nbytes)
        label = f"the {name.replace('_', '-')} {self._label}"
        pending = Pending(comes, (start(),), sent, self.axes, label)
        if whole and comes.numel() and self.axes._deferred is not None:
            self.axes._deferred.append(pending)
        else:
            pending.wait()

    # ---- inside -------------------------------------------------------------

    def _reaching(self, part: torch.Tensor, dim: int) -> Peers | None:
        """
        Return what `peers` does for a part along a dim; None where it would travel in small pieces.
        """
        lead = math.prod(part.shape[:dim])
        if lead == 1 or _nbytes(part) >= lead * ROW:
            return self.peers(part)
        return None

    def _by_rows(self, x: torch.Tensor, dim: int) -> bool:
        """
        Whether parts along dim 1 travel row by row, which needs no copy to bring them together.

        gloo knows no such thing, and rows of a few bytes are not worth it.
        """
        return (
            dim == 1 and x.is_cuda and self.sorted and x.shape[1:].numel() * x.element_size() >= ROW
        )

    def _sizes(self, mine: int, dim: int, total: int | None) -> list[int]:
        if total is None:
            return [mine] * self.size
        bounds = [shard_range(total, self.size, place) for place in range(self.size)]
        sizes = [high - low for low, high in bounds]
        if sizes[self.index] != mine:
            what = f"{mine} along dim {dim} is not this rank's part of {total}"
            raise UsageError(what, where=f"gather {self._label}")
        return sizes

    def _run(
        self,
        name: str,
        sent: torch.Tensor,
        start: Callable[[], Any],
        *,
        comes: torch.Tensor | None = None,
        given: torch.Tensor | None = None,
    ) -> None:
        """
        `begin` a collective of torch, if anything is to move.

        Args:
            sent: what travels.
            comes: where the result comes, if nothing is done to it afterwards.
            given: what is counted; default: what travels.
        """
        if not self.axes.pretends:
            nbytes = _nbytes(sent if given is None else given)
            self.begin(
                name,
                nbytes,
                start,
                sent if comes is None else comes,
                whole=comes is not None,
                sent=sent,
            )

    def _count(self, name: str, nbytes: int) -> None:
        count = self.axes.counts.setdefault((name, self.names), Count())
        count.calls += 1
        count.nbytes += nbytes


def _nbytes(x: torch.Tensor) -> int:
    return int(x.numel() * x.element_size())


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
