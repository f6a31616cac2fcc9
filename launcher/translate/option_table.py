"""
Read the options of another launcher as that launcher does: from a table of its options.

A table has one option per line: its names, then one capital word per value.

    --nproc-per-node --nproc_per_node N
    --standalone
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pdrun.errors import UsageError, did_you_mean
from pdrun.launcher.common.parsers import EMPTY_HINT, Parser, int_parser, quote_text

Value = TypeVar("Value")

_MAY_BE_EMPTY = frozenset(
    (
        *("rdzv_conf", "rdzv_endpoint", "role", "local_ranks_filter", "log_dir"),
        *("include", "exclude", "worker_log_name", "rank_table_file"),
    )
)
"""Options whose empty value every launcher takes for its own default."""
QUESTIONS = ("-h", "--help", "-V", "--version")
"""Options of every launcher that print something and start nothing."""


class UnreadableOptionError(UsageError):
    """The words are not options of this launcher."""


@dataclass(frozen=True)
class ForeignOption:
    """An option of another launcher."""

    names: tuple[str, ...]
    key: str
    """Its longest name with underscores and without dashes in front."""
    values: int


@dataclass(frozen=True)
class UsedOption:
    """One use of an option."""

    key: str
    name: str
    """As typed, or completed."""
    values: tuple[str, ...]


@dataclass(frozen=True)
class ForeignCommand:
    """A command line of another launcher: its options, then the program and its arguments."""

    launcher: str
    options: tuple[UsedOption, ...]
    words: tuple[str, ...]
    read_keys: set[str] = field(default_factory=set, compare=False)
    """Options that the translation has looked at."""

    def has(self, key: str) -> bool:
        """Return whether the option is used."""
        return self.last_use(key) is not None

    def last_use(self, key: str) -> UsedOption | None:
        """Return the last use, which counts; None: it is not used."""
        self.read_keys.add(key)
        return next((one for one in reversed(self.options) if one.key == key), None)

    def text_of(self, key: str, default: str = "", *, may_be_empty: bool = False) -> str:
        """
        Return the value of an option.

        Args:
            key: of the option.
            default: if it is not used.
            may_be_empty: whether the launcher takes an empty value for its own default.

        Raises:
            UsageError: the value is empty, but must not be.
        """
        used = self.last_use(key)
        if used is None or not used.values:
            return default
        text = used.values[0]
        if not text and not may_be_empty and key not in _MAY_BE_EMPTY:
            raise self.make_error(key, "is empty", EMPTY_HINT)
        return text

    def all_of(self, key: str) -> list[tuple[str, ...]]:
        """Return the values of each use of an option."""
        self.read_keys.add(key)
        return [one.values for one in self.options if one.key == key]

    def parse(self, key: str, parser: Callable[[str, str], Value], default: Value) -> Value:
        """Return the parsed value of an option. An error names the option."""
        used = self.last_use(key)
        if used is None:
            return default
        return parser(used.values[0], used.name)

    def count_of(self, key: str, default: int = 0, least: int = 1) -> int:
        """Return the value of an option that is a whole number."""
        return self.parse(key, int_parser(least), default)

    def make_error(self, key: str, what: str, hint: str = "") -> UsageError:
        """Return an error about an option."""
        used = self.last_use(key)
        return UsageError(what, where=used.name if used else self.launcher, hint=hint)

    def refuse(self, hints: Mapping[str, str]) -> None:
        """Refuse options that have no translation. ``hints``: key -> what to do instead."""
        for key, hint in hints.items():
            if self.has(key):
                raise self.make_error(key, "is not translated", hint)

    def list_left_out(self, reasons: Mapping[str, str]) -> list[str]:
        """
        Return a note for each option on the command line that the translation has not looked at.

        Args:
            reasons: key -> why pdrun does without the option.

        Raises:
            UsageError: an option has no reason: it changes nothing beside the other options.
        """
        notes = []
        for used in self.options:
            if used.key in self.read_keys:
                continue
            if used.key not in reasons:
                raise UsageError(
                    "has no effect beside the other options", where=used.name, hint="remove it"
                )
            if used.name.startswith("-"):
                notes.append(f"{used.name} is left out: {reasons[used.key]}")
        return list(dict.fromkeys(notes))


def parse_table(text: str) -> tuple[ForeignOption, ...]:
    """Return the options of a table."""
    found = []
    for line in text.splitlines():
        names = tuple(word for word in line.split() if word.startswith("-"))
        if names:
            key = max((_key_of(name) for name in names), key=len)
            found.append(ForeignOption(names, key, len(line.split()) - len(names)))
    return tuple(found)


def _key_of(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def read_command(
    launcher: str,
    table: Sequence[ForeignOption],
    words: Sequence[str],
    *,
    abbreviates: bool = True,
    refused_prefixes: tuple[str, ...] = (),
) -> ForeignCommand:
    """
    Read options up to the first word that is not one, as argparse does.

    Args:
        launcher: its name, for errors.
        table: its options.
        words: the command line behind the launcher's name.
        abbreviates: whether the launcher accepts the beginning of a name.
        refused_prefixes: beginnings of the keys of options that have no translation.

    Raises:
        UsageError: an option has no translation.
        UnreadableOptionError: an option is unknown, ambiguous, or has no value.
    """
    by_name = {name: option for option in table for name in option.names}
    used: list[UsedOption] = []
    index = 0
    while index < len(words):
        word = words[index]
        if word == "--":
            index += 1
            break
        if not word.startswith("-") or word == "-":
            break
        name, equals, attached = word.partition("=")
        if name not in by_name and name in QUESTIONS:
            raise UnreadableOptionError(f"asks {launcher} itself and starts nothing", where=name)
        if name not in by_name and f"-{name}" in by_name:
            raise UnreadableOptionError(
                f"{launcher} has no option {quote_text(name)}", hint=f"did you mean '-{name}'?"
            )
        if name not in by_name and _is_short_with_value(word, by_name):
            name, equals, attached = word[:2], "=", word[2:].removeprefix("=")
        elif name not in by_name and abbreviates:
            name = _complete_name(launcher, name, by_name)
        if name not in by_name and _key_of(name).startswith(refused_prefixes):
            raise UsageError("is not translated", where=name, hint=f"keep {launcher} for it")
        if name not in by_name:
            raise UnreadableOptionError(
                f"{launcher} has no option {quote_text(name)}", hint=did_you_mean(name, by_name)
            )
        option = by_name[name]
        index += 1
        if equals:
            if option.values != 1:
                raise UnreadableOptionError("takes no value", where=name)
            values: tuple[str, ...] = (attached,)
        else:
            values = tuple(words[index : index + option.values])
            index += option.values
            if len(values) < option.values or any(value in by_name for value in values):
                raise UnreadableOptionError("needs a value", where=name)
        used.append(UsedOption(option.key, name, values))
    return ForeignCommand(launcher, tuple(used), tuple(words[index:]))


def _is_short_with_value(word: str, by_name: dict[str, ForeignOption]) -> bool:
    """Return whether a word is ``-r3``: a short option and its value."""
    option = by_name.get(word[:2])
    return option is not None and option.values == 1 and not word.startswith("--")


def _complete_name(launcher: str, name: str, by_name: dict[str, ForeignOption]) -> str:
    """Return the only option that begins with ``name``; ``name`` itself if no option does."""
    names = [known for known in by_name if known.startswith(name)]
    if len({by_name[known].key for known in names}) > 1:
        raise UnreadableOptionError(
            f"{quote_text(name)} is ambiguous for {launcher}", hint=f"it can be {', '.join(names)}"
        )
    return names[0] if names else name


def choice_of(*known: str) -> Parser:
    """Return a parser of one of these texts, in any case."""

    def parse(text: str, where: str) -> str:
        if text.lower() not in known:
            raise UsageError(
                f"must be one of {', '.join(known)}, got {quote_text(text)}", where=where
            )
        return text.lower()

    return parse
