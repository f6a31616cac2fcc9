"""Servers in threads of the test's process, and clients of them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pdrun.parallel.servers.client import ServerClient
from pdrun.parallel.servers.links.remote import RemoteLink, WorkerIdentity
from pdrun.parallel.servers.service import ParameterService
from pdrun.parallel.servers.settings import parse_mode

KEY = bytes(range(32))


class ServerThreads:
    """N servers on unix sockets or TCP."""

    def __init__(self, folder: Path, servers: int = 1, workers: int = 1, tcp: bool = False) -> None:
        self.lines: list[str] = []
        self._folder, self._servers, self._workers, self._tcp = folder, servers, workers, tcp
        self.services = [self._make_service(server) for server in range(servers)]
        self.addresses = [self._listen(server) for server in range(servers)]
        self._threads = [self._serve(server) for server in range(servers)]

    def _make_service(self, server: int) -> ParameterService:
        return ParameterService(
            KEY,
            server=server,
            servers=self._servers,
            workers=self._workers,
            generation=7,
            print_line=self.lines.append,
            note=self._folder / f"note-{server}",
        )

    def _listen(self, server: int) -> str:
        service = self.services[server]
        if not self._tcp:
            return service.listen_unix(str(self._folder / f"s{self._servers}-{server}"))
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        service.listen_tcp(listener)
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def _serve(self, server: int) -> threading.Thread:
        thread = threading.Thread(target=self.services[server].serve_forever)
        thread.start()
        return thread

    def lose_server(self, server: int) -> None:
        """End a server as a kill does: its connections end, and its tables are gone."""
        self.services[server].close()
        self._threads[server].join(10)

    def start_again(self, server: int, seconds: float = 0.0) -> None:
        """Start a lost server again; so many seconds have passed since its last tables."""
        service = self.services[server] = self._make_service(server)
        service.continue_alone(time.time() + seconds)
        self.addresses[server] = self._listen(server)
        self._threads[server] = self._serve(server)

    def connect(
        self,
        mode: str = "sync",
        worker: int = 0,
        seconds: float = 20.0,
        patience: float = 0.0,
        key: bytes = KEY,
        generation: int = 7,
    ) -> ServerClient:
        identity = WorkerIdentity(worker, parse_mode(mode), generation, seconds, patience)
        links = [
            RemoteLink(server, key, identity, lambda server=server: [self.addresses[server]])
            for server in range(len(self.services))
        ]
        return ServerClient(links, worker, is_local=False)

    def close(self) -> None:
        for service in self.services:
            if not service._is_closed:
                service.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()


@contextmanager
def serving(
    folder: Path, servers: int = 1, workers: int = 1, tcp: bool = False
) -> Iterator[ServerThreads]:
    """Yield running servers; they end with the context."""
    with ExitStack() as stack:
        made = ServerThreads(folder, servers, workers, tcp)
        stack.callback(made.close)
        yield made
