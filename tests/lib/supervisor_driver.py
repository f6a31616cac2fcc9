"""What the tests of this folder share: bounded waits, and a keeper driven by hand."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pdrun.launcher.supervisor.client import SupervisorProcess
from pdrun.launcher.supervisor.events import SupervisorEvent, WorkerCommand
from pdrun.launcher.supervisor.warm_client import BorrowedSupervisor
from pdrun.rendezvous.transport.zmq_util import wait_readable

T = TypeVar("T")
REPOSITORY = Path(__file__).resolve().parents[2]


def wait_until(probe: Callable[[], T], seconds: float = 60.0, what: str = "the condition") -> T:
    """Return the first true value of ``probe``; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {seconds} s")
        time.sleep(0.005)


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def read_pid(path: Path, seconds: float = 60.0) -> int:
    """Wait for a file that holds one pid and a line end."""
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), seconds, str(path))
    return int(path.read_text())


class SupervisorDriver:
    """A KeeperProcess with bounded waits for its events."""

    def __init__(self, lent: BorrowedSupervisor | None = None) -> None:
        self.supervisor = SupervisorProcess(borrowed=lent)
        self.events: list[SupervisorEvent] = []

    def start(
        self,
        slot: int,
        argv: tuple[str, ...],
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        out: int | None = None,
        cpus: tuple[int, ...] = (),
        pass_fds: tuple[int, ...] = (),
    ) -> None:
        """Start a process; its output goes to ``out`` or nowhere."""
        null = os.open(os.devnull, os.O_RDWR)
        environ = {"PATH": os.environ["PATH"]} if env is None else env
        self.supervisor.spawn(
            WorkerCommand(slot, argv, environ, cwd, cpus), null, out or null, out or null, pass_fds
        )
        os.close(null)

    def wait(self, kind: type[T], slot: int | None = 0, seconds: float = 60.0) -> T:
        """Return the next event of that kind and slot, keeping the others for later calls."""
        deadline = time.monotonic() + seconds
        while True:
            for event in self.events:
                if isinstance(event, kind) and slot in (None, event.slot):
                    self.events.remove(event)
                    return event
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"no {kind.__name__} of slot {slot} within {seconds} s; seen {self.events}"
                )
            wait_readable(self.supervisor.fileno(), wait=0.1)
            self.events += self.supervisor.read_events()


@contextlib.contextmanager
def supervisor_driver(lent: BorrowedSupervisor | None = None) -> Iterator[SupervisorDriver]:
    """A keeper that is closed at the end."""
    driver = SupervisorDriver(lent)
    try:
        yield driver
    finally:
        driver.supervisor.close()


def python(code: str, *args: Any) -> tuple[str, ...]:
    """A command that runs Python code in a light interpreter."""
    return (sys.executable, "-S", "-c", code, *map(str, args))
