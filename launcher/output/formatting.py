r"""
How one worker's stream looks on the terminal: prefix, whole lines, limited bars, safe escapes.

    node1:3| step 10 loss 2.31          a line
    node1:3+ ...                        the next piece of a line above 64 KiB

A formatter turns bytes into bytes, without files and threads. A worker's bytes are untrusted: on a
terminal all control sequences except SGR colours are escaped. Cursor movements could forge lines of
other ranks, OSC could write the clipboard. Output to a file or a pipe is not changed.
"""

from __future__ import annotations

import re
from typing import Protocol

from pdrun.launcher.output.line_splitter import MAX_PIECE_BYTES, Line, LineSplitter

BAR_SECONDS = 1.0
"""Time between two shown states of a progress bar. The last state is always shown."""

_SGR = r"\x1b\[[0-9;:]*m"
_BIDI = "\u202a-\u202e\u2066-\u2069"
_RISKY = re.compile(rf"({_SGR})|[\x00-\x08\x0b-\x1f\x7f-\x9f{_BIDI}]")
_RISKY_IN_PLACE = re.compile(rf"({_SGR})|[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f{_BIDI}]")
"""Accepts ``\\b`` and ``\\r``: they move within the line only."""
_UNFINISHED = re.compile(
    rb"(?:\x1b(?:\[[0-9;:]{0,64})?"
    rb"|[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2})\Z"
)
"""An incomplete colour or UTF-8 character at the end of the data."""
_PLAIN_BYTES = bytes(range(0x20, 0x7F)) + b"\t\n"
_MAX_SEQUENCE_BYTES = 80
"""No incomplete sequence is longer."""
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


def escape_controls(text: bytes, *, in_place: bool = False) -> bytes:
    r"""
    Return ``text`` with all control sequences except SGR colours escaped.

    Args:
        text: complete characters; invalid UTF-8 is shown as ``\xNN``.
        in_place: keep ``\r`` and ``\b``, for the only worker on the terminal.
    """
    if not text.translate(None, _PLAIN_BYTES):
        return text
    pattern = _RISKY_IN_PLACE if in_place else _RISKY
    return pattern.sub(_escape_match, text.decode("utf-8", "backslashreplace")).encode()


def _escape_match(match: re.Match[str]) -> str:
    if match.group(1):
        return match.group(1)
    code = ord(match.group())
    if code < 0x20 or code == 0x7F:
        return "^" + chr(code ^ 0x40)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class StreamFormatter(Protocol):
    """Formats one stream for the terminal."""

    def feed(self, data: bytes, now: float) -> bytes:
        """Add bytes, at the monotonic time ``now``; return what to show."""
        ...

    def finish(self) -> bytes:
        """Return the rest at the end of the stream, as a whole line."""
        ...


class PrefixFormatter(StreamFormatter):
    """For several workers on one terminal: whole lines, each with its worker's prefix."""

    def __init__(self, prefix: str, *, tty: bool, colour: int | None = None) -> None:
        """
        Args:
            prefix: ``node0:3``; may be empty.
            tty: whether the stream is a terminal.
            colour: any number, which selects the prefix's colour; None: no colour.
        """
        self._line_prefix, self._piece_prefix = _make_prefixes(prefix, colour)
        self._is_terminal = tty
        self._splitter = LineSplitter()
        self._pending_bar: Line | None = None
        self._bar_shown_at = float("-inf")

    def feed(self, data: bytes, now: float) -> bytes:
        """Add bytes; return whole lines."""
        shown = [
            self._format_line(line)
            for line in self._splitter.feed(data)
            if line.end != b"\r" or self._is_bar_due(line, now)
        ]
        return b"".join(shown)

    def finish(self) -> bytes:
        """Return the partial line, and the last state of a bar."""
        shown = []
        for line in self._splitter.finish():
            if line.end == b"\r":
                self._pending_bar = line
            else:
                shown.append(self._format_line(line))
        if self._pending_bar:
            shown.append(self._format_line(self._pending_bar))
        return b"".join(shown)

    def _is_bar_due(self, bar: Line, now: float) -> bool:
        if now - self._bar_shown_at < BAR_SECONDS:
            self._pending_bar = bar
            return False
        self._bar_shown_at = now
        return bool(bar.text.strip())

    def _format_line(self, line: Line) -> bytes:
        self._pending_bar = None
        text = line.text
        if self._is_terminal:
            text = escape_controls(text)
            if b"\x1b" in text and not text.endswith(b"\x1b[0m"):
                text += b"\x1b[0m"
        return (self._piece_prefix if line.is_continued else self._line_prefix) + text + b"\n"


class RawFormatter(StreamFormatter):
    r"""
    For a job of one worker: its bytes are passed on unchanged, with bars and prompts.

    On a terminal they are passed on immediately, with control sequences escaped. Otherwise only up
    to the last ``\n`` or ``\r``, so that a pipe or a shared file gets whole lines.
    """

    def __init__(self, *, tty: bool) -> None:
        self._is_terminal = tty
        self._pending_bytes = b""

    def feed(self, data: bytes, now: float) -> bytes:
        """Add bytes; return all except an incomplete sequence (terminal) or line (otherwise)."""
        data = self._pending_bytes + data
        end = len(data)
        if self._is_terminal:
            unfinished = _UNFINISHED.search(data, max(0, len(data) - _MAX_SEQUENCE_BYTES))
            if unfinished is not None:
                end = unfinished.start()
        else:
            line_end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            if len(data) - line_end <= MAX_PIECE_BYTES:
                end = line_end
        self._pending_bytes = data[end:]
        data = data[:end]
        return escape_controls(data, in_place=True) if self._is_terminal else data

    def finish(self) -> bytes:
        """Return the rest, as the worker wrote it."""
        data = self._pending_bytes
        self._pending_bytes = b""
        return escape_controls(data, in_place=True) if self._is_terminal else data


def format_tail(recent: bytes, count: int, characters: int, *, cut: bool) -> list[str]:
    """
    Return the last lines of a stream for a summary: last states of bars, controls escaped.

    Args:
        recent: the end of the stream.
        count: maximum number of lines.
        characters: maximum length of each line.
        cut: ``recent`` is not the whole stream, so its first line may be incomplete.
    """
    splitter = LineSplitter()
    pieces = splitter.feed(recent) + splitter.finish()
    lines = [line for line in pieces[:-1] if line.end != b"\r"]
    # a bar at the very end counts as a line: its last state was on the screen
    lines += [line for line in pieces[-1:] if line.text.strip()]
    if cut and len(lines) > 1:
        lines = lines[1:]
    texts = []
    for line in lines[-count:]:
        text = escape_controls(line.text).decode("utf-8", "replace")
        texts.append(text[:characters])
    return texts


def _make_prefixes(prefix: str, colour: int | None) -> tuple[bytes, bytes]:
    """Return the prefix of a line, and that of a further piece of a line."""
    if not prefix:
        return b"", b""
    on = ""
    off = ""
    if colour is not None:
        on = f"\x1b[{_COLOURS[colour % len(_COLOURS)]}m"
        off = "\x1b[0m"
    return f"{on}{prefix}|{off} ".encode(), f"{on}{prefix}+{off} ".encode()
