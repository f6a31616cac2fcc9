"""
Start, stop and replace this user's warm processes (``pdrun warm``).

`warm_client` finds and uses them. `pdrun.launcher.stdlib_only.warm_server` is the other end.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pdrun.disk import make_private_folder
from pdrun.errors import ConfigError, DeadlineExceeded
from pdrun.launcher.stdlib_only import import_env, process_tree, watchdog, worker_exec
from pdrun.launcher.supervisor.boot import FORK_SERVER_FILE
from pdrun.launcher.supervisor.events import WarmProcess
from pdrun.launcher.supervisor.warm_client import (
    DEAD_REASON,
    WarmScan,
    connect_to,
    open_private_dir,
    read_reply,
)

WARM_MODULES = ("torch", "torch.distributed", "torch._dynamo")
EXIT_SECONDS = 5.0
"""Time that a warm process may take to exit."""
IMPORT_SECONDS = 300.0
"""Time that the import may take."""
LOCK_SECONDS = IMPORT_SECONDS + 10.0
"""Time that another pdrun may hold the folder's lock: it starts a process."""
COMMAND_LINE_BYTES = 1 << 14
"""Room for the command line of a worker."""
READY_FD = 4
"""Descriptor on which the new process reports; see `fork_server`."""


def warm_key(python: str, environ: Mapping[str, str]) -> str:
    """Return the key (socket name) of the warm process for an interpreter and an environment."""
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
    Create the folder if it is missing, lock it, and yield its descriptor.

    Args:
        say: called with a message if another pdrun has the lock.

    Raises:
        ConfigError: the folder cannot be used.
        DeadlineExceeded: another pdrun has had the lock for LOCK_SECONDS.
    """
    with ExitStack() as stack:
        with _folder_errors(path):
            make_private_folder(path)
            number = stack.enter_context(open_private_dir(path))
            lock = os.open(
                "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=number
            )
            stack.callback(os.close, lock)
            _acquire_lock(lock, path, say)
        yield number


@contextmanager
def _folder_errors(path: Path) -> Iterator[None]:
    """Raise ConfigError with the folder's name for errors of the system."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot contain sockets: {error.strerror}", where=str(path)) from error


def _acquire_lock(lock: int, path: Path, say: Callable[[str], None]) -> None:
    has_notified = False
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        if not has_notified:
            say(f"waiting for another pdrun warm that uses {path}")
            has_notified = True
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"another pdrun has locked it for {LOCK_SECONDS:g} s",
                where=str(path / "lock"),
                hint="find out what that process waits for",
            )
        time.sleep(0.05)


def start_warm(
    number: int, path: Path, python: str, environ: Mapping[str, str], idle: float
) -> None:
    """
    Start a warm process and wait until it has imported torch.

    Args:
        number: descriptor of the folder, locked (`locked_dir`).
        path: path of the socket.
        environ: environment of the import, without PDRUN_TOKEN.
        idle: seconds without a job after which it exits.

    Raises:
        ConfigError: the import failed, or the process is not fit to be forked.
    """
    environ = import_env.import_environment(dict(environ))
    # Room for the marker of the supervisor and fork server that are forked from it.
    environ[watchdog.MARKER_VARIABLE] = watchdog.marker_value("0" * 16, 0)
    argv = [
        python,
        str(FORK_SERVER_FILE),
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
            lines = os.pread(printed, 1 << 16, 0).decode(errors="replace").strip().splitlines()
            why = lines[-1] if lines else "it ended during the import"
    finally:
        os.close(read)
        os.close(printed)
    if why:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.unlink(path.name, dir_fd=number)
        raise ConfigError(f"could not start a warm process: {why}", where=python)


def _exec_child(
    argv: list[str], environ: Mapping[str, str], descriptors: list[int], report: int
) -> None:
    """
    Become the warm process, in a child that was just forked; never returns.

    It gets a new session, default signal actions, and none of this process's other descriptors.
    """
    try:
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.setsid()
        os.chdir("/")
        last = worker_exec.remap_fds(descriptors, report)
        os.set_inheritable(last, True)
        os.closerange(last + 1, 1 << 20)
        os.execve(argv[0], argv, dict(environ))
    except OSError as error:
        os.write(READY_FD, json.dumps({"why": f"{argv[0]}: {error.strerror}"}).encode())
    finally:
        os._exit(127)


def _wait_ready(report: int) -> str | None:
    """
    Wait for the new process's report.

    Returns:
        the empty string if it is ready, the reason if it is not, None if it ended without a report.
    """
    poll = select.poll()
    poll.register(report, select.POLLIN)
    if not poll.poll(IMPORT_SECONDS * 1000):
        return f"its import took longer than {IMPORT_SECONDS:g} s"
    data = os.read(report, 1 << 16)
    try:
        return str(json.loads(data)["why"]) if data else None
    except (ValueError, KeyError, TypeError):
        return None


def stop_warm(warm: WarmProcess) -> bool:
    """Stop a warm process; return False if it has not ended after EXIT_SECONDS."""
    try:
        handle = os.pidfd_open(warm.pid)
    except OSError:
        return True
    try:
        path = Path(warm.socket)
        with open_private_dir(path.parent) as number, connect_to(number, path.name) as connection:
            connection.send(b'{"ask": "stop"}')
            return read_reply(connection)[0].get("stopping") == warm.pid and _wait_for_end(handle)
    except (OSError, ConfigError):
        return _wait_for_end(handle)
    finally:
        os.close(handle)


def _wait_for_end(handle: int) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(EXIT_SECONDS * 1000))


def replace_silent(scan: WarmScan, name: str, say: Callable[[str], None]) -> None:
    """
    Kill a warm process that accepts connections but does not answer; its jobs continue.

    Otherwise it would stay until its idle time is over: a new process takes the name of its socket.
    """
    if name not in scan.pids or scan.faults.get(name, DEAD_REASON) == DEAD_REASON:
        return
    found = process_tree.find_process(scan.pids[name])
    if found is not None:
        say(f"replacing the warm process {found.pid}, which does not answer")
        process_tree.kill_process(found)


def remove_dead(scan: WarmScan, say: Callable[[str], None]) -> list[str]:
    """
    Remove the sockets that dead warm processes have left; return their names.

    ``say``: see `locked_dir`.
    """
    dead = [name for name, why in scan.faults.items() if why == DEAD_REASON]
    if dead:
        with locked_dir(scan.path, say) as number:  # no other process is started there meanwhile
            for name in dead:
                try:
                    connect_to(number, name).close()
                except ConnectionRefusedError:
                    os.unlink(name, dir_fd=number)
                except OSError:
                    continue
    return dead


def idle_end_time(warm: WarmProcess) -> float:
    """Return the wall-clock time at which a warm process exits if no job uses it."""
    return time.time() + warm.idle_seconds - warm.unused_seconds
