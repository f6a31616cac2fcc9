"""
The message of a failed container of Kubernetes: ``kubectl describe pod`` shows this file.

It is /dev/termination-log inside of Kubernetes, or the file that PDRUN_TERMINATION_LOG names. It is
written once per job and node, and only for a failure.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping

from pdrun.topology import is_in_kubernetes

LOG_VARIABLE = "PDRUN_TERMINATION_LOG"
DEFAULT_PATH = "/dev/termination-log"
MAX_MESSAGE_BYTES = 4096
"""Kubernetes reads no more."""


def termination_log_path(environ: Mapping[str, str]) -> str:
    """Return the file to write; empty outside of Kubernetes."""
    if path := environ.get(LOG_VARIABLE, ""):
        return path
    return DEFAULT_PATH if is_in_kubernetes(environ) else ""


def write_termination_log(lines: Iterable[str], environ: Mapping[str, str] | None = None) -> str:
    """
    Write the reason why this container fails; return why it could not be written, or empty.

    The default file exists if Kubernetes wants a message. It is never created.
    """
    environ = os.environ if environ is None else environ
    path = termination_log_path(environ)
    if not path:
        return ""
    is_named = LOG_VARIABLE in environ
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | (os.O_CREAT if is_named else 0), 0o644)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return f"{LOG_VARIABLE}: {path} is not a regular file" if is_named else ""
            os.ftruncate(fd, 0)
            os.write(fd, _fit_message("\n".join(lines)))
        finally:
            os.close(fd)
    except OSError as error:
        return f"{LOG_VARIABLE}: {path} cannot be written: {error.strerror}" if is_named else ""
    return ""


def _fit_message(text: str) -> bytes:
    """Return at most MAX_MESSAGE_BYTES: the start, which has the cause, without a cut character."""
    data = text.encode("utf-8", "replace")
    if len(data) <= MAX_MESSAGE_BYTES:
        return data
    return data[:MAX_MESSAGE_BYTES].decode("utf-8", "ignore").encode()
