"""
A user's mistake that `init` finds is one line and its exit code, not a traceback through pdrun.

The exception stays one: whoever catches it gets it. Only where nobody does, the interpreter's hook
for it says ``pdrun: error: WHERE: WHAT; HINT`` and leaves with the error's code (78, 69, 77). A
hook that is not Python's own is left alone, and so is a prompt at which somebody types.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from pdrun.errors import PdrunError


def install_excepthook() -> None:
    """
    Have errors of pdrun that nobody catches end the process so; calling it again changes nothing.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_error


def _print_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> Any:
    if not isinstance(error, PdrunError):
        return sys.__excepthook__(kind, error, trace)
    # torch's hook calls this one with a buffer in place of stderr, which it drops when a hook
    # leaves
    print(f"pdrun: error: {error}", file=sys.__stderr__ or sys.stderr, flush=True)
    if not (hasattr(sys, "ps1") or sys.flags.interactive):
        raise SystemExit(
            error.exit_code
        )  # the interpreter takes the code from a hook that leaves so
    return None
