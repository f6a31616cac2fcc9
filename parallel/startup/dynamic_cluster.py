"""
A dynamic cluster seen from the script: `init` registers this process with the scheduler, which
gives it a rank.

The membership lasts as long as the process; when a peer fails, it ends this process and says why.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pdrun.worker_env import WorkerEnv

if TYPE_CHECKING:
    from pdrun.rendezvous.clients.member import DynamicMember


def join_cluster(
    environ: Mapping[str, str], prepare: Callable[[], None]
) -> tuple[DynamicMember | None, WorkerEnv | None]:
    """
    Join the cluster that the environment names; (None, None) where it names none.

    A process whose role is the scheduler never returns: it serves, and leaves with the job's exit
    code. ``prepare`` is called before others count on this process's heartbeats: what holds the
    interpreter for long is done there.

    Raises:
        ConfigError: the variables contradict each other, or one is missing.
        RendezvousError, AuthenticationError: the job did not come together.
    """
    from pdrun.rendezvous.clients import dynamic

    spec = dynamic.from_environ(environ)
    if spec is None:
        return None, None
    if spec.role == "scheduler":
        sys.exit(dynamic.run_scheduler(spec))
    prepare()
    member = dynamic.join_cluster(spec)
    return member, worker_env_of(member)


def worker_env_of(member: DynamicMember) -> WorkerEnv:
    """
    Return the member's place in the launcher's terms.

    Nobody is told how many workers the other hosts have: hosts are counted as if they all had as
    many as this one.
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
    Return torch's store: rank 0 serves it on the socket that it has held since it joined, the
    others connect.

    Nothing is retried and no port is guessed: the socket was listening before anybody was told its
    address.
    """
    held = member.store_socket
    member.store_socket = None
    serve = (
        {"is_master": True, "master_listen_fd": held.detach()}
        if held is not None
        else {"is_master": False}
    )
    return dist.TCPStore(
        member.master.host, member.master.port, member.world_size, wait_for_workers=False, **serve
    )


def is_on_loopback(member: DynamicMember) -> bool:
    """Whether all workers meet on this machine's loopback address."""
    return member.master.host.startswith("127.") or member.master.host == "::1"


def loopback_interface_name() -> str:
    """Return the name that this system gives its loopback interface."""
    return "lo0" if sys.platform == "darwin" else "lo"


def bind_gloo_to_loopback() -> bool:
    """
    Keep gloo on loopback unless the user chose an interface; return whether the variable was set
    here.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return False
    os.environ["GLOO_SOCKET_IFNAME"] = loopback_interface_name()
    return True
