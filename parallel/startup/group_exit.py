"""
The end of process groups: their threads have nothing left to release when Python finalizes.

A thread of gloo releases the tensors of a finished collective. If that is the last reference of
C++ to a tensor that Python knows, the thread asks for the GIL. Python ends a thread that asks while
it finalizes, and C++ then ends the process: ``terminate called without an active exception``,
SIGABRT, after all work is done. Therefore, before the finalization:

1. `settle_threads` gives the threads the GIL until all of them sleep.
2. `destroy_groups` drops the references of this package to its groups and destroys all groups:
   torch joins the threads of a group without references.
3. Where threads are left (groups that the script keeps, or a failed process, whose collectives may
   wait for dead peers), `pin_tensors` gives C++ one more reference to each tensor that C++ has: a
   thread that releases its own one then has nothing to ask Python for.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
import weakref
from pathlib import Path
from typing import Any, Protocol

from pdrun.errors import UsageError

THREAD_NAME = "pt_gloo_runloop"
"""Name of the threads that run gloo's collectives."""
SETTLE_SECONDS = 2.0
"""Longest wait for threads that are busy."""
ROUND_SECONDS = 0.002
"""Time in which the threads can have the GIL, between two looks at them."""
QUIET_ROUNDS = 3
"""Consecutive looks at sleeping threads that count as quiet."""
SWITCH_SECONDS = 1e-5
"""Time after which a thread that waits for the GIL gets it, meanwhile."""


class GroupHolder(Protocol):
    """An object of this package that refers to process groups."""

    def drop_groups(self) -> None:
        """Drop the references; the object is not used for collectives afterwards."""
        ...


class ClosedGroup:
    """Stands for a process group that was destroyed: any use is refused."""

    def __getattr__(self, name: str) -> Any:
        """Refuse what torch asks of a group."""
        raise UsageError(
            "the job's process groups are closed",
            where="pdrun.Context.close",
            hint="call ctx.close() after the last use of a run, or make a new run",
        )


_holders: weakref.WeakSet[GroupHolder] = weakref.WeakSet()


def register_holder(holder: GroupHolder) -> None:
    """Have an object drop its process groups before they are destroyed."""
    _holders.add(holder)


def settle_threads(seconds: float = SETTLE_SECONDS) -> bool:
    """
    Let the threads of gloo finish what they do after a collective; return whether all of them
    sleep.
    """
    if not _thread_states():
        return True
    end = time.monotonic() + seconds
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        quiet = 0
        while quiet < QUIET_ROUNDS and time.monotonic() < end:
            time.sleep(ROUND_SECONDS)
            is_quiet = all(state == "S" for state in _thread_states())
            quiet = quiet + 1 if is_quiet else 0
    finally:
        sys.setswitchinterval(before)
    return quiet >= QUIET_ROUNDS


def destroy_groups() -> None:
    """Destroy all process groups and join their threads."""
    dist = sys.modules["torch.distributed"]
    settle_threads()
    for holder in list(_holders):
        holder.drop_groups()
    compat = sys.modules.get("pdrun.parallel.torch_compat")
    if compat is not None:
        compat.forget_groups()
    if dist.is_initialized():
        _forget_default_arguments(dist.group.WORLD)
        dist.destroy_process_group()


def _forget_default_arguments(group: Any) -> None:
    """
    Have functions of torch look up the default group when they are called.

    A module that was imported while the group existed has it as the default of arguments.
    """
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in vars(module).values() if module is not None else ():
        defaults = getattr(function, "__defaults__", None) or ()
        if any(value is group for value in defaults):
            function.__defaults__ = tuple(None if v is group else v for v in defaults)


def secure_exit(failed: bool) -> None:
    """
    Prepare for the finalization of Python: no thread of gloo may need it.

    Args:
        failed: whether an exception ends the process: its groups may wait for dead peers, so they
            are not destroyed, now or later.
    """
    if "torch.distributed" not in sys.modules or not _thread_states():
        return
    settle_threads()
    pin_tensors()
    if failed:
        _keep_groups()


def pin_tensors() -> None:
    """Keep all tensors that both Python and C++ refer to until the process ends."""
    torch = sys.modules["torch"]
    kinds = _subclasses(torch.Tensor)
    shared = [
        thing for thing in gc.get_objects() if type(thing) in kinds and _use_count(torch, thing) > 1
    ]
    if shared and hasattr(torch._C, "ScriptList"):
        _keep_forever(torch._C.ScriptList(shared))


def _keep_groups() -> None:
    """Never destroy this process's groups: that would wait for their collectives."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    for group in list(c10d._world.pg_map) if c10d is not None else ():
        _keep_forever(group)


def _keep_forever(thing: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _use_count(torch: Any, tensor: Any) -> int:
    """Return the number of references of C++ and Python, which counts as one, to a tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return int(tensor._use_count())


def _subclasses(kind: type) -> set[type]:
    """Return a class and all classes that inherit from it."""
    found = {kind}
    child: type
    for child in type.__subclasses__(kind):
        found |= _subclasses(child)
    return found


def _thread_states() -> list[str]:
    """Return the states of gloo's threads: R runs or waits for a processor, S sleeps."""
    states = []
    for stat in Path("/proc/self/task").glob("*/stat"):
        try:
            head, _, rest = stat.read_text(encoding="utf-8").rpartition(")")
        except OSError:  # the thread has ended
            continue
        if head.partition("(")[2] == THREAD_NAME:
            states.append(rest.split()[0])
    return states
