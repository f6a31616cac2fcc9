"""Reads the lines that another process appends to an event log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdrun.disk import BackgroundCall

DISK_SECONDS = 0.1
"""Longest wait for the disk in one read."""
MAX_READ_BYTES = 1 << 20


class EventTail:
    """Reads new lines of a file of JSON lines. The disk may hang."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._partial_line = b""
        self._pending_read: BackgroundCall[bytes] | None = None

    def read_new(self) -> list[dict[str, Any]]:
        """
        Return the new events.

        Each read waits for the disk for a moment, once. While the disk does not answer, nothing is
        returned.
        """
        timeout = 0.0
        if self._pending_read is None:
            self._pending_read = BackgroundCall(self._read_block)
            timeout = DISK_SECONDS
        if not self._pending_read.wait(timeout):
            return []
        data = self._pending_read.result()
        self._pending_read = None
        self._offset += len(data)
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        found = []
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                found.append(event)
        return found

    def _read_block(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                return file.read(MAX_READ_BYTES)
        except OSError:
            return b""
