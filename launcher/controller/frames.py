"""
The conversation of a front with the far end of one connection: frames over the far end's stdin and
stdout.

    GREETING FRAME FRAME ...        FRAME = kind (1 byte), length (4 bytes, most significant first), payload

Text before the greeting is what a login shell's start-up files print; it is passed over. Whatever
else is on the stream is data: lengths, not marks, say where it ends, so that no output can be taken
for a word of pdrun.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pdrun.errors import RendezvousError

GREETING = b"\0pdrun-far-end-1\n"
LONGEST = 16 << 20
"""Bytes of a frame, at most: an order holds the arguments and variables of a job."""
NOISE = 1 << 20
"""Bytes that may stand before the greeting."""

# from the front
CHECK = b"C"
"""{"folder"}: what must be there; answered by HELLO."""
LISTEN = b"L"
"""{"addresses", "interface", "far"}: bind a socket for the scheduler; answered by LISTENING."""
ORDER = b"O"
"""{"agent", "env"}: start the agent."""
SIGNAL = b"S"
"""A number: give it to the agent."""
HOLD = b"P"
"""{"streams"}: those of which nothing more is wanted for now."""
ALIVE = b"."
"""Nothing; sent often enough that silence means that the front is gone."""

# from the far end
HELLO = b"H"
"""{"version", "python", "host", "connection", "error"}."""
LISTENING = b"B"
"""{"host", "port"} or {"error"}."""
OUTPUT = b"o"
ERRORS = b"e"
"""Whole lines of the agent's stdout and stderr."""
MARK = b"m"
"""How far the agent is: UP, RUNNING of `pdrun.launcher.controller.agent_handle`."""
EXIT = b"X"
"""{"code"}: as Popen says it; the last frame."""

ALIVE_EVERY = 10.0
SILENCE = 120.0
"""
Seconds without a frame after which the far end takes the front for gone: a host that lost its power
says nothing.
"""


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    """Return one frame. Raises ValueError for a payload above LONGEST."""
    if len(payload) > LONGEST:
        raise ValueError(f"{len(payload)} bytes do not go into a frame")
    return kind + len(payload).to_bytes(4, "big") + payload


def message(kind: bytes, data: dict[str, Any]) -> bytes:
    """
    Return a frame whose payload is JSON in ASCII; text with lone surrogates (bytes that are no
    UTF-8) survives.
    """
    return frame(kind, json.dumps(data).encode("ascii"))


class Frames:
    """
    Cuts a stream of bytes into frames. ``greeted`` says whether to wait for the greeting first.
    """

    def __init__(self, *, greeted: bool = False) -> None:
        self.greeted = greeted
        self.noise = b""
        """What stood before the greeting."""
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """
        Take bytes as they come; yield (kind, payload) of every frame that is complete.

        Raises:
            RendezvousError: no greeting within NOISE bytes, or a frame above LONGEST.
        """
        self._data += data
        if not self.greeted and not self._greet():
            return
        while len(self._data) >= 5:
            size = int.from_bytes(self._data[1:5], "big")
            if size > LONGEST:
                raise RendezvousError(
                    f"a frame of {size} bytes came: something else writes to this connection"
                )
            if len(self._data) < 5 + size:
                return
            kind = bytes(self._data[:1])
            payload = bytes(self._data[5 : 5 + size])
            del self._data[: 5 + size]
            yield kind, payload

    def _greet(self) -> bool:
        at = self._data.find(GREETING)
        if at < 0:
            if len(self._data) > NOISE:
                raise RendezvousError(f"{NOISE} bytes came and no greeting")
            self.noise = bytes(self._data)
            return False
        self.greeted, self.noise = True, bytes(self._data[:at])
        del self._data[: at + len(GREETING)]
        return True


class Outbox:
    """Bytes on their way to a descriptor that is never waited for."""

    def __init__(self, fd: int) -> None:
        import os

        self.fd = fd
        self._data = bytearray()
        os.set_blocking(fd, False)

    def __len__(self) -> int:
        return len(self._data)

    def put(self, data: bytes) -> None:
        """Send, or keep until `flush`; what the other side no longer reads is dropped."""
        self._data += data
        self.flush()

    def flush(self) -> None:
        """Write as much as is taken now."""
        import os

        try:
            while self._data:
                with memoryview(self._data) as view:
                    done = os.write(self.fd, view[: 1 << 18])
                del self._data[:done]
        except BlockingIOError:
            pass
        except OSError:  # the end of the connection is noticed elsewhere
            self._data.clear()
