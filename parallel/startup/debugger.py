"""
`pdrun.breakpoint`: a debugger at one rank, while the others wait.

    rank 3       listens on a socket in its agent's private folder; pdb talks to who connects
    the others   look for a key of torch's store, or for a file beside the socket: no collective

`pdrun attach JOB:3 --debug` connects. Nothing listens on a port: from another host use ssh. A user
who disconnects can connect again. ``continue`` releases all ranks; ``quit`` ends the job with 130.
"""

from __future__ import annotations

import os
import pdb
import socket
import struct
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from pdrun import elastic
from pdrun.errors import UsageError
from pdrun.text import quote_command

SOCKET_NAME = "debug-{rank}"
"""Beside the agent's socket; `launcher/jobs/views/attach.py` has the same name."""
POLL_SECONDS = 0.2
QUIT_CODE = 130
MAX_UNSENT_CHARACTERS = 65_536
WHERE = "pdrun.breakpoint"

_calls = 0
"""Breakpoints that this process has reached: all ranks count the same ones."""


def breakpoint(rank: int = 0) -> None:
    """
    Stop here: a debugger for one rank, the others wait until it continues. Every rank calls this.

    While they wait, no rank counts as hanging. Without pdrun's agent it is pdb on this terminal.

    Args:
        rank: the rank to debug.

    Raises:
        UsageError: there is no such rank, or ranks of other hosts cannot be made to wait.
    """
    global _calls
    frame = sys._getframe(1)
    own, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not 0 <= rank < world:
        raise UsageError(f"rank must be from 0 to {world - 1}, got {rank}", where=WHERE)
    _calls += 1
    folder = elastic.pause(True)
    barrier = _ReleaseMark(folder, _calls)
    if world > 1 and not barrier.reaches(world):
        elastic.pause(False)
        raise UsageError(
            "ranks of other hosts cannot be made to wait",
            where=WHERE,
            hint="call pdrun.init() or torch.distributed.init_process_group() before",
        )
    if own != rank:
        barrier.wait()
        elastic.pause(False)
        return
    if not folder:
        _RankDebugger(barrier).set_trace(frame)
        return
    _debug_over_socket(Path(folder), rank, frame, barrier)


class _ReleaseMark:
    """What tells the other ranks to go on: a key of the store, or a file."""

    def __init__(self, folder: str, call: int) -> None:
        module: Any = sys.modules.get("torch.distributed")
        self._key = f"pdrun/breakpoint/{os.environ.get('PDRUN_GENERATION', '0')}/{call}"
        self._store: Any = None
        if module is not None and module.is_available() and module.is_initialized():
            self._store = module.distributed_c10d._get_default_store()
        self._file = Path(folder, self._key.replace("/", "-")) if folder else None

    def reaches(self, world: int) -> bool:
        """Return whether all ranks can see the mark."""
        is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(world)
        return self._store is not None or (self._file is not None and is_one_host)

    def wait(self) -> None:
        """Wait until the mark is set."""
        while not self._is_set():
            time.sleep(POLL_SECONDS)

    def _is_set(self) -> bool:
        if self._store is not None:
            return bool(self._store.check([self._key]))
        return self._file is not None and self._file.exists()

    def set(self) -> None:
        """Release the other ranks."""
        if self._store is not None:
            self._store.set(self._key, "1")
        elif self._file is not None:
            self._file.touch()


class _RankDebugger(pdb.Pdb):
    """pdb that releases the other ranks when it continues, and ends the job when it quits."""

    def __init__(self, barrier: _ReleaseMark, link: _DebugLink | None = None) -> None:
        files = {} if link is None else {"stdin": link, "stdout": link}
        super().__init__(nosigint=True, **files)  # type: ignore[arg-type]
        self.prompt = f"(rank {os.environ.get('RANK', '0')}) "
        self._barrier = barrier
        self._link = link

    def do_continue(self, arg: str) -> bool | None:
        """Go on, with all ranks."""
        self._barrier.set()
        elastic.pause(False)
        if self._link is not None:
            self._link.close()
        return super().do_continue(arg)

    do_c = do_cont = do_continue

    def do_quit(self, arg: str) -> bool | None:
        """End this process, and so the job."""
        if self._link is not None:
            self._link.close()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(QUIT_CODE)

    do_q = do_exit = do_quit


class _DebugLink:
    """What pdb reads and writes: the connection of a user. One who left may connect again."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, server: socket.socket, path: Path) -> None:
        self._server = server
        self._path = path
        self._link: socket.socket | None = None
        self._input = bytearray()
        self._unsent = ""

    def readline(self) -> str:
        """Return a line of the user; wait for one who connects."""
        while b"\n" not in self._input:
            link = self._link or self._accept()
            try:
                data = link.recv(1 << 16)
            except OSError:
                data = b""
            if data:
                self._input += data
            else:
                self._drop_link()
        line, _, rest = self._input.partition(b"\n")
        self._input = rest
        return line.decode("utf-8", "replace") + "\n"

    def write(self, text: str) -> int:
        """Write to the user; what no user reads is shown to who connects next."""
        try:
            if self._link is not None:
                self._link.sendall(text.encode("utf-8", "backslashreplace"))
                return len(text)
        except OSError:
            pass  # the user has left; the next reading notices it
        self._unsent = (self._unsent + text)[-MAX_UNSENT_CHARACTERS:]
        return len(text)

    def flush(self) -> None:
        """Do nothing: `write` sends."""

    def close(self) -> None:
        """Close the connection and the socket."""
        self._drop_link()
        self._server.close()
        self._path.unlink(missing_ok=True)

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None
        self._input.clear()

    def _accept(self) -> socket.socket:
        """Wait for a connection of this user."""
        while True:
            link, _ = self._server.accept()
            size = struct.calcsize("3i")
            peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            if struct.unpack("3i", peer)[1] == os.geteuid():
                self._link = link
                unsent, self._unsent = self._unsent, ""
                self.write(unsent)
                return link
            link.close()


def _debug_over_socket(folder: Path, rank: int, frame: FrameType, barrier: _ReleaseMark) -> None:
    path = folder / SOCKET_NAME.format(rank=rank)
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    server.listen(1)
    run = os.environ.get("PDRUN_RUN", "")
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    attach = quote_command("pdrun", "attach", f"{run}:{rank}", "--debug")
    print(f"rank {rank} waits at {place}: {attach}", file=sys.stderr, flush=True)
    _RankDebugger(barrier, _DebugLink(server, path)).set_trace(frame)
