"""
This user's warm processes on this node, as a launcher sees them: found, asked, borrowed from,
started, stopped.

    $XDG_RUNTIME_DIR/pdrun/KEY.sock        or, without that variable, ~/.local/state/pdrun/warm-HOST/KEY.sock

One for each interpreter and import-time environment (KEY is their hash). The folder is this user's
alone (0700, looked at each time), and so is whoever answers (SO_PEERCRED). A socket that nobody
listens on was left by a killed process: it is no error, and the next start replaces it.
`warm_server` is the other end; `starting.unfit` decides what fits a job.
"""

from __future__ import annotations

import array
import fcntl
import hashlib
import json
import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdrun.errors import ConfigError, DeadlineExceeded
from pdrun.launcher.common import procfs
from pdrun.launcher.common.files import warm_folder
from pdrun.launcher.stdlib_only import import_env, inherited_state, supervisor
from pdrun.launcher.supervisor.events import WarmProcess
from pdrun.private_folder import make_private_folder

WARM_MODULES = ("torch", "torch.distributed", "torch._dynamo")
ANSWER_SECONDS = 1.5
"""Seconds that a warm process may take to answer; a job then does without."""
DEAD_REASON = "its process has died without a word; pdrun warm start begins another, pdrun warm stop removes what it has left"
EXIT_SECONDS = 5.0
"""Seconds that it may take to end."""
LEND_SECONDS = 5.0
"""Seconds that it may take to make a job's keeper."""
IMPORT_SECONDS = 300.0
"""Seconds that an import may take."""
LOCK_SECONDS = IMPORT_SECONDS + 10.0
"""Seconds for which another pdrun may start a process in the folder."""
COMMAND_LINE_BYTES = 1 << 14
"""Bytes for the command line of a worker."""
MAX_PACKET_BYTES = 1 << 17
_FORK_SERVER_FILE = Path(__file__).parents[1] / "stdlib_only" / "fork_server.py"


@contextmanager
def open_private_dir(path: Path) -> Iterator[int]:
    """
    A descriptor of the folder, by which its files are reached: a path of any length, and the folder
    that was checked.

    Raises:
        ConfigError: somebody else could write there. OSError: there is no such folder.
    """
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(number)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise ConfigError(
                "is not a folder of yours alone (0700)", where=str(path), hint="remove it"
            )
        yield number
    finally:
        os.close(number)


def _socket_names(number: int) -> list[str]:
    return sorted(name for name in os.listdir(number) if name.endswith(".sock"))


def _connect_to(number: int, name: str) -> socket.socket:
    """
    Connect to a warm process of this user.

    Raises:
        OSError: nobody listens there, or it is another user's process.
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
    """Return pid and user of the process that listens at the other end."""
    pid, user, _ = array.array(
        "i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    return pid, user


def _silent_reason(pid: int) -> str:
    """Return why a warm process that takes connections does not answer, and what to do."""
    found = procfs.read_state(pid)
    stopped = found is not None and found.letter in ("T", "t")
    what = "is stopped" if stopped else f"does not answer within {ANSWER_SECONDS:g} s"
    again = f"kill -CONT {pid} lets it go on, " if stopped else ""
    return f"the warm process {pid} {what}, and jobs do without it: {again}kill -KILL {pid} ends it"


def _read_reply(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """
    Return one packet and its descriptors.

    Raises:
        OSError: none came in time, or it is no answer.
    """
    data, handles, flags, _ = socket.recv_fds(connection, MAX_PACKET_BYTES, 4)
    try:
        found = json.loads(data) if data and not flags & socket.MSG_TRUNC else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        for handle in handles:
            os.close(handle)
        raise OSError(71, "what came is no answer" if data else "it closed the connection")
    return found, handles


# Looking
# --------------------------------------------------------------------------------------------------------------


class WarmScan:
    """
    Asks every warm process of this user at once; `found` waits for the answers. Nothing here
    raises.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._asked: list[tuple[str, socket.socket]] = []
        self.pids: dict[str, int] = {}
        """Socket -> the process that listens there."""
        self.faults: dict[str, str] = {}
        """Socket -> why there is no answer."""
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
            connection = _connect_to(number, name)
            self.pids[name] = _peer_credentials(connection)[0]
            connection.send(b'{"ask": "hello"}')
            self._asked.append((name, connection))
        except ConnectionRefusedError:
            self.faults[name] = DEAD_REASON
        except OSError as error:
            self.faults[name] = error.strerror or str(error)

    def collect_answers(self) -> tuple[WarmProcess, ...]:
        """Return what the processes say of themselves."""
        made = []
        for name, connection in self._asked:
            try:
                with connection:
                    reply, _ = _read_reply(connection)
                made.append(_parse_hello(str(self.path / name), reply))
            except TimeoutError:
                self.faults[name] = _silent_reason(self.pids[name])
            except (OSError, KeyError, TypeError, ValueError) as error:
                self.faults[name] = str(error)
        self._asked = []
        return tuple(made)


def _parse_hello(path: str, said: dict[str, Any]) -> WarmProcess:
    """Return an answer as data; raises KeyError, TypeError or ValueError where it is none."""
    here = inherited_state.find_difference(said["inherited"], inherited_state.read_state())
    changed = f"{said['changed']} has changed since" if said["changed"] else ""
    return WarmProcess(
        socket=path,
        pid=int(said["pid"]),
        python=str(said["python"]),
        torch_version=str(said["torch"]),
        modules=tuple(map(str, said["modules"])),
        variables=dict(said["variables"]),
        depends_on_all=bool(said["all"]),
        unfit=str(said["unfit"] or changed or (here and f"its {here} is not that of this process")),
        memory_bytes=int(said["memory"]),
        started_at=float(said["started"]),
        unused_seconds=float(said["unused"]),
        idle_seconds=float(said["idle"]),
        running_jobs=int(said["running"]),
        served_jobs=int(said["served"]),
    )


# Borrowing
# ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BorrowedSupervisor:
    """A keeper that was forked from a warm process for this one."""

    socket: socket.socket
    pid: int
    handle: int
    """Its pidfd: it is no child of this process."""
    mark: str
    """By which its workers' processes are known (`keeper.MARKER`)."""


def borrow_supervisor(path: str) -> BorrowedSupervisor:
    """
    Have a keeper with a ready starter made for this process.

    Raises:
        OSError: there will be none; the text says why.
    """
    try:
        with open_private_dir(Path(path).parent) as number:
            connection = _connect_to(number, Path(path).name)
    except ConfigError as error:
        raise OSError(13, str(error)) from None
    try:
        connection.settimeout(LEND_SECONDS)
        connection.send(
            json.dumps({"ask": "keeper", "inherited": inherited_state.read_state()}).encode()
        )
        reply, handles = _read_reply(connection)
        if (
            len(handles) != 1
            or not isinstance(reply.get("keeper"), int)
            or not isinstance(reply.get("mark"), str)
        ):
            for handle in handles:
                os.close(handle)
            raise OSError(1, str(reply.get("refused", "what came is no answer")))
        connection.setblocking(True)
        return BorrowedSupervisor(connection, reply["keeper"], handles[0], reply["mark"])
    except BaseException:
        connection.close()
        raise


# Starting and stopping
# ------------------------------------------------------------------------------------------------


def warm_key(python: str, environ: Mapping[str, str]) -> str:
    """Return the name of the warm process for an interpreter and an environment."""
    counted = {
        name: value
        for name, value in environ.items()
        if name == "HOME" or import_env.is_import_variable(name)
    }
    text = json.dumps([python, sorted(import_env.import_environment(counted).items())])
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:16]


@contextmanager
def locked_dir(path: Path, say: Callable[[str], None]) -> Iterator[int]:
    """
    The folder's descriptor, made where it is missing, while nobody else starts a process there.

    Args:
        say: told when somebody else does, and is waited for.

    Raises:
        ConfigError: it cannot be used. DeadlineExceeded: another pdrun has been at it for longer
            than an import takes.
    """
    with ExitStack() as held:
        with _folder_errors(path):
            make_private_folder(path)
            number = held.enter_context(open_private_dir(path))
            lock = os.open(
                "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=number
            )
            held.callback(os.close, lock)
            _acquire_lock(lock, path, say)
        yield number


@contextmanager
def _folder_errors(path: Path) -> Iterator[None]:
    """Say of what the system refuses here that it is the folder."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot hold sockets: {error.strerror}", where=str(path)) from error


def _acquire_lock(lock: int, path: Path, say: Callable[[str], None]) -> None:
    told = False
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        if not told:
            say(f"another pdrun warm is at work in {path}: waiting for it")
            told = True
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"another pdrun has held it for {LOCK_SECONDS:g} s",
                where=str(path / "lock"),
                hint="see what it waits for",
            )
        time.sleep(0.05)


def start_warm(
    number: int, path: Path, python: str, environ: Mapping[str, str], idle: float
) -> None:
    """
    Start a warm process and wait until it has imported torch.

    Args:
        number: descriptor of the folder, locked (`changing`).
        path: of the socket.
        environ: of the import; the token is not in it.
        idle: seconds without a job after which it ends.

    Raises:
        ConfigError: it could not, or is not fit to be forked from.
    """
    marker = f"{supervisor.MARKER_VARIABLE}=" + supervisor.marker_value("0" * 16, 0)
    environ = {
        **import_env.import_environment(dict(environ)),
        supervisor.MARKER_VARIABLE: marker.partition("=")[2],
    }
    argv = [
        python,
        str(_FORK_SERVER_FILE),
        ",".join(WARM_MODULES),
        f"warm={idle}",
        str(path),
        "-" * COMMAND_LINE_BYTES,
    ]
    try:
        os.unlink(path.name, dir_fd=number)
    except FileNotFoundError:
        pass
    read, write = os.pipe2(os.O_CLOEXEC)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        open(os.devnull, "r+b", buffering=0) as null,
    ):
        with _folder_errors(path.parent):
            listener.bind(f"/proc/self/fd/{number}/{path.name}")
        printed = os.memfd_create("pdrun-warm", os.MFD_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            _exec_child(
                argv, environ, [null.fileno(), null.fileno(), printed, listener.fileno()], write
            )
    os.close(write)
    try:
        why = _wait_ready(read)
        if why is None:
            said = os.pread(printed, 1 << 16, 0).decode(errors="replace").strip().splitlines()
            why = said[-1] if said else "it ended at once"
    finally:
        os.close(read)
        os.close(printed)
    if why:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.unlink(path.name, dir_fd=number)
        raise ConfigError(f"no process can be kept warm: {why}", where=python)


def _exec_child(
    argv: list[str], environ: Mapping[str, str], descriptors: list[int], report: int
) -> None:
    """
    The child's side: a session of its own, nothing of this process's signals or descriptors, then
    the program.
    """
    try:
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.setsid()
        os.chdir("/")
        last = supervisor.remap_fds(descriptors, report)
        os.set_inheritable(last, True)
        os.closerange(last + 1, 1 << 20)
        os.execve(argv[0], argv, dict(environ))
    except OSError as error:
        os.write(4, json.dumps({"why": f"{argv[0]}: {error.strerror}"}).encode())
    finally:
        os._exit(127)


def _wait_ready(report: int) -> str | None:
    """
    Wait for the process's own word: empty when it is ready, why it is not, None when it ended
    without one.
    """
    import select

    poll = select.poll()
    poll.register(report, select.POLLIN)
    if not poll.poll(IMPORT_SECONDS * 1000):
        return f"its import has not ended after {IMPORT_SECONDS:g} s"
    data = os.read(report, 1 << 16)
    try:
        return str(json.loads(data)["why"]) if data else None
    except (ValueError, KeyError, TypeError):
        return None


def stop_warm(warm: WarmProcess) -> bool:
    """Ask a warm process to end, and wait for it; False when it did not within `LEAVES` seconds."""
    try:
        handle = os.pidfd_open(warm.pid)
    except OSError:
        return True
    try:
        path = Path(warm.socket)
        with open_private_dir(path.parent) as number, _connect_to(number, path.name) as connection:
            connection.send(b'{"ask": "stop"}')
            return _read_reply(connection)[0].get("stopping") == warm.pid and _wait_for_end(handle)
    except (OSError, ConfigError):
        return _wait_for_end(handle)
    finally:
        os.close(handle)


def _wait_for_end(handle: int) -> bool:
    import select

    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(EXIT_SECONDS * 1000))


def replace_silent(look: WarmScan, name: str, say: Callable[[str], None]) -> None:
    """
    End a process that takes connections at a socket and does not answer; its jobs go on.

    Once another one has the socket's name, nothing would find it any more but its own idle time.
    """
    found = (
        supervisor.find_process(look.pids[name])
        if look.faults.get(name, DEAD_REASON) != DEAD_REASON and name in look.pids
        else None
    )
    if found is not None:
        say(f"replacing the warm process {found.pid}, which does not answer")
        supervisor.kill_process(found)


def remove_dead(look: WarmScan, say: Callable[[str], None]) -> list[str]:
    """
    Remove the sockets of dead processes that were found; return their names. ``say``: see
    `changing`.
    """
    dead = [name for name, why in look.faults.items() if why == DEAD_REASON]
    if dead:
        with locked_dir(look.path, say) as number:  # nobody begins another there meanwhile
            for name in dead:
                try:
                    _connect_to(number, name).close()
                except ConnectionRefusedError:
                    os.unlink(name, dir_fd=number)
                except OSError:
                    continue
    return dead


def idle_end_time(warm: WarmProcess) -> float:
    """Return the wall-clock time at which a warm process ends if nobody uses it."""
    return time.time() + warm.idle_seconds - warm.unused_seconds
