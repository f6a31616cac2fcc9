"""
``pdrun token create`` and ``pdrun token show``.

A token is the job's secret. It is written only to the named file, or to stdout if requested.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import click

from pdrun.errors import UsageError
from pdrun.launcher.cli.options import CONTEXT_SETTINGS
from pdrun.rendezvous.protocol.security import Secret, find_secret, format_token


def token_group() -> click.Group:
    """Return ``pdrun token``."""

    def create(file: str) -> int:
        return create_token(file)

    def show(token_file: str) -> int:
        return show_token(token_file)

    group = click.Group(
        "token",
        help="The secret that admits nodes to a job.",
        context_settings=dict(CONTEXT_SETTINGS),
    )
    group.add_command(
        click.Command(
            "create",
            callback=create,
            help="Write a new token to FILE (mode 0600), or print it.",
            params=[click.Argument(["file"], required=False, default="", metavar="[FILE]")],
        )
    )
    group.add_command(
        click.Command(
            "show",
            callback=show,
            help="Print the token in use on this machine.",
            params=[
                click.Option(
                    ["--token-file"],
                    metavar="FILE",
                    default="",
                    help="Print the token of this file.",
                )
            ],
        )
    )
    return group


def create_token(path: str = "") -> int:
    """Write a new token to a new file of mode 0600, or to stdout if ``path`` is empty."""
    text = format_token(Secret.random()) + "\n"
    if not path:
        sys.stdout.write(text)
        return 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except FileExistsError:
        raise UsageError(
            "exists already", where=path, hint="a token is never overwritten; remove the file first"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot be created: {reason}", where=path) from None
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)  # some file systems report a full disk only here
    except OSError as error:
        with suppress(OSError):
            Path(path).unlink()
        raise UsageError(f"cannot be written: {error.strerror}", where=path) from None
    print(f"pdrun: token written to {path}; pass it to every node by --token-file", file=sys.stderr)
    return 0


def show_token(token_file: str = "") -> int:
    """Print the token in use on stdout, and its source on stderr."""
    secret, source = find_secret(token_file)
    print(f"pdrun: from {source}", file=sys.stderr, flush=True)
    sys.stdout.write(format_token(secret) + "\n")
    return 0
