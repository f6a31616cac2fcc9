"""Builds what the agent of this node needs (secret, link, supervisor, output) and runs it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from pdrun import async_writer
from pdrun.launcher.jobs.run_record import blamed, register
from pdrun.launcher.launch import prestart as ahead
from pdrun.launcher.launch.agent_options import Seat
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.launcher.plan.start_method import starter_command
from pdrun.launcher.supervisor.client import KeeperProcess

if TYPE_CHECKING:  # the rest of pdrun is loaded while torch is being imported
    from pdrun.endpoint import Endpoint
    from pdrun.launcher.agent.interfaces import Link
    from pdrun.launcher.output.router import Output
    from pdrun.rendezvous.protocol.messages import Welcome
    from pdrun.rendezvous.protocol.security import Secret
    from pdrun.rendezvous.scheduler.child import SchedulerChild


def agent(
    plan: LaunchPlan | Callable[[Welcome], LaunchPlan],
    link: Link,
    seat: Seat,
    *,
    child: SchedulerChild | None = None,
    events: str = "",
    serves: bool = False,
) -> int:
    from pdrun.launcher.agent.agent import run_agent
    from pdrun.launcher.agent.interfaces import Surroundings
    from pdrun.launcher.output.router import Output

    address = str(child.endpoint) if child else ""
    if isinstance(plan, LaunchPlan) and plan.scheduler and not plan.spec.place.simulated:
        address = address or str(plan.scheduler)
    elif isinstance(plan, LaunchPlan) and not plan.spec.reopens:
        address = ""  # the nodes are started by this command itself, and no others can come
    if seat.run or seat.together:
        address = ""  # all nodes are started by one command

    def output(made: LaunchPlan) -> Output:
        return Output(
            made.spec.output,
            node=made.node,
            cwd=made.cwd,
            ip=made.listen,
            hostname=made.facts.get("host", made.node),
            console=seat.console,
        )

    def welcomed(made: LaunchPlan, welcome: Welcome) -> None:
        if serves and not seat.run:
            register(made, welcome.run, str(child.endpoint) if child else "", front=seat.front)

    beforehand = [seat.keeper] if seat.keeper is not None else []

    def kept(made: LaunchPlan) -> KeeperProcess:
        found = beforehand.pop() if beforehand else keeper(made, seat.say)
        if child:
            found.spare.add(child.pid)
            child.on_start = (
                found.spare.add
            )  # the keeper's sweeps leave a restarted scheduler alone, too
        return found

    return run_agent(
        plan,
        link,
        Surroundings(
            keeper=kept,
            output=output,
            welcomed=welcomed,
            scheduler_child=child,
            lifeline=seat.lifeline,
            stdin=_stdin(seat),
            address=address,
            events=events,
            reached=lambda mark: _reached(seat, mark),
            quiet=seat.quiet,
            say=seat.say,
        ),
    )


def secret_of(seat: Seat, token_file: str, source: str, insecure: bool) -> Secret | None:
    from pdrun.rendezvous.protocol.security import find_secret

    if insecure:
        return None
    with blamed(source):
        return seat.secret or find_secret(token_file)[0]


def zmq_link(
    endpoint: Endpoint,
    secret: Secret | None,
    job: str,
    start_timeout: float,
    command: str = "",
    *,
    needs_spec: bool = False,
    hint: str = "",
    crowd: int,
    say: Callable[[str], None],
) -> Link:
    from pdrun.rendezvous.scheduler.local_link import ZmqLink

    return ZmqLink(
        endpoint,
        secret,
        job=job,
        host=socket.gethostname(),
        start_timeout=start_timeout,
        insecure=secret is None,
        on_status=say,
        command=command,
        needs_spec=needs_spec,
        hint=hint,
        crowd=crowd,
    )


def keeper(
    plan: LaunchPlan, say: Callable[[str], None] = async_writer.write_message
) -> KeeperProcess:
    """
    Return a keeper for the workers of a plan: one forked from its warm process, else a child that
    imports torch.
    """
    if plan.starting.warm:
        from pdrun.launcher.supervisor.warm_client import borrow

        try:
            return KeeperProcess(lent=borrow(plan.starting.warm))
        except OSError as error:
            why = error.strerror or error
            say(f"the warm process cannot be used: {why}; torch is imported")
    if plan.starting.how != "fork":
        return KeeperProcess()
    wanted = starter_command(plan)
    made = KeeperProcess(ahead=ahead.take(wanted))
    made.prepare(wanted)
    return made


def _reached(seat: Seat, mark: bytes) -> None:
    """Tell the process that holds the lifeline; one that is gone is noticed elsewhere."""
    if seat.lifeline is not None:
        try:
            os.write(seat.lifeline, mark)
        except OSError:
            pass


def _stdin(seat: Seat) -> int | None:
    """
    What rank 0 reads: a file or pipe that was given to pdrun, never the terminal (it is in another
    session).
    """
    if seat.lifeline is not None or not seat.stdin or sys.stdin is None or os.isatty(0):
        return None
    return 0
