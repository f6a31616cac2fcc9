"""
A fast exit for forked workers: modules of the fork server are not finalized.

Loaded by path in the fork server's interpreter. Standard library only.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import sys
import time
import types
import weakref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KEPT_MODULES = ("sys", "builtins", "__main__", "__mp_main__")
TORN_DOWN_PREFIX = "torch.distributed"
"""
Modules that are torn down as in an executed process: scripts leave process groups in them, which
must be destroyed.
"""


class _ModuleProxy:
    """Replaces a module of the fork server in sys.modules while the interpreter finalizes."""

    def __init__(self, module: types.ModuleType) -> None:
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


class FastExit:
    """
    Makes the exit of a worker cheap: modules of the fork server are not finalized, by Python or C.

    The worker's own objects end as in any process: threads are joined, exit handlers run, objects
    are destroyed, files are flushed, and libraries that it has loaded are finalized. Constructed
    before any other exit handler is registered, so that `run_last` runs last. `arm_exit` is called
    in the worker.
    """

    def __init__(self) -> None:
        self.modules: dict[str, types.ModuleType] | None = None
        atexit.register(self.run_last)

    def freeze_imports(self) -> None:
        """Exclude all present objects from garbage collection. Called after the imports."""
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            found = finalizer.peek()
            if found and (getattr(found[1], "__module__", None) or "").startswith("torch."):
                # operators that torch registered from Python end with the process
                finalizer.atexit = False
        gc.freeze()

    def arm_exit(self) -> None:
        """Enable the fast exit, in the worker."""
        self.modules = {
            name: module
            for name, module in sys.modules.items()
            if name not in KEPT_MODULES and not name.startswith(TORN_DOWN_PREFIX)
        }
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "on_exit"):
            return  # not glibc: exit as any process
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
        libc["__cxa_atexit"](ctypes.cast(libc.fflush, ctypes.c_void_p), None, None)

    def run_last(self) -> None:
        """Flush open files, and hide the fork server's modules from the finalization."""
        if self.modules is None:
            return
        for thing in gc.get_objects():
            # Not isinstance: a weak proxy of a dead object would raise.
            if issubclass(type(thing), io.IOBase):
                try:
                    if not thing.closed and thing.writable():
                        thing.flush()
                except Exception:
                    continue
        if len(os.listdir("/proc/self/task")) > 1:
            # A thread of torch may wait for the GIL to release a last tensor. It must get it before
            # process groups are destroyed, because that joins the thread: a fast exit would hang.
            for _ in range(3):
                time.sleep(0.001)
        kept = []
        for name, module in self.modules.items():
            if sys.modules.get(name) is module:
                kept.append(module)
                sys.modules[name] = _ModuleProxy(module)  # type: ignore[assignment]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
