r"""
What one worker's stream looks like on the terminal: prefix, whole lines, calm progress bars,
harmless escapes.

    node1:3| step 10 loss 2.31          a line
    node1:3+ ...                        the next piece of a line above 64 KiB

A shaper turns bytes into bytes and knows nothing of files or threads. A worker's bytes are data: on
a terminal every control sequence but SGR colours is shown instead of obeyed (moving the cursor can
forge another rank's lines, OSC can write the clipboard). What goes to a file or a pipe is left as
it is.
"""

from __future__ import annotations

import re
from typing import Protocol

from pdrun.launcher.output.line_splitter import MAX_PIECE_BYTES, Line, LineSplitter

BAR_SECONDS = 1.0
"""Seconds between two shown states of a progress bar; the last state of a bar is always shown."""

_SGR = r"\x1b\[[0-9;:]*m"
_BIDI = "\u202a-\u202e\u2066-\u2069"
_RISKY = re.compile(rf"({_SGR})|[\x00-\x08\x0b-\x1f\x7f-\x9f{_BIDI}]")
_RISKY_IN_PLACE = re.compile(rf"({_SGR})|[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f{_BIDI}]")
"""Lets ``\\b`` and ``\\r`` through: they move inside the line only."""
_UNFINISHED = re.compile(
    rb"(?:\x1b(?:\[[0-9;:]{0,64})?|[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2})\Z"
)
"""The start of a colour or of a UTF-8 character at the end of what has come so far."""
_PLAIN_BYTES = bytes(range(0x20, 0x7F)) + b"\t\n"
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


def escape_controls(text: bytes, *, in_place: bool = False) -> bytes:
    r"""
    Return ``text`` with everything that a terminal would obey made visible, SGR colours excepted.

    Args:
        text: whole characters; bytes that are no UTF-8 are shown as ``\xNN``.
        in_place: let ``\r`` and ``\b`` through, for a worker that has the terminal to itself.
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
    """Shapes one stream for the terminal."""

    def feed(self, data: bytes, now: float) -> bytes:
        """Take the next bytes, at monotonic second ``now``; return what is to be shown for them."""
        ...

    def finish(self) -> bytes:
        """The stream has ended: return what was held back, as a whole line."""
        ...


class PrefixFormatter(StreamFormatter):
    """
    Several workers share the terminal: whole lines, each behind its worker's prefix (which may be
    empty).
    """

    def __init__(self, prefix: str, *, tty: bool, colour: int | None = None) -> None:
        """
        Shape for ``prefix`` (``node0:3``); ``colour`` is any number that picks the prefix's colour,
        or None.
        """
        self._line_prefix, self._piece_prefix = _make_prefixes(prefix, colour)
        self._is_terminal = tty
        self._splitter = LineSplitter()
        self._pending_bar: Line | None = None
        self._bar_shown_at = float("-inf")

    def feed(self, data: bytes, now: float) -> bytes:
        """Take the next bytes; return whole lines."""
        shown = [
            self._format_line(line)
            for line in self._splitter.feed(data)
            if line.end != b"\r" or self._is_bar_due(line, now)
        ]
        return b"".join(shown)

    def finish(self) -> bytes:
        """Return the half line and the last state of a bar."""
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
    The job has one worker: its bytes pass as they are, bars and prompts included.

    On a terminal they pass at once, cleaned; elsewhere up to the last ``\n`` or ``\r``, so that
    what reads a pipe or shares a file with pdrun's own lines sees whole lines.
    """

    def __init__(self, *, tty: bool) -> None:
        self._is_terminal = tty
        self._pending_bytes = b""

    def feed(self, data: bytes, now: float) -> bytes:
        """
        Take the next bytes; return all but an unfinished sequence (terminal) or line (elsewhere).
        """
        data = self._pending_bytes + data
        if self._is_terminal:
            unfinished = _UNFINISHED.search(data, max(0, len(data) - 80))
            cut = unfinished.start() if unfinished else len(data)
        else:
            cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            cut = len(data) if len(data) - cut > MAX_PIECE_BYTES else cut
        data, self._pending_bytes = data[:cut], data[cut:]
        return escape_controls(data, in_place=True) if self._is_terminal else data

    def finish(self) -> bytes:
        """Return what was held back, as the worker wrote it."""
        data = self._pending_bytes
        self._pending_bytes = b""
        return escape_controls(data, in_place=True) if self._is_terminal else data


def format_tail(recent: bytes, count: int, characters: int, *, cut: bool) -> list[str]:
    """
    Return the last lines of a stream's end, for a summary: bars in their last state, control
    characters visible.

    Args:
        recent: the end of the stream.
        count: lines, at most.
        characters: of each line, at most.
        cut: whether something came before ``recent``, so that its first line is perhaps none.
    """
    splitter = LineSplitter()
    pieces = splitter.feed(recent) + splitter.finish()
    # a bar that nothing followed is a line, too: its last state is what stood on the screen
    lines = [line for line in pieces[:-1] if line.end != b"\r"] + [
        line for line in pieces[-1:] if line.text.strip()
    ]
    lines = lines[1:] if cut and len(lines) > 1 else lines
    return [
        escape_controls(line.text).decode("utf-8", "replace")[:characters]
        for line in lines[-count:]
    ]


def _make_prefixes(prefix: str, colour: int | None) -> tuple[bytes, bytes]:
    """Return the prefix of a line and that of a piece that goes on with one."""
    if not prefix:
        return b"", b""
    on, off = (
        ("", "") if colour is None else (f"\x1b[{_COLOURS[colour % len(_COLOURS)]}m", "\x1b[0m")
    )
    return f"{on}{prefix}|{off} ".encode(), f"{on}{prefix}+{off} ".encode()
