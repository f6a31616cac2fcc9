"""
Measure the rows of the fault matrix (docs/reliability.md): run the tests of each row, and print how
long after the fault pdrun did what the row says.

    python benchmarks/fault_matrix.py [--rows 1,3,19] [--limit 600] [--record FILE]

Rows, bounds and tests are read from the page. A test of the default run is preferred; where a row
has none, those of the thorough run are taken. Seconds are those between the last act of a test that
breaks something (an order to a worker, a signal, a cut link) and what it then waits for: exit
codes, workers of the next generation, an event of the log. Tests without such an act (units, the
simulator) have their result only. ``--record`` keeps the results of files of tests, and runs only
those that it does not have yet.

The tests on namespace hosts need root and skip elsewhere. SIGINT and SIGTERM end the tests that
run, and take their hosts away.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"
FIGURES_VARIABLE = "PYTEST_PDRUN_FIGURES"
"""File to which the plugin, this module, writes figures."""
TEARDOWN_SECONDS = 90.0
"""For tests that were interrupted: they take their hosts away."""
RESULTS = ("passed", "skipped", "failed")


@dataclass(frozen=True)
class MatrixRow:
    """One row of the page."""

    number: str
    fault: str
    bound: str
    tests: tuple[tuple[str, tuple[str, ...]], ...]
    """Files, and parts of the names of tests in them; no part: all of the file."""


def read_rows(page: str) -> Iterator[MatrixRow]:
    """Yield the rows of all tables whose head has a column for tests."""
    columns: list[str] = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if "fault" in cells:
            columns = cells
        elif columns and len(cells) == len(columns) and not set(cells[0]) <= set("-"):
            found = dict(zip(columns, cells, strict=True))
            tests = next(cell for name, cell in found.items() if name.startswith("test"))
            yield MatrixRow(
                found["#"], found["fault"], found.get("bound", ""), tuple(parse_tests(tests))
            )
        elif not cells:
            columns = []


def expand_numbers(text: str) -> set[str]:
    """Return the numbers of a list such as ``1,3`` or ``54 - 56, 60``."""
    found: set[str] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = (word.strip() for word in part.partition("-"))
        found |= {str(number) for number in range(int(first), int(last if dash else first) + 1)}
    return found


def parse_tests(cell: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """
    Yield files and parts of names of a cell such as ``chaos/test_names `late`; e2e/test_hang``.

    Files that are separated by a comma share the names after them.
    """
    for group in cell.split(";"):
        folder = ""
        found = []
        for part in re.split(r",\s*(?=[a-z0-9_/]+\b)", group.strip()):
            path = re.match(r"[a-z0-9_/]*", part)[0]  # type: ignore[index]
            path = path if "/" in path or not folder else f"{folder}/{path}"
            folder = path.rpartition("/")[0]
            names = tuple(text.strip(".") for text in re.findall(r"`([^`]+)`", part))
            found.append((path, names))
        for index, (path, names) in enumerate(found):
            for file in (ROOT / "tests" / f"{path}.py", ROOT / "tests" / path):
                if path and file.exists():
                    shared = next((own for _, own in found[index:] if own), ())
                    yield str(file.relative_to(ROOT)), names or shared
                    break


def run_file(path: str, names: set[str], limit: float) -> list[dict[str, Any]]:
    """Run tests of a file (no name: all); return what the plugin wrote about them."""
    found = run_tests(path, names, limit, is_thorough=False)
    missing = {name for name in names if not any(name in figure["test"] for figure in found)}
    if missing:
        found += run_tests(path, missing, limit, is_thorough=True)
    return found


def run_tests(
    path: str, names: set[str], limit: float, *, is_thorough: bool
) -> list[dict[str, Any]]:
    """Run tests in a process of pytest; return what the plugin wrote about them."""
    file = Path(tempfile.gettempdir(), f"fault-figures-{os.getpid()}.jsonl")
    file.unlink(missing_ok=True)
    words = ("-k", " or ".join(sorted(names))) if names else ()
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    env = {**os.environ, FIGURES_VARIABLE: str(file), "PYTHONPATH": str(Path(__file__).parent)}
    if is_thorough:
        env["PYTEST_PDRUN_THOROUGH"] = "1"
    # A session of its own: Ctrl-C reaches the tests once, from `stop_tests`.
    process = subprocess.Popen(
        [*command, "-p", "fault_matrix", path, *words],
        cwd=ROOT,
        env=env,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        print(f"{path}: not done in {limit:g} s", file=sys.stderr)
    finally:
        stop_tests(process)
        text = file.read_text() if file.exists() else ""
        file.unlink(missing_ok=True)
    return [json.loads(line) for line in text.splitlines()]


def stop_tests(process: subprocess.Popen[bytes]) -> None:
    """End tests that still run, so that they take their hosts away; remove those that are left."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(TEARDOWN_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # a guardian takes the hosts of tests/chaos away
        process.wait()
    remove_namespaces(process.pid)


def remove_namespaces(pid: int) -> None:
    """Remove the hosts of `tests/lib/netns_hosts.py` that a process of pytest left."""
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    for line in found.stdout.splitlines():
        name = line.partition(" ")[0]
        if not name.startswith(f"pdt{pid}-"):
            continue
        left = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
        )
        for one in left.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(one), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], check=False)


def describe(figures: list[dict[str, Any]]) -> str:
    """Return the figures of a row: of each test on hosts the waits, of the others the results."""
    waits: dict[str, list[str]] = {}
    results = Counter[str]()
    for figure in figures:
        name = re.sub(r".*::(test_)?", "", figure["test"])
        if figure["what"] in RESULTS:
            results[figure["what"]] += 1
        else:
            waits.setdefault(name, []).append(f"{figure['what']} {figure['seconds']:.1f} s")
    counts = [f"{count} {result}" for result, count in results.items()]
    texts = [f"{name}: {', '.join(dict.fromkeys(found))}" for name, found in waits.items()]
    return "; ".join([*counts, *texts])


def main() -> None:
    """Print one line per row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="", help="numbers; default: all")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for a file of tests")
    parser.add_argument("--record", type=Path, help="file that keeps the results")
    options = parser.parse_args()
    # An interruption ends the tests as an exception would.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        wanted = expand_numbers(options.rows)
    except ValueError:
        parser.error(f"--rows must be numbers such as 1,3,54-56, got {options.rows!r}")
    every_row = list(read_rows(PAGE.read_text()))
    if unknown := wanted.difference(*(expand_numbers(row.number) for row in every_row)):
        parser.error(f"--rows has numbers that {PAGE.name} does not have: {sorted(unknown)}")
    rows = [row for row in every_row if not wanted or wanted & expand_numbers(row.number)]
    files: dict[str, set[str]] = {}
    for row in rows:
        for path, names in row.tests:
            files.setdefault(path, set()).update(names or ("",))
    results: dict[str, list[dict[str, Any]]] = {}
    if options.record and options.record.exists():
        for line in options.record.read_text().splitlines():
            results.update(json.loads(line))
    found: dict[str, list[dict[str, Any]]] = {}
    for path, names in files.items():
        key = " ".join([path, *sorted(names)])
        if key not in results:
            results[key] = run_file(path, set() if "" in names else names, options.limit)
            if options.record:
                with options.record.open("a") as file:
                    file.write(json.dumps({key: results[key]}) + "\n")
        found[path] = results[key]
    for row in rows:
        figures = [
            figure
            for path, names in row.tests
            for figure in found[path]
            if not names or any(name in figure["test"] for name in names)
        ]
        print(f"| {row.number} | {row.fault} | {row.bound} | {describe(figures)} |", flush=True)


# The plugin
# --------------------------------------------------------------------------------------------------

_last_fault: dict[int, float] = {}
"""Thread -> when the test in it broke something last."""


def _write(test: str, what: str, seconds: float) -> None:
    with open(os.environ[FIGURES_VARIABLE], "a") as file:
        file.write(json.dumps({"test": test, "what": what, "seconds": round(seconds, 2)}) + "\n")


def _note_fault(owner: Any, name: str, is_fault: Callable[..., bool] = lambda *_: True) -> None:
    act = getattr(owner, name)

    def noted(*args: Any, **options: Any) -> Any:
        if is_fault(*args):
            _last_fault[threading.get_ident()] = time.monotonic()
        return act(*args, **options)

    setattr(owner, name, noted)


def _note_effect(owner: Any, name: str, describe_effect: Callable[..., str]) -> None:
    wait = getattr(owner, name)

    def noted(*args: Any, **options: Any) -> Any:
        thread = threading.current_thread()
        fault = _last_fault.pop(thread.ident or 0, None)  # a wait within this one is not noted
        result = wait(*args, **options)
        if fault is None:
            return result
        _last_fault[thread.ident or 0] = fault
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
        if thread is not threading.main_thread():  # several faults are tested side by side
            test = f"[{args[0].folder.name}]" if hasattr(args[0], "folder") else ""
        if test and (what := describe_effect(*args, **options)):
            _write(test, what, time.monotonic() - fault)
        return result

    setattr(owner, name, noted)


def pytest_configure(config: Any) -> None:
    """Watch the acts and waits of the tests on hosts, and of those of the command."""
    from tests.chaos.host import Host
    from tests.chaos.jobs import Bed, NodeJob
    from tests.e2e.clusters.conftest import Cluster, Run
    from tests.e2e.conftest import Job
    from tests.lib.kube.cluster import KubeCluster
    from tests.lib.kube.kubelet import TestKubelet

    signals = (2, 9, 11, 15, 19)
    _note_fault(os, "kill", lambda pid, number: number in signals)
    _note_fault(os, "killpg", lambda pid, number: number in signals)
    _note_fault(Bed, "order", lambda bed, who, what, *_: what != "exit 0")
    for name in ("crash", "power_off", "freeze", "drop_from", "loss", "rate", "black_hole"):
        _note_fault(Host, name)
    _note_fault(Host, "link", lambda host, up: not up)
    for job in (NodeJob, Job):
        _note_fault(job, "signal", lambda job, number: number in signals)
    for name in ("firewall", "end_jump_host"):
        _note_fault(Cluster, name)
    _note_fault(TestKubelet, "lose")
    _note_effect(KubeCluster, "wait_until", lambda _, condition, what, *__, **___: f"{what} after")
    _note_effect(Run, "expect", lambda run, text, *_, **__: f"{text[:40]!r} after")
    _note_effect(Run, "wait", lambda *_, **__: "ended after")
    _note_effect(Cluster, "nothing_left", lambda *_, **__: "nothing left after")
    _note_effect(Bed, "codes", lambda *_, **__: "all ended after")
    _note_effect(Bed, "clean", lambda *_, **__: "nothing left after")
    _note_effect(Bed, "event", lambda bed, kind, *_, **__: f"{kind} after")
    _note_effect(Job, "wait", lambda *_, **__: "ended after")
    _note_effect(
        Bed,
        "running",
        lambda bed, workers=3, generation=0, **_: generation and f"generation {generation} after",
    )


def pytest_runtest_logreport(report: Any) -> None:
    """Write the result of a test."""
    if report.when == "call" or (report.when == "setup" and report.skipped):
        _write(report.nodeid, report.outcome, report.duration)
    _last_fault.clear()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
