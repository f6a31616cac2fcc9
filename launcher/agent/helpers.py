"""
The processes of an agent other than its workers: the supervisor, torch's store and, on one node,
the scheduler.

If the supervisor dies, the job ends on this node, unless no worker has been started. The fork
server (see `start_method`) is started as soon as it is known that workers will be forked. It
imports torch while the nodes join, and on a standby node, so that a replacement starts as quickly
as a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pdrun.errors import PdrunError
from pdrun.launcher.agent.interfaces import AgentDeps, SupervisorHandle
from pdrun.launcher.agent.store import StorePair
from pdrun.launcher.agent.worker_group import WorkerGroup
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.launcher.plan.start_method import find_interpreter, fork_server_command
from pdrun.launcher.supervisor.events import (
    SERVER_SLOT,
    ForkServerStatus,
    SupervisorEvent,
    WorkersFenced,
)
from pdrun.launcher.supervisor.server_processes import ServerProcesses


class HelperProcesses:
    """Starts, watches and ends the helper processes. Called from the agent's loop only."""

    def __init__(
        self,
        deps: AgentDeps,
        print_line: Callable[[str], None],
        find_fence: Callable[[], float | None],
        on_fenced: Callable[[], None],
    ) -> None:
        """
        Args:
            find_fence: returns the time of `SupervisorHandle.send_ping`.
            on_fenced: called when the supervisor has ended the workers at that time.
        """
        self._find_fence = find_fence
        self._on_fenced = on_fenced
        self._deps = deps
        self._clock = deps.clock
        self._print_line = print_line
        self.supervisor: SupervisorHandle | None = None
        self.stores = StorePair()
        self.servers = ServerProcesses(print_line)
        self._next_ping: float | None = None
        """Monotonic time at which the supervisor must show that it is alive."""

    def watched_fds(self, *, with_scheduler: bool) -> Iterator[int]:
        """Yield the descriptors to wait for, -1 for none; the scheduler's only if asked for."""
        if self.supervisor is not None:
            yield self.supervisor.fileno()
        yield self.stores.fileno()
        if with_scheduler and self._deps.scheduler_process is not None:
            yield self._deps.scheduler_process.fileno()

    def next_deadlines(self, *, with_scheduler: bool) -> Iterator[float | None]:
        """Yield the monotonic times at which something is due although nothing is readable."""
        yield self._next_ping
        if with_scheduler and self._deps.scheduler_process is not None:
            yield self._deps.scheduler_process.deadline()

    def start_supervisor(self, plan: LaunchPlan) -> SupervisorHandle:
        """Return the supervisor. The first call starts it, and the fork server if one is needed."""
        if self.supervisor is None:
            self.supervisor = self._deps.start_supervisor(plan)
            if plan.start_method.how == "fork":
                self.supervisor.start_fork_server(fork_server_command(plan))
        return self.supervisor

    def handle_events(self, group: WorkerGroup | None, *, is_finished: bool) -> None:
        """
        Handle the supervisor's events.

        Args:
            group: the workers of the present generation.
            is_finished: all of them have ended, and this was reported.

        Raises:
            PdrunError: the supervisor died before any worker was started.
        """
        if self.supervisor is None:
            return
        try:
            for event in self.supervisor.read_events():
                if isinstance(event, ForkServerStatus):
                    if event.why and not is_finished:
                        self._print_line(
                            f"workers cannot be forked, each imports for itself: {event.why}"
                        )
                elif event.slot <= SERVER_SLOT:
                    self._handle_server_event(event, group, is_finished=is_finished)
                elif event.slot < 0:
                    problem = self.stores.describe_exit(event)
                    if problem and not is_finished:
                        self._print_line(
                            f"the process of torch's store (MASTER_PORT) ended: {problem}"
                        )
                elif group is not None:
                    group.handle_event(event)
            self.servers.read_lines()
            if group is not None and group.has_started and not group.is_done:
                self.send_ping()
            elif self._next_ping is not None:
                self._next_ping = None
                self.supervisor.lift_fence()
        except PdrunError as error:
            self.supervisor.close()
            self.supervisor = None
            self._next_ping = None
            if group is None or not group.has_started:
                raise
            self._print_line(str(error))
            if isinstance(error, WorkersFenced):
                self._on_fenced()
            group.mark_lost(error.what)

    def _handle_server_event(
        self, event: SupervisorEvent, group: WorkerGroup | None, *, is_finished: bool
    ) -> None:
        """Let the generation fail if one of its servers has ended and cannot continue alone."""
        problem = self.servers.describe_exit(event)
        if not problem or is_finished:
            return
        self.servers.read_lines()
        is_needed = group is not None and not group.is_stopping
        if is_needed and self.supervisor and self.servers.start_again(self.supervisor, event):
            self._print_line(f"{problem}; it starts again alone, from its last checkpoint")
            return
        self._print_line(problem)
        if group is not None:
            group.fail_first(problem)

    def send_ping(self) -> None:
        """Send the supervisor a ping, with the time until which the workers may run."""
        if self.supervisor is not None:
            self._next_ping = self.supervisor.send_ping(self._find_fence())

    def start_store(self, plan: LaunchPlan) -> None:
        """Start the process of torch's store on the socket that is announced."""
        assert self.supervisor is not None
        self.stores.start_process(
            self.supervisor,
            find_interpreter(plan),
            {**plan.base_env, **plan.spec.env},
            plan.cwd,
            fork=plan.start_method.how == "fork",
        )

    def is_scheduler_restarting(self) -> bool:
        """Return whether the scheduler process of this node has died and is not back yet."""
        process = self._deps.scheduler_process
        return process is not None and process.is_restarting()

    def replace_silent_scheduler(self) -> None:
        """Kill the scheduler process of this node early if it stands still: a stop waits for it."""
        if self._deps.scheduler_process is not None:
            self._deps.scheduler_process.kill_if_silent()

    def restart_dead_scheduler(self, ready: set[int]) -> None:
        """
        Restart the scheduler process of this node if it died or stands still.

        The workers continue meanwhile.
        """
        process = self._deps.scheduler_process
        if process is None:
            return
        deadline = process.deadline()
        is_due = deadline is not None and self._clock.monotonic() >= deadline
        if process.fileno() in ready or is_due:
            line = process.restart_if_dead()
            if line:
                self._print_line(line)

    def close(self) -> None:
        """End the supervisor with all its descendants, and close the store's sockets."""
        if self.supervisor is not None:
            self.supervisor.close()
        self.stores.close()
        self.servers.close()
