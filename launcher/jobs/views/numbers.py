"""``pdrun plot`` and ``pdrun export``: the numbers of a job's steps, drawn or written out."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from pdrun.errors import EXIT_OK, ConfigError, UsageError
from pdrun.launcher.jobs.lookup import print_note
from pdrun.launcher.jobs.report import find_log
from pdrun.ui.event_reader import read_log_lines
from pdrun.ui.report.history import read_history
from pdrun.ui.report.numbers import StepRow, read_rows
from pdrun.ui.report.pipeline import render_pipeline_file
from pdrun.ui.report.plot import collect_curves, render_plot

CSV_HEAD = ("time", "generation", "step", "name", "mean", "least", "most", "rank", "bad_rank")
NO_NUMBERS = "pdrun.progress(step, loss=loss) reports numbers, and every pdrun.Run does"


def iter_rows(name: str | None) -> tuple[str, Iterator[StepRow]]:
    """
    Return the run of a job, and its steps.

    Raises:
        UsageError: there is no such job, or (while reading) its log cannot be read.
    """
    events, folder, _ = find_log(name)
    return folder.resolve().name, _read_log(events)


def _read_log(events: Path) -> Iterator[StepRow]:
    try:
        yield from read_rows(read_log_lines(events))
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"cannot be read: {reason}", where=str(events)) from None


# ---- plot -------------------------------------------------------------------


def write_plot(jobs: Sequence[str], out: str, values: Sequence[str]) -> int:
    """
    Draw the numbers of jobs.

    Args:
        jobs: as for `find_log`; empty: the newest job.
        out: file, ``.svg`` or ``.png``; ``-``: SVG on stdout; empty: RUN.svg here.
        values: names of numbers; empty: all.

    Raises:
        UsageError: there is no such job or number, or the file cannot be written.
        ConfigError: PNG is asked for, and nothing can make it.
    """
    curves = {}
    chosen: Sequence[str | None] = jobs or (None,)
    for job in chosen:
        run, rows = iter_rows(job)
        curves[run] = collect_curves(rows)
    known = sorted({name for found in curves.values() for name in found})
    for name in values:
        if name not in known:
            hint = f"known: {', '.join(known)}" if known else NO_NUMBERS
            raise UsageError(f"no number {name!r}", where="--values", hint=hint)
    picture = render_plot(curves, values)
    if not picture:
        raise UsageError("there is no number with two steps", hint=NO_NUMBERS)
    _write_picture(picture, out, f"{next(iter(curves))}.svg")
    return EXIT_OK


def write_pipeline(jobs: Sequence[str], out: str, values: str) -> int:
    """
    Draw one step of the pipeline of a job's run.

    Args:
        jobs: at most one, as for `find_log`; empty: the newest job.
        out: as for `write_plot`; default: RUN-pipeline.svg.
        values: of the command line.

    Raises:
        UsageError: several jobs, no such job, no pipeline, or the file cannot be written.
        ConfigError: PNG is asked for, and nothing can make it.
    """
    if values or len(jobs) > 1:
        what = "draws the stages of one job, without --values"
        raise UsageError(what, where="--pipeline")
    events, folder, _ = find_log(jobs[0] if jobs else None)
    try:
        history = read_history(events)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"cannot be read: {reason}", where=str(events)) from None
    picture = render_pipeline_file({name: value for name, (value, _) in history.plan.items()})
    if not picture:
        hint = "parallelize(mesh=pdrun.mesh(pp=2), pipeline=pdrun.Pipeline(...)) makes one"
        raise UsageError("the log has no pipeline", where=str(events), hint=hint)
    _write_picture(picture, out, f"{folder.resolve().name}-pipeline.svg")
    return EXIT_OK


def _write_picture(picture: str, out: str, default: str) -> None:
    """Write an SVG to stdout, or to a file as SVG or PNG."""
    if out == "-":
        sys.stdout.write(picture)
        return
    path = Path(out or default)
    data = _make_png(picture) if path.suffix.lower() == ".png" else picture.encode()
    with _explain_errors(path):
        path.write_bytes(data)
    print_note(f"plot written to {path}")


def _make_png(picture: str) -> bytes:
    """
    Return an SVG as PNG.

    Raises:
        ConfigError: cairosvg is not installed, or does not work.
    """
    try:
        data = importlib.import_module("cairosvg").svg2png(bytestring=picture.encode(), scale=2)
    except (ImportError, OSError) as error:  # OSError: it finds no libcairo
        hint = "pip install cairosvg (it needs libcairo2), or write an .svg"
        reason = str(error).splitlines()[0]
        raise ConfigError(f"PNG needs cairosvg: {reason}", where="-o", hint=hint) from None
    return bytes(data)


# ---- export -----------------------------------------------------------------


def export_numbers(job: str | None, kind: str, out: str) -> int:
    """
    Write the numbers of a job for another program.

    Args:
        job: as for `find_log`; None: the newest job.
        kind: csv, json (one object per line) or tensorboard.
        out: file, or folder of tensorboard; empty: stdout, RUN-tensorboard.

    Raises:
        UsageError: there is no such job, or the file cannot be written.
        ConfigError: tensorboard is not installed.
    """
    run, rows = iter_rows(job)
    if kind == "tensorboard":
        folder = out or f"{run}-tensorboard"
        count = _write_tensorboard(rows, folder)
        print_note(f"{count} values written to {folder}")
        return EXIT_OK
    write: Callable[[Iterable[StepRow], TextIO], None]
    write = _write_csv if kind == "csv" else _write_json
    if out in ("", "-"):
        write(rows, sys.stdout)
        return EXIT_OK
    path = Path(out)
    with _explain_errors(path), path.open("w", encoding="utf-8", newline="") as file:
        write(rows, file)
    print_note(f"numbers written to {path}")
    return EXIT_OK


def _write_csv(rows: Iterable[StepRow], file: TextIO) -> None:
    """Write a line per number: programs for tables group them by name."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_HEAD)
    for row in rows:
        for name, number in row.values.items():
            cells = asdict(number).values()
            writer.writerow((row.time, row.generation, row.step, name, *cells))


def _write_json(rows: Iterable[StepRow], file: TextIO) -> None:
    for row in rows:
        file.write(json.dumps(asdict(row)) + "\n")


def _write_tensorboard(rows: Iterable[StepRow], folder: str) -> int:
    """
    Write event files with TensorBoard's own writer; return the number of values.

    Raises:
        ConfigError: it is not installed.
        UsageError: the folder cannot be written.
    """
    try:
        summary: Any = importlib.import_module("tensorboard.summary")
    except ImportError as error:
        hint = "pip install tensorboard, or use --to csv"
        what = f"needs TensorBoard: {error}"
        raise ConfigError(what, where="--to tensorboard", hint=hint) from None
    count = 0
    with _explain_errors(Path(folder)):
        writer = summary.Writer(folder)
        for row in rows:
            for name, number in row.values.items():
                value = float("nan") if number.mean is None else number.mean
                writer.add_scalar(name, value, row.step, wall_time=row.time)
                count += 1
        writer.close()
    return count


@contextmanager
def _explain_errors(path: Path) -> Iterator[None]:
    """Make an error of the system a mistake of the user that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"cannot be written: {reason}", where=str(path)) from None
    except ValueError as error:
        raise UsageError(f"cannot be written: {error}", where=str(path)) from None
