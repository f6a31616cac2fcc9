"""Options of an agent, set by the process that starts it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from pdrun import async_writer
from pdrun.quick_dataclass import dataclass

if TYPE_CHECKING:
    from pdrun.launcher.output.console import Console
    from pdrun.launcher.supervisor.client import SupervisorProcess
    from pdrun.rendezvous.protocol.security import Secret


@dataclass(frozen=True)
class AgentOptions:
    """Options of an agent. Defaults: an agent started from a terminal."""

    secret: Secret | None = None
    """None: `security.find_secret` finds it."""
    scheduler_fd: int | None = None
    """Listening socket for the scheduler of this node."""
    lifeline_fd: int | None = None
    """Socket to the process that started this agent; its end stops everything."""
    console: Console | None = None
    """Where the agent and its link print; None: stdout and stderr of this process."""
    is_quiet: bool = False
    """Another agent prints what is printed once per job."""
    controller_pid: int | None = None
    """Process that `pdrun stop` signals; None: this one."""
    supervisor: SupervisorProcess | None = None
    """A supervisor that is started already."""
    run: str = ""
    """Name of the run, if a controller chose it, started all nodes and registered the job."""
    all_nodes_started: bool = False
    """mpirun or srun starts all nodes: messages do not explain how to start a missing one."""
    may_read_stdin: bool = True
    """Whether rank 0 may read the standard input of this process."""

    def print_line(self, text: str) -> None:
        """Print a message of pdrun; never blocks and never fails."""
        if self.console is not None:
            self.console.print_line(f"pdrun: {text}")
        else:
            async_writer.write_message(text)


@contextmanager
def console_of(options: AgentOptions) -> Iterator[AgentOptions]:
    """Yield options that have a console; write out the console at the end."""
    from pdrun.launcher.output.console import Console

    console = options.console or Console()
    try:
        yield replace(options, console=console)
    finally:
        console.close()
