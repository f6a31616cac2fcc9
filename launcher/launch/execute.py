"""
Carries out a plan: creates the link, the scheduler process if this node runs it, and the agent.

    single    agent and scheduler in this process, no socket
    head      agent here, scheduler in a child process
    join      agent here
    local     the controller starts one agent process per node
    hosts     the controller starts one agent per host, over ssh
    external  the controller has mpirun or srun start the agents
"""

from __future__ import annotations

import errno
import re
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError
from pdrun.launcher.jobs.run_record import (
    INSECURE_WARNING,
    event_log_path,
    make_run_name,
    make_scheduler_config,
)
from pdrun.launcher.launch import prestart
from pdrun.launcher.launch.agent_options import AgentOptions, console_of
from pdrun.launcher.launch.file_limits import check_file_limit
from pdrun.launcher.launch.node_agent import (
    find_job_secret,
    make_zmq_link,
    run_node_agent,
    start_supervisor,
)
from pdrun.launcher.plan.model import LaunchPlan

if TYPE_CHECKING:
    from pdrun.rendezvous.protocol.security import Secret

PDRUN_COMMAND = re.compile(r"[/\s(]pdrun(?:[\s)]|\.rendezvous\b)")
"""Found in the description of a process that is a scheduler of pdrun."""


def execute(plan: LaunchPlan, options: AgentOptions | None = None) -> int:
    """
    Carry out a plan; return the exit code of the job.

    Raises:
        PdrunError: the job could not be started or reached.
    """
    if plan.spec.place.port_range is not None:
        from pdrun.rendezvous.transport.listen import use_port_range

        use_port_range(plan.spec.place.port_range)
    with check_file_limit(plan):
        return _execute_mode(plan, options or AgentOptions())


def _execute_mode(plan: LaunchPlan, options: AgentOptions) -> int:
    has_controller = plan.mode in ("local", "hosts", "external")
    if has_controller or plan.start_method.how != "fork" or plan.start_method.warm:
        prestart.discard()
    if plan.mode == "local":
        from pdrun.launcher.controller.controller import run_local

        return run_local(plan)
    if plan.mode == "hosts":
        from pdrun.launcher.controller.ssh import run_hosts

        return run_hosts(plan)
    if plan.mode == "external":
        from pdrun.launcher.controller.external import run_external

        return run_external(plan)
    with console_of(options) as options:
        if plan.start_method.how == "fork":
            # torch is imported while the rest of pdrun is
            supervisor = start_supervisor(plan, options.print_line)
            options = replace(options, supervisor=supervisor)
        try:
            if plan.mode == "single":
                return _execute_single(plan, options)
            if plan.mode == "head":
                return _execute_head(plan, options)
            return _execute_join(plan, options)
        finally:
            if options.supervisor is not None:
                options.supervisor.close()  # the agent may not have been reached


def _execute_single(plan: LaunchPlan, options: AgentOptions) -> int:
    from pdrun.rendezvous.scheduler.local_link import LocalLink

    run = options.run or make_run_name(plan)
    link = LocalLink(
        make_scheduler_config(plan, run),
        host=plan.compared.get("host", ""),
        events_path=event_log_path(plan, run),
    )
    return run_node_agent(plan, link, options, has_scheduler=True, is_alone=True)


def _execute_head(plan: LaunchPlan, options: AgentOptions) -> int:
    from pdrun.rendezvous.scheduler.child import SchedulerChild

    secret = _find_secret_of_plan(plan, options)
    listener = _bind_scheduler(plan, options)
    if listener is None:
        return _execute_join(plan, options)
    is_insecure = plan.spec.place.insecure
    if is_insecure:
        options.print_line(INSECURE_WARNING)
    run = options.run or make_run_name(plan)
    events = event_log_path(plan, run)
    with _journal_path(plan, events) as journal:
        with listener:
            child = SchedulerChild(
                make_scheduler_config(plan, run),
                secret,
                listen_fd=listener.fileno(),
                events_path=events,
                insecure=is_insecure,
                journal=journal,
            )
        try:
            link = make_zmq_link(
                child.endpoint,
                secret,
                job=plan.job,
                start_timeout=plan.spec.policy.start_timeout,
                command=plan.compared.get("command", ""),
                expected_nodes=plan.spec.resources.max_members,
                print_line=options.print_line,
            )
            return run_node_agent(
                plan,
                link,
                options,
                scheduler_process=child,
                event_log=str(events or ""),
                has_scheduler=True,
                secret=secret,
            )
        finally:
            child.close()


def _find_secret_of_plan(plan: LaunchPlan, options: AgentOptions) -> Secret | None:
    cluster = plan.spec.place
    source = plan.sources.get("place.token_file", "")
    return find_job_secret(options, cluster.token_file, source, cluster.insecure)


@contextmanager
def _journal_path(plan: LaunchPlan, events: Path | None) -> Iterator[Path | None]:
    """
    Yield the recovery file from which a scheduler that died is resumed.

    It is in the folder of the event log, or in a temporary folder if there is no event log. None:
    nodes do not wait for a lost scheduler.
    """
    if not plan.spec.policy.scheduler_loss:
        yield None
    elif events is not None:
        yield events.with_name("scheduler.journal")
    else:
        # mode 0700
        with tempfile.TemporaryDirectory(prefix="pdrun-", ignore_cleanup_errors=True) as folder:
            yield Path(folder, "scheduler.journal")


def _execute_join(plan: LaunchPlan, options: AgentOptions) -> int:
    assert plan.scheduler is not None
    cluster = plan.spec.place
    hint = ""
    if cluster.node_rank == 0 and cluster.serve is None:
        hint = (
            f"this node is rank 0, but {plan.scheduler.host} is not one of its addresses; "
            "add --serve if that is a service or NAT in front of it"
        )
    elif options.run and not cluster.simulated:
        # the controller has the first host listen before it starts the other agents
        hint = (
            "the scheduler listens there, so a firewall between the hosts blocks the port: allow"
            " it, or set open ports with --port-range LOW-HIGH"
        )
    secret = _find_secret_of_plan(plan, options)
    link = make_zmq_link(
        plan.scheduler,
        secret,
        job=plan.job,
        start_timeout=plan.spec.policy.start_timeout,
        command=plan.compared.get("command", ""),
        hint=hint,
        expected_nodes=plan.spec.resources.max_members,
        print_line=options.print_line,
    )
    return run_node_agent(plan, link, options, secret=secret)


def _bind_scheduler(plan: LaunchPlan, options: AgentOptions) -> socket.socket | None:
    """
    Return the scheduler's listening socket, or None if a scheduler listens there already.

    None only if this node may join instead. A node that must run the scheduler (``--serve``, node
    rank 0) never joins another one.

    Raises:
        ConfigError: the address cannot be used.
    """
    from pdrun.rendezvous.transport.listen import bind_listener

    if options.scheduler_fd is not None:
        return socket.socket(fileno=options.scheduler_fd)
    assert plan.scheduler is not None
    try:
        return bind_listener(plan.scheduler)
    except ConfigError as error:
        cause = error.__context__
        is_in_use = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
        may_join = plan.spec.place.serve is None and plan.spec.place.node_rank is None
        if is_in_use and may_join:
            _check_scheduler_listens(plan.scheduler, error, options.print_line)
            return None
        raise


def _check_scheduler_listens(
    endpoint: Endpoint, in_use: ConfigError, print_line: Callable[[str], None]
) -> None:
    """
    Print which process listens on the scheduler's address; raise if it is not a scheduler.

    A scheduler of pdrun is recognised by its command and not connected to: it would count the
    connection as a failed handshake.
    """
    from pdrun.launcher.common.network import is_zmtp_server

    print_line(f"{in_use.what}: joining the scheduler there")
    if not PDRUN_COMMAND.search(in_use.what) and not is_zmtp_server(endpoint):
        raise ConfigError(
            f"{in_use.what}, which is not a scheduler", where=in_use.where, hint=in_use.hint
        ) from None
