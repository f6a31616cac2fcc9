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

    def trace(
        job: str | None,
        steps: int,
        output: str,
        timeout: str,
        all: bool,
        connect: str,
        part: str,
    ) -> int:
        from pdrun.launcher.jobs.views.trace import serve_trace_part, write_trace

        if part:
            return serve_trace_part(part)
        seconds = parsers.parse_duration(timeout, "--timeout")
        if connect and "{node}" not in connect:
            hint = "for example --connect 'kubectl exec --stdin {node} --'"
            raise UsageError("must contain {node}", where="--connect", hint=hint)
        return write_trace(job, steps, output, seconds, connect=connect if all or connect else None)

    return click.Command(
        "trace",
        callback=trace,
        help=(
            "Profile the next steps of the running job, or of JOB, in all its workers on this host"
            " (--all: on all nodes), and write one file for https://ui.perfetto.dev. The loop must"
            " use pdrun.progress or a pdrun.Run."
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
            click.Option(["--all"], is_flag=True, help="Also workers of other nodes, over ssh."),
            click.Option(
                ["--connect"],
                metavar="COMMAND",
                default="",
                help="In place of ssh: 'kubectl exec --stdin {node} --'.",
            ),
            click.Option(["--part"], default="", hidden=True),
        ],
        context_settings=dict(CONTEXT_SETTINGS),
    )
