"""
What a worker uses of the tables of one server, wherever they are.

Requests are begun and then finished in the same order, so that all servers work at one time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from pdrun.parallel.servers.frames import Op
from pdrun.parallel.servers.settings import TableSpec
from pdrun.parallel.servers.tables.store import ChangedRows

Reply: TypeAlias = torch.Tensor | ChangedRows | int


@dataclass(frozen=True)
class PushHeader:
    """What a push has in addition to ids and values."""

    step: int = 0
    part: int = 0
    divisor: float = 1.0
    is_held: bool = False
    """The end of the step follows at once: they may be one message."""


class ServerLink(Protocol):
    """The tables of one server, as a worker uses them."""

    returns: int
    """Times that the connection was made again; a server may have gone back to earlier values."""

    def declare_table(self, spec: TableSpec) -> int:
        """Make a table, or check that it is the same; return its number at this server."""
        ...

    def begin_rows(self, table: int, ids: torch.Tensor, dim: int) -> None:
        """Ask for rows."""
        ...

    def begin_changed(self, table: int, ids: torch.Tensor, since: torch.Tensor, dim: int) -> None:
        """Ask for the rows that have changed since these versions."""
        ...

    def begin_pull(self, table: int, pieces: Sequence[int], outs: Sequence[torch.Tensor]) -> None:
        """Ask for all pieces of a dense weight that the server has, to be written to ``outs``."""
        ...

    def begin_push(
        self,
        table: int,
        push: PushHeader,
        values: torch.Tensor,
        *,
        ids: torch.Tensor | None = None,
        piece: int = 0,
    ) -> None:
        """Push gradients of rows (``ids``) or of a piece."""
        ...

    def begin_push_pieces(
        self,
        table: int,
        push: PushHeader,
        pieces: Sequence[int],
        grads: Sequence[torch.Tensor],
    ) -> None:
        """Push the gradients of all pieces that the server has."""
        ...

    def begin_assign(
        self, table: int, values: torch.Tensor, *, ids: torch.Tensor | None = None, piece: int = 0
    ) -> None:
        """Send first values of rows (``ids``) or of a piece."""
        ...

    def begin_order(
        self, op: Op, *, table: int = 0, step: int = 0, folder: str = "", later: str = ""
    ) -> None:
        """
        Ask for something without values: OPEN, CLOCK, SNAPSHOT, RESTORE.

        Args:
            later: the name that a checkpoint's folder gets when it is complete; empty: the same.
        """
        ...

    def finish(self) -> Reply:
        """Wait for the oldest reply: rows, what has changed, or a number."""
        ...

    def finish_all(self) -> None:
        """Wait for all replies."""
        ...

    def finish_last(self) -> Reply:
        """Wait for all replies, and return the last one."""
        ...

    def close(self) -> None:
        """End the link."""
        ...
