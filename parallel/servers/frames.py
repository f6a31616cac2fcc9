"""
The frames between workers and servers: 60 bytes of header, then ids, then values. Pure.

    header | ids: count x int64 | values: fp32, or JSON

On one host large values need not be in a frame: a worker writes the gradient of a piece to memory
that the server shares with it, and reads dense weights in the server's memory.

A request and its reply have the same number. Replies have the order of the requests.
"""

from __future__ import annotations

import enum
import json
import struct
from dataclasses import dataclass
from typing import Any

MAGIC = 0x50445256
VERSION = 1
_HEADER = struct.Struct("<IBBHHBBIQQQdIQ")
HEADER_BYTES = _HEADER.size
MAX_FRAME_BYTES = 256 << 20
"""Ids and values of one frame."""
MAX_JSON_BYTES = 64 << 10
JSON_VALUES = 1
"""Flag: the values are JSON."""
SHARED_VALUES = 2
"""
Flag: the values are in shared memory. PUSH: those of ``count`` pieces, from ``place`` on in the
server's order, are in ``slot`` of the mailbox. PUSH_ROWS: ids and values are there. PULL: the
worker reads all pieces of the table.
"""
MAILBOX_SLOTS = 2
"""The worker fills one while the server uses the other."""
SLOT_PIECES = 16
"""Pieces of one request: each wakes the other process up, which costs as much as half a piece."""
MAILBOX = 0xFFFF
"""Number of a table in a MAP for memory to which the worker writes gradients."""


class Op(enum.IntEnum):
    """What a frame asks for, or answers."""

    HELLO = 1
    ROWS = 2
    PUSH_ROWS = 3
    PULL = 4
    PUSH = 5
    CLOCK = 6
    SNAPSHOT = 7
    STATS = 8
    REFUSE = 9
    DECLARE = 10
    ASSIGN_ROWS = 11
    ASSIGN = 12
    OPEN = 13
    RESTORE = 14
    BYE = 15
    ROWS_SINCE = 16
    MAP = 17
    """For shared memory: the reply has a descriptor if ``place`` is 1."""


_JSON_OPS = frozenset({Op.HELLO, Op.DECLARE, Op.SNAPSHOT, Op.RESTORE, Op.REFUSE, Op.STATS})
_ID_OPS = frozenset({Op.ROWS, Op.PUSH_ROWS, Op.ASSIGN_ROWS, Op.ROWS_SINCE})
_KNOWN = frozenset(int(op) for op in Op)


class FrameError(Exception):
    """A frame that the protocol does not allow; the connection ends."""


@dataclass(slots=True)
class Frame:
    """The header of a request or a reply."""

    op: int
    table: int = 0
    part: int = 0
    """Number of the micro-batch of a push."""
    flags: int = 0
    generation: int = 0
    request: int = 0
    step: int = 0
    place: int = 0
    """Number of the piece of a dense weight."""
    divisor: float = 1.0
    """Gradients are divided by it: the loss's global count."""
    count: int = 0
    """Number of ids, or of pieces in a slot of the mailbox."""
    length: int = 0
    """Bytes after the header."""
    slot: int = 0
    """Of the mailbox."""

    def pack(self) -> bytes:
        """Return the header's bytes."""
        return _HEADER.pack(
            *(
                MAGIC,
                VERSION,
                self.op,
                self.part,
                self.table,
                self.flags,
                self.slot,
                self.generation,
            ),
            *(self.request, self.step, self.place, self.divisor, self.count, self.length),
        )


def unpack_header(data: bytes | bytearray | memoryview) -> Frame:
    """
    Return a header that is consistent in itself.

    Raises:
        FrameError: it is not a header of this protocol, or too long.
    """
    (
        magic,
        version,
        op,
        part,
        table,
        flags,
        slot,
        generation,
        request,
        step,
        place,
        divisor,
        *sizes,
    ) = _HEADER.unpack(data)
    count, length = sizes
    if magic != MAGIC or version != VERSION:
        raise FrameError(f"not a frame of protocol {VERSION}")
    if op not in _KNOWN or flags not in (0, JSON_VALUES, SHARED_VALUES):
        raise FrameError(f"unknown operation {op} or flags {flags}")
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length:,} bytes exceeds {MAX_FRAME_BYTES:,}")
    is_json = flags == JSON_VALUES
    is_form_good = op in _JSON_OPS if is_json else op not in _JSON_OPS or not length
    if not is_form_good or (is_json and length > MAX_JSON_BYTES):
        raise FrameError(f"operation {op} has no values of this form")
    if flags == SHARED_VALUES:
        is_form_good = op == Op.PUSH_ROWS or (op in (Op.PUSH, Op.PULL) and count <= SLOT_PIECES)
        if not is_form_good or length or slot >= MAILBOX_SLOTS:
            raise FrameError(f"operation {op} has no {count} pieces in slot {slot}")
    elif slot or (count and op not in _ID_OPS) or 8 * count > length:
        raise FrameError(f"{count} ids do not fit {length} bytes of operation {op}")
    rest = (generation, request, step, place, divisor, count, length, slot)
    return Frame(op, table, part, flags, *rest)


def peek_push(data: bytes | bytearray | memoryview) -> Op | None:
    """
    Return PUSH for a push in shared memory, CLOCK for the end of a step, None for anything else.

    The header may be wrong in other ways.
    """
    op, flags = data[5], data[10]
    if op in (Op.PUSH, Op.PUSH_ROWS) and flags == SHARED_VALUES:
        return Op.PUSH
    return Op.CLOCK if op == Op.CLOCK else None


def encode_json(value: Any) -> bytes:
    """Return JSON for a frame."""
    return json.dumps(value, separators=(",", ":")).encode()


def decode_json(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """
    Return the JSON object of a frame.

    Raises:
        FrameError: it is not a JSON object.
    """
    try:
        value = json.loads(bytes(data))
    except (ValueError, RecursionError):
        raise FrameError("the values are not JSON") from None
    if not isinstance(value, dict):
        raise FrameError("the values are not a JSON object")
    return value
