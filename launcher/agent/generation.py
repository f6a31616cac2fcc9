"""
This node's part in one generation after another: its ranks, its workers and their reports.

    Assign -> preflight -> Ready or Unready -> Start -> WorkerExit per worker -> Finished -> Assign

A generation of another size changes only the workers' environment. The plan of this node stays.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pdrun.errors import EXIT_CONFIG, ConfigError
from pdrun.launcher.agent.announcer import Announcer
from pdrun.launcher.agent.helpers import HelperProcesses
from pdrun.launcher.agent.interfaces import AgentDeps, SupervisorHandle, WorkerOutput
from pdrun.launcher.agent.lifeline import Lifeline
from pdrun.launcher.agent.monitor import WorkerMonitor
from pdrun.launcher.agent.worker_group import WorkerGroup
from pdrun.launcher.common import files
from pdrun.launcher.common.agent_folder import write_generation
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.launcher.plan.program import check_program
from pdrun.launcher.plan.start_method import make_server_commands, make_worker_variables
from pdrun.quick_dataclass import dataclass
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
    """Runs the workers of each generation. Called from the agent's loop only."""

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
        self._server_key = b""
        self._channel_path = ""
        self.is_finished = False
        """Whether all workers of this generation have ended, and that was reported."""

    @property
    def has_started(self) -> bool:
        """Whether workers of this generation were started."""
        return self.group is not None and self.group.has_started

    @property
    def is_running(self) -> bool:
        """Whether some of them may still be running."""
        return self.group is not None and self.group.has_started and not self.group.is_done

    def accept_assignment(
        self, message: Assign, plan: LaunchPlan, output: WorkerOutput, run: str
    ) -> None:
        """
        Prepare the workers of a generation, and report whether this node is ready.

        A known generation is ignored: after a reconnection the scheduler repeats its message.
        """
        if self._assign is not None and message.generation <= self._assign.generation:
            return
        if self.has_started:  # otherwise the present store is unused
            self._helpers.stores.advance(self._helpers.supervisor)
        if self._assign is not None:
            self._announcer.announce_restart(message)
        self._assign = message
        self.is_finished = False
        found = run_preflight(plan, output)
        if found.exit_code:
            self._send(Unready(message.generation, found.exit_code, found.reason))
            return
        supervisor = self._helpers.start_supervisor(plan)
        output.begin_generation(run, message.world_size)
        channel_path = self._monitor.open_channel(
            is_wrapped=plan.spec.program.kind == "command",
            hang_timeout=plan.spec.policy.hang_timeout,
        )
        self._channel_path = channel_path
        if plan.spec.resources.servers and not self._server_key:
            self._server_key = self._deps.make_server_key(run)
        self.group = WorkerGroup(
            plan,
            run,
            message,
            supervisor,
            output,
            self._deps.clock,
            self._report_exit,
            self._deps.stdin,
            channel_path,
            make_worker_variables(plan, message, self._server_key),
        )
        self._helpers.stores.is_wanted = message.node_rank == 0
        if found.imports_torch or plan.spec.resources.servers:
            self._helpers.start_store(plan)
        self._send(Ready(message.generation))

    def start_workers(self, generation: int, plan: LaunchPlan, output: WorkerOutput) -> None:
        """Start the workers, once; all nodes are ready."""
        group = self.group
        if group is None or group.generation != generation or self._assign is None:
            return
        if group.has_started:
            return
        supervisor = self._helpers.start_supervisor(plan)
        self._announcer.announce_start(self._assign)
        self._deps.on_progress(Lifeline.RUNNING)
        self._monitor.begin_generation(group, output, supervisor)
        if self._channel_path:
            folder = Path(self._channel_path).parent
            write_generation(folder, group.run_name, generation, self._assign.first_rank)
        self._helpers.send_ping()  # no worker runs without a fence
        self._start_servers(plan, supervisor)
        group.start_workers()
        self._announcer.stdin_rank = group.stdin_rank
        # a lost parameter server may start again
        if not plan.spec.can_restart and not plan.spec.resources.servers:
            supervisor.release_fork_server()

    def _start_servers(self, plan: LaunchPlan, supervisor: SupervisorHandle) -> None:
        """Start this node's parameter servers; they end with the supervisor, or are replaced."""
        assert self._assign is not None
        if not plan.spec.resources.servers:
            return
        folder = self._channel_path.rpartition("/")[0]
        if not folder:
            raise ConfigError(
                "parameter servers need a folder for their sockets",
                hint="set TMPDIR to a folder with a short path",
            )
        commands = make_server_commands(plan, self._assign, self._server_key, folder)
        self._helpers.servers.start_processes(supervisor, commands)

    def stop_workers(self, number: int, grace: float) -> None:
        """Send a signal to the started workers, and SIGKILL after ``grace`` seconds."""
        if self.group is not None and self.group.has_started:
            self.group.stop_workers(number, grace)

    def forward_signal(self, number: int) -> None:
        """Pass on a signal to the workers, if any were started."""
        if self.group is not None and self.group.has_started:
            self.group.forward_signal(number)

    def report_finished(self, plan: LaunchPlan | None) -> None:
        """
        Report, once, that all workers have ended.

        If another generation may follow, the report contains the address of its store.
        """
        if plan is None or self.group is None or self.is_finished:
            return
        if not self.has_started or not self.group.is_done:
            return
        self.is_finished = True
        self._monitor.send_progress()
        store = ""
        if plan.spec.can_restart:
            store = self._helpers.stores.bind_next(plan.listen, plan.store)
        self._send(Finished(self.group.generation, store))

    def reset(self) -> None:
        """Forget all generations: this node rejoins as a new one."""
        self.group = None
        self._assign = None
        self.is_finished = False
        self._helpers.stores.reset(self._helpers.supervisor)

    def _report_exit(self, rank: int, cause: Cause) -> None:
        assert self._assign is not None
        self._monitor.send_last_progress()
        self._send(WorkerExit(self._assign.generation, rank, cause))


@dataclass(frozen=True)
class PreflightResult:
    """Whether this node can start its workers."""

    exit_code: int = 0
    """Exit code for the problem; 0: no problem."""
    reason: str = ""
    imports_torch: bool = False
    """The program's text mentions torch, so torch's store will be needed."""


def run_preflight(plan: LaunchPlan, output: WorkerOutput) -> PreflightResult:
    """
    Check whether this node can start its workers, and make the log folder.

    It is cheap, and runs before anything is started anywhere. The plan may be outdated: since then
    a file system may have been unmounted, or a disk may have filled up.
    """
    if not files.is_folder(plan.cwd):
        return PreflightResult(EXIT_CONFIG, f"the working folder {plan.cwd} does not exist")
    found = check_program(plan.spec.program, plan.cwd, {**plan.base_env, **plan.spec.env})
    if found.error:
        return PreflightResult(found.exit_code or EXIT_CONFIG, found.error)
    try:
        output.prepare_folder()
    except ConfigError as error:
        return PreflightResult(error.exit_code, str(error))
    return PreflightResult(imports_torch=found.mentions_torch)
