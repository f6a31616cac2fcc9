"""
Carries out a plan: makes the link, the scheduler process where this node has it, and the agent;
returns the exit code.

    alone   agent + scheduler in this process, no socket          first   agent + scheduler process
    join    agent                                                 local   `front` starts an agent process a node
    hosts   `fanout` starts an agent on every host, over ssh      through `throughrun` has mpirun or srun start them
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

from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError
from pdrun.launcher.jobs.run_record import INSECURE, events_path, run_name, scheduler_config
from pdrun.launcher.launch import prestart as ahead
from pdrun.launcher.launch.agent_options import Seat, at_a_console
from pdrun.launcher.launch.file_limits import enough_files
from pdrun.launcher.launch.node_agent import agent, keeper, secret_of, zmq_link
from pdrun.launcher.plan.model import LaunchPlan


def execute(plan: LaunchPlan, seat: Seat | None = None) -> int:
    """
    Do what the plan says; return the exit code of the job.

    Raises:
        PdrunError: the job could not be started or reached.
    """
    with enough_files(plan):
        return _execute(plan, seat or Seat())


def _execute(plan: LaunchPlan, seat: Seat) -> int:
    if (
        plan.mode in ("local", "hosts", "through")
        or plan.starting.how != "fork"
        or plan.starting.warm
    ):
        ahead.drop()
    if plan.mode == "local":
        from pdrun.launcher.controller.controller import run_local

        return run_local(plan)
    if plan.mode == "hosts":
        from pdrun.launcher.controller.ssh import run_hosts

        return run_hosts(plan)
    if plan.mode == "through":
        from pdrun.launcher.controller.external import run_through

        return run_through(plan)
    with at_a_console(seat) as seat:
        if plan.starting.how == "fork":
            seat = replace(seat, keeper=keeper(plan, seat.say))
        try:
            if plan.mode == "alone":
                return _alone(plan, seat)
            return _first(plan, seat) if plan.mode == "first" else _join(plan, seat)
        finally:
            if seat.keeper is not None:
                seat.keeper.close()  # where no agent ever came to do that


def _alone(plan: LaunchPlan, seat: Seat) -> int:
    from pdrun.rendezvous.scheduler.local_link import LocalLink

    run = seat.run or run_name(plan)
    link = LocalLink(
        scheduler_config(plan, run),
        host=plan.facts.get("host", ""),
        events_path=events_path(plan, run),
    )
    return agent(plan, link, seat, serves=True)


def _first(plan: LaunchPlan, seat: Seat) -> int:
    from pdrun.rendezvous.scheduler.child import SchedulerChild

    assert plan.scheduler is not None
    insecure = plan.spec.place.insecure
    secret = secret_of(
        seat, plan.spec.place.token_file, plan.sources.get("place.token_file", ""), insecure
    )
    listener = _listener(plan, seat)
    if listener is None:
        return _join(plan, seat)
    if insecure:
        seat.say(INSECURE)
    run = seat.run or run_name(plan)
    events = events_path(plan, run)
    with _journal(plan, events) as journal:
        with listener:
            child = SchedulerChild(
                scheduler_config(plan, run),
                secret,
                listen_fd=listener.fileno(),
                events_path=events,
                insecure=insecure,
                journal=journal,
            )
        try:
            command = plan.facts.get("command", "")
            waits = plan.spec.policy.start_timeout
            crowd = plan.spec.resources.members
            link = zmq_link(
                child.endpoint, secret, plan.job, waits, command, crowd=crowd, say=seat.say
            )
            return agent(plan, link, seat, child=child, events=str(events or ""), serves=True)
        finally:
            child.close()


@contextmanager
def _journal(plan: LaunchPlan, events: Path | None) -> Iterator[Path | None]:
    """
    Yield the file from which a scheduler that died is resumed: beside the event log, else in a
    folder of its own.

    None where the user wants no waiting for a lost scheduler.
    """
    if not plan.spec.policy.scheduler_loss:
        yield None
    elif events is not None:
        yield events.with_name("scheduler.journal")
    else:
        with tempfile.TemporaryDirectory(
            prefix="pdrun-", ignore_cleanup_errors=True
        ) as folder:  # mode 0700
            yield Path(folder, "scheduler.journal")


def _join(plan: LaunchPlan, seat: Seat) -> int:
    assert plan.scheduler is not None
    place = plan.spec.place
    secret = secret_of(
        seat, place.token_file, plan.sources.get("place.token_file", ""), place.insecure
    )
    command = plan.facts.get("command", "")
    hint = ""
    if place.node_rank == 0 and place.serve is None:
        own = f"this node is rank 0, and {plan.scheduler.host} is no address of its own"
        hint = f"{own}: where that is a service or NAT in front of it, add --serve"
    waits = plan.spec.policy.start_timeout
    crowd = plan.spec.resources.members
    link = zmq_link(
        plan.scheduler, secret, plan.job, waits, command, hint=hint, crowd=crowd, say=seat.say
    )
    return agent(plan, link, seat)


def _listener(plan: LaunchPlan, seat: Seat) -> socket.socket | None:
    """
    Return the scheduler's listening socket, or None when somebody is there already and this node
    may as well join.

    A node that was told to run the scheduler (``--serve``, node rank 0) never joins another's.
    """
    from pdrun.rendezvous.transport.listen import bind_listener

    if seat.scheduler_fd is not None:
        return socket.socket(fileno=seat.scheduler_fd)
    assert plan.scheduler is not None
    try:
        return bind_listener(plan.scheduler)
    except ConfigError as error:
        taken = (
            isinstance(error.__context__, OSError) and error.__context__.errno == errno.EADDRINUSE
        )
        if taken and plan.spec.place.serve is None and plan.spec.place.node_rank is None:
            _look_who(plan.scheduler, error, seat.say)
            return None
        raise


def _look_who(endpoint: Endpoint, taken: ConfigError, say: Callable[[str], None]) -> None:
    """
    Say who has the port that this node would have taken; where it is no scheduler that is an error
    at once.

    A scheduler of ours is known by its command and left in peace: it would take the look for a
    failed handshake.
    """
    from pdrun.launcher.common.network import speaks_zmtp

    say(f"{taken.what}: joining the scheduler there")
    if not re.search(r"[/\s(]pdrun(?:[\s)]|\.rendezvous\b)", taken.what) and not speaks_zmtp(
        endpoint
    ):
        raise ConfigError(
            f"{taken.what}, and that is no scheduler", where=taken.where, hint=taken.hint
        ) from None
