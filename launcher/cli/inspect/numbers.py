"""``pdrun plot`` and ``pdrun export``."""

from __future__ import annotations

import click

from pdrun.launcher.cli.jobs import complete_job_names
from pdrun.launcher.cli.options import CONTEXT_SETTINGS
from pdrun.launcher.common import parsers

KINDS = ("csv", "json", "tensorboard")


def _complete_kinds(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [kind for kind in KINDS if kind.startswith(incomplete)]


def plot_command() -> click.Command:
    """Return ``pdrun plot``."""

    def plot(jobs: tuple[str, ...], output: str, values: str, pipeline: bool) -> int:
        from pdrun.launcher.jobs.views import numbers

        if pipeline:
            return numbers.write_pipeline(jobs, output, values)
        names = [name.strip() for name in values.split(",") if name.strip()]
        return numbers.write_plot(jobs, output, names)

    return click.Command(
        "plot",
        callback=plot,
        help=(
            "Draw the numbers that the newest job, or each JOB (a name, a run, a prefix, or the"
            " folder of its logs), has reported with its steps."
        ),
        params=[
            click.Argument(
                ["jobs"], metavar="[JOB]...", nargs=-1, shell_complete=complete_job_names
            ),
            click.Option(
                ["-o", "--output"],
                metavar="FILE",
                default="",
                help=".svg or .png; default: RUN.svg; -: SVG on stdout.",
            ),
            click.Option(
                ["--values"], metavar="NAMES", default="", help="loss,lr; default: all numbers."
            ),
            click.Option(
                ["--pipeline"],
                is_flag=True,
                help="Draw the order of forwards and backwards of a pipeline's stages instead.",
            ),
        ],
        context_settings=dict(CONTEXT_SETTINGS),
    )


def export_command() -> click.Command:
    """Return ``pdrun export``."""

    def export(job: str | None, to: str, output: str) -> int:
        from pdrun.launcher.jobs.views import numbers

        kind = parsers.choice_parser(*KINDS)(to, "--to")
        return numbers.export_numbers(job, kind, output)

    return click.Command(
        "export",
        callback=export,
        help="Write the numbers that the newest job, or JOB, has reported, for other programs.",
        params=[
            click.Argument(
                ["job"], required=False, metavar="[JOB]", shell_complete=complete_job_names
            ),
            click.Option(
                ["--to"],
                metavar="FORMAT",
                required=True,
                help="csv, json (lines) or tensorboard.",
                shell_complete=_complete_kinds,
            ),
            click.Option(
                ["-o", "--output"],
                metavar="FILE",
                default="",
                help="File, or folder for tensorboard; default: stdout, or RUN-tensorboard.",
            ),
        ],
        context_settings=dict(CONTEXT_SETTINGS),
    )
