"""Asks the scheduler of a job directly (`--scheduler HOST:PORT`) instead of the registry."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pdrun.endpoint import Endpoint
from pdrun.errors import UsageError
from pdrun.ui.job_status import JobStatus
from pdrun.ui.replay import replay_lines

if TYPE_CHECKING:
    from pdrun.rendezvous.clients.viewer import Viewer


@dataclass(frozen=True)
class RemoteScheduler:
    """The scheduler to ask."""

    endpoint: Endpoint
    token_file: str = ""
    """File of the token; empty: the default places."""
    insecure: bool = False


def open_viewer(scheduler: RemoteScheduler, **options: Any) -> Viewer:
    """
    Connect to the scheduler; `options` are those of `Viewer`.

    Raises:
        RendezvousError, AuthenticationError: the scheduler cannot be asked.
    """
    from pdrun.rendezvous.clients.viewer import Viewer
    from pdrun.rendezvous.protocol.security import find_secret

    secret = None
    if not scheduler.insecure:
        secret = find_secret(scheduler.token_file)[0]
    return Viewer(scheduler.endpoint, secret, insecure=scheduler.insecure, **options)


def check_job_name(viewer: Viewer, name: str | None) -> None:
    """
    Check a given name against the one job of the scheduler; None fits any job.

    Raises:
        UsageError: the job has another name.
    """
    if not name or viewer.job.startswith(name) or viewer.run.startswith(name):
        return
    job = f"job {viewer.job!r}" if viewer.job else "a job that no node has named yet"
    raise UsageError(
        f"no job here is called {name!r}: this is the scheduler of {job} (run {viewer.run})",
        where=str(viewer.endpoint),
        hint="leave the name out, or ask the scheduler of that job",
    )


def replay_status(viewer: Viewer, lines: list[str]) -> JobStatus:
    """
    Return the status that the event log lines of a scheduler lead to.

    Of a long job only the newest lines arrive, without its names: the viewer knows those.
    """
    found = replay_lines(lines)
    return replace(found, job=found.job or viewer.job, run=found.run or viewer.run)
