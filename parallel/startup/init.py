"""
`pdrun.init()`: who am I, on which device, and how do I talk to the others, however the job was
started.

Five situations, told apart by the environment; the innermost launcher wins:

1. under pdrun, 2. under torchrun (or anything that sets RANK and WORLD_SIZE as it does): the variables are read;
3. a dynamic cluster (PDRUN_ROLE or MS_ROLE): the process registers with the scheduler and is given its rank; a process
   whose role is the scheduler serves until the job is over and leaves with the job's exit code, never returning;
4. one of several tasks of mpirun, srun and their kin: the tasks meet by themselves (`pdrun.parallel.startup.mpi_tasks`);
5. alone: a world of one, without a launcher and without a network.

Limits: one context a process; the default group is torch's own, so a script that has made it
already keeps it.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pdrun import elastic
from pdrun.backends.base import Backend
from pdrun.backends.detect import choose_backend, probe_all
from pdrun.backends.detect import get_backend as backend_named
from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.startup import excepthook as excepthook
from pdrun.worker_env import WorkerEnv

if TYPE_CHECKING:
    import torch

    from pdrun.rendezvous.clients.member import DynamicMember


@dataclass(frozen=True)
class Context:
    """What `init` found out. Counts are at least 1, ranks and indices at least 0."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int
    """In a dynamic cluster counted as if every host had as many workers as this one."""
    device: torch.device | str
    """
    This worker's device, already made the current one; as text (``cuda:1``) where torch is not
    installed.
    """
    backend: str
    """Kind of the device: cpu, cuda, rocm, npu, xpu or mps."""
    collective: str
    """torch.distributed's name of what moves this device's tensors: gloo, nccl, hccl or xccl."""
    generation: int = 0
    """Grows by one each time the job is started again after a failure."""
    restart_count: int = 0
    """Restarts of the job so far: 0 the first time."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0: the one that prints and saves."""
        return self.rank == 0

    def close(self) -> None:
        """
        Leave the process group that `init` made; one that the script made is left alone. May be
        called twice.
        """
        _close_context()

    def __enter__(self) -> Context:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass
class _ProcessState:
    """What this process has: mutable, one, private."""

    context: Context | None = None
    member: DynamicMember | None = None
    """Its membership of a dynamic cluster, which outlives a closed context."""
    worker: WorkerEnv | None = None
    """Its place in that cluster."""
    store: Any = None
    """Torch's store of that cluster."""
    groups: int = 0
    """Process groups made so far; keeps their keys in the store apart."""
    owns_group: bool = False
    pid: int = 0
    interface: bool = False
    """Whether GLOO_SOCKET_IFNAME was set here and is to be taken back."""


_process = _ProcessState()


def init(
    *,
    backend: str | None = None,
    collective: str | None = None,
    timeout: float | None = None,
    group: bool = True,
) -> Context:
    """
    Return this worker's context; make its device the current one and torch's default process group.

    With a group it returns when all ranks have come. A second call returns the same context. The
    group is left when the process ends, or by `Context.close`.

    Args:
        backend: kind of device (cpu, cuda, rocm, npu, xpu, mps); default: the launcher's choice,
            else what torch has.
        collective: torch.distributed's backend, when it should not be the usual one of the device
            (``gloo`` on a GPU).
        timeout: seconds that a collective may take before it fails; default: torch's own.
        group: False makes no process group; then torch is not needed.

    An error that the script does not catch is told in one line and ends it with the error's exit
    code.

    Raises:
        ConfigError: a half-set or contradictory environment, a missing device or a torch without
            the collective.
        RendezvousError: the scheduler of a dynamic cluster cannot be reached or refuses this
            process.
    """
    excepthook.install_excepthook()
    elastic.attach()
    if timeout is not None and timeout <= 0:
        raise UsageError(f"a timeout of {timeout} s is not above 0", where="pdrun.init")
    if _process.context is None:
        _process.context = _build_context(os.environ, backend, collective, group)
        if not _process.pid:
            atexit.register(_close_at_exit)
        _process.pid = os.getpid()
    else:
        _check_same_arguments(_process.context, backend, collective)
    if group:
        _open_group(_process.context, collective or "", timeout)
    return _process.context


def _check_same_arguments(context: Context, backend: str | None, collective: str | None) -> None:
    for wanted, has, what in (
        (backend, context.backend, "backend"),
        (collective, context.collective, "collective"),
    ):
        if wanted not in (None, has):
            raise ConfigError(
                f"{what} {wanted} was asked for, but this process already has {has}",
                where="pdrun.init",
            )


def _build_context(
    environ: Mapping[str, str], backend: str | None, collective: str | None, group: bool
) -> Context:
    """Find out which situation this is, and choose the device."""
    worker = WorkerEnv.from_env(environ)
    if worker is None:
        worker = (
            _join_dynamic_cluster(environ, group)
            or _join_mpi_tasks(environ, group)
            or _single_process()
        )
    table = _find_backend(backend or worker.device_kind, group)
    return Context(
        rank=worker.rank,
        world_size=worker.world_size,
        local_rank=worker.local_rank,
        local_world_size=worker.local_world_size,
        node_rank=worker.node_rank,
        nodes=worker.nodes,
        device=_open_device(table, worker.device_index, group),
        backend=table.name,
        collective=collective or (worker.collective if not backend else "") or table.collective,
        generation=worker.generation,
        restart_count=worker.restart_count,
    )


def _single_process() -> WorkerEnv:
    return WorkerEnv(
        0, 1, 0, 1, 0, 1, master_addr="", master_port=0, run_id="", device_kind="", collective=""
    )


def _import_torch(group: bool) -> None:
    """
    Import torch now: it would be next anyway.

    From a slow disk, or on a machine that is busy, that holds the interpreter longer than others
    bear to hear nothing.
    """
    if group or _has_torch():
        from pdrun.backends.collectives import import_torch

        import_torch()


def _join_dynamic_cluster(environ: Mapping[str, str], group: bool) -> WorkerEnv | None:
    """Join the dynamic cluster that the environment names, if it names one."""
    if _process.worker is None and any(name.startswith(("PDRUN_", "MS_")) for name in environ):
        from pdrun.parallel.startup.dynamic_cluster import join_cluster

        _process.member, _process.worker = join_cluster(environ, lambda: _import_torch(group))
    return _process.worker


def _join_mpi_tasks(environ: Mapping[str, str], group: bool) -> WorkerEnv | None:
    """Meet the other tasks of mpirun, srun and their kin, where this process is one of several."""
    if _process.worker is None:
        from pdrun.parallel.startup.mpi_tasks import join_tasks

        _process.member, _process.worker = join_tasks(environ, lambda: _import_torch(group))
    return _process.worker


def _find_backend(kind: str, group: bool) -> Backend:
    """Return the table of the kind that was named, or of what this machine offers."""
    if kind:
        return backend_named(kind)
    if group or _has_torch():
        from pdrun.backends.collectives import native_backend

        return native_backend()
    return choose_backend("auto", probe_all(os.environ))[0]


def _has_torch() -> bool:
    from importlib.util import find_spec

    return find_spec("torch") is not None


def _open_device(table: Backend, index: int, group: bool) -> Any:
    """Return the device, opened by torch; only its name where torch is not installed."""
    if group or _has_torch():
        from pdrun.backends.collectives import open_device

        return open_device(table, index)
    return f"{table.torch_device}:{index}" if table.has_indices else table.torch_device


def _open_group(context: Context, collective: str, timeout: float | None) -> None:
    """Make the default process group, unless the script has made it already."""
    from pdrun.backends.collectives import group_backend, import_torch, open_group

    dist = import_torch().distributed
    table = backend_named(context.backend)
    if dist.is_available() and dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (context.rank, context.world_size):
            raise ConfigError(
                f"the script's process group says rank {dist.get_rank()} of {dist.get_world_size()}, the launcher rank "
                f"{context.rank} of {context.world_size}",
                where="pdrun.init",
            )
        return
    group_backend(table, collective)  # complain before anything is opened
    store = _open_store(dist, context, os.environ)
    open_group(table, collective, context.device, context.rank, context.world_size, timeout, store)
    _process.owns_group = True
    _process.groups = _process.groups + 1
    if context.world_size > 1:
        from pdrun.parallel import torch_compat

        torch_compat.wait_for_all_ranks(str(_process.groups), context.rank, context.world_size)


def _open_store(dist: Any, context: Context, environ: Mapping[str, str]) -> Any:
    """
    Return the store at which the workers meet, or None for the one that MASTER_ADDR and MASTER_PORT
    name.
    """
    from pdrun.parallel.startup import dynamic_cluster as dynamic_cluster

    if _process.member is not None:
        if dynamic_cluster.is_on_loopback(_process.member):
            _process.interface = dynamic_cluster.bind_gloo_to_loopback()
        _process.store = _process.store or dynamic_cluster.open_store(dist, _process.member)
        return dist.PrefixStore(f"pdrun/{_process.groups}", _process.store)
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        return None
    if context.world_size > 1:
        name = "MASTER_ADDR" if not environ.get("MASTER_ADDR") else "MASTER_PORT"
        raise ConfigError(
            "is not set, though RANK and WORLD_SIZE are",
            where=name,
            hint="start the script with pdrun",
        )
    _process.interface = (
        dynamic_cluster.bind_gloo_to_loopback()
    )  # a world of one needs neither a network nor this host's name
    return dist.HashStore()


def _close_context() -> None:
    """
    Undo what `init` did; the context object keeps its numbers, and a later `init` starts anew.
    """
    owns = _process.owns_group and _process.pid == os.getpid()
    if _process.interface:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
    _process.context = None
    _process.owns_group = False
    _process.interface = False
    if owns:
        from pdrun.backends.collectives import import_torch

        dist = import_torch().distributed
        if dist.is_initialized():
            dist.destroy_process_group()


def _close_at_exit() -> None:
    """
    Leave in order; after an exception the group is left as it is, since destroying one may wait for
    dead peers.
    """
    if _process.pid != os.getpid():
        return
    if getattr(sys, "last_value", None) is not None:
        _process.owns_group = False
    _close_context()
