"""
Collect the stacks of the workers of this node, within COLLECT_SECONDS and without blocking.

For each worker the first source that answers is used:

1. ``py-spy dump --native``, if py-spy is installed: Python and native frames, read from outside.
2. faulthandler: forked workers, and workers that use `pdrun.elastic`, write their stacks to a file
   when they get STACKS_SIGNAL. The signal is sent only if the worker handles it and has that file
   open. So it never ends a process, and never writes to a file of the program.
3. /proc: the state, and the kernel function in which the worker waits.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

from pdrun.elastic import STACKS_SIGNAL
from pdrun.launcher.common import procfs
from pdrun.launcher.diagnosis.stacks import (
    group_stacks,
    is_program_running,
    normalize_stack,
    parse_threads,
    truncate_text,
)
from pdrun.rendezvous.protocol.messages import StackGroup

COLLECT_SECONDS = 3.0
"""Time after which missing stacks are given up."""
SETTLE_SECONDS = 0.15
"""A worker's file is complete if it did not grow for this time."""
POLL_SECONDS = 0.05
MAX_PY_SPY = 16
"""Workers that are examined with py-spy at most."""
_MAX_DUMP_BYTES = 1 << 20


@dataclass
class WorkerDump:
    """The stack dump of one worker."""

    rank: int
    slot: int
    pid: int
    file: Path | None = None
    """The file to which faulthandler writes, if it was requested."""
    old_bytes: int = 0
    """Bytes of the file that are older than the request."""
    size: int = 0
    grown_at: float = 0.0
    spy: subprocess.Popen[bytes] | None = None
    spy_output: IO[bytes] | None = None


class StackRequest:
    """A request for the stacks of workers. Call `poll_workers` at `deadline` until it is True."""

    _killed_spies: ClassVar[list[subprocess.Popen[bytes]]] = []
    """Killed py-spy processes that may still be in state D; a later request reaps them."""

    def __init__(
        self,
        workers: Sequence[tuple[int, int, int]],
        folder: Path,
        signal: Callable[[int, int], None],
        now: float,
        active: tuple[int, ...] = (),
        *,
        uses_py_spy: bool = True,
    ) -> None:
        """
        Args:
            workers: (rank, slot, pid) of each.
            folder: the folder of the workers' files.
            signal: sends a signal (number) to a worker (slot).
            now: monotonic time.
            active: ranks that were busy at that moment.
            uses_py_spy: ask py-spy, too, which stops a process for a moment.
        """
        self.active = active
        self._give_up_at = now + COLLECT_SECONDS
        self.deadline = now + POLL_SECONDS
        self._dumps = [WorkerDump(*worker) for worker in workers]
        self._killed_spies[:] = [spy for spy in self._killed_spies if spy.poll() is None]
        spy = shutil.which("py-spy") if uses_py_spy else None
        for number, worker in enumerate(self._dumps):
            self._request_dump(worker, folder, signal, now)
            if spy and number < MAX_PY_SPY:
                self._start_py_spy(spy, worker)

    def poll_workers(self, now: float) -> bool:
        """Check for answers; return whether all have arrived or the time is over."""
        self.deadline = now + POLL_SECONDS
        whole = [self._is_complete(worker, now) for worker in self._dumps]
        if not all(whole) and now < self._give_up_at:
            return False
        self._kill_py_spies()
        return True

    def grouped_stacks(self) -> tuple[StackGroup, ...]:
        """Return the workers grouped by equal stack, after `poll_workers` has returned True."""
        return group_stacks(self.read_stacks())

    def read_stacks(self) -> list[tuple[int, str]]:
        """Return rank and stack of each worker, after `poll_workers` has returned True."""
        return [(worker.rank, self._read_stack(worker)) for worker in self._dumps]

    def take_python_stacks(self) -> dict[int, str]:
        """Return the Python stack of each worker that has shown one; empty its file."""
        found = {}
        for worker in self._dumps:
            if stack := normalize_stack(self._read_dump(worker)):
                found[worker.rank] = stack
            if worker.file is not None and worker.size > worker.old_bytes:
                try:
                    os.truncate(worker.file, 0)
                except OSError:
                    pass  # it has ended
        return found

    def has_program_ended(self, rank: int) -> bool:
        """Return whether a worker's stacks show that its program's code has ended."""
        dumps = [self._read_dump(worker) for worker in self._dumps if worker.rank == rank]
        return any(dump and not is_program_running(dump) for dump in dumps)

    def close(self) -> None:
        """Kill py-spy processes and close files."""
        self._kill_py_spies()
        for worker in self._dumps:
            if worker.spy_output is not None:
                worker.spy_output.close()

    @staticmethod
    def _request_dump(
        worker: WorkerDump, folder: Path, signal: Callable[[int, int], None], now: float
    ) -> None:
        file = folder / f"{worker.pid}.stacks"
        state = procfs.read_state(worker.pid)
        catches = state is not None and state.caught_signals >> (STACKS_SIGNAL - 1) & 1
        if (
            state is None
            or not catches
            or state.letter in "TtZ"
            or not procfs.has_open_file(worker.pid, str(file))
        ):
            return
        try:
            worker.old_bytes = worker.size = file.stat().st_size
        except OSError:  # it has ended since
            return
        worker.file = file
        worker.grown_at = now
        signal(worker.slot, STACKS_SIGNAL)

    @staticmethod
    def _start_py_spy(spy: str, worker: WorkerDump) -> None:
        try:
            worker.spy_output = os.fdopen(os.memfd_create("pdrun-stacks", os.MFD_CLOEXEC), "w+b")
            worker.spy = subprocess.Popen(
                [spy, "dump", "--native", "--pid", str(worker.pid)],
                stdin=subprocess.DEVNULL,
                stdout=worker.spy_output,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:  # no process, descriptor or memory is left: use the next source
            pass

    @staticmethod
    def _is_complete(worker: WorkerDump, now: float) -> bool:
        spying = worker.spy is not None and worker.spy.poll() is None
        if worker.file is None:
            return not spying
        try:
            size = worker.file.stat().st_size
        except OSError:
            return not spying
        if size != worker.size:
            worker.size = size
            worker.grown_at = now
        written = size > worker.old_bytes and now - worker.grown_at >= SETTLE_SECONDS
        return written and not spying

    def _read_dump(self, worker: WorkerDump) -> str:
        """Return what py-spy or the worker wrote; empty: nothing."""
        if worker.spy is not None and worker.spy_output is not None and worker.spy.poll() == 0:
            worker.spy_output.seek(0)
            text = worker.spy_output.read(_MAX_DUMP_BYTES).decode("utf-8", "replace")
            if parse_threads(text):
                return text
        if worker.file is None:
            return ""
        try:
            with worker.file.open("rb") as file:
                file.seek(worker.old_bytes)
                return file.read(_MAX_DUMP_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""

    def _read_stack(self, worker: WorkerDump) -> str:
        return normalize_stack(self._read_dump(worker)) or _read_kernel_view(worker.pid)

    def _kill_py_spies(self) -> None:
        for worker in self._dumps:
            if worker.spy is not None and worker.spy.poll() is None:
                worker.spy.kill()
                self._killed_spies.append(worker.spy)
                worker.spy = None


def _read_kernel_view(pid: int) -> str:
    state = procfs.read_state(pid)
    if state is None:
        return "(has ended)"
    lines = [f"(no Python stack) state {state.description}"]
    if function := procfs.read_wait_channel(pid):
        lines.append(f"waits in the kernel function {function}")
    if stack := procfs.read_kernel_stack(pid):
        lines += ["kernel stack:", *(f"  {line}" for line in stack.splitlines())]
    return truncate_text("\n".join(lines))
