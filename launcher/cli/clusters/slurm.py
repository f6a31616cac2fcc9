"""``pdrun slurm``: batch jobs of Slurm that run pdrun on every node."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from pdrun.errors import PdrunError
from pdrun.launcher.cli.options import (
    CONTEXT_SETTINGS,
    SCRIPT_CONTEXT_SETTINGS,
    SCRIPT_METAVAR,
)
from pdrun.launcher.cli.run import parse_arguments, print_warnings
from pdrun.launcher.common import parsers
from pdrun.launcher.jobs import sbatch, sbatch_checks
from pdrun.text import quote_command

_DIRECTIVES = (
    ("--time", "time", "LIMIT", "Time limit in Slurm's format: 1:30:00."),
    ("--partition", "partition", "NAME", "Partition."),
    ("--account", "account", "NAME", "Account."),
    ("--qos", "qos", "NAME", "Quality of service."),
    ("--gpus-per-node", "gpus-per-node", "N", "Accelerators per node."),
    ("--cpus-per-task", "cpus-per-task", "N", "CPUs of each node's agent and workers."),
    ("--mem", "mem", "SIZE", "Memory per node."),
    ("--output", "output", "FILE", "File of the job's output (Slurm's %j: the job's number)."),
)
"""Option, directive, metavar and help of Slurm's directives."""


def slurm_group() -> click.Group:
    """Return ``pdrun slurm``."""
    group = click.Group(
        "slurm",
        help="Batch jobs of Slurm that run pdrun on every node.",
        context_settings=dict(CONTEXT_SETTINGS),
    )

    def render(words: tuple[str, ...], **params: Any) -> int:
        script, missing = make_batch_script(words, params)
        if missing:
            print_warnings([str(missing)])
        print_bytes(script)
        return 0

    def submit(words: tuple[str, ...], **params: Any) -> int:
        script, missing = make_batch_script(words, params)
        if missing:
            raise missing
        job = sbatch.submit_script(script)
        print(
            f"pdrun: submitted job {job}; to see its state: "
            f"{quote_command('pdrun', 'slurm', 'status', job)}",
            file=sys.stderr,
        )
        print(job)
        return 0

    def status(job: str) -> int:
        print(sbatch.describe_job(sbatch.query_job(job)))
        return 0

    def cancel(job: str) -> int:
        sbatch.cancel_job(job)
        return 0

    job = click.Argument(["job"], metavar="JOB")
    strict = dict[str, Any](CONTEXT_SETTINGS)
    commands: tuple[
        tuple[str, Callable[..., int], str, list[click.Parameter], dict[str, Any]], ...
    ] = (
        ("render", render, "Print the batch script.", _batch_params(), SCRIPT_CONTEXT_SETTINGS),
        (
            "submit",
            submit,
            "Submit the batch script; print the job's number.",
            _batch_params(),
            SCRIPT_CONTEXT_SETTINGS,
        ),
        ("status", status, "Print the state of a job.", [job], strict),
        ("cancel", cancel, "Cancel a job; its workers may save.", [job], strict),
    )
    for name, callback, text, params, settings in commands:
        group.add_command(
            click.Command(
                name, callback=callback, help=text, params=params, context_settings=dict(settings)
            )
        )
    return group


def print_bytes(text: str) -> None:
    """
    Print text for a shell: the exact bytes of the arguments, whatever the encoding of stdout is.
    """
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(text))


def _batch_params() -> list[click.Parameter]:
    directives = [
        click.Option([option, _parameter_name(key)], metavar=metavar, default="", help=text)
        for option, key, metavar, text in _DIRECTIVES
    ]
    return [
        click.Option(
            ["--nodes"], metavar="N", default="1", show_default=True, help="Nodes of the job."
        ),
        click.Option(["--name"], metavar="NAME", default="", help="The job's name in Slurm."),
        *directives,
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
            help="Shell line in front of the command: 'module load cuda'.",
        ),
        click.Option(["--no-requeue"], is_flag=True, help="Do not requeue after a node's failure."),
        click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar=SCRIPT_METAVAR),
    ]


def _parameter_name(key: str) -> str:
    return f"d_{key.replace('-', '_')}"


def make_batch_script(
    words: Sequence[str], params: Mapping[str, Any]
) -> tuple[str, PdrunError | None]:
    """
    Return the batch script of a ``pdrun run`` command line, and which of its files is missing.

    The command line is parsed here, so that its errors appear before the job is queued.
    """
    nodes = int(parsers.int_parser(1)(params["nodes"], "--nodes"))
    request = parse_arguments(words)
    directives = []
    for option, key, _, _ in _DIRECTIVES:
        value = params[_parameter_name(key)]
        if value:
            directives.append(sbatch.make_directive(key, value, option))
    for text in params["sbatch"]:
        key, _, value = text.partition("=")
        directives.append(sbatch.make_directive(key, value, "--sbatch"))
    batch = sbatch.BatchJob(
        nodes=nodes,
        name=params["name"],
        directives=tuple(directives),
        grace=request.resolved.spec.policy.grace,
        requeue=not params["no_requeue"],
        setup=params["setup"],
    )
    script = sbatch.render_script(batch, [sys.executable, "-m", "pdrun", *words])
    resolved = request.resolved
    sbatch_checks.check_sizes(batch, resolved.spec, resolved.sources)
    return script, sbatch_checks.find_missing_files(batch, resolved.spec)
