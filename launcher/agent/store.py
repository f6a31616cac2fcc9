"""
torch's store, held by the node of rank 0: its port is bound before anybody is told, its process
comes when needed.

Each generation has a socket and a store of its own, so that no key of an earlier one is ever read.
A program that mentions torch gets the process at once; any other one when the first client
connects, so a job without torch pays for a socket and nothing else. A client that is early waits in
the socket's backlog.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pdrun.rendezvous
from pdrun.endpoint import Endpoint
from pdrun.launcher.agent.interfaces import SupervisorHandle
from pdrun.launcher.supervisor.events import (
    STORE_SLOT,
    Exited,
    SupervisorEvent,
    SpawnFailed,
    WorkerCommand,
)
from pdrun.rendezvous.transport.listen import bind_listener

BACKLOG = 4096
_MAIN_FILE = Path(pdrun.rendezvous.__file__).with_name("tcpstore_main.py")


class StoreSocket:
    """
    One generation's store on this node.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    _count = 0

    def __init__(self, listen: str) -> None:
        # each has a slot of its own: the store of the last generation may not be reaped when the
        # next one starts
        self._slot = STORE_SLOT - StoreSocket._count
        StoreSocket._count += 1
        self._listener: socket.socket | None = bind_listener(Endpoint(listen, 0), backlog=BACKLOG)
        self.address = str(Endpoint(listen, int(self._listener.getsockname()[1])))
        self.is_started = False
        self._stderr_fd = -1

    def fileno(self) -> int:
        """
        Readable when the first client has come and there is no process yet; -1 when that need not
        be watched.
        """
        if self._listener and not self.is_started:
            return self._listener.fileno()
        return -1

    def start_process(
        self,
        keeper: SupervisorHandle,
        python: str,
        env: Mapping[str, str],
        cwd: str,
        *,
        fork: bool = False,
    ) -> None:
        """
        Hand the socket to a store process; once. ``fork``: from the starter, where there is one.
        """
        if self.is_started or self._listener is None:
            return
        self.is_started = True
        argv = (python, str(_MAIN_FILE))
        with tempfile.TemporaryFile() as complaints, open(os.devnull, "r+b", buffering=0) as null:
            self._stderr_fd = os.dup(complaints.fileno())
            keeper.spawn(
                WorkerCommand(
                    self._slot,
                    argv,
                    {**env, "OMP_NUM_THREADS": "1"},
                    cwd,
                    start="auto" if fork else "exec",
                ),
                null.fileno(),
                null.fileno(),
                complaints.fileno(),
                (self._listener.fileno(),),
            )
        self._listener.close()
        self._listener = None

    def describe_exit(self, event: SupervisorEvent) -> str:
        """
        Return why the store process ended, when nobody had asked it to; empty for any other event.
        """
        if not isinstance(event, (Exited, SpawnFailed)) or event.slot != self._slot:
            return ""
        if isinstance(event, SpawnFailed):
            return event.message
        code = os.waitstatus_to_exitcode(event.status)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        size = os.fstat(self._stderr_fd).st_size
        text = (
            os.pread(self._stderr_fd, 4096, max(0, size - 4096)).decode("utf-8", "replace").strip()
        )
        return f"{how}: {text.splitlines()[-1]}" if text else how

    def kill_process(self, keeper: SupervisorHandle) -> None:
        """End the process, if there is one."""
        if self.is_started:
            keeper.send_signal(self._slot, signal.SIGKILL, group=False)

    def close(self) -> None:
        """Let go of the socket."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._stderr_fd >= 0:
            os.close(self._stderr_fd)
            self._stderr_fd = -1


class StorePair:
    """The sockets of this generation and of the next one, as an agent holds them."""

    def __init__(self) -> None:
        self._current: StoreSocket | None = None
        self._next: StoreSocket | None = None
        self.is_wanted = False
        """Whether this node serves the present generation's store, and has not begun to."""

    def bind_current(self, listen: str) -> str:
        """Bind the socket of the first generation; return its ``HOST:PORT``."""
        self._current = self._current or StoreSocket(listen)
        return self._current.address

    def bind_next(self, listen: str) -> str:
        """Bind the socket of the generation after this one; return its ``HOST:PORT``."""
        self._next = self._next or StoreSocket(listen)
        return self._next.address

    def fileno(self) -> int:
        """
        Readable when a client has come to a store that has no process yet; -1 when that need not be
        watched.
        """
        return self._current.fileno() if self._current is not None and self.is_wanted else -1

    def start_process(
        self,
        keeper: SupervisorHandle,
        python: str,
        env: Mapping[str, str],
        cwd: str,
        *,
        fork: bool = False,
    ) -> None:
        """Start the process of the present store; once."""
        if self._current is not None and self.is_wanted:
            self.is_wanted = False
            self._current.start_process(keeper, python, env, cwd, fork=fork)

    def describe_exit(self, event: SupervisorEvent) -> str:
        """
        Return why the present store ended, when that is what the event says and nobody had asked
        for it.
        """
        return self._current.describe_exit(event) if self._current is not None else ""

    def advance(self, keeper: SupervisorHandle | None) -> None:
        """
        A generation is over: its store goes, the socket that was announced for the next one takes
        its place.
        """
        if self._current is not None:
            if keeper is not None:
                self._current.kill_process(keeper)
            self._current.close()
        self._current = self._next
        self._next = None
        self.is_wanted = False

    def reset(self, keeper: SupervisorHandle | None) -> None:
        """This node begins again as a new one: nothing of its old sockets is announced any more."""
        self.advance(keeper)
        self.advance(keeper)

    def close(self) -> None:
        """Let go of both sockets."""
        for store in (self._current, self._next):
            if store is not None:
                store.close()
