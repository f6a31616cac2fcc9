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
from pdrun.launcher.agent.interfaces import Keeper
from pdrun.launcher.supervisor.events import (
    STORE_SLOT,
    Exited,
    KeeperEvent,
    SpawnFailed,
    WorkerCommand,
)
from pdrun.rendezvous.transport.listen import bind_listener

BACKLOG = 4096
_HOST_FILE = Path(pdrun.rendezvous.__file__).with_name("tcpstore_main.py")


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
        self.started = False
        self._complaints = -1

    def fileno(self) -> int:
        """
        Readable when the first client has come and there is no process yet; -1 when that need not
        be watched.
        """
        if self._listener and not self.started:
            return self._listener.fileno()
        return -1

    def start(
        self, keeper: Keeper, python: str, env: Mapping[str, str], cwd: str, *, fork: bool = False
    ) -> None:
        """
        Hand the socket to a store process; once. ``fork``: from the starter, where there is one.
        """
        if self.started or self._listener is None:
            return
        self.started = True
        argv = (python, str(_HOST_FILE))
        with tempfile.TemporaryFile() as complaints, open(os.devnull, "r+b", buffering=0) as null:
            self._complaints = os.dup(complaints.fileno())
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

    def ended(self, event: KeeperEvent) -> str:
        """
        Return why the store process ended, when nobody had asked it to; empty for any other event.
        """
        if not isinstance(event, (Exited, SpawnFailed)) or event.slot != self._slot:
            return ""
        if isinstance(event, SpawnFailed):
            return event.message
        code = os.waitstatus_to_exitcode(event.status)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        size = os.fstat(self._complaints).st_size
        text = (
            os.pread(self._complaints, 4096, max(0, size - 4096)).decode("utf-8", "replace").strip()
        )
        return f"{how}: {text.splitlines()[-1]}" if text else how

    def end(self, keeper: Keeper) -> None:
        """End the process, if there is one."""
        if self.started:
            keeper.signal(self._slot, signal.SIGKILL, group=False)

    def close(self) -> None:
        """Let go of the socket."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._complaints >= 0:
            os.close(self._complaints)
            self._complaints = -1


class Stores:
    """The sockets of this generation and of the next one, as an agent holds them."""

    def __init__(self) -> None:
        self._now: StoreSocket | None = None
        self._next: StoreSocket | None = None
        self.wanted = False
        """Whether this node serves the present generation's store, and has not begun to."""

    def hold(self, listen: str) -> str:
        """Bind the socket of the first generation; return its ``HOST:PORT``."""
        self._now = self._now or StoreSocket(listen)
        return self._now.address

    def hold_next(self, listen: str) -> str:
        """Bind the socket of the generation after this one; return its ``HOST:PORT``."""
        self._next = self._next or StoreSocket(listen)
        return self._next.address

    def fileno(self) -> int:
        """
        Readable when a client has come to a store that has no process yet; -1 when that need not be
        watched.
        """
        return self._now.fileno() if self._now is not None and self.wanted else -1

    def start(
        self, keeper: Keeper, python: str, env: Mapping[str, str], cwd: str, *, fork: bool = False
    ) -> None:
        """Start the process of the present store; once."""
        if self._now is not None and self.wanted:
            self.wanted = False
            self._now.start(keeper, python, env, cwd, fork=fork)

    def complaint(self, event: KeeperEvent) -> str:
        """
        Return why the present store ended, when that is what the event says and nobody had asked
        for it.
        """
        return self._now.ended(event) if self._now is not None else ""

    def turn(self, keeper: Keeper | None) -> None:
        """
        A generation is over: its store goes, the socket that was announced for the next one takes
        its place.
        """
        if self._now is not None:
            if keeper is not None:
                self._now.end(keeper)
            self._now.close()
        self._now = self._next
        self._next = None
        self.wanted = False

    def renew(self, keeper: Keeper | None) -> None:
        """This node begins again as a new one: nothing of its old sockets is announced any more."""
        self.turn(keeper)
        self.turn(keeper)

    def close(self) -> None:
        """Let go of both sockets."""
        for store in (self._now, self._next):
            if store is not None:
                store.close()
