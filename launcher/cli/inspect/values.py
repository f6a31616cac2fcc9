"""
What a shell completes: values of options, names of jobs, ranks, hosts.

Each TAB is a process, so nothing here is read but names of files, and small files. Only names that
need no quotes are offered, whatever the files are called.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from pdrun.launcher.common.parsers import ChoiceParser
from pdrun.launcher.config.options import Option, ParsedField

FILE_METAVARS = frozenset(("FILE", "PATH", "DIR", "FOLDER", "PYTHON"))
HOST_OPTIONS = frozenset(("--hosts", "--include", "--exclude"))
RANK_OPTIONS = frozenset(("--show-ranks", "--show-stderr"))
MAX_VALUES = 500
MAX_HOSTFILE_BYTES = 1 << 20
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,252}")
_RUN_SUFFIX = re.compile(r"-[0-9]{8}-[0-9]{6}-[0-9a-f]{4}\Z")
_LOG_NAME = re.compile(r"rank_([0-9]{1,7})\.(?:out|err)")


def complete_option(row: Option, ctx: click.Context, incomplete: str) -> list[Any]:
    """Return the values of an option that begin with ``incomplete``."""
    from click.shell_completion import CompletionItem

    if isinstance(row.read, ParsedField) and isinstance(row.read.parser, ChoiceParser):
        return [word for word in row.read.parser.words if word.startswith(incomplete)]
    if HOST_OPTIONS.intersection(row.names):
        return _complete_list(incomplete, _list_hosts(ctx))
    if RANK_OPTIONS.intersection(row.names):
        return [word for word in ("all", "none") if word.startswith(incomplete)]
    if row.metavar in FILE_METAVARS:
        kind = "dir" if row.metavar in ("DIR", "FOLDER") else "file"
        return [CompletionItem(incomplete, type=kind)]
    return []


def complete_jobs(incomplete: str) -> list[Any]:
    """Return names of jobs and runs, the newest first; with a slash, folders."""
    from click.shell_completion import CompletionItem

    if "/" in incomplete or incomplete == ".":
        return [CompletionItem(incomplete, type="file")]
    runs = _list_runs()
    jobs = dict.fromkeys(_RUN_SUFFIX.sub("", run) for run in runs)
    # runs only if what is typed says which job is meant: there may be hundreds
    names = [*jobs, *(run for run in runs if incomplete)]
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)][:MAX_VALUES]


def complete_ranks(job: str | None, incomplete: str) -> list[str]:
    """Return the ranks of a job's last generation that has logs."""
    runs = _list_runs()
    if job is not None:
        runs = [run for run in runs if run.startswith(job)]
    ranks = _list_ranks(runs[0]) if runs else []
    return _complete_list(incomplete, map(str, ranks)) + [
        word for word in ("all",) if word.startswith(incomplete)
    ]


def _list_runs() -> list[str]:
    """Return the runs of the registry, the newest first; their names are those of its files."""
    from pdrun.launcher.jobs.registry import registry_folder

    try:
        names = [path.stem for path in registry_folder().glob("*.json")]
    except OSError:
        return []
    names = [name for name in names if _SAFE.fullmatch(name)]

    def order(name: str) -> str:
        found = _RUN_SUFFIX.search(name)
        return found[0] if found else ""

    return sorted(names, key=order, reverse=True)


def _list_ranks(run: str) -> list[int]:
    from pdrun.launcher.jobs.registry import list_jobs

    found = next((job for job in list_jobs() if job.run == run), None)
    if found is None:
        return []
    try:
        folders = [path for path in Path(found.log_dir, run).iterdir() if path.name.isdecimal()]
        newest = max(folders, key=lambda path: int(path.name))
        names = [_LOG_NAME.fullmatch(path.name) for path in newest.iterdir()]
    except (OSError, ValueError):
        return []
    return sorted({int(name[1]) for name in names if name})


def _list_hosts(ctx: click.Context) -> Iterator[str]:
    """Yield the hosts of the hostfile on the command line, else of ``hostfile``, and of ssh."""
    given = ctx.params.get("o_d_dhostfile") or ("hostfile",)
    for name in given:
        yield from _read_names(Path(str(name)), r"^\s*([^\s#:;]+)")
    yield from _read_names(Path("~/.ssh/config").expanduser(), r"(?i)^\s*host\s+(.*)$")


def _read_names(path: Path, pattern: str) -> Iterator[str]:
    try:
        if not path.is_file():
            return
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_HOSTFILE_BYTES)
    except OSError:
        return
    for found in re.finditer(pattern, text, re.M):
        yield from found[1].split()


def _complete_list(incomplete: str, values: Iterable[str]) -> list[str]:
    """Return completions of the last item of a list with commas; items are offered once."""
    before, comma, last = incomplete.rpartition(",")
    used = set(before.split(","))
    found = []
    for value in dict.fromkeys(values):
        if value.startswith(last) and value not in used and _SAFE.fullmatch(value):
            found.append(f"{before}{comma}{value}")
    return found[:MAX_VALUES]
