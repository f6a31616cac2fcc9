"""
The command line's outermost layer: one call in, one exit code out, one line for every mistake.

    a PdrunError, a click error    ``pdrun: error: WHERE: WHAT; HINT`` and its code (2, 69, 77, 78 ...)
    Ctrl-C                         130
    stdout takes nothing           one line, 74
    anything else                  a fault of pdrun: one line, the traceback in a file, 70

The commands themselves are in `cli_run` (the default) and `cli_commands`; what they print first is
in `cli_help`.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pdrun import process_setup as early
from pdrun.sys_path import standard_library_first

if TYPE_CHECKING:
    from pdrun.eventlog import JobStatus


EXIT_OUTPUT = 74
"""EX_IOERR of sysexits.h: what was asked for could not be printed."""
_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main(argv: Sequence[str]) -> int:
    """
    Run the command line ``argv`` (without the program's name) and return the exit code.

    Never raises and never prints a traceback of pdrun's own.
    """
    standard_library_first(sys.path)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # as on stderr: arguments and names may be any bytes
    try:
        return _run(list(argv))
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except BrokenPipeError:
        # the reader of our output went away (pdrun --help | head)
        _drop_output()
        return 141
    except Exception as error:
        return fault(error)


def _run(argv: list[str]) -> int:
    import click

    from pdrun.errors import PdrunError
    from pdrun.launcher.cli.commands import build

    commands = build(_show, _watch)
    if "_PDRUN_COMPLETE" in os.environ:  # the shell asks, by way of `pdrun completion`
        commands.main(argv, prog_name="pdrun", standalone_mode=False)
    try:
        # not click's own main(): it turns Ctrl-C and a closed pipe into exits of its own
        with commands.make_context("pdrun", argv) as context:
            code = commands.invoke(context)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as exit:
        return exit.exit_code
    except PdrunError as error:
        _say(f"error: {error}")
        return error.exit_code
    except click.ClickException as error:
        _say(f"error: {_plain(error)}")
        return 2


def _show(statuses: list[JobStatus]) -> None:
    from pdrun.ui.status import show

    show(statuses)


def _watch(read: Callable[[], Sequence[JobStatus]]) -> int:
    from pdrun.ui.live import follow

    early.give_back()  # a screen must be left as it was found
    return follow(read)


def _plain(error: Any) -> str:
    """
    Return a complaint of click in our own style: one line, lower case, with a hint where there is
    one.
    """
    import click

    from pdrun.errors import did_you_mean

    if isinstance(error, click.NoSuchOption):
        name = error.option_name
        command = error.ctx.command if error.ctx else None
        known = [spelling for param in command.params for spelling in param.opts] if command else []
        hint = did_you_mean(name, known) or "see pdrun --help; options of the script stand after it"
        return f"no such option {name}; {hint}"
    text = " ".join(error.format_message().split()).rstrip(".")
    return text[:1].lower() + text[1:]


def _say(text: str) -> None:
    from pdrun import async_writer as lane

    lane.say(text)  # should nobody listen, the exit code still tells
    lane.flush()


def _drop_output() -> None:
    """Keep the interpreter's last flush quiet: what stdout still holds goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fault(error: Exception) -> int:
    """
    Report an error that nobody has foreseen, and return the exit code.

    A disk or a terminal that takes nothing, and a limit of open files or of processes, are the
    machine's; the rest is a fault of pdrun itself, whose traceback is for whoever mends it, not for
    the user's terminal.
    """
    import tempfile
    import traceback

    if limit := early.explained(error, "pdrun", early.FEWEST_FILES):
        _say(f"error: {limit}")
        return limit.exit_code
    if isinstance(error, OSError) and error.errno in _UNWRITTEN and error.filename is None:
        _drop_output()
        _say(
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
    _say(f"error: a fault of pdrun itself, not of your job ({what}); {where}")
    return 70
