"""A worker's connection to one server, which is made again when it is lost."""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pdrun import errors
from pdrun.errors import PdrunError, PeerLost
from pdrun.parallel.checkpoint.storage import byte_view
from pdrun.parallel.servers.channel import Channel, deadline_error, open_channel
from pdrun.parallel.servers.frames import (
    JSON_VALUES,
    MAILBOX,
    SHARED_VALUES,
    SLOT_PIECES,
    Frame,
    FrameError,
    Op,
    decode_json,
    encode_json,
)
from pdrun.parallel.servers.links.link import PushHeader, Reply
from pdrun.parallel.servers.links.mapped import SLOT_ELEMENTS, Mailbox, MappedTables
from pdrun.parallel.servers.links.open_request import OpenRequest
from pdrun.parallel.servers.settings import Mode, TableSpec
from pdrun.parallel.servers.tables.store import ChangedRows
from pdrun.parallel.servers.tables.tables import MIN_SHARED_ELEMENTS

MAX_OPEN_REQUESTS = 64
RETRY_SECONDS = 0.05
REPLY_MARGIN_SECONDS = 10.0
"""A server's own limit of a wait ends first, since it knows who is missing."""


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
        self._open: deque[OpenRequest] = deque()
        self._results: deque[Reply] = deque()
        self._mapped = MappedTables()
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
        try:
            self._map_table(number, spec)
        except (OSError, FrameError) as error:
            self._recover(error)
        return number

    def begin_rows(self, table: int, ids: torch.Tensor, dim: int) -> None:
        """See `ServerLink.begin_rows`."""
        mapped = self._mapped.rows.get(table)
        # earlier requests are answered first, and a server that is lost must be noticed
        if mapped is not None and not (self._open or self._results or self._channel.has_ended()):
            rows = mapped.read_rows(ids)
            if rows is not None:
                self._results.append(rows)
                return
        frame = Frame(Op.ROWS, table, count=len(ids))
        self._begin(frame, byte_view(ids), dim=dim, keep=ids)

    def begin_changed(self, table: int, ids: torch.Tensor, since: torch.Tensor, dim: int) -> None:
        """See `ServerLink.begin_changed`."""
        frame = Frame(Op.ROWS_SINCE, table, count=len(ids))
        self._begin(frame, byte_view(ids), byte_view(since), dim=dim, keep=(ids, since))

    def begin_pull(self, table: int, pieces: Sequence[int], outs: Sequence[torch.Tensor]) -> None:
        """See `ServerLink.begin_pull`."""
        self._make_room()
        mapped = self._mapped.pieces.get(table)
        if mapped is not None and len(mapped) == sum(map(len, outs)):
            frame = Frame(Op.PULL, table, flags=SHARED_VALUES, place=pieces[0])
            self._begin(frame, tensors=outs, pieces=pieces)
            return
        for piece, out in zip(pieces, outs, strict=True):
            self._begin(Frame(Op.PULL, table, place=piece), tensors=(out,))

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
        elements = values.numel() + 2 * len(values)
        if ids is not None and MIN_SHARED_ELEMENTS <= elements <= SLOT_ELEMENTS:
            mailbox = self._find_mailbox()
            if mailbox is not None:
                frame.flags, frame.slot = SHARED_VALUES, mailbox.put_values([ids, values])
        self._begin_values(frame, Op.PUSH_ROWS, values, ids, holds=push.is_held)

    def begin_push_pieces(
        self,
        table: int,
        push: PushHeader,
        pieces: Sequence[int],
        grads: Sequence[torch.Tensor],
    ) -> None:
        """See `ServerLink.begin_push_pieces`."""
        is_large = sum(map(len, grads)) >= MIN_SHARED_ELEMENTS
        for first in range(0, len(pieces), SLOT_PIECES):
            some, values = pieces[first : first + SLOT_PIECES], grads[first : first + SLOT_PIECES]
            mailbox = self._find_mailbox() if is_large else None
            if mailbox is None:
                for piece, grad in zip(some, values, strict=True):
                    self.begin_push(table, push, grad, piece=piece)
                continue
            frame = Frame(Op.PUSH, table, push.part, SHARED_VALUES, place=some[0], count=len(some))
            frame.step, frame.divisor = push.step, push.divisor
            frame.slot = mailbox.put_values(values)
            # a number for each piece: without the mailbox they are requests of their own
            self._request += len(some) - 1
            self._begin(frame, tensors=values, pieces=some, holds=push.is_held)

    def _find_mailbox(self) -> Mailbox | None:
        """Return the mailbox when it has a free slot; None without one."""
        self._make_room()
        while self._mapped.mailbox is not None and not self._mapped.mailbox.has_room:
            self._results.append(self._receive_reply())
        return self._mapped.mailbox

    def begin_assign(
        self, table: int, values: torch.Tensor, *, ids: torch.Tensor | None = None, piece: int = 0
    ) -> None:
        """See `ServerLink.begin_assign`."""
        self._begin_values(Frame(Op.ASSIGN, table, place=piece), Op.ASSIGN_ROWS, values, ids)

    def _begin_values(
        self,
        frame: Frame,
        op_with_ids: Op,
        values: torch.Tensor,
        ids: torch.Tensor | None,
        *,
        holds: bool = False,
    ) -> None:
        if ids is None:
            self._begin(frame, byte_view(values), keep=values, holds=holds)
        else:
            frame.op = op_with_ids
            frame.count = len(ids)
            parts = byte_view(ids), byte_view(values)
            self._begin(frame, *parts, keep=(ids, values), holds=holds)

    def begin_order(
        self, op: Op, *, table: int = 0, step: int = 0, folder: str = "", later: str = ""
    ) -> None:
        """See `ServerLink.begin_order`."""
        if op in (Op.SNAPSHOT, Op.RESTORE):
            data = encode_json({"folder": folder, "later": later, "step": step})
            self._begin(Frame(op, flags=JSON_VALUES), data)
        else:
            frame = Frame(op, table, step=step)
            if op == Op.CLOCK and self._open:
                # the step does not end if one of these is refused
                first = self._open[0]
                frame.place = first.frame.request + 1 - max(1, len(first.pieces))
            self._begin(frame)

    def _begin(
        self,
        frame: Frame,
        *parts: Any,
        tensors: Sequence[torch.Tensor] = (),
        pieces: Sequence[int] = (),
        dim: int = 0,
        keep: Any = (),
        holds: bool = False,
    ) -> None:
        self._make_room()
        self._request += 1
        frame.request = self._request
        frame.generation = self._identity.generation
        self._open.append(OpenRequest(frame, parts, tensors, pieces, dim, keep))
        try:
            sent = parts if frame.flags != SHARED_VALUES else ()
            self._channel.send_frame(frame, *sent, holds=holds)
        except OSError as error:
            self._recover(error)

    def _make_room(self) -> None:
        """Wait for a reply if too many are missing; it may be that of another connection."""
        if len(self._open) >= MAX_OPEN_REQUESTS:
            self._results.append(self._receive_reply())

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

    def finish_last(self) -> Reply:
        """See `ServerLink.finish_last`; raises the first refusal when no reply is missing."""
        answers: list[Reply | PdrunError] = list(self._results)
        self._results.clear()
        while self._open:
            answers.append(self._receive_answer())
        for answer in answers:
            if isinstance(answer, PdrunError):
                raise answer
        return _raise_refusal(answers[-1])

    def _finish_number(self) -> int:
        result = self.finish()
        assert isinstance(result, int)
        return result

    def _receive_reply(self) -> Reply:
        return _raise_refusal(self._receive_answer())

    def _receive_answer(self) -> Reply | PdrunError:
        while True:
            try:
                return self._read_answer(self._open[0])
            except (OSError, FrameError) as error:
                self._recover(error)

    def _read_reply(self, request: OpenRequest) -> Reply:
        return _raise_refusal(self._read_answer(request))

    def _read_answer(self, request: OpenRequest) -> Reply | PdrunError:
        """Return the next reply, or the reason of a refusal."""
        channel = self._channel
        frame = channel.receive_header()
        if frame is None:
            raise FrameError("the connection has ended")
        if frame.op == Op.REFUSE:
            data = bytearray(frame.length)
            channel.receive_into(data)
            self._close_request()
            return _make_error(decode_json(data), self._server)
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
        elif frame.op == Op.PULL:
            self._take_pieces(request, frame.length)
        elif frame.op == Op.DECLARE:
            result = frame.table
        elif frame.op == Op.CLOCK:
            self._ended_step = request.frame.step
        self._close_request()
        return result

    def _close_request(self) -> None:
        """Note that the oldest request has its reply."""
        frame = self._open.popleft().frame
        is_posted = frame.op != Op.PULL and frame.flags == SHARED_VALUES
        if is_posted and self._mapped.mailbox is not None:
            self._mapped.mailbox.free_slot(frame.slot)

    def _take_pieces(self, request: OpenRequest, length: int) -> None:
        """Take a dense weight from the reply, or from shared memory."""
        if request.frame.flags == SHARED_VALUES:
            self._mapped.copy_pieces(request.frame.table, request.tensors)
            return
        if length != request.tensors[0].numel() * 4:
            raise FrameError("the server has sent a piece of another size")
        self._channel.receive_tensor(request.tensors[0])

    # ---- connections --------------------------------------------------------

    def _map_table(self, number: int, spec: TableSpec) -> None:
        """Ask for shared memory on this host; without it values are sent. No request is open."""
        if not self._channel.is_local:
            return
        if self._mapped.mailbox is None:
            fd = self._ask_memory(MAILBOX)
            if fd >= 0:
                self._mapped.add_mailbox(fd)
        fd = self._ask_memory(number)
        if fd >= 0:
            self._mapped.add_table(number, spec, fd)

    def _ask_memory(self, number: int) -> int:
        """Return a descriptor; -1 without shared memory."""
        request = Frame(Op.MAP, number, generation=self._identity.generation)
        self._channel.send_frame(request)
        frame, fd = self._channel.receive_descriptor()
        if frame.op != Op.MAP or (fd >= 0) != bool(frame.place):
            if fd >= 0:
                os.close(fd)
            raise FrameError("the server has answered another request")
        return fd

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
            self._open.appendleft(OpenRequest(frame))
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
            waiting = [part for request in self._open for part in request.without_memory()]
            self._open.clear()
            self._mapped = MappedTables()
            try:
                self._open_channel()
                for number, spec in enumerate(self._specs):
                    frame = Frame(Op.DECLARE, flags=JSON_VALUES, generation=identity.generation)
                    self._channel.send_frame(frame, encode_json(spec.to_json()))
                    self._open.appendleft(OpenRequest(frame))
                    if self._read_reply(self._open[0]) != number:
                        raise PeerLost(f"server {self._server} is back with other tables")
                    self._map_table(number, spec)
                for request in waiting:
                    self._channel.send_frame(request.frame, *request.parts)
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


def _raise_refusal(answer: Reply | PdrunError) -> Reply:
    if isinstance(answer, PdrunError):
        raise answer
    return answer


def _make_error(data: dict[str, Any], server: int) -> PdrunError:
    """Return the error that a server has sent."""
    kind = getattr(errors, str(data.get("kind")), PdrunError)
    if not (isinstance(kind, type) and issubclass(kind, PdrunError)):
        kind = PdrunError
    where = str(data.get("where") or f"parameter server {server}")
    return kind(str(data.get("what")), where=where, hint=str(data.get("hint") or ""))
