"""
Routes the workers' output from their pipes to the terminal and to files, and waits for neither.

    worker --pipe (1 MiB)--> read_pipe() --+--> Console        whole lines with `host:rank| `, or
                                           |                   hidden by --show-ranks
                                           +--> LogWriter      the raw bytes
                                           +--> WorkerStreams  tail and traceback, for a summary

Backpressure is in `watched_fds`: while the terminal's reader or the disk is far behind, the pipes
are not read, and the workers wait. So nothing is dropped. A wake-up descriptor ends the wait. All
calls come from one thread, the agent's loop; only the wake-up is set by other threads.
"""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Iterable
from pathlib import Path

from pdrun.errors import ConfigError
from pdrun.launcher.common.rank_lists import RankSet
from pdrun.launcher.common.standard_input import StandardInput
from pdrun.launcher.config import spec
from pdrun.launcher.diagnosis.traceback_parser import TracebackFinder
from pdrun.launcher.output.console import STDERR, STDOUT, Console
from pdrun.launcher.output.formatting import PrefixFormatter, RawFormatter, StreamFormatter
from pdrun.launcher.output.log_files import LogFile, LogWriter
from pdrun.launcher.output.log_names import (
    ERR_SUFFIX,
    OUT_SUFFIX,
    check_template,
    fill_template,
    prepare_log_folder,
)
from pdrun.launcher.output.pipes import PIPE_BYTES, Wakeup, open_worker_pipe
from pdrun.launcher.output.worker_streams import WorkerStream, WorkerStreams

MAX_READ_BYTES = 1 << 18


class OutputRouter:
    """Implements `pdrun.launcher.agent.interfaces.WorkerOutput`."""

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
        stdin: StandardInput | None = None,
        stdin_rank: int | None = None,
    ) -> None:
        """
        Prepare; nothing is created or started before the first use.

        Args:
            settings: the user's options.
            node: name of this node, for prefixes and file names.
            cwd: parent of a relative log folder; empty: the current folder.
            ip: this node's address, for file names.
            hostname: this node's host name, for file names.
            console: the terminal; default: that of this process.
            log_writer: writes the log files; for tests.
            stdin: the standard input of a worker, whose prompts are shown immediately.
            stdin_rank: the rank of ``--stdin``.

        Raises:
            UsageError, ConfigError: invalid ranks to show, or an invalid log name.
        """
        self.console = console or Console()
        self.log_folder = Path(cwd, settings.log_dir)
        self._settings = settings
        self._shown_ranks = {
            STDOUT: RankSet(settings.show_ranks),
            STDERR: RankSet(settings.show_stderr or settings.show_ranks, where="--show-stderr"),
        }
        self._template = check_template(settings.log_name)
        self._name_fields = {"node": node, "ip": ip, "hostname": hostname}
        self._log_writer = log_writer or LogWriter()
        self._run_name = ""
        self._has_been_several = False
        """Whether ``--prefix auto`` gives lines a prefix: there were several workers."""
        self._stdin = stdin
        self._stdin_rank = stdin_rank
        self._terminal_reader: int | None = None
        """Rank that reads a terminal."""
        self._workers: dict[int, WorkerStreams] = {}
        self._stream_of_fd: dict[int, WorkerStream] = {}
        self._error_log_paths: dict[int, str] = {}
        self._wakeup = Wakeup()

    def prepare_folder(self) -> None:
        """
        Make the log folder; part of the preflight.

        Raises:
            ConfigError: the folder cannot be used.
        """
        if self._settings.files:
            prepare_log_folder(self.log_folder)

    def begin_generation(self, run: str, world_size: int) -> None:
        """
        Start a generation; needed before `open_pipes`.

        Args:
            run: name of the run: names the log folder.
            world_size: decides whether lines need a prefix.
        """
        self._run_name = run
        # Lines keep their prefix when an elastic job shrinks to one worker.
        self._has_been_several = self._has_been_several or world_size > 1
        if self._stdin is not None and self._stdin.is_terminal:
            self._terminal_reader = self._stdin.choose_rank(
                self._stdin_rank, self._settings.show_ranks, world_size
            )
        if self._wakeup.fd < 0:
            self._wakeup.open()
            self.console.call_when_ready(self._wakeup.set)
            self._log_writer.on_ready = self._wakeup.set

    def open_pipes(self, rank: int, local_rank: int, generation: int) -> tuple[int, int]:
        """
        Make the two pipes of a worker.

        Returns:
            The write ends (stdout, stderr), which the caller closes.

        Raises:
            ConfigError: there are no descriptors left.
        """
        self._close_worker(rank)
        prefix = self._line_prefix(rank)
        worker = WorkerStreams(rank, is_hidden=rank not in self._shown_ranks[STDERR], prefix=prefix)
        ends: list[int] = []
        for number, suffix in ((STDOUT, OUT_SUFFIX), (STDERR, ERR_SUFFIX)):
            read = self._open_pipe(rank, ends)
            formatter = None
            if rank in self._shown_ranks[number]:
                formatter = self._make_formatter(number, prefix, rank)
            log_file = self._open_log(rank, local_rank, generation, suffix)
            stream = WorkerStream(number, read, formatter, log_file)
            if number == STDERR:
                stream.finder = TracebackFinder()
            worker.streams.append(stream)
            self._stream_of_fd[read] = stream
        self._workers[rank] = worker
        return ends[0], ends[1]

    def watched_fds(self) -> Iterable[int]:
        """Return the read ends to wait for, without those that are held back, and the wake-up."""
        is_disk_behind = self._log_writer.is_behind()
        held = {n for n in (STDOUT, STDERR) if is_disk_behind or self.console.is_behind(n)}
        fds = []
        for fd, stream in self._stream_of_fd.items():
            # a hidden rank waits for the disk, but not for the terminal
            ignores_terminal = stream.formatter is None and not is_disk_behind
            if stream.number not in held or ignores_terminal:
                fds.append(fd)
        if self._wakeup.fd >= 0:
            fds.append(self._wakeup.fd)
        return fds

    def read_pipe(self, fd: int) -> None:
        """Read a readable pipe, at most one buffer, and pass the data on; close it at its end."""
        if fd == self._wakeup.fd:
            self._wakeup.clear()
            return
        stream = self._stream_of_fd.get(fd)
        if stream is not None and not self._read_stream(stream):
            self._close_stream(stream)

    def drain_worker(self, rank: int, timeout: float) -> None:
        """
        Read the pipes of an ended worker until EOF or ``timeout`` seconds, and close them.

        What they contain is read, however long this process stood still; later output of a stray
        child is not.
        """
        worker = self._workers.get(rank)
        if worker is None:
            return
        left = [stream for stream in worker.streams if stream.fd in self._stream_of_fd]
        deadline = time.monotonic() + timeout
        poll = select.poll()
        for stream in left:
            poll.register(stream.fd, select.POLLIN)
        late_reads = PIPE_BYTES // MAX_READ_BYTES + 1
        while left and late_reads:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                late_reads -= 1
            ready = dict(poll.poll(max(0.0, seconds) * 1000))
            for stream in [stream for stream in left if stream.fd in ready]:
                if not self._read_stream(stream):
                    poll.unregister(stream.fd)
                    left.remove(stream)
                    self._close_stream(stream)
            if not ready:
                break
        for stream in left:
            self._close_stream(stream)

    def last_lines(self, rank: int) -> tuple[str, ...]:
        """Return the last lines of a worker, stdout before stderr."""
        worker = self._workers.get(rank)
        return tuple(worker.last_lines()) if worker else ()

    def recent_stderr(self, rank: int) -> str:
        """Return the last 16 KiB of stderr: an abort's reason may be before a long stack."""
        worker = self._workers.get(rank)
        return worker.recent_stderr() if worker else ""

    def last_traceback(self, rank: int) -> tuple[float, str] | None:
        """Return the time and text of the last traceback, if only its own lines followed."""
        worker = self._workers.get(rank)
        return worker.last_traceback() if worker else None

    def has_survived(self, rank: int) -> bool:
        """Return whether the output shows that a worker continued after its `last_traceback`."""
        worker = self._workers.get(rank)
        return worker is not None and worker.has_survived()

    def last_output_at(self, rank: int) -> float:
        """Return the monotonic time of the last output of a worker; 0: none yet."""
        worker = self._workers.get(rank)
        return worker.last_output_at() if worker else 0.0

    def log_path(self, rank: int) -> str:
        """
        Return the log that shows why a worker ended; empty if no files are written.

        That is the error log, unless the worker printed on stdout only. It is
        ``rank_3.{out,err}`` if the reason may be in either.
        """
        path = self._error_log_paths.get(rank, "")
        worker = self._workers.get(rank)
        if not path or worker is None or worker.last_traceback():
            return path
        out, err = (stream.has_text() for stream in worker.streams)
        if not out:
            return path
        suffix = OUT_SUFFIX
        if err:
            suffix = f".{{{OUT_SUFFIX[1:]},{ERR_SUFFIX[1:]}}}"
        return path.removesuffix(ERR_SUFFIX) + suffix

    def show_hidden_tail(self, rank: int) -> None:
        """Print the last lines of a failed worker that --show-ranks hides; once."""
        worker = self._workers.get(rank)
        if worker is None or not worker.is_hidden or worker.is_tail_shown:
            return
        worker.is_tail_shown = True
        lines = worker.last_lines()
        path = self.log_path(rank)
        source = f"its log is {path}" if path else "no log is written"
        end = f"(hidden by --show-ranks; {source})"
        if not lines:
            self.print_line(f"pdrun: rank {rank} failed; printed nothing {end}")
            return
        what = "its last line"
        if len(lines) > 1:
            what = f"its last {len(lines)} lines"
        self.print_line(f"pdrun: rank {rank} failed; {what} {end}:")
        for line in lines:
            self.print_line(f"{worker.prefix or rank}| {line}")

    def print_line(self, text: str) -> None:
        """Print a line of pdrun on the terminal (stderr), in order with the workers' lines."""
        self.console.print_line(text)

    def close(self, timeout: float = 2.0) -> tuple[str, ...]:
        """
        Flush files and terminal.

        Args:
            timeout: longest time without progress in seconds. A slow reader is waited for, one that
                hangs is not.

        Returns:
            One line for each loss.
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
        Return the read end of a new pipe, and add its write end to ``ends``.

        If that fails, all of ``ends`` are closed.
        """
        try:
            read, write = open_worker_pipe()
        except OSError as error:
            for end in ends:
                os.close(end)
            hint = ""
            if error.errno in (errno.EMFILE, errno.ENFILE):
                hint = "raise the limit on open files (ulimit -n)"
            raise ConfigError(f"no pipe for rank {rank}: {error.strerror}", hint=hint) from error
        ends.append(write)
        return read

    def _line_prefix(self, rank: int) -> str:
        kind = self._settings.prefix
        if kind == "none" or (kind == "auto" and not self._has_been_several):
            return ""
        if kind == "rank":
            return str(rank)
        return f"{self._name_fields['node']}:{rank}"

    def _make_formatter(self, number: int, prefix: str, rank: int) -> StreamFormatter:
        tty = self.console.is_terminal(number)
        if (not self._has_been_several and not prefix) or (tty and rank == self._terminal_reader):
            return RawFormatter(tty=tty)
        colour = rank if self.console.has_colour(number) else None
        return PrefixFormatter(prefix, tty=tty, colour=colour)

    def _open_log(self, rank: int, local_rank: int, generation: int, suffix: str) -> LogFile | None:
        if not self._settings.files:
            return None
        stem = fill_template(self._template, rank=rank, local_rank=local_rank, **self._name_fields)
        path = self.log_folder / self._run_name / str(generation) / (stem + suffix)
        if suffix == ERR_SUFFIX:
            self._error_log_paths[rank] = str(path)
        label = "output" if suffix == OUT_SUFFIX else "errors"
        return self._log_writer.open_file(self.log_folder, path, f"rank {rank}'s {label}")

    def _read_stream(self, stream: WorkerStream) -> bool:
        """Read one buffer; return False at the end of the stream."""
        try:
            data = os.read(stream.fd, MAX_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        now = time.monotonic()
        stream.last_read_at = now
        if stream.log_file:
            self._log_writer.write(stream.log_file, data)
        if stream.finder:
            stream.finder.feed(data, now)
        stream.keep_recent(data)
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
        """Close the pipes of a rank's worker in an earlier generation."""
        worker = self._workers.pop(rank, None)
        if worker is not None:
            for stream in worker.streams:
                self._close_stream(stream)
