"""Values of ``--launcher``."""

from __future__ import annotations

from pdrun.errors import UsageError, did_you_mean

START_LAUNCHERS: tuple[str, ...] = ("ssh", "mpirun", "srun")
"""Programs that start the agents. The other values select the launcher whose variables are read."""


def check_launcher(text: str, where: str) -> str:
    """Return the value if it is known; otherwise raise UsageError."""
    from pdrun.launcher.adapters.detect import LAUNCHER_NAMES

    known = ("auto", "none", *START_LAUNCHERS, *LAUNCHER_NAMES)
    if text in known:
        return text
    raise UsageError(
        f"unknown launcher {text!r}",
        where=where,
        hint=did_you_mean(text, known) or f"known: {', '.join(known)}",
    )
