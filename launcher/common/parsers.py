"""
Strict parsers of scalar values: text in, a value or a UsageError out. Pure.

Numbers are ASCII digits only. ``int()`` would also accept ``1_0``, full-width digits and blanks,
and a typing error must not start a job of another size. Every parser has the form ``(text, where)
-> value``, as the tables of options require. ``where`` is the option or variable in the error.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from typing import Any, Literal

from pdrun.endpoint import Endpoint, check_host, parse_endpoint, parse_port
from pdrun.errors import UsageError, did_you_mean
from pdrun.text import check_name

Parser = Callable[[str, str], Any]

MAX_COUNT = 1_000_000
"""Larger numbers of nodes, workers, threads or restarts are typing errors."""
MAX_SERVERS = 1024
"""Parameter servers of a job, or of a node."""
EMPTY_HINT = "a variable of the shell in it may not be set"
"""What to do about the empty value of an option."""
LONG_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"
"""Hyphens, dashes and the minus sign, by which documents replace ``--``."""
_UNIT_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MAX_DURATION_SECONDS = 366 * 86400.0
_LOG_NAME_FIELDS = ("rank", "local_rank", "node", "ip", "hostname")


def quote_text(text: str) -> str:
    """Return the text in quotes, with control characters escaped, cut to 80 characters."""
    shown = repr(text)
    return shown if len(shown) <= 80 else shown[:76] + "...'"


def hint_at_dash(word: str) -> str:
    """Return a hint about a word that begins with a dash that is not ``-``, or the empty string."""
    if not word.startswith(tuple(LONG_DASHES)):
        return ""
    plain = word.lstrip(LONG_DASHES + "-")
    return f"its first character is a longer dash than '-'; write --{plain}"


def int_parser(least: int = 0, most: int = MAX_COUNT) -> Parser:
    """Return a parser of integers from ``least`` to ``most``."""

    def parse(text: str, where: str) -> int:
        digits = r"-?[0-9]{1,9}" if least < 0 else r"[0-9]{1,9}"
        if re.fullmatch(digits, text) and least <= int(text) <= most:
            return int(text)
        if re.fullmatch(r"-?[0-9]+", text):
            limit = f"above {most}"
            if text.startswith("-") or int(text[:20]) < least:
                limit = f"below {least}"
            raise UsageError(f"{quote_text(text)} is {limit}", where=where)
        raise UsageError(
            f"{quote_text(text)} is not a whole number",
            where=where,
            hint="use the digits 0 to 9 only",
        )

    return parse


def int_or_auto_parser(least: int = 1) -> Parser:
    """Return a parser of integers that also accepts ``auto``."""
    number = int_parser(least)

    def parse(text: str, where: str) -> int | Literal["auto"]:
        if text == "auto":
            return "auto"
        if re.fullmatch(r"[A-Za-z]+", text):
            raise UsageError(f"{quote_text(text)} is neither a number nor 'auto'", where=where)
        return int(number(text, where))

    return parse


def parse_servers(text: str, where: str) -> str:
    """Parse the number of parameter servers, ``N`` or ``N/node``; 0 means none."""
    number, slash, unit = text.partition("/")
    if slash and unit != "node":
        raise UsageError(
            f"must be N or N/node, got {quote_text(text)}", where=where, hint="use 2, or 1/node"
        )
    count = int_parser(1, MAX_SERVERS)(number, where)
    return f"{count}{slash}{unit}"


class ChoiceParser:
    """Accepts one of some words, which the shell completes."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = words

    def __call__(self, text: str, where: str) -> Any:
        """Return the text; UsageError if it is not one of the words."""
        if text in self.words:
            return text
        raise UsageError(
            f"{quote_text(text)} is not one of {', '.join(self.words)}",
            where=where,
            hint=did_you_mean(text, self.words),
        )


def choice_parser(*words: str) -> ChoiceParser:
    """Return a parser that accepts one of the words."""
    return ChoiceParser(words)


def parse_duration(text: str, where: str) -> float:
    """
    Return seconds: ``30``, ``2.5``, ``30s``, ``5m``, ``1h``, ``1d``, ``1h30m``.

    Positive, at most a year.
    """
    hint = "write seconds, or 30s, 5m, 1h"
    if not re.fullmatch(
        r"(?:[0-9]{1,9}(?:\.[0-9]{1,6})?(?:ms|s|m|h|d))+|[0-9]{1,9}(?:\.[0-9]{1,6})?", text
    ):
        raise UsageError(f"{quote_text(text)} is not a duration", where=where, hint=hint)
    parts = re.findall(r"([0-9.]+)(ms|s|m|h|d|$)", text)
    total = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)
    if not 0 < total <= _MAX_DURATION_SECONDS:
        raise UsageError(f"{quote_text(text)} is not between 0 and a year", where=where, hint=hint)
    return total


def parse_duration_or_zero(text: str, where: str) -> float:
    """Return seconds, as `parse_duration`; 0 is allowed."""
    if re.fullmatch(r"0+(?:\.0+)?(?:ms|s|m|h|d)?", text):
        return 0.0
    return parse_duration(text, where)


def parse_bool(text: str, where: str) -> bool:
    """Return a boolean: ``1 true yes on`` or ``0 false no off``, in any case."""
    word = text.lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise UsageError(
        f"{quote_text(text)} is neither true nor false", where=where, hint="write 1 or 0"
    )


def parse_text(text: str, where: str) -> str:
    """Return text that is not empty and contains no control character."""
    if not text:
        raise UsageError("is empty", where=where)
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise UsageError(f"{quote_text(text)} contains a control character", where=where)
    return text


def parse_path(text: str, where: str) -> str:
    """Return a path: not empty, no control characters, and encodable for the file system."""
    parse_text(text, where)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(f"{text!a} is not valid UTF-8", where=where) from None
    if len(text) > 4095:
        raise UsageError(f"a path of {len(text)} characters is too long", where=where)
    return text


def parse_host(text: str, where: str) -> str:
    """Return a host name or an IP address; brackets around IPv6 are allowed."""
    if "://" in text:
        raise UsageError(f"{quote_text(text)} is a URL", where=where, hint="write only the host")
    inner = text
    if text.startswith("[") and text.endswith("]"):
        inner = text[1:-1]
    try:
        return check_host(inner, where=where)
    except UsageError:
        raise UsageError(
            f"{quote_text(text)} is neither a host name nor an IP address", where=where
        ) from None


def parse_tcp_port(text: str, where: str) -> int:
    """Return a TCP port, 1 to 65535."""
    return parse_port(text, where=where)


def endpoint_parser(default_port: int | None = None) -> Parser:
    """Return a parser of ``HOST:PORT``; with port 0 the first node chooses one."""

    def parse(text: str, where: str) -> Endpoint:
        if text.endswith(":0"):
            return Endpoint(parse_endpoint(text[:-2], where=where, default_port=1).host, 0)
        return parse_endpoint(text, where=where, default_port=default_port)

    return parse


def parse_interface(text: str, where: str) -> str:
    """Return an interface name or an address of this machine, but no wildcard address."""
    parse_text(text, where)
    if text in ("*", "0.0.0.0", "::", "[::]"):
        raise UsageError(
            f"{quote_text(text)} means all interfaces",
            where=where,
            hint="name one interface or one address",
        )
    if not re.fullmatch(r"[A-Za-z0-9._:@%\[\]-]{1,64}", text):
        raise UsageError(f"{quote_text(text)} is neither an interface nor an address", where=where)
    return text.strip("[]")


def parse_generation(text: str, where: str) -> int | Literal["all"]:
    """Return the number of a generation, 0 before the first restart, or ``all``."""
    return "all" if text == "all" else int(int_parser(0)(text, where))


def parse_assignment(text: str, where: str) -> tuple[str, str]:
    """Return (name, value) of ``NAME=VALUE``; the value may be empty and may contain ``=``."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"{quote_text(text)} has no '='", where=where, hint="write NAME=VALUE")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(
            f"{quote_text(name)} is not a variable's name", where=where, hint="write NAME=VALUE"
        )
    if "\0" in value:
        raise UsageError(f"the value of {name} contains a NUL", where=where)
    return name, value


def parse_patterns(text: str, where: str) -> tuple[str, ...]:
    """Return the comma-separated names of variables, or patterns with ``*`` and ``?``."""
    found = tuple(part.strip() for part in text.split(","))
    for part in found:
        if not re.fullmatch(r"[A-Za-z_*?][A-Za-z0-9_*?]*", part):
            raise UsageError(
                f"{quote_text(part)} is neither a variable's name nor a pattern",
                where=where,
                hint="write NAME,PREFIX_*",
            )
    return found


def parse_log_name(text: str, where: str) -> str:
    """Return a stem of log file names with fields in braces: no path, unique for each worker."""
    parse_text(text, where)
    used = re.findall(r"\{([^{}]*)\}", text)
    for name in used:
        if name not in _LOG_NAME_FIELDS:
            known = ", ".join("{" + field + "}" for field in _LOG_NAME_FIELDS)
            raise UsageError(f"{{{name}}} is not a field", where=where, hint=f"use {known}")
    rest = re.sub(r"\{[^{}]*\}", "", text)
    if not re.fullmatch(r"[A-Za-z0-9._-]*", rest) or rest.startswith((".", "-")) or len(text) > 120:
        raise UsageError(
            f"{quote_text(text)} is not a file name",
            where=where,
            hint="use A-Z a-z 0-9 . _ - and fields in braces",
        )
    if "rank" not in used and "local_rank" not in used:
        raise UsageError(
            f"{quote_text(text)} is the same for every worker", where=where, hint="add {rank}"
        )
    return text


def parse_option_name(text: str, where: str) -> str:
    """Return the name of a long option with its dashes; they may be left out."""
    name = text.lstrip("-")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,60}", name):
        raise UsageError(
            f"{quote_text(text)} is not the name of an option",
            where=where,
            hint="write local-rank or local_rank",
        )
    return f"--{name}"


def parse_node_range(text: str, where: str) -> tuple[int, int]:
    """Return (minimum, maximum) of ``N`` or ``MIN:MAX``; minimum is 0 if both are equal."""
    if ":" not in text:
        return 0, int(int_parser(1)(text, where))
    low, _, high = text.partition(":")
    if not (low and high):
        raise UsageError(
            f"{quote_text(text)} lacks a number", where=where, hint="write MIN:MAX, as 2:4"
        )
    bounds = int(int_parser(1)(low, where)), int(int_parser(1)(high, where))
    if bounds[0] > bounds[1]:
        raise UsageError(
            f"{quote_text(text)} has the larger number first",
            where=where,
            hint=f"write {high}:{low}",
        )
    if bounds[0] == bounds[1]:
        return 0, bounds[1]
    return bounds


def parse_exit_codes(text: str, where: str) -> tuple[int, ...]:
    """
    Return the distinct exit codes of ``1,3-5``, ascending.

    The name of a signal means 128 + its number (SIGKILL: 137).
    """
    found: set[int] = set()
    for part in text.split(","):
        if re.fullmatch(r"SIG[A-Z0-9]+", part) and part in signal.Signals.__members__:
            found.add(128 + signal.Signals[part])
            continue
        match = re.fullmatch(r"([0-9]{1,3})(?:-([0-9]{1,3}))?", part)
        low, high = 0, 0
        if match:
            low, high = int(match[1]), int(match[2] or match[1])
        if not 1 <= low <= high <= 255:
            raise UsageError(
                f"{quote_text(part)} is not an exit code of a failure",
                where=where,
                hint="write 1 to 255, a range as 3-5, or a signal as SIGKILL, separated by commas",
            )
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def parse_scheduler_loss(text: str, where: str) -> float:
    """Return how many seconds to wait for a lost scheduler: ``wait[=TIME]``, or 0 for ``stop``."""
    word, equals, time = text.partition("=")
    if text == "stop":
        return 0.0
    if word != "wait" or (equals and not time):
        raise UsageError(f"{quote_text(text)} is not one of wait, wait=TIME, stop", where=where)
    if not equals:
        return 60.0
    return parse_duration(time, where)


def parse_job_name(text: str, where: str) -> str:
    """Return a job's name, which must be allowed in a path."""
    return check_name(text, where=where)


def parse_node_name(text: str, where: str) -> str:
    """Return a node's name, which must be allowed in a path."""
    return check_name(text, where=where)
