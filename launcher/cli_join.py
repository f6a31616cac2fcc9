"""``pdrun join`` and ``pdrun scheduler``: from their words to the calls that do the work."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdrun.errors import UsageError
from pdrun.launcher import values
from pdrun.launcher.cli_run import from_command_line, warn_of_strangers
from pdrun.launcher.options import Option
from pdrun.launcher.spec import Policy
from pdrun.launcher.wishes import from_environment, settle


def wishes(
    rows: Sequence[Option], params: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return field path -> value, and field path -> source, of what was said with these options or their twins."""
    said, _ = from_command_line(rows, params)
    warn_of_strangers(environ)
    twins = {name for row in rows for name in row.env}
    around, _ = from_environment({name: value for name, value in environ.items() if name in twins})
    settled, _ = settle([*said, *around])
    return (
        {path: wish.value for path, wish in settled.items()},
        {path: wish.source.label for path, wish in settled.items()},
    )


def join(endpoint: str, rows: Sequence[Option], params: Mapping[str, Any], environ: Mapping[str, str]) -> int:
    """Join the job at ``endpoint``; what was said here counts before what the scheduler hands over."""
    where = values.endpoint()(endpoint, "join")
    if where.port == 0:
        raise UsageError("nobody answers on port 0", where="join", hint="give the port that the scheduler printed")
    overrides, sources = wishes(rows, params, environ)
    from pdrun.launcher.run import execute_join

    return int(execute_join(where, overrides, sources))


def scheduler(listen: str, rows: Sequence[Option], params: Mapping[str, Any], environ: Mapping[str, str]) -> int:
    """Serve one job at ``listen`` until it ends; the job's specification comes with the first node."""
    endpoint = values.endpoint()(listen, "--listen")
    values.interface(endpoint.host, "--listen")
    said, sources = wishes(rows, params, environ)
    if "resources.nodes" not in said:
        raise UsageError("is needed: a scheduler cannot guess how many nodes will come", where="--nodes")
    from pdrun.launcher.run import blamed
    from pdrun.rendezvous.events import SchedulerConfig
    from pdrun.rendezvous.security import find_secret
    from pdrun.rendezvous.server import serve_standalone

    insecure = bool(said.get("place.insecure", False))
    with blamed(sources.get("place.token_file", "")):
        secret = None if insecure else find_secret(said.get("place.token_file", ""))[0]
    defaults = Policy()
    run = run_name(said.get("job", ""))
    config = SchedulerConfig(
        job=said.get("job", ""), run=run, nodes=said["resources.nodes"],
        start_timeout=said.get("policy.start_timeout", defaults.start_timeout),
        grace=said.get("policy.grace", defaults.grace),
        max_restarts=said.get("policy.max_restarts", defaults.max_restarts),
        time_limit=said.get("policy.time_limit", defaults.time_limit),
        host=os.uname().nodename,
    )  # fmt: skip
    logs = said.get("output.log_dir")
    events = Path(logs) / run / "events.jsonl" if logs else None
    return int(serve_standalone(config, secret, endpoint, insecure=insecure, events_path=events))



def run_name(job: str) -> str:
    """Return a unique name of a run, fit for a path: the job, the time to the second, four random digits."""
    return f"{job[:40] or 'job'}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
