"""
Entry point of the command line: arguments in, exit code out, one line per error.

    a PdrunError, a click error    ``pdrun: error: WHERE: WHAT; HINT``, its code (2, 69, 77, 78 ...)
    Ctrl-C                         130
    stdout cannot be written       one line, 74
    any other exception            a bug of pdrun: one line, the traceback in a file, 70

The commands are in `pdrun.launcher.cli.commands`.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from pdrun.launcher.common.exit import discard_output, print_message, report_fault
from pdrun.sys_path import put_standard_library_first


def main(argv: Sequence[str]) -> int:
    """
    Run the command line ``argv`` (without the program's name) and return the exit code.

    Raises nothing and prints no traceback of pdrun's own code.
    """
    put_standard_library_first(sys.path)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # Arguments and names may hold any bytes. Python escapes them on stderr by default.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _run_command(list(argv))
    except KeyboardInterrupt:
        print_message("interrupted")
        return 130
    except BrokenPipeError:
        # the reader of stdout has exited (pdrun --help | head)
        discard_output()
        return 141
    except Exception as error:
        return report_fault(error)


def _run_command(argv: list[str]) -> int:
    import click

    from pdrun.errors import PdrunError
    from pdrun.launcher.cli.commands import build_command_line

    commands = build_command_line()
    if "_PDRUN_COMPLETE" in os.environ:  # set by the shell function of `pdrun completion`
        commands.main(argv, prog_name="pdrun", standalone_mode=False)
    try:
        # click's own main() would turn Ctrl-C and a closed pipe into its own exits
        with commands.make_context("pdrun", argv) as context:
            code = commands.invoke(context)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as exit:
        return exit.exit_code
    except PdrunError as error:
        print_message(f"error: {error}")
        return error.exit_code
    except click.ClickException as error:
        print_message(f"error: {_format_click_error(error)}")
        return 2


def _format_click_error(error: Any) -> str:
    """Return an error of click in pdrun's style: one line, lower case, with a hint."""
    import click

    from pdrun.errors import did_you_mean

    if isinstance(error, click.NoSuchOption):
        name = error.option_name
        command = error.ctx.command if error.ctx else None
        known = [spelling for param in command.params for spelling in param.opts] if command else []
        hint = did_you_mean(name, known)
        if not hint:
            hint = "see pdrun --help; options of the script go after it"
        return f"no such option {name}; {hint}"
    text = " ".join(error.format_message().split()).rstrip(".")
    return text[:1].lower() + text[1:]
