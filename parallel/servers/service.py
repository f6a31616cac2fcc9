"""
One server process's sockets, and a thread for each worker's connection (`session.py`).

torch releases the interpreter's lock in its arithmetic, and the system in its copies. So one
connection is read while another one's gradients are used.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdrun.errors import AuthenticationError, ConfigError, UsageError
from pdrun.parallel.servers.channel import Channel, ServerIdentity, accept_channel
from pdrun.parallel.servers.frames import FrameError
from pdrun.parallel.servers.session import WorkerSession
from pdrun.parallel.servers.settings import parse_mode
from pdrun.parallel.servers.tables import snapshot
from pdrun.parallel.servers.tables.recovery import (
    SnapshotNote,
    describe_return,
    read_note,
    restore_store,
)
from pdrun.parallel.servers.tables.store import TableStore

MAX_CONNECTIONS = 4096
MAX_WAIT_SECONDS = 86400.0


class ParameterService:
    """
    Serves the tables of one server to the workers.

    Args:
        key: of the job.
        server, servers, workers: number of this server, of all servers, of all workers.
        generation: requests of another one are refused.
        print_line: prints a line for the user.
        note: file that tells a later process of this server where its tables were written.
    """

    def __init__(
        self,
        key: bytes,
        *,
        server: int = 0,
        servers: int = 1,
        workers: int = 1,
        generation: int = 0,
        print_line: Callable[[str], None] = print,
        note: Path | None = None,
    ) -> None:
        self._note = note
        self._key = key
        self._server = server
        self._servers = servers
        self._workers = workers
        self._generation = generation
        self._print_line = print_line
        self._lock = threading.Lock()
        self.store: TableStore | None = None
        """Made by the first worker, who knows the mode."""
        self._listeners: list[socket.socket] = []
        self._identity = ServerIdentity(with_tls=False)
        self._wake, self._waker = socket.socketpair()
        self._channels: set[Channel] = set()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    # ---- listening ----------------------------------------------------------

    def listen_unix(self, path: str) -> str:
        """Listen on a unix socket, whose folder must be private; return its path."""
        Path(path).unlink(missing_ok=True)  # of a server that was killed
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(128)
        self._listeners.append(listener)
        return path

    def listen_tcp(self, listener: socket.socket) -> None:
        """Listen on a bound TCP socket, with TLS."""
        self._identity = ServerIdentity(with_tls=True)
        listener.listen(128)
        self._listeners.append(listener)

    def serve_forever(self) -> None:
        """Accept connections until `close`."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for listener in self._listeners:
            poll.register(listener, select.POLLIN)
        by_fd = {listener.fileno(): listener for listener in self._listeners}
        while not self._is_closed:
            for fd, _ in poll.poll():
                if fd not in by_fd or self._is_closed:
                    continue
                try:
                    connection, _ = by_fd[fd].accept()
                except OSError:
                    continue
                self._start_thread(connection)

    def _start_thread(self, connection: socket.socket) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) >= MAX_CONNECTIONS:
            connection.close()
            return
        thread = threading.Thread(target=self._run_connection, args=(connection,), daemon=True)
        thread.start()
        self._threads.append(thread)

    def close(self) -> None:
        """End all connections and the loop."""
        self._is_closed = True
        self._waker.send(b"x")
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.shut_down()
        for thread in self._threads:
            thread.join(5.0)
        for listener in self._listeners:
            listener.close()
        self._wake.close()
        self._waker.close()

    # ---- a connection -------------------------------------------------------

    def _run_connection(self, connection: socket.socket) -> None:
        """Serve one connection until it ends; whatever it sends, the server lives on."""
        try:
            channel = accept_channel(connection, self._key, self._identity)
        except (OSError, FrameError, AuthenticationError) as error:
            connection.close()
            if isinstance(error, AuthenticationError):
                self._print_line(str(error))
            return
        with self._lock:
            self._channels.add(channel)
        session = WorkerSession(self, channel)
        try:
            session.serve()
        except FrameError as error:
            if not self._is_closed and session.is_active:
                self._print_line(f"a connection was refused: {error}")
            session.refuse(0, error)
        except OSError:
            pass  # the worker has ended
        finally:
            session.leave()
            with self._lock:
                self._channels.discard(channel)
            channel.close()

    def open_store(self, mode_text: Any, seconds: Any) -> TableStore:
        """
        Return the store; the first worker's mode counts.

        Raises:
            ConfigError: another worker has another mode.
        """
        mode = parse_mode(mode_text, "a worker's mode")
        if not isinstance(seconds, (int, float)) or not 0 < seconds <= MAX_WAIT_SECONDS:
            raise UsageError(f"the limit of a wait is out of range: {seconds!r}")
        with self._lock:
            if self.store is None:
                self.store = TableStore(
                    mode,
                    server=self._server,
                    servers=self._servers,
                    workers=self._workers,
                    seconds=float(seconds),
                    shares=True,
                )
            elif self.store.mode != mode:
                what = f"workers use different modes: {self.store.mode} and {mode}"
                raise ConfigError(what, where="pdrun.Servers")
            return self.store

    def continue_alone(self, lost_at: float) -> None:
        """
        Continue from the tables that an earlier process has noted, if there was one.

        Args:
            lost_at: wall clock at which that process ended.

        Raises:
            ConfigError: its tables cannot be read.
        """
        note = read_note(self._note) if self._note is not None else None
        if note is not None:
            self.store = restore_store(
                note, server=self._server, servers=self._servers, workers=self._workers
            )
            self._print_line(describe_return(self.store, note, lost_at))

    def write_tables(self, store: TableStore, folders: list[Path], step: Any) -> None:
        """
        Write the tables, and the note from which a later process may continue alone.

        Args:
            folders: the folder, and its later name if it will be renamed.
        """
        at = time.time()
        snapshot.write_tables(store, folders[0], step)
        if self._note is not None and store.mode.name != "sync":
            names = tuple(map(str, folders))
            SnapshotNote(names, str(store.mode), store.seconds, at).write(self._note)

    def check_generation(self, generation: int) -> None:
        """
        Refuse a worker of another generation.

        Raises:
            FrameError: it is too late.
        """
        if generation != self._generation:
            raise FrameError(f"generation {generation} is over, this is {self._generation}")
