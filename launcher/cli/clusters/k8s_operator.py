"""``pdrun k8s operator``: what an administrator applies once, and the operator itself."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType

import click

from pdrun.errors import UsageError
from pdrun.launcher.cli.options import CONTEXT_SETTINGS
from pdrun.launcher.cli.run import parse_arguments
from pdrun.launcher.config.resolve import ResolvedSpec
from pdrun.launcher.k8s import options as k8s_options
from pdrun.rendezvous.protocol.security import Secret, format_token


def operator_group() -> click.Group:
    """Return ``pdrun k8s operator``."""
    group = click.Group(
        "operator",
        help="Jobs as objects of their own (PdJob), kept by an operator in the cluster.",
        context_settings=dict(CONTEXT_SETTINGS),
    )
    namespace = click.Option(["--namespace"], metavar="NAME", default="", help="Namespace.")
    group.add_command(
        click.Command(
            "manifest",
            callback=print_manifest,
            help="Print the definition of PdJob, the roles and the operator's deployment.",
            params=[
                namespace,
                click.Option(
                    ["--image"], metavar="IMAGE", default="", help="Image with pdrun; required."
                ),
            ],
            context_settings=dict(CONTEXT_SETTINGS),
        )
    )
    group.add_command(
        click.Command(
            "run",
            callback=run_operator,
            help="Keep the jobs of a namespace until a signal.",
            params=[
                namespace,
                click.Option(["--proxy"], is_flag=True, help="With the login of your kubectl."),
                click.Option(["--context"], metavar="NAME", default="", help="Context of kubectl."),
            ],
            context_settings=dict(CONTEXT_SETTINGS),
        )
    )
    return group


def print_manifest(namespace: str, image: str) -> int:
    """Print what an administrator applies once."""
    from pdrun.launcher.k8s.manifest import format_manifests
    from pdrun.launcher.k8s.operator import crd

    if not image:
        raise UsageError("is missing", where="--image", hint="add --image IMAGE")
    k8s_options.parse_image(image, "--image")
    place = k8s_options.parse_namespace(namespace or "default", "--namespace")
    objects = [
        crd.make_definition(),
        *crd.make_roles(place),
        crd.make_deployment(place, image),
    ]
    sys.stdout.write(format_manifests(objects))
    return 0


def read_run_words(words: Sequence[str]) -> ResolvedSpec:
    """
    Return what ``pdrun run WORDS`` requests in an empty environment.

    Raises:
        PdrunError: the words are wrong, ``spec.run`` is named.
    """
    try:
        return parse_arguments(words).resolved
    except click.ClickException as error:
        raise UsageError(error.format_message(), where="spec.run") from None


def run_operator(namespace: str, proxy: bool, context: str) -> int:
    """Keep the jobs of a namespace until SIGTERM or SIGINT."""
    # urllib and ssl, which no other command of the group needs
    from pdrun.launcher.k8s.operator import api
    from pdrun.launcher.k8s.operator.lease import OperatorLease
    from pdrun.launcher.k8s.operator.loop import OperatorLoop

    place = k8s_options.parse_namespace(namespace or api.own_namespace(), "--namespace")
    if context and not proxy:
        raise UsageError("needs --proxy", where="--context", hint="add --proxy")
    with ExitStack() as stack:
        if proxy:
            found = stack.enter_context(api.proxied_api(place, context))
        else:
            found = api.in_cluster_api(place)
        identity = f"{socket.gethostname()}-{os.getpid()}"
        loop = OperatorLoop(
            found,
            read_run_words,
            lambda: format_token(Secret.random()),
            _report,
            OperatorLease(found, identity),
        )

        def end(number: int, frame: FrameType | None) -> None:
            loop.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        _report(f"keeping the jobs of namespace {place}")
        loop.run()
    return 0


def _report(text: str) -> None:
    print(f"pdrun: operator: {text}", file=sys.stderr, flush=True)
