"""
The format of the scheduler's journal: a first line, then frames. No file is opened here.

    pdrun journal 1, protocol 3
    frame: length of the payload | CRC-32 of the payload | running CRC-32 (4 bytes each, big-endian)
    payload: JSON; JournalHeader in the first frame, JournalEntry in all others
    frame, payload, frame, payload ...

The running CRC-32 covers the first two numbers and starts from the value of the frame before. So a
frame that does not follow the one before it is noticed.

Another version of pdrun may have written the file: the first line has another number, or a complete
frame has a payload that is not known here. That is not damage, and the error says so.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdrun.errors import RendezvousError
from pdrun.rendezvous.protocol import codec
from pdrun.rendezvous.protocol.events import MembershipEvent, SchedulerConfig
from pdrun.rendezvous.protocol.messages import PROTOCOL, Envelope

MAGIC = b"pdrun journal 1, protocol %d\n" % PROTOCOL
_FIRST_LINE = re.compile(rb"(pdrun journal \d{1,6})(?:, protocol (\d{1,6}))?\n")
MAX_PAYLOAD_BYTES = 4 * Envelope.LIMIT
MAX_JOURNAL_BYTES = 1 << 31
"""A longer file, which may be sparse, is damaged. It is not read into memory."""
_FRAME_HEAD = struct.Struct(">III")
_JSON_ENCODER = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"))


@dataclass(frozen=True)
class JournalHeader:
    """The job of a journal."""

    job: str
    """As in the scheduler's configuration; empty: the first agent's job."""
    run: str
    config: str
    """`config_digest` of the scheduler's configuration."""
    scheduler: str
    """Incarnation of the scheduler that created the journal."""
    now: float
    """Monotonic seconds at the start of the job."""
    wall: float
    """The wall clock at the same moment, for the times in the event log."""


@dataclass(frozen=True)
class JournalEntry:
    """One event that the membership machine took."""

    group: int
    """
    Number of the commit. Entries of one group were written together before the scheduler acted on
    any of them.
    """
    now: float
    """Monotonic seconds of the event."""
    event: MembershipEvent


@dataclass(frozen=True)
class _EntryTime:
    """The fields of an entry without its event."""

    group: int
    now: float


@dataclass(frozen=True)
class JournalHistory:
    """The content of a journal."""

    header: JournalHeader
    entries: tuple[JournalEntry, ...]
    offsets: tuple[int, ...] = ()
    """Byte offset of each entry, for errors."""
    torn_bytes: int = 0
    """Length of a half-written entry at the end, which was cut off."""


@dataclass(frozen=True)
class ParsedJournal:
    """`JournalHistory` with what a writer needs to append."""

    history: JournalHistory
    good_bytes: int
    """Length of all complete frames."""
    chain_crc: int
    """Running CRC-32 of the last frame."""


def config_digest(config: SchedulerConfig) -> str:
    """Return a digest of what must be equal to continue a journal: all but the name of the run."""
    text = json.dumps(codec.to_plain(replace(config, run="")), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def encode_frame(payload: dict[str, Any], chain_crc: int) -> tuple[bytes, int]:
    """Return a frame with its payload, and the next running CRC-32."""
    data = _JSON_ENCODER.encode(payload).encode()
    head = struct.pack(">II", len(data), zlib.crc32(data))
    chain_crc = zlib.crc32(head, chain_crc)
    return head + struct.pack(">I", chain_crc) + data, chain_crc


def parse_journal(path: Path, data: bytes) -> ParsedJournal:
    """
    Parse a journal up to a half-written frame at its end.

    Args:
        path: of the journal, for errors.
        data: the whole file.

    Raises:
        RendezvousError: it is damaged, or another version's; names the byte.
    """
    header: JournalHeader | None = None
    entries: list[JournalEntry] = []
    offsets: list[int] = []
    good = len(MAGIC)
    chain_crc = 0
    for start, payload, next_crc in _iterate_frames(path, data):
        if header is None:
            header = _parse_header(path, start, payload)
        else:
            entries.append(_parse_entry(path, start, payload))
            offsets.append(start)
        good = start + _FRAME_HEAD.size + len(payload)
        chain_crc = next_crc
    if header is None:
        raise damage_error(path, len(MAGIC), "it ends before its header")
    history = JournalHistory(header, tuple(entries), tuple(offsets), len(data) - good)
    return ParsedJournal(history, good, chain_crc)


def read_header(path: Path) -> JournalHeader:
    """
    Return the header of a journal; the file is not opened for writing.

    Raises:
        RendezvousError: it is no journal, its header is damaged, or it is another version's.
        OSError: it cannot be read.
    """
    for start, payload, _ in _iterate_frames(path, _read_start(path)):
        return _parse_header(path, start, payload)
    raise damage_error(path, len(MAGIC), "it ends before its header")


def is_blank(path: Path) -> bool:
    """
    Whether a regular file is empty, or has only a part of a journal's first commit.

    No scheduler has acted on such a journal: it died before, or another program created the file.
    """
    if not path.is_file():
        return False
    data = _read_start(path)
    if MAGIC.startswith(data):
        return True
    try:
        return next(_iterate_frames(path, data), None) is None
    except RendezvousError:
        return False


def damage_error(path: Path, offset: int, why: str) -> RendezvousError:
    """Return the error for a journal that cannot be continued."""
    return RendezvousError(
        f"the scheduler's journal is damaged at byte {offset}: {why}",
        where=str(path),
        hint="the job cannot be resumed: remove the file and start the job again",
    )


def version_error(path: Path, why: str) -> RendezvousError:
    """Return the error for a journal that is not damaged, but of another version of pdrun."""
    return RendezvousError(
        f"another version of pdrun wrote the scheduler's journal: {why}",
        where=str(path),
        hint="resume the job with the pdrun that began it, or remove the file and start it again",
    )


def _read_start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_PAYLOAD_BYTES)


def _iterate_frames(path: Path, data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Yield (offset, payload, running CRC-32) of each complete frame."""
    if not data.startswith(MAGIC):
        if found := _FIRST_LINE.match(data):
            journal, protocol = (text and text.decode() for text in found.groups())
            theirs = f"protocol {protocol}" if protocol else f"'{journal}', without a protocol"
            raise version_error(path, f"it has {theirs}, this version has protocol {PROTOCOL}")
        raise damage_error(path, 0, "it is no journal of pdrun")
    offset = len(MAGIC)
    chain_crc = 0
    while offset < len(data):
        head = data[offset : offset + _FRAME_HEAD.size]
        # After a crash of the machine the file may end with zeros: bytes that were never written.
        if len(head) < _FRAME_HEAD.size or not (any(head) or any(data[offset:])):
            return
        length, payload_crc, next_crc = _FRAME_HEAD.unpack(head)
        chain_crc = zlib.crc32(head[:8], chain_crc)
        if chain_crc != next_crc:
            raise damage_error(path, offset, "this frame does not follow the one before it")
        start = offset + _FRAME_HEAD.size
        payload = data[start : start + length]
        if len(payload) < length:
            return
        if zlib.crc32(payload) != payload_crc:
            raise damage_error(path, offset, "its checksum differs")
        yield offset, payload, chain_crc
        offset = start + length


def _parse_header(path: Path, offset: int, payload: bytes) -> JournalHeader:
    try:
        value = codec.load_json(payload, MAX_PAYLOAD_BYTES)
        header: JournalHeader = codec.from_plain(JournalHeader, value, "header")
        return header
    except codec.CodecError as error:
        raise version_error(path, f"byte {offset}: {error}") from None


def _parse_entry(path: Path, offset: int, payload: bytes) -> JournalEntry:
    try:
        value = codec.load_json(payload, MAX_PAYLOAD_BYTES)
        if not isinstance(value, dict) or set(value) != {"group", "now", "event"}:
            raise codec.CodecError("an entry has the fields group, now, event")
        time = codec.from_plain(_EntryTime, {"group": value["group"], "now": value["now"]}, "entry")
        return JournalEntry(time.group, time.now, codec.event_from_plain(value["event"], "event"))
    except codec.CodecError as error:
        raise version_error(path, f"byte {offset}: {error}") from None
