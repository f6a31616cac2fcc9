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
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.model import Mutant

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("backends", "launcher", "parallel", "rendezvous", "templates", "ui")
"""Installed as parts of the package pdrun."""
OTHER_FOLDERS = ("tests", "examples", "scripts")
MUTANT_SECONDS = 240.0
"""Time for the test of one mutant, on a machine that others use as well."""
SOUND_SECONDS = 60.0
"""Time for each test without an edit."""
NOTICED = "noticed"
UNNOTICED = "UNNOTICED"
NO_PROOF = "NO PROOF"
_RESULT_LINE = re.compile(r"^(PASSED|FAILED|ERROR) (\S+::\w+)(\[.*?\])?(?= - |$)", re.MULTILINE)
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

    @contextlib.contextmanager
    def edited(self, mutant: Mutant) -> Iterator[None]:
        """Inside, the copy has the mutant's edit."""
        path = self.folder / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            raise SystemExit(
                f"{mutant.file}: the text of '{mutant.hazard}' must stand there once, "
                f"found {text.count(mutant.old)} times; correct it in tests/mutants/tables"
            )
        path.write_text(text.replace(mutant.old, mutant.new))
        try:
            yield
        finally:
            path.write_text(text)

    def run_tests(self, tests: Sequence[str], seconds: float, *options: str) -> tuple[int, str]:
        """
        Run tests in the copy; return the exit code of pytest, -1 if they did not end in time, and
        its output.
        """
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
        command += ["--basetemp", str(self.folder / "t"), *options, *tests]
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        env |= {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            code = -1
        self._kill_leftovers()
        return code, output

    def find_sound(self, tests: Sequence[str]) -> set[str]:
        """Return those of the tests that pass, every case of them."""
        wanted = sorted(set(tests))
        if not wanted:
            return set()
        seconds = MUTANT_SECONDS + SOUND_SECONDS * len(wanted)
        code, output = self.run_tests(wanted, seconds, "-rpfE", "--tb=short")
        if code not in (0, 1):
            raise SystemExit(f"the tests could not be run without an edit:\n{output}")
        results: dict[str, set[str]] = {}
        for result, name, case in _RESULT_LINE.findall(output):
            for key in {name, name + case}:
                results.setdefault(key, set()).add(result)
        return {test for test in wanted if results.get(test) == {"PASSED"}}

    def is_noticed(self, mutant: Mutant) -> bool:
        """Whether the mutant's test fails with the edit."""
        with self.edited(mutant):
            code, output = self.run_tests([mutant.test], MUTANT_SECONDS, "-x", "--timeout=120")
        if code not in (-1, 0, 1):
            raise SystemExit(f"{mutant.test} could not be run:\n{output}")
        return code != 0

    def _kill_leftovers(self) -> None:
        """Kill what a mutant has left running: processes with the copy's folder in their paths."""
        marker = f"PYTHONPATH={self.folder}\0".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                if marker in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)


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
                    found = NOTICED if copy.is_noticed(mutant) else UNNOTICED
                finally:
                    free.put(copy)
            line = f"{found:<10} {room}: {mutant.hazard}"
            show(line)
            return line

        with ThreadPoolExecutor(jobs) as pool:
            sound = set().union(*pool.map(SourceCopy.find_sound, copies, parts))
            lines = list(pool.map(try_one, chosen))
    return [line for line in lines if not line.startswith(NOTICED)]
