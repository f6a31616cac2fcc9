"""``pdrun completion``: print, or install, the completion code of a shell and the manual page."""

from __future__ import annotations

import os
from pathlib import Path

import click

from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.cli.options import CONTEXT_SETTINGS
from pdrun.launcher.common import parsers

SHELLS = ("bash", "zsh", "fish")
MARK = "# pdrun completion"
STARTUP_FILES = {"bash": ".bashrc", "zsh": ".zshrc"}


def completion_command() -> click.Command:
    """Return ``pdrun completion``."""

    @click.pass_context
    def complete(ctx: click.Context, what: str, shell: str | None) -> int:
        kind = parsers.choice_parser(*SHELLS, "man", "install")(what, "completion")
        root = ctx.find_root().command
        if kind == "install":
            install_completion(root, shell)
        elif shell is not None:
            raise UsageError("takes one argument", where=f"completion {kind}")
        elif kind == "man":
            from pdrun.launcher.cli.inspect.manual import format_manual

            click.echo(format_manual(root), nl=False)
        else:
            click.echo(make_code(root, kind))
        return 0

    words = (*SHELLS, "man", "install")
    return click.Command(
        "completion",
        callback=complete,
        help=(
            "Print the completion code of a shell, or the manual page (man). install writes both"
            " for your shell, or for SHELL: it completes options, values, jobs, ranks and hosts."
        ),
        params=[
            click.Argument(
                ["what"],
                metavar="bash|zsh|fish|man|install",
                shell_complete=lambda ctx, param, text: [w for w in words if w.startswith(text)],
            ),
            click.Argument(
                ["shell"],
                required=False,
                metavar="[SHELL]",
                shell_complete=lambda ctx, param, text: [s for s in SHELLS if s.startswith(text)],
            ),
        ],
        context_settings=dict(CONTEXT_SETTINGS),
    )


def make_code(root: click.Command, shell: str) -> str:
    """Return the code of a shell that calls pdrun for completions."""
    from click.shell_completion import BashComplete

    from pdrun.launcher.cli.inspect.completion_code import FISH, ZSH

    if shell == "bash":
        return BashComplete(root, {}, "pdrun", "_PDRUN_COMPLETE").source()
    return {"zsh": ZSH, "fish": FISH}[shell]


def install_completion(root: click.Command, shell: str | None) -> None:
    """
    Write the completion code and the manual page to this user's folders.

    A second call changes nothing else than these files. For bash and zsh a line is added to the
    startup file, once.

    Raises:
        UsageError: the shell is not known.
        ConfigError: a file cannot be written.
    """
    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        hint = "use pdrun completion install bash, or zsh, or fish"
        raise UsageError(f"no completion for shell {name!r}", where="completion", hint=hint)
    from pdrun.launcher.cli.inspect.manual import format_manual

    home = Path.home()
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")
    if name == "fish":
        code = config / "fish/completions/pdrun.fish"
    else:
        code = config / f"pdrun/completion.{name}"
    _write_file(code, make_code(root, name) + "\n")
    _write_file(data / "man/man1/pdrun.1", format_manual(root))
    click.echo(f"written: {code} and {data / 'man/man1/pdrun.1'}")
    startup = STARTUP_FILES.get(name)
    if startup is not None:
        _add_line(home / startup, f'[ -r "{code}" ] && . "{code}"  {MARK}')
    click.echo(f"open a new {name} to use it")


def _write_file(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"cannot be written: {error.strerror}"
        raise ConfigError(what, where=str(path)) from None


def _add_line(path: Path, line: str) -> None:
    """Add a line to a startup file, unless it has one of pdrun."""
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape") if path.exists() else ""
        if MARK in text:
            return
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" * bool(text and not text.endswith("\n")) + line + "\n")
    except OSError as error:
        what = f"cannot be changed: {error.strerror}"
        raise ConfigError(what, where=str(path), hint=f"add this line to it: {line}") from None
    click.echo(f"a line was added to {path}")
