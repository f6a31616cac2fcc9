"""
The frames between a relay and the scheduler: many conversations over one connection. Pure.

A frame is MAGIC, then items. Each item is a kind (1 byte), a length (4 bytes, big-endian) and a
body:

    1 AgentFrame    number (4), role (1), an envelope as `codec` writes it   from or for an agent
    2 AgentClosed   number (4)                                  it has ended, or is to be ended
    3 AliveReport   pulse (4), then numbers (4 each)            these agents are alive
    4 RelayPulse    pulse (4)                                   the scheduler's answer to a report

A number names one connection of a relay and is never used twice. Relays do not parse envelopes; the
scheduler checks them. So a relay costs little, and can forge nothing that an agent could not send.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pdrun.rendezvous.protocol.codec import CodecError
from pdrun.rendezvous.protocol.messages import Envelope

MAGIC = b"pdrun relay 1\n"
MAX_FRAME_BYTES = Envelope.LIMIT + 4096
"""Maximum length of a frame."""
FULL_FRAME_BYTES = 1 << 18
"""A frame of this length takes no further item."""
ROLES = ("", "agent", "view")
CHILD_RELAY_SENDER = "relay"
STANDALONE_RELAY_SENDER = "relay-alone"
"""
Senders of the echoes that a relay answers itself: one on the scheduler's host, and `pdrun relay`.
"""

_ITEM_HEAD = struct.Struct("!BI")
_AGENT_HEAD = struct.Struct("!IB")
_NUMBER = struct.Struct("!I")


@dataclass(frozen=True)
class AgentFrame:
    """A message from an agent, or for one."""

    number: int
    role: str
    """
    The role that the agent's key proved to the relay; empty with --insecure, and towards the agent.
    """
    data: bytes


@dataclass(frozen=True)
class AgentClosed:
    """
    The connection of an agent has ended (from the relay), or is to be ended (from the scheduler).
    """

    number: int


@dataclass(frozen=True)
class AliveReport:
    """Agents that have sent heartbeats and received the answers since the last report."""

    pulse: int
    """Counts up; answered by RelayPulse."""
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class RelayPulse:
    """The scheduler is alive: it has read the AliveReport with this number."""

    pulse: int


RelayItem = AgentFrame | AgentClosed | AliveReport | RelayPulse


def pack_frames(items: Iterable[RelayItem]) -> Iterator[bytes]:
    """Yield the items in order, in as few frames as possible."""
    parts = [MAGIC]
    size = len(MAGIC)
    for item in items:
        kind, body = _encode_item(item)
        if size + len(body) > FULL_FRAME_BYTES and len(parts) > 1:
            yield b"".join(parts)
            parts = [MAGIC]
            size = len(MAGIC)
        parts += (_ITEM_HEAD.pack(kind, len(body)), body)
        size += _ITEM_HEAD.size + len(body)
    if len(parts) > 1:
        yield b"".join(parts)


def unpack_frame(frame: bytes) -> list[RelayItem]:
    """
    Return the items of a frame.

    Raises:
        CodecError: it is not a frame; names the offset.
    """
    if not frame.startswith(MAGIC):
        raise CodecError("no frame of a relay")
    found: list[RelayItem] = []
    at = len(MAGIC)
    while at < len(frame):
        if at + _ITEM_HEAD.size > len(frame):
            raise CodecError(f"an item is cut at {at}")
        kind, length = _ITEM_HEAD.unpack_from(frame, at)
        start = at + _ITEM_HEAD.size
        at = at + _ITEM_HEAD.size + length
        if at > len(frame):
            raise CodecError(f"an item of {length} bytes is cut at {start}")
        found.append(_decode_item(kind, frame[start:at], start))
    return found


def _encode_item(item: RelayItem) -> tuple[int, bytes]:
    match item:
        case AgentFrame(number, role, data):
            return 1, _AGENT_HEAD.pack(number, ROLES.index(role)) + data
        case AgentClosed(number):
            return 2, _NUMBER.pack(number)
        case AliveReport(pulse, numbers):
            return 3, struct.pack(f"!{len(numbers) + 1}I", pulse, *numbers)
        case RelayPulse(pulse):
            return 4, _NUMBER.pack(pulse)


def _decode_item(kind: int, body: bytes, at: int) -> RelayItem:
    if (
        kind == 1
        and _AGENT_HEAD.size < len(body) <= _AGENT_HEAD.size + Envelope.LIMIT
        and body[4] < len(ROLES)
    ):
        number, role = _AGENT_HEAD.unpack_from(body)
        return AgentFrame(number, ROLES[role], body[_AGENT_HEAD.size :])
    if kind == 2 and len(body) == _NUMBER.size:
        return AgentClosed(_NUMBER.unpack(body)[0])
    if kind == 3 and body and len(body) % 4 == 0:
        pulse, *numbers = struct.unpack(f"!{len(body) // 4}I", body)
        return AliveReport(pulse, tuple(numbers))
    if kind == 4 and len(body) == _NUMBER.size:
        return RelayPulse(_NUMBER.unpack(body)[0])
    raise CodecError(f"invalid item of kind {kind} with {len(body)} bytes at {at}")
