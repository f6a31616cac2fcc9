"""``pdrun slurm`` and ``pdrun mpirun``: other launchers' jobs and commands that run pdrun."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from pdrun import process_setup
from pdrun.errors import UsageError
from pdrun.launcher.common import parsers

if TYPE_CHECKING:
    from pdrun.launcher.cli.run import Request

_DIRECTIVES = (
    ("--time", "time", "LIMIT", "Time limit, as Slurm writes it: 1:30:00."),
    ("--partition", "partition", "NAME", "Partition."),
    ("--account", "account", "NAME", "Account."),
    ("--qos", "qos", "NAME", "Quality of service."),
    ("--gpus-per-node", "gpus-per-node", "N", "Accelerators of each node."),
    ("--cpus-per-task", "cpus-per-task", "N", "CPUs of each node's agent and workers."),
    ("--mem", "mem", "SIZE", "Memory of each node."),
    ("--output", "output", "FILE", "What the job prints (Slurm's %j is the job's number)."),
)
_LOOSE = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}
_WORDS = "[PDRUN'S OPTIONS] SCRIPT [ARGS]"


def slurm_group(strict: Mapping[str, Any]) -> click.Group:
    """Return ``pdrun slurm``; ``strict`` is the context of commands without words of others."""
    group = click.Group(
        "slurm",
        help="Batch jobs of Slurm that run pdrun on all their nodes.",
        context_settings=dict(strict),
    )

    def render(words: tuple[str, ...], **params: Any) -> int:
        _print_exactly(_script(words, params))
        return 0

    def submit(words: tuple[str, ...], **params: Any) -> int:
        from pdrun.launcher.jobs import sbatch as slurmjobs

        job = slurmjobs.submit(_script(words, params))
        print(
            f"pdrun: job {job} is submitted; pdrun slurm status {job} tells how it is",
            file=sys.stderr,
        )
        print(job)
        return 0

    def status(job: str) -> int:
        from pdrun.launcher.jobs import sbatch as slurmjobs

        print(slurmjobs.status_text(slurmjobs.status(job)))
        return 0

    def cancel(job: str) -> int:
        from pdrun.launcher.jobs import sbatch as slurmjobs

        slurmjobs.cancel(job)
        return 0

    number = click.Argument(["job"], metavar="JOB")
    made: tuple[tuple[str, Any, str, list[click.Parameter], dict[str, Any]], ...] = (
        ("render", render, "Print the batch script.", _batch_params(), _LOOSE),
        ("submit", submit, "Submit it; print the job's number.", _batch_params(), _LOOSE),
        ("status", status, "Say how a job is.", [number], dict(strict)),
        ("cancel", cancel, "End a job; its workers may save.", [number], dict(strict)),
    )
    for name, call, text, params, settings in made:
        group.add_command(
            click.Command(
                name, callback=call, help=text, params=params, context_settings=dict(settings)
            )
        )
    return group


def _print_exactly(text: str) -> None:
    """
    Print what a shell is to run: the very bytes of the arguments, whatever stdout makes of other
    text.
    """
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(text))


def _batch_params() -> list[click.Parameter]:
    return [
        click.Option(
            ["--nodes"], metavar="N", default="1", show_default=True, help="Nodes of the job."
        ),
        click.Option(["--name"], metavar="NAME", default="", help="The job's name in Slurm."),
        *(
            click.Option(
                [option, f"d_{key.replace('-', '_')}"], metavar=metavar, default="", help=text
            )
            for option, key, metavar, text in _DIRECTIVES
        ),
        click.Option(
            ["--sbatch"],
            metavar="KEY=VALUE",
            multiple=True,
            help="Another directive: constraint=a100.",
        ),
        click.Option(
            ["--setup"],
            metavar="LINE",
            multiple=True,
            help="Shell before the command: 'module load cuda'.",
        ),
        click.Option(
            ["--no-requeue"], is_flag=True, help="Do not start again after a node's failure."
        ),
        click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar=_WORDS),
    ]


def _script(words: Sequence[str], params: Mapping[str, Any]) -> str:
    from pdrun.launcher.jobs import sbatch as slurmjobs

    nodes = int(parsers.whole(1)(params["nodes"], "--nodes"))
    asked = _request(words, nodes)
    listed = [
        slurmjobs.directive(key, params[f"d_{key.replace('-', '_')}"], option)
        for option, key, _, _ in _DIRECTIVES
        if params[f"d_{key.replace('-', '_')}"]
    ]
    for text in params["sbatch"]:
        key, _, value = text.partition("=")
        listed.append(slurmjobs.directive(key, value, "--sbatch"))
    batch = slurmjobs.Batch(
        nodes,
        params["name"],
        tuple(listed),
        asked.asked.spec.policy.grace,
        not params["no_requeue"],
        params["setup"],
    )
    return slurmjobs.script(batch, [sys.executable, "-m", "pdrun", *words])


def _request(words: Sequence[str], nodes: int) -> Request:
    """
    Read pdrun's own options now: what is wrong with them is told here and not in an hour, by a job.
    """
    from pdrun.launcher.cli import run as cli_run
    from pdrun.launcher.cli.commands import build

    run = build().commands["run"]
    with run.make_context("run", list(words)) as context:
        params = dict(context.params)
        return cli_run.request(params, params.pop("words"), {})


def mpirun_group(strict: Mapping[str, Any]) -> click.Group:
    """Return ``pdrun mpirun``."""
    group = click.Group(
        "mpirun",
        help="Commands of mpirun that run pdrun on every host.",
        context_settings=dict(strict),
    )

    def render(hosts: str, hostfile: str, nodes: str, mpirun: str, words: tuple[str, ...]) -> int:
        _print_exactly(shlex.join(_mpirun(hosts, hostfile, nodes, mpirun, words)) + "\n")
        return 0

    group.add_command(
        click.Command(
            "render",
            callback=render,
            help="Print the command, for the mpirun that is here.",
            params=[
                click.Option(
                    ["--hosts"], metavar="LIST", default="", help="The hosts: a,b, node[01-04]."
                ),
                click.Option(
                    ["--hostfile"],
                    metavar="FILE",
                    default="",
                    help="File of hosts, in any launcher's grammar.",
                ),
                click.Option(
                    ["--nodes"],
                    metavar="N",
                    default="",
                    help="Their number, where mpirun knows them itself.",
                ),
                click.Option(["--mpirun"], metavar="PROGRAM", default="", help="Which mpirun."),
                click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar=_WORDS),
            ],
            context_settings=dict(_LOOSE),
        )
    )
    return group


def _mpirun(
    hosts: str, hostfile: str, nodes: str, program: str, words: Sequence[str]
) -> tuple[str, ...]:
    """
    Return the command that a user may type: each task is ``pdrun``, which reads the launcher's
    words.
    """
    from pdrun.errors import ConfigError
    from pdrun.launcher.adapters import mpirun_command as mpicommand
    from pdrun.launcher.config.spec import JobSpec, Program, Reach
    from pdrun.launcher.hosts import hostfile as files
    from pdrun.launcher.hosts.selection import parse_hosts
    from pdrun.launcher.plan import find_launchers as starters

    if hosts and hostfile:
        raise UsageError("--hosts and --hostfile both name hosts", hint="leave one of them out")
    listed = parse_hosts(hosts, "--hosts") if hosts else ()
    if hostfile:
        listed = files.read_hostfile(hostfile, lambda limit: sys.stdin.buffer.read(limit))
    count = int(parsers.whole(1)(nodes, "--nodes")) if nodes else len(listed)
    if not count:
        raise UsageError(
            "nothing says how many nodes there are", hint="give --hosts, --hostfile or --nodes"
        )
    if listed and count != len(listed):
        raise UsageError(
            f"{count} node(s), but {len(listed)} host(s) are named",
            where="--nodes",
            hint="leave it out",
        )
    _request(words, count)
    starter = starters.look(
        "mpirun", JobSpec(Program("script", "-"), reach=Reach(mpirun=program)), os.environ
    )
    assert starter is not None
    if starter.mpi is None:
        raise ConfigError(starter.fault, where="--mpirun")
    names = (process_setup.TOKEN_VARIABLE,) if process_setup.take_token() is not None else ()
    env = mpicommand.environment(starter.mpi)
    command = mpicommand.command(
        starter.mpi,
        listed,
        count,
        names,
        (),
        (sys.executable, "-m", "pdrun", *words),
        root=os.geteuid() == 0,
    )
    return (
        *(["env", *(f"{name}={value}" for name, value in env.items())] if env else []),
        *command,
    )
