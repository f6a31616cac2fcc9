"""
How workers speak to their agent: datagrams through a socket file in a folder that only this user
can enter.

    {"rank": 3, "generation": 1, "step": 120, "busy": 0.25, "saved": 100}

Whatever is no such object, exactly, is counted and forgotten: it may come from any process of this
user. The kernel says who sent it. A worker never waits: what does not fit into the socket's queue
is lost, and the next one says it again. Nor does a worker that floods keep the agent busy: a turn
reads at most BATCH of them.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

MAX_DATAGRAM_BYTES = 512
"""Bytes of a datagram, at most."""
MAX_REPORTS_PER_READ = 64
MAX_NUMBER = 1 << 53
"""No rank, generation or step is as great."""
MAX_SWEPT_FOLDERS = 64
_FOLDER_PREFIX = "pdrun-agent-"
"""
Then a name of the running kernel: on a folder that hosts share, only that one knows whether a
socket is held.
"""
_INTEGER_FIELDS = ("rank", "generation", "step", "saved")
_CREDENTIALS = struct.Struct("3i")
_MAX_PATH_BYTES = 100
"""Bytes of a socket's path; the system takes 107."""


@dataclass(frozen=True)
class WorkerReport:
    """What one datagram says."""

    rank: int
    generation: int
    step: int | None = None
    busy: float = 0.0
    saved: int | None = None
    pid: int = 0
    """The process that sent it, as the kernel says; 0: not known."""


def parse_report(data: bytes, pid: int = 0) -> WorkerReport | None:
    """Return what a datagram says; None: it says nothing that a worker would say."""
    if len(data) > MAX_DATAGRAM_BYTES:
        return None
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not {"rank", "generation"} <= found.keys() <= {
        *_INTEGER_FIELDS,
        "busy",
    }:
        return None
    if not all(
        type(found[name]) is int and 0 <= found[name] < MAX_NUMBER
        for name in _INTEGER_FIELDS
        if name in found
    ):
        return None
    busy = found.get("busy", 0.0)
    if type(busy) not in (int, float) or not 0 <= busy < 1e9:  # which no NaN is
        return None
    return WorkerReport(
        found["rank"], found["generation"], found.get("step"), float(busy), found.get("saved"), pid
    )


class WorkerChannel:
    """
    The agent's end.

    Raises:
        OSError: no folder or socket can be made.
    """

    folders: ClassVar[set[Path]] = set()
    """
    Those of this process that are in use: to be removed by a process that leaves without closing
    anything.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self.folder = make_socket_folder()
        except OSError:
            self._socket.close()
            raise
        self.folders.add(self.folder)
        self.path = str(self.folder / "agent")
        self.rejected_count = 0
        """Datagrams that no worker would send."""
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(self.path)
        except OSError:
            self.close()
            raise
        remove_stale_folders(self.folder)

    def fileno(self) -> int:
        """Readable when `read` has something; -1 after `close`."""
        return self._socket.fileno()

    def read_reports(self) -> list[WorkerReport]:
        """
        Return what was said since the last call, oldest first, at most BATCH of it; never blocks.
        """
        found: list[WorkerReport] = []
        for _ in range(MAX_REPORTS_PER_READ):
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(
                    MAX_DATAGRAM_BYTES + 1, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
            except OSError:  # nothing is left
                break
            told = None if flags & socket.MSG_TRUNC else parse_report(data, _sender_pid(ancillary))
            if told is None:
                self.rejected_count += 1
            else:
                found.append(told)
        return found

    def close(self) -> None:
        """Close the socket and remove the folder with all that is in it."""
        self._socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folders.discard(self.folder)


def make_socket_folder() -> Path:
    """
    Make a folder of mode 0700 with a path so short that a socket can lie in it.

    Raises:
        OSError: none can be made anywhere; says what was wrong at the first place.
    """
    wrong: OSError | None = None
    for base in (None, os.environ.get("XDG_RUNTIME_DIR"), "/tmp"):
        if base is not None and not os.access(base, os.W_OK | os.X_OK):
            continue
        try:
            folder = Path(tempfile.mkdtemp(prefix=_kernel_prefix(), dir=base))
        except OSError as error:
            wrong = wrong or error
            continue
        if len(os.fsencode(folder)) <= _MAX_PATH_BYTES - len("/agent"):
            return folder
        folder.rmdir()
    raise wrong or OSError("no folder for temporary files has a path short enough for a socket")


def remove_stale_folders(folder: Path) -> None:
    """
    Remove the folders beside this one whose agents were killed: this user's, of this kernel, with a
    dead socket.
    """
    kernel = _kernel_prefix()
    if kernel == _FOLDER_PREFIX:
        return
    for other in itertools.islice(folder.parent.glob(f"{kernel}*"), MAX_SWEPT_FOLDERS):
        try:
            if other == folder or other.lstat().st_uid != os.getuid():
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                probe.connect(str(other / "agent"))
        except ConnectionRefusedError:
            shutil.rmtree(other, ignore_errors=True)
        except OSError:
            continue  # just being made, or gone


def _kernel_prefix() -> str:
    """
    What folders of this kernel's agents begin with; without its name where that cannot be read.
    """
    try:
        return f"{_FOLDER_PREFIX}{Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii')[:8]}-"
    except OSError:
        return _FOLDER_PREFIX


def _sender_pid(ancillary: list[tuple[int, int, bytes]]) -> int:
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(
            data
        ) == _CREDENTIALS.size:
            return int(_CREDENTIALS.unpack(data)[0])
    return 0
