"""
pdrun on the hosts of a bed: jobs, what their workers noted, what the scheduler logged, what is left
over.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pdrun import eventlog
from pdrun.launcher.stdlib_only.process_tree import find_process
from pdrun.rendezvous.protocol.security import Secret, format_token
from tests.chaos.cluster import Cluster
from tests.chaos.host import Host, words_of
from tests.chaos.processes import BedError, pid_of
from tests.e2e.conftest import Job, until

WORKER = str(Path(__file__).with_name("worker.py"))
PORT = 7777
LEFT_BEHIND = (
    *("PDRUN_", "MS_", "PET_", "XDG_", "PYTEST_", "SLURM_", "OMPI_"),
    *("GLOO_", "TP_SOCKET_", "NCCL_"),  # by a test in this process that called pdrun.init()
)
"""Beginnings of variables that a user of a simulated host does not have."""


class NodeJob(Job):
    """The pdrun command of one host."""

    host: Host
    _pid = 0

    @property
    def pid(self) -> int:
        """Machine-wide process id of the agent."""
        self._pid = self._pid or pid_of(self.process)
        return self._pid

    def signal(self, number: int) -> float:
        """Send a signal to the agent alone; return the time."""
        os.kill(self.pid, number)
        return time.monotonic()

    def resume(self) -> None:
        """Continue an agent that was stopped alone, and the command that entered its host."""
        self.signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGCONT)  # it stops with its child

    def scheduler(self) -> int:
        """Machine-wide pid of the scheduler process of this agent; 0: it has none."""
        found = (
            pid
            for pid, words in self.host.processes().items()
            if "pdrun.rendezvous.scheduler.child_main" in words
        )
        return next(found, 0)

    def supervisor(self) -> int:
        """Machine-wide pid of the parent of this agent's workers; 0: it has none."""
        for pid, words in self.host.processes().items():
            found = find_process(pid) if "supervisor.py" in words else None
            if found is not None and found.ppid == self.pid:  # not the watchdog, its child
                return pid
        return 0


@dataclass(frozen=True)
class Note:
    """One line that a worker noted; see `worker.py`."""

    what: str
    at: float
    wall: float
    host: str
    rank: int
    pid: int
    generation: int
    restarts: int
    world: int
    number: int = 0
    order: str = ""


@dataclass(frozen=True)
class Life:
    """When a worker last ran; see `worker.py`."""

    host: str
    rank: int
    generation: int
    pid: int
    last: float


@dataclass
class Bed:
    """A cluster with a folder that all hosts share, in which jobs run and leave their traces."""

    cluster: Cluster
    folder: Path
    jobs: list[NodeJob] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "orders").mkdir(parents=True, exist_ok=True)
        (self.folder / "token").touch(0o600)
        (self.folder / "token").write_text(format_token(Secret.random()) + "\n")

    def __getitem__(self, host: str) -> Host:
        return self.cluster[host]

    # Starting
    # --------------------------------------------------------------------------------------------

    def start(
        self,
        host: str,
        *options: str,
        program: Iterable[str] = (),
        nodes: str = "3",
        worker: Iterable[str] = (),
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        scheduler: str = f"h1:{PORT}",
        token: Path | None = None,
        prefix: tuple[str, ...] = (),
    ) -> NodeJob:
        """
        Start ``pdrun --nodes NODES OPTIONS PROGRAM`` on one host; by default with `worker.py` as
        the program.
        """
        words = tuple(program) or (WORKER, str(self.folder), *worker)
        secret = str(token or self.folder / "token")
        common = (
            "--nodes",
            nodes,
            "--devices",
            "1",
            "--scheduler",
            scheduler,
            "--token-file",
            secret,
        )
        return self.launch(
            host,
            *prefix,
            sys.executable,
            "-m",
            "pdrun",
            *common,
            *options,
            *words,
            env=env,
            cwd=cwd,
        )

    def launch(
        self, host: str, *command: str, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> NodeJob:
        """Start any launcher's command on one host."""
        number = len(self.jobs)
        out, err = (self.folder / f"job{number}-{host}.{name}" for name in ("stdout", "stderr"))
        with out.open("wb") as out_file, err.open("wb") as err_file:
            around = self.environment(host, env or {})
            process = self[host].start(
                *command, env=around, cwd=cwd or self.folder, stdout=out_file, stderr=err_file
            )
        job = NodeJob(process, out, err)
        job.host = self[host]
        self.jobs.append(job)
        return job

    def job(
        self, *options: str, hosts: Iterable[str] = ("h1", "h2", "h3"), **more: Any
    ) -> list[NodeJob]:
        """Start the same command on several hosts."""
        return [self.start(host, *options, **more) for host in hosts]

    def environment(self, host: str, env: dict[str, str]) -> dict[str, str]:
        """Return the environment of a user who is at home on the host."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(LEFT_BEHIND)
        }
        home = self[host].folder / "home"
        home.mkdir(exist_ok=True)
        return {**kept, "HOME": str(home), **env}

    # What happened
    # --------------------------------------------------------------------------------------------

    def order(self, who: str | int, what: str, when: str = "always") -> float:
        """Give workers an order; return the time."""
        draft = self.folder / "orders" / f".{who}"
        draft.write_text(f"{when} {what}")
        draft.rename(self.folder / "orders" / str(who))
        return time.monotonic()

    def notes(
        self, what: str = "", *, generation: int | None = None, after: float = 0.0
    ) -> list[Note]:
        """Return what workers noted, by time."""
        found = []
        for path in (self.folder / "notes").glob("*.jsonl"):
            for line in path.read_text().splitlines():
                note = Note(**json.loads(line))
                if (
                    what in ("", note.what)
                    and generation in (None, note.generation)
                    and note.at >= after
                ):
                    found.append(note)
        return sorted(found, key=lambda note: note.at)

    def lives(self) -> list[Life]:
        """Return when each worker last ran, of all generations."""
        found = []
        for path in (self.folder / "alive").glob("*"):
            host, *numbers = path.name.split("-")
            if text := path.read_text():
                found.append(Life(host, *map(int, numbers), float(text)))
        return found

    def running(self, workers: int = 3, generation: int = 0, timeout: float = 60.0) -> list[Note]:
        """
        Wait until so many workers of a generation have started; return their notes in rank order.
        """
        until(
            lambda: len(self.notes("start", generation=generation)) >= workers or self._over(),
            f"{workers} workers of generation {generation} run",
            timeout,
        )
        found = self.notes("start", generation=generation)
        if len(found) != workers:
            pytest.fail(
                f"{len(found)} of {workers} workers of generation {generation} have"
                f" started\n{self.said()}"
            )
        return sorted(found, key=lambda note: note.rank)

    def events(self, kind: str = "") -> list[eventlog.LogEvent]:
        """Return the events of the job's log; of several jobs in this folder, of all."""
        found = []
        for path in sorted(self.folder.glob("pdrun-logs/*/events.jsonl")):
            found += [event for event in eventlog.read_events(path) if kind in ("", event.kind)]
        return found

    def event(self, kind: str, timeout: float = 60.0, count: int = 1) -> eventlog.LogEvent:
        """Wait for the ``count``-th event of a kind; return it."""
        until(lambda: len(self.events(kind)) >= count, f"event {kind!r}", timeout)
        return self.events(kind)[count - 1]

    def codes(self, *jobs: NodeJob, timeout: float = 60.0) -> list[int]:
        """Wait for the end of jobs (all that were started); return their exit codes."""
        deadline = time.monotonic() + timeout
        return [job.wait(max(0.1, deadline - time.monotonic())) for job in jobs or self.jobs]

    def said(self) -> str:
        """Return the end of what every node said, for messages."""
        return "\n".join(
            f"--- {job.err_path.name}\n{job.err[-2000:]}{job.out[-500:]}" for job in self.jobs
        )

    def clean(self, *hosts: str, timeout: float = 30.0) -> None:
        """
        Fail unless nothing at all runs on the hosts (all) any more, within ``timeout`` seconds.
        """
        chosen = [self[name] for name in hosts] or [host for host in self.cluster if host.up]
        before = words_of(chosen)
        until(
            lambda: not any(host.processes() for host in chosen),
            f"nothing is left over of\n{before}",
            timeout,
        )

    def stop(self) -> None:
        """End what still runs, by the way of the users: two signals, then the hosts' power."""
        for job in self.jobs:
            if job.process.poll() is None:
                try:
                    job.signal(signal.SIGKILL)
                except (OSError, BedError):
                    pass
        self.cluster.down()

    def _over(self) -> bool:
        return all(job.process.poll() is not None for job in self.jobs)
