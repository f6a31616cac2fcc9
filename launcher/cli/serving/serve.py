"""
``pdrun serve``: servers of models, such as vLLM and SGLang, as the workers of a job.

    pdrun serve [OPTIONS] COMMAND [ARGS]
    pdrun serve --group prefill [OPTIONS] COMMAND [ARGS] : --group decode [OPTIONS] COMMAND [ARGS]

Options are those of run, without those about Python, and those of `serve_options`. Each group is a
job, with its own restarts.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import click

from pdrun.errors import UsageError
from pdrun.launcher.adapters.probes import make_probes
from pdrun.launcher.cli.options import (
    CONTEXT_SETTINGS,
    OptionTableCommand,
    click_options,
    settings_from_options,
)
from pdrun.launcher.cli.run import RunRequest, parse_request, run_job
from pdrun.launcher.cli.serving.serve_options import SERVE_OPTIONS, prober_settings
from pdrun.launcher.common.parsers import quote_text
from pdrun.launcher.config.aliases import ALIAS_OPTIONS
from pdrun.launcher.config.run_options import RUN_OPTIONS
from pdrun.launcher.config.settings import Priority, Setting, Source

GROUP_SEPARATOR = ":"
PYTHON_OPTIONS = (
    "-m",
    "--python",
    "--start",
    "--no-warm",
    "--launch-compat",
    "--local-rank-arg",
    "--servers",
)
"""Options of run that have no meaning for a server."""
USAGE = "usage: pdrun serve [OPTIONS] COMMAND [ARGS]; see pdrun serve --help"


def serve_command() -> click.Command:
    """Return ``pdrun serve``."""
    run_rows = tuple(row for row in RUN_OPTIONS if row.names[0] not in PYTHON_OPTIONS)
    command = ServeCommand(
        "serve",
        callback=start_serve,
        help="Run servers of models, such as vLLM or SGLang: probe them, and restart the whole"
        " group if one fails. In COMMAND, ARGS and URLs {rank}, {node_rank}, {nodes}, {devices},"
        " {tp}, {host}, {head}, {port}, {init_port} and {group} are replaced.",
        params=[
            *click_options((*SERVE_OPTIONS, *run_rows)),
            click.Argument(
                ["words"], nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARGS] [: ...]"
            ),
        ],
        context_settings={**CONTEXT_SETTINGS, "allow_interspersed_args": False},
    )
    command.rows = (*SERVE_OPTIONS, *run_rows)
    return command


class ServeCommand(OptionTableCommand):
    """``pdrun serve``; further groups are parsed as command lines of their own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Split the line at ``:`` and parse the first group."""
        first, *others = split_groups(args)
        ctx.obj = [first, *others] if others else []
        return super().parse_args(ctx, list(first))


def split_groups(words: Sequence[str]) -> list[list[str]]:
    """Return the words of each group."""
    groups: list[list[str]] = [[]]
    for word in words:
        if word == GROUP_SEPARATOR:
            groups.append([])
        else:
            groups[-1].append(word)
    return groups


def start_serve(words: tuple[str, ...], **params: Any) -> int:
    """Run the group of a command line, or several groups."""
    lines = click.get_current_context().obj
    if lines:
        return _run_groups(lines)
    more = _server_settings(params, words)
    return run_job(params, words, more)


def _run_groups(lines: Sequence[Sequence[str]]) -> int:
    names: list[str] = []
    requests: list[RunRequest] = []
    for number, line in enumerate(lines):
        name, request = _parse_group(line, number)
        if name in names:
            raise UsageError(f"two groups are called {name}", where="--group")
        names.append(name)
        requests.append(request)
    ports: dict[int, str] = {}
    commands = {}
    for name, line, request in zip(names, lines, requests, strict=True):
        port = read_port(request)
        if port in ports:
            raise UsageError(
                f"groups {ports[port]} and {name} have the port {port}",
                where="--port",
                hint="give each group its own",
            )
        ports[port] = name
        commands[name] = [sys.executable, "-m", "pdrun", "serve", *line]
    from pdrun.launcher.controller.server_groups import run_groups

    return run_groups(commands, one_by_one=requests[0].dry_run)


def read_port(request: RunRequest) -> int:
    """Return the port of a group's first server."""
    return int(json.loads(request.resolved.spec.program.prober)["port"])


def _parse_group(line: Sequence[str], number: int) -> tuple[str, RunRequest]:
    """Parse the line of a group before any group starts."""
    if not line:
        raise UsageError(f"group {number} is empty", where=GROUP_SEPARATOR, hint=USAGE)
    with serve_command().make_context("serve", list(line)) as context:
        params = dict(context.params)
    words = params.pop("words")
    more = _server_settings(params, words)
    name = next((one.value for one in _own_settings(params) if one.path == "serve.group"), "")
    if not name:
        raise UsageError(
            f"group {number} ({quote_text(words[0])}) has no name", hint="add --group NAME"
        )
    return name, parse_request(params, words, os.environ, make_probes(), more=more)


def _own_settings(params: dict[str, Any]) -> list[Setting]:
    return settings_from_options(SERVE_OPTIONS, params)[0]


def _server_settings(params: dict[str, Any], words: Sequence[str]) -> list[Setting]:
    """Return the settings of the server's program."""
    if not words:
        raise UsageError("no server to run", hint=USAGE)
    target = words[0]
    if target.endswith(".py") and not shutil.which(target):
        raise UsageError(
            f"{quote_text(target)} is no executable",
            where="serve",
            hint=f"write python {target}",
        )
    own = _own_settings(params)
    settings = prober_settings(own, words)
    for setting in own:
        if setting.path == "serve.group":
            settings += _name_settings(setting, params)
    return settings


def _name_settings(group: Setting, params: dict[str, Any]) -> list[Setting]:
    """Return settings that name the job after its group, unless the user does."""
    given, _ = settings_from_options((*RUN_OPTIONS, *ALIAS_OPTIONS), params)
    if any(setting.path == "job" for setting in given) or os.environ.get("PDRUN_JOB"):
        return []
    source = Source(group.source.label, Priority.COMMAND, group.source.text)
    return [Setting("job", group.value, source)]
