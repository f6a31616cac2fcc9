"""
Point-to-point connections along pp: tensors are sent between ranks in an order that both know.

Each pair of neighbours has two process groups, one per direction. A send never waits for a receive
of the other direction, also on NCCL, where all transfers of a group use one stream. Within a
direction the receiver posts its receives in the order of the sends. The groups form a ring, or
connect all pairs if a schedule needs it.

Devices of one host copy into each other's memory instead (`P2PMailbox`): a receive of NCCL is a
kernel that takes processors from the computation while it waits. The memory is opened after the
first step, whose messages show both ends of a connection how large it has to be.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pdrun.parallel import torch_compat
from pdrun.parallel.comm.axis_members import AxisMembers
from pdrun.parallel.comm.groups import MeshGroups
from pdrun.parallel.comm.p2p.messages import MIN_MESSAGE_BYTES, P2PMailbox, open_mailbox
from pdrun.parallel.pipeline.metadata import BoundaryRecord
from pdrun.parallel.startup.group_exit import ClosedGroup, register_holder

PIPELINE_AXIS = "pp"


@dataclass
class PendingReceive:
    """Tensors that are being received."""

    tensors: list[torch.Tensor]
    works: list[Any]


class P2PLinks:
    """
    The connections of one rank; every rank of the job must create its links at the same time.

    Args:
        axes: this rank's groups.
        wanted: pairs of indices along pp that must be connected.
    """

    def __init__(self, axes: MeshGroups, wanted: Iterable[tuple[int, int]]) -> None:
        self.axes = axes
        self.axis = axes[PIPELINE_AXIS]
        self._groups: dict[tuple[int, int], Any] = {}
        self._sending: list[tuple[Any, torch.Tensor, str]] = []
        self._largest: dict[int, int] = {}
        """Bytes of the largest message from or to each rank."""
        self._mailboxes: dict[int, P2PMailbox | None] = {}
        size = self.axis.size
        pairs = sorted({(min(at, (at + 1) % size), max(at, (at + 1) % size)) for at in range(size)})
        if not {(min(pair), max(pair)) for pair in wanted} <= set(pairs):
            pairs = list(itertools.combinations(range(size), 2))
        for low, high in pairs if size > 1 else ():
            if self.axis.index in (low, high):
                ranks = sorted((self.axis.ranks[low], self.axis.ranks[high]))
                for way in ((low, high), (high, low)):
                    self._groups[way] = torch_compat.new_group(ranks, axes.watchdog.seconds, self)
        self._connect_pairs()
        register_holder(self)

    def drop_groups(self) -> None:
        """Drop the process groups: the job is left."""
        self._groups = dict.fromkeys(self._groups, ClosedGroup())
        self._sending.clear()

    def _connect_pairs(self) -> None:
        """
        Have each pair exchange an element, in one order on all ranks.

        NCCL connects a pair at its first transfer and blocks both processes until then. Inside a
        schedule, where either can wait for a third rank, this could deadlock.
        """
        one = torch.zeros(1, device=self.axes.device)
        for (source, target), group in self._groups.items():
            mine = source == self.axis.index
            other = self.axis.ranks[target if mine else source]
            work = (dist.isend if mine else dist.irecv)(one, other, group=group)
            self.axes.watchdog.wait(work, f"first contact along {PIPELINE_AXIS}")

    def open_mailboxes(self) -> None:
        """
        Open memory for copies between devices of one host, for messages like those so far.

        All ranks along pp must call it, between steps.
        """
        for low, high in self._groups:
            if low > high:
                continue
            other = high if low == self.axis.index else low
            nbytes = self._largest.get(other, 0)
            if nbytes < MIN_MESSAGE_BYTES or other in self._mailboxes:
                continue
            pair = AxisMembers(
                self.axis.names,
                (self.axis.ranks[low], self.axis.ranks[high]),
                int(self.axis.index == high),
                self._groups[low, high],
                self.axis.device,
                self.axis.grid,
                self.axis.rank,
            )
            self._mailboxes[other] = open_mailbox(pair, nbytes)

    def _find_mailbox(self, place: int, tensor: torch.Tensor) -> P2PMailbox | None:
        """Return the memory for a message from or to a rank; None to use torch's transfers."""
        self._largest[place] = max(self._largest.get(place, 0), tensor.nbytes)
        mailbox = self._mailboxes.get(place)
        return mailbox if mailbox is not None and mailbox.takes(tensor) else None

    def __deepcopy__(self, memo: dict[int, Any]) -> P2PLinks:
        """Return itself."""
        return self

    def send_tensors(self, tensors: list[torch.Tensor], place: int, label: str) -> None:
        """Send tensors to a rank along pp without waiting; `wait_sends` ends it."""
        self._sending = [one for one in self._sending if not one[0].is_completed()]
        for tensor in tensors:
            if tensor.numel():
                plain = tensor.detach().contiguous()
                mailbox = self._find_mailbox(place, plain)
                if mailbox is not None:
                    work: Any = mailbox.send(plain)
                else:
                    group = self._groups[self.axis.index, place]
                    work = dist.isend(plain, self.axis.ranks[place], group=group)
                self._sending.append((work, plain, label))
                self._count_send(plain)

    def post_receives(
        self, shapes: list[tuple[tuple[int, ...], torch.dtype]], place: int
    ) -> PendingReceive:
        """
        Start to receive tensors from a rank; `wait_received` ends it.

        Receives must be posted in the order of the sends.
        """
        found = PendingReceive([], [])
        for shape, dtype in shapes:
            tensor = torch.empty(shape, dtype=dtype, device=self.axes.device)
            found.tensors.append(tensor)
            mailbox = self._find_mailbox(place, tensor)
            if mailbox is not None:
                found.works.append(mailbox.post_receive(tensor))
            elif tensor.numel():
                group = self._groups[place, self.axis.index]
                found.works.append(dist.irecv(tensor, self.axis.ranks[place], group=group))
        return found

    def wait_received(self, arriving: PendingReceive, label: str) -> list[torch.Tensor]:
        """Wait for the tensors and return them."""
        for work in arriving.works:
            self.axes.watchdog.wait(work, label)
        arriving.works.clear()  # torch's handles refer to the tensors
        return arriving.tensors

    def send_record(self, record: BoundaryRecord, place: int, label: str) -> None:
        """Send a record: its length, then its text."""
        text = record.encode().to(self.axes.device)
        self.send_tensors([torch.tensor([len(text)], device=self.axes.device), text], place, label)

    def receive_record(self, place: int, label: str) -> BoundaryRecord:
        """Wait for a record from a rank."""
        (length,) = self.wait_received(self.post_receives([((1,), torch.int64)], place), label)
        (text,) = self.wait_received(
            self.post_receives([((int(length),), torch.uint8)], place), label
        )
        return BoundaryRecord.decode(text)

    def wait_sends(self) -> None:
        """Wait for all sends."""
        for work, _, label in self._sending:
            self.axes.watchdog.wait(work, label)
        self._sending.clear()

    def _count_send(self, x: torch.Tensor) -> None:
        self.axes.state.count_collective("send", self.axis.names, x.nbytes)
