"""
A worker's links to the tables: in this process, or over a connection to one server.

Requests are begun and then finished in the same order, so that all servers work at one time.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from pdrun import errors
from pdrun.errors import PdrunError, PeerLost
from pdrun.parallel.checkpoint.storage import byte_view
from pdrun.parallel.servers.channel import Channel, deadline_error, open_channel
from pdrun.parallel.servers.frames import (
    JSON_VALUES,
    Frame,
    FrameError,
    Op,
    decode_json,
    encode_json,
)
from pdrun.parallel.servers.settings import Mode, TableSpec
from pdrun.parallel.servers.tables import snapshot
from pdrun.parallel.servers.tables.store import ChangedRows, TableStore

MAX_OPEN_REQUESTS = 64
RETRY_SECONDS = 0.05
Reply: TypeAlias = torch.Tensor | ChangedRows | int
REPLY_MARGIN_SECONDS = 10.0
"""A server's own limit of a wait ends first, since it knows who is missing."""


@dataclass(frozen=True)
class PushHeader:
    """What a push has in addition to ids and values."""

    step: int = 0
    part: int = 0
    divisor: float = 1.0


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

    def begin_piece(self, table: int, piece: int, out: torch.Tensor) -> None:
        """Ask for a piece of a dense weight, to be written to ``out``."""
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

    def close(self) -> None:
        """End the link."""
        ...


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

    def begin_piece(self, table: int, piece: int, out: torch.Tensor) -> None:
        """See `ServerLink.begin_piece`."""
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
        more: dict[str, Any] = {**vars(push), "request": self._request}
        if ids is None:
            self.store.push_piece(table, piece, values, **more)
        else:
            self.store.push_rows(table, ids, values, **more)
        self._results.append(0)

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

    def close(self) -> None:
        """See `ServerLink.close`."""


@dataclass
class _OpenRequest:
    """A request without a reply yet, with what a repetition needs."""

    frame: Frame
    parts: tuple[Any, ...]
    out: torch.Tensor | None = None
    dim: int = 0


@dataclass(frozen=True)
class WorkerIdentity:
    """How a worker introduces itself to the servers."""

    worker: int
    mode: Mode
    generation: int
    seconds: float
    """Limit of each wait."""
    patience: float = 0.0
    """Seconds in which a lost server must be back; 0: none."""


class RemoteLink:
    """
    A connection to one server.

    Args:
        find_addresses: returns the addresses of the server, the best one first.
    """

    def __init__(
        self,
        server: int,
        key: bytes,
        identity: WorkerIdentity,
        find_addresses: Callable[[], list[str]],
    ) -> None:
        self._server = server
        self._key = key
        self._identity = identity
        self._find_addresses = find_addresses
        self._client = secrets.token_hex(16)
        self._request = 0
        self._open: deque[_OpenRequest] = deque()
        self._results: deque[Reply] = deque()
        self._specs: list[TableSpec] = []
        self._ended_step = -1
        self.returns = 0
        try:
            self._channel = self._open_channel()
        except (OSError, FrameError) as error:
            raise self._lost_error(error) from None

    # ---- requests -----------------------------------------------------------

    def declare_table(self, spec: TableSpec) -> int:
        """See `ServerLink.declare_table`."""
        self.finish_all()
        self._begin(Frame(Op.DECLARE, flags=JSON_VALUES), encode_json(spec.to_json()))
        number = self._finish_number()
        self._specs.append(spec)
        return number

    def begin_rows(self, table: int, ids: torch.Tensor, dim: int) -> None:
        """See `ServerLink.begin_rows`."""
        frame = Frame(Op.ROWS, table, count=len(ids))
        self._begin(frame, byte_view(ids), dim=dim, keep=ids)

    def begin_changed(self, table: int, ids: torch.Tensor, since: torch.Tensor, dim: int) -> None:
        """See `ServerLink.begin_changed`."""
        frame = Frame(Op.ROWS_SINCE, table, count=len(ids))
        self._begin(frame, byte_view(ids), byte_view(since), dim=dim, keep=(ids, since))

    def begin_piece(self, table: int, piece: int, out: torch.Tensor) -> None:
        """See `ServerLink.begin_piece`."""
        self._begin(Frame(Op.PULL, table, place=piece), out=out)

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
        frame = Frame(Op.PUSH, table, push.part, step=push.step, place=piece, divisor=push.divisor)
        self._begin_values(frame, Op.PUSH_ROWS, values, ids)

    def begin_assign(
        self, table: int, values: torch.Tensor, *, ids: torch.Tensor | None = None, piece: int = 0
    ) -> None:
        """See `ServerLink.begin_assign`."""
        self._begin_values(Frame(Op.ASSIGN, table, place=piece), Op.ASSIGN_ROWS, values, ids)

    def _begin_values(
        self, frame: Frame, op_with_ids: Op, values: torch.Tensor, ids: torch.Tensor | None
    ) -> None:
        if ids is None:
            self._begin(frame, byte_view(values), keep=values)
        else:
            frame.op = op_with_ids
            frame.count = len(ids)
            self._begin(frame, byte_view(ids), byte_view(values), keep=(ids, values))

    def begin_order(
        self, op: Op, *, table: int = 0, step: int = 0, folder: str = "", later: str = ""
    ) -> None:
        """See `ServerLink.begin_order`."""
        if op in (Op.SNAPSHOT, Op.RESTORE):
            data = encode_json({"folder": folder, "later": later, "step": step})
            self._begin(Frame(op, flags=JSON_VALUES), data)
        else:
            self._begin(Frame(op, table, step=step))

    def _begin(
        self,
        frame: Frame,
        *parts: Any,
        out: torch.Tensor | None = None,
        dim: int = 0,
        keep: Any = (),
    ) -> None:
        if len(self._open) >= MAX_OPEN_REQUESTS:
            self._results.append(self._receive_reply())
        self._request += 1
        frame.request = self._request
        frame.generation = self._identity.generation
        self._open.append(_OpenRequest(frame, (*parts, _Kept(keep)), out, dim))
        try:
            self._channel.send_frame(frame, *parts)
        except OSError as error:
            self._recover(error)

    # ---- replies ------------------------------------------------------------

    def finish(self) -> Reply:
        """See `ServerLink.finish`."""
        if self._results:
            return self._results.popleft()
        return self._receive_reply()

    def finish_all(self) -> None:
        """See `ServerLink.finish_all`."""
        self._results.clear()
        while self._open:
            self._receive_reply()

    def _finish_number(self) -> int:
        result = self.finish()
        assert isinstance(result, int)
        return result

    def _receive_reply(self) -> Reply:
        while True:
            try:
                return self._read_reply(self._open[0])
            except (OSError, FrameError) as error:
                self._recover(error)

    def _read_reply(self, request: _OpenRequest) -> Reply:
        channel = self._channel
        frame = channel.receive_header()
        if frame is None:
            raise FrameError("the connection has ended")
        if frame.op == Op.REFUSE:
            data = bytearray(frame.length)
            channel.receive_into(data)
            self._open.popleft()
            raise _make_error(decode_json(data), self._server)
        if frame.op != request.frame.op or frame.request != request.frame.request:
            raise FrameError("the server has answered another request")
        result: Reply = frame.place
        if frame.op == Op.ROWS:
            count = request.frame.count
            if frame.length != count * request.dim * 4:
                raise FrameError("the server has sent another number of rows")
            result = channel.receive_tensor(torch.empty(count, request.dim))
        elif frame.op == Op.ROWS_SINCE:
            if frame.length != frame.count * (8 + request.dim * 4):
                raise FrameError("the server has sent another number of rows")
            places = channel.receive_tensor(torch.empty(frame.count, dtype=torch.int64))
            if (
                len(places)
                and not 0 <= int(places.min()) <= int(places.max()) < request.frame.count
            ):
                raise FrameError("the server has sent rows that were not asked for")
            rows = channel.receive_tensor(torch.empty(frame.count, request.dim))
            result = ChangedRows(places, rows, frame.step)
        elif frame.op == Op.PULL and request.out is not None:
            if frame.length != request.out.numel() * 4:
                raise FrameError("the server has sent a piece of another size")
            channel.receive_tensor(request.out)
        elif frame.op == Op.DECLARE:
            result = frame.table
        elif frame.op == Op.CLOCK:
            self._ended_step = request.frame.step
        self._open.popleft()
        return result

    # ---- connections --------------------------------------------------------

    def _open_channel(self) -> Channel:
        identity = self._identity
        limit = identity.seconds + REPLY_MARGIN_SECONDS
        problem: PeerLost | None = None
        for address in self._find_addresses():
            try:
                channel = open_channel(address, self._key, limit)
            except PeerLost as error:
                problem = error
                continue
            hello = {
                "worker": identity.worker,
                "client": self._client,
                "mode": str(identity.mode),
                "seconds": identity.seconds,
                "step": self._ended_step,
            }
            frame = Frame(Op.HELLO, flags=JSON_VALUES, generation=identity.generation)
            channel.send_frame(frame, encode_json(hello))
            self._channel = channel
            self._open.appendleft(_OpenRequest(frame, ()))
            try:
                self._read_reply(self._open[0])
            except BaseException:
                channel.close()
                raise
            return channel
        raise problem or PeerLost(f"parameter server {self._server} has no address")

    def _recover(self, error: Exception) -> None:
        """
        Connect again and repeat what has no reply; the server ignores what it has used already.

        Raises:
            DeadlineExceeded, PeerLost: it does not answer.
        """
        identity = self._identity
        self._channel.close()
        if isinstance(error, BlockingIOError):
            raise deadline_error(f"parameter server {self._server}", identity.seconds) from None
        deadline = time.monotonic() + identity.patience
        while time.monotonic() < deadline:
            time.sleep(RETRY_SECONDS)
            waiting = list(self._open)
            self._open.clear()
            try:
                self._open_channel()
                for number, spec in enumerate(self._specs):
                    frame = Frame(Op.DECLARE, flags=JSON_VALUES, generation=identity.generation)
                    self._channel.send_frame(frame, encode_json(spec.to_json()))
                    self._open.appendleft(_OpenRequest(frame, ()))
                    if self._read_reply(self._open[0]) != number:
                        raise PeerLost(f"server {self._server} is back with other tables")
                for request in waiting:
                    self._channel.send_frame(request.frame, *request.parts[:-1])
                self._open.extend(waiting)
                self.returns += 1
                return
            except (OSError, FrameError, PeerLost) as again:
                self._open = deque(waiting)
                error = again
        raise self._lost_error(error) from None

    def _lost_error(self, error: Exception) -> PeerLost:
        what = f"parameter server {self._server} is lost: {error}"
        return PeerLost(what, hint="the job's log has the reason")

    def close(self) -> None:
        """See `ServerLink.close`."""
        try:
            self.finish_all()
            self._channel.send_frame(Frame(Op.BYE, generation=self._identity.generation))
            self._channel.receive_header()
        except (OSError, FrameError, PdrunError):
            pass  # it has ended first
        self._channel.close()


@dataclass(frozen=True)
class _Kept:
    """Keeps tensors alive whose bytes a request refers to."""

    tensors: Any


def _make_error(data: dict[str, Any], server: int) -> PdrunError:
    """Return the error that a server has sent."""
    kind = getattr(errors, str(data.get("kind")), PdrunError)
    if not (isinstance(kind, type) and issubclass(kind, PdrunError)):
        kind = PdrunError
    where = str(data.get("where") or f"parameter server {server}")
    return kind(str(data.get("what")), where=where, hint=str(data.get("hint") or ""))
