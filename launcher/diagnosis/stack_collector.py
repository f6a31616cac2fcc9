"""
Where are the workers of this node? Asked, waited for at most WITHIN seconds, without ever blocking.

First of these that answers counts, for each worker by itself:

1. ``py-spy dump --native``, where py-spy is installed: Python and native frames, read from outside;
2. faulthandler: a worker that has offered its stacks (forked ones, and those that use `pdrun.elastic`) writes them into
   a file when it gets STACKS_SIGNAL. It is asked only while it catches that signal and holds that file, so that the
   signal never ends a process, nor lands in a file of the program's own;
3. /proc: the state, and the kernel's function in which it waits.
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
from pdrun.launcher.diagnosis.stacks import at_work, comparable, cut, grouped, threads
from pdrun.rendezvous.protocol.messages import StackGroup

WITHIN = 3.0
SETTLED = 0.15
"""Seconds without a further byte after which a worker's file is whole."""
LOOK = 0.05
SPIES = 16
"""Workers that py-spy looks at, at most."""
_LARGEST = 1 << 20


@dataclass
class Asked:
    """One worker that was asked."""

    rank: int
    slot: int
    pid: int
    file: Path | None = None
    """Where faulthandler writes, if it was asked."""
    before: int = 0
    """Bytes of the file that are older than the question."""
    size: int = 0
    grown_at: float = 0.0
    spy: subprocess.Popen[bytes] | None = None
    spied: IO[bytes] | None = None


class Inquiry:
    """One question to some workers. Call `look` at `deadline` until it returns True."""

    _ending: ClassVar[list[subprocess.Popen[bytes]]] = []
    """
    Those of py-spy that were killed, and may take their time to end (state D): reaped by a later
    question.
    """

    def __init__(
        self,
        workers: Sequence[tuple[int, int, int]],
        folder: Path,
        signal: Callable[[int, int], None],
        now: float,
        active: tuple[int, ...] = (),
    ) -> None:
        """
        Args:
            workers: (rank, slot, pid) of each.
            folder: where workers have their files.
            signal: sends a signal (number) to a worker (slot).
            now: monotonic seconds.
            active: ranks that were at work at that moment.
        """
        self.active = active
        self._give_up_at = now + WITHIN
        self.deadline = now + LOOK
        self._asked = [Asked(*worker) for worker in workers]
        self._ending[:] = [spy for spy in self._ending if spy.poll() is None]
        spy = shutil.which("py-spy")
        for number, worker in enumerate(self._asked):
            self._ask(worker, folder, signal, now)
            if spy and number < SPIES:
                self._spy(spy, worker)

    def look(self, now: float) -> bool:
        """See what has come; whether all is here, or the time is over."""
        self.deadline = now + LOOK
        whole = [self._whole(worker, now) for worker in self._asked]
        if not all(whole) and now < self._give_up_at:
            return False
        self._end_spies()
        return True

    def groups(self) -> tuple[StackGroup, ...]:
        """
        Return the workers grouped by equal stack, once `look` has returned True; may be called
        again.
        """
        return grouped((worker.rank, self._stack(worker)) for worker in self._asked)

    def ended(self, rank: int) -> bool:
        """
        Whether the stacks of a worker show that the code of its program has ended; False where that
        is not known.
        """
        dumps = [self._dump(worker) for worker in self._asked if worker.rank == rank]
        return any(dump and not at_work(dump) for dump in dumps)

    def close(self) -> None:
        """Let go of everything."""
        self._end_spies()
        for worker in self._asked:
            if worker.spied is not None:
                worker.spied.close()

    @staticmethod
    def _ask(worker: Asked, folder: Path, signal: Callable[[int, int], None], now: float) -> None:
        file = folder / f"{worker.pid}.stacks"
        state = procfs.state(worker.pid)
        catches = state is not None and state.caught >> (STACKS_SIGNAL - 1) & 1
        if (
            state is None
            or not catches
            or state.letter in "TtZ"
            or not procfs.holds(worker.pid, str(file))
        ):
            return
        try:
            worker.before = worker.size = file.stat().st_size
        except OSError:  # it has ended since
            return
        worker.file = file
        worker.grown_at = now
        signal(worker.slot, STACKS_SIGNAL)

    @staticmethod
    def _spy(spy: str, worker: Asked) -> None:
        try:
            worker.spied = os.fdopen(os.memfd_create("pdrun-stacks", os.MFD_CLOEXEC), "w+b")
            worker.spy = subprocess.Popen(
                [spy, "dump", "--native", "--pid", str(worker.pid)],
                stdin=subprocess.DEVNULL,
                stdout=worker.spied,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:  # no process, descriptor or memory is left: the others may tell
            pass

    @staticmethod
    def _whole(worker: Asked, now: float) -> bool:
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
        written = size > worker.before and now - worker.grown_at >= SETTLED
        return written and not spying

    def _dump(self, worker: Asked) -> str:
        """What the worker, or py-spy, wrote; empty: nothing."""
        if worker.spy is not None and worker.spied is not None and worker.spy.poll() == 0:
            worker.spied.seek(0)
            text = worker.spied.read(_LARGEST).decode("utf-8", "replace")
            if threads(text):
                return text
        if worker.file is None:
            return ""
        try:
            with worker.file.open("rb") as file:
                file.seek(worker.before)
                return file.read(_LARGEST).decode("utf-8", "replace")
        except OSError:
            return ""

    def _stack(self, worker: Asked) -> str:
        return comparable(self._dump(worker)) or _from_outside(worker.pid)

    def _end_spies(self) -> None:
        for worker in self._asked:
            if worker.spy is not None and worker.spy.poll() is None:
                worker.spy.kill()
                self._ending.append(worker.spy)
                worker.spy = None


def _from_outside(pid: int) -> str:
    state = procfs.state(pid)
    if state is None:
        return "(has ended)"
    lines = [f"(no Python stack) state {state.words}"]
    if function := procfs.waits_in(pid):
        lines.append(f"waits in the kernel's {function}")
    if stack := procfs.kernel_stack(pid):
        lines += ["the kernel's stack:", *(f"  {line}" for line in stack.splitlines())]
    return cut("\n".join(lines))
