r"""
Splits the bytes of one stream into lines, independent of how the writes cut them.

    b"a\nb"  b"c\r\n"  b"10%\r20%\rdone\n"   ->   a | bc | 10% (bar) | 20% (bar) | done

``\n`` and ``\r\n`` end a line. After a single ``\r``, the next text overwrites the present one: the
text before it is a *bar update*. A line above MAX_PIECE_BYTES is returned in pieces, so memory is
bounded. Any cutting of the same bytes gives the same lines.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_PIECE_BYTES = 1 << 16


class Line(NamedTuple):
    """One line, one bar update, or one piece of a very long line, without its line end."""

    text: bytes
    end: bytes
    r"""``\n``: end of a line. ``\r``: a bar update. Empty: the next Line continues this line."""
    is_continued: bool = False
    """Whether this piece continues a line."""


class LineSplitter:
    """Splits one stream. Not thread-safe; one per stream."""

    def __init__(self, limit: int = MAX_PIECE_BYTES) -> None:
        self._max_piece_bytes = limit
        self._partial_line = bytearray()
        self._is_continued = False
        self._last_bar = b""
        self._has_pending_return = False

    def feed(self, data: bytes) -> list[Line]:
        """Add bytes; return the lines that they complete, in order."""
        if self._has_pending_return:
            data = b"\r" + data
            self._has_pending_return = False
        if data.endswith(b"\r"):  # the next byte decides: a line end, or a bar update
            data = data[:-1]
            self._has_pending_return = True
        first, *rest = data.split(b"\n")
        if not rest:
            return self._add_partial(first)
        out = self._end_line(first)
        for line in rest[:-1]:
            if len(line) <= self._max_piece_bytes and b"\r" not in line:
                out.append(Line(line, b"\n"))
            else:
                out += self._end_line(line)
        return out + self._add_partial(rest[-1])

    def finish(self) -> list[Line]:
        """Return the partial line at the end of the stream, if any, with an empty ``end``."""
        out = self._add_partial(b"\r") if self._has_pending_return else []
        self._has_pending_return = False
        if self._partial_line or self._is_continued:
            out.append(Line(bytes(self._partial_line), b"", self._is_continued))
        self._partial_line.clear()
        self._is_continued = False
        self._last_bar = b""
        return out

    def _add_partial(self, data: bytes) -> list[Line]:
        """Add bytes that contain no line feed."""
        *updates, last = data.split(b"\r")
        out: list[Line] = []
        for update in updates:
            out += self._append_bytes(update)
            if self._partial_line:
                self._last_bar = bytes(self._partial_line)
                out.append(Line(self._last_bar, b"\r", self._is_continued))
                self._partial_line.clear()
            self._is_continued = False
        return out + self._append_bytes(last)

    def _end_line(self, data: bytes) -> list[Line]:
        """Add bytes before a line feed; a carriage return before it belongs to the line end."""
        out = self._add_partial(data[:-1] if data.endswith(b"\r") else data)
        text = bytes(self._partial_line)
        if not text and not self._is_continued:
            text = self._last_bar  # a bar before a bare line end stays on the screen
        out.append(Line(text, b"\n", self._is_continued))
        self._partial_line.clear()
        self._is_continued = False
        self._last_bar = b""
        return out

    def _append_bytes(self, data: bytes) -> list[Line]:
        """Add to the partial line; return pieces above the limit, cut between UTF-8 characters."""
        self._partial_line += data
        out: list[Line] = []
        start = 0
        while len(self._partial_line) - start > self._max_piece_bytes:
            cut = start + self._max_piece_bytes
            while (
                cut > start + self._max_piece_bytes - 3 and self._partial_line[cut] & 0xC0 == 0x80
            ):
                cut -= 1
            out.append(Line(bytes(self._partial_line[start:cut]), b"", self._is_continued))
            self._is_continued = True
            start = cut
        if start:
            del self._partial_line[:start]
        return out
