"""
A worker's view of a dynamic cluster: `init` registers this process with the scheduler, which
assigns a rank.

The membership lasts as long as the process. When a peer fails, it ends this process and reports the
reason.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdrun.errors import PdrunError
from pdrun.topology import (
    choose_interface_variables,
    record_interface_variables,
    recorded_interface_variables,
)
from pdrun.worker_env import WorkerEnv

if TYPE_CHECKING:
    from pdrun.rendezvous.clients.member import DynamicMember
    from pdrun.rendezvous.clients.server_member import ServerMember


def join_cluster(
    environ: Mapping[str, str], prepare: Callable[[], None]
) -> tuple[DynamicMember | None, WorkerEnv | None]:
    """
    Join the cluster that the environment names; (None, None) if it names none.

    A process with the role of the scheduler or of a parameter server never returns: it serves until
    the job is over, and exits with the job's exit code. ``prepare`` is called before others expect
    this process's heartbeats; use it for work that blocks the interpreter for long.

    Raises:
        ConfigError: the variables contradict each other, or one is missing.
        RendezvousError, AuthenticationError: the job did not rendezvous.
    """
    from pdrun.rendezvous.clients import dynamic

    spec = dynamic.from_environ(environ)
    if spec is None:
        return None, None
    if spec.role == "scheduler":
        sys.exit(dynamic.run_scheduler(spec))
    prepare()
    if spec.role == "server":
        from pdrun.backends.collectives import import_torch

        import_torch()  # says what is wrong if there is none
        sys.exit(_serve_tables(dynamic.join_servers(spec)))
    member = dynamic.join_cluster(spec)
    if member.servers:
        variables = {
            "PDRUN_SERVER_COUNT": str(member.servers),
            "PDRUN_SERVER_KEY": member.server_key.hex(),
        }
        os.environ.update(variables)
    return member, worker_env_of(member)


def _serve_tables(member: ServerMember) -> int:
    """Run a parameter server until the job is over; return the job's exit code."""
    problems: list[PdrunError] = []

    def serve(environ: Mapping[str, str]) -> None:
        # a room above this one, which only this role needs
        module = importlib.import_module("pdrun.parallel.servers.main")
        try:
            module.serve(environ)
        except PdrunError as error:
            problems.append(error)

    with tempfile.TemporaryDirectory(prefix="pdrun-server-") as folder:
        environ = {
            **os.environ,
            "PDRUN_SERVER_RANK": str(member.number),
            "PDRUN_SERVER_COUNT": str(member.servers),
            "PDRUN_SERVER_KEY": member.key.hex(),
            "PDRUN_SERVER_FOLDER": folder,
            "PDRUN_SERVER_LISTEN": member.address,
            "PDRUN_SERVER_NOTE": "",
            "PDRUN_SERVER_LOST_AT": "",
            "PDRUN_GENERATION": str(member.generation),
            "WORLD_SIZE": str(member.workers),
            "MASTER_ADDR": member.master.host,
            "MASTER_PORT": str(member.master.port),
        }
        threading.Thread(target=serve, args=(environ,), daemon=True).start()
        return member.wait_for_end(lambda: problems[0] if problems else None)


def worker_env_of(member: DynamicMember) -> WorkerEnv:
    """
    Return the member's place in the launcher's terms.

    The number of workers on other hosts is unknown. Hosts are counted as if all had as many as this
    one.
    """
    each = member.local_world_size
    return WorkerEnv(
        rank=member.rank,
        world_size=member.world_size,
        local_rank=member.local_rank,
        local_world_size=each,
        node_rank=(member.rank - member.local_rank) // each,
        nodes=-(-member.world_size // each),
        master_addr=member.master.host,
        master_port=member.master.port,
        run_id=member.run,
        generation=member.generation,
        job=member.job,
        node=member.host,
        device_kind="",
        device_index=member.local_rank,
        collective="",
    )


def open_store(dist: Any, member: DynamicMember) -> Any:
    """
    Return torch's store. Rank 0 serves it on the socket that it bound when it joined, the others
    connect.

    There are no retries and no guessed ports: the socket listens before its address is announced.
    """
    listener = member.store_socket
    member.store_socket = None
    serve: dict[str, Any] = {"is_master": False}
    if listener is not None:
        serve = {"is_master": True, "master_listen_fd": listener.detach()}
    return dist.TCPStore(
        member.master.host, member.master.port, member.world_size, wait_for_workers=False, **serve
    )


def loopback_interface_name() -> str:
    """Return the name of this system's loopback interface."""
    return "lo0" if sys.platform == "darwin" else "lo"


def set_interfaces(member: DynamicMember | None) -> list[str]:
    """
    Make collectives use the interface by which this process reaches the scheduler; loopback for a
    single process.

    Variables that the user has set stay.

    Returns:
        the names of the variables that were set.
    """
    name = loopback_interface_name()
    address = "127.0.0.1"
    addresses = [(name, address)]
    physical = []
    if member is not None and not _is_loopback(member.address):
        import psutil

        address = member.address
        addresses = [
            (name, entry.address)
            for name, entries in psutil.net_if_addrs().items()
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        ]
        physical = [name for name, _ in addresses if Path(f"/sys/class/net/{name}/device").exists()]
    inherited = recorded_interface_variables(os.environ)
    environ = {key: value for key, value in os.environ.items() if key not in inherited}
    found = choose_interface_variables(address, addresses, physical, environ)
    found |= record_interface_variables(found)
    os.environ.update(found)
    return list(found)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
