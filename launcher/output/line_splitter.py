r"""
Bytes of one stream -> lines, whatever the writes were cut into.

    b"a\nb"  b"c\r\n"  b"10%\r20%\rdone\n"   ->   a | bc | 10% (bar) | 20% (bar) | done

``\n`` and ``\r\n`` end a line. A ``\r`` alone says that what follows is drawn over what went before: that piece is a
*bar update*. A line above LIMIT bytes comes in pieces, so that no amount of output without a line end is ever held.
The splitter is pure: any cutting of the same bytes gives the same lines (tests/output/test_lines.py holds it to that).
"""

from __future__ import annotations

from typing import NamedTuple

LIMIT = 1 << 16
"""Bytes of one piece of a line, at most."""


class Line(NamedTuple):
    r"""One line, one bar update, or one piece of a very long line, without its line end."""

    text: bytes
    end: bytes
    r"""
    ``\n``: the line is whole. ``\r``: a bar update. Empty: cut, the next Line goes on with the same
    line.
    """
    continued: bool = False
    """Whether this piece goes on with a line whose start came before."""


class LineSplitter:
    """Splits one stream. Not thread-safe; one a stream."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._half = bytearray()
        self._continued = False
        self._bar = b""
        self._return_held = False

    def feed(self, data: bytes) -> list[Line]:
        """Take the next bytes; return what they complete, in order."""
        if self._return_held:
            data = b"\r" + data
            self._return_held = False
        if data.endswith(b"\r"):  # the next byte tells whether this ends a line or redraws a bar
            data = data[:-1]
            self._return_held = True
        first, *rest = data.split(b"\n")
        if not rest:
            return self._partial(first)
        out = self._whole(first)
        for line in rest[:-1]:
            if len(line) <= self._limit and b"\r" not in line:
                out.append(Line(line, b"\n"))
            else:
                out += self._whole(line)
        return out + self._partial(rest[-1])

    def finish(self) -> list[Line]:
        """
        The stream has ended: return the half line that is left, if any. An empty ``end`` marks it.
        """
        out = self._partial(b"\r") if self._return_held else []
        self._return_held = False
        if self._half or self._continued:
            out.append(Line(bytes(self._half), b"", self._continued))
        self._half.clear()
        self._continued = False
        self._bar = b""
        return out

    def _partial(self, data: bytes) -> list[Line]:
        """Take bytes without a line feed in them."""
        *updates, last = data.split(b"\r")
        out: list[Line] = []
        for update in updates:
            out += self._grow(update)
            if self._half:
                self._bar = bytes(self._half)
                out.append(Line(self._bar, b"\r", self._continued))
                self._half.clear()
            self._continued = False
        return out + self._grow(last)

    def _whole(self, data: bytes) -> list[Line]:
        """Take bytes that a line feed follows, perhaps with a carriage return before it."""
        out = self._partial(data[:-1] if data.endswith(b"\r") else data)
        # A bar that is followed by a bare line end stays on the screen: it is the text of that
        # line.
        text = bytes(self._half) if self._half or self._continued else self._bar
        out.append(Line(text, b"\n", self._continued))
        self._half.clear()
        self._continued = False
        self._bar = b""
        return out

    def _grow(self, data: bytes) -> list[Line]:
        """
        Add to the half line and cut off what is above the limit, never inside a UTF-8 character.
        """
        self._half += data
        out: list[Line] = []
        start = 0
        while len(self._half) - start > self._limit:
            cut = start + self._limit
            while cut > start + self._limit - 3 and self._half[cut] & 0xC0 == 0x80:
                cut -= 1
            out.append(Line(bytes(self._half[start:cut]), b"", self._continued))
            self._continued = True
            start = cut
        if start:
            del self._half[:start]
        return out
