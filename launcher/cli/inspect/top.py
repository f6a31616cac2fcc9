"""``pdrun top``."""

from __future__ import annotations

import click

from pdrun.launcher.cli.jobs import complete_job_names, read_scheduler_options, scheduler_options
from pdrun.launcher.cli.options import CONTEXT_SETTINGS


def top_command() -> click.Command:
    """Return ``pdrun top``."""

    def show(job: str | None, scheduler: str | None, token_file: str, insecure: bool) -> int:
        from pdrun.launcher.jobs.views.top import show_top

        return show_top(job, read_scheduler_options(scheduler, token_file, insecure))

    return click.Command(
        "top",
        callback=show,
        help=(
            "Show the running job, or JOB (a name, a run, a prefix, or the folder of its logs), on"
            " a full screen: nodes, ranks, messages, curves, logs. Needs textual."
        ),
        params=[
            click.Argument(
                ["job"], required=False, metavar="[JOB]", shell_complete=complete_job_names
            ),
            *scheduler_options(),
        ],
        context_settings=dict(CONTEXT_SETTINGS),
    )
