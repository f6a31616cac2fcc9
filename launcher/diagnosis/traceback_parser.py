"""
Find the last Python traceback in a worker's stderr while it is read.

No decorator in the user's script is needed. A state machine reads lines:

    Traceback (most recent call last):            header   -> FRAMES
      File "train.py", line 3, in <module>        frames
    ValueError: boom                              the exception -> MESSAGE (may have more lines)
                                                  a blank line  -> GAP (a chain may follow)
    During handling of the above exception ...    one block with what went before
    [W1127 ...] destroy_process_group() was ...   noise of the shutdown: skipped

Exception groups, a SyntaxError of the script itself (without header), faulthandler's `Fatal Python
error` and rich's boxes are read, too. Exceptions that Python ignores ("Exception ignored in") are
not causes. Pure: bytes and times are arguments.

A header may follow other text, such as a progress bar without line end (``10%|# | 1/9Traceback
(most ...``). It counts if the next line can follow a header.

Limits: a traceback with a logger's prefix on every line is not found. Output of other threads
inside a traceback is kept.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Literal

from pdrun.quick_dataclass import dataclass

MAX_TRACEBACK_BYTES = 1 << 16
"""Only the last bytes of a traceback are kept."""
MAX_MESSAGE_LINES = 100
"""Further lines that can belong to an exception's message."""
LAST_WORD_LINES = 20
"""
A dying worker may print this many lines after its traceback ("giving up"). With more, the traceback
is not the reason of its end.
"""
LAST_WORD_SECONDS = 30.0
"""Time in which it may print them. Closing the recorder of a run takes a while."""
PAUSE_SECONDS = 2.0
"""A line after a longer pause does not belong to the traceback's message."""
_MAX_FOREIGN_LINES = 20
_COMPLETE = ("message", "gap", "chain", "fatal", "group", "box")
"""
States in which the open block is complete enough to show. Only the next line shows the end of a
group or a box.
"""

Kind = Literal["exception", "syntax", "fatal"]

_HEADER = re.compile(rb"(?:Original )?Traceback \(most recent call last\):")
_GROUP = re.compile(rb"  \+ Exception Group Traceback \(most recent call last\):")
_GROUP_LINE = re.compile(rb" +[|+]")
_BOX = re.compile(rb"(?:\xe2\x95\xad|\+)[^ ]* ?Traceback \(most recent call last\)")
_BOX_LINE = re.compile(rb"\xe2\x94\x82|\xe2\x95\xb0|\||\+-")
_SCRIPT_FRAME = re.compile(rb'  File ".*", line \d+$')
_SYNTAX = re.compile(rb"(?:SyntaxError|IndentationError|TabError)(?::|$)")
_FATAL = re.compile(rb"Fatal Python error: ")
_FATAL_LINE = re.compile(
    rb"$|  |Current thread|Thread 0x|Extension modules:|Python runtime state|Stack \(|<"
    rb"|Garbage-coll"
)
_EXCEPTION = re.compile(rb"[^\W\d][\w.<>-]*(?::(?:\s|$)|$)")
_CHAIN = re.compile(
    rb"During handling of the above exception, another exception occurred:"
    rb"|The above exception was the direct cause of the following exception:"
    rb"|-- Process \d+ terminated with the following error:"
)
_IGNORED = re.compile(rb"Exception ignored |Error in atexit|Error in sys.excepthook")
_NOISE = re.compile(
    rb"\[[IWEF]\d{3,}|\[rank\d+\]:\[[IWEF]\d{3,}|[IWEF]\d{4} |terminate called"
    rb"|.*resource_tracker|.*UserWarning:"
    rb"|  warnings\.warn\(|.*ResourceWarning:|Exception ignored |sys:1: "
)
_LOG = re.compile(
    rb"\[?\d{4}-\d\d-\d\d|\[?\d\d:\d\d:\d\d|\[?(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)\b"
)
_LOGGED = re.compile(rb".*\b(?:WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b|[WEF]\d{4} ")
"""A logger's line of a level that is used for exceptions."""
_RANK = re.compile(rb"\[rank\d+\]: ")
_BAR = re.compile(rb"\r|\d%|\d+/\d+|it/s|s/it")
_SECOND_LINES = {
    "frames": re.compile(rb'  File "'),
    "group": _GROUP_LINE,
    "box": _BOX_LINE,
    "fatal": re.compile(rb"$|Current thread|Thread 0x|Python runtime state|<|Stack \("),
}
"""What must follow a header that was found behind other text."""
_SGR = re.compile(rb"\x1b\[[0-9;:]*m")
_HEADS = {"group": _GROUP, "frames": _HEADER, "box": _BOX, "fatal": _FATAL}
_KINDS: dict[str, Kind] = {"fatal": "fatal", "script": "syntax"}
_HINTS = (b"Traceback (most recent", b"Fatal Python error", b'  File "')


@dataclass(frozen=True)
class Traceback:
    """The last traceback of a stream."""

    at: float
    """Time at which its first byte was read (monotonic)."""
    text: str
    kind: Kind
    lines_after: int
    """Lines after it, without noise of the shutdown."""
    output_seconds: float = 0.0
    """Time from its first byte to the last output after it."""
    is_logged: bool = False
    """Whether a logger's line (warning or worse) precedes it: the program has caught it."""

    @property
    def is_last_word(self) -> bool:
        """Return whether so little output followed that the worker ended because of it."""
        return self.lines_after <= LAST_WORD_LINES and self.output_seconds <= LAST_WORD_SECONDS

    @property
    def has_survived(self) -> bool:
        """Return whether the output shows that the program continued after it."""
        return self.is_logged or self.output_seconds > PAUSE_SECONDS

    @property
    def summary(self) -> str:
        """Return the line of the exception (``ValueError: boom``), at most 500 characters."""
        return find_exception_line(self.text)


def find_exception_line(text: str) -> str:
    """Return the line of a traceback's last exception, at most 500 characters, or empty."""
    lines = text.splitlines()
    starts = [at for at, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    after = lines[starts[-1] + 1 :] if starts and "Group" not in lines[starts[-1]] else lines
    for line in after:
        bare = line.removeprefix("  | ")
        if bare[:1] not in ("", " ", "│", "╰", "|", "+") and _EXCEPTION.match(bare.encode()):
            return bare[:500].rstrip()
    return next((line[:500] for line in lines if line.startswith("Fatal Python error")), "")


class TracebackFinder:
    """Reads one stream. `feed` is fast as long as nothing looks like a traceback."""

    def __init__(self) -> None:
        self._partial = b""
        self._partial_at = 0.0
        self._state = "idle"
        self._block = _TracebackBlock(0.0, "exception")
        self._last_block: _TracebackBlock | None = None
        self._lines_after = 0
        self._output_at = 0.0
        self._line_at = 0.0
        self._line_above = b""
        self._is_unconfirmed = False
        self._extra_lines = 0
        self._ignores_next = False
        self._state_methods: dict[str, Callable[[bytes], bool]] = {
            "idle": self._in_idle,
            "frames": self._in_frames,
            "group": self._in_group,
            "script": self._in_script,
            "box": self._in_box,
            "message": self._in_message,
            "gap": self._in_gap,
            "chain": self._in_chain,
            "fatal": self._in_fatal,
            "ignored": self._in_ignored,
        }

    def feed(self, data: bytes, at: float) -> None:
        """Process bytes that were read at time ``at`` (monotonic)."""
        data = self._partial + data
        first_at = self._partial_at if self._partial else at
        if self._can_skip(data):
            cut = data.rfind(b"\n") + 1
            if cut:
                self._line_above = data[data.rfind(b"\n", 0, cut - 1) + 1 : cut - 1]
            self._partial = _limit_partial(data[cut:])
            self._partial_at = first_at if not cut else at
            return
        *lines, half = data.split(b"\n")
        for line in lines:
            self._take_line(line, first_at, at)
            first_at = at
        self._partial = _limit_partial(half)
        self._partial_at = first_at
        if half and self._state in ("idle", "message", "gap") and not _NOISE.match(half):
            self._output_at = at

    def finish(self) -> None:
        """Process an unfinished last line; the stream has ended."""
        half = self._partial
        self._partial = b""
        if half:
            self._take_line(half, self._partial_at, self._partial_at)

    @property
    def last_traceback(self) -> Traceback | None:
        """Return the last complete traceback so far, or None."""
        block = self._last_block
        if self._state in _COMPLETE:
            block = self._block
        if block is None:
            return None
        return Traceback(
            block.at,
            block.text(),
            block.kind,
            self._lines_after,
            max(0.0, self._output_at - block.at),
            block.logged,
        )

    def _can_skip(self, data: bytes) -> bool:
        return (
            self._state == "idle"
            and self._last_block is None
            and not any(hint in data for hint in _HINTS)
        )

    def _take_line(self, line: bytes, first_at: float, at: float) -> None:
        """
        Process a line with the method of the current state.

        Args:
            first_at: time of its first byte. Behind a progress bar that is long before the rest.
            at: time of its last byte.
        """
        bare = _SGR.sub(b"", line) if b"\x1b" in line else line
        if bare.startswith(b"[rank"):  # the prefix of torch.distributed's excepthook
            bare = _RANK.sub(b"", bare)
        bare = bare.removesuffix(b"\r")
        if self._state in ("message", "gap", "chain") and at - self._line_at > PAUSE_SECONDS:
            # A message is printed without pauses. This line is later output of the program.
            self._close_block()
        if self._is_unconfirmed and bare:
            self._is_unconfirmed = False
            if not _SECOND_LINES[self._state].match(bare):
                self._drop_block()
        if not self._open_block(bare, first_at, at) and not self._state_methods[self._state](bare):
            self._close_block()
            self._count_after(bare, at)
        self._line_above = bare
        self._line_at = at

    def _open_block(self, line: bytes, first_at: float, at: float) -> bool:
        """Open a block if this line is its head; a chained exception continues the open block."""
        if self._state in ("frames", "group") and not _FATAL.match(line):
            return False
        state, start = self._match_head(line)
        if not state:
            return self._match_ignored(line)
        if self._state == "message" and line.startswith(b"Original "):
            return False  # from a data loader's worker: a part of the message
        chained = self._state == "chain" and state in ("frames", "group")
        if not chained:
            self._close_block()
            above = line[:start].rpartition(b"\r")[2] or self._line_above
            self._block = _TracebackBlock(
                at if start else first_at,
                _KINDS.get(state, "exception"),
                bool(_LOGGED.match(above)),
            )
        self._block.add(line[start:])
        self._state = state
        self._extra_lines = 0
        self._is_unconfirmed = start > 0
        if self._ignores_next:
            self._state = "ignored"
            self._ignores_next = False
        elif state in _COMPLETE:
            self._lines_after = 0
        return True

    def _match_head(self, line: bytes) -> tuple[str, int]:
        """Return the state that this line opens, or empty, and the position of the head."""
        for state, pattern in _HEADS.items():
            if pattern.match(line):
                return state, 0
        if self._state == "idle" and _SCRIPT_FRAME.match(line):
            return "script", 0
        if self._state in ("idle", "gap", "fatal", "box") or (
            self._state == "message" and _BAR.search(line)
        ):
            for state, pattern in _HEADS.items():
                if found := pattern.search(line):
                    return state, found.start()
        return "", 0

    def _match_ignored(self, line: bytes) -> bool:
        """Detect that Python ignores the next traceback."""
        if _IGNORED.match(line):
            self._close_block()
            self._ignores_next = True
            return True
        return False

    def _close_block(self) -> None:
        """Keep the open block if it is complete, and return to idle."""
        if self._state in _COMPLETE:
            self._last_block = self._block
        self._state = "idle"

    def _count_after(self, line: bytes, at: float) -> None:
        if self._last_block is None or not line.strip() or _NOISE.match(line):
            return
        self._lines_after += 1
        self._output_at = at
        if (
            self._lines_after > 10 * LAST_WORD_LINES
        ):  # too old to matter: forget it, so that `feed` is fast again
            self._last_block = None
            self._lines_after = 0

    # One method per state. It adds a line to the block, or returns False if the block ended before.

    def _in_idle(self, line: bytes) -> bool:
        self._ignores_next = self._ignores_next and line.startswith(b" ")
        return False

    def _in_frames(self, line: bytes) -> bool:
        if line.startswith(b"  ") or not line:
            self._block.add(line)
        elif _NOISE.match(line):
            pass
        elif _EXCEPTION.match(line):
            self._complete_block(line, "message")
        else:  # a line of another thread; a limited number
            self._block.add(line)
            self._extra_lines += 1
            if self._extra_lines > _MAX_FOREIGN_LINES:
                return self._drop_block()
        return True

    def _in_group(self, line: bytes) -> bool:
        if _GROUP_LINE.match(line):
            self._block.add(line)
            return True
        self._complete_block(None, "message")
        return self._in_message(line)

    def _in_script(self, line: bytes) -> bool:
        if line.startswith(b"    "):
            self._block.add(line)
            return True
        if _SYNTAX.match(line):
            self._complete_block(line, "message")
            return True
        return self._drop_block()

    def _in_box(self, line: bytes) -> bool:
        if _BOX_LINE.match(line):
            self._block.add(line)
            return True
        self._complete_block(line, "message")
        return True

    def _in_message(self, line: bytes) -> bool:
        if not line:
            self._state = "gap"
            return True
        if _NOISE.match(line):
            return True
        self._extra_lines += 1
        if self._extra_lines > MAX_MESSAGE_LINES or _LOG.match(line):
            return False
        if _CHAIN.match(line):
            return self._in_gap(line)
        self._block.add(line)
        return True

    def _in_gap(self, line: bytes) -> bool:
        if _CHAIN.match(line):
            self._block.add(b"")
            self._block.add(line)
            self._state = "chain"
            return True
        return not line or bool(_NOISE.match(line))

    def _in_chain(self, line: bytes) -> bool:
        if not line:
            self._block.add(line)
        return not line

    def _in_fatal(self, line: bytes) -> bool:
        if _FATAL_LINE.match(line):
            self._block.add(line)
            return True
        return bool(_NOISE.match(line))

    def _in_ignored(self, line: bytes) -> bool:
        """Skip an ignored traceback, up to its exception line."""
        if not line.startswith(b" ") and line:
            self._state = "idle"
        return True

    def _complete_block(self, line: bytes | None, state: str) -> None:
        if line is not None:
            self._block.add(line)
        self._state = state
        self._extra_lines = 0
        self._lines_after = 0

    def _drop_block(self) -> bool:
        self._state = "idle"
        return False


def _limit_partial(half: bytes) -> bytes:
    """Return what is kept of an unfinished line: of a redrawn progress bar only its end."""
    if len(half) <= MAX_TRACEBACK_BYTES:
        return half
    return half[half.rfind(b"\r", 0, -1) + 1 :][:MAX_TRACEBACK_BYTES]


class _TracebackBlock:
    """The lines of a block; only the last MAX_TRACEBACK_BYTES are kept."""

    def __init__(self, at: float, kind: Kind, logged: bool = False) -> None:
        self.at = at
        self.kind = kind
        self.logged = logged
        self._lines: deque[bytes] = deque()
        self._size = 0

    def add(self, line: bytes) -> None:
        line = line[-MAX_TRACEBACK_BYTES:]
        self._lines.append(line)
        self._size += len(line) + 1
        while self._size > MAX_TRACEBACK_BYTES and len(self._lines) > 1:
            self._size -= len(self._lines.popleft()) + 1

    def text(self) -> str:
        return b"\n".join(self._lines).decode("utf-8", "replace").rstrip() + "\n"
