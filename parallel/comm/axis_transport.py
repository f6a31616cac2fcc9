"""
How the collectives along axes of a mesh are started, counted and awaited.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from pdrun.errors import UsageError
from pdrun.parallel.comm.axis_members import AxisMembers, assign_axis_id
from pdrun.parallel.comm.p2p.copier import MIN_SHARD_BYTES, LazyCopier, P2PCopier
from pdrun.parallel.comm.watchdog import CollectiveWatchdog
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import shard_range

Collective = TypeVar("Collective", bound=Callable[..., torch.Tensor])
MIN_ROW_BYTES = 1 << 18
"""Smallest row that is sent separately."""


@dataclass
class CollectiveCount:
    """Number of calls of a collective, and the bytes of this rank's input to them."""

    calls: int = 0
    nbytes: int = 0


class CollectiveState:
    """
    State that is shared by all axes of a mesh.

    Attributes:
        watchdog: bounds every wait.
        counts: calls and bytes by (name of the collective, names of the axes).
        is_dry_run: whether collectives move nothing: see `dry_run`.
        yield_turn: called between the start of each collective and the wait for it: see
            `overlapping`.
        in_flight: collectives that compiled code has started and not waited for yet, by the address
            of the result.
        deferred: where collectives go instead of being waited for; None outside of `deferring`.
    """

    def __init__(self, watchdog: CollectiveWatchdog) -> None:
        self.watchdog = watchdog
        self.counts: dict[tuple[str, tuple[str, ...]], CollectiveCount] = {}
        self.is_dry_run = False
        self.yield_turn: Callable[[], None] = _do_nothing
        self.in_flight: dict[int, PendingTensor] = {}
        self.deferred: list[PendingTensor] | None = None

    def count_collective(self, name: str, axes: tuple[str, ...], nbytes: int) -> None:
        """Count one collective along some axes."""
        count = self.counts.setdefault((name, axes), CollectiveCount())
        count.calls += 1
        count.nbytes += nbytes

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """Inside, collectives return tensors of the right shape and move nothing (fake tensors)."""
        self.is_dry_run = True
        try:
            yield
        finally:
            self.is_dry_run = False

    @contextmanager
    def overlapping(self, yield_turn: Callable[[], None]) -> Iterator[None]:
        """Inside, ``yield_turn`` is called between the start and the wait of each collective."""
        before = self.yield_turn
        self.yield_turn = yield_turn
        try:
            yield
        finally:
            self.yield_turn = before

    @contextmanager
    def deferring(self) -> Iterator[list[PendingTensor]]:
        """
        Inside, collectives whose result needs no further work are put into the list, not awaited.
        """
        self.deferred = []
        try:
            yield self.deferred
        finally:
            self.deferred = None


@dataclass
class PendingTensor:
    """
    The result of a collective that has been started.

    Attributes:
        out: the result; must not be read before `wait`.
        works: torch's handles; empty if nothing is sent.
        sent: the input, which must live until `wait`.
        state, label: how to wait, and the name of the collective in errors.
    """

    out: torch.Tensor
    works: tuple[Any, ...] = ()
    sent: torch.Tensor | None = None
    state: CollectiveState | None = None
    label: str = ""

    def wait(self) -> torch.Tensor:
        """
        Wait for the result and return it.

        On an accelerator the current stream waits, not the process.
        """
        if self.state is not None and self.works:
            self.state.yield_turn()
            for work in self.works:
                self.state.watchdog.wait(work, self.label)
            self.works = ()  # torch's handles refer to the tensors
            self.sent = None
        return self.out


class KeptResults:
    """
    Results of the collectives of one forward pass, which its recomputation uses again.

    The recomputation is the same program: its collectives come in the same order. A result that was
    changed in place since is not used.
    """

    def __init__(self) -> None:
        self._results: list[tuple[torch.Tensor, int]] = []
        self._next = 0
        self._is_recording = True

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, results of collectives are kept."""
        with self._as_current(is_recording=True):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Inside, collectives return what was kept and send nothing."""
        with self._as_current(is_recording=False):
            yield

    @contextmanager
    def _as_current(self, *, is_recording: bool) -> Iterator[None]:
        before = getattr(_kept, "results", None)
        _kept.results = self
        self._is_recording = is_recording
        self._next = 0
        try:
            yield
        finally:
            _kept.results = before

    def run(self, call: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the result of a collective, kept or computed."""
        if self._is_recording:
            result = call()
            self._results.append((result.detach(), result._version))
            return result
        place = self._next
        self._next += 1
        if place < len(self._results):
            result, version = self._results[place]
            if result._version == version:
                return result.detach()
        return call()


_kept = threading.local()
"""``results`` is the `KeptResults` of the forward pass that this thread computes."""


def keeps_result(collective: Collective) -> Collective:
    """Make the result of a method be kept inside of `KeptResults.recording`."""

    @functools.wraps(collective)
    def run(axis: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling() or axis.size == 1:
            return collective(axis, *args, **kwargs)
        results = getattr(_kept, "results", None)
        if results is None:
            return collective(axis, *args, **kwargs)
        made: torch.Tensor = results.run(lambda: collective(axis, *args, **kwargs))
        return made

    return cast("Collective", run)


class AxisTransport(AxisMembers):
    """
    Starts the collectives of the ranks along some axes of a mesh.

    Args:
        state: what the axes of the mesh share.
        names, ranks, index, group, device, grid, rank: see `AxisMembers`.
    """

    def __init__(
        self,
        state: CollectiveState,
        names: tuple[str, ...],
        ranks: tuple[int, ...],
        index: int,
        group: Any,
        device: torch.device,
        grid: Grid,
        rank: int,
    ) -> None:
        super().__init__(names, ranks, index, group, device, grid, rank)
        self.state = state
        self.label = f"along {'/'.join(names)}"
        ordered = sorted(ranks)
        self.group_positions = [ordered.index(rank) for rank in ranks]
        """Position in torch's group, which is sorted, of each index."""
        self.axis_id = assign_axis_id(self)
        self._copies = LazyCopier(self)

    def find_copier(self, shard: torch.Tensor) -> P2PCopier | None:
        """
        Return the memory for copies of such shards between devices; None to use torch's
        collectives.

        All ranks of the axis must ask for the same shards in the same order.
        """
        if shard.nbytes < MIN_SHARD_BYTES or self.state.is_dry_run:
            return None
        return self._copies.find(shard.nbytes)

    def start_collective(
        self,
        name: str,
        nbytes: int,
        start: Callable[[], Any],
        result: torch.Tensor,
        *,
        is_final: bool,
        sent: torch.Tensor | None = None,
    ) -> None:
        """
        Start a collective and wait for it, or defer the wait (`CollectiveState.deferring`).

        Args:
            nbytes: bytes of this rank's input.
            start: starts the collective and returns a handle to wait for.
            result: tensor that the collective writes.
            is_final: whether ``result`` needs no further work after the wait.
            sent: tensor that must live until the wait.
        """
        self.state.count_collective(name, self.names, nbytes)
        label = f"the {name.replace('_', '-')} {self.label}"
        pending = PendingTensor(result, (start(),), sent, self.state, label)
        if is_final and result.numel() and self.state.deferred is not None:
            self.state.deferred.append(pending)
            return
        # the wait may run another copy of the model, whose collectives are not deferred
        before, self.state.deferred = self.state.deferred, None
        try:
            pending.wait()
        finally:
            self.state.deferred = before

    def run_collective(
        self,
        name: str,
        sent: torch.Tensor,
        start: Callable[[], Any],
        *,
        result: torch.Tensor | None = None,
        counted: torch.Tensor | None = None,
    ) -> None:
        """
        Start a collective (`start_collective`), except in a dry run.

        Args:
            sent: tensor that is sent.
            result: tensor that the collective writes, if it needs no further work.
            counted: tensor whose bytes are counted; default: ``sent``.
        """
        if self.state.is_dry_run:
            return
        self.start_collective(
            name,
            (sent if counted is None else counted).nbytes,
            start,
            sent if result is None else result,
            is_final=result is not None,
            sent=sent,
        )

    def copier_along(self, shard: torch.Tensor, dim: int) -> P2PCopier | None:
        """Return `find_copier` for a shard along a dim; None if its rows are too small."""
        lead = math.prod(shard.shape[:dim])
        if lead == 1 or shard.nbytes >= lead * MIN_ROW_BYTES:
            return self.find_copier(shard)
        return None

    def sends_rows(self, x: torch.Tensor, dim: int) -> bool:
        """
        Whether shards along dim 1 are sent row by row, without a copy that brings rows together.

        gloo does not support it, and it is slower for rows of a few bytes.
        """
        row_bytes = x.shape[1:].numel() * x.element_size()
        return dim == 1 and x.is_cuda and self.is_sorted and row_bytes >= MIN_ROW_BYTES

    def shard_bounds(self, total: int) -> list[tuple[int, int]]:
        """Return (low, high) of each rank's shard of a dim."""
        return [shard_range(total, self.size, index) for index in range(self.size)]

    def shard_sizes(self, own: int, dim: int, total: int | None) -> list[int]:
        """Return the size of each rank's shard of a dim."""
        if total is None:
            return [own] * self.size
        sizes = [high - low for low, high in self.shard_bounds(total)]
        if sizes[self.index] != own:
            what = (
                f"dim {dim} must have this rank's shard of {total}, {sizes[self.index]}, got {own}"
            )
            raise UsageError(what, where=f"all-gather {self.label}")
        return sizes


def _do_nothing() -> None:
    """Do nothing."""
