"""
One process of a dynamic cluster: joins as a node with one worker and reports its exit code.

Limits: the exit code is known if the process ends by `sys.exit`, by an uncaught exception or at the
end of the program. ``raise SystemExit(n)`` and ``os._exit`` bypass Python's hooks. A killed process
is noticed by the end of its connection.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from pdrun import async_writer
from pdrun.endpoint import Endpoint, parse_endpoint
from pdrun.errors import AuthenticationError, ConfigError, PdrunError, PeerLost, RendezvousError
from pdrun.rendezvous.clients.program_start import ProgramStart
from pdrun.rendezvous.protocol.messages import (
    Assign,
    Cause,
    CauseKind,
    Finished,
    Join,
    Leave,
    Message,
    Ready,
    Refuse,
    Start,
    StopWorkers,
    Verdict,
    Waiting,
    Welcome,
    WorkerExit,
)
from pdrun.rendezvous.protocol.security import Secret, derive_server_key
from pdrun.rendezvous.scheduler.local_link import ZmqLink
from pdrun.rendezvous.transport.listen import bind_listener
from pdrun.rendezvous.transport.zmq_util import wait_readable

LEAVE_SECONDS = 10.0
"""Maximum time that the process waits at its end for the scheduler to read its last messages."""
RETRY_SECONDS = 1.0
"""Time between two requests to join while an earlier process of the name may have ended."""
LINGER_SECONDS = 1.0
"""Time for the very last message, which the scheduler can do without."""


def join_scheduler(
    scheduler: Endpoint,
    secret: Secret,
    *,
    job: str,
    name: str = "",
    rank: int | None = None,
    timeout: float = 600.0,
    show_line: Callable[[str], None] | None = None,
    recovers: bool = False,
) -> DynamicMember:
    """
    Join the job at ``scheduler`` and wait until all nodes have joined.

    Args:
        name: of this worker, unique in the job; empty: made from host name and process id.
        rank: the requested rank.
        timeout: seconds to reach the scheduler, which has another limit for the joins.
        recovers: start this process again in place if the job starts its workers again.

    Raises:
        RendezvousError, AuthenticationError, ConfigError: with the scheduler's reason, if it gave
            one.
    """
    show_line = show_line or async_writer.write_message
    host = socket.gethostname()
    store = bind_listener(Endpoint(find_local_address(scheduler), 0))
    link = ZmqLink(
        scheduler, secret, job=job, host=host, start_timeout=timeout, on_status=show_line
    )
    address = Endpoint(*store.getsockname()[:2])
    # A number of fixed width: workers of one host are ordered by their process ids.
    wish = Join(
        name or f"{host}-{os.getpid():08d}",
        rank,
        1,
        {"host": f"{host}:{read_boot_id()}", **collect_facts()},
        str(address),
    )
    try:
        welcome, assign = wait_for_start(link, wish, show_line)
    except BaseException:
        link.close(0.5)
        store.close()
        raise
    if assign.first_rank != 0:
        store.close()
    return DynamicMember(
        rank=assign.first_rank,
        world_size=assign.world_size,
        local_rank=assign.local_rank,
        local_world_size=assign.local_world_size,
        master=parse_endpoint(assign.master, where="master"),
        job=welcome.job,
        run=welcome.run,
        generation=assign.generation,
        name=wish.node,
        host=host,
        address=address.host,
        servers=assign.nodes - assign.world_size,
        server_key=derive_server_key(secret, welcome.run),
        store_socket=store if assign.first_rank == 0 else None,
        _link=link,
        _show_line=show_line,
        _program=ProgramStart() if recovers else None,
    )


@dataclass
class DynamicMember:
    """This process's place in a dynamic cluster, and its connection."""

    rank: int
    world_size: int
    local_rank: int
    """Among the workers on this host, in the order of their ranks."""
    local_world_size: int
    master: Endpoint
    """Address of rank 0's store. Its socket is listening already."""
    job: str
    run: str
    generation: int
    name: str
    host: str
    address: str
    """Address of this process on the route to the scheduler."""
    servers: int
    """Number of parameter servers."""
    server_key: bytes
    """Key of their data channel."""
    store_socket: socket.socket | None
    """On rank 0: the listening socket of `master`, for the store. The caller owns it."""
    _link: ZmqLink
    _show_line: Callable[[str], None]
    _program: ProgramStart | None = None
    """Starts this process again; None: a restart ends it."""
    _outcome: Cause | None = None
    _is_finished: bool = False
    _outgoing: queue.SimpleQueue[Message | None] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self._pid = os.getpid()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run_thread, name="pdrun-member", daemon=True)
        self._thread.start()
        self._install_exit_hooks()

    def finish(self, code: int = 0) -> None:
        """
        Report the end of this worker and leave. Returns when the scheduler has read the report, or
        after a limit. Only the first call counts.

        Called automatically when the interpreter exits.
        """
        if self._is_finished or os.getpid() != self._pid:
            return
        self._is_finished = True
        cause = self._outcome or Cause(
            "exit" if code else "ok", code, summary=f"exit code {code}" if code else ""
        )
        for message in (
            WorkerExit(self.generation, self.rank, cause),
            Finished(self.generation),
            None,
        ):
            self._outgoing.put(message)
        self._wake_thread()
        patience = LEAVE_SECONDS + 2 * LINGER_SECONDS
        # with recovery until the job is over, or starts again
        self._thread.join(patience if self._program is None else None)

    # At the end of the process
    # -------------------------

    def _install_exit_hooks(self) -> None:
        hook = sys.excepthook
        leave = sys.exit

        def on_exception(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> Any:
            if os.getpid() == self._pid and self._outcome is None:
                self._outcome = _cause_of_exception(kind, error, trace)
            return hook(kind, error, trace)

        def on_exit(status: Any = None, /) -> Any:
            if os.getpid() == self._pid and threading.current_thread() is threading.main_thread():
                code = status & 0xFF if isinstance(status, int) else int(status is not None)
                self._outcome = Cause("exit", code, summary=f"exit code {code}") if code else None
            return leave(status)

        sys.excepthook = on_exception
        sys.exit = on_exit  # the only place where the code of sys.exit can be seen
        atexit.register(self.finish)

    # The thread
    # ----------

    def _wake_thread(self) -> None:
        try:
            os.write(self._wake_write, b"x")
        except OSError:
            pass

    def _run_thread(self) -> None:
        """Keep the connection until the end of the process or of the job."""
        try:
            while self._run_once():
                pass
        except PdrunError as error:
            if not self._is_finished:
                self._end_process(f"job stopped: {error}", signal.SIGTERM, 5.0)
        finally:
            self._link.close(LINGER_SECONDS)

    def _run_once(self) -> bool:
        due = self._link.deadline()
        wait = 0.5 if due is None else max(0.0, due - time.monotonic())
        ready = wait_readable(self._link.fileno(), self._wake_read, wait=wait)
        if self._wake_read in ready:
            os.read(self._wake_read, 64)
        while not self._outgoing.empty():
            message = self._outgoing.get()
            if message is None:
                self._end_or_start_again()
                return False
            self._link.send(message)
        for message in self._link.poll():
            if isinstance(message, StopWorkers) and not self._is_finished:
                self._end_process(f"job stopped: {message.reason}", message.signal, message.grace)
                return False
            if isinstance(message, Verdict | Refuse) and message.code and not self._is_finished:
                self._end_process(f"job stopped: {message.reason}", signal.SIGTERM, 5.0)
                return False
        return True

    # Starting again
    # --------------

    def _end_or_start_again(self) -> None:
        """After the last message of a worker: leave, or start again if the others do."""
        if self._program is not None and self._is_awaited():
            self._start_again()
        self._leave_job()

    def _is_awaited(self) -> bool:
        """Wait until the job is over or its workers start again; return whether they do."""
        while True:
            due = self._link.deadline()
            wait = 0.5 if due is None else max(0.0, due - time.monotonic())
            wait_readable(self._link.fileno(), wait=wait)
            for message in self._link.poll():
                if isinstance(message, Verdict | Refuse):
                    return False
                if isinstance(message, Waiting | Assign):
                    return True

    def _report_and_start_again(self) -> None:
        """Report the end of a main thread that does not end, and start again if the others do."""
        self._is_finished = True
        outcome = self._outcome or Cause("stopped", 137, signal.SIGKILL)
        self._link.send(WorkerExit(self.generation, self.rank, outcome))
        self._link.send(Finished(self.generation))
        self._end_or_start_again()

    def _start_again(self) -> None:
        """Leave, and replace this process by a new run of its program; does not return."""
        assert self._program is not None
        with contextlib.suppress(PdrunError):
            self._leave_job(LINGER_SECONDS)
        self._link.close(LINGER_SECONDS)
        async_writer.flush_messages(LINGER_SECONDS)
        self._program.start_again()

    def _leave_job(self, patience: float = LEAVE_SECONDS) -> None:
        """
        Leave after the scheduler has read all messages: a node that is cut off before counts as
        lost.
        """
        deadline = time.monotonic() + patience
        self._link.request_confirmation()
        while not self._link.is_confirmed and time.monotonic() < deadline:
            due = min(self._link.deadline() or deadline, deadline)
            wait_readable(self._link.fileno(), wait=due - time.monotonic())
            if any(isinstance(message, Verdict | Refuse) for message in self._link.poll()):
                break
        self._link.send(Leave())

    def _end_process(self, why: str, number: int, grace: float) -> None:
        """
        End this process: by the signal, and by SIGKILL after ``grace`` seconds.

        If the signal is certain to end the process, the scheduler gets the report first. Otherwise
        `finish` sends it after the program's signal handler.
        """
        self._show_line(f"{why} (rank {self.rank} ends by signal {number})")
        stopped = Cause(
            "stopped", 128 + number, number, summary="ended because the job was stopped"
        )
        certain = signal.getsignal(number) is signal.SIG_DFL if number != signal.SIGKILL else True
        if certain:
            self._is_finished = True
            for message in (
                WorkerExit(self.generation, self.rank, stopped),
                Finished(self.generation),
            ):
                self._link.send(message)
            with contextlib.suppress(PdrunError):
                self._leave_job(min(grace, LINGER_SECONDS))
            self._link.close(0.5)
            async_writer.flush_messages(min(grace, LINGER_SECONDS))
            os.kill(self._pid, number)
        else:
            self._outcome = self._outcome or stopped
            os.kill(self._pid, number)
        self._wait_for_exit(time.monotonic() + grace)

    def _wait_for_exit(self, deadline: float) -> None:
        """Wait for the end of the process and send its last messages. Kill it at the deadline."""
        while time.monotonic() < deadline:
            try:
                message = self._outgoing.get(
                    timeout=min(0.5, max(0.01, deadline - time.monotonic()))
                )
            except queue.Empty:
                if not self._is_finished:
                    with contextlib.suppress(
                        PdrunError
                    ):  # a scheduler that is lost does not lift the deadline
                        self._link.poll()
                continue
            if message is None:
                with contextlib.suppress(PdrunError):
                    self._end_or_start_again()
                return
            self._link.send(message)
        if self._program is not None and not self._is_finished:
            with contextlib.suppress(PdrunError):
                self._report_and_start_again()
        os.kill(self._pid, signal.SIGKILL)


def wait_for_start(
    link: ZmqLink, request: Join, show_line: Callable[[str], None]
) -> tuple[Welcome, Assign]:
    """
    Exchange the messages from Hello to Start.

    Ask again while an earlier process of this name or rank may have ended; the scheduler decides.
    """
    welcome: Welcome | None = None
    assign: Assign | None = None
    is_waiting = False
    while True:
        due = link.deadline()
        wait_readable(link.fileno(), wait=0.5 if due is None else due - time.monotonic())
        for message in link.poll():
            match message:
                case Welcome():
                    welcome = message
                    link.send(request)
                case Waiting(present, missing, expected):
                    names = ", ".join(missing)
                    show_line(f"{len(present)} of {expected} workers are here, missing: {names}")
                case Assign(generation=generation):
                    assign = message
                    link.send(Ready(generation))
                case Start() if welcome and assign:
                    return welcome, assign
                case Refuse(retry=True):
                    if not is_waiting:
                        show_line(
                            f"an earlier process has the name or rank of {request.node}: waiting"
                            " until it has ended or is found lost; then this one joins"
                        )
                    is_waiting = True
                    time.sleep(RETRY_SECONDS)
                    link.renew()
                    welcome = assign = None
                case Refuse(code, reason) | Verdict(code, reason):
                    raise _refusal_error(code, reason, str(link.endpoint))
                case _:
                    pass


def _refusal_error(code: int, reason: str, where: str) -> PdrunError:
    kinds = {kind.exit_code: kind for kind in (ConfigError, AuthenticationError)}
    error = kinds.get(code, RendezvousError)(reason, where=where)
    error.exit_code = code or RendezvousError.exit_code
    return error


def find_local_address(scheduler: Endpoint) -> str:
    """
    Return this machine's address on the route to the scheduler. Asks the kernel and sends nothing.
    """
    try:
        found = socket.getaddrinfo(scheduler.host, scheduler.port, type=socket.SOCK_DGRAM)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{scheduler.host} cannot be reached from here: {reason}", where=str(scheduler)
        ) from None


def read_boot_id() -> str:
    """Return the boot id, which differs between two machines with one host name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def collect_facts() -> dict[str, str]:
    """Return the versions that the processes of a job should have in common."""
    import importlib.metadata
    import platform

    return {"pdrun": importlib.metadata.version("pdrun"), "python": platform.python_version()}


def _cause_of_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> Cause:
    text = "".join(traceback.format_exception(kind, error, trace))
    lines = "".join(traceback.format_exception_only(kind, error)).splitlines()
    # Not the last line: a message may have several lines, and notes. The place of a SyntaxError is
    # indented above it.
    summary = next((line for line in lines if line[:1] not in ("", " ")), kind.__name__)
    how: CauseKind = "exception"
    if isinstance(error, KeyboardInterrupt):
        return Cause(
            "signal", 130, signal.SIGINT, time.monotonic(), "interrupted (SIGINT)", text[-65536:]
        )
    signs = ("Connection closed by peer", "Connection reset")
    if isinstance(error, ConnectionError | PeerLost) or any(sign in text for sign in signs):
        how = "communication"
    code = error.exit_code if isinstance(error, PdrunError) else 1  # as `pdrun.init` ends a process
    return Cause(how, code, 0, time.monotonic(), summary[:500], text[-65536:])
