"""
The scheduler's journal: what a successor needs to go on with the job. Append-only, one file, mode
0600.

    pdrun journal 1
    frame: length of the payload | CRC-32 of the payload | CRC-32 of those two, begun with the one
        of the frame before
    payload: JSON; of the first frame a Header, of every other one an Entry
    frame, payload, frame, payload ...

Written ahead: the entries of everything that came in together are appended and synced once
(`commit`), and only then is acted upon. So a half-written end was never acted upon: it is cut off.
Anything else that does not fit (a payload that differs from its checksum, a frame that does not
follow the one before) is damage, and named with its place.

A disk that does not answer for ANSWER seconds counts as one that cannot be written. Limits: the
file must lie on a disk that this process can lock, and that answers when the journal is begun or
resumed. The file is as secret as the job's specification, and holds no token.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdrun.background_call import BackgroundCall
from pdrun.errors import ConfigError, RendezvousError
from pdrun.private_folder import make_private_folder
from pdrun.rendezvous.protocol import codec
from pdrun.rendezvous.protocol.events import MembershipEvent, SchedulerConfig
from pdrun.rendezvous.protocol.messages import Envelope

MAGIC = b"pdrun journal 1\n"
_FRAME_HEAD = struct.Struct(">III")
_JSON_ENCODER = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"))
MAX_PAYLOAD_BYTES = 4 * Envelope.LIMIT
"""Bytes of one payload, at most."""
LOCK_SECONDS = 2.0
"""Seconds for the lock: a process that was killed a moment ago may still hold it."""
DISK_SECONDS = 5.0
"""
Seconds for the disk to take what is committed: less than the silence after which nodes give a
scheduler up.
"""
REMOVAL_SECONDS = 1.0
"""Seconds that the removal of the file is waited for."""


@dataclass(frozen=True)
class JournalHeader:
    """Whose journal this is."""

    job: str
    """As the scheduler was told it; empty: it was to adopt the first agent's."""
    run: str
    config: str
    """`digest` of the scheduler's configuration."""
    scheduler: str
    """Incarnation of the scheduler that began it."""
    now: float
    """Monotonic seconds when the job began."""
    wall: float
    """The wall clock at the same moment, for the times in the event log."""


@dataclass(frozen=True)
class JournalEntry:
    """One event that the membership machine took."""

    group: int
    """Counts the commits: entries of one group were written, and then acted upon, together."""
    now: float
    """Monotonic seconds at which it was taken."""
    event: MembershipEvent


@dataclass(frozen=True)
class JournalHistory:
    """What a journal tells."""

    header: JournalHeader
    entries: tuple[JournalEntry, ...]
    offsets: tuple[int, ...] = ()
    """Where each entry begins, for complaints."""
    torn_bytes: int = 0
    """Bytes of a half-written entry at the end, which were cut off."""


def config_digest(config: SchedulerConfig) -> str:
    """Return what must be equal for a journal to be continued: everything but the run's name."""
    text = json.dumps(codec.to_plain(replace(config, run="")), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Journal:
    """A journal that is being written. `add` what happens, `commit` before acting on it."""

    def __init__(self, path: Path, fd: int, chain: int, group: int) -> None:
        """Not to be called directly: see `create` and `reopen`. ``fd`` belongs to this object."""
        self.path = path
        self.group = group
        """Number of the group that is being collected."""
        self._fd = fd
        self._chain_crc = chain
        self._file = os.fstat(fd)
        self._pending = bytearray()
        self._stuck_commit: BackgroundCall[None] | None = None
        """A commit that the disk did not answer: it may still use the descriptor."""

    def add_entry(self, now: float, event: MembershipEvent) -> None:
        """Collect an entry; nothing is written before `commit`."""
        self._append_frame({"group": self.group, "now": now, "event": codec.event_to_plain(event)})

    def commit(self) -> None:
        """
        Write what was collected and wait until it is on the disk.

        Raises:
            OSError: it could not be written, or not within ANSWER seconds. The journal is of no use
                any more: `discard`
                it.
        """
        if not self._pending:
            return
        data = bytes(self._pending)
        fd = self._fd
        self._pending.clear()
        attempt = BackgroundCall(lambda: _write_and_sync(fd, data))
        if not attempt.wait(DISK_SECONDS):
            self._stuck_commit = attempt
            raise TimeoutError(errno.ETIMEDOUT, f"the disk did not answer for {DISK_SECONDS:g} s")
        attempt.result()
        self.group += 1

    def close(self) -> None:
        """Let the file go. What was not committed is lost, as it should be."""
        if self._fd >= 0 and self._stuck_commit is None:
            with contextlib.suppress(OSError):  # a broken disk may say so here once more
                os.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """
        Remove the file: nobody is to go on from it. A disk that does not answer does so once it
        answers again.
        """
        stuck = self._stuck_commit
        self._stuck_commit = None
        fd = self._fd
        self._fd = -1
        removal = BackgroundCall(lambda: _remove_file(self.path, fd, self._file, stuck))
        if stuck is None:
            removal.wait(REMOVAL_SECONDS)

    def _append_frame(self, payload: dict[str, Any]) -> None:
        data = _JSON_ENCODER.encode(payload).encode()
        head = struct.pack(">II", len(data), zlib.crc32(data))
        self._chain_crc = zlib.crc32(head, self._chain_crc)
        self._pending += head + struct.pack(">I", self._chain_crc) + data


def create_journal(path: Path, header: JournalHeader) -> Journal:
    """
    Begin a journal; its folder is made (0700) where it is missing, and a file in which nothing
    stands yet is taken.

    Raises:
        OSError: it cannot be written, or it is there already. ConfigError: another scheduler has
            just begun it.
    """
    make_private_folder(path.parent)
    if path.exists() and not is_blank(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    fd = _open_locked(path, os.O_CREAT)
    if not is_blank(path):
        os.close(fd)
        raise ConfigError("another scheduler writes this journal", where=str(path))
    journal = Journal(path, fd, 0, 0)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, 0)
        journal._pending += MAGIC
        journal._append_frame(codec.to_plain(header))
        journal.commit()
        _sync_folder(path.parent)
    except BaseException:
        journal.discard()
        raise
    return journal


def reopen_journal(path: Path) -> tuple[Journal, JournalHistory]:
    """
    Read a journal to its end, cut off what is half-written there, and open it for going on.

    Raises:
        FileNotFoundError: there is none, or its scheduler has just removed it: the job is over.
        RendezvousError: it is damaged, or cannot be read. ConfigError: another scheduler writes it
            right now.
    """
    try:
        fd = _open_locked(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RendezvousError(
            f"the scheduler's journal cannot be opened: {error.strerror}", where=str(path)
        ) from None
    try:
        data = path.read_bytes()
        header, entries, offsets, good, chain = _parse_journal(path, data)
        if good < len(data):
            os.ftruncate(fd, good)
            os.fdatasync(fd)
    except OSError as error:
        os.close(fd)
        raise RendezvousError(
            f"the scheduler's journal cannot be read: {error.strerror}", where=str(path)
        ) from None
    except BaseException:
        os.close(fd)
        raise
    group = entries[-1].group + 1 if entries else 1
    return Journal(path, fd, chain, group), JournalHistory(
        header, tuple(entries), tuple(offsets), len(data) - good
    )


def is_blank(path: Path) -> bool:
    """
    Whether a regular file holds nothing, or no more than the beginning of a journal's first commit.

    Nothing was done in the name of such a journal: its scheduler died before, or somebody made the
    file beforehand.
    """
    if not path.is_file():
        return False
    with path.open("rb") as file:
        data = file.read(MAX_PAYLOAD_BYTES)
    try:
        return MAGIC.startswith(data) or (
            data.startswith(MAGIC) and next(_iterate_frames(path, data), None) is None
        )
    except RendezvousError:
        return False


def read_header(path: Path) -> JournalHeader:
    """
    Return whose journal a file is, without opening it for going on.

    Raises:
        RendezvousError: it is none, or it is damaged there. OSError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(MAX_PAYLOAD_BYTES)
    return _parse_journal(path, data, header_only=True)[0]


def _write_and_sync(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
    os.fdatasync(fd)


def _remove_file(
    path: Path, fd: int, file: os.stat_result, after: BackgroundCall[None] | None
) -> None:
    """
    Remove a journal and close its descriptor, once the commit that may still use that is over.
    """
    if after is not None:
        after.wait()
    try:
        if _is_same_file(path, file):  # else the name is another job's by now
            path.unlink(missing_ok=True)
    except OSError:
        with contextlib.suppress(
            OSError
        ):  # a disk that takes neither cannot be written by a successor either
            os.ftruncate(fd, 0)
    with contextlib.suppress(OSError):
        os.close(fd)


# Reading
# --------------------------------------------------------------------------------------------------------------


def _parse_journal(
    path: Path, data: bytes, header_only: bool = False
) -> tuple[JournalHeader, list[JournalEntry], list[int], int, int]:
    """
    Return header, entries, their offsets, the length of what is whole, and the checksum that comes
    next.
    """
    header: JournalHeader | None = None
    entries: list[JournalEntry] = []
    offsets: list[int] = []
    good = len(MAGIC)
    chain = 0
    if not data.startswith(MAGIC):
        raise damage_error(path, 0, "it is no journal of this version of pdrun")
    for start, payload, follows in _iterate_frames(path, data):
        try:
            value = codec.load_json(payload, MAX_PAYLOAD_BYTES)
            if header is None:
                header = codec.from_plain(JournalHeader, value, "header")
            else:
                entries.append(_parse_entry(value))
                offsets.append(start)
        except codec.CodecError as error:
            raise damage_error(path, start, str(error)) from None
        good = start + _FRAME_HEAD.size + len(payload)
        chain = follows
        if header_only:
            break
    if header is None:
        raise damage_error(path, len(MAGIC), "it ends before it says whose it is")
    return header, entries, offsets, good, chain


def _iterate_frames(path: Path, data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """
    Yield (offset, payload, running checksum) of every whole frame; what is half there at the end is
    left out.
    """
    at = len(MAGIC)
    chain = 0
    while at < len(data):
        head = data[at : at + _FRAME_HEAD.size]
        # Where the machine itself went down, a file may have grown by bytes that were never
        # written: zeros.
        if len(head) < _FRAME_HEAD.size or not (any(head) or any(data[at:])):
            return
        length, checksum, follows = _FRAME_HEAD.unpack(head)
        chain = zlib.crc32(head[:8], chain)
        if chain != follows:
            raise damage_error(path, at, "what is there does not follow what stands before it")
        payload = data[at + _FRAME_HEAD.size : at + _FRAME_HEAD.size + length]
        if len(payload) < length:
            return
        if zlib.crc32(payload) != checksum:
            raise damage_error(path, at, "its checksum differs")
        yield at, payload, chain
        at += _FRAME_HEAD.size + length


def _parse_entry(value: Any) -> JournalEntry:
    if not isinstance(value, dict) or set(value) != {"group", "now", "event"}:
        raise codec.CodecError("an entry has the fields group, now, event")
    when = codec.from_plain(_EntryTime, {"group": value["group"], "now": value["now"]}, "entry")
    return JournalEntry(when.group, when.now, codec.event_from_plain(value["event"], "event"))


@dataclass(frozen=True)
class _EntryTime:
    """An entry without its event, which may be of any kind."""

    group: int
    now: float


def damage_error(path: Path, offset: int, why: str) -> RendezvousError:
    """Return the error about a journal from which nobody can go on."""
    return RendezvousError(
        f"the scheduler's journal is damaged at byte {offset}: {why}",
        where=str(path),
        hint="the job cannot be resumed: remove the file and start the job again",
    )


def _open_locked(path: Path, flags: int = 0) -> int:
    """
    Open a journal and lock it: the file that has this name once the lock is held, for its last
    holder removes it.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o600)
        try:
            _lock_file(path, fd)
            if _is_same_file(path, os.fstat(fd)):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _is_same_file(path: Path, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(file, path.stat())
    except FileNotFoundError:
        return False


def _lock_file(path: Path, fd: int) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return  # a file system without locks: the port is one lock already
            if time.monotonic() > deadline:
                raise ConfigError(
                    "another scheduler writes this journal", where=str(path)
                ) from None
            time.sleep(0.02)


def _sync_folder(folder: Path) -> None:
    """Have the file's name survive, too."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError:
        pass  # not every file system can
    finally:
        os.close(fd)
