"""
``pdrun token create`` and ``pdrun token show``. A token is the secret itself: it goes only where it
was asked to.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from pdrun.errors import UsageError
from pdrun.rendezvous.protocol.security import Secret, find_secret, token_text


def create(path: str = "") -> int:
    """Make a fresh token: into a new file of mode 0600, or on stdout where no file is named."""
    text = token_text(Secret.random()) + "\n"
    if not path:
        sys.stdout.write(text)
        return 0
    try:
        fd = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
    except FileExistsError:
        raise UsageError(
            "is there already", where=path, hint="a token is never overwritten; remove it first"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot be made: {reason}", where=path) from None
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)  # a full disk may say so only now
    except OSError as error:
        with suppress(OSError):
            Path(path).unlink()
        raise UsageError(f"cannot be written: {error.strerror}", where=path) from None
    print(
        f"pdrun: token written to {path}; give it to every node with --token-file", file=sys.stderr
    )
    return 0


def show(token_file: str = "") -> int:
    """Print the token in use here, on stdout, and where it came from, on stderr."""
    secret, source = find_secret(token_file)
    print(f"pdrun: from {source}", file=sys.stderr, flush=True)
    sys.stdout.write(token_text(secret) + "\n")
    return 0
