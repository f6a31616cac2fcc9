"""
How a keeper is started, and how a command is laid before it. Nothing here takes time to import:
`ahead` needs it first.
"""

from __future__ import annotations

import json
import os
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

KEEPER = f"{os.path.realpath(__file__).rpartition('/supervisor/')[0]}/stdlib_only/supervisor.py"
BOOT = "import sys; sys.path.append(sys.argv.pop(1).rpartition('/')[0]); import supervisor; supervisor.main(sys.argv)"
"""Loads supervisor.py as a module: a file that is run is compiled each time (20 ms)."""


def start_keeper(python: str) -> tuple[int, socket.socket]:
    """
    Start a keeper as a child in a session of its own; return its pid and the socket to it.

    Raises:
        OSError: that is not possible.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    flags = ["-I", "-S", *(["-B"] if sys.dont_write_bytecode else [])]
    argv = [python, *flags, "-c", BOOT, KEEPER, str(theirs.fileno()), os.urandom(8).hex()]
    try:
        theirs.set_inheritable(True)
        return os.posix_spawn(python, argv, os.environ, setsigmask=[], setsid=True), ours
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()


def lay(
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
            "argv": [_portable(word) for word in argv],
            "env": {_portable(name): _portable(value) for name, value in env.items()},
            "cwd": _portable(cwd),
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


def _portable(text: str) -> str:
    return os.fsencode(text).decode("utf-8", "surrogateescape")
