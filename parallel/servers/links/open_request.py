"""A request that a server has not answered yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pdrun.parallel.checkpoint.storage import byte_view
from pdrun.parallel.servers.frames import SHARED_VALUES, Frame, Op


@dataclass
class OpenRequest:
    """A request without a reply yet, with what a repetition needs."""

    frame: Frame
    parts: tuple[Any, ...] = ()
    tensors: Sequence[torch.Tensor] = ()
    """For the values of a pull, or the gradients in a mailbox."""
    pieces: Sequence[int] = ()
    """The numbers of these tensors, if they are in shared memory."""
    dim: int = 0
    kept: Any = ()
    """The tensors whose bytes ``parts`` refers to."""

    def without_memory(self) -> list[OpenRequest]:
        """Return requests that need no shared memory: that of a lost connection is gone."""
        if self.frame.flags != SHARED_VALUES:
            return [self]
        if self.frame.op == Op.PUSH_ROWS:
            return [replace(self, frame=replace(self.frame, flags=0, slot=0))]
        found = []
        first = self.frame.request + 1 - len(self.pieces)
        for number, (piece, tensor) in enumerate(zip(self.pieces, self.tensors, strict=True)):
            frame = replace(self.frame, flags=0, count=0, slot=0, place=piece)
            if frame.op == Op.PULL:
                found.append(OpenRequest(frame, tensors=(tensor,)))
            else:
                frame.request = first + number
                found.append(OpenRequest(frame, (byte_view(tensor),), kept=tensor))
        return found
