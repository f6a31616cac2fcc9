"""
The click group of all commands.

A command's module is imported when that command is used. A first argument that is not a command
belongs to ``run``. To run a script named like a command, use ``pdrun run status``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click

from pdrun.errors import UsageError, did_you_mean
from pdrun.launcher.cli import help as cli_help
from pdrun.launcher.cli.options import CONTEXT_SETTINGS
from pdrun.launcher.common import files, parsers


class PdrunGroup(click.Group):
    """All commands of pdrun; the default command is ``run``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert ``run`` in front of arguments that do not start with a command."""
        if args and args[0] not in LOADERS and args[0] not in ("-h", "--help", "--version"):
            _check_typing_error(args, LOADERS)
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return sorted(LOADERS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command; None: no command has that name."""
        if cmd_name in LOADERS and cmd_name not in self.commands:
            self.add_command(LOADERS[cmd_name]())
        return self.commands.get(cmd_name)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first screen."""
        formatter.write(cli_help.first_screen())

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Complete commands, and options and files of ``run``."""
        from click.shell_completion import CompletionItem

        run = self.get_command(ctx, "run")
        assert run is not None
        if incomplete[:1] != "-":
            # Files first: bash forgets what is in front of them, and looks for them if no
            # command fits.
            files = next(param for param in run.params if param.name == "words")
            found = files.shell_complete(click.Context(run), incomplete)
            if os.environ.get("_PDRUN_COMPLETE") != "bash_complete":
                return [*found, *super().shell_complete(ctx, incomplete)]
            # bash shows no descriptions, for which all commands are imported
            names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
            return [*found, *map(CompletionItem, names)]
        more = run.shell_complete(click.Context(run), incomplete)
        return [*super().shell_complete(ctx, incomplete), *more]


COMMAND_HINTS = {
    **dict.fromkeys(("submit", "sbatch", "queue"), "use pdrun slurm submit"),
    **dict.fromkeys(("list", "ls", "ps", "jobs", "show", "squeue"), "use pdrun status"),
    **dict.fromkeys(("cancel", "kill", "abort", "delete", "scancel", "end"), "use pdrun stop"),
    **dict.fromkeys(("log", "tail", "output"), "use pdrun logs"),
    **dict.fromkeys(("launch", "start", "exec"), "use pdrun [OPTIONS] SCRIPT"),
    **dict.fromkeys(("info", "explain", "detect"), "use pdrun env"),
    "man": "use pdrun completion man",
    **dict.fromkeys(("check", "diagnose", "health"), "use pdrun doctor"),
    **dict.fromkeys(("ranktable", "hccl", "rank_table"), "use pdrun rank-table"),
    **dict.fromkeys(("dryrun", "dry-run"), "use pdrun --dry-run SCRIPT"),
    "version": "use pdrun --version",
    "help": "for help use pdrun --help, or pdrun COMMAND --help",
    "convert": "use pdrun translate, or pdrun checkpoint",
    **dict.fromkeys(("kubernetes", "kubectl", "kube", "k8"), "use pdrun k8s"),
    "srun": "use pdrun --launcher srun, or pdrun slurm render",
}
"""Commands that pdrun does not have, as other programs call them, and what to use."""


def _check_typing_error(args: Sequence[str], commands: Iterable[str]) -> None:
    """Report a mistyped or foreign command instead of looking for a script of that name."""
    word = args[0]
    if word.startswith("-") or "." in word or "/" in word or files.path_exists(word):
        return
    what = f"no such command or file {parsers.quote_text(word)}"
    from pdrun.launcher.translate.command_line import hint_at_line, is_launcher

    if is_launcher(word):
        from pdrun.launcher.cli.run import check_translation

        raise UsageError(what, hint=hint_at_line(args, os.environ, check_translation))
    hint = COMMAND_HINTS.get(word)
    if hint is None and word.isalpha():
        import shutil

        # a program, such as true, is no mistyped command: it needs --no-python
        hint = "" if shutil.which(word) else did_you_mean(word, commands)
    if hint:
        raise UsageError(what, hint=hint)


def build_command_line() -> PdrunGroup:
    """Return the group of all commands."""
    group = PdrunGroup(
        "pdrun",
        invoke_without_command=True,
        callback=_show_first_screen,
        context_settings=dict(CONTEXT_SETTINGS),
    )
    version = click.Option(
        ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_print_version
    )
    group.params.append(version)
    return group


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        import pdrun

        python = ".".join(map(str, sys.version_info[:3]))
        click.echo(f"pdrun {pdrun.__version__} (python {python})")
        ctx.exit(0)


@click.pass_context
def _show_first_screen(ctx: click.Context) -> int | None:
    if ctx.invoked_subcommand is None:
        sys.stderr.write(cli_help.first_screen())
        return 2
    return None


# One loader per command. Each imports the module of its command and returns the command.
# --------------------------------------------------------------------------------------------------


def _load_run() -> click.Command:
    from pdrun.launcher.cli.run import run_command

    return run_command()


def _load_serve() -> click.Command:
    from pdrun.launcher.cli.serving.serve import serve_command

    return serve_command()


def _load_join() -> click.Command:
    from pdrun.launcher.cli.join import join_command

    return join_command()


def _load_scheduler() -> click.Command:
    from pdrun.launcher.cli.join import scheduler_command

    return scheduler_command()


def _load_relay() -> click.Command:
    from pdrun.launcher.cli.join import relay_command

    return relay_command()


def _load_status() -> click.Command:
    from pdrun.launcher.cli.jobs import status_command

    return status_command()


def _load_logs() -> click.Command:
    from pdrun.launcher.cli.jobs import logs_command

    return logs_command()


def _load_report() -> click.Command:
    from pdrun.launcher.cli.jobs import report_command

    return report_command()


def _load_top() -> click.Command:
    from pdrun.launcher.cli.inspect.top import top_command

    return top_command()


def _load_attach() -> click.Command:
    from pdrun.launcher.cli.inspect.attach import attach_command

    return attach_command()


def _load_trace() -> click.Command:
    from pdrun.launcher.cli.inspect.attach import trace_command

    return trace_command()


def _load_plot() -> click.Command:
    from pdrun.launcher.cli.inspect.numbers import plot_command

    return plot_command()


def _load_export() -> click.Command:
    from pdrun.launcher.cli.inspect.numbers import export_command

    return export_command()


def _load_stop() -> click.Command:
    from pdrun.launcher.cli.jobs import stop_command

    return stop_command()


def _load_warm() -> click.Command:
    from pdrun.launcher.cli.warm import warm_group

    return warm_group()


def _load_token() -> click.Command:
    from pdrun.launcher.cli.token import token_group

    return token_group()


def _load_env() -> click.Command:
    from pdrun.launcher.cli.env import env_command

    return env_command()


def _load_translate() -> click.Command:
    from pdrun.launcher.cli.env import translate_command

    return translate_command()


def _load_rank_table() -> click.Command:
    from pdrun.launcher.cli.rank_table import rank_table_group

    return rank_table_group()


def _load_plan() -> click.Command:
    from pdrun.launcher.cli.plan import plan_command

    return plan_command()


def _load_doctor() -> click.Command:
    from pdrun.launcher.cli.inspect.doctor import doctor_command

    return doctor_command()


def _load_checkpoint() -> click.Command:
    from pdrun.launcher.cli.checkpoint import checkpoint_group

    return checkpoint_group()


def _load_slurm() -> click.Command:
    from pdrun.launcher.cli.clusters.slurm import slurm_group

    return slurm_group()


def _load_mpirun() -> click.Command:
    from pdrun.launcher.cli.mpirun import mpirun_group

    return mpirun_group()


def _load_k8s() -> click.Command:
    from pdrun.launcher.cli.clusters.k8s import k8s_group

    return k8s_group()


def _load_completion() -> click.Command:
    from pdrun.launcher.cli.inspect.completion import completion_command

    return completion_command()


LOADERS: Mapping[str, Callable[[], click.Command]] = {
    "run": _load_run,
    "serve": _load_serve,
    "join": _load_join,
    "scheduler": _load_scheduler,
    "relay": _load_relay,
    "status": _load_status,
    "logs": _load_logs,
    "top": _load_top,
    "attach": _load_attach,
    "trace": _load_trace,
    "report": _load_report,
    "plot": _load_plot,
    "export": _load_export,
    "stop": _load_stop,
    "warm": _load_warm,
    "token": _load_token,
    "env": _load_env,
    "translate": _load_translate,
    "rank-table": _load_rank_table,
    "checkpoint": _load_checkpoint,
    "plan": _load_plan,
    "doctor": _load_doctor,
    "slurm": _load_slurm,
    "k8s": _load_k8s,
    "mpirun": _load_mpirun,
    "completion": _load_completion,
}
"""Name of a command and the function that imports it."""
