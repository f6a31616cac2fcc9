"""
The options of ``pdrun serve`` beside those of ``pdrun run``, and the prober's settings from them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from pdrun.errors import PdrunError, UsageError, did_you_mean
from pdrun.launcher.common import parsers, rank_lists
from pdrun.launcher.config.options import Option, store_parsed
from pdrun.launcher.config.settings import Priority, Setting, Source
from pdrun.launcher.stdlib_only.serving.server_prober import MAX_PORT, PLACEHOLDERS
from pdrun.text import check_name

SERVE_GROUP = "Servers and probes"
INIT_PORT_OFFSET = 1000
DEFAULTS: dict[str, Any] = {
    "port": 8000,
    "init_port": None,
    "group": "",
    "ready": "",
    "ready_timeout": 1800.0,
    "health": "",
    "health_body": None,
    "health_interval": 10.0,
    "health_timeout": 30.0,
    "health_failures": 3,
    "key_variable": "",
    "probe_ranks": "",
    "per": "node",
}
GENERATING_PATHS = ("/completions", "/chat/completions")
"""Ends of the paths of an OpenAI-like server whose answer is generated."""
_WORD_IN_BRACES = re.compile(r"(?<!\{)\{([a-z_]+)\}(?!\})")


def _parse_url(text: str, where: str) -> str:
    """Return an http or https URL that may have placeholders."""
    check_placeholders(text, where)
    plain = re.sub(r"\{[a-z_]+\}", "1", text)
    try:
        parts = urlsplit(plain)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_url = is_url and parts.port != 0 and parts.username is None
    except ValueError:
        is_url = False
    if not is_url or not plain.isascii() or not plain.isprintable() or " " in plain:
        raise UsageError(
            f"{parsers.quote_text(text)} is not a URL",
            where=where,
            hint="write http://127.0.0.1:{port}/health",
        )
    return text


def _parse_body(text: str, where: str) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"is not JSON ({error})", where=where) from None
    if not isinstance(found, dict):
        raise UsageError(f"must be a JSON object, got {parsers.quote_text(text)}", where=where)
    return found


def _parse_group(text: str, where: str) -> str:
    check_name(text, where=where)
    return text


SERVE_OPTIONS = (
    Option(
        ("--port",),
        "port of rank 0, {port}; rank R has the port plus R (default: 8000)",
        store_parsed("serve.port", parsers.parse_tcp_port),
        SERVE_GROUP,
        "PORT",
    ),
    Option(
        ("--init-port",),
        "{init_port}, on which the server's ranks find each other (default: port + 1000)",
        store_parsed("serve.init_port", parsers.parse_tcp_port),
        SERVE_GROUP,
        "PORT",
    ),
    Option(
        ("--per",),
        "one server per node, with all its devices, or per device (default: node)",
        store_parsed("serve.per", parsers.choice_parser("node", "device")),
        SERVE_GROUP,
        "UNIT",
    ),
    Option(
        ("--group",),
        "name of the group, {group}; needed if there are several, separated by ':'",
        store_parsed("serve.group", _parse_group),
        SERVE_GROUP,
        "NAME",
    ),
    Option(
        ("--ready",),
        "URL that answers 2xx to GET when the server is ready",
        store_parsed("serve.ready", _parse_url),
        SERVE_GROUP,
        "URL",
    ),
    Option(
        ("--ready-timeout",),
        "a server that is not ready by then has failed (default: 30m)",
        store_parsed("serve.ready_timeout", parsers.parse_duration),
        SERVE_GROUP,
        "TIME",
    ),
    Option(
        ("--health",),
        "URL of /v1/completions or /v1/chat/completions, which must generate a token",
        store_parsed("serve.health", _parse_url),
        SERVE_GROUP,
        "URL",
    ),
    Option(
        ("--health-body",),
        "JSON to POST to --health instead, for other interfaces",
        store_parsed("serve.health_body", _parse_body),
        SERVE_GROUP,
        "JSON",
    ),
    Option(
        ("--health-interval",),
        "time between two health probes (default: 10s)",
        store_parsed("serve.health_interval", parsers.parse_duration),
        SERVE_GROUP,
        "TIME",
    ),
    Option(
        ("--health-timeout",),
        "longest time of one probe (default: 30s)",
        store_parsed("serve.health_timeout", parsers.parse_duration),
        SERVE_GROUP,
        "TIME",
    ),
    Option(
        ("--health-failures",),
        "failed health probes in a row that end the group (default: 3)",
        store_parsed("serve.health_failures", parsers.int_parser(1)),
        SERVE_GROUP,
        "N",
    ),
    Option(
        ("--key-variable",),
        "environment variable with the server's API key, sent as bearer token",
        store_parsed("serve.key_variable", parsers.parse_text),
        SERVE_GROUP,
        "NAME",
    ),
    Option(
        ("--probe-ranks",),
        "ranks whose server is probed (default: 0; all with --per device)",
        store_parsed("serve.probe_ranks", rank_lists.parse_ranks),
        SERVE_GROUP,
        "RANKS",
    ),
)


def check_placeholders(text: str, where: str) -> None:
    """Refuse ``{prot}``; words in braces that resemble no placeholder are the server's own."""
    for word in _WORD_IN_BRACES.findall(text):
        hint = did_you_mean(word, PLACEHOLDERS)
        if word not in PLACEHOLDERS and hint:
            raise UsageError(f"no placeholder {{{word}}}", where=where, hint=hint)


def prober_settings(settings: Sequence[Setting], words: Sequence[str]) -> list[Setting]:
    """
    Return the settings of the program that starts and probes a server.

    Args:
        settings: of SERVE_OPTIONS.
        words: the server's command.

    Raises:
        UsageError: values that are valid alone but not together.
    """
    values = dict(DEFAULTS)
    for setting in settings:
        name = setting.path.removeprefix("serve.")
        earlier = next(one for one in settings if one.path == setting.path)
        if earlier.value != setting.value:
            raise setting.source.make_error(f"contradicts {earlier.source.describe()}")
        values[name] = setting.value
    given = {setting.path.removeprefix("serve."): setting.source for setting in settings}
    _check_health(values)
    for name, source in given.items():
        needs = _needed_option(name)
        if needs and not any(values[need] for need in needs):
            options = " or ".join(f"--{need}" for need in needs)
            raise _error(source, f"applies to probes only: add {options}")
    for word in words:
        check_placeholders(word, "command line")
    values["init_port"] = values["init_port"] or values["port"] + INIT_PORT_OFFSET
    if values["init_port"] > MAX_PORT:
        raise UsageError(f"must be at most {MAX_PORT - INIT_PORT_OFFSET}", where="--port")
    per = values.pop("per")
    probed = values.pop("probe_ranks") or {"node": "0", "device": "all"}[per]
    values["probed"] = _rank_ranges(probed)
    source = Source("pdrun serve", Priority.COMMAND)
    return [
        Setting("program.kind", "command", source),
        Setting("program.prober", json.dumps(values, sort_keys=True), source),
        Setting("program.is_per_node", per == "node", source),
    ]


def _error(source: Source, what: str) -> PdrunError:
    return source.make_error(what)


def _needed_option(name: str) -> tuple[str, ...]:
    """Return the options of which one is needed beside an option."""
    if name.startswith("health_"):
        return ("health",)
    if name in ("ready_timeout", "key_variable", "probe_ranks"):
        return ("ready", "health")
    return ()


def _check_health(values: dict[str, Any]) -> None:
    path = urlsplit(values["health"]).path
    if values["health"] and values["health_body"] is None and not path.endswith(GENERATING_PATHS):
        raise UsageError(
            f"{path or '/'} does not generate: it can answer while the model hangs",
            where="--health",
            hint="use .../v1/completions, or give --health-body for another interface;"
            " --ready takes any URL",
        )


def _rank_ranges(text: str) -> list[tuple[int, int]]:
    if text == "all":
        return [(0, parsers.MAX_COUNT)]
    if text == "none":
        return []
    found = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        found.append((int(low), int(high or low)))
    return found
