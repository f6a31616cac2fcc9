"""
Which worker reads the standard input of pdrun, and the terminal that it may be.

A file or a pipe is for rank 0. A terminal is for the only worker of a job, for the only rank that
``--show-ranks`` shows, or for the rank of ``--stdin``. Workers are in other sessions than the
terminal. Therefore Ctrl-C and Ctrl-Z reach pdrun only, and the kernel lets a worker read although
the job is in the background. So a job that starts in the background gets no terminal.
"""

from __future__ import annotations

import os
from typing import Any

from pdrun.launcher.common.rank_lists import RankSet


class StandardInput:
    """Descriptor 0 of pdrun, for one worker."""

    def __init__(self) -> None:
        self.fd = 0
        self.is_terminal = os.isatty(self.fd)
        self._terminal_state: list[Any] | None = None

    def choose_rank(self, wanted: int | None, show_ranks: str, world_size: int) -> int | None:
        """
        Return the rank that reads it, or None.

        Args:
            wanted: rank of ``--stdin``; None: not given.
            show_ranks: ranks that the terminal shows.
            world_size: number of workers of the job.
        """
        if wanted is not None:
            return wanted
        if not self.is_terminal or world_size == 1:
            return 0
        shown = RankSet(show_ranks)
        ranks = [rank for rank in range(world_size) if rank in shown]
        return ranks[0] if len(ranks) == 1 else None

    def is_readable(self) -> bool:
        """Return whether a worker may read now: not the terminal of a job in the background."""
        if not self.is_terminal:
            return True
        try:
            return os.tcgetpgrp(self.fd) == os.getpgrp()
        except OSError:
            return True  # not the terminal of this session: no shell here reads it

    def save_terminal(self) -> None:
        """Remember the state of the terminal."""
        if self.is_terminal and self._terminal_state is None:
            import termios

            self._terminal_state = termios.tcgetattr(self.fd)

    def restore_terminal(self) -> None:
        """
        Restore the state of the terminal.

        A worker that was killed may have switched the echo off.
        """
        if self._terminal_state is None or not self.is_readable():
            return
        import termios

        try:
            if termios.tcgetattr(self.fd) != self._terminal_state:
                termios.tcsetattr(self.fd, termios.TCSADRAIN, self._terminal_state)
        except termios.error:
            pass  # the terminal is gone
