"""
Carries out a plan of mode ``through``: the scheduler runs in this process, the agents are tasks of
mpirun or srun.

    this process: scheduler --- (ZeroMQ, encrypted) --- agents, one a node
            \\--- mpirun or srun --- its daemons --- the same agents

The exit code is the scheduler's verdict. When the launcher ends before there is one, the agents
that are left are told so and end; when this process dies, they lose their scheduler and end; a
launcher that outstays the verdict is ended.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType

from pdrun import async_writer, process_setup
from pdrun.endpoint import Endpoint
from pdrun.errors import EXIT_UNAVAILABLE, ConfigError
from pdrun.eventlog import EventLog
from pdrun.launcher.common.signals import STOP, signal_name
from pdrun.launcher.controller import payload as order
from pdrun.launcher.controller.controller import job_secret
from pdrun.launcher.output.console import Console
from pdrun.launcher.plan.external import ORDER, TOKEN, task_spec
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.rendezvous.protocol.security import token_text
from pdrun.rendezvous.scheduler.service import Service
from pdrun.rendezvous.transport.listen import bind_listener

USERS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that the launcher gets, whose tasks' business they are."""
LEAVES = 10.0
"""Seconds that the launcher may take to end after the job has."""
KILL_AFTER = 5.0


def run_through(plan: LaunchPlan) -> int:
    """
    Start the agents by way of another launcher; return the job's exit code.

    Raises:
        ConfigError: the scheduler's address cannot be listened on, or the launcher cannot be
            started.
    """
    from pdrun.launcher.jobs.run_record import (
        INSECURE,
        events_path,
        register,
        run_name,
        scheduler_config,
    )
    from pdrun.rendezvous.transport.zmq_server import ZmqServer

    run = run_name(plan)
    insecure = plan.spec.place.insecure
    secret = None if insecure else job_secret(plan)
    if insecure:
        _say(INSECURE)
    events = events_path(plan, run)
    with bind_listener(Endpoint(plan.listen, 0), backlog=1024) as listener:
        transport = ZmqServer(secret, listen_fd=os.dup(listener.fileno()), insecure=insecure)
    log = EventLog(Path(events)) if events else None
    # nobody starts this scheduler again: agents that lose it, lose the front, and end at once
    config = replace(scheduler_config(plan, run), patience=0.0)
    service = Service(config, transport, record=log.extend if log else None)
    try:
        env = _environment(plan, transport.endpoint, run, token_text(secret) if secret else "")
        register(plan, run, str(transport.endpoint))
        return _Tending(plan, service, env).run()
    finally:
        transport.close(1.0)
        if log and (missing := log.close()):
            _say(missing)


def _environment(plan: LaunchPlan, scheduler: Endpoint, run: str, token: str) -> dict[str, str]:
    """
    Return the launcher's own environment: ours, without pdrun's options, and the two variables for
    the tasks.
    """
    assert plan.through is not None
    told = {
        "spec": task_spec(plan, scheduler).to_json(),
        "sources": dict(plan.sources),
        "how": plan.through.how,
        "run": run,
        "env": dict(plan.through.env),
        "folder": plan.cwd,
        **Console().to_json(),
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PDRUN_")}
    return {
        **inherited,
        **plan.through.extra,
        ORDER: order.encode(told),
        **({TOKEN: token} if token else {}),
    }


class _Tending:
    """The loop over scheduler, launcher and signals."""

    def __init__(self, plan: LaunchPlan, service: Service, env: dict[str, str]) -> None:
        assert plan.through is not None
        self._through = plan.through
        self._service = service
        self._env = env
        self._grace = plan.spec.policy.grace
        self._signals: list[int] = []
        self._stops: list[int] = []
        self._end: int | None = None
        """The launcher's exit status as Popen says it."""
        self._early = False
        """Whether it ended before the job had its verdict."""

    def run(self) -> int:
        restore = self._catch()
        process: subprocess.Popen[bytes] | None = None
        try:
            process = self._start()
            while self._service.done is None and not self._over():
                self._service.poll_once(0.1)
                self._take_signals(process)
                if self._end is None and (code := process.poll()) is not None:
                    self._ended(code)
            self._let_go(process)
            return self._code()
        finally:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
            for number, handler in restore.items():
                signal.signal(number, process_setup.handler_after(handler))  # type: ignore[arg-type]

    def _start(self) -> subprocess.Popen[bytes]:
        argv = self._through.argv
        try:
            return subprocess.Popen(
                argv, env=self._env, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            long = (
                "put long arguments and variables into a file" if error.errno == errno.E2BIG else ""
            )
            raise ConfigError(
                f"cannot be started: {error.strerror}", where=argv[0], hint=long
            ) from error

    def _over(self) -> bool:
        """The launcher has ended and nobody is there who could still take part."""
        return self._end is not None and not self._service.talks

    def _ended(self, code: int) -> None:
        self._end = code
        if self._service.machine.verdict is None:
            self._early = True
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with code {code}"
            self._service.orphaned(f"{self._through.how} {how} before the job was over")

    def _let_go(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the launcher's end, and help it along when it does not come."""
        for wait, step in ((LEAVES, process.terminate), (KILL_AFTER, process.kill)):
            deadline = time.monotonic() + wait
            while process.poll() is None and time.monotonic() < deadline:
                self._service.poll_once(0.05)
            if process.poll() is None:
                step()
        self._end = process.wait()

    def _code(self) -> int:
        verdict = self._service.machine.verdict
        end = self._end or 0
        if verdict is None or (self._early and verdict.first is None):
            status = end if end >= 0 else 128 - end
            _say(f"{self._through.how} ended with code {status} before the job was over")
            return status or EXIT_UNAVAILABLE
        return verdict.code

    def _catch(self) -> dict[int, object]:
        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        taken = (*STOP, *USERS, signal.SIGTSTP)
        return {
            number: signal.signal(number, note)
            for number in taken
            if signal.getsignal(number) != signal.SIG_IGN
        }

    def _take_signals(self, process: subprocess.Popen[bytes]) -> None:
        """
        A stop is the scheduler's affair: once with grace, again at once; the third ends the
        launcher, too.
        """
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGTSTP:
                _say("Ctrl-Z is not taken: the scheduler runs in this process")
                continue
            if number in USERS:
                process.send_signal(number)
                continue
            self._stops.append(number)
            again = len(self._stops) > 1
            name = signal_name(number)
            _say(f"{name}{' again: killing all workers' if again else ': stopping the job'}")
            self._service.stop(number, f"{name} where the job was started", force=again)
            if len(self._stops) > 2:
                process.terminate()


_say = async_writer.write_message
