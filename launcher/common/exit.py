"""Error messages and exit codes that every entry point of pdrun shares."""

from __future__ import annotations

import errno
import os
import sys

from pdrun import process_setup

EXIT_OUTPUT = 74
"""EX_IOERR of sysexits.h: the output could not be written."""
MAX_MESSAGE_CHARACTERS = 200
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def report_fault(error: Exception) -> int:
    """
    Report an unexpected error, and return the exit code.

    A limit of open files or processes, and output that cannot be written, are problems of the
    machine. Any other error is a bug of pdrun. Its traceback goes to a file, for its developers.
    """
    limit = process_setup.resource_limit_error(error, "pdrun", process_setup.MIN_DESCRIPTORS)
    if limit:
        print_message(f"error: {limit}")
        return limit.exit_code
    if isinstance(error, OSError) and error.errno in _WRITE_ERRORS and error.filename is None:
        discard_output()
        reason = f"{error.strerror} ({errno.errorcode[error.errno]})"
        print_message(f"error: the output could not be written: {reason}")
        return EXIT_OUTPUT
    where = _save_traceback(error)
    what = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_MESSAGE_CHARACTERS]
    print_message(f"error: a bug of pdrun, not of your job ({what}); {where}")
    return 70


def _save_traceback(error: Exception) -> str:
    """Write the traceback to a file, or to stderr; return the text that names the place."""
    import tempfile
    import traceback

    text = "".join(traceback.format_exception(error))
    try:
        fd, path = tempfile.mkstemp(prefix="pdrun-fault-", suffix=".txt")
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        sys.stderr.write(text)
        return "the traceback is printed above"
    return f"the traceback is in {path}"


def print_message(text: str) -> None:
    """Print a message on stderr; if stderr cannot be written, only the exit code remains."""
    from pdrun import async_writer

    async_writer.write_message(text)
    async_writer.flush_messages()


def discard_output() -> None:
    """Redirect stdout to /dev/null, so that the interpreter's last flush prints no error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
