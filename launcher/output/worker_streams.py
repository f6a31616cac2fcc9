"""What is kept of one worker's output: its pipes, the end of each stream, the last traceback."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdrun.launcher.diagnosis.traceback_parser import PAUSE_SECONDS, Traceback, TracebackFinder
from pdrun.launcher.output.formatting import StreamFormatter, format_tail
from pdrun.launcher.output.log_files import LogFile

MAX_TAIL_LINES = 20
MAX_TAIL_CHARACTERS = 500
MAX_RECENT_BYTES = 1 << 14
MIN_STDOUT_LINES = 5
"""Lines of a tail that stdout gets at least, if it has any."""


@dataclass
class WorkerStream:
    """One pipe of one worker."""

    number: int
    """STDOUT or STDERR."""
    fd: int
    formatter: StreamFormatter | None
    """None: the rank is hidden."""
    log_file: LogFile | None
    recent: bytes = b""
    """The end of the stream, at most MAX_RECENT_BYTES."""
    finder: TracebackFinder | None = None
    """For stderr."""
    last_read_at: float = 0.0
    """Monotonic time of the last read with data; 0: none yet."""

    def keep_recent(self, data: bytes) -> None:
        """Add data to the end of the stream."""
        if len(data) < MAX_RECENT_BYTES:
            data = self.recent + data
        self.recent = data[-MAX_RECENT_BYTES:]

    def tail_lines(self) -> list[str]:
        """Return the last lines: at most 20, each at most 500 characters."""
        is_cut = len(self.recent) >= MAX_RECENT_BYTES
        return format_tail(self.recent, MAX_TAIL_LINES, MAX_TAIL_CHARACTERS, cut=is_cut)

    def has_text(self) -> bool:
        """Return whether the recent output contains more than white space."""
        return bool(self.recent.strip())


@dataclass
class WorkerStreams:
    """The two streams of one worker."""

    rank: int
    is_hidden: bool
    """Whether the rank's stderr is hidden, and so the reason of its failure."""
    prefix: str
    streams: list[WorkerStream] = field(default_factory=list)
    """stdout, stderr."""
    is_tail_shown: bool = False

    def last_lines(self) -> list[str]:
        """Return the last lines, stdout before stderr: at most 20, each at most 500 characters."""
        out, err = (stream.tail_lines() for stream in self.streams)
        err = err[-(MAX_TAIL_LINES - min(len(out), MIN_STDOUT_LINES)) :]
        left = MAX_TAIL_LINES - len(err)
        return (out[-left:] if left else []) + err

    def recent_stderr(self) -> str:
        """Return the last 16 KiB of stderr."""
        return self.streams[1].recent.decode("utf-8", "replace")

    def find_traceback(self) -> Traceback | None:
        """Return the last traceback on stderr, whatever was printed after it."""
        finder = self.streams[1].finder
        return finder.last_traceback if finder else None

    def last_traceback(self) -> tuple[float, str] | None:
        """Return the time and text of the last traceback, if only its own lines followed."""
        found = self.find_traceback()
        return (found.at, found.text) if found and found.is_last_word else None

    def has_survived(self) -> bool:
        """Return whether the output shows that the worker continued after its last traceback."""
        found = self.find_traceback()
        if found is None:
            return False
        return found.has_survived or self.streams[0].last_read_at > found.at + PAUSE_SECONDS

    def last_output_at(self) -> float:
        """Return the monotonic time of the last output; 0: none yet."""
        return max((stream.last_read_at for stream in self.streams), default=0.0)
