"""
torch's TCPStore on the node of rank 0: its port is bound before it is announced, its process starts
on demand.

Each generation has a new socket and a new store, so no key of an earlier generation is ever read.
If the program mentions torch, the process starts immediately. Otherwise it starts when the first
client connects, so a job without torch pays for a socket only. An early client waits in the
backlog of the socket.
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
from pdrun.errors import ConfigError
from pdrun.launcher.agent.interfaces import SupervisorHandle
from pdrun.launcher.plan.model import StoreListener
from pdrun.launcher.supervisor.events import (
    STORE_SLOT,
    Exited,
    SpawnFailed,
    SupervisorEvent,
    WorkerCommand,
)
from pdrun.rendezvous.transport.listen import bind_listener

BACKLOG = 4096
MAX_STDERR_BYTES = 4096
_MAIN_FILE = Path(pdrun.rendezvous.__file__).with_name("tcpstore_main.py")


class StoreSocket:
    """
    The store of one generation on this node.

    Args:
        listen: its address.
        listener: its socket; None: a new one on any port.

    Raises:
        ConfigError: cannot listen on the address.
    """

    _count = 0

    def __init__(self, listen: str, listener: socket.socket | None = None) -> None:
        # one slot per store: that of the last generation may not be reaped when the next one starts
        self._slot = STORE_SLOT - StoreSocket._count
        StoreSocket._count += 1
        bound = listener or bind_listener(Endpoint(listen, 0), backlog=BACKLOG)
        self._listener: socket.socket | None = bound
        self.address = str(Endpoint(listen, int(bound.getsockname()[1])))
        self.is_started = False
        self._stderr_fd = -1

    def fileno(self) -> int:
        """Return a descriptor that is readable when a client waits for the process; -1: none."""
        if self._listener and not self.is_started:
            return self._listener.fileno()
        return -1

    def start_process(
        self,
        supervisor: SupervisorHandle,
        python: str,
        env: Mapping[str, str],
        cwd: str,
        *,
        fork: bool = False,
    ) -> None:
        """
        Start the store process, once, and give it the socket.

        Args:
            supervisor: starts it.
            python: its interpreter.
            env: its environment.
            cwd: its working folder.
            fork: fork it from the fork server, if there is one.
        """
        if self.is_started or self._listener is None:
            return
        self.is_started = True
        argv = (python, str(_MAIN_FILE))
        with tempfile.TemporaryFile() as stderr, open(os.devnull, "r+b", buffering=0) as null:
            self._stderr_fd = os.dup(stderr.fileno())
            supervisor.spawn(
                WorkerCommand(
                    self._slot,
                    argv,
                    {**env, "OMP_NUM_THREADS": "1"},
                    cwd,
                    start="auto" if fork else "exec",
                ),
                null.fileno(),
                null.fileno(),
                stderr.fileno(),
                (self._listener.fileno(),),
            )
        self._listener.close()
        self._listener = None

    def describe_exit(self, event: SupervisorEvent) -> str:
        """Return how the store process ended unexpectedly; empty for any other event."""
        if not isinstance(event, (Exited, SpawnFailed)) or event.slot != self._slot:
            return ""
        if isinstance(event, SpawnFailed):
            return event.message
        code = os.waitstatus_to_exitcode(event.status)
        how = f"exit code {code}"
        if code < 0:
            how = f"signal {-code}"
        size = os.fstat(self._stderr_fd).st_size
        data = os.pread(self._stderr_fd, MAX_STDERR_BYTES, max(0, size - MAX_STDERR_BYTES))
        text = data.decode("utf-8", "replace").strip()
        return f"{how}: {text.splitlines()[-1]}" if text else how

    def kill_process(self, supervisor: SupervisorHandle) -> None:
        """Kill the process, if it was started."""
        if self.is_started:
            supervisor.send_signal(self._slot, signal.SIGKILL, group=False)

    def close(self) -> None:
        """Close the socket."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._stderr_fd >= 0:
            os.close(self._stderr_fd)
            self._stderr_fd = -1


class StorePair:
    """The stores of this generation and of the next one."""

    def __init__(self) -> None:
        self._current: StoreSocket | None = None
        self._next: StoreSocket | None = None
        self.fault = ""
        """Why the store does not listen at the port that the script contains, or empty."""
        self._fixed: socket.socket | None = None
        """The socket of a fixed port. All generations' stores listen on it, one after another."""
        self.is_wanted = False
        """Whether this node must serve the store of this generation, and has not started it."""

    def bind_current(self, listen: str, chosen: StoreListener | None = None) -> str:
        """
        Bind the socket of the first generation; return its ``HOST:PORT``.

        Raises:
            ConfigError: the user has chosen an address (``chosen``) that cannot be bound.
        """
        self._current = self._current or self._make_socket(listen, chosen)
        return self._current.address

    def bind_next(self, listen: str, chosen: StoreListener | None = None) -> str:
        """Bind the socket of the generation after this one; return its ``HOST:PORT``."""
        self._next = self._next or self._make_socket(listen, chosen)
        return self._next.address

    def _make_socket(self, listen: str, chosen: StoreListener | None) -> StoreSocket:
        if chosen is None:
            return StoreSocket(listen)
        if self._fixed is None:
            try:
                self._fixed = bind_chosen_listener(chosen)
            except ConfigError as error:
                if chosen.is_required:
                    raise
                self.fault = str(error)
                return StoreSocket(listen)
        return StoreSocket(chosen.endpoint.host, self._fixed.dup())

    def fileno(self) -> int:
        """Return a descriptor that is readable when a client waits for the process; -1: none."""
        if self._current is None or not self.is_wanted:
            return -1
        return self._current.fileno()

    def start_process(
        self,
        supervisor: SupervisorHandle,
        python: str,
        env: Mapping[str, str],
        cwd: str,
        *,
        fork: bool = False,
    ) -> None:
        """Start the process of this generation's store, once; see `StoreSocket.start_process`."""
        if self._current is not None and self.is_wanted:
            self.is_wanted = False
            self._current.start_process(supervisor, python, env, cwd, fork=fork)

    def describe_exit(self, event: SupervisorEvent) -> str:
        """Return how this generation's store ended unexpectedly; empty for any other event."""
        if self._current is None:
            return ""
        return self._current.describe_exit(event)

    def advance(self, supervisor: SupervisorHandle | None) -> None:
        """End the store of this generation; the socket announced for the next one replaces it."""
        if self._current is not None:
            if supervisor is not None:
                self._current.kill_process(supervisor)
            self._current.close()
        self._current = self._next
        self._next = None
        self.is_wanted = False

    def reset(self, supervisor: SupervisorHandle | None) -> None:
        """Drop both stores: this node rejoins as a new one, with new sockets."""
        self.advance(supervisor)
        self.advance(supervisor)

    def close(self) -> None:
        """Close both sockets."""
        for store in (self._current, self._next):
            if store is not None:
                store.close()
        if self._fixed is not None:
            self._fixed.close()
            self._fixed = None


def bind_chosen_listener(chosen: StoreListener) -> socket.socket:
    """
    Return the listening socket at the user's choice of address and port.

    Raises:
        ConfigError: the port is in use, or the address is not one of this machine.
    """
    try:
        return bind_listener(chosen.endpoint, backlog=BACKLOG)
    except ConfigError as error:
        hint = error.hint
        if "--scheduler" in hint:
            hint = "end that process, choose another port, or set none"
        raise ConfigError(
            f"torch's store cannot listen on {chosen.endpoint}: {error.what}",
            where=chosen.source,
            hint=hint,
        ) from None
