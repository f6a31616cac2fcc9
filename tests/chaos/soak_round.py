"""One job of the soak: started, broken in many ways, healed, ended, and checked."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pdrun.rendezvous.scheduler.child import MAX_RESTARTS, RESTART_WINDOW_SECONDS
from tests.chaos.host import Host, words_of
from tests.chaos.jobs import Bed, NodeJob
from tests.chaos.processes import BedError
from tests.chaos.soak_checks import violations

if TYPE_CHECKING:
    from tests.chaos.soak import Soak

PATIENCE = 25
"""Seconds that agents wait for a lost scheduler."""
GRACE = 2
START_TIMEOUT = 120
END = 60.0
"""
Seconds within which every node has left after the end was ordered, or the first node was lost.
"""
SETTLE = 60.0
"""Seconds within which all nodes are in again, once every fault is healed."""
FAULTS_A_JOB = (12, 30)
SCHEDULER_PATIENCE = 3.0
"""A scheduler that stands still for longer may be ended and started again, which is a loss, too."""
LOSS_NOTICED_SECONDS = 16.0
"""
Seconds within which the first node notices the loss of the scheduler: it waits for the answers of
one that stands still, and may stand still itself.
"""
LOST = 69
"""The code of a job whose scheduler is lost."""


def may_be_given_up(losses: Sequence[float]) -> bool:
    """Return whether a scheduler that was lost at these times may have been started too often."""
    times = sorted(losses)
    return any(
        last - first <= RESTART_WINDOW_SECONDS + LOSS_NOTICED_SECONDS
        for first, last in zip(times, times[MAX_RESTARTS:], strict=False)
    )


def has_met_scheduler(job: NodeJob) -> bool:
    """Return whether an agent has ever had an answer of the scheduler."""
    return bool(re.search(r"have joined|workers? on|stands? by|standing by|refused", job.err))


class Round:
    """One job from its start to the check of what it left."""

    def __init__(self, soak: Soak, bed: Bed) -> None:
        self.soak, self.bed, self.chance = soak, bed, soak.chance
        self.agents: dict[str, NodeJob] = {}
        self.started: dict[str, float] = {}
        """When each host's agent was started last, in the time of the event log."""
        self.later: list[tuple[float, Callable[[], None]]] = []
        """What is to be undone, and when."""
        self.frozen: dict[str, float] = {}
        self.thawed: dict[str, list[float]] = {}
        self.hit: dict[str, float] = {}
        """Hosts whose agent was made to end, and when."""
        self.scheduler_losses: list[float] = []
        """When the scheduler was killed, or stood still for so long that it may have been."""
        self.over = False
        """Whether the first node, or the scheduler for good, was lost, and the job with it."""

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
        code = LOST if self.over else self._end()
        self._all_leave(code)
        for text in violations(self.bed, self.thawed, ended=not self.over):
            self._wrong(text)

    # Time
    # --------------------------------------------------------------------------------------------

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
                if code == LOST and may_be_given_up(self.scheduler_losses):
                    self._log("the scheduler was given up")
                    self.over = True
                    return
                self._wrong(
                    f"the agent of {host.name} left by itself with {code} while the job went on"
                )
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
        self.started[host.name] = time.time()
        most = sum(1 for _ in self.soak.cluster)
        self.agents[host.name] = self.bed.start(
            host.name,
            "--grace",
            str(GRACE),
            "--gather",
            "2",
            "--grow",
            "1",
            "--max-restarts",
            "1000",
            "--backoff",
            "0.2",
            "--start-timeout",
            str(START_TIMEOUT),
            "--on-scheduler-loss",
            f"wait={PATIENCE}",
            nodes=f"2:{most}",
            worker=("family",),
        )

    # Faults
    # --------------------------------------------------------------------------------------------

    def _break_something(self) -> None:
        kinds, weights = zip(*FAULTS.items(), strict=True)
        fault = self.chance.choices(kinds, weights)[0]
        names = [
            host.name
            for host in self.soak.cluster
            if host.up and host.name not in {*self.frozen, *self.hit}
        ]
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
        order = self.chance.choice(
            [f"exit {self.chance.randint(1, 99)}", "signal 9", "signal 11", "raise by order"]
        )
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

    def process_stands_still(self, name: str) -> None:
        """The agent, the supervisor of its workers, or both (SIGSTOP); the workers go on."""
        job = self.agents[name]
        chosen = self.chance.choice(("agent", "supervisor", "both"))
        try:
            pids = [job.pid] if chosen != "supervisor" else []
            pids += [job.supervisor()] if chosen != "agent" else []
        except BedError:
            return
        seconds = self.chance.choice([self.chance.uniform(1, 5), self.chance.uniform(8, 16)])
        self._log(f"  {chosen}, for {seconds:.1f} s")
        self.frozen[name] = time.monotonic()
        for pid in filter(None, pids):
            _send(pid, signal.SIGSTOP)
            self._later(seconds, lambda pid=pid: _send(pid, signal.SIGCONT))
        self._later(seconds, lambda: job.process.send_signal(signal.SIGCONT))  # see NodeJob.resume
        self._later(seconds, lambda: self.frozen.pop(name, None))

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
        (
            host.loss(self.chance.randint(5, 30))
            if self.chance.random() < 0.5
            else host.rate("500kbit")
        )
        self._heal_later(name, 8)

    def scheduler_killed(self, name: str) -> None:
        """
        It comes back from its journal; one that dies before it has listened is an error of the
        start.
        """
        if (pid := self.agents["h1"].scheduler()) and self.bed.events("created"):
            self.scheduler_losses.append(time.monotonic())
            _send(pid, signal.SIGKILL)

    def scheduler_stands_still(self, name: str) -> None:
        """As on a machine that is short of memory."""
        if pid := self.agents["h1"].scheduler():
            _send(pid, signal.SIGSTOP)
            seconds = self.chance.uniform(1, 8)
            if seconds > SCHEDULER_PATIENCE:
                self.scheduler_losses.append(time.monotonic())
            self._later(seconds, lambda: _send(pid, signal.SIGCONT))

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
        except (BedError, ProcessLookupError):
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
            # Its processes run before `thaw` returns, on a busy machine long before.
            self.thawed.setdefault(host.name, []).append(time.monotonic())
            host.thaw()

    # The end
    # --------------------------------------------------------------------------------------------

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
        self._wrong(f"the {size} nodes were not together again within {SETTLE:g} s of healing")

    def _whole(self, size: int) -> bool:
        """Whether a generation of all nodes runs."""
        assigned, started = self.bed.events("assigned"), self.bed.events("started")
        if (
            not assigned
            or not started
            or assigned[-1].data["generation"] != started[-1].data["generation"]
        ):
            return False
        joined = {event.data["node"]: event.time for event in self.bed.events("joined")}
        if any(joined.get(name, 0.0) < at for name, at in self.started.items()):
            return False  # the generation is still that of its earlier agent
        generation = started[-1].data["generation"]
        ending = {event.data["generation"] for event in self.bed.events("restarting")}
        if generation in ending:  # the next one is not assigned yet
            return False
        return (
            len(assigned[-1].data["nodes"])
            == size
            == len(self.bed.notes("start", generation=generation))
        )

    def _end(self) -> int:
        """
        End the job by its workers or by a stop; return the code that every node must leave with.
        """
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
                seconds = max(0.1, deadline - time.monotonic())
                if code == LOST and not has_met_scheduler(job):
                    # For all that it knows, the first node is not there yet.
                    seconds += START_TIMEOUT
                try:
                    found = job.process.wait(seconds)
                except subprocess.TimeoutExpired:
                    self._wrong(f"{name} has not left {END:g} s after the end ({code})")
                    continue
                if found != code:
                    self._wrong(f"{name} left with {found}, not {code}")
        deadline = time.monotonic() + 15
        while (
            left := [host for host in self.soak.cluster if host.up and host.processes()]
        ) and not self.soak.wrong:
            if time.monotonic() > deadline:
                self._wrong(f"left over: {words_of(left)}")
            time.sleep(0.1)
        for host in self.soak.cluster:  # a clean start for the next job, whatever has gone wrong
            host.crash()
            host.boot()

    def _wrong(self, text: str) -> None:
        self.soak.wrong.append(f"job {self.soak.jobs - 1}: {text}")


FAULTS: dict[Callable[[Round, str], None], float] = {
    Round.worker_fails: 5,
    Round.agent_killed: 3,
    Round.agent_told_to_leave: 2,
    Round.host_crashes: 2,
    Round.host_loses_power: 2,
    Round.host_freezes: 3,
    Round.process_stands_still: 3,
    Round.link_cut: 3,
    Round.link_one_way: 2,
    Round.link_flaps: 2,
    Round.link_is_bad: 2,
    Round.scheduler_killed: 2,
    Round.scheduler_stands_still: 2,
}
"""Fault -> how often, beside the others."""
NOT_FIRST = {"agent_told_to_leave", "link_cut", "link_one_way"}
"""
Those that are never the first node's: where it leaves, the job is stopped; a link has two ends.
"""
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
    except (BedError, OSError):
        pass
