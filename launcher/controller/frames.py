"""
Frames between a controller and a remote server, over the remote server's stdin and stdout.

    GREETING FRAME FRAME ...        FRAME = kind (1 byte), length (4 bytes, big-endian), payload

Text in front of the greeting is the output of the login shell's start-up files; it is skipped. A
frame's length, not a mark, defines its end: no output of a worker can be mistaken for a frame.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from pdrun.errors import RendezvousError

GREETING = b"\0pdrun-far-end-1\n"
HEADER_BYTES = 5
MAX_FRAME_BYTES = 16 << 20
"""A payload contains the arguments and variables of a job."""
MAX_NOISE_BYTES = 1 << 20
"""Of text in front of the greeting."""
WRITE_BYTES = 1 << 18

# from the controller
CHECK = b"C"
"""{"folder"}: a folder that must exist; answered by HELLO."""
LISTEN = b"L"
"""
{"addresses", "interface", "far", "ports"}: bind a socket for the scheduler; answered by LISTENING.
"""
ORDER = b"O"
"""{"node", "agent", "env"}: start the agent."""
SIGNAL = b"S"
"""A number: send this signal to the agent."""
HOLD = b"P"
"""{"streams"}: streams that must not be read for now."""
ALIVE = b"."
"""Nothing; sent often enough that silence means that the controller is lost."""

# from the remote server
HELLO = b"H"
"""{"version", "python", "host", "connection", "error"}."""
LISTENING = b"B"
"""{"host", "port"} or {"error"}."""
OUTPUT = b"o"
ERRORS = b"e"
"""Complete lines of the agent's stdout and stderr."""
MARK = b"m"
"""Progress of the agent: `Lifeline.UP`, `Lifeline.RUNNING`."""
EXIT = b"X"
"""{"code"}: as Popen returns it; the last frame."""

ALIVE_SECONDS = 10.0
SILENCE_SECONDS = 120.0
"""
Time without a frame after which the remote server assumes that the controller is lost: a host
without power closes no connection.
"""


def encode_frame(kind: bytes, payload: bytes = b"") -> bytes:
    """Return one frame. Raises ValueError for a payload above MAX_FRAME_BYTES."""
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame has at most {MAX_FRAME_BYTES} bytes, got {len(payload)}")
    return kind + len(payload).to_bytes(4, "big") + payload


def encode_message(kind: bytes, data: dict[str, Any]) -> bytes:
    """
    Return a frame whose payload is JSON in ASCII.

    Text with lone surrogates (bytes that are not UTF-8) survives.
    """
    return encode_frame(kind, json.dumps(data).encode("ascii"))


class FrameReader:
    """
    Splits a stream of bytes into frames.

    Args:
        is_greeted: the stream starts with frames, without a greeting.
    """

    def __init__(self, *, is_greeted: bool = False) -> None:
        self.is_greeted = is_greeted
        self.noise = b""
        """Text in front of the greeting."""
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """
        Add bytes as they arrive; yield (kind, payload) of every complete frame.

        Raises:
            RendezvousError: no greeting within MAX_NOISE_BYTES, or a frame above MAX_FRAME_BYTES.
        """
        self._data += data
        if not self.is_greeted and not self._find_greeting():
            return
        while len(self._data) >= HEADER_BYTES:
            size = int.from_bytes(self._data[1:HEADER_BYTES], "big")
            if size > MAX_FRAME_BYTES:
                raise RendezvousError(
                    f"received a frame of {size} bytes: "
                    "something other than pdrun writes to this connection"
                )
            end = HEADER_BYTES + size
            if len(self._data) < end:
                return
            kind = bytes(self._data[:1])
            payload = bytes(self._data[HEADER_BYTES:end])
            del self._data[:end]
            yield kind, payload

    def _find_greeting(self) -> bool:
        index = self._data.find(GREETING)
        if index < 0:
            if len(self._data) > MAX_NOISE_BYTES:
                raise RendezvousError(f"received {MAX_NOISE_BYTES} bytes without a greeting")
            self.noise = bytes(self._data)
            return False
        self.is_greeted = True
        self.noise = bytes(self._data[:index])
        del self._data[: index + len(GREETING)]
        return True


class NonblockingWriter:
    """Bytes on their way to a descriptor; never waits for it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._data = bytearray()
        os.set_blocking(fd, False)

    def __len__(self) -> int:
        return len(self._data)

    def put(self, data: bytes) -> None:
        """Write, or keep until `flush`. Bytes for a closed descriptor are dropped."""
        self._data += data
        self.flush()

    def flush(self) -> None:
        """Write as much as the descriptor accepts."""
        try:
            while self._data:
                with memoryview(self._data) as view:
                    written = os.write(self.fd, view[:WRITE_BYTES])
                del self._data[:written]
        except BlockingIOError:
            pass
        except OSError:  # the reader of the connection notices its end
            self._data.clear()
