"""The tables of a program without servers: in the worker's own memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pdrun.parallel.servers.frames import Op
from pdrun.parallel.servers.links.link import PushHeader, Reply
from pdrun.parallel.servers.settings import Mode, TableSpec
from pdrun.parallel.servers.tables import snapshot
from pdrun.parallel.servers.tables.store import TableStore


class TablesInProcess:
    """The tables of this process: a program without servers."""

    def __init__(self, mode: Mode) -> None:
        self.returns = 0
        self.store = TableStore(mode)
        self._results: deque[Reply] = deque()
        self._request = 0

    def declare_table(self, spec: TableSpec) -> int:
        """See `ServerLink.declare_table`."""
        return self.store.declare_table(spec)

    def begin_rows(self, table: int, ids: torch.Tensor, dim: int) -> None:
        """See `ServerLink.begin_rows`."""
        self._results.append(self.store.read_rows(table, ids))

    def begin_changed(self, table: int, ids: torch.Tensor, since: torch.Tensor, dim: int) -> None:
        """See `ServerLink.begin_changed`."""
        self._results.append(self.store.read_changed(table, ids, since))

    def begin_pull(self, table: int, pieces: Sequence[int], outs: Sequence[torch.Tensor]) -> None:
        """See `ServerLink.begin_pull`."""
        for piece, out in zip(pieces, outs, strict=True):
            out.copy_(self.store.read_piece(table, piece))
            self._results.append(0)

    def begin_push(
        self,
        table: int,
        push: PushHeader,
        values: torch.Tensor,
        *,
        ids: torch.Tensor | None = None,
        piece: int = 0,
    ) -> None:
        """See `ServerLink.begin_push`."""
        self._request += 1
        # the caller's tensor stays as it is
        values = values.clone()
        more: dict[str, Any] = {"request": self._request, "step": push.step}
        more |= {"part": push.part, "divisor": push.divisor}
        if ids is None:
            self.store.push_piece(table, piece, values, **more)
        else:
            self.store.push_rows(table, ids, values, **more)
        self._results.append(0)

    def begin_push_pieces(
        self,
        table: int,
        push: PushHeader,
        pieces: Sequence[int],
        grads: Sequence[torch.Tensor],
    ) -> None:
        """See `ServerLink.begin_push_pieces`."""
        for piece, grad in zip(pieces, grads, strict=True):
            self.begin_push(table, push, grad, piece=piece)

    def begin_assign(
        self, table: int, values: torch.Tensor, *, ids: torch.Tensor | None = None, piece: int = 0
    ) -> None:
        """See `ServerLink.begin_assign`."""
        if ids is None:
            self.store.assign_piece(table, piece, values)
        else:
            self.store.assign_rows(table, ids, values)
        self._results.append(0)

    def begin_order(
        self, op: Op, *, table: int = 0, step: int = 0, folder: str = "", later: str = ""
    ) -> None:
        """See `ServerLink.begin_order`."""
        result = 0
        match op:
            case Op.OPEN:
                self.store.open_table(table)
            case Op.CLOCK:
                self._request += 1
                result = self.store.end_step(step, request=self._request)
            case Op.SNAPSHOT:
                snapshot.write_tables(self.store, Path(folder), step)
            case Op.RESTORE:
                result = snapshot.read_tables(self.store, Path(folder))
        self._results.append(result)

    def finish(self) -> Reply:
        """See `ServerLink.finish`."""
        return self._results.popleft()

    def finish_all(self) -> None:
        """See `ServerLink.finish_all`."""
        self._results.clear()

    def finish_last(self) -> Reply:
        """See `ServerLink.finish_last`."""
        result = self._results[-1]
        self._results.clear()
        return result

    def close(self) -> None:
        """See `ServerLink.close`."""
