"""
A script that mpirun, srun or another launcher has started once per rank: `init` rendezvous with the
other tasks.

    mpirun -n 16 python train.py

Each task knows its rank and the number of ranks, but not the address of rank 0. The tasks form a
dynamic cluster. Rank 0 runs the scheduler in a separate process, at an address that all tasks
derive in the same way: PDRUN_SCHEDULER if it is set; loopback if all tasks are on one host; else
the first host of the allocation or the host of mpirun. The port follows from the job's id. A wrong
scheduler refuses a task by the secret or the job's name.

Limit: rank 0 exits after the others, because it owns their scheduler.
"""

from __future__ import annotations

import atexit
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pdrun.endpoint import Endpoint, parse_endpoint, port_for_job
from pdrun.errors import ConfigError
from pdrun.text import quote_command
from pdrun.worker_env import WorkerEnv

if TYPE_CHECKING:
    from pdrun.launcher.adapters.model import LauncherInfo, Probes
    from pdrun.rendezvous.clients.member import DynamicMember
    from pdrun.rendezvous.protocol.security import Secret
    from pdrun.rendezvous.scheduler.child import SchedulerChild

TASK_VARIABLES = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "SLURM_STEP_ID",
    "PALS_RANKID",
    "MV2_COMM_WORLD_RANK",
    "JSM_NAMESPACE_RANK",
    "FLUX_TASK_RANK",
)
"""Without one of these no adapter is asked."""
_OWN_LAUNCHERS = ("pdrun", "torchrun", "pet", "mindspore", "ascend")
LOOPBACK = "127.0.0.1"
JOIN_TIMEOUT_SECONDS = 600.0
"""Limit for all ranks to join."""
QUIET_SECONDS = 3.0
"""Missing ranks are reported after this time."""


def join_tasks(
    environ: Mapping[str, str], prepare: Callable[[], None]
) -> tuple[DynamicMember | None, WorkerEnv | None]:
    """
    Join the other tasks of this process's launcher; (None, None) for no task, or the only one.

    ``prepare`` is called before others expect this process's heartbeats, as in
    `pdrun.parallel.startup.dynamic_cluster.join_cluster`.

    Raises:
        ConfigError: the launcher contradicts itself, or rank 0's host is unknown; names the option
            to pass.
        RendezvousError, AuthenticationError: the tasks did not rendezvous.
    """
    if not any(name in environ for name in TASK_VARIABLES):
        return None, None
    from pdrun.launcher.adapters.detect import detect_launcher
    from pdrun.launcher.adapters.probes import make_probes

    probes = make_probes()
    launcher = detect_launcher(environ, probes)
    if (
        launcher.kind != "task"
        or launcher.launcher in _OWN_LAUNCHERS
        or launcher.rank is None
        or launcher.world == 1
    ):
        return None, None
    if launcher.world is None:
        raise ConfigError(
            f"{launcher.title} does not set the number of ranks",
            where=launcher.sources.get("rank", ""),
            hint="start the script with pdrun, or through PDRUN_ROLE=worker (docs/starting.md)",
        )
    prepare()
    return join_as_task(launcher, environ)


def scheduler_endpoint(
    launcher: LauncherInfo, environ: Mapping[str, str], probes: Probes
) -> Endpoint:
    """
    Return the scheduler's address, the same in all tasks. Pure but for the probes.

    Raises:
        ConfigError: rank 0's host is unknown, or this rank 0 is not on the derived host.
    """
    if text := environ.get("PDRUN_SCHEDULER"):
        return parse_endpoint(text, where="PDRUN_SCHEDULER")
    port = launcher.port
    if port is None:
        from pdrun.rendezvous.transport.listen import use_port_range_of

        port = port_for_job(f"{job_name_of(launcher)}-tasks", use_port_range_of(environ))
    if launcher.local_size == launcher.world:
        return Endpoint(LOOPBACK, port)
    host = launcher.hosts[0].name if launcher.hosts else launcher.head
    if not host:
        raise ConfigError(
            f"{launcher.title} does not set the host of rank 0",
            where=launcher.sources.get("rank", ""),
            hint="set PDRUN_SCHEDULER=HOST:PORT for all ranks, with rank 0's host (Open MPI: "
            "mpirun -x PDRUN_SCHEDULER)",
        )
    if launcher.rank == 0 and not probes.is_here(host):
        raise ConfigError(
            f"rank 0 runs on {probes.hostname}, but the other ranks connect to {host}",
            where=launcher.sources.get("hosts" if launcher.hosts else "head", ""),
            hint=f"set {quote_command(f'PDRUN_SCHEDULER={probes.hostname}:{port}')} for all ranks",
        )
    return Endpoint(host, port)


def job_name_of(launcher: LauncherInfo) -> str:
    """Return the job's name, which separates jobs that use one port."""
    return launcher.job_name or f"{launcher.launcher}-{launcher.world}"


def join_as_task(
    launcher: LauncherInfo, environ: Mapping[str, str]
) -> tuple[DynamicMember, WorkerEnv]:
    """
    Join the other tasks; rank 0 runs their scheduler.

    Args:
        launcher: has this task's rank and the number of ranks.
        environ: can have PDRUN_SCHEDULER.

    Raises: see `join_tasks`.
    """
    from pdrun.launcher.adapters.probes import make_probes
    from pdrun.parallel.startup.dynamic_cluster import worker_env_of
    from pdrun.rendezvous.clients.member import join_scheduler
    from pdrun.rendezvous.protocol.security import find_secret

    probes = make_probes()
    scheduler = scheduler_endpoint(launcher, environ, probes)
    job = job_name_of(launcher)
    secret = find_secret()[0]
    if launcher.rank == 0:
        child = _start_scheduler(scheduler, job, launcher, secret, probes)
        atexit.register(
            _wait_for_others, child
        )  # before the member's exit handler, so that it runs after it
        scheduler = child.endpoint
    show_line, on_joined = _make_announcer(launcher.rank or 0)
    member = join_scheduler(
        scheduler,
        secret,
        job=job,
        name=f"rank-{launcher.rank:08d}",
        rank=launcher.rank,
        timeout=JOIN_TIMEOUT_SECONDS,
        show_line=show_line,
    )
    on_joined()
    if member.world_size != launcher.world:
        member.finish(78)
        raise ConfigError(
            f"{launcher.title} has {launcher.world} ranks, the scheduler {member.world_size}"
        )
    worker = worker_env_of(member)
    if launcher.local_rank is not None and launcher.local_size is not None:
        worker = replace(
            worker,
            local_rank=launcher.local_rank,
            local_world_size=launcher.local_size,
            device_index=launcher.local_rank,
        )
    if launcher.node_rank is not None and launcher.nodes is not None:
        worker = replace(worker, node_rank=launcher.node_rank, nodes=launcher.nodes)
    return member, worker


def _start_scheduler(
    scheduler: Endpoint, job: str, launcher: LauncherInfo, secret: Secret, probes: Probes
) -> SchedulerChild:
    from pdrun.rendezvous.protocol.events import SchedulerConfig
    from pdrun.rendezvous.scheduler.child import SchedulerChild

    assert launcher.world is not None
    config = SchedulerConfig(
        job=job,
        run=f"{job[:40]}-{secrets.token_hex(4)}",
        nodes=launcher.world,
        start_timeout=JOIN_TIMEOUT_SECONDS,
        grace=30.0,
        host=socket.gethostname(),
        unit="worker",
    )
    host = scheduler.host
    if host != LOOPBACK:
        host = probes.address_for(host)
    try:
        return SchedulerChild(config, secret, endpoint=Endpoint(host, scheduler.port))
    except ConfigError as error:
        if "in use" in error.what:
            name = f"[{scheduler.host}]" if ":" in scheduler.host else scheduler.host
            setting = quote_command(f"PDRUN_SCHEDULER={name}:PORT")
            error.hint = f"another job may use it: set {setting} for all ranks"
        raise


def _wait_for_others(child: SchedulerChild) -> None:
    """
    Wait until the other ranks have ended. After a failure do not wait: the scheduler ends all of
    them.
    """
    if getattr(sys, "last_value", None) is None:
        while child.returncode is None:
            time.sleep(0.02)
    child.close()


def _make_announcer(rank: int) -> tuple[Callable[[str], None], Callable[[], None]]:
    """
    Return a function that prints a line, and one to call when all ranks have joined.

    Only rank 0 reports missing ranks, and not before `QUIET_SECONDS`. Every rank reports the end of
    a job.
    """
    from pdrun import async_writer

    start = time.monotonic()
    joined = list[bool]()

    def show_line(text: str) -> None:
        if joined or (rank == 0 and time.monotonic() > start + QUIET_SECONDS):
            async_writer.write_message(text)

    return show_line, lambda: joined.append(True)
