"""``pdrun status``, ``pdrun logs``, ``pdrun report`` and ``pdrun stop``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pdrun.errors import UsageError
from pdrun.launcher.cli.options import CONTEXT_SETTINGS
from pdrun.launcher.common import parsers, rank_lists

if TYPE_CHECKING:
    from pdrun.launcher.jobs.remote_scheduler import RemoteScheduler


def _job_argument() -> click.Argument:
    return click.Argument(
        ["job"], required=False, metavar="[JOB]", shell_complete=complete_job_names
    )


def complete_job_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    """Complete the names of this user's jobs."""
    from pdrun.launcher.cli.inspect.values import complete_jobs

    return complete_jobs(incomplete)


def _complete_ranks(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    from pdrun.launcher.cli.inspect.values import complete_ranks

    return complete_ranks(ctx.params.get("job"), incomplete)


def _follow_option() -> click.Option:
    return click.Option(["-f", "--follow"], is_flag=True, help="Continue until the job has ended.")


def scheduler_options() -> list[click.Parameter]:
    """Return the options that name a scheduler to ask."""
    return [
        click.Option(
            ["--scheduler"],
            metavar="HOST:PORT",
            help="Ask this scheduler instead of this user's list of jobs.",
        ),
        click.Option(
            ["--token-file"], metavar="FILE", default="", help="File with the job's token."
        ),
        click.Option(["--insecure"], is_flag=True, help="The scheduler requires no token."),
    ]


def read_scheduler_options(
    scheduler: str | None, token_file: str, insecure: bool
) -> RemoteScheduler | None:
    """Return the scheduler to ask; None: this user's list of jobs."""
    from pdrun.launcher.jobs.remote_scheduler import RemoteScheduler

    if scheduler is None:
        for name, is_given in (("--token-file", bool(token_file)), ("--insecure", insecure)):
            if is_given:
                raise UsageError(
                    "requires --scheduler", where=name, hint="add --scheduler HOST:PORT"
                )
        return None
    return RemoteScheduler(
        parsers.endpoint_parser()(scheduler, "--scheduler"), token_file, insecure
    )


def status_command() -> click.Command:
    """Return ``pdrun status``."""

    def show_status(
        job: str | None,
        json: bool,
        follow: bool,
        all: bool,
        scheduler: str | None,
        token_file: str,
        insecure: bool,
    ) -> int:
        from pdrun.launcher.jobs import status

        if all and (job or scheduler):
            raise UsageError(
                "lists every job and takes no JOB or --scheduler",
                where="--all",
                hint="leave one of them out",
            )
        if json and follow:
            raise UsageError("--json and --follow exclude each other", hint="leave one of them out")
        remote = read_scheduler_options(scheduler, token_file, insecure)
        return status.show_status(job, as_json=json, follow=follow, all_jobs=all, scheduler=remote)

    return click.Command(
        "status",
        callback=show_status,
        help=(
            "Show the status of the running job, or of JOB (a name, a run, a prefix, or the folder"
            " of its logs)."
        ),
        params=[
            _job_argument(),
            click.Option(
                ["-a", "--all"], is_flag=True, help="All known jobs, not only the newest."
            ),
            click.Option(["--json"], is_flag=True, help="One JSON object per job."),
            _follow_option(),
            *scheduler_options(),
        ],
        context_settings=dict(CONTEXT_SETTINGS),
    )


def logs_command() -> click.Command:
    """Return ``pdrun logs``."""

    def print_logs(
        job: str | None,
        ranks: str,
        generation: str | None,
        follow: bool,
        lines: str | None,
        stdout: bool,
        stderr: bool,
    ) -> int:
        from pdrun.launcher.jobs import logs

        count = None
        if lines is not None:
            count = int(parsers.int_parser(0)(lines, "--lines"))
        which = None
        if generation is not None:
            which = parsers.parse_generation(generation, "--generation")
        if stdout and stderr:
            raise UsageError(
                "--stdout and --stderr exclude each other", hint="leave both out to see both"
            )
        return logs.print_logs(
            job,
            ranks=rank_lists.parse_ranks(ranks, "--ranks"),
            follow=follow,
            lines=count,
            stdout=not stderr,
            stderr=not stdout,
            generation=which,
        )

    return click.Command(
        "logs",
        callback=print_logs,
        help="Print the output of a job's workers.",
        params=[
            _job_argument(),
            click.Option(
                ["--ranks"],
                default="all",
                metavar="RANKS",
                help="all, or 0,7-9.",
                shell_complete=_complete_ranks,
            ),
            click.Option(
                ["--generation"],
                metavar="N|all",
                help="0 is before the first restart; default: the last.",
            ),
            _follow_option(),
            click.Option(["-n", "--lines"], metavar="N", help="At most the last N lines per file."),
            click.Option(["--stdout"], is_flag=True, help="Only stdout."),
            click.Option(["--stderr"], is_flag=True, help="Only stderr."),
        ],
        context_settings=dict(CONTEXT_SETTINGS),
    )


def report_command() -> click.Command:
    """Return ``pdrun report``."""

    def write_report(job: str | None, output: str) -> int:
        from pdrun.launcher.jobs import report

        return report.write_report(job, output)

    return click.Command(
        "report",
        callback=write_report,
        help=(
            "Write a page about the newest job, or about JOB (a name, a run, a prefix, or the "
            "folder of its logs): what failed, when, on which node."
        ),
        params=[
            _job_argument(),
            click.Option(
                ["-o", "--output"],
                metavar="FILE",
                default="",
                help="HTML file; default: RUN.html; -: stdout.",
            ),
        ],
        context_settings=dict(CONTEXT_SETTINGS),
    )


def stop_command() -> click.Command:
    """Return ``pdrun stop``."""

    def stop_job(
        job: str | None,
        force: bool,
        timeout: str,
        scheduler: str | None,
        token_file: str,
        insecure: bool,
    ) -> int:
        from pdrun.launcher.jobs import stop

        remote = read_scheduler_options(scheduler, token_file, insecure)
        seconds = parsers.parse_duration(timeout, "--timeout")
        return stop.stop_job(job, force=force, timeout=seconds, scheduler=remote)

    return click.Command(
        "stop",
        callback=stop_job,
        help="Stop a job: SIGTERM, then SIGKILL after its grace time.",
        params=[
            _job_argument(),
            click.Option(["--force"], is_flag=True, help="No grace time for the workers."),
            click.Option(
                ["--timeout"],
                metavar="TIME",
                default="60s",
                show_default=True,
                help="Longest time to wait.",
            ),
            *scheduler_options(),
        ],
        context_settings=dict(CONTEXT_SETTINGS),
    )
