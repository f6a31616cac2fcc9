"""Creates what the agent of this node uses (secret, link, supervisor, output) and runs it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from pdrun import async_writer
from pdrun.launcher.jobs.run_record import event_log_path, register_run, with_source
from pdrun.launcher.launch import prestart
from pdrun.launcher.launch.agent_options import AgentOptions
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.launcher.plan.start_method import fork_server_command
from pdrun.launcher.supervisor.client import SupervisorProcess
from pdrun.topology import is_in_kubernetes

if TYPE_CHECKING:  # the rest of pdrun is imported while the fork server imports torch
    from pdrun.endpoint import Endpoint
    from pdrun.launcher.agent.interfaces import Link
    from pdrun.launcher.common.standard_input import StandardInput
    from pdrun.launcher.output.router import OutputRouter
    from pdrun.rendezvous.protocol.messages import Welcome
    from pdrun.rendezvous.protocol.security import Secret
    from pdrun.rendezvous.scheduler.child import SchedulerChild


def run_node_agent(
    plan: LaunchPlan | Callable[[Welcome], LaunchPlan],
    link: Link,
    options: AgentOptions,
    *,
    scheduler_process: SchedulerChild | None = None,
    event_log: str = "",
    has_scheduler: bool = False,
    is_alone: bool = False,
    secret: Secret | None = None,
) -> int:
    """
    Run the agent of this node; return the exit code of the job.

    Args:
        plan: the plan of this node, or a function that makes it from the scheduler's Welcome.
        link: the connection to the scheduler.
        options: options of the agent.
        scheduler_process: the scheduler, if it is a child of this process.
        event_log: path of the event log that the scheduler process writes; empty: none.
        has_scheduler: the scheduler is in this process or a child of it; this node registers the
            job.
        is_alone: the job has one node.
        secret: of the job, from which the key of its parameter servers is made; None: an insecure
            job, or one node.
    """
    from pdrun.launcher.agent.agent import run_agent
    from pdrun.launcher.agent.interfaces import AgentDeps

    stdin = _open_stdin(options)
    plan = _show_reader_alone(plan, stdin)
    started = [options.supervisor] if options.supervisor is not None else []

    def supervisor_of(plan: LaunchPlan) -> SupervisorProcess:
        supervisor = started.pop() if started else start_supervisor(plan, options.print_line)
        _spare_scheduler(supervisor, scheduler_process)
        return supervisor

    def register_job(plan: LaunchPlan, welcome: Welcome) -> None:
        if has_scheduler and not options.run:
            _register_job(plan, welcome, options, scheduler_process)

    deps = AgentDeps(
        start_supervisor=supervisor_of,
        make_output=lambda plan: _make_output(plan, options, stdin),
        on_welcome=register_job,
        scheduler_process=scheduler_process,
        lifeline=options.lifeline_fd,
        stdin=stdin,
        address=_join_address(plan, options, scheduler_process),
        event_log=event_log,
        on_progress=lambda mark: _report_progress(options, mark),
        is_quiet=options.is_quiet,
        is_pod=is_in_kubernetes(),
        print_line=options.print_line,
    )
    if not is_alone:
        deps = replace(deps, make_server_key=lambda run: _derive_server_key(secret, run))
    try:
        return run_agent(plan, link, deps)
    finally:
        if stdin is not None:
            stdin.restore_terminal()


def _make_output(
    plan: LaunchPlan, options: AgentOptions, stdin: StandardInput | None
) -> OutputRouter:
    """Return what carries the workers' lines to the terminal and to log files."""
    from pdrun.launcher.output.router import OutputRouter

    return OutputRouter(
        plan.spec.output,
        node=plan.node,
        cwd=plan.cwd,
        ip=plan.listen,
        hostname=plan.compared.get("host", plan.node),
        console=options.console,
        stdin=stdin,
        stdin_rank=plan.spec.program.stdin,
    )


def _register_job(
    plan: LaunchPlan,
    welcome: Welcome,
    options: AgentOptions,
    scheduler_process: SchedulerChild | None,
) -> None:
    """Enter the job into the user's registry, and show its live line on a terminal."""
    from pdrun.launcher.jobs.views.live_screen import show_live_line

    address = str(scheduler_process.endpoint) if scheduler_process else ""
    register_run(plan, welcome.run, address, controller_pid=options.controller_pid)
    if options.controller_pid is None and options.console is not None:
        show_live_line(options.console, plan.spec.output, event_log_path(plan, welcome.run))


def _spare_scheduler(
    supervisor: SupervisorProcess, scheduler_process: SchedulerChild | None
) -> None:
    """Keep the supervisor's cleanups from ending the scheduler, one that is restarted included."""
    if scheduler_process:
        supervisor.spared_pids.add(scheduler_process.pid)
        scheduler_process.on_start = supervisor.spared_pids.add


def _derive_server_key(secret: Secret | None, run: str) -> bytes:
    from pdrun.rendezvous.protocol.security import derive_server_key

    return derive_server_key(secret, run)


def _join_address(
    plan: LaunchPlan | Callable[[Welcome], LaunchPlan],
    options: AgentOptions,
    scheduler_process: SchedulerChild | None,
) -> str:
    """Return the address that messages give for starting more nodes; empty: none can join."""
    if options.run or options.all_nodes_started:
        return ""  # one command starts all nodes
    address = str(scheduler_process.endpoint) if scheduler_process else ""
    if not isinstance(plan, LaunchPlan):
        return address
    if plan.scheduler and not plan.spec.place.simulated:
        return address or str(plan.scheduler)
    return address if plan.spec.can_restart else ""  # this command starts all nodes


def find_job_secret(
    options: AgentOptions, token_file: str, source: str, is_insecure: bool
) -> Secret | None:
    """
    Return the job's secret; None for an insecure job.

    Args:
        options: options of the agent; a secret in them is used first.
        token_file: file with the token; empty: the usual places.
        source: where the name of the file was given; an error names it.
        is_insecure: the job has no secret.

    Raises:
        ConfigError: there is no token, or it is malformed.
    """
    from pdrun.rendezvous.protocol.security import find_secret

    if is_insecure:
        return None
    with with_source(source):
        return options.secret or find_secret(token_file)[0]


def make_zmq_link(
    endpoint: Endpoint,
    secret: Secret | None,
    *,
    job: str,
    start_timeout: float,
    expected_nodes: int,
    print_line: Callable[[str], None],
    command: str = "",
    needs_spec: bool = False,
    hint: str = "",
) -> Link:
    """Return the link to a scheduler in another process; see `ZmqLink` for the arguments."""
    from pdrun.rendezvous.scheduler.local_link import ZmqLink

    return ZmqLink(
        endpoint,
        secret,
        job=job,
        host=socket.gethostname(),
        start_timeout=start_timeout,
        insecure=secret is None,
        on_status=print_line,
        command=command,
        needs_spec=needs_spec,
        hint=hint,
        crowd=expected_nodes,
    )


def start_supervisor(
    plan: LaunchPlan, print_line: Callable[[str], None] = async_writer.write_message
) -> SupervisorProcess:
    """
    Return a supervisor for the workers of a plan.

    It is forked from the warm process if the plan has one, otherwise a child. If the plan forks its
    workers, a child starts a fork server, which imports torch.
    """
    if plan.start_method.warm:
        from pdrun.launcher.supervisor.warm_client import borrow_supervisor

        try:
            return SupervisorProcess(borrowed=borrow_supervisor(plan.start_method.warm))
        except OSError as error:
            why = error.strerror or error
            print_line(f"the warm process cannot be used: {why}; torch is imported")
    if plan.start_method.how != "fork":
        return SupervisorProcess()
    command = fork_server_command(plan)
    supervisor = SupervisorProcess(prestart=prestart.claim(command))
    supervisor.start_fork_server(command)
    return supervisor


def _report_progress(options: AgentOptions, mark: bytes) -> None:
    """Write a byte of `Lifeline` to the process that started this agent."""
    if options.lifeline_fd is not None:
        try:
            os.write(options.lifeline_fd, mark)
        except OSError:
            pass  # its end is noticed elsewhere


def _open_stdin(options: AgentOptions) -> StandardInput | None:
    """Return the standard input that a worker may read; None if it is closed or the lifeline."""
    from pdrun.launcher.common.standard_input import StandardInput

    if options.lifeline_fd is not None or not options.may_read_stdin or sys.stdin is None:
        return None
    return StandardInput()


def _show_reader_alone(
    plan: LaunchPlan | Callable[[Welcome], LaunchPlan], stdin: StandardInput | None
) -> LaunchPlan | Callable[[Welcome], LaunchPlan]:
    """
    Return the plan with the rank of ``--stdin`` as the only one that the terminal shows.

    Lines of other ranks would be mixed with its prompts. ``--show-ranks`` overrides that.
    """
    if stdin is None or not stdin.is_terminal:
        return plan
    if isinstance(plan, LaunchPlan):
        return _show_rank_alone(plan)
    make_plan = plan
    return lambda welcome: _show_rank_alone(make_plan(welcome))


def _show_rank_alone(plan: LaunchPlan) -> LaunchPlan:
    rank = plan.spec.program.stdin
    if rank is None or plan.sources.get("output.show_ranks", "default") != "default":
        return plan
    output = replace(plan.spec.output, show_ranks=str(rank))
    return replace(plan, spec=replace(plan.spec, output=output))
