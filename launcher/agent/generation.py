"""
The part that this node has in one generation after another: its place, its workers, and what is
told of them.

    Assign -> preflight -> Ready (or Unready) -> Start -> WorkerExit, one each -> Finished -> Assign ...

A generation of other sizes only changes what the workers are told: the plan of this node stays as
it was made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdrun.errors import EXIT_CONFIG, ConfigError
from pdrun.launcher.agent.announcer import Announcer
from pdrun.launcher.agent.helpers import HelperProcesses
from pdrun.launcher.agent.interfaces import AgentDeps, WorkerOutput
from pdrun.launcher.agent.lifeline import RUNNING
from pdrun.launcher.agent.monitor import WorkerMonitor
from pdrun.launcher.agent.worker_group import WorkerGroup
from pdrun.launcher.common import files
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.launcher.plan.program import check_program
from pdrun.rendezvous.protocol.messages import (
    Assign,
    Cause,
    Finished,
    Message,
    Ready,
    Unready,
    WorkerExit,
)


class GenerationRunner:
    """See the module. All calls come from the agent's loop."""

    def __init__(
        self,
        helpers: HelperProcesses,
        monitor: WorkerMonitor,
        announcer: Announcer,
        deps: AgentDeps,
        send: Callable[[Message], None],
    ) -> None:
        self._helpers = helpers
        self._monitor = monitor
        self._announcer = announcer
        self._deps = deps
        self._send = send
        self._assign: Assign | None = None
        self.group: WorkerGroup | None = None
        self.is_finished = False
        """Whether all workers of the present generation have ended, and that was told."""

    @property
    def has_started(self) -> bool:
        """Whether workers of the present generation were started."""
        return self.group is not None and self.group.has_started

    @property
    def is_running(self) -> bool:
        """Whether some of them may still run."""
        return self.group is not None and self.group.has_started and not self.group.is_done

    def accept_assignment(
        self, message: Assign, plan: LaunchPlan, output: WorkerOutput, run: str
    ) -> None:
        """
        Take the place in a generation; one that is known already was repeated after a reconnection.
        """
        if self._assign is not None and message.generation <= self._assign.generation:
            return
        if self.has_started:  # else the present store is as good as new
            self._helpers.stores.advance(self._helpers.supervisor)
        if self._assign is not None:
            self._announcer.announce_restart(message)
        self._assign = message
        self.is_finished = False
        found = run_preflight(plan, output)
        if found.exit_code:
            self._send(Unready(message.generation, found.exit_code, found.reason))
            return
        keeper = self._helpers.start_supervisor(plan)
        output.begin_generation(run, message.world_size)
        wrapped = plan.spec.program.kind == "command"
        channel = self._monitor.open_channel(wrapped=wrapped, timeout=plan.spec.policy.hang_timeout)
        self.group = WorkerGroup(
            plan,
            run,
            message,
            keeper,
            output,
            self._deps.clock,
            self._report_exit,
            self._deps.stdin,
            channel,
        )
        self._helpers.stores.is_wanted = message.node_rank == 0
        if found.imports_torch:
            self._helpers.start_store(plan)
        self._send(Ready(message.generation))

    def start_workers(self, generation: int, plan: LaunchPlan, output: WorkerOutput) -> None:
        """Everybody can start: start the workers; once."""
        group = self.group
        if (
            group is None
            or group.generation != generation
            or group.has_started
            or self._assign is None
        ):
            return
        keeper = self._helpers.start_supervisor(plan)
        self._announcer.announce_start(self._assign)
        self._deps.on_progress(RUNNING)
        self._monitor.begin_generation(group, output, keeper)
        group.start_workers()
        if not plan.spec.can_restart:
            keeper.release_fork_server()

    def stop_workers(self, number: int, grace: float) -> None:
        """End the workers, if any were started: the signal, and SIGKILL after ``grace`` seconds."""
        if self.group is not None and self.group.has_started:
            self.group.stop_workers(number, grace)

    def forward_signal(self, number: int) -> None:
        """Pass on a signal to the workers, if any were started."""
        if self.group is not None and self.group.has_started:
            self.group.forward_signal(number)

    def report_finished(self, plan: LaunchPlan | None) -> None:
        """
        Tell, once, that all workers have ended; with a fresh store where another generation may
        follow.
        """
        if (
            plan is None
            or self.group is None
            or not self.has_started
            or not self.group.is_done
            or self.is_finished
        ):
            return
        self.is_finished = True
        self._monitor.send_progress()
        store = self._helpers.stores.bind_next(plan.listen) if plan.spec.can_restart else ""
        self._send(Finished(self.group.generation, store))

    def reset(self) -> None:
        """This node begins again as a new one, in a generation to come."""
        self.group = None
        self._assign = None
        self.is_finished = False
        self._helpers.stores.reset(self._helpers.supervisor)

    def _report_exit(self, rank: int, cause: Cause) -> None:
        assert self._assign is not None
        self._monitor.send_progress()
        self._send(WorkerExit(self._assign.generation, rank, cause))


@dataclass(frozen=True)
class PreflightResult:
    """What the last look found."""

    exit_code: int = 0
    """Exit code of what is wrong; 0 when this node can start."""
    reason: str = ""
    imports_torch: bool = False
    """The program's text mentions torch: its store will be wanted."""


def run_preflight(plan: LaunchPlan, output: WorkerOutput) -> PreflightResult:
    """Return whether this node can start its workers; makes the log folder."""
    if not files.is_folder(plan.cwd):
        return PreflightResult(EXIT_CONFIG, f"the working folder {plan.cwd} is not there")
    found = check_program(plan.spec.program, plan.cwd, {**plan.base_env, **plan.spec.env})
    if found.error:
        return PreflightResult(found.exit_code or EXIT_CONFIG, found.error)
    try:
        output.prepare_folder()
    except ConfigError as error:
        return PreflightResult(error.exit_code, str(error))
    return PreflightResult(imports_torch=found.mentions_torch)
