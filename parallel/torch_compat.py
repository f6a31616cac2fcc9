"""
Differences between torch 2.11 and 2.14, in one place.

2.13 renamed the collectives on single tensors and warns about the old names. 2.14 asks whether what
a selective policy saves passes the hooks for saved tensors, and warns without an answer.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from types import CodeType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

Function = TypeVar("Function", bound=Callable[..., Any])


class _UntracedFunction:
    """The function that an `untraced` wrapper calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


_untraced_functions: weakref.WeakSet[_UntracedFunction] = weakref.WeakSet()
_wrapper_codes: set[CodeType] = set()
"""The code of wrappers, which all of them share."""
_compiler_excluded = False
"""Whether `exclude_untraced` was called."""


def untraced(function: Function) -> Function:
    """
    Return a function that torch.compile calls without tracing it, once `exclude_untraced` was
    called.
    """
    entry = _UntracedFunction(function)
    _untraced_functions.add(entry)
    if _compiler_excluded:
        entry.function = torch.compiler.disable(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return entry.function(*args, **kwargs)

    _wrapper_codes.add(cast("Any", call).__code__)
    return cast(Function, call)


def exclude_untraced() -> None:
    """
    Exclude all `untraced` functions from torch.compile. Not before it is needed: it imports the
    compiler.
    """
    global _compiler_excluded
    if not _compiler_excluded:
        _compiler_excluded = True
        for kept in _untraced_functions:
            kept.function = torch.compiler.disable(kept.function)
        from torch._dynamo import eval_frame

        # otherwise each kind of arguments that a wrapper gets would be compiled, up to a limit
        skip_code: Callable[[CodeType], None] | None = getattr(eval_frame, "skip_code", None)
        if skip_code is not None:
            for code in _wrapper_codes:
                skip_code(code)


def exclude_function(function: Function) -> Function:
    """
    Return a function that torch.compile does not trace, if this process has imported the compiler.
    """
    is_imported = "torch._dynamo" in sys.modules
    return torch.compiler.disable(function) if is_imported else function


def all_gather_flat(full: Any, shard: Any, group: Any) -> Any:
    """Start to gather equal shards, in rank order, into ``full``; return torch's work handle."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(full, shard, group=group, async_op=True)


def reduce_scatter_flat(shard: Any, full: Any, group: Any) -> Any:
    """
    Start to sum ``full`` over the ranks, each keeping its equal part in ``shard``; return torch's
    work handle.
    """
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(shard, full, group=group, async_op=True)


def gather_rows(full: torch.Tensor, part: torch.Tensor, group: Any) -> Any:
    """
    Start to gather ``[rows, part, ...]`` along dim 1, each row in place; return torch's work
    handle.
    """
    return _resolve_group(group).allgather_into_tensor_coalesced(
        list(full.unbind()), list(part.unbind())
    )


def scatter_rows(part: torch.Tensor, full: torch.Tensor, group: Any) -> Any:
    """
    Start to sum ``[rows, length, ...]``, each rank keeping its part along dim 1; return torch's
    work handle.
    """
    return _resolve_group(group).reduce_scatter_tensor_coalesced(
        list(part.unbind()), list(full.unbind())
    )


def symmetric_empty(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return device memory that other devices of the host can access."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)


def symmetric_handle(memory: torch.Tensor, group: Any) -> Any:
    """
    Return the handle that gives each rank of a group tensors in the others' memory; all ranks call
    it.

    Raises:
        RuntimeError: the devices cannot access each other.
    """
    from torch.distributed import _symmetric_memory

    return _symmetric_memory.rendezvous(memory, _resolve_group(group))


def _resolve_group(group: Any) -> Any:
    if group is None or group is dist.group.WORLD:
        return distributed_c10d._get_default_group()
    return group


def wait_for_all_ranks(name: str, rank: int, world: int) -> None:
    """
    Return when all ranks of the default group have called this; rank 0, which may own the store,
    last.

    gloo connects every rank with every other rank while a group is created. A rank that has
    finished could end and break a connection that another rank is still checking.

    Args:
        name: of the barrier; each one has another.
    """
    store = distributed_c10d._get_default_store()
    if store is None:  # groups of MPI have none
        return
    arrived = f"pdrun/met/{name}"
    left = f"pdrun/left/{name}"
    if store.add(arrived, 1) == world:
        store.set(f"{arrived}/all", "1")
    store.wait([f"{arrived}/all"])
    if rank == 0:
        store.wait([f"{left}/all"])
    elif store.add(left, 1) == world - 1:
        store.set(f"{left}/all", "1")


@functools.cache
def list_checkpoint_options() -> dict[str, Any]:
    """
    Return options of torch's checkpoint that make versions equal: results that a selective policy
    saves stay where they are, outside of hooks for saved tensors.
    """
    from torch.utils.checkpoint import checkpoint

    is_known = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    return {"respect_saved_tensors_hooks": False} if is_known else {}


def set_timeout(seconds: float, group: Any = None) -> None:
    """Change how long collectives of a group may take before they fail."""
    call = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    call(timedelta(seconds=seconds), group)


_group_counts: Counter[tuple[int, ...]] = Counter()
_naming_lock = threading.Lock()
_unused_groups: list[Any] = []
"""Groups whose owners are gone, until `destroy_unused_groups`."""
_owned_groups: dict[int, weakref.finalize[Any, Any]] = {}
"""What happens to groups when their owners are garbage collected."""
_group_numbers = itertools.count()


def new_group(ranks: list[int], seconds: float, owner: Any) -> Any:
    """
    Return a new process group of some ranks. Only its members call this, each as often as the
    others.

    Args:
        ranks: the members, ascending.
        seconds: limit of its collectives.
        owner: when it is garbage collected, the group is unused: see `destroy_unused_groups`.

    torch names such a group by its ranks and by the number of groups of the process. That number
    can differ between ranks (a group of the first and the last pipeline stage): they would then
    wait for each other under different names. Here the name consists of the ranks and the number of
    earlier groups of exactly these ranks.
    """
    key = tuple(ranks)
    with _naming_lock:
        name = f"pdrun-{'-'.join(map(str, key))}-{_group_counts[key]}"
        _group_counts[key] += 1
        usual = distributed_c10d._hash_ranks_to_str
        distributed_c10d._hash_ranks_to_str = lambda _: name
        try:
            made = dist.new_group(
                ranks, timeout=timedelta(seconds=seconds), use_local_synchronization=True
            )
        finally:
            distributed_c10d._hash_ranks_to_str = usual
    _owned_groups[next(_group_numbers)] = weakref.finalize(owner, _unused_groups.append, made)
    return made


def forget_groups() -> None:
    """Drop the references to all groups of `new_group`, which are about to be destroyed."""
    for finalizer in _owned_groups.values():
        finalizer.detach()
    _owned_groups.clear()
    _unused_groups.clear()


def destroy_unused_groups() -> None:
    """
    Destroy unused groups of gloo, which have threads and connections; called between runs.

    Groups of accelerators are left to torch: destroying one waits for the other ranks.
    """
    for number in [one for one, finalizer in _owned_groups.items() if not finalizer.alive]:
        del _owned_groups[number]
    while _unused_groups:
        group = _unused_groups.pop()
        if group in distributed_c10d._world.pg_map and dist.get_backend(group) == "gloo":
            dist.destroy_process_group(group)


def add_product(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, fresh: bool = False
) -> None:
    """
    Add a matrix product to a sum of the same or a wider type.

    Args:
        fresh: whether the sum has no value yet.
    """
    beta = 0 if fresh else 1
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
    elif total.is_cuda and type(total) is torch.Tensor:  # torch has no shapes of it
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    elif fresh:
        total.copy_(left @ right)
    else:
        total += left @ right


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is inside a transform of torch.func (vmap, grad)."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


SENDABLE_DTYPES = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
}
"""Types that networks support."""


def as_sendable(tensor: torch.Tensor) -> torch.Tensor:
    """
    Return a contiguous tensor, or its bytes in the same memory if networks do not support its type.
    """
    if tensor.dtype in SENDABLE_DTYPES:
        return tensor
    return tensor.detach().view(-1).view(torch.uint8)


def widest_float(device: torch.device) -> torch.dtype:
    """Return the widest floating point type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64
