"""
Barriers of a save or load, through torch's store and without collectives.

A save can therefore wait in a thread while the next steps compute. An error of one rank is raised
on every rank.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from pdrun.errors import ConfigError, DeadlineExceeded, PdrunError

POLL_SECONDS = 0.02
_count = itertools.count()
"""Barriers of this process so far; every rank makes the same ones."""


class RankBarrier:
    """
    The phases that each rank has reached in one save or load.

    Args:
        world: ranks of the job.
        rank: this one.
        what: "save" or "load".
        timeout: seconds to wait for a rank.
    """

    def __init__(self, world: int, rank: int, what: str, timeout: float) -> None:
        self._store: Any = dist.distributed_c10d._get_default_store() if world > 1 else None
        self._rank = rank
        self._name = f"pdrun/{what}/{next(_count)}"
        self._timeout = timeout
        self._world = world
        self._where = f"pdrun.Run.{what}"
        self._own: dict[str, str] = {}

    def report(self, phase: str, error: str) -> None:
        """
        Publish that this rank has ended a phase.

        Args:
            error: what went wrong; empty if nothing did.
        """
        self._own[phase] = error
        if self._store is not None:
            self._store.set(f"{self._name}/{phase}/{self._rank}", error or "done")

    def wait_for(self, phase: str, ranks: Iterable[int]) -> None:
        """
        Wait until ranks have ended a phase.

        Raises:
            ConfigError: one of them had an error.
            DeadlineExceeded: one of them did not end the phase in time.
        """
        end = time.monotonic() + self._timeout
        for rank in ranks:
            if rank == self._rank:
                error = self._own.get(phase)
            else:
                error = self._ask(phase, rank, end)
            if error not in ("", "done", None):
                text = error if "rank " in str(error) else f"rank {rank}: {error}"
                raise ConfigError(str(text), where=self._where)

    def finish(self, phase: str, then: Callable[[], Any] = lambda: None) -> None:
        """
        Wait until all ranks have ended a phase and rank 0 has called ``then``.

        Raises:
            ConfigError: a rank had an error, on every rank.
        """
        if self._rank == 0:
            error = error_of(lambda: self.wait_for(phase, range(self._world))) or error_of(then)
            self.report("end", error)
        self.wait_for("end", [0])

    def _ask(self, phase: str, rank: int, end: float) -> str:
        key = f"{self._name}/{phase}/{rank}"
        while not self._store.check([key]):
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"rank {rank} did not arrive within {self._timeout:g} s", where=self._where
                )
            time.sleep(POLL_SECONDS)
        return str(self._store.get(key).decode())


def error_of(call: Callable[[], Any]) -> str:
    """Call a function; return the text of its error, empty if there was none."""
    try:
        call()
    except (OSError, PdrunError) as error:
        return str(error) or type(error).__name__
    return ""
