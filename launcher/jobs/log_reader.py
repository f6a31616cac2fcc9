"""
Reads the log files of a job, once or as they grow: each rank's lines behind its prefix, through
restarts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from pdrun.errors import UsageError
from pdrun.eventlog import JobStatus
from pdrun.launcher.common.rank_lists import format_ranks
from pdrun.launcher.common.rank_lists import RankSet
from pdrun.launcher.jobs.registry import JobRecord
from pdrun.launcher.output.console import STDERR, STDOUT, Console
from pdrun.launcher.output.formatting import PrefixFormatter
from pdrun.launcher.output.log_names import ERR_SUFFIX, OUT_SUFFIX, rank_pattern

POLL_SECONDS = 0.2
"""Seconds between two looks at files that grow."""
_BUFFER_BYTES = 1 << 18


@dataclass
class LogSource:
    """One log file and how it is shown."""

    file: BinaryIO
    stream: int
    formatter: PrefixFormatter


class LogReader:
    """Shows the logs of one job. `step` until it says that nothing more will come."""

    def __init__(
        self,
        job: JobRecord,
        read_status: Callable[[JobRecord], JobStatus],
        console: Console,
        *,
        ranks: str,
        lines: int | None,
        stdout: bool,
        stderr: bool,
        generation: int | Literal["all"] | None = None,
    ) -> None:
        """
        Find the files; arguments as in `pdrun.launcher.jobs.control.logs`, which also names the
        errors.
        """
        self._job = job
        self._read_status = read_status
        self._console = console
        self._ranks = RankSet(ranks, where="--ranks")
        self._shows_all_ranks = ranks == "all"
        self._max_lines = lines
        self._suffixes = {
            suffix: number
            for suffix, number, wanted in (
                (OUT_SUFFIX, STDOUT, stdout),
                (ERR_SUFFIX, STDERR, stderr),
            )
            if wanted
        }
        self._name_pattern = rank_pattern(job.log_name)
        self._sources: dict[Path, LogSource] = {}
        self._seen_ranks: set[int] = set()
        self._wanted_generation = generation
        self._generation = -1
        with _log_errors(job):
            self._folder = _run_folder(job)
            if not self._folder.is_dir():
                raise UsageError(f"the logs of {job.job} are not here", where=str(self._folder))

    def show_new(self) -> bool:
        """
        Show what is new; False when the job has ended and everything is shown.

        Raises:
            UsageError: the folder has gone, or holds a file that cannot be read; or no such rank or
                generation.
        """
        with _log_errors(self._job):
            return self._show_new_lines()

    def _show_new_lines(self) -> bool:
        status = self._read_status(self._job)
        running = status.state not in ("done", "dead")
        there = _list_generations(self._folder)
        first = self._generation < 0
        for generation in self._select_generations(there, running):
            self._switch_generation(generation, status)
        if self._generation >= 0:
            self._open_new_files(status)
            self._check_ranks(status)
        if first and self._generation >= 0:
            self._max_lines = None  # what comes from now on is new as a whole
        for source in self._sources.values():
            self._copy_source(source)
        if not running:
            self._close_sources()
        return running

    def wait_for_more(self) -> None:
        """Wait until it is worth looking again; longer while the terminal's reader is behind."""
        time.sleep(POLL_SECONDS)
        while self._console.is_behind(STDOUT) or self._console.is_behind(STDERR):
            time.sleep(POLL_SECONDS)

    def _select_generations(self, there: list[int], running: bool) -> list[int]:
        """
        Return the generations to go on with, in order; says so when the wanted one hides others.
        """
        newer = [number for number in there if number > self._generation]
        if self._wanted_generation == "all":
            return newer
        if self._wanted_generation is not None:
            if self._wanted_generation not in there and not running:
                raise UsageError(
                    f"{self._wanted_generation} is no generation of run {self._job.run}",
                    where="--generation",
                    hint=f"there {'are' if len(there) > 1 else 'is'} {', '.join(map(str, there)) or 'none'}",
                )
            return [number for number in newer if number == self._wanted_generation]
        if self._generation < 0 and len(there) > 1:
            self._console.print_line(
                f"pdrun: generation {there[-1]}, the last of {len(there)}; --generation all shows all"
            )
        return newer[-1:]

    def _switch_generation(self, generation: int, status: JobStatus) -> None:
        """Leave a generation, which has ended, for the next."""
        if self._generation >= 0:
            self._open_new_files(status)
        for source in self._sources.values():
            self._copy_source(source)
        self._close_sources()
        self._generation = generation

    def _check_ranks(self, status: JobStatus) -> None:
        """Refuse ranks that the job does not have, once it is known which ones it has."""
        if self._shows_all_ranks or not status.ranks:
            return
        known = {*status.ranks, *self._seen_ranks}
        if none := self._ranks.unmatched_parts(known):
            raise UsageError(
                f"run {self._job.run} has no rank {none}",
                where="--ranks",
                hint=f"there are {format_ranks(tuple(known))}",
            )

    def _open_new_files(self, status: JobStatus) -> None:
        """Open files of the generation that have appeared."""
        for path, rank, stream in self._wanted_files(self._folder / str(self._generation)):
            if path not in self._sources:
                self._sources[path] = self._open_source(path, rank, stream, status)

    def _wanted_files(self, folder: Path) -> Iterator[tuple[Path, int | None, int]]:
        """
        Yield the wanted files of a generation with rank (None: the name does not tell) and stream,
        in rank order.
        """
        found = []
        for path in folder.rglob("*"):
            match = self._name_pattern.fullmatch(str(path.relative_to(folder).with_suffix("")))
            if path.suffix not in self._suffixes or not path.is_file() or match is None:
                continue
            rank = int(match["rank"]) if "rank" in match.groupdict() else None
            self._seen_ranks |= {rank} if rank is not None else set()
            if self._shows_all_ranks or (rank is not None and rank in self._ranks):
                found.append((path, rank, self._suffixes[path.suffix]))
        return iter(
            sorted(found, key=lambda item: (item[1] is None, item[1] or 0, item[2], str(item[0])))
        )

    def _open_source(
        self, path: Path, rank: int | None, stream: int, status: JobStatus
    ) -> LogSource:
        known = status.ranks.get(rank) if rank is not None else None
        prefix = path.stem if rank is None else f"{known.node}:{rank}" if known else str(rank)
        colour = (rank or 0) if self._console.has_colour(stream) else None
        file = path.open("rb")
        if self._max_lines is not None:
            seek_last_lines(file, self._max_lines)
        return LogSource(
            file,
            stream,
            PrefixFormatter(prefix, tty=self._console.is_terminal(stream), colour=colour),
        )

    def _copy_source(self, source: LogSource) -> None:
        while data := source.file.read(_BUFFER_BYTES):
            self._console.write(source.stream, source.formatter.feed(data, time.monotonic()))
            while self._console.is_behind(source.stream):
                time.sleep(0.01)

    def _close_sources(self) -> None:
        for source in self._sources.values():
            self._console.write(source.stream, source.formatter.finish())
            source.file.close()
        self._sources = {}


@contextmanager
def _log_errors(job: JobRecord) -> Iterator[None]:
    """
    Say of what the system refuses here that it is the logs: their folder belongs to the user, who
    may clean up.
    """
    try:
        yield
    except OSError as error:
        where = str(error.filename or job.log_dir)
        raise UsageError(
            f"the logs of {job.job} cannot be read: {error.strerror}", where=where
        ) from error


def seek_last_lines(file: BinaryIO, count: int) -> None:
    """Move to where the last ``count`` lines of a file begin; a last half line counts as one."""
    at = end = file.seek(0, 2)
    if count <= 0:
        return
    left = count
    while at > 0:
        start = max(0, at - _BUFFER_BYTES)
        file.seek(start)
        block = file.read(at - start)
        search = len(block) - 1 if at == end and block.endswith(b"\n") else len(block)
        while left and (search := block.rfind(b"\n", 0, search)) >= 0:
            left -= 1
        if not left:
            file.seek(start + search + 1)
            return
        at = start
    file.seek(0)


def _run_folder(job: JobRecord) -> Path:
    """Return the folder of a run's logs, whether the entry names it or the root above it."""
    inside = Path(job.log_dir) / job.run
    return Path(job.events).parent if job.events and not inside.is_dir() else inside


def _list_generations(folder: Path) -> list[int]:
    return sorted(
        int(path.name) for path in folder.iterdir() if path.name.isascii() and path.name.isdigit()
    )
