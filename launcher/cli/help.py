"""
Help texts made from the tables of options: the first screen, and all of ``pdrun run --help``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click

from pdrun.launcher.config.msrun_options import MSRUN_OPTIONS
from pdrun.launcher.config.options import HELP_GROUPS, Option
from pdrun.launcher.config.run_options import RUN_OPTIONS
from pdrun.launcher.config.torchrun_options import TORCHRUN_OPTIONS

FIRST_SCREEN = """\
Usage: pdrun [OPTIONS] SCRIPT [ARGS]...      start a PyTorch job on any cluster

{options}

Commands: run (the default), serve, join, scheduler, relay, status, logs, top,
attach, trace, report, plot, export, stop, warm, token, env, doctor, translate,
slurm, k8s, rank-table, mpirun, checkpoint, plan, completion; see pdrun COMMAND
--help.

Examples:
  pdrun --devices 4 train.py --lr 3e-4              four workers on this machine
  pdrun --nodes 2 --scheduler node0:29400 train.py  the same line on both nodes
  pdrun --nodes 2 --devices 2 --local train.py      two nodes, simulated here
"""
SHORT_GROUP_TITLES = ("what", "how many", "where", "failure", "output", "look")
"""Short titles of HELP_GROUPS, in the same order."""


def first_screen() -> str:
    """Return the text of ``pdrun --help``: at most 30 lines of at most 80 characters."""
    lines = []
    for title, group in zip(SHORT_GROUP_TITLES, HELP_GROUPS, strict=True):
        for row in RUN_OPTIONS:
            if row.is_in_short_help and row.group == group:
                lines.append(f"{title:<9}{_option_usage(row):<22} {row.help}")
                title = ""
    return FIRST_SCREEN.format(options="\n".join(lines))


def write_run_help(formatter: click.HelpFormatter) -> None:
    """Write ``pdrun run --help``."""
    formatter.write("Usage: pdrun run [OPTIONS] SCRIPT [ARGS]...\n")
    formatter.write("       pdrun run [OPTIONS] -m MODULE [ARGS]...\n")
    formatter.write("       pdrun run [OPTIONS] --no-python COMMAND [ARGS]...\n")
    formatter.write("       pdrun run [OPTIONS] JOB.yaml [ARGS]...\n\n")
    formatter.write_text(
        "Everything behind the script belongs to the script. The command line overrides variables,"
        " variables override a job file; two different values of the same priority are an error."
        " --dry-run --explain prints every value and its source."
    )
    for group in HELP_GROUPS:
        _write_section(formatter, group, [row for row in RUN_OPTIONS if row.group == group])
    torchrun = "torchrun's spellings, with - or _ (variables PET_*)"
    _write_section(formatter, torchrun, TORCHRUN_OPTIONS)
    _write_section(formatter, "msrun's spellings", MSRUN_OPTIONS)


def _write_section(formatter: click.HelpFormatter, title: str, rows: Sequence[Option]) -> None:
    with formatter.section(title):
        formatter.write_dl(help_records(rows), col_max=34)


def own_names() -> dict[str, str]:
    """Return pdrun's own option for each spelling, and each option of torchrun and msrun."""
    found = {name: row.names[0] for row in RUN_OPTIONS for name in row.names if "_" in name}
    for row in (*TORCHRUN_OPTIONS, *MSRUN_OPTIONS):
        if row.same_as:
            found |= dict.fromkeys(row.names, row.same_as)
    return found


def help_records(rows: Iterable[Option]) -> list[tuple[str, str]]:
    """Return (usage, help) of the rows of a table."""
    return [(_option_usage(row), _option_help(row)) for row in rows]


def _option_usage(row: Option) -> str:
    names = [name for name in row.names if "_" not in name] or list(row.names)
    usage = ", ".join(names)
    return f"{usage} {row.metavar}" if row.metavar else usage


def _option_help(row: Option) -> str:
    variables = [name for name in row.env if name.startswith("PDRUN_")]
    return f"{row.help}  [{', '.join(variables)}]" if variables else row.help
