"""A TCP proxy on loopback that delays everything: a satellite link, or a VPN around the world."""

from __future__ import annotations

import queue
import socket
import threading
import time
from types import TracebackType
from typing import Self

from pdrun.endpoint import Endpoint


class DelayProxy:
    """Forwards connections to ``target``; each byte arrives ``delay`` seconds later, both ways."""

    def __init__(self, target: Endpoint, delay: float) -> None:
        self._target = target
        self._delay = delay
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one in (self._listener, *self._sockets):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                inner, _ = self._listener.accept()
                outer = socket.create_connection((self._target.host, self._target.port), 10)
            except OSError:
                return
            self._sockets += [inner, outer]
            for source, sink in ((inner, outer), (outer, inner)):
                waiting: queue.Queue[tuple[float, bytes]] = queue.Queue()
                for call, one in ((self._read, source), (self._write, sink)):
                    threading.Thread(target=call, args=(one, waiting), daemon=True).start()

    def _read(self, source: socket.socket, waiting: queue.Queue[tuple[float, bytes]]) -> None:
        data = b"x"
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            waiting.put((time.monotonic() + self._delay, data))

    def _write(self, sink: socket.socket, waiting: queue.Queue[tuple[float, bytes]]) -> None:
        try:
            while True:
                due, data = waiting.get()
                time.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    sink.shutdown(socket.SHUT_RDWR)
                    return
                sink.sendall(data)
        except OSError:
            pass
