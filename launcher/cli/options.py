"""
From the tables of options to click and back.

`click_options` makes one click option per spelling, so that an error can name what was typed.
`settings_from_options` turns what click parsed into settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click

from pdrun.launcher.cli import help as cli_help
from pdrun.launcher.config.options import Option
from pdrun.launcher.config.settings import Priority, Setting, Source, read_option

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""click's settings of every command."""
SCRIPT_CONTEXT_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}
"""click's settings of a command whose arguments are a complete ``pdrun run`` command line."""
SCRIPT_METAVAR = "[PDRUN'S OPTIONS] SCRIPT [ARGS]"


def click_options(rows: Iterable[Option]) -> list[click.Parameter]:
    """Return one click option per spelling of each row."""
    return [_click_option(row, name) for row in rows for name in row.names]


def _click_option(row: Option, name: str) -> click.Option:
    # The shell completes the spelling with dashes only.
    is_hidden = "_" in name and row.origin != "msrun"
    names = [name, option_parameter_name(name)]
    if not row.metavar:
        return click.Option(names, is_flag=True, hidden=is_hidden)
    return click.Option(
        names,
        multiple=True,
        type=click.UNPROCESSED,
        hidden=is_hidden,
        shell_complete=_value_completer(row),
    )


def _value_completer(row: Option) -> Callable[[click.Context, click.Parameter, str], list[Any]]:
    """Return what completes the values of an option; only a shell's TAB imports it."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from pdrun.launcher.cli.inspect.values import complete_option

        return complete_option(row, ctx, incomplete)

    return complete


def option_parameter_name(spelling: str) -> str:
    """Return the Python name of an option; ``--a-b`` and ``--a_b`` get different names."""
    return "o" + spelling.replace("_", "_u").replace("-", "_d")


def complete_names(words: Sequence[str], rows: Iterable[Option]) -> list[str]:
    """
    Return the words with abbreviated options of torchrun and msrun completed: ``--nnode 2``.

    As with argparse, an abbreviation must be the beginning of one name only.
    """
    row_of_name = {name: row for row in rows for name in row.names}
    completed = list(words)
    index = 0
    while index < len(completed):
        word = completed[index]
        if word in ("-", "--") or not word.startswith("-"):
            break
        name, equals, value = word.partition("=")
        if name not in row_of_name and len(name) > 3 and name.startswith("--"):
            found = [known for known in row_of_name if known.startswith(name)]
            if len(found) == 1 and _may_be_abbreviated(row_of_name[found[0]]):
                name = found[0]
                completed[index] = name + equals + value
        row = row_of_name.get(name)
        index += 1
        if row is not None and row.metavar and not equals:
            index += 1
    return completed


def _may_be_abbreviated(row: Option) -> bool:
    """Return whether torchrun or msrun have the option."""
    return row.origin != "pdrun" or any(name.startswith("PET_") for name in row.env)


def settings_from_options(
    rows: Iterable[Option], params: Mapping[str, Any]
) -> tuple[list[Setting], list[str]]:
    """Return the settings that click parsed, and the notes of the options that were used."""
    settings: list[Setting] = []
    notes: list[str] = []
    for row in rows:
        for name in row.names:
            for text in _given_texts(params.get(option_parameter_name(name))):
                settings += read_option(row, text, Source(name, Priority.COMMAND, text))
                if row.note:
                    notes.append(f"{name}: {row.note}")
    return settings, notes


def _given_texts(value: object) -> Sequence[str]:
    """Return the texts of one option: one per use; an empty text for a flag that is set."""
    if isinstance(value, tuple):
        return value
    return [""] if value else []


class OptionTableCommand(click.Command):
    """A command whose options are rows of the tables; its help shows the tables' texts."""

    rows: tuple[Option, ...] = ()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the rows, then the options that only click knows."""
        records = cli_help.help_records(self.rows)
        for param in self.get_params(ctx):
            is_row = (param.name or "").startswith("o_")
            if isinstance(param, click.Option) and not is_row:
                record = param.get_help_record(ctx)
                if record:
                    records.append(record)
        with formatter.section("Options"):
            formatter.write_dl(records, col_max=34)
