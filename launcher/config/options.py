"""
The description of an option, and readers that the option tables share.

An option has names, a help text and a reader. The reader returns values for fields of the JobSpec
by path (``resources.nodes``). Paths that are not a field (``scheduler.host``) are combined later in
`pdrun.launcher.config.combine`. The tables are `pdrun.launcher.config.run_options`,
`pdrun.launcher.config.torchrun_options` and `pdrun.launcher.config.msrun_options`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

from pdrun.endpoint import Endpoint
from pdrun.errors import UsageError
from pdrun.launcher.common import parsers
from pdrun.quick_dataclass import dataclass

FieldValues = Mapping[str, Any]
OptionReader = Callable[[str, str], FieldValues]
"""
(text, where) -> field path -> value. Raises UsageError with ``where``. The text of a flag is empty.
"""

HELP_GROUPS = (
    "Program",
    "Resources",
    "Nodes and rendezvous",
    "Failures and time limits",
    "Output",
    "Dry run",
)


@dataclass(frozen=True)
class Option:
    """An option and its environment variables."""

    names: tuple[str, ...]
    """Every name of the option; help shows the first one."""
    help: str
    read: OptionReader
    group: str = ""
    metavar: str = ""
    """Name of the value in the help; empty for a flag."""
    env: tuple[str, ...] = ()
    off_values: FieldValues = field(default_factory=dict)
    """Values of a flag whose environment variable is 0."""
    origin: Literal["pdrun", "torchrun", "msrun"] = "pdrun"
    same_as: str = ""
    """pdrun's own option with this meaning, for messages; empty: there is no such option."""
    note: str = ""
    """Note of ``--explain`` about the effect of the option."""
    is_in_short_help: bool = False
    """Whether the short help lists the option."""


class ParsedField:
    """Stores a parsed value at a path."""

    def __init__(self, path: str, parser: parsers.Parser) -> None:
        self.path = path
        self.parser = parser

    def __call__(self, text: str, where: str) -> FieldValues:
        """Return the field of a value."""
        return {self.path: self.parser(text, where)}


def store_parsed(path: str, parser: parsers.Parser) -> OptionReader:
    """Return a reader that stores the parsed value at ``path``."""
    return ParsedField(path, parser)


def store_value(path: str, value: object) -> OptionReader:
    """Return the reader of a flag, which stores ``value`` at ``path``."""
    return lambda text, where: {path: value}


def endpoint_fields(endpoint: Endpoint) -> FieldValues:
    """Return host and port of the scheduler as two fields, because other options set only one."""
    return {"scheduler.host": endpoint.host, "scheduler.port": endpoint.port}


def read_nodes(text: str, where: str) -> FieldValues:
    """
    Read ``N`` or ``MIN:MAX``. Both fields are set, so that two sources are never mixed.
    """
    least, most = parsers.parse_node_range(text, where)
    return {"resources.nodes": most, "resources.min_nodes": least}


def refuse_option(reason: str, hint: str = "leave it out") -> OptionReader:
    """Return a reader that always refuses."""

    def read(text: str, where: str) -> FieldValues:
        raise UsageError(f"is not supported: {reason}", where=where, hint=hint)

    return read


OTHER_VARIABLES = (
    "PDRUN_TOKEN",
    "PDRUN_JOURNAL",
    "PDRUN_RECOVERY",
    "PDRUN_TERMINATION_LOG",
    "PDRUN_ROLE",
    "PDRUN_WORKER_NUM",
    "PDRUN_WORKERS",
    "PDRUN_NODE",
    "PDRUN_GENERATION",
    "PDRUN_DEVICE_KIND",
    "PDRUN_COLLECTIVE",
    "PDRUN_RANK",
    "PDRUN_RUN",
    "PDRUN_WORKER_ID",
    "PDRUN_WORKER_OF",
    "PDRUN_AGREED_STEP",
    "PDRUN_AGENT",
    "PDRUN_INTERFACES",
    "PDRUN_PEAK_FLOPS",
)
"""
Variables of pdrun without an option: the token, those of a dynamic cluster, those of workers.
"""
WORKER_VARIABLES = ("PDRUN_JOB",)
"""
Variables of options that `WorkerEnv` also sets. They are ignored inside a worker of pdrun.
"""


def split_options(
    words: Sequence[str], table: Iterable[Option]
) -> Iterator[tuple[Option | None, list[str]]]:
    """
    Yield each option with its value, then the program with its arguments.

    Yields:
        (row of the table, or None if it has none, words).
    """
    rows = {spelling: row for row in table for spelling in row.names}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        spelling, equals, _ = word.partition("=")
        row = rows.get(spelling)
        has_value = row is not None and bool(row.metavar) and not equals and bool(rest)
        yield row, [word, rest.pop(0)] if has_value else [word]
    yield None, rest


def drop_options(words: Sequence[str], table: Iterable[Option], names: Sequence[str]) -> list[str]:
    """Return the words without some options, under any spelling. Names are the first of a row."""
    kept = []
    for row, part in split_options(words, table):
        if row is None or row.names[0] not in names:
            kept += part
    return kept


def keep_options(words: Sequence[str], table: Iterable[Option], names: Sequence[str]) -> list[str]:
    """Return only some options of the words, with their values."""
    kept = []
    for row, part in split_options(words, table):
        if row is not None and row.names[0] in names:
            kept += part
    return kept
