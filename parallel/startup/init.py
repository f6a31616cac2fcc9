"""
`pdrun.init()`: this worker's rank, device and process group, for any way of starting a job.

The environment decides between six situations; the innermost launcher wins:

1. under pdrun, 2. under torchrun (or anything that sets RANK and WORLD_SIZE as it does): the
variables are read; 3. a dynamic cluster (PDRUN_ROLE or MS_ROLE): the process registers with the
scheduler and gets its rank; a process with the scheduler's role serves until the job ends and exits
with its exit code; 4. one of several tasks of mpirun, srun or another launcher: the tasks
rendezvous (`pdrun.parallel.startup.mpi_tasks`); 5. one rank of an Ascend rank table (RANK_ID and
RANK_TABLE_FILE, `pdrun.parallel.startup.rank_table`); 6. a single process: a world of one, without
a launcher and without a network.

Limits: one context per process. The default group is torch's own: a script that has made it already
keeps it.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pdrun import elastic
from pdrun.backends.base import Backend
from pdrun.backends.detect import choose_backend, get_backend, probe_all
from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.startup import excepthook as excepthook
from pdrun.worker_env import WorkerEnv

if TYPE_CHECKING:
    import torch

    from pdrun.rendezvous.clients.member import DynamicMember


PLAN_VARIABLE = "PDRUN_PLAN"
"""
Set by ``pdrun plan``: this process is rank 0 of a job that does not exist, and makes no group.
"""


@dataclass(frozen=True)
class Context:
    """The result of `init`. Counts are at least 1, ranks and indices at least 0."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int
    """In a dynamic cluster counted as if every host had as many workers as this one."""
    device: torch.device | str
    """
    This worker's device, already the current one; a text (``cuda:1``) if torch is not installed.
    """
    backend: str
    """Kind of the device: cpu, cuda, rocm, npu, xpu or mps."""
    collective: str
    """torch.distributed's backend for this device: gloo, nccl, hccl or xccl."""
    generation: int = 0
    """Counts the starts of the job: each restart after a failure adds one."""
    restart_count: int = 0
    """Restarts of the job so far: 0 the first time."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and saves."""
        return self.rank == 0

    def close(self) -> None:
        """
        Leave the process group that `init` made; a group that the script made is kept. A second
        call does nothing.
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
    """The state of this process: mutable, one instance, private."""

    context: Context | None = None
    member: DynamicMember | None = None
    """Its membership of a dynamic cluster, which outlives a closed context."""
    worker: WorkerEnv | None = None
    """Its place in that cluster."""
    store: Any = None
    """Torch's store of that cluster."""
    groups: int = 0
    """Process groups made so far; separates their keys in the store."""
    owns_group: bool = False
    pid: int = 0
    interfaces: list[str] = field(default_factory=list)
    """Names of variables (GLOO_SOCKET_IFNAME ...) that were set here and must be unset."""


_process = _ProcessState()


def init(
    *,
    backend: str | None = None,
    collective: str | None = None,
    timeout: float | None = None,
    group: bool = True,
) -> Context:
    """
    Return this worker's context; make its device the current one and create torch's default process
    group.

    With a group it returns when all ranks have arrived. A second call returns the same context. The
    group is left when the process ends, or by `Context.close`.

    Args:
        backend: kind of device (cpu, cuda, rocm, npu, xpu, mps); default: the launcher's choice,
            else torch's.
        collective: torch.distributed's backend, if it is not the device's usual one (``gloo`` on a
            GPU).
        timeout: seconds that a collective may take before it fails; default: torch's own.
        group: False makes no process group; torch is then not needed.

    An uncaught error is printed in one line and ends the script with the error's exit code.

    Raises:
        ConfigError: an incomplete or contradictory environment, a missing device, or a torch
            without the collective.
        RendezvousError: the scheduler of a dynamic cluster cannot be reached or refuses this
            process.
    """
    excepthook.install_excepthook()
    elastic.attach()
    if timeout is not None and timeout <= 0:
        raise UsageError(f"timeout must be above 0, got {timeout}", where="pdrun.init")
    if _process.context is None:
        _process.context = _build_context(os.environ, backend, collective, group)
        if not _process.pid:
            atexit.register(_close_at_exit)
        _process.pid = os.getpid()
    else:
        _check_same_arguments(_process.context, backend, collective)
    if group and PLAN_VARIABLE not in os.environ:
        _open_group(_process.context, collective or "", timeout)
    return _process.context


def _check_same_arguments(context: Context, backend: str | None, collective: str | None) -> None:
    for wanted, has, what in (
        (backend, context.backend, "backend"),
        (collective, context.collective, "collective"),
    ):
        if wanted not in (None, has):
            raise ConfigError(
                f"{what} {wanted} was requested, but this process already has {has}",
                where="pdrun.init",
            )


def _build_context(
    environ: Mapping[str, str], backend: str | None, collective: str | None, group: bool
) -> Context:
    """Detect the situation and choose the device."""
    worker = WorkerEnv.from_env(environ)
    if worker is None:
        worker = (
            _join_dynamic_cluster(environ, group)
            or _join_mpi_tasks(environ, group)
            or _join_by_rank_table(environ, group)
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


def find_worker() -> WorkerEnv | None:
    """Return this worker's place after `init`; None for a single process without a launcher."""
    return WorkerEnv.from_env(os.environ) or _process.worker


def _single_process() -> WorkerEnv:
    return WorkerEnv(
        0, 1, 0, 1, 0, 1, master_addr="", master_port=0, run_id="", device_kind="", collective=""
    )


def _import_torch(group: bool) -> None:
    """
    Import torch early.

    On a slow disk or a busy machine the import blocks the interpreter for longer than the heartbeat
    timeout.
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
    """
    Join the other tasks of mpirun, srun or another launcher, if this process is one of several.
    """
    if _process.worker is None:
        from pdrun.parallel.startup.mpi_tasks import join_tasks

        _process.member, _process.worker = join_tasks(environ, lambda: _import_torch(group))
    return _process.worker


def _join_by_rank_table(environ: Mapping[str, str], group: bool) -> WorkerEnv | None:
    """Join the other ranks of an Ascend rank table, if RANK_ID says that this process is one."""
    if _process.worker is None and any(name in environ for name in ("RANK_ID", "RANK_SIZE")):
        from pdrun.parallel.startup.rank_table import join_by_table

        _process.member, _process.worker = join_by_table(environ, lambda: _import_torch(group))
    return _process.worker


def _find_backend(kind: str, group: bool) -> Backend:
    """Return the table of the named kind, or of what this machine has."""
    if kind:
        return get_backend(kind)
    if group or _has_torch():
        from pdrun.backends.collectives import native_backend

        return native_backend()
    return choose_backend("auto", probe_all(os.environ))[0]


def _has_torch() -> bool:
    from importlib.util import find_spec

    return find_spec("torch") is not None


def _open_device(table: Backend, index: int, group: bool) -> Any:
    """Return the device, opened by torch; its name if torch is not installed."""
    if group or _has_torch():
        from pdrun.backends.collectives import open_device

        return open_device(table, index)
    return f"{table.torch_device}:{index}" if table.has_indices else table.torch_device


def _open_group(context: Context, collective: str, timeout: float | None) -> None:
    """Make the default process group, unless the script has made it already."""
    from pdrun.backends.collectives import group_backend, import_torch, open_group

    dist = import_torch().distributed
    table = get_backend(context.backend)
    if dist.is_available() and dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (context.rank, context.world_size):
            raise ConfigError(
                f"the script's process group has rank {dist.get_rank()} of "
                f"{dist.get_world_size()}, the launcher assigned rank {context.rank} of "
                f"{context.world_size}",
                where="pdrun.init",
            )
        return
    group_backend(table, collective)  # raises before anything is opened
    store = _open_store(dist, context, os.environ)
    open_group(table, collective, context.device, context.rank, context.world_size, timeout, store)
    _process.owns_group = True
    _process.groups = _process.groups + 1
    if context.world_size > 1:
        from pdrun.parallel import torch_compat

        torch_compat.wait_for_all_ranks(str(_process.groups), context.rank, context.world_size)


def _open_store(dist: Any, context: Context, environ: Mapping[str, str]) -> Any:
    """
    Return the store for the rendezvous of the workers; None: MASTER_ADDR and MASTER_PORT name it.
    """
    from pdrun.parallel.startup import dynamic_cluster as dynamic_cluster

    if _process.member is not None:
        _process.interfaces += dynamic_cluster.set_interfaces(_process.member)
        _process.store = _process.store or dynamic_cluster.open_store(dist, _process.member)
        return dist.PrefixStore(f"pdrun/{_process.groups}", _process.store)
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        return None
    if context.world_size > 1:
        name = "MASTER_ADDR" if not environ.get("MASTER_ADDR") else "MASTER_PORT"
        raise ConfigError(
            "is not set, but RANK and WORLD_SIZE are",
            where=name,
            hint="start the script with pdrun",
        )
    # a world of one needs neither a network nor this host's name
    _process.interfaces += dynamic_cluster.set_interfaces(None)
    return dist.HashStore()


def _close_context() -> None:
    """Undo `init`. The context object keeps its numbers; a later `init` starts again."""
    owns = _process.owns_group and _process.pid == os.getpid()
    for name in _process.interfaces:
        os.environ.pop(name, None)
    _process.context = None
    _process.owns_group = False
    _process.interfaces = []
    if owns:
        from pdrun.parallel.startup import group_exit

        group_exit.destroy_groups()


def _close_at_exit() -> None:
    """
    Close the context. After an exception the group is not destroyed: that may wait for dead peers.
    """
    if _process.pid != os.getpid():
        return
    failed = getattr(sys, "last_value", None) is not None
    if failed:
        _process.owns_group = False
    _close_context()
    if "torch" in sys.modules:
        from pdrun.parallel.startup import group_exit

        group_exit.secure_exit(failed)
