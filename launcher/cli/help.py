"""
Help: the first screen, which fits one, and the whole of ``pdrun run --help``; both made from the
tables.
"""

from __future__ import annotations

from collections.abc import Iterable

import click

from pdrun.launcher.config.aliases import MSRUN, TORCHRUN
from pdrun.launcher.config.options import GROUPS, RUN, Option

_FIRST = """\
Usage: pdrun [OPTIONS] SCRIPT [ARGS]...      start a PyTorch job on any cluster

{options}

Commands: run (the default), join, scheduler, relay, status, logs, stop, warm,
token, env, rank-table, slurm, mpirun, checkpoint, completion; see
pdrun COMMAND --help. All options: pdrun run --help, torchrun's and msrun's too.

Examples:
  pdrun --devices 4 train.py --lr 3e-4              four workers on this machine
  pdrun --nodes 2 --scheduler node0:29400 train.py  the same line on both nodes
  pdrun --nodes 2 --devices 2 --local train.py      two nodes, simulated here
"""
_TITLES = ("what", "how many", "where", "failure", "output", "look")
"""Short names of GROUPS, in their order."""


def first_screen() -> str:
    """Return what ``pdrun --help`` prints: at most 30 lines of at most 80 characters."""
    lines = []
    for title, group in zip(_TITLES, GROUPS, strict=True):
        for row in (row for row in RUN if row.first and row.group == group):
            lines.append(f"{title:<9}{_usage(row):<22} {row.help}")
            title = ""
    return _FIRST.format(options="\n".join(lines))


def write_run_help(formatter: click.HelpFormatter) -> None:
    """Write ``pdrun run --help``."""
    formatter.write("Usage: pdrun run [OPTIONS] SCRIPT [ARGS]...\n")
    formatter.write("       pdrun run [OPTIONS] -m MODULE [ARGS]...\n")
    formatter.write("       pdrun run [OPTIONS] --no-python COMMAND [ARGS]...\n")
    formatter.write("       pdrun run [OPTIONS] JOB.yaml [ARGS]...\n\n")
    formatter.write_text(
        "Everything behind the script belongs to the script. The command line counts before variables, variables before"
        " a job file; two different values of one rank are an error. --dry-run --explain shows what holds and why."
    )
    for group in GROUPS:
        _section(formatter, group, [row for row in RUN if row.group == group])
    _section(formatter, "torchrun's spellings, with - or _ (variables PET_*)", list(TORCHRUN))
    _section(formatter, "msrun's spellings", list(MSRUN))


def _section(formatter: click.HelpFormatter, title: str, rows: list[Option]) -> None:
    with formatter.section(title):
        formatter.write_dl(records(rows), col_max=34)


def records(rows: Iterable[Option]) -> list[tuple[str, str]]:
    """Return (what to type, what it does) of the rows of a table."""
    return [(_usage(row), _described(row)) for row in rows]


def _usage(row: Option) -> str:
    names = [name for name in row.names if "_" not in name] or list(row.names)
    return ", ".join(names) + (f" {row.metavar}" if row.metavar else "")


def _described(row: Option) -> str:
    twins = [name for name in row.env if name.startswith("PDRUN_")]
    return f"{row.help}  [{', '.join(twins)}]" if twins else row.help
