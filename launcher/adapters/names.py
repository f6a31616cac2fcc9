"""The words of ``--launcher``."""

from __future__ import annotations

from pdrun.errors import UsageError, did_you_mean

START_LAUNCHERS: tuple[str, ...] = ("ssh", "mpirun", "srun")
"""Those that choose who starts the nodes; the others choose whose variables are read."""


def check_launcher(text: str, where: str) -> str:
    """Return the word when it is one of them, else raise UsageError."""
    from pdrun.launcher.adapters.detect import LAUNCHER_NAMES

    known = ("auto", "none", *START_LAUNCHERS, *LAUNCHER_NAMES)
    if text in known:
        return text
    raise UsageError(
        f"{text!r} is no launcher",
        where=where,
        hint=did_you_mean(text, known) or f"there are {', '.join(known)}",
    )
