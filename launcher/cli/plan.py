"""
``pdrun plan``: search a plan for a number of devices, on a machine without them.

The script runs up to its first call of ``pdrun.parallelize`` as rank 0 of a job that does not
exist. That call prints the plan and ends the script; see `pdrun.parallel.auto.inputs`.

With ``--measure K`` the best plans then run as jobs on this machine, each for a few steps; see
`pdrun.parallel.auto.measure`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.cli.options import CONTEXT_SETTINGS
from pdrun.launcher.plan.environment import remove_launcher_variables

PLAN_VARIABLE = "PDRUN_PLAN"
"""Read by `pdrun.parallel.startup.init` and `pdrun.parallel.auto.inputs`."""
MEASURE_VARIABLE = "PDRUN_MEASURE_PLAN"
"""Read by `pdrun.parallel.auto.measure`."""
MAX_OUTPUT_LINES = 12
"""Last lines of a measured job that failed."""


class PlanCommand(click.Command):
    """
    ``pdrun plan``: its options can also be behind the script.

    A word behind the script that is an option of this command belongs to this command, with its
    value; all other words are the script's, and so is everything behind ``--``.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Move this command's options in front of the script."""
        before, script, behind = self._find_script(ctx, args)
        own, rest = self._split_words(ctx, behind)
        self._check_repeated(ctx, before, own)
        if script:
            script = ["--", *script]  # keeps click from reading the script's words
        return super().parse_args(ctx, [*before, *own, *script, *rest])

    def _find_script(
        self, ctx: click.Context, args: Sequence[str]
    ) -> tuple[list[str], list[str], list[str]]:
        """Return the words before the script, the script if there is one, and those behind it."""
        flags = self._names_by_kind(ctx)
        index = 0
        while index < len(args):
            word = args[index]
            if word == "--":
                return (
                    list(args[:index]),
                    list(args[index + 1 : index + 2]),
                    list(args[index + 2 :]),
                )
            if not word.startswith("-") or word == "-":
                return list(args[:index]), [word], list(args[index + 1 :])
            index += 1 + int(flags.get(word, False))
        return list(args), [], []

    def _names_by_kind(self, ctx: click.Context) -> dict[str, bool]:
        """Return whether an option takes a value, by its spelling."""
        return {
            name: isinstance(param, click.Option) and not param.is_flag
            for param in self.get_params(ctx)
            if isinstance(param, click.Option)
            for name in param.opts
        }

    def _split_words(self, ctx: click.Context, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return this command's words behind the script, and the script's own."""
        takes_value = self._names_by_kind(ctx)
        own: list[str] = []
        rest: list[str] = []
        index = 0
        while index < len(words):
            word = words[index]
            if word == "--":
                return own, [*rest, *words[index + 1 :]]
            name, equals, _ = word.partition("=")
            if name not in takes_value:
                rest.append(word)
                index += 1
                continue
            count = 1 + (takes_value[name] and not equals)
            if index + count > len(words):
                raise click.BadOptionUsage(name, f"Option {name!r} requires an argument.", ctx)
            own += words[index : index + count]
            index += count
        return own, rest

    def _check_repeated(
        self, ctx: click.Context, before: Sequence[str], own: Sequence[str]
    ) -> None:
        """Refuse an option behind the script that is given twice: one may be the script's."""
        several = {
            name
            for param in self.get_params(ctx)
            if isinstance(param, click.Option) and param.multiple
            for name in param.opts
        }
        names = self._names_by_kind(ctx)
        known_before = _option_names(before, names)
        known_own = _option_names(own, names)
        for name in known_own:
            if name in known_before or (known_own.count(name) > 1 and name not in several):
                hint = f"an option of the script's own is behind --: train.py -- {name}"
                raise UsageError("is given twice, once behind the script", where=name, hint=hint)


def _option_names(words: Sequence[str], takes_value: Mapping[str, bool]) -> list[str]:
    """Return the options in words of this command, without their values."""
    found = []
    index = 0
    while index < len(words):
        name, equals, _ = words[index].partition("=")
        found.append(name)
        index += 1 + (takes_value.get(name, False) and not equals)
    return found


def plan_command() -> click.Command:
    """Return ``pdrun plan``."""

    def plan(script: str, args: tuple[str, ...], fix: tuple[str, ...], **options: Any) -> int:
        if options["devices"] is None:
            hint = "for example pdrun plan train.py --devices 64"
            raise UsageError("is missing", where="--devices", hint=hint)
        return plan_script(script, args, parse_fixed(fix), options)

    return PlanCommand(
        "plan",
        callback=plan,
        help=(
            "Search mesh, optimizer level, micro-batches and operators for SCRIPT, which calls"
            " pdrun.parallelize(..., sample=batch). No device is needed, and nothing is computed."
            " Options can be behind SCRIPT too; what the script must get is behind --."
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
                help="Given degrees: tp=8, pp, dp, ep, level, microbatches.",
            ),
            click.Option(
                ["--search"],
                metavar="NAME",
                help="dynamic_programming, recursive_programming or sharding_propagation.",
            ),
            click.Option(["--top"], type=click.IntRange(1), default=10, help="Rows to print."),
            click.Option(
                ["--measure"],
                type=click.IntRange(1),
                metavar="K",
                help="Run the best K plans on this machine's devices, and take the fastest.",
            ),
            click.Option(["--save"], metavar="FILE", help="Write the best plan."),
            click.Argument(["script"], metavar="SCRIPT"),
            click.Argument(["args"], metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED),
        ],
        context_settings={**CONTEXT_SETTINGS, "allow_interspersed_args": False},
    )


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
    with tempfile.TemporaryDirectory(prefix="pdrun-plan-") as name:
        folder = Path(name)
        reached = folder / "reached"
        request = {**options, "fixed": fixed, "reached": str(reached), "folder": str(folder)}
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
        if code == 0 and options.get("measure"):
            return measure_plans(script, args, folder, options)
        return code if code >= 0 else 128 - code


# ---- measured plans ------------------------------------------------------------------------------


@dataclass
class MeasuredPlan:
    """
    A candidate and its measurement.

    Attributes:
        seconds: of a step; None: the job failed.
        code: the job's exit code.
        output: its last lines, if it failed.
    """

    path: Path
    plan: Mapping[str, Any]
    code: int = 0
    seconds: float | None = None
    output: str = ""


def measure_plans(
    script: str, args: Sequence[str], folder: Path, options: Mapping[str, Any]
) -> int:
    """
    Run each plan of a folder as a job on this machine, print a table, and save the fastest plan.

    Returns:
        0, or the exit code of the first job if all failed.
    """
    paths = sorted(folder.glob("plan-*.json"))
    click.echo(f"\nmeasured here, {options['devices']} devices, median of the steps:")
    click.echo("       predicted    measured   ratio  plan")
    found = []
    for number, path in enumerate(paths, 1):
        one = _measure_plan(script, args, path, options)
        found.append(one)
        click.echo(f"{number:3}  {_describe_measured(one)}")
    measured = [one for one in found if one.seconds is not None]
    if not measured:
        return found[0].code or 1
    best = min(measured, key=lambda one: one.seconds or 0.0)
    click.echo(f"fastest: {found.index(best) + 1}, {describe_plan(best.plan)}")
    if options.get("save"):
        plan = {**best.plan, "measured": {"seconds": best.seconds}}
        path = options["save"]
        try:
            Path(path).write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot be written: {error}", where=path) from None
        click.echo(f'saved; run it with parallelize(..., mesh="{path}", strategy="{path}")')
    return 0


def _measure_plan(
    script: str, args: Sequence[str], path: Path, options: Mapping[str, Any]
) -> MeasuredPlan:
    """Run one plan as a job of ``pdrun run``."""
    one = MeasuredPlan(path, json.loads(path.read_text(encoding="utf-8")))
    result = path.with_suffix(".seconds")
    request = {"plan": str(path), "result": str(result), "rows": options["rows"]}
    command = [sys.executable, "-m", "pdrun", "run", "--devices", str(options["devices"])]
    command += ["--env", f"{MEASURE_VARIABLE}={json.dumps(request)}", script, *args]
    environ = remove_launcher_variables(os.environ)[0]
    done = subprocess.run(
        command, env=environ, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    one.code = done.returncode
    if result.exists() and not done.returncode:
        one.seconds = json.loads(result.read_text(encoding="utf-8"))["seconds"]
    else:
        lines = done.stdout.decode(errors="replace").splitlines()
        one.output = "\n".join(lines[-MAX_OUTPUT_LINES:])
    return one


def _describe_measured(one: MeasuredPlan) -> str:
    predicted = one.plan["predicted"]["seconds"]
    text = f"{predicted * 1e3:9,.2f} ms"
    if one.seconds is None:
        plan = describe_plan(one.plan)
        return f"{text}      failed          {plan}; exit code {one.code}:\n{one.output}"
    ratio = one.seconds / predicted
    return f"{text} {one.seconds * 1e3:8,.2f} ms {ratio:7.2f}  {describe_plan(one.plan)}"


def describe_plan(plan: Mapping[str, Any]) -> str:
    """Return degrees and options of a plan file in one line."""
    parts = [f"{axis}={size}" for axis, size in plan["mesh"].items() if size > 1]
    parts += [f"{name}={value}" for name, value in plan["options"].items()]
    parts += [f"{name}={value}" for name, value in (plan["pipeline"] or {}).items()]
    return ", ".join(parts) or "one device"
