"""
Scripts as processes of their own, forked from one that has imported torch: a tenth of the cost of
an interpreter. Nothing of pdrun is imported before the fork, and a script ends as under `python`:
with atexit functions, destructors and the interpreter's own exit code. Commands of pdrun are
forked from another process, which has imported the command line.

    python script_forks.py DESCRIPTOR MODULE ...    the process that forks; DESCRIPTOR: its socket
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_REQUEST_BYTES = 1 << 17
TORCH_MODULES = ("torch", "torch._dynamo", "torch.distributed")
"""The second: the first optimizer of a script would import it, a second of CPU."""


class ForkedScript:
    """A running script, with what the tests use of `subprocess.Popen`."""

    def __init__(
        self,
        server: socket.socket,
        path: Path,
        environ: Mapping[str, str],
        words: Sequence[str],
        folder: Path,
    ) -> None:
        pipes = [os.pipe() for _ in range(3)]
        request = {
            "argv": [str(path), *words],
            "cwd": str(folder),
            "environ": dict(environ),
        }
        text = json.dumps(request).encode()
        assert len(text) < MAX_REQUEST_BYTES, "a request has one packet"
        socket.send_fds(server, [text], [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        self._texts = {read: b"" for read, _ in pipes}
        """Output, errors and exit code, by descriptor."""
        self.pid = int(_read_line(pipes[2][0]))
        self.returncode: int | None = None

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return all output; raise `subprocess.TimeoutExpired` after so many seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        with selectors.DefaultSelector() as waiting:
            for file in self._texts:
                waiting.register(file, selectors.EVENT_READ)
            while waiting.get_map():
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
                for key, _ in waiting.select(left):
                    data = os.read(key.fd, 1 << 16)
                    self._texts[key.fd] += data
                    if not data:
                        waiting.unregister(key.fd)
        for file in self._texts:
            os.close(file)
        out, err, status = (text.decode() for text in self._texts.values())
        self.returncode = int(status)
        return out, err

    def kill(self) -> None:
        """End it with SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)


def _read_line(file: int) -> bytes:
    """Read a line from a pipe, and no byte more."""
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(file, 1)
    return line


@functools.cache
def _start_server(modules: tuple[str, ...]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start the process that forks; it ends when the socket closes, at the latest with this one."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__, str(there.fileno()), *modules],
        pass_fds=[there.fileno()],
        env=environ,
        stdin=subprocess.DEVNULL,
    )
    there.close()
    return here, process


def start_forked(
    path: Path,
    environ: Mapping[str, str],
    words: Sequence[str] = (),
    folder: Path | None = None,
    modules: tuple[str, ...] = TORCH_MODULES,
) -> ForkedScript:
    """
    Run a script with an environment and arguments, in a folder (its own by default).

    Args:
        modules: what has been imported before the fork.
    """
    return ForkedScript(_start_server(modules)[0], path, environ, words, folder or path.parent)


def _serve(server: socket.socket) -> dict[str, Any]:
    """Fork a process for each request; return the request in that process only."""
    while True:
        data, files, _, _ = socket.recv_fds(server, MAX_REQUEST_BYTES, 3)
        if not data:
            sys.exit(0)
        if os.fork() == 0:
            server.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            out, err, status = files
            pid = os.fork()
            if pid == 0:
                os.dup2(out, 1)
                os.dup2(err, 2)
                for file in files:
                    os.close(file)
                request: dict[str, Any] = json.loads(data)
                return request
            for file in (out, err):
                os.close(file)
            os.write(status, f"{pid}\n".encode())
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(status, str(code).encode())
            os._exit(0)
        for file in files:
            os.close(file)


def _become(request: dict[str, Any]) -> None:
    """Be the interpreter of a script: its environment, folder, path and main module."""
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    sys.argv = request["argv"]
    path = sys.argv[0]
    sys.path[0] = str(Path(path).parent)
    main = types.ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    code = compile(Path(path).read_bytes(), path, "exec")
    exec(code, vars(main))  # noqa: S102


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # of the processes that wait for scripts
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
