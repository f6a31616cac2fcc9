"""
Worlds of real processes, started once and used by many tests: a process that has imported torch
forks the workers, and each runs the functions that it is sent. A world in which something went
wrong is thrown away; the next test gets a new one.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

BOUND = 60.0
"""Seconds after which a call counts as hung."""

PRELOADED = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch._dynamo.backends.debugging",
    "torch._inductor.compile_fx",
    "torch.export._trace",
    "pytest",
    "tests.lib.compositions",
    "tests.lib.pipeline_cases",
]
"""What is imported once, in the process that forks, instead of once in each rank that wants it."""


def _serve(rank: int, world: int, store: str, link: Connection) -> None:
    """Be one rank: run what comes, answer with the result or the traceback."""
    for name in [
        name
        for name in os.environ
        if name.startswith(("PDRUN_", "MS_", "TORCHELASTIC_", "GROUP_", "ROLE_"))
    ]:
        del os.environ[name]
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        GLOO_SOCKET_IFNAME="lo",
    )
    # A rank that is woken waits its turn. Else each message between ranks interrupts its sender,
    # and a collective of four ranks on two cores costs twice the CPU.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    import torch

    from pdrun.parallel import torch_compat
    from pdrun.parallel.parallelize import parallelize

    parallelize.__kwdefaults__["timeout"] = (
        30.0  # a hang names the ranks before the test's own bound
    )
    torch.set_num_threads(1)
    gc.freeze()  # what is there now is not looked at again by each collection
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world
    )
    while True:
        try:
            module, name, args, kwargs = link.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = (True, getattr(importlib.import_module(module), name)(*args, **kwargs))
        except BaseException as error:
            answer = (False, (type(error).__name__, str(error), traceback.format_exc()))
        gc.collect()  # runs hold themselves in circles
        torch_compat.destroy_unused_groups()
        link.send(answer)


REFUSALS = ("UsageError", "ConfigError")
"""Errors that every rank of a sound world may raise: pdrun refuses before it communicates."""
PROBE_SECONDS = 5.0


def _meet() -> None:
    """Prove that all ranks still take part in the same collectives."""
    import torch.distributed

    torch.distributed.monitored_barrier(timeout=timedelta(seconds=PROBE_SECONDS))


class RankError(AssertionError):
    """A rank raised: ``kind`` and ``text`` of its error."""

    def __init__(self, rank: int, kind: str, text: str, trace: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {text}\n{trace}")
        self.rank, self.kind, self.text = rank, kind, text


class World:
    """``size`` processes with one process group."""

    def __init__(self, size: int, preloaded: Iterable[str] = ()) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, *preloaded])
        self.folder = tempfile.TemporaryDirectory(prefix="world")
        store = str(Path(self.folder.name) / "store")
        self.links, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, store, there), daemon=True)
            process.start()
            there.close()
            self.links.append(here)
            self.processes.append(process)
        self.broken = self.busy = False
        """Busy: a call's answers are still to come; a test that was cut off leaves its world so."""
        self.grace = 8.0
        """Seconds that the others have when one has failed."""

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Have every rank call a function of a module."""
        self.busy = True
        for link in self.links:
            link.send((function.__module__, function.__name__, args, kwargs))

    def answers(self, bound: float = BOUND, until: int | None = None) -> list[Any]:
        """
        Return (worked, result) of every rank; one that doesn't answer in time has (False, ("Hung",
        ...)).

        Args:
            until: end when this rank has answered, whatever the others do.
        """
        found: dict[int, Any] = {}
        end = time.monotonic() + bound
        while len(found) < len(self.links) and until not in found and time.monotonic() < end:
            waiting = {
                self.links[rank]: rank for rank in range(len(self.links)) if rank not in found
            }
            for link in wait(list(waiting), max(0.0, end - time.monotonic())):
                try:
                    found[waiting[link]] = link.recv()  # type: ignore[index, union-attr]
                except (EOFError, ConnectionError):
                    found[waiting[link]] = (False, ("Died", "the process is gone", ""))
                if not found[waiting[link]][0]:  # type: ignore[index]
                    end = min(end, time.monotonic() + self.grace)
        answers = [
            found.get(rank, (False, ("Hung", "did not answer", "")))
            for rank in range(len(self.links))
        ]
        self.busy = False
        if not all(worked for worked, _ in answers):
            self.broken = self.broken or not self._is_sound_after(answers)
        return answers

    def _is_sound_after(self, answers: list[Any]) -> bool:
        """Return whether all ranks refused what they were sent, and are ready for the next call."""
        if not all(not worked and told[0] in REFUSALS for worked, told in answers):
            return False
        self.broken = True  # until the ranks have met
        self.start(_meet)
        is_sound = all(worked for worked, _ in self.answers(2 * PROBE_SECONDS))
        self.broken = False
        return is_sound

    def run(
        self, function: Callable[..., Any], *args: Any, bound: float = BOUND, **kwargs: Any
    ) -> list[Any]:
        """Return what every rank returned, in order; raise RankError for the first that raised."""
        self.start(function, *args, **kwargs)
        found = self.answers(bound)
        for rank, (worked, told) in sorted(
            enumerate(found), key=lambda one: one[1][1][:1] == ("Hung",) if not one[1][0] else 0
        ):
            if not worked:
                raise RankError(rank, *told)
        return [told for _, told in found]

    def failures(
        self, function: Callable[..., Any], *args: Any, bound: float = BOUND, **kwargs: Any
    ) -> list[tuple[str, str]]:
        """Return (kind, text) of every rank's error, ("", "") where there was none."""
        self.start(function, *args, **kwargs)
        return [("", "") if worked else told[:2] for worked, told in self.answers(bound)]

    def failure(
        self, rank: int, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[str, str]:
        """Return (kind, text) of one rank's error; the others may wait for it for good."""
        self.start(function, *args, **kwargs)
        worked, told = self.answers(until=rank)[rank]
        self.broken = True
        return ("", "") if worked else told[:2]

    def close(self) -> None:
        """End the processes, those of a broken world at once: they may wait for each other."""
        for link in self.links:
            link.close()
        for process in self.processes:
            if self.broken or self.busy:
                process.kill()
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()


class Worlds:
    """
    One world of each size, made when it is first wanted.

    Args:
        preloaded: modules that ranks have imported beside `PRELOADED`; of a process, the first
            `Worlds` decides.
    """

    def __init__(self, preloaded: Iterable[str] = ()) -> None:
        self._made: dict[int, World] = {}
        self._preloaded = sorted(preloaded)

    def __call__(self, size: int) -> World:
        """Return a sound world."""
        made = self._made.get(size)
        if made is None or made.broken or made.busy:
            if made is not None:
                made.close()
            made = self._made[size] = World(size, self._preloaded)
        return made

    def close(self) -> None:
        """End all processes."""
        for world in self._made.values():
            world.close()
