"""Error messages and exit codes that every entry point of pdrun shares."""

from __future__ import annotations

import errno
import os
import sys

from pdrun import process_setup

EXIT_OUTPUT = 74
"""EX_IOERR of sysexits.h: what was asked for could not be printed."""
_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def fault(error: Exception) -> int:
    """
    Report an error that nobody has foreseen, and return the exit code.

    A disk or a terminal that takes nothing, and a limit of open files or of processes, are the
    machine's; the rest is a fault of pdrun itself, whose traceback is for whoever mends it, not for
    the user's terminal.
    """
    import tempfile
    import traceback

    if limit := process_setup.resource_limit_error(error, "pdrun", process_setup.MIN_DESCRIPTORS):
        say(f"error: {limit}")
        return limit.exit_code
    if isinstance(error, OSError) and error.errno in _UNWRITTEN and error.filename is None:
        drop_output()
        say(
            f"error: the output could not be written: {error.strerror} ({errno.errorcode[error.errno]})"
        )
        return EXIT_OUTPUT
    text = "".join(traceback.format_exception(error))
    try:
        fd, path = tempfile.mkstemp(prefix="pdrun-fault-", suffix=".txt")
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        where = f"the traceback is in {path}"
    except OSError:
        sys.stderr.write(text)
        where = "the traceback stands above"
    what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    say(f"error: a fault of pdrun itself, not of your job ({what}); {where}")
    return 70


def say(text: str) -> None:
    from pdrun import async_writer

    async_writer.write_message(text)  # should nobody listen, the exit code still tells
    async_writer.flush_messages()


def drop_output() -> None:
    """Keep the interpreter's last flush quiet: what stdout still holds goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
