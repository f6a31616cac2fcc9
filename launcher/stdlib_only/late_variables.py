"""
Variables that a forked worker sets too late, although an executed one would not.

A worker that is forked has torch imported already. A variable that a library reads when it is
imported has no effect if the program sets it before its own ``import``. It has no effect in an
executed worker either if the program sets it later, and it changes nothing if the program never
imports the library. Therefore the worker notices its program's first import of each library, and
compares the variables then.

Loaded by path in the fork server's interpreter, which may have no pdrun. Standard library only.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LATE_VARIABLES = (
    (
        ("torch",),
        "",
        r"OMP_\w+|GOMP_\w+|MKL_NUM_THREADS|PYTORCH_JIT|PYTORCH_JIT_(?:DISABLE|STATS|TIME)"
        r"|TORCH_(?:SHOW_CPP_STACKTRACES|CPP_LOG_LEVEL|DISTRIBUTED_DEBUG|LOGS|LOGS_FORMAT|LOGS_OUT"
        r"|TRACE|DTRACE|USE_RTLD_GLOBAL|DEVICE_BACKEND_AUTOLOAD|CUDA_SANITIZER"
        r"|ALLOW_TF32_CUBLAS_OVERRIDE|BLAS_PREFER_\w+)",
    ),
    (("torch",), r"backend:", r"PYTORCH_(?:CUDA_|HIP_|)ALLOC_CONF"),
    (("numpy", "torch"), "", r"OPENBLAS_\w+|GOTO_NUM_THREADS|NPY_\w+|NUMPY_\w+"),
    (("tqdm", "torch"), "", r"TQDM_\w+"),
    (
        ("torch._dynamo", "torch._inductor"),
        "",
        r"TORCH_COMPILE_\w+|TORCHDYNAMO_(?!DISABLE$)\w+|TORCHINDUCTOR_(?!CACHE_DIR$)\w+",
    ),
)
"""
(modules, values, names): the variables that are read when the first of these modules is imported,
and not again; of some only if the value contains a pattern. torch imports numpy and tqdm.
Tests set variables late and compare forked workers with executed ones; not every name has a case:
TORCH_CPP_LOG_LEVEL and TORCH_COMPILE_DISABLE were tried by hand, and other names of torch._dynamo
and torch._inductor not at all. The allocator's backend was tried with CUDA (torch
2.11: a late backend ends in an internal error, every other setting works until the first
allocation).

Not in the table, because a late value has its effect: TORCHINDUCTOR_CACHE_DIR, TORCHDYNAMO_DISABLE,
PYTORCH_NVML_BASED_CUDA_CHECK, KINETO_*, MKL_VERBOSE, ONEDNN_*, TZ, NCCL_*, GLOO_*. Because it has
none in an executed worker either: PYTHON*, LD_*, MALLOC_*. Because torch's own OpenMP does not read
them: KMP_*, which libraries set.
"""


@functools.cache
def _compile_table() -> tuple[tuple[tuple[str, ...], re.Pattern[str], re.Pattern[str]], ...]:
    """Compile the table on first use: 2 ms that most commands do not need."""
    return tuple(
        (modules, re.compile(values), re.compile(names))
        for modules, values, names in LATE_VARIABLES
    )


def is_late_variable(name: str) -> bool:
    """Return whether a library reads this variable when it is imported, and not again."""
    return any(names.fullmatch(name) for _, _, names in _compile_table())


class _WatchedSpec(ModuleSpec):
    """
    The spec of a module that is imported already and that the program has not imported yet.

    An import statement looks up ``__spec__._initializing`` of a module that is in ``sys.modules``.
    """

    watch: Callable[[str], None] = staticmethod(lambda name: None)

    @property
    def _initializing(self) -> bool:
        self.__class__ = ModuleSpec  # type: ignore[assignment]
        try:
            _WatchedSpec.watch(self.name)
        except Exception:  # an import never fails because of this
            pass
        return bool(self.__dict__.get("_initializing", False))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__dict__["_initializing"] = value


_WatchedSpec.__name__ = _WatchedSpec.__qualname__ = "ModuleSpec"


def watch_imports() -> None:
    """
    Watch the modules of the table that are imported. Called in the fork server, before the forks,
    so that workers find the table compiled.
    """
    tops = {name.partition(".")[0] for modules, _, _ in _compile_table() for name in modules}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in tops:
            spec = getattr(module, "__dict__", {}).get("__spec__")
            if type(spec) is ModuleSpec:
                spec.__class__ = _WatchedSpec


class LateVariables:
    """Compares the variables with those of the fork at the first import of each library."""

    def __init__(self, report: Callable[[list[str]], None]) -> None:
        self._report = report
        self._given = dict(os.environ)
        self._waiting = list(_compile_table())

    def start(self) -> None:
        """Compare from now on. Called in a worker."""
        _WatchedSpec.watch = self._on_import

    def _on_import(self, name: str) -> None:
        """The program imports a module for the first time."""
        reached = [
            entry
            for entry in self._waiting
            if any(name == module or name.startswith(f"{module}.") for module in entry[0])
        ]
        if not reached:
            return
        self._waiting = [entry for entry in self._waiting if entry not in reached]
        now = dict(os.environ)
        changed = [key for key in {*now, *self._given} if now.get(key) != self._given.get(key)]
        found = [
            key
            for key in changed
            if any(
                names.fullmatch(key) and values.search(now.get(key, ""))
                for _, values, names in reached
            )
        ]
        if found:
            self._report(sorted(found))


def report_to_agent(agent: str, names: list[str]) -> None:
    """
    Report late variables to the agent, which prints one line per job; without an agent print them.

    Args:
        agent: path of the agent's socket.
        names: the variables.
    """
    import json
    import socket

    message: dict[str, Any] = {
        "rank": int(os.environ.get("RANK", "0")),
        "generation": int(os.environ.get("PDRUN_GENERATION", "0")),
        "late": names[:8],
    }
    while len(json.dumps(message)) > 400:  # a datagram of the agent has at most 512 bytes
        message["late"].pop()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as link:
            link.sendto(json.dumps(message).encode(), agent)
    except OSError:
        text = f"pdrun: {', '.join(names)}: set too late for this forked worker; use --start exec\n"
        os.write(2, text.encode(errors="replace"))
