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
from pdrun.launcher.common.ranks import RankSet
from pdrun.launcher.config import spec
from pdrun.launcher.diagnosis.traceback_parser import PAUSE, Found, TracebackFinder
from pdrun.launcher.output.console import ERR, OUT, Console
from pdrun.launcher.output.formatting import PrefixShaper, Shaper, StraightShaper, last_lines
from pdrun.launcher.output.log_files import LogFile, LogFiles
from pdrun.launcher.output.log_names import (
    ERR_SUFFIX,
    OUT_SUFFIX,
    check_template,
    file_stem,
    prepare_root,
)
from pdrun.launcher.output.pipes import Bell, worker_pipe

READ_BYTES = 1 << 18
TAIL_LINES = 20
TAIL_CHARACTERS = 500
_TAIL_BYTES = 1 << 14
_OUT_SHARE = 5
"""Lines of the tail that stdout gets at least, when there are any."""


@dataclass
class _Stream:
    """One pipe of one worker."""

    number: int
    """OUT or ERR."""
    fd: int
    shaper: Shaper | None
    """None: the rank is hidden."""
    file: LogFile | None
    recent: bytes = b""
    finder: TracebackFinder | None = None
    heard_at: float = 0.0
    """Monotonic seconds at which something was last read."""


@dataclass
class _Worker:
    rank: int
    hidden: bool
    prefix: str
    streams: list[_Stream] = field(default_factory=list)
    revealed: bool = False


class Output:
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
        files: LogFiles | None = None,
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
        self.root = Path(cwd, settings.log_dir)
        self._settings = settings
        self._shown = RankSet(settings.show_ranks)
        self._template = check_template(settings.log_name)
        self._places = {"node": node, "ip": ip, "hostname": hostname}
        self._files = files or LogFiles()
        self._run = ""
        self._world_size = 0
        self._workers: dict[int, _Worker] = {}
        self._by_fd: dict[int, _Stream] = {}
        self._paths: dict[int, str] = {}
        self._bell = Bell()

    def prepare(self) -> None:
        """
        Make the log folder, or find out that it cannot be used: part of the preflight.

        Raises:
            ConfigError: names the folder and the reason.
        """
        if self._settings.files:
            prepare_root(self.root)

    def begin(self, run: str, world_size: int) -> None:
        """
        A generation starts: needed before `open`; names the folder, and tells whether lines need a
        prefix.
        """
        self._run = run
        self._world_size = world_size
        if self._bell.fd < 0:
            self._bell.open()
            self.console.on_room(self._bell.ring)
            self._files.on_room = self._bell.ring

    def open(self, rank: int, local_rank: int, generation: int) -> tuple[int, int]:
        """
        Make the two pipes of a worker; return the write ends (stdout, stderr), which the caller
        closes.

        Raises:
            ConfigError: the system gives no more descriptors.
        """
        self._forget(rank)
        prefix = self._prefix(rank)
        worker = _Worker(rank, hidden=rank not in self._shown, prefix=prefix)
        ends: list[int] = []
        for number, suffix in ((OUT, OUT_SUFFIX), (ERR, ERR_SUFFIX)):
            read = self._pipe(rank, ends)
            stream = _Stream(
                number,
                read,
                None if worker.hidden else self._shaper(number, prefix, rank),
                self._file(rank, local_rank, generation, suffix),
                finder=TracebackFinder() if number == ERR else None,
            )
            worker.streams.append(stream)
            self._by_fd[read] = stream
        self._workers[rank] = worker
        return ends[0], ends[1]

    def filenos(self) -> Iterable[int]:
        """
        The read ends to watch now: none of a stream that is held back; and the wake-up that ends
        the holding.
        """
        held = (
            {OUT, ERR}
            if self._files.held()
            else {number for number in (OUT, ERR) if self.console.held(number)}
        )
        fds = [
            fd
            for fd, stream in self._by_fd.items()
            if stream.number not in held or self._idle_terminal(stream)
        ]
        return [*fds, self._bell.fd] if self._bell.fd >= 0 else fds

    def read(self, fd: int) -> None:
        """
        Take what a readable pipe holds, at most one buffer, and pass it on; forget a pipe that has
        ended.
        """
        if fd == self._bell.fd:
            self._bell.hush()
            return
        stream = self._by_fd.get(fd)
        if stream is not None and not self._take(stream):
            self._end(stream)

    def drain(self, rank: int, timeout: float) -> None:
        """
        A worker has ended: take what is left in its pipes (until EOF or ``timeout``), write out a
        last half line.
        """
        worker = self._workers.get(rank)
        left = [stream for stream in worker.streams if stream.fd in self._by_fd] if worker else []
        deadline = time.monotonic() + timeout
        poll = select.poll()
        for stream in left:
            poll.register(stream.fd, select.POLLIN)
        while left:
            ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            for stream in [stream for stream in left if stream.fd in ready]:
                if not self._take(stream):
                    poll.unregister(stream.fd)
                    left.remove(stream)
                    self._end(stream)
            if not ready or time.monotonic() >= deadline:
                break
        for stream in left:
            self._end(stream)

    def tail(self, rank: int) -> tuple[str, ...]:
        """
        The last lines of a worker, stderr after stdout: at most 20, each at most 500 characters.
        """
        worker = self._workers.get(rank)
        if worker is None:
            return ()
        out, err = (
            last_lines(
                stream.recent, TAIL_LINES, TAIL_CHARACTERS, cut=len(stream.recent) >= _TAIL_BYTES
            )
            for stream in worker.streams
        )
        err = err[-(TAIL_LINES - min(len(out), _OUT_SHARE)) :]
        out = out[-(TAIL_LINES - len(err)) :] if len(err) < TAIL_LINES else []
        return tuple(out + err)

    def recent(self, rank: int) -> str:
        """
        The last 16 KiB that a worker printed on stderr: an abort's reason may stand above a long
        stack.
        """
        worker = self._workers.get(rank)
        return worker.streams[1].recent.decode("utf-8", "replace") if worker else ""

    def traceback(self, rank: int) -> tuple[float, str] | None:
        """The last Python traceback on a worker's stderr, when it was as good as its last word."""
        found = self.found(rank)
        return (found.at, found.text) if found and found.last_word else None

    def survived(self, rank: int) -> bool:
        """
        Whether a worker's output tells that it went on after the traceback that is its last word on
        stderr.
        """
        worker = self._workers.get(rank)
        found = self.found(rank)
        if worker is None or found is None:
            return False
        return found.survived or worker.streams[0].heard_at > found.at + PAUSE

    def heard_at(self, rank: int) -> float:
        """Monotonic seconds at which something that a worker printed was last read; 0: never."""
        worker = self._workers.get(rank)
        if worker:
            return max((stream.heard_at for stream in worker.streams), default=0.0)
        return 0.0

    def found(self, rank: int) -> Found | None:
        """
        The last traceback of a worker with all that is known of it, also when much was printed
        after it.
        """
        worker = self._workers.get(rank)
        finder = worker.streams[1].finder if worker else None
        return finder.found if finder else None

    def log_path(self, rank: int) -> str:
        """
        Path of the worker's log that tells why it ended, or the empty string when no files are
        written.

        The error log, unless the evidence is what it printed on stdout; ``rank_3.{out,err}`` when
        it may be in either.
        """
        path = self._paths.get(rank, "")
        worker = self._workers.get(rank)
        out, err = (
            (bool(stream.recent.strip()) for stream in worker.streams) if worker else (False, True)
        )
        if not path or not out or self.traceback(rank):
            return path
        return path.removesuffix(ERR_SUFFIX) + (
            f".{{{OUT_SUFFIX[1:]},{ERR_SUFFIX[1:]}}}" if err else OUT_SUFFIX
        )

    def reveal(self, rank: int) -> None:
        """A worker failed: show the last lines of one that --show-ranks hides; once."""
        worker = self._workers.get(rank)
        if worker is None or not worker.hidden or worker.revealed:
            return
        worker.revealed = True
        lines = self.tail(rank)
        path = self.log_path(rank)
        source = f"its log is {path}" if path else "no log is written"
        last = {0: "printed nothing", 1: "its last line"}.get(
            len(lines), f"its last {len(lines)} lines"
        )
        self.say(
            f"pdrun: rank {rank} failed; {last} (hidden by --show-ranks; {source}){':' * bool(lines)}"
        )
        for line in lines:
            self.say(f"{worker.prefix or rank}| {line}")

    def say(self, text: str) -> None:
        """
        Print a line of pdrun's own on the terminal (stderr), in order with the workers' lines.
        """
        self.console.say(text)

    def close(self, timeout: float = 2.0) -> tuple[str, ...]:
        """
        Flush files and terminal; return one line for each thing that was dropped.

        ``timeout`` bounds the time without progress, not the whole: what is slow is waited for,
        what hangs is not.
        """
        for stream in list(self._by_fd.values()):
            self._end(stream)
        lost = self._files.close(timeout)
        for line in lost:
            self.say(f"pdrun: {line}")
        lost += self.console.close(timeout)
        self._bell.close()
        return lost

    def _pipe(self, rank: int, ends: list[int]) -> int:
        """
        Return the read end of a new pipe and add its write end to ``ends``; should that fail, close
        those.
        """
        try:
            read, write = worker_pipe()
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

    def _prefix(self, rank: int) -> str:
        if self._settings.prefix == "none" or (
            self._settings.prefix == "auto" and self._world_size == 1
        ):
            return ""
        if self._settings.prefix == "rank":
            return str(rank)
        return f"{self._places['node']}:{rank}"

    def _shaper(self, number: int, prefix: str, rank: int) -> Shaper:
        tty = self.console.tty(number)
        if self._world_size == 1 and not prefix:
            return StraightShaper(tty=tty)
        return PrefixShaper(prefix, tty=tty, colour=rank if self.console.colour(number) else None)

    def _file(self, rank: int, local_rank: int, generation: int, suffix: str) -> LogFile | None:
        if not self._settings.files:
            return None
        stem = file_stem(self._template, rank=rank, local_rank=local_rank, **self._places)
        path = self.root / self._run / str(generation) / (stem + suffix)
        if suffix == ERR_SUFFIX:
            self._paths[rank] = str(path)
        return self._files.open(
            path, f"rank {rank}'s {'output' if suffix == OUT_SUFFIX else 'errors'}"
        )

    def _idle_terminal(self, stream: _Stream) -> bool:
        """A hidden rank does not wait for the terminal."""
        return stream.shaper is None and not self._files.held()

    def _take(self, stream: _Stream) -> bool:
        """Read one buffer; False at the end of the stream."""
        try:
            data = os.read(stream.fd, READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        now = stream.heard_at = time.monotonic()
        if stream.file:
            self._files.write(stream.file, data)
        if stream.finder:
            stream.finder.feed(data, now)
        stream.recent = (
            data[-_TAIL_BYTES:]
            if len(data) >= _TAIL_BYTES
            else (stream.recent + data)[-_TAIL_BYTES:]
        )
        if stream.shaper:
            self.console.write(stream.number, stream.shaper.feed(data, now))
        return True

    def _end(self, stream: _Stream) -> None:
        if self._by_fd.pop(stream.fd, None) is None:
            return
        os.close(stream.fd)
        if stream.finder:
            stream.finder.finish()
        if stream.shaper:
            self.console.write(stream.number, stream.shaper.finish())
        if stream.file:
            self._files.done(stream.file)

    def _forget(self, rank: int) -> None:
        """The rank's worker of an earlier generation."""
        worker = self._workers.pop(rank, None)
        for stream in worker.streams if worker else ():
            self._end(stream)
