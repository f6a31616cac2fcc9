"""
Where the workers' output goes: read from their pipes, to the terminal and to files, without ever
waiting for either.

    worker --pipe (1 MiB)--> read() --+--> Console      whole lines behind `host:rank| `, or hidden by --show-ranks
                                      +--> LogFiles     the raw bytes
                                      +--> tail, traceback: what a summary needs, in memory

Backpressure is in `filenos`: while the reader of the terminal, or a disk that is slow, is far
behind, the pipes are left alone and the workers wait; nothing is dropped for it. A wake-up
descriptor among `filenos` ends the wait. Used from one thread (the agent's loop); only the wake-up
is rung from others.
"""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pdrun.errors import ConfigError
from pdrun.launcher.common.rank_lists import RankSet
from pdrun.launcher.config import spec
from pdrun.launcher.diagnosis.traceback_parser import PAUSE_SECONDS, Traceback, TracebackFinder
from pdrun.launcher.output.console import STDERR, STDOUT, Console
from pdrun.launcher.output.formatting import (
    PrefixFormatter,
    StreamFormatter,
    RawFormatter,
    format_tail,
)
from pdrun.launcher.output.log_files import LogFile, LogWriter
from pdrun.launcher.output.log_names import (
    ERR_SUFFIX,
    OUT_SUFFIX,
    check_template,
    fill_template,
    prepare_log_folder,
)
from pdrun.launcher.output.pipes import Wakeup, open_worker_pipe

MAX_READ_BYTES = 1 << 18
MAX_TAIL_LINES = 20
MAX_TAIL_CHARACTERS = 500
_MAX_TAIL_BYTES = 1 << 14
_MIN_STDOUT_LINES = 5
"""Lines of the tail that stdout gets at least, when there are any."""


@dataclass
class WorkerStream:
    """One pipe of one worker."""

    number: int
    """OUT or ERR."""
    fd: int
    formatter: StreamFormatter | None
    """None: the rank is hidden."""
    log_file: LogFile | None
    recent: bytes = b""
    finder: TracebackFinder | None = None
    last_read_at: float = 0.0
    """Monotonic seconds at which something was last read."""


@dataclass
class WorkerStreams:
    rank: int
    is_hidden: bool
    prefix: str
    streams: list[WorkerStream] = field(default_factory=list)
    is_tail_shown: bool = False


class OutputRouter:
    """The agent's `ports.WorkerOutput`."""

    def __init__(
        self,
        settings: spec.Output,
        *,
        node: str,
        cwd: str = "",
        ip: str = "",
        hostname: str = "",
        console: Console | None = None,
        log_writer: LogWriter | None = None,
    ) -> None:
        """
        Set up; nothing is made, opened or started before the first use.

        Args:
            settings: what the user asked for.
            node: name of this node: in prefixes and file names.
            cwd: folder that a relative log folder is under; empty: the current one.
            ip: this node's address, for file names.
            hostname: this node's host name, for file names.
            console: the terminal; by default this process's own.
            files: the log files' writer; for tests.

        Raises:
            UsageError, ConfigError: the ranks to show, or the log name, make no sense.
        """
        self.console = console or Console()
        self.log_folder = Path(cwd, settings.log_dir)
        self._settings = settings
        self._shown_ranks = RankSet(settings.show_ranks)
        self._template = check_template(settings.log_name)
        self._name_fields = {"node": node, "ip": ip, "hostname": hostname}
        self._log_writer = log_writer or LogWriter()
        self._run_name = ""
        self._world_size = 0
        self._workers: dict[int, WorkerStreams] = {}
        self._stream_of_fd: dict[int, WorkerStream] = {}
        self._error_log_paths: dict[int, str] = {}
        self._wakeup = Wakeup()

    def prepare_folder(self) -> None:
        """
        Make the log folder, or find out that it cannot be used: part of the preflight.

        Raises:
            ConfigError: names the folder and the reason.
        """
        if self._settings.files:
            prepare_log_folder(self.log_folder)

    def begin_generation(self, run: str, world_size: int) -> None:
        """
        A generation starts: needed before `open`; names the folder, and tells whether lines need a
        prefix.
        """
        self._run_name = run
        self._world_size = world_size
        if self._wakeup.fd < 0:
            self._wakeup.open()
            self.console.call_when_ready(self._wakeup.set)
            self._log_writer.on_ready = self._wakeup.set

    def open_pipes(self, rank: int, local_rank: int, generation: int) -> tuple[int, int]:
        """
        Make the two pipes of a worker; return the write ends (stdout, stderr), which the caller
        closes.

        Raises:
            ConfigError: the system gives no more descriptors.
        """
        self._close_worker(rank)
        prefix = self._line_prefix(rank)
        worker = WorkerStreams(rank, is_hidden=rank not in self._shown_ranks, prefix=prefix)
        ends: list[int] = []
        for number, suffix in ((STDOUT, OUT_SUFFIX), (STDERR, ERR_SUFFIX)):
            read = self._open_pipe(rank, ends)
            stream = WorkerStream(
                number,
                read,
                None if worker.is_hidden else self._make_formatter(number, prefix, rank),
                self._open_log(rank, local_rank, generation, suffix),
                finder=TracebackFinder() if number == STDERR else None,
            )
            worker.streams.append(stream)
            self._stream_of_fd[read] = stream
        self._workers[rank] = worker
        return ends[0], ends[1]

    def watched_fds(self) -> Iterable[int]:
        """
        The read ends to watch now: none of a stream that is held back; and the wake-up that ends
        the holding.
        """
        held = (
            {STDOUT, STDERR}
            if self._log_writer.is_behind()
            else {number for number in (STDOUT, STDERR) if self.console.is_behind(number)}
        )
        fds = [
            fd
            for fd, stream in self._stream_of_fd.items()
            if stream.number not in held or self._ignores_terminal(stream)
        ]
        return [*fds, self._wakeup.fd] if self._wakeup.fd >= 0 else fds

    def read_pipe(self, fd: int) -> None:
        """
        Take what a readable pipe holds, at most one buffer, and pass it on; forget a pipe that has
        ended.
        """
        if fd == self._wakeup.fd:
            self._wakeup.clear()
            return
        stream = self._stream_of_fd.get(fd)
        if stream is not None and not self._read_stream(stream):
            self._close_stream(stream)

    def drain_worker(self, rank: int, timeout: float) -> None:
        """
        A worker has ended: take what is left in its pipes (until EOF or ``timeout``), write out a
        last half line.
        """
        worker = self._workers.get(rank)
        left = (
            [stream for stream in worker.streams if stream.fd in self._stream_of_fd]
            if worker
            else []
        )
        deadline = time.monotonic() + timeout
        poll = select.poll()
        for stream in left:
            poll.register(stream.fd, select.POLLIN)
        while left:
            ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            for stream in [stream for stream in left if stream.fd in ready]:
                if not self._read_stream(stream):
                    poll.unregister(stream.fd)
                    left.remove(stream)
                    self._close_stream(stream)
            if not ready or time.monotonic() >= deadline:
                break
        for stream in left:
            self._close_stream(stream)

    def last_lines(self, rank: int) -> tuple[str, ...]:
        """
        The last lines of a worker, stderr after stdout: at most 20, each at most 500 characters.
        """
        worker = self._workers.get(rank)
        if worker is None:
            return ()
        out, err = (
            format_tail(
                stream.recent,
                MAX_TAIL_LINES,
                MAX_TAIL_CHARACTERS,
                cut=len(stream.recent) >= _MAX_TAIL_BYTES,
            )
            for stream in worker.streams
        )
        err = err[-(MAX_TAIL_LINES - min(len(out), _MIN_STDOUT_LINES)) :]
        out = out[-(MAX_TAIL_LINES - len(err)) :] if len(err) < MAX_TAIL_LINES else []
        return tuple(out + err)

    def recent_stderr(self, rank: int) -> str:
        """
        The last 16 KiB that a worker printed on stderr: an abort's reason may stand above a long
        stack.
        """
        worker = self._workers.get(rank)
        return worker.streams[1].recent.decode("utf-8", "replace") if worker else ""

    def last_traceback(self, rank: int) -> tuple[float, str] | None:
        """The last Python traceback on a worker's stderr, when it was as good as its last word."""
        found = self.find_traceback(rank)
        return (found.at, found.text) if found and found.is_last_word else None

    def has_survived(self, rank: int) -> bool:
        """
        Whether a worker's output tells that it went on after the traceback that is its last word on
        stderr.
        """
        worker = self._workers.get(rank)
        found = self.find_traceback(rank)
        if worker is None or found is None:
            return False
        return found.has_survived or worker.streams[0].last_read_at > found.at + PAUSE_SECONDS

    def last_output_at(self, rank: int) -> float:
        """Monotonic seconds at which something that a worker printed was last read; 0: never."""
        worker = self._workers.get(rank)
        if worker:
            return max((stream.last_read_at for stream in worker.streams), default=0.0)
        return 0.0

    def find_traceback(self, rank: int) -> Traceback | None:
        """
        The last traceback of a worker with all that is known of it, also when much was printed
        after it.
        """
        worker = self._workers.get(rank)
        finder = worker.streams[1].finder if worker else None
        return finder.last_traceback if finder else None

    def log_path(self, rank: int) -> str:
        """
        Path of the worker's log that tells why it ended, or the empty string when no files are
        written.

        The error log, unless the evidence is what it printed on stdout; ``rank_3.{out,err}`` when
        it may be in either.
        """
        path = self._error_log_paths.get(rank, "")
        worker = self._workers.get(rank)
        out, err = (
            (bool(stream.recent.strip()) for stream in worker.streams) if worker else (False, True)
        )
        if not path or not out or self.last_traceback(rank):
            return path
        return path.removesuffix(ERR_SUFFIX) + (
            f".{{{OUT_SUFFIX[1:]},{ERR_SUFFIX[1:]}}}" if err else OUT_SUFFIX
        )

    def show_hidden_tail(self, rank: int) -> None:
        """A worker failed: show the last lines of one that --show-ranks hides; once."""
        worker = self._workers.get(rank)
        if worker is None or not worker.is_hidden or worker.is_tail_shown:
            return
        worker.is_tail_shown = True
        lines = self.last_lines(rank)
        path = self.log_path(rank)
        source = f"its log is {path}" if path else "no log is written"
        last = {0: "printed nothing", 1: "its last line"}.get(
            len(lines), f"its last {len(lines)} lines"
        )
        self.print_line(
            f"pdrun: rank {rank} failed; {last} (hidden by --show-ranks; {source}){':' * bool(lines)}"
        )
        for line in lines:
            self.print_line(f"{worker.prefix or rank}| {line}")

    def print_line(self, text: str) -> None:
        """
        Print a line of pdrun's own on the terminal (stderr), in order with the workers' lines.
        """
        self.console.print_line(text)

    def close(self, timeout: float = 2.0) -> tuple[str, ...]:
        """
        Flush files and terminal; return one line for each thing that was dropped.

        ``timeout`` bounds the time without progress, not the whole: what is slow is waited for,
        what hangs is not.
        """
        for stream in list(self._stream_of_fd.values()):
            self._close_stream(stream)
        lost = self._log_writer.close(timeout)
        for line in lost:
            self.print_line(f"pdrun: {line}")
        lost += self.console.close(timeout)
        self._wakeup.close()
        return lost

    def _open_pipe(self, rank: int, ends: list[int]) -> int:
        """
        Return the read end of a new pipe and add its write end to ``ends``; should that fail, close
        those.
        """
        try:
            read, write = open_worker_pipe()
        except OSError as error:
            for end in ends:
                os.close(end)
            hint = (
                "raise the limit on open files (ulimit -n)"
                if error.errno in (errno.EMFILE, errno.ENFILE)
                else ""
            )
            raise ConfigError(f"no pipe for rank {rank}: {error.strerror}", hint=hint) from error
        ends.append(write)
        return read

    def _line_prefix(self, rank: int) -> str:
        if self._settings.prefix == "none" or (
            self._settings.prefix == "auto" and self._world_size == 1
        ):
            return ""
        if self._settings.prefix == "rank":
            return str(rank)
        return f"{self._name_fields['node']}:{rank}"

    def _make_formatter(self, number: int, prefix: str, rank: int) -> StreamFormatter:
        tty = self.console.is_terminal(number)
        if self._world_size == 1 and not prefix:
            return RawFormatter(tty=tty)
        return PrefixFormatter(
            prefix, tty=tty, colour=rank if self.console.has_colour(number) else None
        )

    def _open_log(self, rank: int, local_rank: int, generation: int, suffix: str) -> LogFile | None:
        if not self._settings.files:
            return None
        stem = fill_template(self._template, rank=rank, local_rank=local_rank, **self._name_fields)
        path = self.log_folder / self._run_name / str(generation) / (stem + suffix)
        if suffix == ERR_SUFFIX:
            self._error_log_paths[rank] = str(path)
        return self._log_writer.open_file(
            path, f"rank {rank}'s {'output' if suffix == OUT_SUFFIX else 'errors'}"
        )

    def _ignores_terminal(self, stream: WorkerStream) -> bool:
        """A hidden rank does not wait for the terminal."""
        return stream.formatter is None and not self._log_writer.is_behind()

    def _read_stream(self, stream: WorkerStream) -> bool:
        """Read one buffer; False at the end of the stream."""
        try:
            data = os.read(stream.fd, MAX_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        now = stream.last_read_at = time.monotonic()
        if stream.log_file:
            self._log_writer.write(stream.log_file, data)
        if stream.finder:
            stream.finder.feed(data, now)
        stream.recent = (
            data[-_MAX_TAIL_BYTES:]
            if len(data) >= _MAX_TAIL_BYTES
            else (stream.recent + data)[-_MAX_TAIL_BYTES:]
        )
        if stream.formatter:
            self.console.write(stream.number, stream.formatter.feed(data, now))
        return True

    def _close_stream(self, stream: WorkerStream) -> None:
        if self._stream_of_fd.pop(stream.fd, None) is None:
            return
        os.close(stream.fd)
        if stream.finder:
            stream.finder.finish()
        if stream.formatter:
            self.console.write(stream.number, stream.formatter.finish())
        if stream.log_file:
            self._log_writer.end_file(stream.log_file)

    def _close_worker(self, rank: int) -> None:
        """The rank's worker of an earlier generation."""
        worker = self._workers.pop(rank, None)
        for stream in worker.streams if worker else ():
            self._close_stream(stream)
