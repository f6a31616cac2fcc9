"""
Tries mutants on copies of the source: the guarding test passes without the edit and fails with it.

A test that fails without an edit, or is skipped here, proves nothing (`NO PROOF`). A run of tests
that does not end in time counts as noticed: an edit may make the code wait for ever.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.model import Mutant
from tests.mutants.pytest_forks import PytestForks

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("backends", "launcher", "parallel", "rendezvous", "templates", "ui")
"""Installed as parts of the package pdrun."""
OTHER_FOLDERS = ("tests", "examples", "scripts")
MUTANT_SECONDS = 240.0
"""Most time for the test of one mutant, on a machine that others use as well."""
LEAST_SECONDS = 60.0
"""Time for it, besides ten times what it takes without the edit."""
SOUND_SECONDS = 60.0
"""Time for each test without an edit."""
NOTICED = "noticed"
UNNOTICED = "UNNOTICED"
NO_PROOF = "NO PROOF"
_RESULT_LINE = re.compile(r"^(PASSED|FAILED|ERROR) (\S+::\w+)(\[.*?\])?(?= - |$)", re.MULTILINE)
_DURATION_LINE = re.compile(
    r"^([\d.]+)s (?:setup|call|teardown) +(\S+::\w+)(\[.*?\])?$", re.MULTILINE
)
Show = Callable[[str], object]


class SourceCopy:
    """A copy of the source as it is installed, with the tests beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "pdrun", folder / "pdrun", ignore=ignore)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, folder / "pdrun" / name, ignore=ignore)
            (folder / name).symlink_to(Path("pdrun") / name)
        for name in OTHER_FOLDERS:
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        shutil.copy(ROOT / "pyproject.toml", folder)
        self._forks: PytestForks | None = None

    @contextlib.contextmanager
    def edited(self, mutant: Mutant) -> Iterator[None]:
        """
        Inside, the copy has the mutant's edit.

        The file's bytecode is put aside meanwhile: an edit within a second that changes no size
        would not be noticed.
        """
        path = self.folder / mutant.file
        text, times = path.read_text(), path.stat()
        if text.count(mutant.old) != 1:
            raise SystemExit(
                f"{mutant.file}: the text of '{mutant.hazard}' must stand there once, "
                f"found {text.count(mutant.old)} times; correct it in tests/mutants/tables"
            )
        kept = [(code, code.with_suffix(".kept")) for code in find_bytecode(path)]
        for code, aside in kept:
            code.rename(aside)
        path.write_text(text.replace(mutant.old, mutant.new))
        try:
            yield
        finally:
            path.write_text(text)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            for code, aside in kept:
                aside.rename(code)

    def run_tests(
        self, tests: Sequence[str], seconds: float, *options: str, **env: str
    ) -> tuple[int, str]:
        """
        Run tests in the copy; return the exit code of pytest, -1 if they did not end in time, and
        its output.
        """
        arguments = ["-q", "-n", "0", "-p", "no:cacheprovider"]
        arguments += ["--basetemp", str(self.folder / "t"), *options, *tests]
        if self._forks is None:
            kept = {
                name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
            }
            self._forks = PytestForks(self.folder, kept | {"PYTHONPATH": str(self.folder)})
        found = self._forks.run(arguments, seconds, env)
        self._kill_leftovers()
        return found

    def close(self) -> None:
        """End the process that runs the tests."""
        if self._forks is not None:
            self._forks.close()

    def find_sound(self, tests: Sequence[str]) -> dict[str, float]:
        """
        Return those of the tests that pass, every case of them, and how long each took.

        This also leaves the bytecode of everything for later runs.
        """
        wanted = sorted(set(tests))
        if not wanted:
            return {}
        limit = MUTANT_SECONDS + SOUND_SECONDS * len(wanted)
        options = ("-rpfE", "--tb=short", "--durations=0", "--durations-min=0")
        code, output = self.run_tests(wanted, limit, *options)
        if code not in (0, 1):
            why = f"they did not end within {limit:.0f} s" if code == -1 else f"pytest: {code}"
            raise SystemExit(f"the tests could not be run without an edit ({why}):\n{output}")
        results: dict[str, set[str]] = {}
        for result, name, case in _RESULT_LINE.findall(output):
            for key in {name, name + case}:
                results.setdefault(key, set()).add(result)
        seconds: dict[str, float] = {}
        for took, name, case in _DURATION_LINE.findall(output):
            for key in {name, name + case}:
                seconds[key] = seconds.get(key, 0.0) + float(took)
        return {test: seconds.get(test, 0.0) for test in wanted if results.get(test) == {"PASSED"}}

    def is_noticed(self, mutant: Mutant, sound_seconds: float) -> bool:
        """
        Whether the mutant's test fails with the edit.

        Args:
            sound_seconds: how long the test takes without the edit.
        """
        limit = min(MUTANT_SECONDS, LEAST_SECONDS + 10 * sound_seconds)
        with self.edited(mutant):
            options = ("-x", f"--timeout={limit / 2:.0f}")
            code, output = self.run_tests(
                [mutant.test], limit, *options, PYTHONDONTWRITEBYTECODE="1"
            )
        if code not in (-1, 0, 1):
            raise SystemExit(f"{mutant.test} could not be run:\n{output}")
        return code != 0

    def _kill_leftovers(self) -> None:
        """Kill what a mutant has left running: processes with the copy's folder in their paths."""
        marker = f"PYTHONPATH={self.folder}\0".encode()
        kept = (os.getpid(), self._forks.pid if self._forks is not None else 0)
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) in kept:
                continue
            with contextlib.suppress(OSError):
                if marker in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)


def find_bytecode(source: Path) -> list[Path]:
    """Return the files with the bytecode of a file."""
    return list((source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"))


def select_mutants(
    mutants: Sequence[tuple[str, Mutant]], words: Sequence[str]
) -> list[tuple[str, Mutant]]:
    """Return the mutants with one of the words in room, hazard or file; all if there is no word."""
    return [
        (room, mutant)
        for room, mutant in mutants
        if not words or any(word in f"{room}: {mutant.hazard} {mutant.file}" for word in words)
    ]


def try_mutants(
    chosen: Sequence[tuple[str, Mutant]], jobs: int = 1, show: Show = lambda line: None
) -> list[str]:
    """
    Try mutants, ``jobs`` at a time; return a line for each that no test noticed.

    Args:
        show: called with a line for each mutant.
    """
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as folder:
        jobs = max(1, min(jobs, len(chosen)))
        copies = [SourceCopy(Path(folder) / str(number)) for number in range(jobs)]
        free: queue.SimpleQueue[SourceCopy] = queue.SimpleQueue()
        for copy in copies:
            free.put(copy)
        tests = sorted({mutant.test for _, mutant in chosen})
        parts = [tests[number::jobs] for number in range(jobs)]

        def try_one(entry: tuple[str, Mutant]) -> str:
            room, mutant = entry
            if mutant.test not in sound:
                found = NO_PROOF
            else:
                copy = free.get()
                try:
                    is_noticed = copy.is_noticed(mutant, sound[mutant.test])
                    found = NOTICED if is_noticed else UNNOTICED
                finally:
                    free.put(copy)
            line = f"{found:<10} {room}: {mutant.hazard}"
            show(line)
            return line

        with ThreadPoolExecutor(jobs) as pool:
            sound = dict(
                entry
                for part in pool.map(SourceCopy.find_sound, copies, parts)
                for entry in part.items()
            )
            lines = list(pool.map(try_one, chosen))
        for copy in copies:
            copy.close()
    return [line for line in lines if not line.startswith(NOTICED)]
