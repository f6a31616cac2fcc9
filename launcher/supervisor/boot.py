"""
Start a supervisor, and lay out the commands that it and the fork server read.

`pdrun.launcher.launch.prestart` imports this module first, so it imports nothing
that takes time.
"""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable, Mapping, Sequence

_STDLIB_ONLY = f"{os.path.realpath(__file__).rpartition('/supervisor/')[0]}/stdlib_only"
SUPERVISOR_FILE = f"{_STDLIB_ONLY}/supervisor.py"
FORK_SERVER_FILE = f"{_STDLIB_ONLY}/fork_server.py"
BASE_MODULES = ("torch", "torch.distributed")
OPTIMIZER_MODULES = ("torch._dynamo",)
"""Imported when the first optimizer is constructed. It takes as long as torch itself."""
BOOT_CODE = (
    "import sys; sys.path.append(sys.argv.pop(1).rpartition('/')[0]);"
    " import supervisor; supervisor.main(sys.argv)"
)
"""Imports supervisor.py as a module. A file that is run is compiled each time (20 ms)."""


class Prestart:
    """
    A supervisor that was started before the command line was parsed.

    ``command`` is what its fork server runs: argv, environment, working directory.
    """

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.socket = connection
        self.command: tuple[list[str], dict[str, str], str] | None = None


def start_supervisor(python: str) -> tuple[int, socket.socket]:
    """
    Start a supervisor as a child in a new session; return its pid and the socket to it.

    Raises:
        OSError: it could not be started.
    """
    import socket  # the plan imports this module, and a dry run needs no socket

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    flags = ["-I", "-S"]
    if sys.dont_write_bytecode:
        flags.append("-B")
    token = os.urandom(8).hex()
    argv = [python, *flags, "-c", BOOT_CODE, SUPERVISOR_FILE, str(theirs.fileno()), token]
    try:
        theirs.set_inheritable(True)
        return os.posix_spawn(python, argv, os.environ, setsigmask=[], setsid=True), ours
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()


def write_command(
    argv: Iterable[str],
    env: Mapping[str, str],
    cwd: str,
    cpus: Iterable[int],
    nofile: tuple[int, int] | None,
) -> int:
    """
    Write a command into an anonymous file for the supervisor; return the descriptor.

    A file is used because an environment may be larger than any packet. Text is written as the
    bytes from which this process decoded it, independent of the locale.

    Args:
        nofile: the user's own limit of open files, (soft, hard); None: the limit of this process.
    """
    body = json.dumps(
        {
            "argv": [_to_utf8(word) for word in argv],
            "env": {_to_utf8(name): _to_utf8(value) for name, value in env.items()},
            "cwd": _to_utf8(cwd),
            "cpus": list(cpus),
            "nofile": nofile,
        }
    ).encode()
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("pdrun-command", os.MFD_CLOEXEC)
    else:
        import tempfile

        number, path = tempfile.mkstemp()
        os.remove(path)  # noqa: PTH107
    view = memoryview(body)
    while view:
        view = view[os.write(number, view) :]
    return number


def _to_utf8(text: str) -> str:
    return os.fsencode(text).decode("utf-8", "surrogateescape")


def fork_server_argv(
    python: str, modules: Sequence[str], worker: Sequence[str], flags: Sequence[str] = ()
) -> list[str]:
    """
    Return the command line of a fork server, padded to the length of a worker's.

    A forked worker overwrites it with its own command line.
    """
    argv = [python, *flags, FORK_SERVER_FILE, ",".join(modules)]
    return [*argv, "-" * max(0, _text_bytes(worker) - _text_bytes(argv) - 1)]


def _text_bytes(words: Sequence[str]) -> int:
    return sum(len(word.encode("utf-8", "surrogateescape")) + 1 for word in words)
