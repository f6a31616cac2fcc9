"""Reads the log files of a job, once or as they grow, through restarts; each line has a prefix."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from pdrun.disk import list_parts
from pdrun.errors import UsageError
from pdrun.launcher.common.rank_lists import RankSet, format_ranks
from pdrun.launcher.jobs.registry import JobRecord
from pdrun.launcher.output.console import STDERR, STDOUT, Console
from pdrun.launcher.output.formatting import PrefixFormatter
from pdrun.launcher.output.log_names import ERR_SUFFIX, OUT_SUFFIX, rank_pattern
from pdrun.text import escape_text
from pdrun.ui.job_status import JobStatus

POLL_SECONDS = 0.2
"""Time between two reads of growing files."""
_BUFFER_BYTES = 1 << 18


@dataclass
class LogSource:
    """One log file and its format on the terminal."""

    path: Path
    file: BinaryIO
    stream: int
    formatter: PrefixFormatter
    offset: int = 0
    is_after_hole: bool = False
    """Zero bytes that come next are the rest of a hole."""
    hole_bytes: int = 0
    has_named_hole: bool = False
    is_in_line: bool = False
    """The last byte that was read did not end a line."""

    def read_new(self) -> Iterator[bytes]:
        """Yield what is new, without holes. A file that was cut is read again from its start."""
        fd = self.file.fileno()
        end = os.fstat(fd).st_size
        if end < self.offset:
            self.offset = 0
            self.is_after_hole = False
        for start, stop in list_parts(fd, self.offset, end):
            yield from self._pass_hole(start)
            while start < stop and (data := os.pread(fd, min(_BUFFER_BYTES, stop - start), start)):
                start += len(data)
                self.offset = start
                if self.is_after_hole:
                    data = data.lstrip(b"\0")
                if start == stop < end:
                    data = data.rstrip(b"\0")
                if data:
                    self.is_after_hole = False
                    self.is_in_line = data[-1:] not in b"\r\n"
                    yield data
        yield from self._pass_hole(end)

    def _pass_hole(self, end: int) -> Iterator[bytes]:
        """Go on at the end of a hole, if there is one; a line ends where it begins."""
        if end > self.offset:
            if self.is_in_line:
                yield b"\n"
            self.is_in_line = False
            self.is_after_hole = True
            self.hole_bytes += end - self.offset
            self.offset = end


class LogReader:
    """Shows the logs of one job: call `show_new` until it returns False."""

    def __init__(
        self,
        job: JobRecord,
        read_status: Callable[[], JobStatus],
        console: Console,
        *,
        ranks: str,
        lines: int | None,
        stdout: bool,
        stderr: bool,
        generation: int | Literal["all"] | None = None,
    ) -> None:
        """Find the log folder; arguments and errors as in `pdrun.launcher.jobs.logs.print_logs`."""
        self._job = job
        self._read_status = read_status
        self._console = console
        self._ranks = RankSet(ranks, where="--ranks")
        self._shows_all_ranks = ranks == "all"
        self._max_lines = lines
        self._suffixes: dict[str, int] = {}
        if stdout:
            self._suffixes[OUT_SUFFIX] = STDOUT
        if stderr:
            self._suffixes[ERR_SUFFIX] = STDERR
        self._name_pattern = rank_pattern(job.log_name)
        self._sources: dict[Path, LogSource] = {}
        self._seen_ranks: set[int] = set()
        self._other_files: set[Path] = set()
        """What is in the place of a log file, and was named."""
        self._wanted_generation = generation
        self._generation = -1
        with _log_errors(job):
            self._folder = _run_folder(job)
            if not self._folder.is_dir():
                raise UsageError(f"the logs of {job.job} are not here", where=str(self._folder))

    def show_new(self) -> bool:
        """
        Show new lines; return False when the job has ended and everything is shown.

        Raises:
            UsageError: the folder was removed, a file cannot be read, or there is no such rank or
                generation.
        """
        with _log_errors(self._job):
            return self._show_new_lines()

    def _show_new_lines(self) -> bool:
        status = self._read_status()
        is_running = status.state not in ("done", "dead")
        known = _list_generations(self._folder)
        is_first = self._generation < 0
        for generation in self._select_generations(known, is_running):
            self._switch_generation(generation, status)
        if self._generation >= 0:
            self._open_new_files(status)
            self._check_ranks(status)
        if is_first and self._generation >= 0:
            self._max_lines = None  # files that appear from now on are shown in full
        for source in self._sources.values():
            self._copy_source(source)
        if not is_running:
            self._close_sources()
        return is_running

    def wait_for_more(self) -> None:
        """Wait for new lines, and for a slow reader of the terminal."""
        time.sleep(POLL_SECONDS)
        while self._console.is_behind(STDOUT) or self._console.is_behind(STDERR):
            time.sleep(POLL_SECONDS)

    def _select_generations(self, known: list[int], is_running: bool) -> list[int]:
        """
        Return the generations to show next, in order.

        If only the last one is shown, a note names the number of generations.
        """
        newer = [number for number in known if number > self._generation]
        wanted = self._wanted_generation
        if wanted == "all":
            return newer
        if wanted is not None:
            if wanted not in known and not is_running:
                numbers = ", ".join(map(str, known)) or "none"
                raise UsageError(
                    f"run {self._job.run} has no generation {wanted}",
                    where="--generation",
                    hint=f"known: {numbers}",
                )
            return [number for number in newer if number == wanted]
        if self._generation < 0 and len(known) > 1:
            self._console.print_line(
                f"pdrun: generation {known[-1]}, the last of {len(known)};"
                " --generation all shows all"
            )
        return newer[-1:]

    def _switch_generation(self, generation: int, status: JobStatus) -> None:
        """Finish a generation, which has ended, and go on with the next."""
        if self._generation >= 0:
            self._open_new_files(status)
        for source in self._sources.values():
            self._copy_source(source)
        self._close_sources()
        self._generation = generation

    def _check_ranks(self, status: JobStatus) -> None:
        """Refuse unknown ranks as soon as the ranks of the job are known."""
        if self._shows_all_ranks or not status.ranks:
            return
        known = {*status.ranks, *self._seen_ranks}
        if unknown := self._ranks.unmatched_parts(known):
            raise UsageError(
                f"run {self._job.run} has no rank {unknown}",
                where="--ranks",
                hint=f"there are {format_ranks(tuple(known))}",
            )

    def _open_new_files(self, status: JobStatus) -> None:
        """Open the new files of the generation."""
        for path, rank, stream in self._wanted_files(self._folder / str(self._generation)):
            if path not in self._sources:
                self._sources[path] = self._open_source(path, rank, stream, status)

    def _wanted_files(self, folder: Path) -> list[tuple[Path, int | None, int]]:
        """Return the wanted files of a generation in rank order: path, rank if named, stream."""
        found: list[tuple[Path, int | None, int]] = []
        for path in folder.rglob("*"):
            match = self._name_pattern.fullmatch(str(path.relative_to(folder).with_suffix("")))
            if path.suffix not in self._suffixes or match is None:
                continue
            if not path.is_file():  # a pipe would block, and a device may never end
                self._note_other_file(path)
                continue
            rank = None
            if "rank" in match.groupdict():
                rank = int(match["rank"])
                self._seen_ranks.add(rank)
            if self._shows_all_ranks or (rank is not None and rank in self._ranks):
                found.append((path, rank, self._suffixes[path.suffix]))
        found.sort(key=lambda item: (item[1] is None, item[1] or 0, item[2], str(item[0])))
        return found

    def _note_other_file(self, path: Path) -> None:
        if path not in self._other_files:
            self._other_files.add(path)
            text = escape_text(str(path))
            self._console.print_line(f"pdrun: {text}: not a regular file, so it is not shown")

    def _open_source(
        self, path: Path, rank: int | None, stream: int, status: JobStatus
    ) -> LogSource:
        prefix = path.stem
        if rank is not None:
            known = status.ranks.get(rank)
            prefix = f"{known.node}:{rank}" if known else str(rank)
        colour = (rank or 0) if self._console.has_colour(stream) else None
        file = path.open("rb")
        offset = 0
        if self._max_lines is not None:
            offset = find_last_lines(file.fileno(), self._max_lines)
        formatter = PrefixFormatter(prefix, tty=self._console.is_terminal(stream), colour=colour)
        return LogSource(path, file, stream, formatter, offset)

    def _copy_source(self, source: LogSource) -> None:
        for data in source.read_new():
            self._console.write(source.stream, source.formatter.feed(data, time.monotonic()))
            while self._console.is_behind(source.stream):
                time.sleep(0.01)
        if source.hole_bytes and not source.has_named_hole:
            source.has_named_hole = True
            self._console.print_line(
                f"pdrun: {escape_text(str(source.path))}: holes are not shown:"
                f" {source.hole_bytes} bytes were never written (was the file cut, or the disk"
                " full?)"
            )

    def _close_sources(self) -> None:
        for source in self._sources.values():
            self._console.write(source.stream, source.formatter.finish())
            source.file.close()
        self._sources = {}


@contextmanager
def _log_errors(job: JobRecord) -> Iterator[None]:
    """Turn an OSError into a UsageError about the logs: the user may have removed the folder."""
    try:
        yield
    except OSError as error:
        where = str(error.filename or job.log_dir)
        raise UsageError(
            f"the logs of {job.job} cannot be read: {error.strerror}", where=where
        ) from error


def find_last_lines(fd: int, count: int) -> int:
    """
    Return where the last ``count`` lines of a file begin; a partial last line counts.

    Holes are skipped. A line ends where a hole begins.
    """
    end = os.fstat(fd).st_size
    if count <= 0:
        return end
    parts = list(list_parts(fd, 0, end))
    left = count
    for start, stop in reversed(parts):
        at = stop
        while at > start:
            begin = max(start, at - _BUFFER_BYTES)
            block = os.pread(fd, at - begin, begin)
            search = len(block)
            if at == stop:
                text = block.rstrip(b"\0") if stop < end else block
                search = len(text) - text.endswith(b"\n")
            while left and (search := block.rfind(b"\n", 0, search)) >= 0:
                left -= 1
            if not left:
                return begin + search + 1
            at = begin
        left -= start > 0  # the first line after a hole
        if not left:
            block = os.pread(fd, min(_BUFFER_BYTES, stop - start), start)
            return start + len(block) - len(block.lstrip(b"\0"))
    return parts[0][0] if parts else end


def _run_folder(job: JobRecord) -> Path:
    """Return the folder of a run's logs, whether the record names it or its parent."""
    inside = Path(job.log_dir) / job.run
    return Path(job.events).parent if job.events and not inside.is_dir() else inside


def _list_generations(folder: Path) -> list[int]:
    return sorted(
        int(path.name) for path in folder.iterdir() if path.name.isascii() and path.name.isdigit()
    )
