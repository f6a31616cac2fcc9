"""
The dynamic cluster: processes that are started by hand or by another tool, without a launcher. They
rendezvous at a scheduler and get ranks.

    export PDRUN_SCHEDULER=10.0.0.1:7077 PDRUN_WORKERS=2
    PDRUN_ROLE=scheduler python train.py     # waits for the workers
    PDRUN_ROLE=worker    python train.py     # twice, on any host
    PDRUN_ROLE=server    python train.py     # with PDRUN_SERVERS=1 everywhere: a parameter server

MindSpore's names (MS_ROLE, MS_SCHED_HOST, MS_SCHED_PORT, MS_WORKER_NUM, MS_SERVER_NUM, MS_NODE_ID,
MS_TOPO_TIMEOUT, MS_ENABLE_RECOVERY with MS_RECOVERY_PATH) are read, too. Each worker is a node with
one worker.

With PDRUN_RECOVERY=1 or MS_ENABLE_RECOVERY=1 everywhere, a worker that is lost can come back: the
others start again in place and wait for a process with its name.

This file reads the environment; `pdrun.rendezvous.clients.member` and `server_member` join.
"""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pdrun.endpoint import Endpoint, check_host, parse_endpoint, parse_port
from pdrun.errors import ConfigError, PdrunError, UsageError
from pdrun.rendezvous.clients.member import DynamicMember, join_scheduler
from pdrun.rendezvous.clients.server_member import ServerMember, join_as_server
from pdrun.rendezvous.protocol.events import SchedulerConfig
from pdrun.rendezvous.protocol.security import Secret, find_secret
from pdrun.rendezvous.transport.listen import use_port_range_of
from pdrun.text import check_name, plural

__all__ = [
    "DynamicMember",
    "DynamicSpec",
    "ServerMember",
    "from_environ",
    "join_cluster",
    "join_servers",
    "run_scheduler",
]

_T = TypeVar("_T")
MAX_RECOVERIES = 1_000_000
"""Restarts of a cluster with recovery, which has no limit but that on repeated failures."""
Role = Literal["scheduler", "server", "worker"]
_PDRUN_VARIABLES = ("PDRUN_ROLE", "PDRUN_WORKERS")
"""
The launcher uses PDRUN_SCHEDULER, PDRUN_NODE_RANK and PDRUN_JOB, too. Without the variables above
they mean no dynamic cluster.
"""
_MINDSPORE_VARIABLES = ("MS_ROLE", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_WORKER_NUM")
_ROLE_OF_VALUE: Mapping[str, Role] = {
    "scheduler": "scheduler",
    "server": "server",
    "worker": "worker",
    "MS_SCHED": "scheduler",
    "MS_PSERVER": "server",
    "MS_SERVER": "server",
    "MS_WORKER": "worker",
}


_NO_RECOVERY = (
    "no worker is started again after a failure, although PDRUN_RECOVERY or MS_ENABLE_RECOVERY is "
    "1: the tables of parameter servers would be lost"
)


@dataclass(frozen=True)
class DynamicSpec:
    """The settings of one process of a dynamic cluster, from its environment."""

    role: Role
    scheduler: Endpoint
    workers: int
    """Number of processes with the role worker."""
    rank: int | None = None
    """The requested rank (PDRUN_NODE_RANK, or MS_NODE_ID if it is a number)."""
    name: str = ""
    """
    Name of this worker (PDRUN_WORKER_ID, or MS_NODE_ID); empty: made from host and process id.
    """
    job: str = "dynamic"
    timeout: float = 600.0
    """Seconds for all processes to join."""
    journal: str = ""
    """
    Journal file (PDRUN_JOURNAL, or in the folder MS_RECOVERY_PATH). A scheduler that died is
    started again and resumes from it; empty: no journal.
    """
    servers: int = 0
    """Number of processes with the role server (PDRUN_SERVERS or MS_SERVER_NUM)."""
    recovers: bool = False
    """Whether PDRUN_RECOVERY or MS_ENABLE_RECOVERY asks for it."""

    @property
    def restarts_workers(self) -> bool:
        """
        Whether workers that are lost or fail may come back; never with servers, whose tables would
        be lost.
        """
        return self.recovers and not self.servers

    @property
    def max_restarts(self) -> int:
        """Restarts of the workers after losses and failures."""
        return MAX_RECOVERIES if self.restarts_workers else 0


def from_environ(environ: Mapping[str, str]) -> DynamicSpec | None:
    """
    Read the dynamic cluster's variables; None if they are not set.

    Raises:
        ConfigError: a variable is missing or wrong, or PDRUN_* and MS_* differ; names the variable.
    """
    if not any(environ.get(name) for name in (*_PDRUN_VARIABLES, *_MINDSPORE_VARIABLES)):
        return None
    try:
        return _read_spec(environ)
    except UsageError as error:  # of a parser that the command line uses, too
        raise ConfigError(error.what, where=error.where, hint=error.hint) from None


def _read_spec(environ: Mapping[str, str]) -> DynamicSpec:
    ours = any(environ.get(name) for name in _PDRUN_VARIABLES)
    role: Role | None = _merge_values(
        "role",
        _read_role(environ, "PDRUN_ROLE"),
        _read_role(environ, "MS_ROLE"),
        "PDRUN_ROLE",
        "MS_ROLE",
    )
    if role is None:
        raise _missing_variable_error("PDRUN_ROLE" if ours else "MS_ROLE", environ)
    use_port_range_of(environ)
    scheduler = _merge_values(
        "scheduler",
        _read_pdrun_scheduler(environ),
        _read_mindspore_scheduler(environ),
        "PDRUN_SCHEDULER",
        "MS_SCHED_HOST with MS_SCHED_PORT",
    )
    if scheduler is None:
        raise _missing_variable_error("PDRUN_SCHEDULER" if ours else "MS_SCHED_HOST", environ)
    workers = _merge_values(
        "workers",
        _read_count(environ, "PDRUN_WORKERS", 1),
        _read_count(environ, "MS_WORKER_NUM", 1),
        "PDRUN_WORKERS",
        "MS_WORKER_NUM",
    )
    if workers is None:
        raise _missing_variable_error("PDRUN_WORKERS" if ours else "MS_WORKER_NUM", environ)
    servers = _merge_values(
        "servers",
        _read_count(environ, "PDRUN_SERVERS", 0),
        _read_count(environ, "MS_SERVER_NUM", 0),
        "PDRUN_SERVERS",
        "MS_SERVER_NUM",
    )
    if role == "server" and not servers:
        raise _missing_variable_error("PDRUN_SERVERS" if ours else "MS_SERVER_NUM", environ)
    rank, name = _read_rank_and_name(environ)
    limit = (servers or 0) if role == "server" else workers
    if rank is not None and rank >= limit:
        unit = "servers" if role == "server" else "workers"
        raise ConfigError(
            f"must be below the number of {unit} ({limit}), got {rank}",
            where="PDRUN_NODE_RANK or MS_NODE_ID",
        )
    job = environ.get("PDRUN_JOB") or "dynamic"
    timeout = _read_count(environ, "MS_TOPO_TIMEOUT", 1)
    return DynamicSpec(
        role,
        scheduler,
        workers,
        rank,
        name,
        check_name(job, where="PDRUN_JOB"),
        float(timeout or 600),
        environ.get("PDRUN_JOURNAL") or _find_recovery_journal(environ, role, job),
        servers or 0,
        _read_recovery(environ),
    )


def run_scheduler(
    spec: DynamicSpec,
    *,
    secret: Secret | None = None,
    grace: float = 30.0,
    show_line: Callable[[str], None] | None = None,
) -> int:
    """
    Serve the job until it is over, in a process with the role scheduler; return the job's exit
    code.
    """
    from pdrun.rendezvous.journal.recovery import adopt_run_name
    from pdrun.rendezvous.scheduler.standalone import serve_standalone

    journal = prepare_journal(spec.journal)
    secret = secret or find_secret()[0]
    config = SchedulerConfig(
        job=spec.job,
        run=f"{spec.job}-{secrets.token_hex(4)}",
        nodes=spec.workers + spec.servers,
        max_restarts=spec.max_restarts,
        start_timeout=spec.timeout,
        grace=grace,
        host=socket.gethostname(),
        unit="worker",
    )
    return serve_standalone(
        adopt_run_name(config, journal),
        secret,
        spec.scheduler,
        show_line=show_line,
        how_to_join=describe_worker_start(spec),
        journal=journal,
    )


def describe_worker_start(spec: DynamicSpec) -> str:
    """Return how the processes of this cluster are started, for the user."""
    settings = f"PDRUN_SCHEDULER={spec.scheduler} PDRUN_WORKERS={spec.workers}"
    if not spec.servers:
        return f"start each worker with PDRUN_ROLE=worker {settings}"
    settings += f" PDRUN_SERVERS={spec.servers}"
    how = f"start each process with PDRUN_ROLE=worker or PDRUN_ROLE=server and {settings}"
    return f"{how}; {_NO_RECOVERY}" if spec.recovers else how


def prepare_journal(path: str) -> Path | None:
    """Return the journal's path, and make its folder; None without a journal."""
    if not path:
        return None
    journal = Path(path)
    try:
        journal.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder of the journal: {error.strerror}", where=str(journal.parent)
        ) from None
    return journal


def join_cluster(
    spec: DynamicSpec,
    *,
    secret: Secret | None = None,
    show_line: Callable[[str], None] | None = None,
) -> DynamicMember:
    """
    Join as a worker; return when all workers have joined, with this process's rank.

    From then on a thread keeps the connection. If the job is stopped because a peer failed, the
    thread prints the cause and ends this process by SIGTERM, and after the grace by SIGKILL.

    Raises:
        RendezvousError, AuthenticationError, ConfigError: the rendezvous failed; gives the reason.
    """
    if spec.role != "worker":
        raise ConfigError(
            "must be worker to join", where="PDRUN_ROLE", hint="a scheduler calls run_scheduler"
        )
    member = join_scheduler(
        spec.scheduler,
        secret or find_secret()[0],
        job=spec.job,
        name=_find_name(spec),
        rank=spec.rank,
        timeout=spec.timeout,
        show_line=show_line,
        recovers=spec.restarts_workers,
    )
    for unit, variable, expected, found in (
        ("worker", "PDRUN_WORKERS", spec.workers, member.world_size),
        ("server", "PDRUN_SERVERS", spec.servers, member.servers),
    ):
        if found != expected:
            member.finish(78)
            raise ConfigError(
                f"this process expects {plural(expected, unit)}, the scheduler has {found}",
                where=variable,
            )
    return member


def _find_name(spec: DynamicSpec) -> str:
    """Return a worker's name: with recovery that of the lost one whose rank it asks for."""
    if spec.name or not spec.restarts_workers or spec.rank is None:
        return spec.name
    return f"worker-{spec.rank}"


def join_servers(
    spec: DynamicSpec,
    *,
    secret: Secret | None = None,
    show_line: Callable[[str], None] | None = None,
) -> ServerMember:
    """
    Join as a parameter server; return when all processes have joined, with this server's number.

    Raises:
        RendezvousError, AuthenticationError, ConfigError: the rendezvous failed; gives the reason.
    """
    return join_as_server(
        spec.scheduler,
        secret or find_secret()[0],
        job=spec.job,
        workers=spec.workers,
        servers=spec.servers,
        number=spec.rank,
        name=spec.name,
        timeout=spec.timeout,
        show_line=show_line,
    )


# Reading variables


def _read_role(environ: Mapping[str, str], variable: str) -> Role | None:
    text = environ.get(variable)
    if not text:
        return None
    known = [
        name for name in _ROLE_OF_VALUE if name.startswith("MS_") == variable.startswith("MS_")
    ]
    if text not in known:
        raise ConfigError(f"must be one of {', '.join(known)}, got {text!r}", where=variable)
    return _ROLE_OF_VALUE[text]


def _read_pdrun_scheduler(environ: Mapping[str, str]) -> Endpoint | None:
    text = environ.get("PDRUN_SCHEDULER")
    return parse_endpoint(text, where="PDRUN_SCHEDULER") if text else None


def _read_mindspore_scheduler(environ: Mapping[str, str]) -> Endpoint | None:
    host = environ.get("MS_SCHED_HOST")
    port = environ.get("MS_SCHED_PORT")
    if not host and not port:
        return None
    for name, value in (("MS_SCHED_HOST", host), ("MS_SCHED_PORT", port)):
        if not value:
            raise _missing_variable_error(name, environ)
    return Endpoint(
        check_host(host or "", where="MS_SCHED_HOST"), parse_port(port or "", where="MS_SCHED_PORT")
    )


def _read_recovery(environ: Mapping[str, str]) -> bool:
    """Return whether workers may come back."""

    def read(variable: str) -> bool | None:
        text = environ.get(variable) or None
        if text not in (None, "0", "1"):
            raise ConfigError(f"must be 0 or 1, got {text!r}", where=variable)
        return None if text is None else text == "1"

    names = "PDRUN_RECOVERY", "MS_ENABLE_RECOVERY"
    return bool(_merge_values("recovery", read(names[0]), read(names[1]), *names))


def _find_recovery_journal(environ: Mapping[str, str], role: Role, job: str) -> str:
    """Return the journal in the folder MS_RECOVERY_PATH, if MS_ENABLE_RECOVERY is 1."""
    if (environ.get("MS_ENABLE_RECOVERY") or "0") == "0" or role != "scheduler":
        return ""
    folder = environ.get("MS_RECOVERY_PATH")
    if not folder:
        raise ConfigError(
            "is not set, although MS_ENABLE_RECOVERY is 1",
            where="MS_RECOVERY_PATH",
            hint="set it to a folder for the scheduler's journal",
        )
    return str(Path(folder, f"{job}.journal"))


def _read_rank_and_name(environ: Mapping[str, str]) -> tuple[int | None, str]:
    theirs = environ.get("MS_NODE_ID") or ""
    numeric = bool(re.fullmatch(r"[0-9]{1,9}", theirs))
    rank = _merge_values(
        "rank",
        _read_count(environ, "PDRUN_NODE_RANK", 0),
        int(theirs) if numeric else None,
        "PDRUN_NODE_RANK",
        "MS_NODE_ID",
    )
    name = environ.get("PDRUN_WORKER_ID") or ("" if numeric else theirs)
    return rank, check_name(name, where="PDRUN_WORKER_ID or MS_NODE_ID") if name else ""


def _read_count(environ: Mapping[str, str], variable: str, minimum: int) -> int | None:
    text = environ.get(variable)
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < minimum:
        raise ConfigError(
            f"must be a whole number of at least {minimum}, got {text!r}", where=variable
        )
    return int(text)


def _merge_values(
    what: str, ours: _T | None, theirs: _T | None, our_name: str, their_name: str
) -> _T | None:
    """Return the value of two variables for one setting; two different values are an error."""
    if ours is not None and theirs is not None and ours != theirs:
        raise ConfigError(
            f"two values for the {what}: {our_name} is {ours}, {their_name} is {theirs}"
        )
    return theirs if ours is None else ours


def _missing_variable_error(variable: str, environ: Mapping[str, str]) -> PdrunError:
    there = ", ".join(
        name
        for name in (*_PDRUN_VARIABLES, "PDRUN_SCHEDULER", *_MINDSPORE_VARIABLES)
        if environ.get(name)
    )
    verb = "are" if "," in there else "is"
    return ConfigError(f"is not set, although {there} {verb}", where=variable)
