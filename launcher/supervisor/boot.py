"""
How a keeper is started, and how a command is laid before it. Nothing here takes time to import:
`ahead` needs it first.
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
"""What the construction of a first optimizer imports, as dear as torch itself."""
BOOT_CODE = "import sys; sys.path.append(sys.argv.pop(1).rpartition('/')[0]); import supervisor; supervisor.main(sys.argv)"
"""Loads supervisor.py as a module: a file that is run is compiled each time (20 ms)."""


class Prestart:
    """
    A keeper that was started beforehand; ``command`` is what its starter runs: words, environment,
    folder.
    """

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.socket = connection
        self.command: tuple[list[str], dict[str, str], str] | None = None


def start_supervisor(python: str) -> tuple[int, socket.socket]:
    """
    Start a keeper as a child in a session of its own; return its pid and the socket to it.

    Raises:
        OSError: that is not possible.
    """
    import socket  # the plan imports this module, and a dry run needs no socket

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    flags = ["-I", "-S", *(["-B"] if sys.dont_write_bytecode else [])]
    argv = [
        python,
        *flags,
        "-c",
        BOOT_CODE,
        SUPERVISOR_FILE,
        str(theirs.fileno()),
        os.urandom(8).hex(),
    ]
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
    Lay a command into an anonymous file, for the keeper; return its descriptor.

    An environment may be larger than any packet. Text goes as the bytes that this process got it
    from, whatever its locale is. ``nofile``: the user's own limit of open files, soft and hard;
    None: this process's.
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
    Return a starter's command line, as long as a worker's, so that it can carry that one's words
    later.
    """
    argv = [
        python,
        *flags,
        FORK_SERVER_FILE,
        ",".join(modules),
    ]
    return [*argv, "-" * max(0, _text_bytes(worker) - _text_bytes(argv) - 1)]


def _text_bytes(words: Sequence[str]) -> int:
    return sum(len(word.encode("utf-8", "surrogateescape")) + 1 for word in words)
