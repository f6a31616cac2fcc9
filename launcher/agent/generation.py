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
from pdrun.launcher.agent.announcer import Voice
from pdrun.launcher.agent.helpers import Crew
from pdrun.launcher.agent.interfaces import Surroundings, WorkerOutput
from pdrun.launcher.agent.lifeline import RUNNING
from pdrun.launcher.agent.monitor import Reports
from pdrun.launcher.agent.worker_group import Group
from pdrun.launcher.common import files
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.launcher.plan.program import look
from pdrun.rendezvous.protocol.messages import (
    Assign,
    Cause,
    Finished,
    Message,
    Ready,
    Unready,
    WorkerExit,
)


class Part:
    """See the module. All calls come from the agent's loop."""

    def __init__(
        self,
        crew: Crew,
        reports: Reports,
        voice: Voice,
        around: Surroundings,
        tell: Callable[[Message], None],
    ) -> None:
        self._crew = crew
        self._reports = reports
        self._voice = voice
        self._around = around
        self._tell = tell
        self._assign: Assign | None = None
        self.group: Group | None = None
        self.finished = False
        """Whether all workers of the present generation have ended, and that was told."""

    @property
    def started(self) -> bool:
        """Whether workers of the present generation were started."""
        return self.group is not None and self.group.started

    @property
    def running(self) -> bool:
        """Whether some of them may still run."""
        return self.group is not None and self.group.started and not self.group.done

    def take(self, message: Assign, plan: LaunchPlan, output: WorkerOutput, run: str) -> None:
        """
        Take the place in a generation; one that is known already was repeated after a reconnection.
        """
        if self._assign is not None and message.generation <= self._assign.generation:
            return
        if self.started:  # else the present store is as good as new
            self._crew.stores.turn(self._crew.keeper)
        if self._assign is not None:
            self._voice.restarting(message)
        self._assign = message
        self.finished = False
        found = preflight(plan, output)
        if found.code:
            self._tell(Unready(message.generation, found.code, found.reason))
            return
        keeper = self._crew.hire(plan)
        output.begin(run, message.world_size)
        wrapped = plan.spec.program.kind == "command"
        channel = self._reports.open(wrapped=wrapped, timeout=plan.spec.policy.hang_timeout)
        self.group = Group(
            plan,
            run,
            message,
            keeper,
            output,
            self._around.clock,
            self._worker_ended,
            self._around.stdin,
            channel,
        )
        self._crew.stores.wanted = message.node_rank == 0
        if found.imports_torch:
            self._crew.start_store(plan)
        self._tell(Ready(message.generation))

    def start(self, generation: int, plan: LaunchPlan, output: WorkerOutput) -> None:
        """Everybody can start: start the workers; once."""
        group = self.group
        if group is None or group.generation != generation or group.started or self._assign is None:
            return
        keeper = self._crew.hire(plan)
        self._voice.started(self._assign)
        self._around.reached(RUNNING)
        self._reports.begin(group, output, keeper)
        group.start()
        if not plan.spec.reopens:
            keeper.dismiss()

    def stop(self, number: int, grace: float) -> None:
        """End the workers, if any were started: the signal, and SIGKILL after ``grace`` seconds."""
        if self.group is not None and self.group.started:
            self.group.stop(number, grace)

    def forward(self, number: int) -> None:
        """Pass on a signal to the workers, if any were started."""
        if self.group is not None and self.group.started:
            self.group.forward(number)

    def conclude(self, plan: LaunchPlan | None) -> None:
        """
        Tell, once, that all workers have ended; with a fresh store where another generation may
        follow.
        """
        if (
            plan is None
            or self.group is None
            or not self.started
            or not self.group.done
            or self.finished
        ):
            return
        self.finished = True
        self._reports.flush()
        store = self._crew.stores.hold_next(plan.listen) if plan.spec.reopens else ""
        self._tell(Finished(self.group.generation, store))

    def forget(self) -> None:
        """This node begins again as a new one, in a generation to come."""
        self.group = None
        self._assign = None
        self.finished = False
        self._crew.stores.renew(self._crew.keeper)

    def _worker_ended(self, rank: int, cause: Cause) -> None:
        assert self._assign is not None
        self._reports.flush()
        self._tell(WorkerExit(self._assign.generation, rank, cause))


@dataclass(frozen=True)
class Preflight:
    """What the last look found."""

    code: int = 0
    """Exit code of what is wrong; 0 when this node can start."""
    reason: str = ""
    imports_torch: bool = False
    """The program's text mentions torch: its store will be wanted."""


def preflight(plan: LaunchPlan, output: WorkerOutput) -> Preflight:
    """Return whether this node can start its workers; makes the log folder."""
    if not files.is_folder(plan.cwd):
        return Preflight(EXIT_CONFIG, f"the working folder {plan.cwd} is not there")
    found = look(plan.spec.program, plan.cwd, {**plan.base_env, **plan.spec.env})
    if found.error:
        return Preflight(found.code or EXIT_CONFIG, found.error)
    try:
        output.prepare()
    except ConfigError as error:
        return Preflight(error.exit_code, str(error))
    return Preflight(imports_torch=found.imports_torch)
