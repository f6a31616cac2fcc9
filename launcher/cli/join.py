"""``pdrun join`` and ``pdrun scheduler``: from their words to the calls that do the work."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdrun import async_writer
from pdrun.errors import UsageError
from pdrun.launcher.cli.run import from_command_line, warn_of_strangers
from pdrun.launcher.common import parsers
from pdrun.launcher.config.options import Option
from pdrun.launcher.config.settings import from_environment, settle
from pdrun.launcher.config.spec import Policy, Resources


def wishes(
    rows: Sequence[Option], params: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """
    Return field path -> value, and field path -> source, of what was said with these options or
    their twins.
    """
    said, _ = from_command_line(rows, params)
    warn_of_strangers(environ)
    twins = {name for row in rows for name in row.env}
    around, _ = from_environment({name: value for name, value in environ.items() if name in twins})
    settled, _ = settle([*said, *around])
    return (
        {path: wish.value for path, wish in settled.items()},
        {path: wish.source.label for path, wish in settled.items()},
    )


def join(
    endpoint: str, rows: Sequence[Option], params: Mapping[str, Any], environ: Mapping[str, str]
) -> int:
    """
    Join the job at ``endpoint``; what was said here counts before what the scheduler hands over.
    """
    where = parsers.endpoint()(endpoint, "join")
    if where.port == 0:
        raise UsageError(
            "nobody answers on port 0",
            where="join",
            hint="give the port that the scheduler printed",
        )
    overrides, sources = wishes(rows, params, environ)
    from pdrun.launcher.launch.join import execute_join

    return int(execute_join(where, overrides, sources))


def scheduler(
    listen: str,
    rows: Sequence[Option],
    params: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    journal: str = "",
) -> int:
    """
    Serve one job at ``listen`` until it ends; the job's specification comes with the first node.

    With ``journal``, a file: go on with the job that it tells of, or keep in it what a later call
    needs for that.
    """
    endpoint = parsers.endpoint()(listen, "--listen")
    if journal and not endpoint.port:
        raise UsageError(
            "needs an address that stays",
            where="--journal",
            hint="give one, with a port: --listen HOST:PORT",
        )
    parsers.interface(endpoint.host, "--listen")
    said, sources = wishes(rows, params, environ)
    if "resources.nodes" not in said:
        raise UsageError(
            "is needed: a scheduler cannot guess how many nodes will come", where="--nodes"
        )
    from pdrun.launcher.jobs.run_record import blamed, membership
    from pdrun.rendezvous.journal.recovery import of_same_run
    from pdrun.rendezvous.protocol.security import find_secret
    from pdrun.rendezvous.scheduler.standalone import serve_standalone

    insecure = bool(said.get("place.insecure", False))
    with blamed(sources.get("place.token_file", "")):
        secret = None if insecure else find_secret(said.get("place.token_file", ""))[0]
    run = run_name(said.get("job", ""))
    groups: dict[str, dict[str, Any]] = {"resources": {}, "policy": {}}
    for path, value in said.items():
        group, _, name = path.partition(".")
        groups.setdefault(group, {})[name] = value
    config = membership(
        Resources(**groups["resources"]),
        Policy(**groups["policy"]),
        job=said.get("job", ""),
        run=run,
        host=os.uname().nodename,
    )
    kept = Path(journal) if journal else None
    config = of_same_run(config, kept)
    logs = said.get("output.log_dir")
    events = Path(logs) / config.run / "events.jsonl" if logs else None
    return int(
        serve_standalone(
            config, secret, endpoint, insecure=insecure, events_path=events, journal=kept
        )
    )


def run_name(job: str) -> str:
    """
    Return a unique name of a run, fit for a path: the job, the time to the second, four random
    digits.
    """
    return f"{job[:40] or 'job'}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"


def relay(
    listen: str, rows: Sequence[Option], params: Mapping[str, Any], environ: Mapping[str, str]
) -> int:
    """
    Carry the connections of nodes that come to ``listen`` to a scheduler, until the job is over.
    """
    here = parsers.endpoint()(listen, "--listen")
    parsers.interface(here.host, "--listen")
    said, sources = wishes(rows, params, environ)
    if not said.get("scheduler.host") or not said.get("scheduler.port"):
        raise UsageError(
            "is needed: a relay cannot guess whose nodes it takes in", where="--scheduler HOST:PORT"
        )
    from pdrun.endpoint import Endpoint
    from pdrun.launcher.jobs.run_record import blamed
    from pdrun.rendezvous.protocol.security import find_secret
    from pdrun.rendezvous.scheduler.relay_main import serve_alone

    with blamed(sources.get("place.token_file", "")):
        secret = (
            None if said.get("place.insecure") else find_secret(said.get("place.token_file", ""))[0]
        )
    patience = said.get("policy.scheduler_loss", Policy().scheduler_loss)
    where = Endpoint(said["scheduler.host"], said["scheduler.port"])
    try:
        return serve_alone(where, here, secret, patience=patience, say=async_writer.write_message)
    finally:
        async_writer.flush_messages()
