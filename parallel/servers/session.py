"""
One worker's connection at a server: its requests on the tables, and the memory that both share.

A frame that the protocol does not allow ends the connection; a request that is wrong gets the
reason as its reply.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from pdrun.errors import PdrunError, UsageError
from pdrun.parallel.checkpoint.storage import byte_view
from pdrun.parallel.servers.channel import Channel
from pdrun.parallel.servers.frames import (
    JSON_VALUES,
    MAILBOX,
    MAILBOX_SLOTS,
    SHARED_VALUES,
    Frame,
    FrameError,
    Op,
    decode_json,
    encode_json,
)
from pdrun.parallel.servers.links.mapped import SLOT_ELEMENTS
from pdrun.parallel.servers.settings import TableSpec
from pdrun.parallel.servers.tables import snapshot
from pdrun.parallel.servers.tables.memory import SharedMemory, make_shared
from pdrun.parallel.servers.tables.store import TableStore


class SessionHost(Protocol):
    """What a session needs of its server; see `ParameterService`."""

    def open_store(self, mode_text: Any, seconds: Any) -> TableStore:
        """Return the store; the first worker's mode counts."""
        ...

    def write_tables(self, store: TableStore, folders: list[Path], step: Any) -> None:
        """Write the tables, and what a later process needs."""
        ...

    def check_generation(self, generation: int) -> None:
        """Refuse a worker of another generation."""
        ...


class WorkerSession:
    """One worker's connection."""

    def __init__(self, service: SessionHost, channel: Channel) -> None:
        self._service = service
        self._channel = channel
        self._store: TableStore | None = None
        self._worker = -1
        self._client = ""
        self._scratch = torch.empty(0)
        self._mailbox: SharedMemory | None = None
        self._slots = torch.empty(0, 0)
        """Of the mailbox."""
        self._refused = 0
        """Number of the last request that was refused."""
        self.is_active = False
        """Whether it has sent a frame that was understood."""

    def serve(self) -> None:
        """
        Answer requests until the connection ends.

        Raises:
            FrameError: a frame is not allowed.
        """
        while (frame := self._channel.receive_header()) is not None:
            self._service.check_generation(frame.generation)
            self.is_active = True
            if frame.op == Op.BYE:
                self._channel.send_frame(Frame(Op.BYE, request=frame.request))
                return
            try:
                self._answer_frame(frame)
            except PdrunError as error:
                self.refuse(frame.request, error)
            except (MemoryError, RuntimeError, IndexError) as error:
                # torch's errors, of an allocation for example: this request fails, not the server
                self.refuse(frame.request, PdrunError(str(error) or "out of memory"))

    def leave(self) -> None:
        """Report the end of this connection to the store."""
        if self._store is not None:
            self._store.leave_worker(self._worker, self._client)

    def refuse(self, request: int, error: Exception) -> None:
        """Answer with an error."""
        self._refused = request
        data = {"kind": type(error).__name__, "what": str(error), "where": "", "hint": ""}
        if isinstance(error, PdrunError):
            data |= {"what": error.what, "where": error.where, "hint": error.hint}
        reply = Frame(Op.REFUSE, flags=JSON_VALUES, request=request)
        try:
            self._channel.send_frame(reply, encode_json(data))
        except OSError:
            pass

    def _answer_frame(self, frame: Frame) -> None:
        if frame.flags == JSON_VALUES:
            data = bytearray(frame.length)
            self._channel.receive_into(data)
            self._answer_json(frame, decode_json(data))
            return
        count = frame.count if frame.flags != SHARED_VALUES else 0
        ids = torch.empty(count, dtype=torch.int64)
        self._channel.receive_tensor(ids)
        size = frame.length - 8 * count
        if size % 4:
            raise FrameError(f"{size} bytes of values are not numbers of fp32")
        store = self._store
        if store is None:
            raise FrameError("the first frame must be a hello")
        reply = Frame(frame.op, request=frame.request)
        if frame.op == Op.MAP:
            self._share_memory(store, frame.table, reply)
            return
        if frame.op == Op.ROWS:
            if size:
                raise FrameError("a request for rows has no values")
            rows = store.read_rows(frame.table, ids)
            self._channel.send_frame(reply, byte_view(rows))
            return
        values = self._channel.receive_tensor(self._make_buffer(size // 4))
        push: dict[str, Any] = {
            "worker": self._worker,
            "client": self._client,
            "request": frame.request,
            "step": frame.step,
            "part": frame.part,
            "divisor": frame.divisor,
        }
        match frame.op:
            case Op.ROWS_SINCE:
                if len(values) != 2 * frame.count:
                    raise FrameError("each id must have a version")
                found = store.read_changed(frame.table, ids, values.view(torch.int64))
                reply.count, reply.step = len(found.places), found.version
                self._channel.send_frame(reply, byte_view(found.places), byte_view(found.rows))
                return
            case Op.PUSH_ROWS if frame.flags == SHARED_VALUES:
                ids, grads = self._find_posted_rows(store, frame)
                store.push_rows(frame.table, ids, grads, **push)
                self._channel.send_frame(reply, holds=self._channel.has_clock_ahead())
                return
            case Op.PUSH_ROWS:
                grads = _shape_rows(store, frame, values)
                store.push_rows(frame.table, ids, grads, **push)
            case Op.PULL:
                piece = store.read_piece(frame.table, frame.place)
                if not frame.flags:
                    self._channel.send_frame(reply, byte_view(piece))
                    return
            case Op.PUSH if frame.flags == SHARED_VALUES:
                store.push_pieces(frame.table, self._find_posted(store, frame), **push)
                self._channel.send_frame(reply, holds=self._channel.has_clock_ahead())
                return
            case Op.PUSH:
                store.push_piece(frame.table, frame.place, values, **push)
            case Op.CLOCK:
                reply.place = self._end_step(store, frame)
            case Op.ASSIGN_ROWS:
                store.assign_rows(frame.table, ids, _shape_rows(store, frame, values))
            case Op.ASSIGN:
                store.assign_piece(frame.table, frame.place, values)
            case Op.OPEN:
                store.open_table(frame.table)
            case _:
                raise FrameError(f"operation {frame.op} is no request")
        self._channel.send_frame(reply)

    def _end_step(self, store: TableStore, frame: Frame) -> int:
        """
        End a step, unless a push since request number ``frame.place`` was refused.

        Raises:
            UsageError, DeadlineExceeded: the step has not ended.
        """
        try:
            if 0 < frame.place <= self._refused:
                raise UsageError(f"step {frame.step} does not end: a push of it was refused")
            return store.end_step(
                frame.step, worker=self._worker, client=self._client, request=frame.request
            )
        except BaseException:
            # the worker may use the mailbox again
            store.copy_gradients(self._worker)
            raise

    def _keeps_posted(self, store: TableStore) -> bool:
        """
        Return whether a step must copy what is in the mailbox. It need not if the end of the step
        has come with it: the worker gets the slot back with the reply to that.
        """
        return store.mode.name == "sync" and not self._channel.has_clock_ahead()

    def _share_memory(self, store: TableStore, number: int, reply: Frame) -> None:
        """Send the descriptor of the mailbox, or of a table's memory."""
        fd = -1
        if self._channel.is_local and number != MAILBOX:
            fd = store.find_memory(number)
        elif self._channel.is_local:
            if self._mailbox is None:
                self._mailbox = make_shared(4 * MAILBOX_SLOTS * SLOT_ELEMENTS, writable=True)
            if self._mailbox is not None:
                fd = self._mailbox.fd
                self._slots = self._mailbox.view_tensor((MAILBOX_SLOTS, SLOT_ELEMENTS))
        reply.place = int(fd >= 0)
        if fd >= 0:
            self._channel.send_descriptor(reply, fd)
        else:
            self._channel.send_frame(reply)

    def _find_slot(self, frame: Frame) -> torch.Tensor:
        """
        Return a slot of the mailbox.

        Raises:
            FrameError: there is no mailbox.
        """
        if not len(self._slots):
            raise FrameError("a push is in a mailbox that was not asked for")
        return self._slots[frame.slot]

    def _find_posted_rows(
        self, store: TableStore, frame: Frame
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Return ids and gradients of rows in a slot; copies where a later change would matter.

        Raises:
            FrameError: so many do not fit.
        """
        slot, dim = self._find_slot(frame), store.find_dim(frame.table)
        first, last = 2 * frame.count, (2 + dim) * frame.count
        if last > len(slot):
            raise FrameError(f"{frame.count} ids of {dim} elements do not fit a slot")
        ids = slot[:first].view(torch.int64).clone()
        grads = slot[first:last].view(frame.count, dim)
        return ids, grads.clone() if self._keeps_posted(store) else grads

    def _find_posted(self, store: TableStore, frame: Frame) -> dict[int, torch.Tensor]:
        """Return the gradients of pieces in a slot; copies if the step keeps them."""
        slot = self._find_slot(frame)
        found = {}
        first = 0
        keeps = self._keeps_posted(store)
        for piece, size in store.list_pieces(frame.table, frame.place, frame.count):
            values = slot[first : first + size]
            found[piece] = values.clone() if keeps else values
            first += size
        return found

    def _make_buffer(self, elements: int) -> torch.Tensor:
        """Return a buffer for values; gradients that a step keeps get one each."""
        if self._store is None or self._store.mode.name == "sync":
            return torch.empty(elements)
        return self._make_scratch(elements)

    def _make_scratch(self, elements: int) -> torch.Tensor:
        """Return memory that is used again for the next frame."""
        if len(self._scratch) < elements:
            self._scratch = torch.empty(elements)
        return self._scratch[:elements]

    def _answer_json(self, frame: Frame, data: dict[str, Any]) -> None:
        reply = Frame(frame.op, request=frame.request)
        if frame.op == Op.HELLO:
            worker, client = data.get("worker"), data.get("client")
            if type(worker) is not int or not isinstance(client, str) or len(client) > 64:
                raise FrameError("a hello lacks worker or client")
            step = data.get("step", -1)
            if type(step) is not int or not -1 <= step < 1 << 62:
                raise FrameError("a hello has no step of this form")
            store = self._service.open_store(data.get("mode"), data.get("seconds"))
            reply.place = store.join_worker(worker, client, step)
            self._store, self._worker, self._client = store, worker, client
            self._channel.send_frame(reply)
            return
        if self._store is None:
            raise FrameError("the first frame must be a hello")
        match frame.op:
            case Op.DECLARE:
                try:
                    spec = TableSpec.from_json(data)
                except (ValueError, TypeError, KeyError) as error:
                    raise UsageError(f"a table is refused: {error}") from None
                reply.table = self._store.declare_table(spec)
            case Op.SNAPSHOT:
                folders = [_folder_of(data)]
                if data.get("later"):
                    folders.append(_folder_of(data, "later"))
                self._service.write_tables(self._store, folders, data.get("step", 0))
            case Op.RESTORE:
                reply.place = snapshot.read_tables(self._store, _folder_of(data))
            case Op.STATS:
                reply.flags = JSON_VALUES
                self._channel.send_frame(reply, encode_json(self._store.describe_tables()))
                return
            case _:
                raise FrameError(f"operation {frame.op} is no request")
        self._channel.send_frame(reply)


def _shape_rows(store: TableStore, frame: Frame, values: torch.Tensor) -> torch.Tensor:
    """
    Return values as rows.

    Raises:
        FrameError: their number is not that of the ids and the table.
    """
    dim = store.find_dim(frame.table)
    if len(values) != frame.count * dim:
        raise FrameError(
            f"{frame.count} ids of {dim} elements have {len(values)} values in a frame"
        )
    return values.view(frame.count, dim)


def _folder_of(data: dict[str, Any], name: str = "folder") -> Path:
    """Return the folder of a request; it belongs to this user, as the worker does."""
    text = data.get(name)
    if not isinstance(text, str) or not Path(text).is_absolute() or "\0" in text:
        raise UsageError("a checkpoint's folder must be an absolute path")
    return Path(text)
