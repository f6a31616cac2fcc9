"""
What was said, where, and which saying counts.

Every option, variable and line of a job file becomes a `Wish`: a field path, a value and its
source. The command line counts before the environment, the environment before a job file. Two
sayings of the same rank that differ are an error that names both; equal ones are fine. Pure: no
file, no ``os.environ``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from pdrun.errors import ConfigError, PdrunError, UsageError, did_you_mean
from pdrun.launcher.common.parsers import quoted, yes_no
from pdrun.launcher.config.aliases import ALIAS_OPTIONS
from pdrun.launcher.config.options import WORKER_VARIABLES, OTHER_VARIABLES, RUN_OPTIONS, Option


class Priority(IntEnum):
    """Who speaks; the smaller number counts."""

    COMMAND = 0
    ENVIRONMENT = 1
    FILE = 2
    DETECTED = 3
    """Another launcher's words about this process (`pdrun.launcher.adapters`)."""


@dataclass(frozen=True)
class Source:
    """The place where something was said."""

    label: str
    """``--nodes``, ``PDRUN_NODES`` or ``job.yaml:3``."""
    priority: Priority
    text: str = ""
    """As typed; empty for a flag."""

    def describe(self) -> str:
        """
        Return what stands there, for a message: ``--nodes 3``, ``PDRUN_NODES=3``, ``job.yaml:3
        (3)``.
        """
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        if not text:
            return self.label
        return {
            Priority.COMMAND: f"{self.label} {text}",
            Priority.ENVIRONMENT: f"{self.label}={text}",
        }.get(self.priority, f"{self.label} ({text})")

    def make_error(self, what: str, hint: str = "") -> PdrunError:
        """
        Return the error that fits: the command line is the user's to change at once, the others are
        set-up.
        """
        kind = UsageError if self.priority is Priority.COMMAND else ConfigError
        return kind(what, where=self.label, hint=hint)

    def convert_error(self, error: PdrunError) -> PdrunError:
        """Return a parser's complaint with the exit code that fits this place."""
        if self.priority is Priority.COMMAND:
            return error
        return ConfigError(error.what, where=error.where, hint=error.hint)

    def convert_file_error(self, error: PdrunError) -> PdrunError:
        """
        Return the complaint about a file that is named here: a variable, say, of which the user may
        not know.
        """
        return self.convert_error(
            UsageError(error.what, where=f"{self.label} {error.where}".rstrip(), hint=error.hint)
        )


@dataclass(frozen=True)
class Setting:
    """One value for one field."""

    path: str
    value: Any
    source: Source


def read_option(option: Option, text: str, source: Source) -> tuple[Setting, ...]:
    """Return the wishes of one use of an option, or raise with its place."""
    try:
        found = option.read(text, source.label)
    except UsageError as error:
        raise source.convert_error(error) from None
    return tuple(Setting(path, value, source) for path, value in found.items())


def read_environment(environ: Mapping[str, str]) -> tuple[tuple[Setting, ...], tuple[str, ...]]:
    """
    Return the wishes of every twin of an option in the environment, and notes about what was found.

    Raises:
        ConfigError: a variable is empty or does not parse; it names the variable.
    """
    wishes: list[Setting] = []
    notes: list[str] = []
    inside = "PDRUN_GENERATION" in environ
    for option in (*RUN_OPTIONS, *ALIAS_OPTIONS):
        for name in option.env:
            if name not in environ:
                continue
            if inside and name in WORKER_VARIABLES:
                notes.append(f"{name} is not read: an outer pdrun set it for its worker")
                continue
            wishes += _read_variable(option, Source(name, Priority.ENVIRONMENT, environ[name]))
            notes += [f"{name}: {option.note}"] if option.note else []
    return tuple(wishes), (*notes, *unknown_variables(environ))


def _read_variable(option: Option, source: Source) -> Sequence[Setting]:
    if not source.text:
        raise source.make_error("is empty", "set it to a value, or unset it")
    if option.metavar:
        return read_option(option, source.text, source)
    try:
        on = yes_no(source.text, source.label)
    except UsageError as error:
        raise source.convert_error(error) from None
    if on:
        return read_option(option, "", source)
    return [Setting(path, value, source) for path, value in option.off_values.items()]


def unknown_variables(environ: Mapping[str, str]) -> Iterable[str]:
    """Yield a note for each PDRUN_ variable that nobody reads: most are typing slips."""
    known = {*OTHER_VARIABLES, *(name for option in RUN_OPTIONS for name in option.env)}
    for name in sorted(environ):
        if name.startswith("PDRUN_") and name not in known:
            hint = did_you_mean(name, known)
            yield f"{quoted(name)[1:-1]} is no variable of pdrun" + (f"; {hint}" if hint else "")


def resolve_conflicts(wishes: Iterable[Setting]) -> tuple[dict[str, Setting], tuple[str, ...]]:
    """
    Return the wish that counts for each path, and a note for each that was overridden.

    Raises:
        PdrunError: two of one level differ; both places are named.
    """
    chosen: dict[str, Setting] = {}
    notes: list[str] = []
    for wish in sorted(wishes, key=lambda wish: wish.source.priority):
        before = chosen.setdefault(wish.path, wish)
        if before.value == wish.value:
            continue
        if before.source.priority == wish.source.priority:
            raise conflict_error(wish, before)
        notes.append(f"{wish.source.describe()} is overridden by {before.source.describe()}")
    return chosen, tuple(dict.fromkeys(notes))


def conflict_error(one: Setting, other: Setting) -> PdrunError:
    """Return the error that two sayings do not go together."""
    if one.source.label == other.source.label:
        return one.source.make_error(
            f"given twice, as {other.source.text} and {one.source.text}", "give it once"
        )
    kind = type(one.source.make_error(""))
    return kind(
        f"{one.source.describe()} contradicts {other.source.describe()}", hint="leave one of them out"
    )
