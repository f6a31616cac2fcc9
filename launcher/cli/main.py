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

import pdrun
from pdrun.launcher.common.exit import discard_output, print_message, report_fault

OTHER_MEANING = {"--join": "msrun", "--include": "deepspeed", "--exclude": "deepspeed"}
"""
Options that other launchers have too, and the one whose users give them. An error has pdrun's line.
"""
JOB_COMMANDS = ("run", "join", "scheduler")
"""
Commands that a container runs, so that their error is why it ended. Others look at its job, as
``kubectl exec POD -- pdrun status``.
"""


def main(argv: Sequence[str]) -> int:
    """
    Run the command line ``argv`` (without the program's name) and return the exit code.

    Raises nothing and prints no traceback of pdrun's own code.
    """
    pdrun.put_standard_library_first(sys.path)
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
    context: click.Context | None = None
    try:
        # click's own main() would turn Ctrl-C and a closed pipe into its own exits
        with commands.make_context("pdrun", argv) as context:
            code = commands.invoke(context)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as exit:
        return exit.exit_code
    except PdrunError as error:
        launcher = OTHER_MEANING.get(error.where)
        hint = _translate_for_hint(argv, (launcher,)) if launcher else ""
        print_message(f"error: {error}{hint}")
        if context is not None and context.invoked_subcommand in JOB_COMMANDS:
            _report_termination(f"pdrun: error: {error}{hint}")
        return error.exit_code
    except click.ClickException as error:
        print_message(f"error: {_format_click_error(error, argv)}")
        return 2


def _report_termination(text: str) -> None:
    """Write an error that ends this process where Kubernetes reads it."""
    from pdrun.launcher.common.termination_log import write_termination_log

    if fault := write_termination_log([text]):
        print_message(fault)


def _format_click_error(error: Any, argv: Sequence[str]) -> str:
    """Return an error of click in pdrun's style: one line, lower case, with a hint."""
    import click

    if isinstance(error, click.NoSuchOption):
        name = _find_typed_name(error.option_name, argv)
        command = error.ctx.command if error.ctx else None
        if command is not None and command.name == "mpirun":
            line = _translate_for_hint(argv[1:], ("mpirun",))
            return f"no such option {name} of pdrun mpirun{line or '; see pdrun mpirun --help'}"
        if command is None or command.name != "run":
            return f"no such option {name}; {_hint_at_names(name, command)}"
        line = _translate_for_hint(argv, ())
        # in the line itself it is taken for an option of the script: it is of no launcher
        if name in line.partition(" (")[0].split():
            line = ""
        return f"no such option {name}{line or '; ' + _hint_at_names(name, command)}"
    text = " ".join(error.format_message().split()).rstrip(".")
    return text[:1].lower() + text[1:]


def _find_typed_name(option: str, argv: Sequence[str]) -> str:
    """Return the option as typed: click names only ``-n`` of ``-np``."""
    if option.startswith("--"):
        return option
    names = (word.partition("=")[0] for word in argv if word.startswith("-"))
    return next((name for name in names if name.startswith(option)), option)


def _hint_at_names(name: str, command: Any) -> str:
    """Return a hint at the options that resemble a name; those of torchrun under pdrun's name."""
    from pdrun.launcher.cli.help import own_names
    from pdrun.launcher.common.name_distance import similar_names

    known = [spelling for param in command.params for spelling in param.opts] if command else []
    own = own_names() if command is not None and command.name == "run" else {}
    names: dict[str, str] = {}
    for found in similar_names(name, (text for text in known if text.startswith("--"))):
        first = own.get(found, found)
        is_spelling = first.replace("-", "_") == found.replace("-", "_")
        names.setdefault(first, "" if is_spelling else f" ({found})")
    if not names:
        return "see pdrun --help; options of the script go after it"
    texts = [f"'{found}'{more}" for found, more in names.items()]
    return f"did you mean {' or '.join(texts)}?"


def _translate_for_hint(argv: Sequence[str], launchers: Sequence[str]) -> str:
    """
    Return pdrun's line for options of another launcher, as the end of a message; empty: none fits.

    Args:
        argv: the command line.
        launchers: which launchers to try; empty: those whose options pdrun does not have.
    """
    from pdrun.errors import PdrunError
    from pdrun.launcher.cli.run import check_translation
    from pdrun.launcher.translate.command_line import translate_options

    words = list(argv)
    if words[:1] == ["run"]:
        words = words[1:]
    try:
        found = translate_options(words, os.environ, check_translation, launchers)
    except PdrunError as error:
        return "" if launchers else f"; it is one of another launcher: {error}"
    if found is None:
        return ""
    return f"; as options of {found.launcher}, this line does it: {found.format_hint()}"
