"""
The processes that an agent has beside the workers: the keeper, which it starts and watches, and
torch's store.

A keeper that dies ends the job on this node, unless no worker was started yet. The starter (see
`starting`) is asked for as soon as it is known that workers will be forked: it imports torch while
the nodes come together, and on a node that stands by, so that a replacement starts as quickly as a
restart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from pdrun.errors import PdrunError
from pdrun.launcher.agent.interfaces import Keeper
from pdrun.launcher.agent.store import Stores
from pdrun.launcher.agent.worker_group import Group
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.launcher.plan.start_method import starter_command
from pdrun.launcher.supervisor.events import StarterState


class Crew:
    """See the module. All calls come from the agent's loop."""

    def __init__(self, make: Callable[[LaunchPlan], Keeper], say: Callable[[str], None]) -> None:
        self._make = make
        self._say = say
        self.keeper: Keeper | None = None
        self.stores = Stores()
        self.beat_at: float | None = None
        """When the keeper is to be asked again for a sign of life."""

    def hire(self, plan: LaunchPlan) -> Keeper:
        """
        Return the keeper; started now where there is none, and with it the import of torch that
        workers need.
        """
        if self.keeper is None:
            self.keeper = self._make(plan)
            if plan.starting.how == "fork":
                self.keeper.prepare(starter_command(plan))
        return self.keeper

    def events(self, group: Group | None, *, finished: bool) -> None:
        """
        Deal with what the keeper tells.

        Args:
            finished: every worker of the generation has ended, and was told.

        Raises:
            PdrunError: the keeper died before any worker was started.
        """
        if self.keeper is None:
            return
        try:
            for event in self.keeper.events():
                if isinstance(event, StarterState):
                    if event.why and not finished:
                        self._say(f"workers cannot be forked, each imports for itself: {event.why}")
                elif event.slot < 0:
                    if not finished and (why := self.stores.complaint(event)):
                        self._say(f"the process of torch's store (MASTER_PORT) ended: {why}")
                elif group is not None:
                    group.take(event)
            running = group is not None and group.started and not group.done
            self.beat_at = self.keeper.beat() if running else None
        except PdrunError as error:
            self.keeper.close()
            self.keeper = None
            self.beat_at = None
            if group is None or not group.started:
                raise
            self._say(str(error))
            group.abandon(error.what)

    def start_store(self, plan: LaunchPlan) -> None:
        """Start the process of torch's store on the socket that is announced."""
        assert self.keeper is not None
        program = plan.workers[0].argv[0]
        is_python = plan.spec.program.kind != "command" or Path(program).name.startswith("python")
        python = (
            program if is_python else sys.executable
        )  # the one that has the workers' torch, where that is known
        fork = plan.starting.how == "fork"
        self.stores.start(
            self.keeper, python, {**plan.base_env, **plan.spec.env}, plan.cwd, fork=fork
        )

    def close(self) -> None:
        """End every process."""
        if self.keeper is not None:
            self.keeper.close()
        self.stores.close()
