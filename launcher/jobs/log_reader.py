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
from pdrun.launcher.common.parsers import rank_text
from pdrun.launcher.common.ranks import RankSet
from pdrun.launcher.jobs.registry import Job
from pdrun.launcher.output.console import ERR, OUT, Console
from pdrun.launcher.output.formatting import PrefixShaper
from pdrun.launcher.output.log_names import ERR_SUFFIX, OUT_SUFFIX, stem_pattern

PERIOD = 0.2
"""Seconds between two looks at files that grow."""
_BUFFER = 1 << 18


@dataclass
class _Source:
    """One log file and how it is shown."""

    file: BinaryIO
    stream: int
    shaper: PrefixShaper


class LogReader:
    """Shows the logs of one job. `step` until it says that nothing more will come."""

    def __init__(
        self,
        job: Job,
        read_status: Callable[[Job], JobStatus],
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
        self._all = ranks == "all"
        self._lines = lines
        self._suffixes = {
            suffix: number
            for suffix, number, wanted in ((OUT_SUFFIX, OUT, stdout), (ERR_SUFFIX, ERR, stderr))
            if wanted
        }
        self._pattern = stem_pattern(job.log_name)
        self._sources: dict[Path, _Source] = {}
        self._seen: set[int] = set()
        self._wanted = generation
        self._generation = -1
        with _reading(job):
            self._folder = _run_folder(job)
            if not self._folder.is_dir():
                raise UsageError(f"the logs of {job.job} are not here", where=str(self._folder))

    def step(self) -> bool:
        """
        Show what is new; False when the job has ended and everything is shown.

        Raises:
            UsageError: the folder has gone, or holds a file that cannot be read; or no such rank or
                generation.
        """
        with _reading(self._job):
            return self._step()

    def _step(self) -> bool:
        status = self._read_status(self._job)
        running = status.state not in ("done", "dead")
        there = _generations(self._folder)
        first = self._generation < 0
        for generation in self._next(there, running):
            self._turn(generation, status)
        if self._generation >= 0:
            self._open_new(status)
            self._check_ranks(status)
        if first and self._generation >= 0:
            self._lines = None  # what comes from now on is new as a whole
        for source in self._sources.values():
            self._copy(source)
        if not running:
            self._close()
        return running

    def pause(self) -> None:
        """Wait until it is worth looking again; longer while the terminal's reader is behind."""
        time.sleep(PERIOD)
        while self._console.held(OUT) or self._console.held(ERR):
            time.sleep(PERIOD)

    def _next(self, there: list[int], running: bool) -> list[int]:
        """
        Return the generations to go on with, in order; says so when the wanted one hides others.
        """
        newer = [number for number in there if number > self._generation]
        if self._wanted == "all":
            return newer
        if self._wanted is not None:
            if self._wanted not in there and not running:
                raise UsageError(
                    f"{self._wanted} is no generation of run {self._job.run}",
                    where="--generation",
                    hint=f"there {'are' if len(there) > 1 else 'is'} {', '.join(map(str, there)) or 'none'}",
                )
            return [number for number in newer if number == self._wanted]
        if self._generation < 0 and len(there) > 1:
            self._console.say(
                f"pdrun: generation {there[-1]}, the last of {len(there)}; --generation all shows all"
            )
        return newer[-1:]

    def _turn(self, generation: int, status: JobStatus) -> None:
        """Leave a generation, which has ended, for the next."""
        if self._generation >= 0:
            self._open_new(status)
        for source in self._sources.values():
            self._copy(source)
        self._close()
        self._generation = generation

    def _check_ranks(self, status: JobStatus) -> None:
        """Refuse ranks that the job does not have, once it is known which ones it has."""
        if self._all or not status.ranks:
            return
        known = {*status.ranks, *self._seen}
        if none := self._ranks.without(known):
            raise UsageError(
                f"run {self._job.run} has no rank {none}",
                where="--ranks",
                hint=f"there are {rank_text(tuple(known))}",
            )

    def _open_new(self, status: JobStatus) -> None:
        """Open files of the generation that have appeared."""
        for path, rank, stream in self._files(self._folder / str(self._generation)):
            if path not in self._sources:
                self._sources[path] = self._open(path, rank, stream, status)

    def _files(self, folder: Path) -> Iterator[tuple[Path, int | None, int]]:
        """
        Yield the wanted files of a generation with rank (None: the name does not tell) and stream,
        in rank order.
        """
        found = []
        for path in folder.rglob("*"):
            match = self._pattern.fullmatch(str(path.relative_to(folder).with_suffix("")))
            if path.suffix not in self._suffixes or not path.is_file() or match is None:
                continue
            rank = int(match["rank"]) if "rank" in match.groupdict() else None
            self._seen |= {rank} if rank is not None else set()
            if self._all or (rank is not None and rank in self._ranks):
                found.append((path, rank, self._suffixes[path.suffix]))
        return iter(
            sorted(found, key=lambda item: (item[1] is None, item[1] or 0, item[2], str(item[0])))
        )

    def _open(self, path: Path, rank: int | None, stream: int, status: JobStatus) -> _Source:
        known = status.ranks.get(rank) if rank is not None else None
        prefix = path.stem if rank is None else f"{known.node}:{rank}" if known else str(rank)
        colour = (rank or 0) if self._console.colour(stream) else None
        file = path.open("rb")
        if self._lines is not None:
            seek_last_lines(file, self._lines)
        return _Source(
            file, stream, PrefixShaper(prefix, tty=self._console.tty(stream), colour=colour)
        )

    def _copy(self, source: _Source) -> None:
        while data := source.file.read(_BUFFER):
            self._console.write(source.stream, source.shaper.feed(data, time.monotonic()))
            while self._console.held(source.stream):
                time.sleep(0.01)

    def _close(self) -> None:
        for source in self._sources.values():
            self._console.write(source.stream, source.shaper.finish())
            source.file.close()
        self._sources = {}


@contextmanager
def _reading(job: Job) -> Iterator[None]:
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
        start = max(0, at - _BUFFER)
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


def _run_folder(job: Job) -> Path:
    """Return the folder of a run's logs, whether the entry names it or the root above it."""
    inside = Path(job.log_dir) / job.run
    return Path(job.events).parent if job.events and not inside.is_dir() else inside


def _generations(folder: Path) -> list[int]:
    return sorted(
        int(path.name) for path in folder.iterdir() if path.name.isascii() and path.name.isdigit()
    )
