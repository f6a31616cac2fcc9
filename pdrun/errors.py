"""
The errors that pdrun raises, and their exit codes.

The type shows who must act. The text contains what is wrong, where, and what to do.

    PdrunError                 70  a fault of pdrun
    |-- UsageError              2  the command line is wrong
    |-- ConfigError            78  a file, an environment variable or a node's setup is wrong
    |-- RendezvousError        69  the nodes could not join, or the job could not be reached
    |-- AuthenticationError    77  the token differs
    |-- DeadlineExceeded      124  a time limit set by the user has passed
    |-- PeerLost               69  a collective cannot complete: another rank was lost
    `-- JobFailed               *  a worker failed: its own exit code, 128 + N for signal N

Codes follow sysexits.h, and the shell's 124 and 128 + N.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 69
EXIT_SOFTWARE = 70
EXIT_AUTHENTICATION = 77
EXIT_CONFIG = 78
EXIT_DEADLINE = 124


class PdrunError(Exception):
    """
    Base class of all errors. ``str(error)`` is one line: ``WHERE: WHAT; HINT``.

    Args:
        what: what is wrong, in lower case, without a full stop.
        where: ``file:line``, an option, a variable, a host or a rank; empty if ``what`` names it.
        hint: what to do; may be empty.
    """

    exit_code = EXIT_SOFTWARE

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}; {self.hint}" if self.hint else text


class UsageError(PdrunError):
    """The command line is wrong; the user must change the command."""

    exit_code = EXIT_USAGE


class ConfigError(PdrunError):
    """A file, an environment variable or the setup of a node is wrong; the user must change it."""

    exit_code = EXIT_CONFIG


class RendezvousError(PdrunError):
    """The nodes could not join, the scheduler was lost, or it refused this node."""

    exit_code = EXIT_UNAVAILABLE


class AuthenticationError(PdrunError):
    """This process and the scheduler have different tokens."""

    exit_code = EXIT_AUTHENTICATION


class DeadlineExceeded(PdrunError):
    """A time limit that the user set has passed."""

    exit_code = EXIT_DEADLINE


class PeerLost(PdrunError, RuntimeError):
    """
    A collective cannot complete, because another rank was lost. That rank's output shows why.

    A RuntimeError, as torch's own error is. That error is its ``__cause__``.
    """

    exit_code = EXIT_UNAVAILABLE
    SIGN = "another rank is gone"
    """Part of every message. The diagnosis recognises a victim by it."""


class JobFailed(PdrunError):
    """
    A worker failed. ``exit_code`` is that worker's own, ``128 + N`` for signal N.

    Attributes:
        rank: global rank of the first cause, or None when no worker had one (a node was lost).
        host: name of that rank's node.
        traceback: the traceback that the worker printed, or the empty string.
    """

    def __init__(
        self,
        what: str,
        *,
        exit_code: int,
        rank: int | None = None,
        host: str = "",
        traceback: str = "",
        hint: str = "",
    ) -> None:
        super().__init__(what, hint=hint)
        self.exit_code = exit_code
        self.rank = rank
        self.host = host
        self.traceback = traceback

    def __str__(self) -> str:
        text = super().__str__()
        return f"{text}\n{self.traceback.rstrip()}" if self.traceback else text


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``did you mean 'X'?`` for the most similar known text, or the empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean '{near[0]}'?" if near else ""
