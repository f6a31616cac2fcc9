"""``pdrun k8s``: run jobs in Kubernetes, through the user's kubectl."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import click

from pdrun.launcher.cli.clusters.k8s_operator import operator_group
from pdrun.launcher.cli.clusters.k8s_request import MANIFEST_OPTIONS, read_request
from pdrun.launcher.cli.options import (
    CONTEXT_SETTINGS,
    SCRIPT_CONTEXT_SETTINGS,
    SCRIPT_METAVAR,
)
from pdrun.launcher.cli.run import print_warnings
from pdrun.launcher.k8s import manifest
from pdrun.rendezvous.protocol.security import Secret, format_token


def _later(choose: Callable[[ModuleType], Callable[..., int]]) -> Callable[..., int]:
    """Return a callback of `k8s_jobs`, which is imported when it is called."""

    def call(**params: object) -> int:
        from pdrun.launcher.cli.clusters import k8s_jobs

        return choose(k8s_jobs)(**params)

    return call


def k8s_group() -> click.Group:
    """Return ``pdrun k8s``."""
    group = click.Group(
        "k8s",
        help="Run jobs in Kubernetes, one pod per node.",
        context_settings=dict(CONTEXT_SETTINGS),
    )
    script = [click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar=SCRIPT_METAVAR)]
    place = [
        click.Option(["--namespace"], metavar="NAME", default="", help="Namespace."),
        click.Option(["--context"], metavar="NAME", default="", help="Context of kubectl."),
    ]
    job = click.Argument(["name"], metavar="JOB")
    commands: tuple[tuple[str, Callable[..., int], str, Sequence[click.Parameter]], ...] = (
        (
            "status",
            _later(lambda jobs: jobs.print_status),
            "Print the state of a job and its pods, or all jobs.",
            (
                click.Argument(["name"], metavar="[JOB]", required=False, default=""),
                click.Option(["--json"], is_flag=True, help="As JSON."),
                *place,
            ),
        ),
        (
            "logs",
            _later(lambda jobs: jobs.print_logs),
            "Print the output of a job's pods.",
            (
                job,
                click.Option(["--follow", "-f"], is_flag=True, help="Until all pods have ended."),
                click.Option(["--tail"], metavar="N", default="", help="Last lines per pod."),
                click.Option(
                    ["--pod"], metavar="POD", default="", help="Name or index of one pod."
                ),
                *place,
            ),
        ),
        (
            "stop",
            _later(lambda jobs: jobs.stop_job),
            "Delete a job; its workers may save.",
            (job, *place),
        ),
        (
            "env",
            _later(lambda jobs: jobs.print_env),
            "Print what the cluster has for pdrun.",
            place,
        ),
    )
    group.add_command(operator_group())
    for name, callback, text in (
        ("render", render_job, "Print the job's manifests."),
        ("submit", _later(lambda jobs: jobs.submit_job), "Create the job; print its name."),
    ):
        settings = dict(SCRIPT_CONTEXT_SETTINGS)
        group.add_command(
            ManifestCommand(
                name,
                callback=callback,
                help=text,
                params=[*manifest_params(), *script],
                context_settings=settings,
            )
        )
    for name, callback, text, params in commands:
        group.add_command(
            click.Command(
                name,
                callback=callback,
                help=text,
                params=list(params),
                context_settings=dict(CONTEXT_SETTINGS),
            )
        )
    return group


def manifest_params() -> list[click.Parameter]:
    """Return `MANIFEST_OPTIONS` for help and completion; `ManifestCommand` does not parse them."""
    return [
        click.Option([row.name], metavar=row.metavar, help=row.help, multiple=row.is_repeated)
        for row in MANIFEST_OPTIONS
    ]


class ManifestCommand(click.Command):
    """``render`` and ``submit``: their options may stand between those of ``pdrun run``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take every word as it is; only a request for help is click's."""
        if args and args[0] in ("-h", "--help"):
            return super().parse_args(ctx, args)
        ctx.params["words"] = tuple(args)
        return []


def render_job(words: tuple[str, ...]) -> int:
    """Print the manifests of a job, with a new token."""
    request = read_request(words)
    objects = request.make_manifests(format_token(Secret.random()))
    print_warnings(request.warnings)
    sys.stdout.write(manifest.format_manifests(objects))
    return 0
