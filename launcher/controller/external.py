"""
Carries out a plan of mode ``external``: the scheduler runs in this process, the agents are tasks of
mpirun or srun.

    this process: scheduler --- (ZeroMQ, encrypted) --- agents, one per node
            \\--- mpirun or srun --- its daemons --- the same agents

The exit code is the scheduler's verdict.

* When the launcher ends before there is a verdict, the remaining agents get a message and exit.
* When this process dies, the agents lose their scheduler and exit.
* A launcher that stays after the verdict is ended.
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

from pdrun import process_setup
from pdrun.async_writer import write_message
from pdrun.endpoint import Endpoint
from pdrun.errors import EXIT_UNAVAILABLE, ConfigError
from pdrun.eventlog import EventLog
from pdrun.launcher.common.signals import STOP_SIGNALS, format_signal
from pdrun.launcher.controller import payload
from pdrun.launcher.controller.controller import job_secret
from pdrun.launcher.jobs.run_record import (
    INSECURE_WARNING,
    event_log_path,
    make_run_name,
    make_scheduler_config,
    register_run,
)
from pdrun.launcher.output.console import Console
from pdrun.launcher.plan.external import PAYLOAD_VARIABLE, TOKEN_VARIABLE, make_task_spec
from pdrun.launcher.plan.model import LaunchPlan
from pdrun.rendezvous.protocol.security import format_token
from pdrun.rendezvous.scheduler.service import Service
from pdrun.rendezvous.transport.listen import bind_listener

USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals for the workers: the launcher forwards them to its tasks."""
EXIT_SECONDS = 10.0
"""Time for the launcher to exit after the job has ended."""
KILL_SECONDS = 5.0
"""Time for the launcher to exit after SIGTERM."""


def run_external(plan: LaunchPlan) -> int:
    """
    Start the agents through mpirun or srun; return the job's exit code.

    Raises:
        ConfigError: the scheduler's address cannot be listened on, or the launcher cannot be
            started.
    """
    from pdrun.rendezvous.transport.zmq_server import ZmqServer

    run = make_run_name(plan)
    is_insecure = plan.spec.place.insecure
    secret = None if is_insecure else job_secret(plan)
    if is_insecure:
        write_message(INSECURE_WARNING)
    events = event_log_path(plan, run)
    with bind_listener(Endpoint(plan.listen, 0), backlog=1024) as listener:
        transport = ZmqServer(secret, listen_fd=os.dup(listener.fileno()), insecure=is_insecure)
    log = EventLog(Path(events)) if events else None
    # The scheduler is not restarted: agents that lose it lose the controller, and exit immediately.
    config = replace(make_scheduler_config(plan, run), patience=0.0)
    service = Service(config, transport, record=log.extend if log else None)
    try:
        token = format_token(secret) if secret else ""
        env = _launcher_environment(plan, transport.endpoint, run, token)
        register_run(plan, run, str(transport.endpoint))
        return ExternalJob(plan, service, env).run()
    finally:
        transport.close(1.0)
        if log and (error := log.close()):
            write_message(error)


def _launcher_environment(
    plan: LaunchPlan, scheduler: Endpoint, run: str, token: str
) -> dict[str, str]:
    """
    Return the environment of mpirun or srun.

    It is that of this process without pdrun's options, and the two variables for the tasks.
    """
    launch = plan.external_launch
    assert launch is not None
    task = {
        "spec": make_task_spec(plan, scheduler).to_json(),
        "sources": dict(plan.sources),
        "how": launch.kind,
        "run": run,
        "env": dict(launch.env),
        "folder": plan.cwd,
        **Console().to_json(),
    }
    env = {name: value for name, value in os.environ.items() if not name.startswith("PDRUN_")}
    env.update(launch.launcher_env)
    env[PAYLOAD_VARIABLE] = payload.encode(task)
    if token:
        env[TOKEN_VARIABLE] = token
    return env


class ExternalJob:
    """The loop over scheduler, launcher and signals."""

    def __init__(self, plan: LaunchPlan, service: Service, env: dict[str, str]) -> None:
        assert plan.external_launch is not None
        self._launch = plan.external_launch
        self._service = service
        self._env = env
        self._signals: list[int] = []
        """Signals received and not yet handled."""
        self._stop_signals: list[int] = []
        """Stop signals handled so far."""
        self._launcher_status: int | None = None
        """The launcher's exit status, as Popen returns it; None: it runs."""
        self._ended_early = False
        """Whether the launcher ended before the job had its verdict."""

    def run(self) -> int:
        """Run the job; return its exit code."""
        handlers = self._catch_signals()
        process: subprocess.Popen[bytes] | None = None
        try:
            process = self._start_launcher()
            while self._service.exit_code is None and not self._is_abandoned():
                self._service.poll_once(0.1)
                self._handle_signals(process)
                if self._launcher_status is None and (code := process.poll()) is not None:
                    self._on_launcher_exit(code)
            self._end_launcher(process)
            return self._exit_code()
        finally:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()
            for number, handler in handlers.items():
                after = process_setup.handler_after(handler)
                signal.signal(number, after)  # type: ignore[arg-type]

    def _start_launcher(self) -> subprocess.Popen[bytes]:
        argv = self._launch.argv
        try:
            return subprocess.Popen(
                argv, env=self._env, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            hint = ""
            if error.errno == errno.E2BIG:
                hint = "put long arguments and variables into a file"
            raise ConfigError(
                f"cannot be started: {error.strerror}", where=argv[0], hint=hint
            ) from error

    def _is_abandoned(self) -> bool:
        """Return whether the launcher has ended and no agent is connected."""
        return self._launcher_status is not None and not self._service.has_peers

    def _on_launcher_exit(self, code: int) -> None:
        self._launcher_status = code
        if self._service.machine.shutdown.verdict is None:
            self._ended_early = True
            how = f"ended with code {code}"
            if code < 0:
                how = f"was killed by {format_signal(-code)}"
            self._service.on_agent_lost(f"{self._launch.kind} {how} before the job was over")

    def _end_launcher(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the launcher's end; terminate and kill it if it does not exit."""
        steps = ((EXIT_SECONDS, process.terminate), (KILL_SECONDS, process.kill))
        for seconds, step in steps:
            deadline = time.monotonic() + seconds
            while process.poll() is None and time.monotonic() < deadline:
                self._service.poll_once(0.05)
            if process.poll() is None:
                step()
        self._launcher_status = process.wait()

    def _exit_code(self) -> int:
        verdict = self._service.machine.shutdown.verdict
        if verdict is None or (self._ended_early and verdict.first is None):
            code = self._launcher_status or 0
            if code < 0:
                code = 128 - code
            write_message(f"{self._launch.kind} ended with code {code} before the job was over")
            return code or EXIT_UNAVAILABLE
        return verdict.code

    def _catch_signals(self) -> dict[int, object]:
        def note_signal(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        handlers: dict[int, object] = {}
        for number in (*STOP_SIGNALS, *USER_SIGNALS, signal.SIGTSTP):
            if signal.getsignal(number) != signal.SIG_IGN:
                handlers[number] = signal.signal(number, note_signal)
        return handlers

    def _handle_signals(self, process: subprocess.Popen[bytes]) -> None:
        """
        Forward stop signals to the scheduler and user signals to the launcher.

        The first stop leaves the workers their grace time, the second kills them, the third ends
        the launcher, too.
        """
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGTSTP:
                write_message("Ctrl-Z is ignored: the scheduler runs in this process")
            elif number in USER_SIGNALS:
                process.send_signal(number)
            else:
                self._stop_job(number, process)

    def _stop_job(self, number: int, process: subprocess.Popen[bytes]) -> None:
        self._stop_signals.append(number)
        is_repeated = len(self._stop_signals) > 1
        name = format_signal(number)
        if is_repeated:
            write_message(f"{name} again: killing all workers")
        else:
            write_message(f"{name}: stopping the job")
        self._service.stop_job(number, f"{name} where the job was started", force=is_repeated)
        if len(self._stop_signals) > 2:
            process.terminate()
