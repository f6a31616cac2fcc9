"""
A script that mpirun, srun or one of their kin has started itself, once a rank: `init` finds the
others all the same.

    mpirun -n 16 python train.py

Each task knows its rank and how many there are; nobody tells it where rank 0 is. So they meet as a
dynamic cluster does: rank 0 runs the scheduler, a process of its own, at an address that all of
them derive alike: PDRUN_SCHEDULER where it is set, loopback where all tasks are on one host, else
the first host of the allocation or the one that mpirun runs on, with a port made from the job's id.
Whoever comes to a wrong one is refused: by the secret, by the job's name.

Limit: the exit of rank 0 waits for the others, whose scheduler it holds.
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
"""Without one of these nobody is asked anything."""
_OWN_LAUNCHERS = ("pdrun", "torchrun", "pet", "mindspore", "ascend")
LOOPBACK = "127.0.0.1"
JOIN_TIMEOUT_SECONDS = 600.0
"""Seconds for all ranks to come together."""
QUIET_SECONDS = 3.0
"""Seconds after which it is said who is missing."""


def join_tasks(
    environ: Mapping[str, str], prepare: Callable[[], None]
) -> tuple[DynamicMember | None, WorkerEnv | None]:
    """
    Meet the other tasks of the launcher that started this process; (None, None) where it is no
    task, or the only one.

    ``prepare`` is called before others count on this process's heartbeats, as in
    `pdrun.parallel.startup.dynamic_cluster.enter`.

    Raises:
        ConfigError: the launcher contradicts itself, or nothing says where rank 0 is; says what to
            pass.
        RendezvousError, AuthenticationError: the tasks did not come together.
    """
    if not any(name in environ for name in TASK_VARIABLES):
        return None, None
    from pdrun.launcher.adapters.detect import detect_launcher
    from pdrun.launcher.adapters.probes import make_probes

    probes = make_probes()
    found = detect_launcher(environ, probes)
    if (
        found.kind != "task"
        or found.launcher in _OWN_LAUNCHERS
        or found.rank is None
        or found.world == 1
    ):
        return None, None
    if found.world is None:
        raise ConfigError(
            f"{found.title} does not say how many ranks there are",
            where=found.sources.get("rank", ""),
            hint="start the script with pdrun, or through PDRUN_ROLE=worker (docs/starting.md)",
        )
    prepare()
    return _join_scheduler(found, environ, probes)


def scheduler_endpoint(found: LauncherInfo, environ: Mapping[str, str], probes: Probes) -> Endpoint:
    """
    Return where the tasks meet: the same in all of them. Pure but for the probes.

    Raises:
        ConfigError: nothing says where rank 0 is, or what is said is not where this rank 0 is.
    """
    if text := environ.get("PDRUN_SCHEDULER"):
        return parse_endpoint(text, where="PDRUN_SCHEDULER")
    port = found.port if found.port is not None else port_for_job(f"{job_name_of(found)}-tasks")
    if found.local_size == found.world:
        return Endpoint(LOOPBACK, port)
    host = found.hosts[0].name if found.hosts else found.head
    if not host:
        raise ConfigError(
            f"{found.title} does not say where rank 0 is",
            where=found.sources.get("rank", ""),
            hint="set PDRUN_SCHEDULER=HOST:PORT for all ranks, HOST being the one of rank 0 (Open MPI: mpirun -x"
            " PDRUN_SCHEDULER)",
        )
    if found.rank == 0 and not probes.is_here(host):
        raise ConfigError(
            f"rank 0 runs on {probes.hostname}, but the others will look for it at {host}",
            where=found.sources.get("hosts" if found.hosts else "head", ""),
            hint=f"set PDRUN_SCHEDULER={probes.hostname}:{port} for all ranks",
        )
    return Endpoint(host, port)


def job_name_of(found: LauncherInfo) -> str:
    """Return the job's name, which keeps jobs apart that meet at one port."""
    return found.job_name or f"{found.launcher}-{found.world}"


def _join_scheduler(
    found: LauncherInfo, environ: Mapping[str, str], probes: Probes
) -> tuple[DynamicMember, WorkerEnv]:
    from pdrun.parallel.startup.dynamic_cluster import worker_env_of
    from pdrun.rendezvous.clients.member import join_scheduler
    from pdrun.rendezvous.protocol.security import find_secret

    scheduler = scheduler_endpoint(found, environ, probes)
    job = job_name_of(found)
    secret = find_secret()[0]
    if found.rank == 0:
        child = _start_scheduler(scheduler, job, found, secret, probes)
        atexit.register(
            _wait_for_others, child
        )  # before the member's own: it must have left by then
        scheduler = child.endpoint
    say, all_met = _make_announcer(found.rank or 0)
    member = join_scheduler(
        scheduler,
        secret,
        job=job,
        name=f"rank-{found.rank:08d}",
        rank=found.rank,
        timeout=JOIN_TIMEOUT_SECONDS,
        show_line=say,
    )
    all_met()
    if member.world_size != found.world:
        member.finish(78)
        raise ConfigError(
            f"{found.title} counts {found.world} ranks, the scheduler has {member.world_size}"
        )
    worker = worker_env_of(member)
    if found.local_rank is not None and found.local_size is not None:
        worker = replace(
            worker,
            local_rank=found.local_rank,
            local_world_size=found.local_size,
            device_index=found.local_rank,
        )
    if found.node_rank is not None and found.nodes is not None:
        worker = replace(worker, node_rank=found.node_rank, nodes=found.nodes)
    return member, worker


def _start_scheduler(
    scheduler: Endpoint, job: str, found: LauncherInfo, secret: Secret, probes: Probes
) -> SchedulerChild:
    from pdrun.rendezvous.protocol.events import SchedulerConfig
    from pdrun.rendezvous.scheduler.child import SchedulerChild

    assert found.world is not None
    config = SchedulerConfig(
        job=job,
        run=f"{job[:40]}-{secrets.token_hex(4)}",
        nodes=found.world,
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
            error.hint = (
                f"another job may hold it: set PDRUN_SCHEDULER={scheduler.host}:PORT for all ranks"
            )
        raise


def _wait_for_others(child: SchedulerChild) -> None:
    """
    Wait until the others have ended too, unless this process is on its way out of a failure: then
    all are told.
    """
    if getattr(sys, "last_value", None) is None:
        while child.returncode is None:
            time.sleep(0.02)
    child.close()


def _make_announcer(rank: int) -> tuple[Callable[[str], None], Callable[[], None]]:
    """
    Return what says a line, and what to call once all have met.

    Who is missing is said by rank 0, and not of those who are only a moment late; what ends a job,
    by every rank.
    """
    from pdrun import async_writer

    began = time.monotonic()
    met = list[bool]()

    def say(text: str) -> None:
        if met or (rank == 0 and time.monotonic() > began + QUIET_SECONDS):
            async_writer.write_message(text)

    return say, lambda: met.append(True)
