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

import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from pdrun.launcher.common.exit import drop_output, fault, say
from pdrun.sys_path import put_standard_library_first


def main(argv: Sequence[str]) -> int:
    """
    Run the command line ``argv`` (without the program's name) and return the exit code.

    Never raises and never prints a traceback of pdrun's own.
    """
    put_standard_library_first(sys.path)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # as on stderr: arguments and names may be any bytes
    try:
        return _run(list(argv))
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except BrokenPipeError:
        # the reader of our output went away (pdrun --help | head)
        drop_output()
        return 141
    except Exception as error:
        return fault(error)


def _run(argv: list[str]) -> int:
    import click

    from pdrun.errors import PdrunError
    from pdrun.launcher.cli.commands import build

    commands = build()
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
        say(f"error: {error}")
        return error.exit_code
    except click.ClickException as error:
        say(f"error: {_plain(error)}")
        return 2


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
