"""
The commands of pdrun as click sees them; each one parses its own words and calls the module that
does the work.

Nothing heavy is imported before a command runs. A first word that is no command belongs to ``run``;
a script that is called like a command is reached by ``pdrun run status``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from pdrun import process_setup
from pdrun.errors import UsageError, did_you_mean
from pdrun.launcher.cli import checkpoint as cli_checkpoint
from pdrun.launcher.cli import help as cli_help
from pdrun.launcher.cli import rank_table as cli_tables
from pdrun.launcher.cli import run as cli_run
from pdrun.launcher.cli import slurm as cli_others
from pdrun.launcher.common import files as paths
from pdrun.launcher.common import parsers
from pdrun.launcher.config.aliases import ALIASES
from pdrun.launcher.config.options import RUN, Option

if TYPE_CHECKING:
    from pdrun.launcher.jobs.remote_scheduler import RemoteScheduler

STRICT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
JOINERS = (
    "--devices",
    "--backend",
    "--threads",
    "--bind",
    "--node-rank",
    "--node-name",
    "--interface",
    "--token-file",
    "--insecure",
    "--start-timeout",
    "--chdir",
    "--python",
    "--log-dir",
    "--log-name",
    "--no-files",
    "--show-ranks",
    "--prefix",
)
"""
Options of run that a joining node may set for itself; the rest is the job's and comes from the
scheduler.
"""


class RunCommand(click.Command):
    """``pdrun run``: its help is made from the tables."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the whole help."""
        cli_help.write_run_help(formatter)


class Commands(click.Group):
    """The group whose default command is run."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put ``run`` in front of what does not begin with a command."""
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help", "--version"):
            _check_typing(args[0], self.commands)
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first screen."""
        formatter.write(cli_help.first_screen())

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Complete commands, and options and files of run."""
        run = self.commands["run"]
        more = run.shell_complete(click.Context(run), incomplete)
        return [*super().shell_complete(ctx, incomplete), *more]


def _check_typing(word: str, commands: Iterable[str]) -> None:
    """Catch a mistyped command before it is taken for the name of a script."""
    near = did_you_mean(word, commands)
    if near and word.isalpha() and not paths.exists(word):
        raise UsageError(f"no such command or file {parsers.quoted(word)}", hint=near)


def build() -> click.Group:
    """Return the whole command line."""
    group = Commands(
        "pdrun", invoke_without_command=True, callback=_bare, context_settings=dict(STRICT)
    )
    group.params.append(
        click.Option(
            ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_version
        )
    )
    jobs = (_status(), _logs(), _stop())
    files = (cli_tables.group(), cli_checkpoint.group())
    others = (*files, cli_others.slurm_group(STRICT), cli_others.mpirun_group(STRICT))
    first = (_run(), _join(), _scheduler(), _relay())
    for command in (*first, *jobs, _warm(), _token(), _env(), *others, _completion(group)):
        group.add_command(command)
    return group


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        import pdrun

        click.echo(f"pdrun {pdrun.__version__} (python {'.'.join(map(str, sys.version_info[:3]))})")
        ctx.exit(0)


@click.pass_context
def _bare(ctx: click.Context) -> int | None:
    if ctx.invoked_subcommand is None:
        sys.stderr.write(cli_help.first_screen())
        return 2
    return None


def _run() -> click.Command:
    def callback(words: tuple[str, ...], **params: Any) -> int:
        return cli_run.run(params, words)

    words = click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, shell_complete=_files)
    return RunCommand(
        "run",
        callback=callback,
        params=[*cli_run.parameters((*RUN, *ALIASES)), words],
        context_settings={**STRICT, "allow_interspersed_args": False},
    )


def _files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


class _Described(click.Command):
    """A command whose options are rows of the tables, shown with the tables' texts."""

    rows: tuple[Option, ...] = ()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the rows, then the options of click's own."""
        with formatter.section("Options"):
            options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
            own = [
                param.get_help_record(ctx)
                for param in options
                if not (param.name or "").startswith("o_")
            ]
            formatter.write_dl(
                cli_help.records(self.rows) + [record for record in own if record], col_max=34
            )


def _join() -> click.Command:
    rows = tuple(row for row in (*RUN, *ALIASES) if row.names[0] in (*JOINERS, "--nproc-per-node"))

    def callback(endpoint: str, **params: Any) -> int:
        from pdrun.launcher.cli import join as cli_join

        return cli_join.join(endpoint, rows, params, os.environ)

    command = _Described(
        "join",
        callback=callback,
        help="Take part in the job whose scheduler answers at HOST:PORT.",
        params=[*cli_run.parameters(rows), click.Argument(["endpoint"], metavar="HOST:PORT")],
        context_settings=dict(STRICT),
    )
    command.rows = rows
    return command


def _scheduler() -> click.Command:
    wanted = (
        "--nodes",
        "--spares",
        "--job",
        "--token-file",
        "--insecure",
        "--start-timeout",
        "--grace",
        "--max-restarts",
        "--restart-window",
        "--restart-on",
        "--no-restart-on",
        "--backoff",
        "--gather",
        "--grow",
        "--on-scheduler-loss",
        "--time-limit",
        "--log-dir",
    )
    rows = tuple(row for row in RUN if row.names[0] in wanted)
    needed = "nodes of the job; needed (MIN:MAX: they may come and go)"
    shown = tuple(replace(row, help=needed) if row.names[0] == "--nodes" else row for row in rows)

    def callback(listen: str, journal: str, **params: Any) -> int:
        from pdrun.launcher.cli import join as cli_join

        return cli_join.scheduler(listen, rows, params, os.environ, journal=journal)

    command = _Described(
        "scheduler",
        callback=callback,
        help="Run a scheduler alone, for nodes that join it.",
        params=[
            *cli_run.parameters(rows),
            click.Option(
                ["--listen"],
                metavar="HOST:PORT",
                default="127.0.0.1:0",
                show_default=True,
                help="One address of this machine; port 0 is chosen by the system.",
            ),
            click.Option(
                ["--journal"],
                metavar="FILE",
                default="",
                help="Keep in FILE what the same command, started again, needs to go on with the job.",
            ),
        ],
        context_settings=dict(STRICT),
    )
    command.rows = shown
    return command


def _relay() -> click.Command:
    wanted = ("--scheduler", "--token-file", "--insecure", "--on-scheduler-loss")
    rows = tuple(row for row in RUN if row.names[0] in wanted)

    def callback(listen: str, **params: Any) -> int:
        from pdrun.launcher.cli import join as cli_join

        return cli_join.relay(listen, rows, params, os.environ)

    command = _Described(
        "relay",
        callback=callback,
        help="Take in the nodes of a large job in the scheduler's place: one relay a rack, say.",
        params=[
            *cli_run.parameters(rows),
            click.Option(
                ["--listen"],
                metavar="HOST:PORT",
                required=True,
                help="One address of this machine, which these nodes are given as their --scheduler.",
            ),
        ],
        context_settings=dict(STRICT),
    )
    command.rows = rows
    return command


def _job_argument() -> click.Argument:
    return click.Argument(["job"], required=False, metavar="[JOB]")


def _remote() -> list[click.Parameter]:
    return [
        click.Option(
            ["--scheduler"],
            metavar="HOST:PORT",
            help="Ask this scheduler instead of this user's list.",
        ),
        click.Option(
            ["--token-file"], metavar="FILE", default="", help="File with the job's token."
        ),
        click.Option(["--insecure"], is_flag=True, help="The scheduler asks for no token."),
    ]


def _reach(scheduler: str | None, token_file: str, insecure: bool) -> RemoteScheduler | None:
    """Return the scheduler to ask; None: this user's own list of jobs."""
    from pdrun.launcher.jobs.remote_scheduler import RemoteScheduler

    if scheduler is None:
        for name, said in (("--token-file", bool(token_file)), ("--insecure", insecure)):
            if said:
                raise UsageError(
                    "is for a scheduler, and none is named",
                    where=name,
                    hint="add --scheduler HOST:PORT",
                )
        return None
    return RemoteScheduler(parsers.endpoint()(scheduler, "--scheduler"), token_file, insecure)


def _status() -> click.Command:
    def callback(
        job: str | None,
        json: bool,
        follow: bool,
        all: bool,
        scheduler: str | None,
        token_file: str,
        insecure: bool,
    ) -> int:
        from pdrun.launcher.jobs.status import show_status

        if all and (job or scheduler):
            raise UsageError(
                "lists every job, and one is named", where="--all", hint="leave one of them out"
            )
        if json and follow:
            raise UsageError(
                "--json prints once, --follow shows a screen", hint="leave one of them out"
            )
        remote = _reach(scheduler, token_file, insecure)
        return show_status(job, as_json=json, follow=follow, all_jobs=all, scheduler=remote)

    return click.Command(
        "status",
        callback=callback,
        help="Show how a job is: the one that runs, or JOB (a name, a run or a prefix).",
        params=[
            _job_argument(),
            click.Option(
                ["-a", "--all"], is_flag=True, help="Every job that is known, not only the newest."
            ),
            click.Option(["--json"], is_flag=True, help="One JSON object a job."),
            click.Option(["-f", "--follow"], is_flag=True, help="Go on until the job has ended."),
            *_remote(),
        ],
        context_settings=dict(STRICT),
    )


def _logs() -> click.Command:
    def callback(
        job: str | None,
        ranks: str,
        generation: str | None,
        follow: bool,
        lines: str | None,
        stdout: bool,
        stderr: bool,
    ) -> int:
        from pdrun.launcher.jobs.logs import print_logs

        count = None if lines is None else int(parsers.whole(0)(lines, "--lines"))
        which = parsers.generation(generation, "--generation") if generation is not None else None
        if stdout and stderr:
            raise UsageError(
                "--stdout and --stderr each show one stream alone", hint="leave both out for both"
            )
        return print_logs(
            job,
            ranks=parsers.ranks(ranks, "--ranks"),
            follow=follow,
            lines=count,
            stdout=not stderr,
            stderr=not stdout,
            generation=which,
        )

    return click.Command(
        "logs",
        callback=callback,
        help="Print what the workers of a job printed.",
        params=[
            _job_argument(),
            click.Option(["--ranks"], default="all", metavar="RANKS", help="all, or 0,7-9."),
            click.Option(
                ["--generation"],
                metavar="N|all",
                help="0 before the first restart; the last by default.",
            ),
            click.Option(["-f", "--follow"], is_flag=True, help="Go on until the job has ended."),
            click.Option(
                ["-n", "--lines"], metavar="N", help="At most N lines of each file's end."
            ),
            click.Option(["--stdout"], is_flag=True, help="Only stdout."),
            click.Option(["--stderr"], is_flag=True, help="Only stderr."),
        ],
        context_settings=dict(STRICT),
    )


def _stop() -> click.Command:
    def callback(
        job: str | None,
        force: bool,
        timeout: str,
        scheduler: str | None,
        token_file: str,
        insecure: bool,
    ) -> int:
        from pdrun.launcher.jobs.stop import stop_job

        remote = _reach(scheduler, token_file, insecure)
        return stop_job(
            job, force=force, timeout=parsers.duration(timeout, "--timeout"), scheduler=remote
        )

    return click.Command(
        "stop",
        callback=callback,
        help="End a job: SIGTERM, then SIGKILL after its grace.",
        params=[
            _job_argument(),
            click.Option(["--force"], is_flag=True, help="No grace for the workers."),
            click.Option(
                ["--timeout"],
                metavar="TIME",
                default="60s",
                show_default=True,
                help="Longest wait.",
            ),
            *_remote(),
        ],
        context_settings=dict(STRICT),
    )


def _warm() -> click.Command:
    """A process that keeps torch imported between jobs."""

    def start(python: str, idle: str) -> int:
        from pdrun.launcher.cli import warm as cli_warm

        return cli_warm.start(python, parsers.duration(idle, "--idle"))

    def status(json: bool) -> int:
        from pdrun.launcher.cli import warm as cli_warm

        return cli_warm.status(json=json)

    def stop(pids: tuple[str, ...]) -> int:
        from pdrun.launcher.cli import warm as cli_warm

        return cli_warm.stop([int(parsers.whole(1)(pid, "warm stop")) for pid in pids])

    group = click.Group(
        "warm",
        help="Keep torch imported between jobs of this node, so that the next one starts at once.",
        context_settings=dict(STRICT),
    )
    python = click.Option(
        ["--python"],
        metavar="PATH",
        default="",
        help="Interpreter of the workers (default: the one that runs pdrun).",
    )
    idle = click.Option(
        ["--idle"],
        metavar="TIME",
        default="30m",
        show_default=True,
        help="Ends after this time without a job.",
    )
    commands: tuple[tuple[str, Callable[..., int], str, list[click.Parameter]], ...] = (
        (
            "start",
            start,
            "Import torch here and stay; nothing happens where that is done already.",
            [python, idle],
        ),
        (
            "status",
            status,
            "Show the warm processes of this user on this node, and whether a job from here uses them.",
            [click.Option(["--json"], is_flag=True, help="One JSON object a process.")],
        ),
        (
            "stop",
            stop,
            "End them, or those named by pid; jobs that run go on.",
            [click.Argument(["pids"], nargs=-1, metavar="[PID]...")],
        ),
    )
    for name, callback, text, params in commands:
        group.add_command(
            click.Command(
                name, callback=callback, help=text, params=params, context_settings=dict(STRICT)
            )
        )
    return group


def _token() -> click.Command:
    """
    A token is the secret itself: it goes into a file of its own, or onto the terminal when that is
    asked for.
    """

    def create(file: str) -> int:
        from pdrun.launcher.cli import token as cli_token

        return cli_token.create(file)

    def show(token_file: str) -> int:
        from pdrun.launcher.cli import token as cli_token

        return cli_token.show(token_file)

    group = click.Group(
        "token", help="The secret that lets nodes into a job.", context_settings=dict(STRICT)
    )
    group.add_command(
        click.Command(
            "create",
            callback=create,
            help="Write a fresh token to FILE (mode 0600), or print it.",
            params=[click.Argument(["file"], required=False, default="", metavar="[FILE]")],
        )
    )
    group.add_command(
        click.Command(
            "show",
            callback=show,
            help="Print the token in use here.",
            params=[
                click.Option(
                    ["--token-file"], metavar="FILE", default="", help="Show this file's token."
                )
            ],
        )
    )
    return group


def _env() -> click.Command:
    def callback(json: bool) -> int:
        from pdrun.launcher.adapters.probes import real
        from pdrun.launcher.cli import env as cli_env

        sys.stdout.write(
            cli_env.report(process_setup.env_with_token(os.environ), real(), as_json=json)
        )
        return 0

    return click.Command(
        "env",
        callback=callback,
        help="Say what this machine and its environment mean to pdrun.",
        params=[click.Option(["--json"], is_flag=True, help="One JSON object.")],
        context_settings=dict(STRICT),
    )


def _completion(group: click.Group) -> click.Command:
    def callback(shell: str) -> int:
        from click.shell_completion import get_completion_class

        kind = get_completion_class(parsers.choice("bash", "zsh", "fish")(shell, "completion"))
        if kind is None:
            raise UsageError(f"no completion for {shell}")
        click.echo(kind(group, {}, "pdrun", "_PDRUN_COMPLETE").source())
        return 0

    return click.Command(
        "completion",
        callback=callback,
        help='Print the shell\'s completion code. For bash: eval "$(pdrun completion bash)" in ~/.bashrc.',
        params=[click.Argument(["shell"], metavar="bash|zsh|fish")],
        context_settings=dict(STRICT),
    )
