"""The manual page, in roff, from the commands themselves: what ``--help`` has, and nothing more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

import pdrun
from pdrun.launcher.cli import help as cli_help
from pdrun.launcher.config.options import HELP_GROUPS
from pdrun.launcher.config.run_options import RUN_OPTIONS

SUMMARY = "start PyTorch jobs on any cluster, restart them when they fail, report the first cause"


def format_manual(root: click.Command) -> str:
    """Return the page."""
    lines = [
        f'.TH PDRUN 1 "" "pdrun {pdrun.__version__}" "User Commands"',
        ".SH NAME",
        f"pdrun \\- {escape_roff(SUMMARY)}",
        ".SH SYNOPSIS",
        ".B pdrun",
        r"[OPTIONS] SCRIPT [ARGS]...",
        ".br",
        ".B pdrun",
        r"COMMAND [OPTIONS] [ARGS]...",
        ".SH OPTIONS OF RUN",
        "Everything behind the script belongs to the script.",
    ]
    for group in HELP_GROUPS:
        lines.append(f".SS {escape_roff(group)}")
        rows = [row for row in RUN_OPTIONS if row.group == group]
        lines += _format_records(cli_help.help_records(rows))
    lines.append(".SH COMMANDS")
    lines += _format_commands(root, "pdrun")
    lines += [".SH EXIT STATUS", "That of the job: 0, or the exit code of its first cause."]
    return "\n".join(lines) + "\n"


def _format_commands(command: click.Command, path: str) -> Iterator[str]:
    """Yield a section for each command below a group, in the order of their names."""
    context = click.Context(command, info_name=path)
    names = command.list_commands(context) if isinstance(command, click.Group) else []
    for name in names:
        assert isinstance(command, click.Group)
        below = command.get_command(context, name)
        if below is None or below.hidden or (path == "pdrun" and name == "run"):
            continue
        own = click.Context(below, info_name=name, parent=context)
        usage = " ".join(below.collect_usage_pieces(own))
        yield f".SS {escape_roff(f'{path} {name} {usage}')}"
        yield escape_roff(" ".join((below.help or "").split()))
        records = [param.get_help_record(own) for param in below.params]
        yield from _format_records([record for record in records if record])
        yield from _format_commands(below, f"{path} {name}")


def _format_records(records: Sequence[tuple[str, str]]) -> Iterator[str]:
    for usage, text in records:
        yield ".TP"
        yield f".B {escape_roff(usage)}"
        yield escape_roff(" ".join(text.split()))


def escape_roff(text: str) -> str:
    """Return a text for roff: no character of it is a command."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text
