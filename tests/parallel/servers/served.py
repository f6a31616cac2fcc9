"""Servers in threads of the test's process, and clients of them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pdrun.parallel.servers.client import ServerClient
from pdrun.parallel.servers.links import RemoteLink, WorkerIdentity
from pdrun.parallel.servers.service import ParameterService
from pdrun.parallel.servers.settings import parse_mode

KEY = bytes(range(32))


class ServerThreads:
    """N servers on unix sockets or TCP."""

    def __init__(self, folder: Path, servers: int = 1, workers: int = 1, tcp: bool = False) -> None:
        self.lines: list[str] = []
        self.services = []
        self.addresses = []
        self._threads = []
        for server in range(servers):
            service = ParameterService(
                KEY,
                server=server,
                servers=servers,
                workers=workers,
                generation=7,
                print_line=self.lines.append,
            )
            if tcp:
                listener = socket.socket()
                listener.bind(("127.0.0.1", 0))
                service.listen_tcp(listener)
                self.addresses.append(f"127.0.0.1:{listener.getsockname()[1]}")
            else:
                self.addresses.append(service.listen_unix(str(folder / f"s{servers}-{server}")))
            thread = threading.Thread(target=service.serve_forever)
            thread.start()
            self.services.append(service)
            self._threads.append(thread)

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
