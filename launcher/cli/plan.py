"""
``pdrun plan``: search a plan for a number of devices, on a machine without them.

The script runs up to its first call of ``pdrun.parallelize`` as rank 0 of a job that does not
exist. That call prints the plan and ends the script; see `pdrun.parallel.auto.inputs`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.cli.options import CONTEXT_SETTINGS
from pdrun.launcher.plan.environment import remove_launcher_variables

PLAN_VARIABLE = "PDRUN_PLAN"
"""Read by `pdrun.parallel.startup.init` and `pdrun.parallel.auto.inputs`."""


def plan_command() -> click.Command:
    """Return ``pdrun plan``."""

    def plan(script: str, args: tuple[str, ...], fix: tuple[str, ...], **options: Any) -> int:
        if options["devices"] is None:
            raise UsageError("is missing", where="--devices", hint=_hint_at_devices(args))
        return plan_script(script, args, parse_fixed(fix), options)

    return click.Command(
        "plan",
        callback=plan,
        help=(
            "Search mesh, optimizer level, micro-batches and operators for SCRIPT, which calls"
            " pdrun.parallelize(..., sample=batch). No device is needed, and nothing is computed."
        ),
        params=[
            click.Option(["--devices"], type=click.IntRange(1), help="Of the job."),
            click.Option(
                ["--topology"],
                metavar="NAME|FILE",
                help="cpu, a100x8, h100x8, h200x8, 910bx8, or a file of pdrun doctor.",
            ),
            click.Option(["--memory"], metavar="SIZE", help="Of a device that can be used: 72GiB."),
            click.Option(
                ["--rows"], type=click.IntRange(1), help="Of a step; default: those of the sample."
            ),
            click.Option(
                ["--fix"],
                metavar="NAME=N,..",
                multiple=True,
                help="Given degrees: tp=8, pp, dp, level, microbatches.",
            ),
            click.Option(
                ["--search"],
                metavar="NAME",
                help="dynamic_programming, recursive_programming or sharding_propagation.",
            ),
            click.Option(["--top"], type=click.IntRange(1), default=10, help="Rows to print."),
            click.Option(["--save"], metavar="FILE", help="Write the best plan."),
            click.Argument(["script"], metavar="SCRIPT"),
            click.Argument(["args"], metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED),
        ],
        context_settings={**CONTEXT_SETTINGS, "allow_interspersed_args": False},
    )


def _hint_at_devices(args: tuple[str, ...]) -> str:
    if any(word.partition("=")[0] == "--devices" for word in args):
        return "options of pdrun plan stand before the script; those behind it are the script's"
    return "for example pdrun plan --devices 64 train.py"


def parse_fixed(texts: tuple[str, ...]) -> dict[str, int]:
    """
    Return the degrees of ``tp=8,pp=2``.

    Raises:
        UsageError: a part has another form.
    """
    found = {}
    for part in ",".join(texts).split(",") if texts else ():
        name, separator, value = part.partition("=")
        if not separator or not name or not value.isdecimal():
            what = f"must be NAME=N, got {part!r}"
            raise UsageError(what, where="--fix", hint="for example --fix tp=8,pp=2")
        found[name] = int(value)
    return found


def plan_script(
    script: str, args: tuple[str, ...], fixed: Mapping[str, int], options: Mapping[str, Any]
) -> int:
    """
    Run a script up to its first call of ``pdrun.parallelize`` and return its exit code.

    Raises:
        ConfigError: there is no such script, or it ended without that call.
    """
    if not Path(script).is_file():
        raise ConfigError("no such file", where=script)
    with tempfile.TemporaryDirectory(prefix="pdrun-plan-") as folder:
        reached = Path(folder) / "reached"
        request = {**options, "fixed": fixed, "reached": str(reached)}
        environ = {
            **remove_launcher_variables(os.environ)[0],
            PLAN_VARIABLE: json.dumps(request),
            "RANK": "0",
            "WORLD_SIZE": str(options["devices"]),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }
        code = subprocess.run([sys.executable, script, *args], env=environ, check=False).returncode
        if code == 0 and not reached.exists():
            what = "the script ended without a call of pdrun.parallelize"
            raise ConfigError(what, where=script, hint="pdrun plan needs that call, with sample=")
        return code if code >= 0 else 128 - code
