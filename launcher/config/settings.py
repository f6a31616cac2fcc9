"""
Settings with their sources, and which one counts.

Every option, variable and line of a job file becomes a `Setting`: a field path, a value and its
source. The command line overrides the environment. The environment overrides a job file. Two
different values of the same priority are an error that names both; equal values are accepted.
Pure: it reads no file and no ``os.environ``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any

from pdrun.errors import ConfigError, PdrunError, UsageError, did_you_mean
from pdrun.launcher.common.parsers import EMPTY_HINT, parse_bool, quote_text
from pdrun.launcher.config.aliases import ALIAS_OPTIONS
from pdrun.launcher.config.options import OTHER_VARIABLES, WORKER_VARIABLES, Option
from pdrun.launcher.config.run_options import RUN_OPTIONS
from pdrun.quick_dataclass import dataclass


class Priority(IntEnum):
    """Priority of a source. The smaller number counts."""

    COMMAND = 0
    ENVIRONMENT = 1
    FILE = 2
    DETECTED = 3
    """Variables of another launcher (`pdrun.launcher.adapters`)."""


@dataclass(frozen=True)
class Source:
    """Where a value comes from."""

    label: str
    """``--nodes``, ``PDRUN_NODES`` or ``job.yaml:3``."""
    priority: Priority
    text: str = ""
    """As typed; empty for a flag."""

    def describe(self) -> str:
        """
        Return label and value for a message: ``--nodes 3``, ``PDRUN_NODES=3``, ``job.yaml:3 (3)``.
        """
        text = self.text
        if len(text) > 60:
            text = text[:57] + "..."
        if not text:
            return self.label
        if self.priority is Priority.COMMAND:
            return f"{self.label} {text}"
        if self.priority is Priority.ENVIRONMENT:
            return f"{self.label}={text}"
        return f"{self.label} ({text})"

    def make_error(self, what: str, hint: str = "") -> PdrunError:
        """
        Return a UsageError for the command line and a ConfigError for the other sources.
        """
        if self.priority is Priority.COMMAND:
            return UsageError(what, where=self.label, hint=hint)
        return ConfigError(what, where=self.label, hint=hint)

    def convert_error(self, error: PdrunError) -> PdrunError:
        """Return the error of a parser with the exit code that fits this source."""
        if self.priority is Priority.COMMAND:
            return error
        return ConfigError(error.what, where=error.where, hint=error.hint)

    def convert_file_error(self, error: PdrunError) -> PdrunError:
        """
        Return an error about a file that this source names. The message names the source too,
        because the user may not know of a variable that is set.
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


SettingsByPath = dict[str, Setting]
"""Field path -> the setting that counts."""


def read_option(option: Option, text: str, source: Source) -> tuple[Setting, ...]:
    """Return the settings of one use of an option; an error names the source."""
    try:
        found = option.read(text, source.label)
    except UsageError as error:
        if option.metavar and not text:
            raise source.make_error("is empty", EMPTY_HINT) from None
        if source.priority is Priority.COMMAND and (name := _find_long_name(source.label, text)):
            error = UsageError(error.what, where=error.where, hint=f"did you mean '{name}'?")
        raise source.convert_error(error) from None
    return tuple(Setting(path, value, source) for path, value in found.items())


def _find_long_name(label: str, text: str) -> str:
    """Return ``--rdzv_backend`` for ``-rdzv_backend=c10d``, read as ``-r`` with a value."""
    if len(label) != 2:
        return ""
    typed = f"-{label}{text}".partition("=")[0]
    plain = typed.replace("_", "-")
    names = (name for option in (*RUN_OPTIONS, *ALIAS_OPTIONS) for name in option.names)
    return typed if any(name.replace("_", "-") == plain for name in names) else ""


def read_environment(environ: Mapping[str, str]) -> tuple[tuple[Setting, ...], tuple[str, ...]]:
    """
    Return the settings of the options' environment variables, and notes about them.

    Raises:
        ConfigError: a variable is empty or does not parse; it names the variable.
    """
    settings: list[Setting] = []
    notes: list[str] = []
    inside = "PDRUN_GENERATION" in environ
    for option in (*RUN_OPTIONS, *ALIAS_OPTIONS):
        for name in option.env:
            if name not in environ:
                continue
            if inside and name in WORKER_VARIABLES:
                notes.append(f"{name} is ignored: an outer pdrun set it for its worker")
                continue
            settings += _read_variable(option, Source(name, Priority.ENVIRONMENT, environ[name]))
            notes += [f"{name}: {option.note}"] if option.note else []
    return tuple(settings), (*notes, *unknown_variables(environ))


def _read_variable(option: Option, source: Source) -> Sequence[Setting]:
    if not source.text:
        raise source.make_error("must not be empty", "set it to a value, or unset it")
    if option.metavar:
        return read_option(option, source.text, source)
    try:
        on = parse_bool(source.text, source.label)
    except UsageError as error:
        raise source.convert_error(error) from None
    if on:
        return read_option(option, "", source)
    return [Setting(path, value, source) for path, value in option.off_values.items()]


def unknown_variables(environ: Mapping[str, str]) -> Iterable[str]:
    """Yield a note for each unknown PDRUN_ variable. Most are typing errors."""
    known = {*OTHER_VARIABLES, *(name for option in RUN_OPTIONS for name in option.env)}
    for name in sorted(environ):
        if name.startswith("PDRUN_") and name not in known:
            hint = did_you_mean(name, known)
            note = f"{quote_text(name)[1:-1]}: unknown variable"
            if hint:
                note += f"; {hint}"
            yield note


def resolve_conflicts(settings: Iterable[Setting]) -> tuple[SettingsByPath, tuple[str, ...]]:
    """
    Return the setting that counts for each path, and a note for each setting that is overridden.

    Raises:
        PdrunError: two settings of the same priority differ; the message names both sources.
    """
    chosen: dict[str, Setting] = {}
    notes: list[str] = []
    for setting in sorted(settings, key=lambda setting: setting.source.priority):
        first = chosen.setdefault(setting.path, setting)
        if first.value == setting.value:
            continue
        if first.source.priority == setting.source.priority:
            raise conflict_error(setting, first)
        notes.append(f"{setting.source.describe()} is overridden by {first.source.describe()}")
    return chosen, tuple(dict.fromkeys(notes))


def conflict_error(one: Setting, other: Setting) -> PdrunError:
    """Return the error that two settings exclude each other."""
    if one.source.label == other.source.label:
        return one.source.make_error(
            f"given twice, as {other.source.text} and {one.source.text}", "give it once"
        )
    kind = type(one.source.make_error(""))
    return kind(
        f"{one.source.describe()} contradicts {other.source.describe()}", hint="remove one of them"
    )


def value_of(settings: SettingsByPath, path: str, default: Any) -> Any:
    """Return the value at a path, or the default."""
    if path not in settings:
        return default
    return settings[path].value


def node_count(settings: SettingsByPath) -> int:
    """Return the number of nodes that the settings request."""
    return int(value_of(settings, "resources.nodes", 1))
