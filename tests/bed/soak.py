"""
Random faults from a seed on elastic jobs, and what must be true afterwards.

    scripts/soak [--minutes 10] [--seed S] [--hosts 4] [--keep]

Jobs of 2 to N nodes run one after the other on N hosts. Every few seconds something breaks: workers, agents, the
scheduler, hosts, links, clocks; broken hosts and agents are started again after a while. Each job ends by order, by a
stop, or by the loss of its first node, and then this must hold:

* every node leaves with the same code, the one that belongs to the end, and soon;
* no process is left on any host;
* one generation at a time: no worker runs once a worker of a later generation has started;
* within a generation no rank is there twice, and all agree on size and restarts; the log tells the same story.

A seed fixes the order, the kinds and the times of the faults, not the machine's own timing: a failing seed is a strong
hint, not a recording. The folder of a failed run is kept and named.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pdrun import eventlog
from tests.bed import cluster as clusters
from tests.bed.cluster import Cluster, Host
from tests.bed.jobs import Bed, NodeJob

PATIENCE = 25
"""Seconds that agents wait for a lost scheduler."""
GRACE = 2
END = 60.0
"""Seconds within which every node has left after the end was ordered, or the first node was lost."""
SETTLE = 60.0
"""Seconds within which all nodes are in again, once every fault is healed."""
OVERLAP = 0.3
"""Seconds of tolerance between the last life sign of one generation and the start of the next (its poll, its note)."""
THAW = 8.0
"""Seconds within which the workers of a host that was frozen are gone after it thaws."""
FAULTS_A_JOB = (12, 30)


@dataclass
class Soak:
    """One run of the soak: a cluster, a source of chance, and what has been found."""

    cluster: Cluster
    folder: Path
    chance: random.Random
    ends: float
    say: Callable[[str], None] = print
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    generations: int = 0
    jobs: int = 0

    def run(self) -> None:
        """Run jobs until the time is over, or something is wrong."""
        while time.monotonic() < self.ends and not self.wrong:
            round_ = Round(self, Bed(self.cluster, self.folder / f"job{self.jobs}"))
            self.jobs += 1
            round_.run()
            self.generations += len(round_.bed.events("assigned"))

    def report(self) -> str:
        """Return the result in a few lines."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        return (f"{sum(self.counts.values())} faults ({kinds}), {self.jobs} jobs, {self.generations} generations, "
                f"{len(self.wrong)} violations" + "".join(f"\n  {text}" for text in self.wrong))  # fmt: skip


class Round:
    """One job from its start to the check of what it left."""

    def __init__(self, soak: Soak, bed: Bed) -> None:
        self.soak, self.bed, self.chance = soak, bed, soak.chance
        self.agents: dict[str, NodeJob] = {}
        self.later: list[tuple[float, Callable[[], None]]] = []
        """What is to be undone, and when."""
        self.frozen: dict[str, float] = {}
        self.thawed: dict[str, list[float]] = {}
        self.hit: dict[str, float] = {}
        """Hosts whose agent was made to end, and when."""
        self.over = False
        """Whether the first node was lost, and the job with it."""

    def run(self) -> None:
        """Start, break, heal, end, check."""
        for host in self.soak.cluster:
            self._start(host)
        for _ in range(self.chance.randint(*FAULTS_A_JOB)):
            self._pass(self.chance.uniform(1.5, 5.0))
            if self.over or self.soak.wrong or time.monotonic() > self.soak.ends:
                break
            self._break_something()
        self._heal()
        code = 69 if self.over else self._end()
        self._all_leave(code)
        self._check()

    # Time -------------------------------------------------------------------------------------------------------------

    def _pass(self, seconds: float) -> None:
        """Let time pass: undo what is due, start again what has ended."""
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until:
            due = [undo for at, undo in self.later if at <= now]
            self.later = [(at, undo) for at, undo in self.later if at > now]
            for undo in due:
                undo()
            if not self.over:
                self._revive(now)
            time.sleep(0.05)

    def _revive(self, now: float) -> None:
        """Boot hosts that were down long enough, start agents that have ended."""
        for host in self.soak.cluster:
            ended = not host.up or self.agents[host.name].process.poll() is not None
            if host.name in self.frozen or not ended:
                continue
            if host.name not in self.hit:
                code = self.agents[host.name].process.returncode
                self.soak.wrong.append(f"the agent of {host.name} left by itself with {code} while the job went on")
                self.hit[host.name] = now
            if now - self.hit[host.name] > 2.0:
                if not host.up:
                    host.boot()
                self._start(host)

    def _start(self, host: Host) -> None:
        if not host.up:
            host.boot()
        self.hit.pop(host.name, None)
        self._log("start", host.name)
        most = sum(1 for _ in self.soak.cluster)
        self.agents[host.name] = self.bed.start(
            host.name, "--grace", str(GRACE), "--gather", "2", "--grow", "1", "--max-restarts", "1000",
            "--backoff", "0.2", "--start-timeout", "120", "--on-scheduler-loss", f"wait={PATIENCE}", nodes=f"2:{most}",
            worker=("family",),
        )  # fmt: skip

    # Faults -----------------------------------------------------------------------------------------------------------

    def _break_something(self) -> None:
        kinds, weights = zip(*FAULTS.items(), strict=True)
        fault = self.chance.choices(kinds, weights)[0]
        names = [host.name for host in self.soak.cluster if host.up and host.name not in {*self.frozen, *self.hit}]
        others = [name for name in names if name != "h1"]
        if others:
            name = fault.__name__
            self.soak.counts[name] += 1
            spare_first = name in NOT_FIRST or (name in ENDS_FIRST and self.chance.random() < 0.9)
            host = self.chance.choice(others if spare_first else names)
            self._log(name, host)
            fault(self, host)

    def worker_fails(self, name: str) -> None:
        """One of the present generation, in any way."""
        started = self.bed.events("started")
        order = self.chance.choice([f"exit {self.chance.randint(1, 99)}", "signal 9", "signal 11", "raise by order"])
        self.bed.order(name, order, when=f"g{started[-1].data['generation'] if started else 0}")

    def agent_killed(self, name: str) -> None:
        """SIGKILL; the first node's is the end of the job."""
        self._ends(name)
        self._signal(name, signal.SIGKILL)

    def agent_told_to_leave(self, name: str) -> None:
        """SIGTERM: the node departs in order."""
        self._ends(name)
        self._signal(name, signal.SIGTERM)

    def host_crashes(self, name: str) -> None:
        """Its peers are told by the kernel."""
        self._ends(name)
        self.soak.cluster[name].crash()

    def host_loses_power(self, name: str) -> None:
        """Nobody is told."""
        self._ends(name)
        self.soak.cluster[name].power_off()

    def host_freezes(self, name: str) -> None:
        """For a moment, or for longer than it is waited for."""
        host = self.soak.cluster[name]
        host.freeze()
        self.frozen[name] = time.monotonic()
        seconds = self.chance.choice([self.chance.uniform(0.5, 5), self.chance.uniform(11, 15)])
        self._log(f"  thaws after {seconds:.1f} s")
        self._later(seconds, lambda: self._thaw(host))

    def link_cut(self, name: str) -> None:
        """Between two hosts, for a moment or for long."""
        self.soak.cluster.cut("h1", name)
        self._heal_later(name, 14)

    def link_one_way(self, name: str) -> None:
        """What comes from the first host is lost, or what goes to it."""
        self.soak.cluster.one_way(*self.chance.sample(["h1", name], 2))
        self._heal_later(name, 14)

    def link_flaps(self, name: str) -> None:
        """Three times off and on."""
        host = self.soak.cluster[name]
        for count in range(3):
            self._later(0.8 * count, lambda: host.up and host.link(False))
            self._later(0.8 * count + 0.4, lambda: host.up and host.link(True))

    def link_is_bad(self, name: str) -> None:
        """Loses packets, or is slow."""
        host = self.soak.cluster[name]
        host.loss(self.chance.randint(5, 30)) if self.chance.random() < 0.5 else host.rate("500kbit")
        self._heal_later(name, 8)

    def scheduler_killed(self, name: str) -> None:
        """It comes back from its journal; one that dies before it has listened is an error of the start."""
        if (pid := self.agents["h1"].scheduler()) and self.bed.events("created"):
            _send(pid, signal.SIGKILL)

    def scheduler_stands_still(self, name: str) -> None:
        """As on a machine that is short of memory."""
        if pid := self.agents["h1"].scheduler():
            _send(pid, signal.SIGSTOP)
            self._later(self.chance.uniform(1, 8), lambda: _send(pid, signal.SIGCONT))

    def _log(self, *words: str) -> None:
        """Keep a diary of the faults beside the traces of the job, in the time of its event log."""
        with (self.bed.folder / "faults.log").open("a") as file:
            print(f"{time.time():.3f}", *words, file=file)

    def _ends(self, name: str) -> None:
        self.hit[name] = time.monotonic()
        self.over = self.over or name == "h1"

    def _signal(self, name: str, number: int) -> None:
        try:
            self.agents[name].signal(number)
        except (clusters.BedError, ProcessLookupError):
            pass

    def _later(self, seconds: float, undo: Callable[[], object]) -> None:
        self.later.append((time.monotonic() + seconds, lambda: (undo(), None)[1]))

    def _heal_later(self, name: str, most: float) -> None:
        hosts = [self.soak.cluster[each] for each in {name, "h1"}]
        seconds = self.chance.uniform(0.5, most)
        self._log(f"  heals after {seconds:.1f} s")
        self._later(seconds, lambda: [host.heal() for host in hosts if host.up])

    def _thaw(self, host: Host) -> None:
        if self.frozen.pop(host.name, None) is not None:
            host.thaw()
            self.thawed.setdefault(host.name, []).append(time.monotonic())

    # The end ----------------------------------------------------------------------------------------------------------

    def _heal(self) -> None:
        """Undo every fault; unless the job is lost, wait until all nodes are in and run."""
        for _, undo in sorted(self.later, key=lambda item: item[0]):
            undo()
        self.later.clear()
        for name in list(self.frozen):
            self._thaw(self.soak.cluster[name])
        self.soak.cluster.heal()
        if self.over or self.soak.wrong:
            return
        size, deadline = sum(1 for _ in self.soak.cluster), time.monotonic() + SETTLE
        while time.monotonic() < deadline and not self.over:
            self._pass(0.5)
            if self._whole(size):
                return
        self.soak.wrong.append(f"the {size} nodes were not together again within {SETTLE:g} s of healing")

    def _whole(self, size: int) -> bool:
        """Whether a generation of all nodes runs."""
        assigned, started = self.bed.events("assigned"), self.bed.events("started")
        if not assigned or not started or assigned[-1].data["generation"] != started[-1].data["generation"]:
            return False
        generation = started[-1].data["generation"]
        return len(assigned[-1].data["nodes"]) == size == len(self.bed.notes("start", generation=generation))

    def _end(self) -> int:
        """End the job by its workers or by a stop; return the code that every node must leave with."""
        if self.chance.random() < 0.5:
            self.bed.order("all", "exit 0")
            return 0
        self._signal("h1", signal.SIGTERM)
        return 143

    def _all_leave(self, code: int) -> None:
        deadline = time.monotonic() + END
        for name, job in self.agents.items():
            if self.soak.wrong:
                _send_quietly(job)
            elif name not in self.hit:
                try:
                    found = job.process.wait(max(0.1, deadline - time.monotonic()))
                except Exception:
                    self.soak.wrong.append(f"{name} has not left {END:g} s after the end ({code})")
                    continue
                if found != code:
                    self.soak.wrong.append(f"{name} left with {found}, not {code}")
        deadline = time.monotonic() + 15
        while (left := [host for host in self.soak.cluster if host.up and host.processes()]) and not self.soak.wrong:
            if time.monotonic() > deadline:
                self.soak.wrong.append(f"left over: {clusters.words_of(left)}")
            time.sleep(0.1)
        for host in self.soak.cluster:  # a clean start for the next job, whatever has gone wrong
            host.crash()
            host.boot()

    # What must hold ---------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Look at what workers noted and the scheduler logged."""
        starts = self.bed.notes("start")
        assigned = {int(event.data["generation"]): event for event in self.bed.events("assigned")}
        generations = sorted({note.generation for note in starts})
        for generation in generations:
            here = [note for note in starts if note.generation == generation]
            ranks = [note.rank for note in here]
            if len(set(ranks)) != len(ranks):
                self._wrong(f"generation {generation} has a rank twice: {sorted(ranks)}")
            if len({(note.world, note.restarts) for note in here}) != 1:
                self._wrong(f"generation {generation} does not agree on size and restarts: {here}")
            if generation not in assigned or here[0].world != len(assigned[generation].data["nodes"]):
                self._wrong(f"generation {generation} of {here[0].world} is not the one that the log tells")
            self._check_alone(generation, min(note.at for note in here))
        counts = [note.restarts for note in sorted(starts, key=lambda note: note.generation)]
        if counts != sorted(counts):
            self._wrong(f"the restart count fell: {counts}")
        if not self.over and len(self.bed.events("verdict")) != 1:
            self._wrong(f"{len(self.bed.events('verdict'))} verdicts")
        status = eventlog.replay(self.bed.events())
        if not self.over and status.state != "done":
            self._wrong(f"the log ends with a job that is {status.state}")

    def _check_alone(self, generation: int, first: float) -> None:
        """No worker of an earlier generation may run after ``first``; one that was frozen has a moment to go."""
        for life in self.bed.lives():
            if life.generation < generation and life.last > first + OVERLAP:
                thawed = [at for at in self.thawed.get(life.host, ()) if at <= life.last]
                if not thawed or life.last > thawed[-1] + THAW:
                    self._wrong(f"{life} ran {life.last - first:.2f} s into generation {generation}")

    def _wrong(self, text: str) -> None:
        self.soak.wrong.append(f"job {self.soak.jobs - 1}: {text}")


FAULTS: dict[Callable[[Round, str], None], float] = {
    Round.worker_fails: 5, Round.agent_killed: 3, Round.agent_told_to_leave: 2, Round.host_crashes: 2,
    Round.host_loses_power: 2, Round.host_freezes: 3, Round.link_cut: 3, Round.link_one_way: 2, Round.link_flaps: 2,
    Round.link_is_bad: 2, Round.scheduler_killed: 2, Round.scheduler_stands_still: 2,
}  # fmt: skip
"""Fault -> how often, beside the others."""
NOT_FIRST = {"agent_told_to_leave", "link_cut", "link_one_way"}
"""Those that are never the first node's: where it leaves, the job is stopped; a link has two ends."""
ENDS_FIRST = {"agent_killed", "host_crashes", "host_loses_power"}
"""Those that, at the first node, are the end of the job: one in ten of them may hit it."""


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _send_quietly(job: NodeJob) -> None:
    try:
        job.signal(signal.SIGKILL)
    except (clusters.BedError, OSError):
        pass


def soak(minutes: float, seed: int, hosts: int, folder: Path, say: Callable[[str], None] = print) -> Soak:
    """Run one soak in ``folder``; return what it found."""
    cluster = Cluster.up(f"soak-{os.getpid()}", hosts)
    try:
        found = Soak(cluster, folder, random.Random(seed), time.monotonic() + 60 * minutes, say)
        found.run()
        return found
    finally:
        cluster.down()


def main() -> int:
    """Run what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"))
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--keep", action="store_true", help="keep the folder of a run without violations, too")
    args = parser.parse_args()
    if reason := clusters.why_not():
        print(f"soak: {reason}", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"soak: seed {args.seed}, {args.minutes:g} minutes, {args.hosts} hosts; traces in {folder}", flush=True)
    found = soak(args.minutes, args.seed, args.hosts, folder)
    print(f"soak: seed {args.seed}: {found.report()}", flush=True)
    if not found.wrong and not args.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
