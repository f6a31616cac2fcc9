r"""
Bytes of one stream -> lines, whatever the writes were cut into.

    b"a\nb"  b"c\r\n"  b"10%\r20%\rdone\n"   ->   a | bc | 10% (bar) | 20% (bar) | done

``\n`` and ``\r\n`` end a line. A ``\r`` alone says that what follows is drawn over what went before: that piece is a
*bar update*. A line above LIMIT bytes comes in pieces, so that no amount of output without a line end is ever held.
The splitter is pure: any cutting of the same bytes gives the same lines (tests/launcher/output/test_line_splitter.py holds it to that).
"""

from __future__ import annotations

from typing import NamedTuple

MAX_PIECE_BYTES = 1 << 16
"""Bytes of one piece of a line, at most."""


class Line(NamedTuple):
    r"""One line, one bar update, or one piece of a very long line, without its line end."""

    text: bytes
    end: bytes
    r"""
    ``\n``: the line is whole. ``\r``: a bar update. Empty: cut, the next Line goes on with the same
    line.
    """
    is_continued: bool = False
    """Whether this piece goes on with a line whose start came before."""


class LineSplitter:
    """Splits one stream. Not thread-safe; one a stream."""

    def __init__(self, limit: int = MAX_PIECE_BYTES) -> None:
        self._max_piece_bytes = limit
        self._partial_line = bytearray()
        self._is_continued = False
        self._last_bar = b""
        self._has_pending_return = False

    def feed(self, data: bytes) -> list[Line]:
        """Take the next bytes; return what they complete, in order."""
        if self._has_pending_return:
            data = b"\r" + data
            self._has_pending_return = False
        if data.endswith(b"\r"):  # the next byte tells whether this ends a line or redraws a bar
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
        """
        The stream has ended: return the half line that is left, if any. An empty ``end`` marks it.
        """
        out = self._add_partial(b"\r") if self._has_pending_return else []
        self._has_pending_return = False
        if self._partial_line or self._is_continued:
            out.append(Line(bytes(self._partial_line), b"", self._is_continued))
        self._partial_line.clear()
        self._is_continued = False
        self._last_bar = b""
        return out

    def _add_partial(self, data: bytes) -> list[Line]:
        """Take bytes without a line feed in them."""
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
        """Take bytes that a line feed follows, perhaps with a carriage return before it."""
        out = self._add_partial(data[:-1] if data.endswith(b"\r") else data)
        # A bar that is followed by a bare line end stays on the screen: it is the text of that
        # line.
        text = (
            bytes(self._partial_line)
            if self._partial_line or self._is_continued
            else self._last_bar
        )
        out.append(Line(text, b"\n", self._is_continued))
        self._partial_line.clear()
        self._is_continued = False
        self._last_bar = b""
        return out

    def _append_bytes(self, data: bytes) -> list[Line]:
        """
        Add to the half line and cut off what is above the limit, never inside a UTF-8 character.
        """
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
