"""
Messages between two devices of one host: the sender copies into memory of the receiver.

Nothing occupies a processor while it waits. A receive is executed by the stream that needs the
tensor, where it needs it. The memory has `SLOT_COUNT` slots for each direction; message k takes
slot k modulo their number:

    sender      done >= k - SLOT_COUNT, copy into the slot, ready := k     on a stream for sends
    receiver    ready >= k, copy out of the slot, done := k                on the current stream
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta

import torch

from pdrun.parallel.comm.axis_members import AxisMembers
from pdrun.parallel.comm.p2p.copier import ALIGNMENT_BYTES, P2PCopier, open_copier

SLOT_COUNT = 4
"""Messages that a sender can be ahead of the receiver."""
MIN_MESSAGE_BYTES = 1 << 16
"""Smallest message for which a copy is worth its calls of the driver."""


def open_mailbox(pair: AxisMembers, nbytes: int) -> P2PMailbox | None:
    """
    Return memory for messages of up to a number of bytes between two devices; None if they cannot
    reach each other, or must not.

    Both ranks must call it, and get the same answer.
    """
    slot = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    copier = open_copier(pair, SLOT_COUNT * slot)
    return None if copier is None else P2PMailbox(copier, slot)


class P2PMailbox:
    """
    Messages in both directions between two devices; the directions are independent.

    Args:
        copier: the memory.
        slot_bytes: size of a slot.
    """

    def __init__(self, copier: P2PCopier, slot_bytes: int) -> None:
        self.copier = copier
        self.slot_bytes = slot_bytes
        self._own = copier.axis.index
        self._other = 1 - self._own
        self._sent_count = 0
        self._posted_count = 0
        self._posted: deque[PostedReceive] = deque()

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is sent by a copy; both ends decide it by the size alone."""
        return MIN_MESSAGE_BYTES <= int(tensor.nbytes) <= self.slot_bytes

    def send(self, tensor: torch.Tensor) -> SentMessage:
        """Send a contiguous tensor that the current stream computes; it must live until the end."""
        copier = self.copier
        self._sent_count += 1
        number = self._sent_count
        row = _as_row(tensor)
        stream = copier.send_stream
        stream.wait_stream(copier.current_stream())
        copier.await_counter(stream, copier.done_counter(self._other), number - SLOT_COUNT)
        copier.copy_shard(stream, self._slot_of(self._other, self._own, number, row), row)
        copier.set_counter(stream, self._other, copier.ready_counter(self._own), number)
        return SentMessage(copier, stream.record_event())

    def post_receive(self, tensor: torch.Tensor) -> PostedReceive:
        """Return the receive of the next message into a contiguous tensor."""
        self._posted_count += 1
        posted = PostedReceive(self, tensor, self._posted_count)
        self._posted.append(posted)
        return posted

    def receive_until(self, number: int) -> None:
        """Have the current stream receive the posted messages up to a number, in their order."""
        copier = self.copier
        stream = copier.current_stream()
        while self._posted and self._posted[0].number <= number:
            posted = self._posted.popleft()
            row = _as_row(posted.tensor)
            slot = self._slot_of(self._own, self._other, posted.number, row)
            copier.await_counter(stream, copier.ready_counter(self._other), posted.number)
            copier.copy_shard(stream, row, slot)
            copier.set_counter(stream, self._other, copier.done_counter(self._own), posted.number)

    def _slot_of(self, receiver: int, sender: int, number: int, like: torch.Tensor) -> torch.Tensor:
        skip = number % SLOT_COUNT * self.slot_bytes
        return self.copier.slot_of(receiver, sender, like, skip)


def _as_row(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, as one row."""
    return tensor.view(-1).view(torch.uint8).view(1, -1)


class SentMessage:
    """A message on its way; used like torch's handles of transfers."""

    def __init__(self, copier: P2PCopier, event: torch.cuda.Event) -> None:
        self._copier = copier
        self._event = event

    def is_completed(self) -> bool:
        """Whether the tensor can be changed and freed."""
        return bool(self._event.query())

    def wait(self, timeout: timedelta | None = None) -> None:
        """Have the current stream wait until the tensor can be changed."""
        self._copier.current_stream().wait_event(self._event)


class PostedReceive:
    """A receive that runs when it is waited for; used like torch's handles of transfers."""

    def __init__(self, mailbox: P2PMailbox, tensor: torch.Tensor, number: int) -> None:
        self._mailbox = mailbox
        self.tensor = tensor
        self.number = number

    def wait(self, timeout: timedelta | None = None) -> None:
        """Have the current stream receive the message, and those before it."""
        self._mailbox.receive_until(self.number)
