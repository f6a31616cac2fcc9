"""``pdrun attach`` and ``pdrun trace``: a look into a job that runs."""

from __future__ import annotations

import click

from pdrun.errors import UsageError
from pdrun.launcher.cli.jobs import complete_job_names
from pdrun.launcher.cli.options import CONTEXT_SETTINGS
from pdrun.launcher.common import parsers

MAX_STEPS = 1_000
DEFAULT_LINES = 10


def attach_command() -> click.Command:
    """Return ``pdrun attach``."""

    def attach(target: str | None, stacks: bool, debug: bool, lines: str | None) -> int:
        from pdrun.launcher.jobs.views import attach

        if stacks + debug + (lines is not None) > 1:
            raise UsageError("--stacks, --debug and --lines exclude each other")
        if stacks:
            return attach.print_stacks(target)
        if debug:
            return attach.debug_rank(target)
        count = DEFAULT_LINES
        if lines is not None:
            count = int(parsers.int_parser(0)(lines, "--lines"))
        return attach.follow_output(target, count)

    return click.Command(
        "attach",
        callback=attach,
        help=(
            "Show the output of the running job, or of JOB, from now on; Ctrl-C leaves the job"
            " running. JOB:3 or :0,4-7 shows some ranks."
        ),
        params=[
            click.Argument(
                ["target"],
                required=False,
                metavar="[JOB[:RANKS]]",
                shell_complete=complete_job_names,
            ),
            click.Option(
                ["--stacks"], is_flag=True, help="Print where the workers on this host are."
            ),
            click.Option(
                ["--debug"], is_flag=True, help="Debug a rank that waits in pdrun.breakpoint."
            ),
            click.Option(
                ["-n", "--lines"],
                metavar="N",
                help="At first the last N lines per file; default: 10.",
            ),
        ],
        context_settings=dict(CONTEXT_SETTINGS),
    )


def trace_command() -> click.Command:
    """Return ``pdrun trace``."""

    def trace(job: str | None, steps: int, output: str, timeout: str) -> int:
        from pdrun.launcher.jobs.views.trace import write_trace

        return write_trace(job, steps, output, parsers.parse_duration(timeout, "--timeout"))

    return click.Command(
        "trace",
        callback=trace,
        help=(
            "Profile the next steps of the running job, or of JOB, in all its workers on this host,"
            " and write one file for https://ui.perfetto.dev. The loop must use pdrun.progress or"
            " a pdrun.Run."
        ),
        params=[
            click.Argument(
                ["job"], required=False, metavar="[JOB]", shell_complete=complete_job_names
            ),
            click.Option(
                ["--steps"], type=click.IntRange(1, MAX_STEPS), default=3, show_default=True
            ),
            click.Option(
                ["-o", "--output"], metavar="FILE", default="", help="Default: RUN-trace.json."
            ),
            click.Option(
                ["--timeout"],
                metavar="TIME",
                default="60s",
                show_default=True,
                help="Longest wait.",
            ),
        ],
        context_settings=dict(CONTEXT_SETTINGS),
    )
