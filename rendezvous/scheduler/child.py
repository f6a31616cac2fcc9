"""
The scheduler as a child of the first node's agent: start it, get its address, restart it.

The listening socket is bound here, so a port in use is reported before anything starts. The child
inherits the socket and reads the secret from stdin. The end of stdin means that its agent has died.

If the child dies, another one is started on the same socket, which stays open here meanwhile:
agents that reconnect wait in its queue. The successor resumes from the journal.

A child that stands still is killed, if a successor can resume: it gets a line every second and
answers each one (`PingCounter`).

`SchedulerChild.restart_if_dead` does all this and never blocks.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from pdrun.disk import BackgroundCall
from pdrun.endpoint import Endpoint, parse_endpoint
from pdrun.errors import ConfigError, RendezvousError
from pdrun.rendezvous.protocol.codec import to_plain
from pdrun.rendezvous.protocol.events import FAREWELL_SECONDS, SchedulerConfig
from pdrun.rendezvous.protocol.messages import Verdict
from pdrun.rendezvous.protocol.security import Secret
from pdrun.rendezvous.scheduler.ping_counter import PingCounter
from pdrun.rendezvous.transport.listen import bind_listener
from pdrun.rendezvous.transport.zmq_util import wait_readable

if TYPE_CHECKING:
    from pdrun.rendezvous.scheduler.farewell import Farewell

START_SECONDS = 30.0
"""Time for the child to listen: a process start and two imports, on a machine that may be busy."""
MAX_RESTARTS = 3
RESTART_WINDOW_SECONDS = 60.0
"""At most MAX_RESTARTS within this time. The next death ends the job."""
BACKOFF_SECONDS = (0.0, 0.2, 0.5)
"""Seconds before the first, second and third restart within RESTART_WINDOW_SECONDS."""
DISK_SECONDS = 2.0
"""Time for the journal's disk to answer whether the file exists."""
PING_LINE = b"ping\n"
REAP_SECONDS = 1.0
"""Time for a process to exit after the end of its output; then it is killed."""


class SchedulerChild:
    """
    A running scheduler process.

    `fileno` is readable when `restart_if_dead` has work, or at the end of the process.
    """

    COMMAND: ClassVar[tuple[str, ...]] = (
        sys.executable,
        "-P",
        "-m",
        "pdrun.rendezvous.scheduler.child_main",
    )
    """The command that is started. Tests replace it."""

    def __init__(
        self,
        config: SchedulerConfig,
        secret: Secret | None,
        *,
        endpoint: Endpoint | None = None,
        listen_fd: int | None = None,
        events_path: Path | str | None = None,
        insecure: bool = False,
        journal: Path | str | None = None,
        timeout: float = START_SECONDS,
    ) -> None:
        """
        Start the process and wait until it listens.

        Args:
            endpoint: the address to listen on (port 0: the system chooses), or
            listen_fd: a listening socket to pass on; the caller may close its own copy afterwards.
            events_path: file of the event log; None: no event log.
            journal: file from which a successor resumes; None: no successor.
            timeout: seconds for each process to start.

        Raises:
            ConfigError: the address cannot be listened on.
            RendezvousError: the process did not start, or ended twice before its first message.
        """
        if (endpoint is None) == (listen_fd is None):
            raise ValueError("give either an endpoint or a listening descriptor")
        self.on_start: Callable[[int], object] = lambda pid: None
        """Called with the pid of each process that is started later."""
        config = replace(config, keeps_port=True)
        self._config = config
        self._secret = secret
        self._farewell: Farewell | None = None
        self._verdict: Verdict | None = None
        self._listener = bind_listener(endpoint).detach() if endpoint else os.dup(listen_fd or 0)
        self._journal = Path(journal) if journal else None
        self._timeout = timeout
        self._order: dict[str, Any] = {
            "config": to_plain(config),
            "secret": secret.reveal().hex() if secret else None,
            "events": str(events_path) if events_path else None,
            "insecure": insecure,
            "journal": str(journal) if journal else None,
        }
        self._death_times: list[float] = []
        self._died_at = 0.0
        self._restart_at: float | None = None
        """Time at which another process is started; None: one runs, or none will."""
        self._answer_deadline: float | None = None
        """While a process starts: time by which it must report that it listens."""
        self._line = b""
        self._pings = PingCounter(config.nodes)
        self._is_frozen = False
        try:
            self._start_process()
            self.endpoint: Endpoint = self._await_endpoint(timeout) or self._start_second(timeout)
        except BaseException:
            self.close(0.0)
            raise

    @property
    def pid(self) -> int:
        """The process id of the present process, or of the last one."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit status as in `subprocess`; None while it runs."""
        return self._process.poll()

    def fileno(self) -> int:
        """
        Return a descriptor that is readable when `restart_if_dead` is due: an answer, or the end;
        -1: see `deadline`.
        """
        stream = self._process.stdout
        return -1 if stream is None or stream.closed else stream.fileno()

    def deadline(self) -> float | None:
        """
        Return the monotonic time at which `restart_if_dead` is due even if nothing is readable, or
        None.
        """
        if self._restart_at is not None:
            return self._restart_at
        if self._answer_deadline is not None:
            return self._answer_deadline
        return self._pings.next_ping if self._can_ping() else None

    def is_restarting(self) -> bool:
        """Return whether it has died, or was killed, and its successor does not listen yet."""
        has_none = self._restart_at is not None or self._answer_deadline is not None
        return has_none or self._is_frozen

    def kill_if_silent(self) -> None:
        """Kill it early if it does not answer and has a journal: a stop waits for it."""
        if self._can_ping() and self._pings.is_frozen(is_hurried=True):
            self._kill_frozen()

    def _can_ping(self) -> bool:
        """Return whether there is a process to ping: it runs, and a successor could resume."""
        is_up = self.fileno() >= 0 and self._restart_at is None and self._answer_deadline is None
        return is_up and not self._is_frozen and self._journal is not None

    def _send_ping(self, now: float) -> None:
        if self._pings.is_frozen():
            self._kill_frozen()
            return
        self._pings.on_ping(now)
        assert self._process.stdin is not None
        write_order(self._process.stdin.fileno(), PING_LINE)

    def _kill_frozen(self) -> None:
        self._is_frozen = True
        self._process.kill()  # `fileno` reports its end

    def restart_if_dead(self) -> str:
        """
        Handle a death, a standstill, or the answer of a successor. Never blocks. Return a line for
        the user, or "".

        A successor that cannot be started, because no process or descriptor is left, counts like
        one that died.

        Raises:
            RendezvousError: the scheduler has ended, and there will be no successor; gives the
                reason.
        """
        now = time.monotonic()
        if self._restart_at is not None:
            return self._start_successor(now) if now >= self._restart_at else ""
        if self.fileno() >= 0 and wait_readable(self.fileno(), wait=0):
            data = os.read(self.fileno(), 65536)
            self._line += data
            if not data:
                return self._on_exit(now)
            answer = self._read_answer()
            if self._answer_deadline is not None and answer is not None:
                return self._on_answer(answer, now)
        if self._answer_deadline is not None and now >= self._answer_deadline:
            self._process.kill()  # `fileno` reports its end
            self._answer_deadline = None
        if self._can_ping() and now >= self._pings.next_ping:
            self._send_ping(now)
        return ""

    def keep_verdict(self, verdict: Verdict) -> None:
        """Keep the verdict, for nodes that do not know it if the process dies before they do."""
        self._verdict = verdict

    def close(self, timeout: float = FAREWELL_SECONDS + 2.0) -> None:
        """
        Close. After the verdict the process ends when every node has left; before, this ends the
        job. If it dies after the verdict, the nodes that reconnect get it here.

        The process is killed after ``timeout`` seconds.
        """
        self._restart_at = None
        self._answer_deadline = None
        if hasattr(self, "_process"):
            deadline = time.monotonic() + timeout
            status = self._reap_process(timeout)
            has_died = status != 0 and time.monotonic() < deadline
            if has_died and self._verdict is not None and self._listener >= 0:
                self._tell_others(self._verdict)
        self._close_listener()
        if self._farewell is not None:
            self._farewell.close(timeout)
            self._farewell = None

    # One process
    # -----------

    def _start_process(self) -> None:
        self._line = b""
        self._pings.reset()
        self._is_frozen = False
        self._answer_deadline = time.monotonic() + self._timeout
        self._process = subprocess.Popen(
            self.COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self._listener,),
            start_new_session=True,
            bufsize=0,
        )
        order = json.dumps({**self._order, "listen_fd": self._listener}).encode() + b"\n"
        assert self._process.stdin is not None
        try:
            # A larger pipe, so that the write never blocks: an agent with running workers must not
            # wait for the start of a process.
            fcntl.fcntl(self._process.stdin, fcntl.F_SETPIPE_SZ, max(65536, len(order)))
        except OSError:
            pass
        write_order(self._process.stdin.fileno(), order)

    def _start_second(self, timeout: float) -> Endpoint:
        """
        Start another process after one that ended before its first message (killed for lack of
        memory, say).
        """
        self._reap_process(REAP_SECONDS)
        self._start_process()
        if (endpoint := self._await_endpoint(timeout)) is None:
            status = self._reap_process(REAP_SECONDS)
            raise RendezvousError(
                f"the scheduler process ended immediately, twice ({_describe_status(status)})"
            )
        return endpoint

    def _await_endpoint(self, timeout: float) -> Endpoint | None:
        """Return its address; None: it has ended without a message."""
        deadline = time.monotonic() + timeout
        while (answer := self._read_answer()) is None:
            left = deadline - time.monotonic()
            if left <= 0 or not wait_readable(self.fileno(), wait=left):
                raise RendezvousError(f"the scheduler process did not start within {timeout:g} s")
            more = os.read(self.fileno(), 65536)
            if not more:
                return None
            self._line += more
        return self._take_endpoint(answer)

    def _read_answer(self) -> dict[str, Any] | None:
        """
        Return the process's answer, if it is among the lines so far; note a lost journal.

        Other lines are skipped: a ``sitecustomize`` may print before the process does.
        """
        found = None
        *lines, self._line = self._line.split(b"\n")
        for answer in map(_parse_answer, lines):
            if "journal" in answer:
                self._journal = None  # the file, if it is still there, is out of date
            elif "alive" in answer:
                self._pings.on_answer()
            elif answer:
                found = answer
        return found

    def _take_endpoint(self, answer: dict[str, Any]) -> Endpoint:
        """Return the address in the process's answer, or raise its error."""
        self._answer_deadline = None
        if "endpoint" not in answer:
            kind = ConfigError if answer.get("code") == ConfigError.exit_code else RendezvousError
            raise kind(str(answer.get("error")), where="scheduler")
        return parse_endpoint(answer["endpoint"], where="scheduler")

    def _reap_process(self, timeout: float) -> int:
        process = self._process
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        return int(process.returncode)

    # From one process to the next
    # ----------------------------

    def _start_successor(self, now: float) -> str:
        """
        Start a successor. A machine without a free process or descriptor may have one a moment
        later.
        """
        self._restart_at = None
        try:
            self._start_process()
        except OSError as error:
            return self._schedule_restart(
                now, f"the scheduler process cannot be started again ({error.strerror})"
            )
        self.on_start(self.pid)
        return ""

    def _on_answer(self, answer: dict[str, Any], now: float) -> str:
        try:
            self._take_endpoint(answer)
        except (ConfigError, RendezvousError) as error:
            self._give_up(
                f"the scheduler process on this node has died and cannot be resumed: {error.what}"
            )
        return f"the scheduler process is back after {now - self._died_at:.1f} s"

    def _on_exit(self, now: float) -> str:
        status = self._reap_process(REAP_SECONDS)
        died = f"the scheduler process on this node has died ({_describe_status(status)})"
        if self._is_frozen:
            died = (
                f"the scheduler process on this node did not answer for"
                f" {self._pings.silence:g} s (was it stopped?) and was killed"
            )
        if status == 0:
            self._close_listener()  # the job is over, and each node had the time to hear it
            raise RendezvousError("the scheduler process on this node has ended")
        if self._journal is None:
            self._give_up(died)
        journal = self._journal
        there = BackgroundCall(lambda: journal.exists() and journal.stat().st_size > 0)
        if not there.wait(DISK_SECONDS):
            self._give_up(f"{died}, and the disk of its journal {self._journal} does not answer")
        if not there.result():
            self._give_up(f"{died}, and its journal {self._journal} is missing or empty")
        return self._schedule_restart(now, died)

    def _schedule_restart(self, now: float, why: str) -> str:
        """
        Schedule the start of a successor, unless there were too many; return a line for the user.
        """
        self._death_times = [at for at in self._death_times if now - at < RESTART_WINDOW_SECONDS]
        if len(self._death_times) >= MAX_RESTARTS:
            self._give_up(f"{why}, after {MAX_RESTARTS} restarts in {RESTART_WINDOW_SECONDS:g} s")
        if self._answer_deadline is None or not self._death_times:
            self._died_at = now
        delay = BACKOFF_SECONDS[min(len(self._death_times), len(BACKOFF_SECONDS) - 1)]
        self._answer_deadline = None
        self._restart_at = now + delay
        self._death_times.append(now)
        return f"{why}: restarting it; the workers continue"

    def _give_up(self, why: str) -> NoReturn:
        self._reap_process(REAP_SECONDS)
        host = f"on {self._config.host}" if self._config.host else "on the first node"
        self._tell_others(Verdict(69, why.replace("on this node", host)))
        raise RendezvousError(why)

    def _tell_others(self, verdict: Verdict) -> None:
        """Tell the other agents. If that is impossible, the port refuses them, and they leave."""
        try:
            from pdrun.rendezvous.scheduler.farewell import Farewell
        except (OSError, ImportError, MemoryError):  # its file cannot be opened, either
            self._close_listener()
            return
        listener = self._listener
        self._listener = -1
        events = self._order["events"]
        try:
            self._farewell = Farewell(
                self._config,
                self._secret,
                listener,
                verdict,
                Path(events) if events else None,
                is_insecure=self._order["insecure"],
            )
        except Exception:  # no descriptor, thread or memory is left; the port is closed
            self._farewell = None

    def _close_listener(self) -> None:
        if self._listener >= 0:
            os.close(self._listener)
            self._listener = -1


def write_order(pipe: int, order: bytes) -> None:
    """Write a new process its order. If it is dead already, its supervisor notices that."""
    try:
        while order:
            order = order[os.write(pipe, order) :]
    except BrokenPipeError:
        pass


def _parse_answer(line: bytes) -> dict[str, Any]:
    """Return the content of a line of the process; empty for any other line."""
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    if isinstance(answer, dict) and answer.keys() & {"endpoint", "error", "journal", "alive"}:
        return answer
    return {}


def _describe_status(status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
