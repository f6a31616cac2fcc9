"""Options of an agent, set by the process that starts it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pdrun import async_writer

if TYPE_CHECKING:
    from pdrun.launcher.output.console import Console
    from pdrun.launcher.supervisor.client import KeeperProcess
    from pdrun.rendezvous.protocol.security import Secret


@dataclass(frozen=True)
class Seat:
    """
    What an agent gets from whoever started it; the defaults are those of a command typed by a user.
    """

    secret: Secret | None = None
    """None: found as `security.find_secret` does."""
    scheduler_fd: int | None = None
    """Listening socket for the scheduler of this node."""
    lifeline: int | None = None
    console: Console | None = None
    """Where all that the agent prints goes, its link's words too; None: this process's own."""
    quiet: bool = False
    front: int | None = None
    """Pid of the process that `pdrun stop` is to signal; None: this one."""
    keeper: KeeperProcess | None = None
    """One that was started beforehand."""
    run: str = ""
    """
    Name of the run, where a front on some machine has chosen it, started all nodes and keeps the
    job's entry.
    """
    together: bool = False
    """
    Something else starts all nodes (mpirun, srun): nobody is told how to start those that are
    missing.
    """
    stdin: bool = True
    """Whether rank 0 may read the standard input of this process."""

    def say(self, text: str) -> None:
        """Print a line of pdrun's own; waits for no reader, and survives one that goes away."""
        if self.console is not None:
            self.console.say(f"pdrun: {text}")
        else:
            async_writer.write_message(text)


@contextmanager
def at_a_console(seat: Seat) -> Iterator[Seat]:
    """
    Yield a seat that has a console, which is written out at the end, whether there was an output or
    not.
    """
    from pdrun.launcher.output.console import Console

    console = seat.console or Console()
    try:
        yield replace(seat, console=console)
    finally:
        console.close()
