"""
Carries out a plan: makes the link, the scheduler process where this node has it, and the agent;
returns the exit code.

    alone   agent + scheduler in this process, no socket          first   agent + scheduler process
    join    agent                                                 local   `front` starts an agent process a node
    hosts   `fanout` starts an agent on every host, over ssh      through `throughrun` has mpirun or srun start them
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdrun import async_writer as lane
from pdrun import process_setup as early
from pdrun.clock import SystemClock
from pdrun.endpoint import Endpoint
from pdrun.errors import ConfigError
from pdrun.launcher.config.spec import JobSpec, Policy, Resources, Sources, field_paths
from pdrun.launcher.jobs import registry as jobs
from pdrun.launcher.launch import prestart as ahead
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.launcher.plan.start_method import starter_command
from pdrun.launcher.supervisor.client import KeeperProcess
from pdrun.names import name_from

if TYPE_CHECKING:  # the rest of pdrun is loaded while torch is being imported
    from pdrun.launcher.agent.interfaces import Link
    from pdrun.launcher.output.console import Console
    from pdrun.launcher.output.router import Output
    from pdrun.rendezvous.protocol.events import SchedulerConfig
    from pdrun.rendezvous.protocol.messages import Welcome
    from pdrun.rendezvous.protocol.security import Secret
    from pdrun.rendezvous.scheduler.child import SchedulerChild


INSECURE = "INSECURE: no token is asked for; anybody who reaches the scheduler's port can take part in the job"
UNKNOWN = 1000
"""
Nodes that a job is taken to have by one that joins it and has not been told: sets how patiently it
connects.
"""


@dataclass(frozen=True)
class Seat:
    """
    What an agent gets from whoever started it; the defaults are those of a command typed by a user.
    """

    secret: Secret | None = None
    """None: found as `security.find_secret` does."""
    scheduler_fd: int | None = None
    """Listening socket for the scheduler of this node."""
    lifeline: int | None = None
    console: Console | None = None
    """Where all that the agent prints goes, its link's words too; None: this process's own."""
    quiet: bool = False
    front: int | None = None
    """Pid of the process that `pdrun stop` is to signal; None: this one."""
    keeper: KeeperProcess | None = None
    """One that was started beforehand."""
    run: str = ""
    """
    Name of the run, where a front on some machine has chosen it, started all nodes and keeps the
    job's entry.
    """
    together: bool = False
    """
    Something else starts all nodes (mpirun, srun): nobody is told how to start those that are
    missing.
    """
    stdin: bool = True
    """Whether rank 0 may read the standard input of this process."""

    def say(self, text: str) -> None:
        """Print a line of pdrun's own; waits for no reader, and survives one that goes away."""
        if self.console is not None:
            self.console.say(f"pdrun: {text}")
        else:
            lane.say(text)


@contextmanager
def _at_a_console(seat: Seat) -> Iterator[Seat]:
    """
    Yield a seat that has a console, which is written out at the end, whether there was an output or
    not.
    """
    from pdrun.launcher.output.console import Console

    console = seat.console or Console()
    try:
        yield replace(seat, console=console)
    finally:
        console.close()


def execute(plan: LaunchPlan, seat: Seat | None = None) -> int:
    """
    Do what the plan says; return the exit code of the job.

    Raises:
        PdrunError: the job could not be started or reached.
    """
    with _enough_files(plan):
        return _execute(plan, seat or Seat())


@contextmanager
def _enough_files(plan: LaunchPlan) -> Iterator[None]:
    """
    Complain of too low a limit of open files before anything is started, and of any limit that is
    met after all.
    """
    count, what = files_needed(plan)
    early.need_descriptors(count, what)
    try:
        yield
    except Exception as error:
        if limit := early.explained(error, what, 2 * count):
            raise limit from error
        raise


def files_needed(plan: LaunchPlan) -> tuple[int, str]:
    """
    Return how many descriptors the busiest process of a plan needs on this node, and for what.
    """
    asked = plan.spec.resources.devices
    workers = len(plan.workers) or (asked if isinstance(asked, int) else 1)
    # the agent holds two pipes and two log files a worker; the keeper, until a starter has forked
    # it, its whole order
    most = (
        6 if plan.spec.program.kind != "command" else 4 if plan.spec.output.files else 2
    ) * workers
    nodes = plan.spec.resources.members
    own = 16 if plan.mode == "alone" else 32 + nodes
    front = 16 + 3 * nodes if plan.mode in ("local", "hosts", "through") else 0
    return max(own + most, 32, front), f"a node with {workers} worker{'s' if workers > 1 else ''}"


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
    with _at_a_console(seat) as seat:
        if plan.starting.how == "fork":
            seat = replace(seat, keeper=keeper(plan, seat.say))
        try:
            if plan.mode == "alone":
                return _alone(plan, seat)
            return _first(plan, seat) if plan.mode == "first" else _join(plan, seat)
        finally:
            if seat.keeper is not None:
                seat.keeper.close()  # where no agent ever came to do that


def execute_join(endpoint: Endpoint, overrides: Mapping[str, Any], sources: Sources) -> int:
    """
    Take part in the job whose scheduler is at ``endpoint``; return its exit code.

    Args:
        overrides: field path -> value, of what was said on this node; the rest is the job's
            specification, which the
            scheduler hands out.
        sources: field path -> where the override came from.

    Raises:
        PdrunError: nobody answered, the token differs, or the plan cannot be made.
    """
    from pdrun.launcher.plan.facts import gather
    from pdrun.launcher.plan.plan import plan

    def planned(welcome: Welcome) -> LaunchPlan:
        spec = joined_spec(welcome.spec, overrides, endpoint)
        told = dict.fromkeys(field_paths(), f"the job at {endpoint}")
        made = plan(spec, gather(spec), {**told, **sources, "place.scheduler": "join"})
        early.need_descriptors(*files_needed(made))
        return made

    named = overrides.get("place.token_file", ""), sources.get("place.token_file", "")
    secret = _secret(Seat(), *named, overrides.get("place.insecure", False))
    timeout = overrides.get("policy.start_timeout", Policy().start_timeout)
    with _at_a_console(Seat()) as seat:
        link = _zmq_link(
            endpoint, secret, "", timeout, needs_spec=True, crowd=UNKNOWN, say=seat.say
        )
        return _agent(planned, link, seat)


def joined_spec(text: str, overrides: Mapping[str, Any], endpoint: Endpoint) -> JobSpec:
    """
    Return the job's specification with what was said on this node laid over it.

    Raises:
        ConfigError: the scheduler has none yet, or it is of another version.
    """
    if not text:
        raise ConfigError(
            "the scheduler does not know yet what the job runs",
            where=str(endpoint),
            hint="start one node with the whole command first",
        )
    try:
        spec = JobSpec.from_json(text)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"the job's specification is not understood: {error}", where=str(endpoint)
        ) from error
    groups: dict[str, dict[str, Any]] = {"place": {"scheduler": endpoint, "serve": False}}
    single: dict[str, Any] = {"env": dict(spec.env)}
    for path, value in overrides.items():
        group, _, name = path.partition(".")
        if not name:
            single[path] = value
        elif group == "env":
            single["env"][name] = value
        else:
            groups.setdefault(group, {})[name] = value
    return replace(
        spec,
        **single,
        **{group: replace(getattr(spec, group), **said) for group, said in groups.items()},
    )


def run_name(plan: LaunchPlan) -> str:
    """Return a unique name for a run: ``train-20250131-174502-9f3c``."""
    stem = plan.spec.job or name_from(
        Path(plan.spec.program.target.rstrip("/")).name.removesuffix(".py")
    )
    return f"{stem[:40]}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def scheduler_config(plan: LaunchPlan, run: str) -> SchedulerConfig:
    """Return what the scheduler of this plan's job is told."""
    host = plan.facts.get("host", plan.node)
    config = membership(plan.spec.resources, plan.spec.policy, job=plan.job, run=run, host=host)
    return replace(config, spec=plan.spec.shared(), command=plan.facts.get("command", ""))


def membership(
    resources: Resources, policy: Policy, *, job: str, run: str, host: str
) -> SchedulerConfig:
    """Return how a scheduler forms a job, keeps it and ends it."""
    from pdrun.rendezvous.protocol.events import SchedulerConfig

    return SchedulerConfig(
        job=job,
        run=run,
        host=host,
        nodes=resources.nodes,
        min_nodes=resources.min_nodes,
        spares=resources.spares,
        start_timeout=policy.start_timeout,
        grace=policy.grace,
        max_restarts=policy.max_restarts,
        restart_window=policy.restart_window,
        restart_on=policy.restart_on,
        no_restart_on=policy.no_restart_on,
        backoff=policy.backoff,
        gather=policy.gather,
        grow=policy.grow,
        patience=policy.scheduler_loss,
        time_limit=policy.time_limit,
    )


def events_path(plan: LaunchPlan, run: str) -> Path | None:
    """Return where the event log goes; None when the user wants no files."""
    if plan.spec.output.files:
        return Path(plan.cwd, plan.spec.output.log_dir, run, "events.jsonl")
    return None


def _alone(plan: LaunchPlan, seat: Seat) -> int:
    from pdrun.rendezvous.scheduler.local_link import LocalLink

    run = seat.run or run_name(plan)
    link = LocalLink(
        scheduler_config(plan, run),
        host=plan.facts.get("host", ""),
        events_path=events_path(plan, run),
    )
    return _agent(plan, link, seat, serves=True)


def _first(plan: LaunchPlan, seat: Seat) -> int:
    from pdrun.rendezvous.scheduler.child import SchedulerChild

    assert plan.scheduler is not None
    insecure = plan.spec.place.insecure
    secret = _secret(
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
            link = _zmq_link(
                child.endpoint, secret, plan.job, waits, command, crowd=crowd, say=seat.say
            )
            return _agent(plan, link, seat, child=child, events=str(events or ""), serves=True)
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
    secret = _secret(
        seat, place.token_file, plan.sources.get("place.token_file", ""), place.insecure
    )
    command = plan.facts.get("command", "")
    hint = ""
    if place.node_rank == 0 and place.serve is None:
        own = f"this node is rank 0, and {plan.scheduler.host} is no address of its own"
        hint = f"{own}: where that is a service or NAT in front of it, add --serve"
    waits = plan.spec.policy.start_timeout
    crowd = plan.spec.resources.members
    link = _zmq_link(
        plan.scheduler, secret, plan.job, waits, command, hint=hint, crowd=crowd, say=seat.say
    )
    return _agent(plan, link, seat)


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


def _secret(seat: Seat, token_file: str, source: str, insecure: bool) -> Secret | None:
    from pdrun.rendezvous.protocol.security import find_secret

    if insecure:
        return None
    with blamed(source):
        return seat.secret or find_secret(token_file)[0]


@contextmanager
def blamed(source: str) -> Iterator[None]:
    """
    Have a complaint about ``--token-file`` name the place that the file's name really came from.
    """
    try:
        yield
    except ConfigError as error:
        if source:
            error.where = re.sub("^--token-file(?= |$)", lambda _: source, error.where)
        raise


def _zmq_link(
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


def _agent(
    plan: LaunchPlan | Callable[[Welcome], LaunchPlan],
    link: Link,
    seat: Seat,
    *,
    child: SchedulerChild | None = None,
    events: str = "",
    serves: bool = False,
) -> int:
    from pdrun.launcher.agent.agent import run_agent
    from pdrun.launcher.agent.surroundings import Surroundings
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


def keeper(plan: LaunchPlan, say: Callable[[str], None] = lane.say) -> KeeperProcess:
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


def register(plan: LaunchPlan, run: str, scheduler: str, *, front: int | None = None) -> None:
    """
    Write the job into this user's registry: a convenience, and no error when it cannot be.

    Args:
        scheduler: ``HOST:PORT``, or empty when nothing listens.
        front: pid of the process that `pdrun stop` is to signal; None: this one.
    """
    events = events_path(plan, run)
    jobs.register(
        jobs.describe(
            run,
            plan.job,
            events=str(events or ""),
            log_dir=str(Path(plan.cwd, plan.spec.output.log_dir)),
            made=SystemClock().wall(),
            pid=front,
            scheduler=scheduler,
            log_name=plan.spec.output.log_name,
        )
    )


def _stdin(seat: Seat) -> int | None:
    """
    What rank 0 reads: a file or pipe that was given to pdrun, never the terminal (it is in another
    session).
    """
    if seat.lifeline is not None or not seat.stdin or sys.stdin is None or os.isatty(0):
        return None
    return 0
