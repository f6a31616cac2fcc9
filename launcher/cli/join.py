"""``pdrun join``, ``pdrun scheduler`` and ``pdrun relay``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdrun import async_writer
from pdrun.errors import UsageError
from pdrun.launcher.cli.options import (
    CONTEXT_SETTINGS,
    OptionTableCommand,
    click_options,
    settings_from_options,
)
from pdrun.launcher.cli.run import warn_of_unknown_variables
from pdrun.launcher.common import parsers
from pdrun.launcher.config.aliases import ALIAS_OPTIONS
from pdrun.launcher.config.options import Option
from pdrun.launcher.config.run_options import RUN_OPTIONS, SCHEDULER_OPTIONS
from pdrun.launcher.config.settings import read_environment, resolve_conflicts
from pdrun.launcher.config.spec import Policy, Resources

if TYPE_CHECKING:
    from pdrun.rendezvous.clients.dynamic import DynamicSpec
    from pdrun.rendezvous.protocol.events import SchedulerConfig

JOIN_OPTIONS = (
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
Options of run that a joining node may set for itself. The scheduler sends the other values.
"""
DEFAULT_LISTEN = "127.0.0.1:0"
RELAY_OPTIONS = ("--scheduler", "--token-file", "--insecure", "--on-scheduler-loss")


def join_command() -> click.Command:
    """Return ``pdrun join``."""
    names = (*JOIN_OPTIONS, "--nproc-per-node")
    rows = tuple(row for row in (*RUN_OPTIONS, *ALIAS_OPTIONS) if row.names[0] in names)

    def join(endpoint: str, **params: Any) -> int:
        return join_job(endpoint, rows, params, os.environ)

    command = OptionTableCommand(
        "join",
        callback=join,
        help="Join the job whose scheduler listens on HOST:PORT.",
        params=[*click_options(rows), click.Argument(["endpoint"], metavar="HOST:PORT")],
        context_settings=dict(CONTEXT_SETTINGS),
    )
    command.rows = rows
    return command


def scheduler_command() -> click.Command:
    """Return ``pdrun scheduler``."""
    rows = tuple(row for row in RUN_OPTIONS if row.names[0] in SCHEDULER_OPTIONS)

    def scheduler(listen: str, journal: str, **params: Any) -> int:
        return run_scheduler(listen, rows, params, os.environ, journal=journal)

    command = OptionTableCommand(
        "scheduler",
        callback=scheduler,
        help="Run only a scheduler; nodes join it. With PDRUN_ROLE=scheduler or MS_ROLE=MS_SCHED,"
        " address and number of workers are those of the dynamic cluster's variables.",
        params=[
            *click_options(rows),
            click.Option(
                ["--listen"],
                metavar="HOST:PORT",
                default="",
                help="An address of this machine; the system chooses the port if it is 0."
                f" Default: {DEFAULT_LISTEN}.",
            ),
            click.Option(
                ["--journal"],
                metavar="FILE",
                default="",
                help="Recovery file: the same command, started again, resumes the job from it.",
            ),
        ],
        context_settings=dict(CONTEXT_SETTINGS),
    )
    command.rows = tuple(_required_nodes(row) for row in rows)
    return command


def _required_nodes(row: Option) -> Option:
    """Return the row as the scheduler's help shows it: --nodes has no default there."""
    if row.names[0] == "--nodes":
        return replace(row, help="nodes of the job; required (MIN:MAX: an elastic job)")
    return row


def relay_command() -> click.Command:
    """Return ``pdrun relay``."""
    rows = tuple(row for row in RUN_OPTIONS if row.names[0] in RELAY_OPTIONS)

    def relay(listen: str, **params: Any) -> int:
        return run_relay(listen, rows, params, os.environ)

    command = OptionTableCommand(
        "relay",
        callback=relay,
        help="Accept the nodes of a large job for its scheduler: for example one relay per rack.",
        params=[
            *click_options(rows),
            click.Option(
                ["--listen"],
                metavar="HOST:PORT",
                required=True,
                help="An address of this machine; its nodes use it as their --scheduler.",
            ),
        ],
        context_settings=dict(CONTEXT_SETTINGS),
    )
    command.rows = rows
    return command


def resolve_options(
    rows: Sequence[Option], params: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """
    Return field path -> value and field path -> source, from these options and their variables.
    """
    settings, _ = settings_from_options(rows, params)
    warn_of_unknown_variables(environ)
    names = {name for row in rows for name in row.env}
    used = {name: value for name, value in environ.items() if name in names}
    variables, _ = read_environment(used)
    resolved, _ = resolve_conflicts([*settings, *variables])
    values = {path: setting.value for path, setting in resolved.items()}
    sources = {path: setting.source.label for path, setting in resolved.items()}
    return values, sources


def join_job(
    endpoint: str, rows: Sequence[Option], params: Mapping[str, Any], environ: Mapping[str, str]
) -> int:
    """
    Join the job at ``endpoint``; return its exit code.

    Values given on this node override those that the scheduler sends.
    """
    scheduler = parsers.endpoint_parser()(endpoint, "join")
    if scheduler.port == 0:
        raise UsageError(
            "the port must not be 0", where="join", hint="use the port that the scheduler printed"
        )
    overrides, sources = resolve_options(rows, params, environ)
    from pdrun.launcher.launch.join import execute_join

    return int(execute_join(scheduler, overrides, sources))


def run_scheduler(
    listen: str,
    rows: Sequence[Option],
    params: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    journal: str = "",
) -> int:
    """
    Serve one job at ``listen`` until it ends. The first node sends the job's specification.

    With the variables of a dynamic cluster's scheduler, serve that cluster; options have priority.

    Args:
        listen: ``HOST:PORT``, an address of this machine; empty: the cluster's, or DEFAULT_LISTEN.
        rows: the command's rows in the table of options.
        params: the options, as click parsed them.
        environ: the environment variables to use.
        journal: recovery file. A job recorded in it is resumed; empty: no recovery.
    """
    cluster = _read_cluster(environ)
    if cluster is not None:
        listen = listen or str(cluster.scheduler)
        journal = journal or cluster.journal
    endpoint = parsers.endpoint_parser()(listen or DEFAULT_LISTEN, "--listen")
    if journal and not endpoint.port:
        raise UsageError(
            "requires a fixed address", where="--journal", hint="add --listen HOST:PORT"
        )
    parsers.parse_interface(endpoint.host, "--listen")
    values, sources = resolve_options(rows, params, environ)
    if cluster is not None:
        values.setdefault("job", cluster.job)
        values.setdefault("policy.start_timeout", cluster.timeout)
        values.setdefault("policy.max_restarts", cluster.max_restarts)
        if "resources.nodes" not in values:
            values["resources.nodes"] = cluster.workers
    if "resources.nodes" not in values:
        raise UsageError("is required: the number of nodes of the job", where="--nodes")
    from pdrun.launcher.jobs.run_record import with_source
    from pdrun.rendezvous.clients.dynamic import describe_worker_start, prepare_journal
    from pdrun.rendezvous.journal.recovery import adopt_run_name
    from pdrun.rendezvous.protocol.security import find_secret
    from pdrun.rendezvous.scheduler.standalone import serve_standalone

    insecure = bool(values.get("place.insecure", False))
    with with_source(sources.get("place.token_file", "")):
        secret = None if insecure else find_secret(values.get("place.token_file", ""))[0]
    config = _scheduler_config(values)
    how_to_join = ""
    if cluster is not None:
        config = replace(config, unit="worker")
        how_to_join = describe_worker_start(replace(cluster, workers=config.nodes))
    journal_path = prepare_journal(journal)
    config = adopt_run_name(config, journal_path)
    events_path = None
    if values.get("output.log_dir"):
        events_path = Path(values["output.log_dir"]) / config.run / "events.jsonl"
    return int(
        serve_standalone(
            config,
            secret,
            endpoint,
            insecure=insecure,
            events_path=events_path,
            how_to_join=how_to_join,
            journal=journal_path,
        )
    )


def _read_cluster(environ: Mapping[str, str]) -> DynamicSpec | None:
    """Return the dynamic cluster whose scheduler this process is, by its variables."""
    if environ.get("PDRUN_ROLE") != "scheduler" and environ.get("MS_ROLE") != "MS_SCHED":
        return None
    from pdrun.rendezvous.clients.dynamic import from_environ

    return from_environ(environ)


def _scheduler_config(values: Mapping[str, Any]) -> SchedulerConfig:
    """Return the scheduler's configuration from field path -> value."""
    from pdrun.launcher.jobs.run_record import make_membership_config

    groups: dict[str, dict[str, Any]] = {"resources": {}, "policy": {}}
    for path, value in values.items():
        group, _, name = path.partition(".")
        groups.setdefault(group, {})[name] = value
    job = values.get("job", "")
    return make_membership_config(
        Resources(**groups["resources"]),
        Policy(**groups["policy"]),
        job=job,
        run=unique_run_name(job),
        host=os.uname().nodename,
    )


def unique_run_name(job: str) -> str:
    """
    Return a unique name of a run that is valid in a path.

    It consists of the job, the time in seconds and four random digits.
    """
    return f"{job[:40] or 'job'}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"


def run_relay(
    listen: str, rows: Sequence[Option], params: Mapping[str, Any], environ: Mapping[str, str]
) -> int:
    """Forward the connections of nodes at ``listen`` to a scheduler until the job has ended."""
    endpoint = parsers.endpoint_parser()(listen, "--listen")
    parsers.parse_interface(endpoint.host, "--listen")
    values, sources = resolve_options(rows, params, environ)
    if not values.get("scheduler.host") or not values.get("scheduler.port"):
        raise UsageError(
            "is required: the scheduler of the relay's nodes", where="--scheduler HOST:PORT"
        )
    from pdrun.endpoint import Endpoint
    from pdrun.launcher.jobs.run_record import with_source
    from pdrun.rendezvous.protocol.security import find_secret
    from pdrun.rendezvous.scheduler.relay_main import serve_standalone_relay

    secret = None
    with with_source(sources.get("place.token_file", "")):
        if not values.get("place.insecure"):
            secret = find_secret(values.get("place.token_file", ""))[0]
    patience = values.get("policy.scheduler_loss", Policy().scheduler_loss)
    scheduler = Endpoint(values["scheduler.host"], values["scheduler.port"])
    try:
        return serve_standalone_relay(
            scheduler, endpoint, secret, patience=patience, show_line=async_writer.write_message
        )
    finally:
        async_writer.flush_messages()
