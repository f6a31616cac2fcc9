"""
An uncaught error of pdrun is one line and its exit code, not a traceback through pdrun.

The exception can still be caught. If it is not caught, the interpreter's hook prints ``pdrun:
error: WHERE: WHAT; HINT`` and exits with the error's code (78, 69, 77). A hook that is not Python's
own, and an interactive prompt, are left unchanged. It is installed when a program first uses a name
of the runtime (`pdrun.rows`), or calls `init`.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from pdrun.errors import PdrunError


def install_excepthook() -> None:
    """Make uncaught errors of pdrun end the process that way; a second call changes nothing."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_error


def _print_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> Any:
    if not isinstance(error, PdrunError):
        return sys.__excepthook__(kind, error, trace)
    # torch's hook calls this one with a buffer in place of stderr, and drops it if a hook raises
    print(f"pdrun: error: {error}", file=sys.__stderr__ or sys.stderr, flush=True)
    if not (hasattr(sys, "ps1") or sys.flags.interactive):
        # the interpreter takes the exit code from a hook that raises SystemExit
        raise SystemExit(error.exit_code)
    return None
