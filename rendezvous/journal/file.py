"""
The journal file: what a successor of the scheduler needs to continue the job. Mode 0600.

Written ahead: the entries of all events that arrived together are appended and synced once
(`Journal.commit`). Only then does the scheduler act on them. So a half-written end was never acted
on, and is cut off. Any other difference is damage, and the error names the byte. The format is in
`pdrun.rendezvous.journal.format`.

A disk that does not answer for DISK_SECONDS counts as one that cannot be written.

Limits: the file must be on a disk that this process can lock, and that answers when the journal is
created or resumed. The file is as secret as the job's specification, and contains no token.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Any

from pdrun.disk import BackgroundCall, open_below
from pdrun.errors import ConfigError, RendezvousError
from pdrun.rendezvous.journal.format import (
    MAGIC,
    MAX_JOURNAL_BYTES,
    JournalHeader,
    JournalHistory,
    damage_error,
    encode_frame,
    is_blank,
    parse_journal,
)
from pdrun.rendezvous.protocol import codec
from pdrun.rendezvous.protocol.events import MembershipEvent

LOCK_SECONDS = 2.0
"""Time to wait for the lock: a process that was killed a moment ago may still hold it."""
DISK_SECONDS = 5.0
"""Time for the disk to take a commit. Less than the silence after which nodes are lost."""
REMOVAL_SECONDS = 1.0
"""Time to wait for the removal of the file."""


class Journal:
    """A journal that is being written: `add_entry` for each event, `commit` before acting."""

    def __init__(self, path: Path, fd: int, chain_crc: int, group: int) -> None:
        """Use `create_journal` or `reopen_journal` instead. ``fd`` belongs to this object."""
        self.path = path
        self.group = group
        """Number of the group that is being collected."""
        self._fd = fd
        self._chain_crc = chain_crc
        self._file = os.fstat(fd)
        self._pending = bytearray()
        self._stuck_commit: BackgroundCall[None] | None = None
        """A commit that the disk did not answer. It may still use the descriptor."""

    def add_entry(self, now: float, event: MembershipEvent) -> None:
        """Collect an entry. Nothing is written before `commit`."""
        plain = codec.event_to_plain(event)
        self._append_frame({"group": self.group, "now": now, "event": plain})

    def commit(self) -> None:
        """
        Write the collected entries and wait until they are on the disk.

        Raises:
            OSError: they could not be written, or not within DISK_SECONDS. The journal cannot be
                used any more; `discard` it.
        """
        if not self._pending:
            return
        data = bytes(self._pending)
        fd = self._fd
        self._pending.clear()
        write = BackgroundCall(lambda: _write_and_sync(fd, data))
        if not write.wait(DISK_SECONDS):
            self._stuck_commit = write
            raise TimeoutError(errno.ETIMEDOUT, f"the disk did not answer for {DISK_SECONDS:g} s")
        write.result()
        self.group += 1

    def close(self) -> None:
        """Close the file. Entries without a commit are dropped: nothing was done about them."""
        if self._fd >= 0 and self._stuck_commit is None:
            with contextlib.suppress(OSError):  # a broken disk may report its error here again
                os.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """
        Remove the file, so that no successor continues from it.

        If the disk does not answer, the file is removed when it answers again.
        """
        stuck = self._stuck_commit
        fd = self._fd
        self._stuck_commit = None
        self._fd = -1
        removal = BackgroundCall(lambda: _remove_file(self.path, fd, self._file, stuck))
        if stuck is None:
            removal.wait(REMOVAL_SECONDS)

    def _append_frame(self, payload: dict[str, Any]) -> None:
        frame, self._chain_crc = encode_frame(payload, self._chain_crc)
        self._pending += frame


def create_journal(path: Path, header: JournalHeader) -> Journal:
    """
    Create a journal, and its folder (mode 0700). An existing blank file is used.

    Raises:
        OSError: it cannot be written, or it exists already.
        ConfigError: another scheduler has just created it.
    """
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
    Read a journal, cut off its half-written end, and open it for appending.

    Raises:
        FileNotFoundError: it does not exist, or its scheduler has just removed it: the job is over.
        RendezvousError: it is damaged, or cannot be read.
        ConfigError: another scheduler is writing it.
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
        if (size := os.fstat(fd).st_size) > MAX_JOURNAL_BYTES:
            raise damage_error(path, MAX_JOURNAL_BYTES, f"it has {size:,} bytes")
        with open(os.dup(fd), "rb") as file:  # not by its name, which may change
            file.seek(0)
            parsed = parse_journal(path, file.read())
        if parsed.history.torn_bytes:
            os.ftruncate(fd, parsed.good_bytes)
            os.fdatasync(fd)
    except OSError as error:
        os.close(fd)
        raise RendezvousError(
            f"the scheduler's journal cannot be read: {error.strerror}", where=str(path)
        ) from None
    except BaseException:
        os.close(fd)
        raise
    entries = parsed.history.entries
    group = entries[-1].group + 1 if entries else 1
    return Journal(path, fd, parsed.chain_crc, group), parsed.history


# The file
# --------


def _write_and_sync(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
    os.fdatasync(fd)


def _remove_file(
    path: Path, fd: int, file: os.stat_result, stuck: BackgroundCall[None] | None
) -> None:
    """Remove a journal and close its descriptor, after the commit that may still use it."""
    if stuck is not None:
        stuck.wait()
    try:
        if _is_same_file(path, file):  # otherwise the name belongs to another job now
            path.unlink(missing_ok=True)
    except OSError:
        # If this fails, too, a successor cannot write the disk either.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
    with contextlib.suppress(OSError):
        os.close(fd)


def _open_locked(path: Path, flags: int = 0) -> int:
    """
    Open a journal and lock it. A journal of another user could start any program: it is refused.

    The last holder of the lock may have removed the file, so this returns the file that has the
    name once the lock is held.
    """
    while True:
        fd = open_below(path.parent.parent, path, os.O_RDWR | os.O_APPEND | flags)
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
                return  # a file system without locks; the scheduler's port is a lock, too
            if time.monotonic() > deadline:
                raise ConfigError(
                    "another scheduler writes this journal", where=str(path)
                ) from None
            time.sleep(0.02)


def _sync_folder(folder: Path) -> None:
    """Sync the folder, so that the name of the file survives a crash."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError:
        pass  # not every file system supports it
    finally:
        os.close(fd)
