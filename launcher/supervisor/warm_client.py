"""
This user's warm processes on this node, as a launcher uses them: find, query, borrow a supervisor.

    $XDG_RUNTIME_DIR/pdrun/KEY.sock                 if that variable is set
    ~/.local/state/pdrun/warm-HOST/KEY.sock         otherwise

There is one for each interpreter and import-time environment; KEY is their hash. The folder belongs
to this user alone (0700, checked each time), and so does the process that answers (SO_PEERCRED). A
socket without a listener was left by a killed process. That is no error: the next start replaces
it.

`pdrun.launcher.stdlib_only.warm_server` is the other end. `warm_start` starts and stops them.
`pdrun.launcher.plan.start_method` decides which one fits a job.
"""

from __future__ import annotations

import array
import json
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdrun.errors import ConfigError
from pdrun.launcher.common import procfs
from pdrun.launcher.common.files import warm_folder
from pdrun.launcher.stdlib_only import inherited_state
from pdrun.launcher.supervisor.events import WarmProcess

ANSWER_SECONDS = 1.5
"""Time that a warm process may take to answer. After that a job does without it."""
LEND_SECONDS = 5.0
"""Time that it may take to fork a job's supervisor."""
DEAD_REASON = (
    "its process was killed; pdrun warm start replaces it, pdrun warm stop removes its socket"
)
MAX_PACKET_BYTES = 1 << 17


@contextmanager
def open_private_dir(path: Path) -> Iterator[int]:
    """
    Check the folder and yield a descriptor of it.

    Its files are opened relative to the descriptor: that is the folder that was checked, and the
    path of a socket may have any length.

    Raises:
        ConfigError: another user may write there.
        OSError: the folder does not exist.
    """
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(number)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(
                "is accessible to other users (must be yours, mode 0700)",
                where=str(path),
                hint="remove it",
            )
        yield number
    finally:
        os.close(number)


def _socket_names(number: int) -> list[str]:
    return sorted(name for name in os.listdir(number) if name.endswith(".sock"))


def connect_to(number: int, name: str) -> socket.socket:
    """
    Connect to a warm process of this user.

    Raises:
        OSError: no process listens there, or it belongs to another user.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(f"/proc/self/fd/{number}/{name}")
        user = _peer_credentials(connection)[1]
        if user != os.geteuid():
            raise PermissionError(13, f"the process behind {name} belongs to user {user}")
    except BaseException:
        connection.close()
        raise
    return connection


def _peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return pid and user id of the process at the other end."""
    pid, user, _ = array.array(
        "i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    return pid, user


def _silent_reason(pid: int) -> str:
    """Return why a warm process that accepts connections does not answer, and what to do."""
    found = procfs.read_state(pid)
    if found is not None and found.letter in ("T", "t"):
        what = f"the warm process {pid} is stopped, so jobs do not use it"
        return f"{what}: continue it with kill -CONT {pid}, or end it with kill -KILL {pid}"
    what = f"the warm process {pid} does not answer within {ANSWER_SECONDS:g} s"
    return f"{what}, so jobs do not use it: end it with kill -KILL {pid}"


def read_reply(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """
    Return one packet and its descriptors.

    Raises:
        OSError: no valid answer arrived in time.
    """
    data, handles, flags, _ = socket.recv_fds(connection, MAX_PACKET_BYTES, 4)
    try:
        found = json.loads(data) if data and not flags & socket.MSG_TRUNC else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        for handle in handles:
            os.close(handle)
        raise OSError(71, "invalid answer" if data else "it closed the connection")
    return found, handles


# Find
# --------------------------------------------------------------------------------------------------


class WarmScan:
    """
    Queries all warm processes of this user; never raises.

    The constructor sends the queries. `collect_answers` waits for the answers.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._asked: list[tuple[str, socket.socket]] = []
        self.pids: dict[str, int] = {}
        """Socket name -> pid of the process that listens there."""
        self.faults: dict[str, str] = {}
        """Socket name -> why there is no answer."""
        try:
            self.path = warm_folder(environ)
            with open_private_dir(self.path) as number:
                for name in _socket_names(number):
                    self._send_hello(number, name)
        except OSError:
            return
        except ConfigError as error:
            self.faults[error.where] = error.what

    def _send_hello(self, number: int, name: str) -> None:
        try:
            connection = connect_to(number, name)
            self.pids[name] = _peer_credentials(connection)[0]
            connection.send(b'{"ask": "hello"}')
            self._asked.append((name, connection))
        except ConnectionRefusedError:
            self.faults[name] = DEAD_REASON
        except OSError as error:
            self.faults[name] = error.strerror or str(error)

    def collect_answers(self) -> tuple[WarmProcess, ...]:
        """Return the processes that answered."""
        found = []
        for name, connection in self._asked:
            try:
                with connection:
                    reply, _ = read_reply(connection)
                found.append(_parse_hello(str(self.path / name), reply))
            except TimeoutError:
                self.faults[name] = _silent_reason(self.pids[name])
            except (OSError, KeyError, TypeError, ValueError) as error:
                self.faults[name] = str(error)
        self._asked = []
        return tuple(found)


def _parse_hello(path: str, reply: dict[str, Any]) -> WarmProcess:
    """Return an answer as data; raises KeyError, TypeError or ValueError if it is not one."""
    unfit = str(reply["unfit"])
    if not unfit and reply["changed"]:
        unfit = f"{reply['changed']} has changed since"
    difference = inherited_state.find_difference(reply["inherited"], inherited_state.read_state())
    if not unfit and difference:
        unfit = f"its {difference} differs from that of this process"
    return WarmProcess(
        socket=path,
        pid=int(reply["pid"]),
        python=str(reply["python"]),
        torch_version=str(reply["torch"]),
        modules=tuple(map(str, reply["modules"])),
        variables=dict(reply["variables"]),
        depends_on_all=bool(reply["all"]),
        unfit=unfit,
        memory_bytes=int(reply["memory"]),
        started_at=float(reply["started"]),
        unused_seconds=float(reply["unused"]),
        idle_seconds=float(reply["idle"]),
        running_jobs=int(reply["running"]),
        served_jobs=int(reply["served"]),
    )


# Borrow
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BorrowedSupervisor:
    """A supervisor that a warm process has forked for this process."""

    socket: socket.socket
    pid: int
    handle: int
    """Its pidfd; it is not a child of this process."""
    mark: str
    """The token in the marker of its processes (`watchdog.MARKER_VARIABLE`)."""


def borrow_supervisor(path: str) -> BorrowedSupervisor:
    """
    Have a warm process fork a supervisor, with a fork server that is ready, for this process.

    Raises:
        OSError: it cannot; the text says why.
    """
    try:
        with open_private_dir(Path(path).parent) as number:
            connection = connect_to(number, Path(path).name)
    except ConfigError as error:
        raise OSError(13, str(error)) from None
    try:
        connection.settimeout(LEND_SECONDS)
        connection.send(
            json.dumps({"ask": "keeper", "inherited": inherited_state.read_state()}).encode()
        )
        reply, handles = read_reply(connection)
        if (
            len(handles) != 1
            or not isinstance(reply.get("keeper"), int)
            or not isinstance(reply.get("mark"), str)
        ):
            for handle in handles:
                os.close(handle)
            raise OSError(1, str(reply.get("refused", "invalid answer")))
        connection.setblocking(True)
        return BorrowedSupervisor(connection, reply["keeper"], handles[0], reply["mark"])
    except BaseException:
        connection.close()
        raise
