"""``pdrun mpirun``: the mpirun command that runs pdrun on every host."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

import click

from pdrun import process_setup
from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.adapters import mpirun_command
from pdrun.launcher.cli.clusters.slurm import print_bytes
from pdrun.launcher.cli.options import (
    CONTEXT_SETTINGS,
    SCRIPT_CONTEXT_SETTINGS,
    SCRIPT_METAVAR,
)
from pdrun.launcher.cli.run import parse_arguments
from pdrun.launcher.common import parsers
from pdrun.launcher.config.spec import JobSpec, Program, RemoteOptions
from pdrun.launcher.hosts.hostfile import read_hostfile
from pdrun.launcher.hosts.selection import Host, parse_hosts
from pdrun.launcher.plan import find_launchers


def mpirun_group() -> click.Group:
    """Return ``pdrun mpirun``."""
    group = click.Group(
        "mpirun",
        help="Commands of mpirun that run pdrun on every host.",
        context_settings=dict(CONTEXT_SETTINGS),
    )

    def render(hosts: str, hostfile: str, nodes: str, mpirun: str, words: tuple[str, ...]) -> int:
        command = mpirun_words(hosts, hostfile, nodes, mpirun, words)
        print_bytes(shlex.join(command) + "\n")
        return 0

    group.add_command(
        click.Command(
            "render",
            callback=render,
            help="Print the command, for the mpirun of this machine.",
            params=[
                click.Option(
                    ["--hosts"], metavar="LIST", default="", help="The hosts: a,b, node[01-04]."
                ),
                click.Option(
                    ["--hostfile"],
                    metavar="FILE",
                    default="",
                    help="Hostfile, in any launcher's format.",
                ),
                click.Option(
                    ["--nodes"],
                    metavar="N",
                    default="",
                    help="Number of hosts, if mpirun knows them already.",
                ),
                click.Option(["--mpirun"], metavar="PROGRAM", default="", help="Path of mpirun."),
                click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, metavar=SCRIPT_METAVAR),
            ],
            context_settings=dict(SCRIPT_CONTEXT_SETTINGS),
        )
    )
    return group


def mpirun_words(
    hosts: str, hostfile: str, nodes: str, program: str, words: Sequence[str]
) -> tuple[str, ...]:
    """
    Return an mpirun command whose tasks are ``pdrun``; each reads mpirun's variables.

    Args:
        hosts: value of --hosts.
        hostfile: value of --hostfile.
        nodes: value of --nodes.
        program: value of --mpirun.
        words: the ``pdrun run`` command line.

    Raises:
        UsageError: the number of nodes is missing or contradicts the hosts.
        ConfigError: there is no mpirun.
    """
    listed = _listed_hosts(hosts, hostfile)
    count = _count_nodes(nodes, listed)
    parse_arguments(words)
    spec = JobSpec(Program("script", "-"), reach=RemoteOptions(mpirun=program))
    launcher = find_launchers.find_external_launcher("mpirun", spec, os.environ)
    assert launcher is not None
    if launcher.mpi is None:
        raise ConfigError(launcher.error, where="--mpirun")
    forwarded = (process_setup.TOKEN_VARIABLE,) if process_setup.take_token() is not None else ()
    variables = mpirun_command.mpirun_environment(launcher.mpi)
    command = mpirun_command.build_mpirun_command(
        launcher.mpi,
        listed,
        count,
        forwarded,
        (),
        (sys.executable, "-m", "pdrun", *words),
        root=os.geteuid() == 0,
    )
    if variables:
        return ("env", *(f"{name}={value}" for name, value in variables.items()), *command)
    return tuple(command)


def _listed_hosts(hosts: str, hostfile: str) -> tuple[Host, ...]:
    if hosts and hostfile:
        raise UsageError("--hosts and --hostfile exclude each other", hint="leave one of them out")
    if hostfile:
        return read_hostfile(hostfile, lambda limit: sys.stdin.buffer.read(limit))
    return parse_hosts(hosts, "--hosts") if hosts else ()


def _count_nodes(nodes: str, listed: Sequence[Host]) -> int:
    count = int(parsers.int_parser(1)(nodes, "--nodes")) if nodes else len(listed)
    if not count:
        raise UsageError(
            "the number of nodes is missing", hint="add --hosts, --hostfile or --nodes"
        )
    if listed and count != len(listed):
        raise UsageError(
            f"must be the number of hosts, {len(listed)}, got {count}",
            where="--nodes",
            hint="leave it out",
        )
    return count
