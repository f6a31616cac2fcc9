"""
A script that a user's loop has started once per rank of an Ascend rank table.

    RANK_TABLE_FILE=hccl.json RANK_SIZE=16 RANK_ID=3 DEVICE_ID=3 python train.py

This is MindSpore's start-up by rank table. The processes form a dynamic cluster, as tasks of mpirun
do (`pdrun.parallel.startup.mpi_tasks`): rank 0 runs the scheduler, at PDRUN_SCHEDULER or at its
server's address in the table, at a port that follows from the table's content. RANK_ID and
RANK_SIZE without a table are refused: each process would train alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pdrun.errors import ConfigError
from pdrun.worker_env import WorkerEnv

if TYPE_CHECKING:
    from pdrun.launcher.adapters.model import LauncherInfo
    from pdrun.launcher.ranktables.model import RankTable
    from pdrun.rendezvous.clients.member import DynamicMember

TABLE_VARIABLES = ("RANK_TABLE_FILE", "MINDSPORE_HCCL_CONFIG_PATH")
"""The first that is set names the table."""
_WAIT_SECONDS = 600.0
"""Limit for a table that a controller still writes."""
_DIGITS = re.compile(r"[0-9]{1,9}")


def join_by_table(
    environ: Mapping[str, str], prepare: Callable[[], None]
) -> tuple[DynamicMember | None, WorkerEnv | None]:
    """
    Join the other ranks of the rank table; (None, None) without RANK_ID, or for a table of one.

    ``prepare`` is called before others expect this process's heartbeats, as in
    `pdrun.parallel.startup.dynamic_cluster.join_cluster`.

    Raises:
        ConfigError: a variable is missing or contradicts the table, or the table cannot be used.
        RendezvousError, AuthenticationError: the ranks did not rendezvous.
    """
    variable = next((name for name in TABLE_VARIABLES if environ.get(name)), "")
    rank = _read_number(environ, "RANK_ID")
    size = _read_number(environ, "RANK_SIZE")
    if not variable:
        if rank is not None and (size or 1) > 1:
            raise ConfigError(
                f"this is rank {rank} of {size} (RANK_ID, RANK_SIZE), but RANK_TABLE_FILE is not "
                "set",
                where="RANK_TABLE_FILE",
                hint="set it to the rank table, or start the script with pdrun",
            )
        return None, None
    if rank is None:
        if size in (None, 1):
            return None, None
        raise ConfigError(
            f"is not set, but {variable} and RANK_SIZE={size} are",
            where="RANK_ID",
            hint="set it to this process's rank, or start the script with pdrun",
        )
    from pdrun.launcher.ranktables.files import wait_for_table
    from pdrun.parallel.startup import mpi_tasks

    table = wait_for_table(environ[variable], wait=_WAIT_SECONDS, print_line=_print_line)
    launcher = describe_rank(table, rank, size, variable)
    if launcher.world == 1:
        return None, None
    prepare()
    member, worker = mpi_tasks.join_as_task(launcher, environ)
    device = _read_number(environ, "DEVICE_ID")
    return member, worker if device is None else replace(worker, device_index=device)


def describe_rank(table: RankTable, rank: int, size: int | None, variable: str) -> LauncherInfo:
    """
    Return one rank of a table as a task. Pure.

    Args:
        table: a checked table.
        rank: RANK_ID.
        size: RANK_SIZE, if it is set.
        variable: that names the table's file.

    Raises:
        ConfigError: rank or size contradict the table.
    """
    from pdrun.launcher.adapters.model import AllocatedHost, LauncherInfo

    world = len(table.devices)
    if size is not None and size != world:
        raise ConfigError(
            f"is {size}, but {variable} has {world} ranks",
            where="RANK_SIZE",
            hint="use the table of this job",
        )
    if rank >= world:
        raise ConfigError(f"is {rank}, but {variable} has ranks 0 to {world - 1}", where="RANK_ID")
    servers = table.servers_by_rank
    own = next(
        index
        for index, server in enumerate(servers)
        if any(device.rank == rank for device in server.devices)
    )
    ranks = sorted(device.rank for device in servers[own].devices)
    head = next(iter(_addresses(servers[0].names)), "")
    return LauncherInfo(
        "rank-table",
        f"the rank table ({variable})",
        "task",
        rank,
        world,
        ranks.index(rank),
        len(ranks),
        own,
        len(servers),
        hosts=(AllocatedHost(head),) if head else (),
        job_id=f"rank-table-{_digest(table)}",
        sources={"rank": "RANK_ID", "world": "RANK_SIZE", "hosts": variable},
    )


def _addresses(names: tuple[str, ...]) -> list[str]:
    """Return the names of a server, IP addresses first: a server_id need not be a host's name."""
    return sorted(
        names, key=lambda name: not re.fullmatch(r"[0-9.]+|[0-9a-fA-F:]*:[0-9a-fA-F:]*", name)
    )


def _digest(table: RankTable) -> str:
    """Return a text that is the same for all ranks of a table, whatever the file's format."""
    content = [
        (device.rank, device.device_id, device.ips, server.names)
        for server in table.servers_by_rank
        for device in server.devices
    ]
    return hashlib.sha256(repr(content).encode()).hexdigest()[:12]


def _read_number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    if not text:
        return None
    if not _DIGITS.fullmatch(text):
        raise ConfigError(f"{text[:20]!r} is not a whole number", where=name)
    return int(text)


def _print_line(text: str) -> None:
    from pdrun import async_writer

    async_writer.write_message(text)
