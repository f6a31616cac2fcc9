"""
What a user can do about the first cause of a failed job: for the summary on the terminal, and for
the screens that read the event log. Pure.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator

from pdrun.text import CLEAN_EXIT_TEXT

MAX_SEARCHED_CHARS = 4_000
"""Characters at the end of a traceback that are searched."""
_EARLY_END = re.compile(rf"; (rank \d+ on [^;]* {re.escape(CLEAN_EXIT_TEXT)})")
_BY_TEXT = (
    (
        r"OutOfMemoryError|CUDA out of memory|NPU out of memory",
        "the device's memory is full: use a smaller batch,"
        " or check for another process on that device",
    ),
    (
        r"No space left on device|Disk quota exceeded|PytorchStreamWriter failed"
        r"|basic_ios::clear: iostream error|unexpected pos \d+ vs \d+",
        "a file could not be written: is that disk full, or a quota used up? Check with"
        " 'df -h' on that node; pdrun doctor looks at the disks of logs and temporary files",
    ),
    (
        r"Unable to find address for: |Unable to find interface |[Nn]o socket interface found",
        "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names an interface that this machine does not"
        " have: 'pdrun doctor --only variables' there names those that it has",
    ),
    (
        r"driver on your system is too old|driver version is insufficient"
        r"|forward compatibility was attempted|[Nn]o CUDA-capable device|No CUDA GPUs are available"
        r"|invalid device ordinal",
        "'pdrun doctor --only driver,devices,visibility' on that node compares its driver with"
        " torch's, and the variables that hide devices",
    ),
)


def split_early_end(reason: str) -> tuple[str, str]:
    """
    Split a verdict's reason into itself and the part that names the ranks that had ended well
    before: behind a long reason it would be cut off.
    """
    found = _EARLY_END.search(reason)
    if found is None:
        return reason, ""
    return reason[: found.start()] + reason[found.end() :], found[1]


def suggest_remedies(
    kind: str,
    summary: str,
    traceback: str = "",
    *,
    code: int = 0,
    signal: int = 0,
    can_retry: bool = False,
    python: str = "",
    early_end: str = "",
) -> Iterator[str]:
    """
    Yield what the user can do, if that is known.

    Args:
        kind: of the first cause: "oom", "signal", "hang", "communication", "exception" and others.
        summary: its one line.
        traceback: its traceback; empty: none.
        code: its exit code.
        signal: that ended it; 0: none.
        can_retry: a new start might succeed.
        python: the workers' interpreter; empty: unknown.
        early_end: which ranks had ended well before; empty: none.
    """
    if kind == "oom":
        yield (
            "the memory limit of this machine or container was reached:"
            " start fewer workers, or raise the limit"
        )
    elif kind == "signal" and signal == 9:
        yield (
            "a process outside pdrun killed it, often the kernel for lack of memory:"
            " check 'dmesg' on that node"
        )
    elif kind == "signal" and signal == 7:
        yield "is /dev/shm full there ('df -h /dev/shm')? data loaders keep their batches in it"
    elif kind == "hang":
        yield (
            "--hang-timeout must be longer than the longest normal pause,"
            " such as an evaluation or a checkpoint"
        )
    elif kind == "communication" and early_end:
        yield (
            f"{early_end}: do all ranks make the same number of steps?"
            " a shorter data loader ends its loop too early"
        )
    elif kind == "communication":
        yield (
            "no worker failed independently:"
            " check the network, and for a timeout while one rank was busy"
        )
    elif summary.startswith("ModuleNotFoundError"):
        name = f", {python}" if python else ""
        yield f"is it installed for the interpreter of the workers{name}?"
    elif kind == "startup" and os.strerror(errno.EAGAIN) in summary:
        yield (
            "the limit of processes is reached on that node:"
            " check ulimit -u, and pids.max of the control group"
        )
    elif kind == "startup" and code == 126 and not can_retry:
        yield (
            "check its permissions and its first line (#!);"
            " for a Python script leave --no-python out"
        )
    else:
        text = f"{summary}\n{traceback[-MAX_SEARCHED_CHARS:]}"
        yield from (remedy for pattern, remedy in _BY_TEXT if re.search(pattern, text))
