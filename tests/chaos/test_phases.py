"""
Each process of a node killed (SIGKILL) and stopped (SIGSTOP) in each phase of a job: the one
right exit code, soon, with a message that says what happened, and nothing left behind.

The thorough run has every combination; the default run has two that nothing else shows. Phases that
pass in milliseconds are held: by an agent that is not ready (assigned), by workers that do not obey
(restarting, stopping) and by a verdict that cannot arrive (verdict).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.chaos.jobs import Bed, NodeJob
from tests.e2e.conftest import until
from tests.lib.tiers import thorough

SAVER = str(Path(__file__).with_name("saver.py"))
UNREADY = str(Path(__file__).with_name("unready_agent.py"))
VICTIMS = ("agent", "first-agent", "supervisor", "scheduler", "worker")
PATIENCE = 60.0
"""Longest wait for exit codes."""
MARGIN = 15.0
"""Seconds for a machine that runs other work."""
FIRST = ("first-agent", "scheduler")
"""Victims on h1; the others are on h2."""


@dataclass
class Scene:
    """A job of three nodes in a phase, and the process to which something happens."""

    bed: Bed
    victim: str
    jobs: dict[str, NodeJob] = field(default_factory=dict)

    @property
    def host(self) -> str:
        return "h1" if self.victim in FIRST else "h2"

    def start(self, host: str, *options: str, **more: object) -> None:
        common = ("--start-timeout", "12", "--grace", "2", "--on-scheduler-loss", "wait=15")
        self.jobs[host] = self.bed.start(host, *common, *options, **more)  # type: ignore[arg-type]

    def start_all(self, *options: str, **more: object) -> None:
        for host in ("h1", "h2", "h3"):
            self.start(host, *options, **more)

    def find(self) -> int:
        """Return the machine-wide pid of the victim; 0: there is none in this phase."""
        job = self.jobs[self.host]
        if job.process.poll() is not None:
            return 0
        if self.victim in ("agent", "first-agent"):
            return job.pid
        if self.victim == "scheduler":
            return job.scheduler()
        supervisor = job.supervisor()
        if self.victim == "supervisor" or not supervisor:
            return supervisor
        # the watchdog and the fork server keep the supervisor's command line
        words = job.host.processes()
        found = [pid for pid, text in words.items() if "worker.py" in text or "saver.py" in text]
        workers = [pid for pid in found if "-m pdrun" not in words[pid]]
        return next((pid for pid in workers), 0)


@contextlib.contextmanager
def meeting(scene: Scene) -> Iterator[None]:
    scene.start("h1")
    scene.start("h2")
    scene.jobs["h1"].expect("2 of 3 nodes")
    yield
    scene.start("h3")


@contextlib.contextmanager
def assigned(scene: Scene) -> Iterator[None]:
    """h3 has not said that it is ready."""
    ready = scene.bed.folder / "ready"
    scene.start("h1")
    scene.start("h2")
    scene.start("h3", prefix=(sys.executable, UNREADY, str(ready)))
    scene.bed.event("assigned")
    yield
    ready.touch()


@contextlib.contextmanager
def starting(scene: Scene) -> Iterator[None]:
    scene.start_all()
    deadline = time.monotonic() + 60
    while not scene.bed.events("started") and time.monotonic() < deadline:
        time.sleep(0.002)
    yield


@contextlib.contextmanager
def running(scene: Scene) -> Iterator[None]:
    scene.start_all()
    scene.bed.running()
    yield


@contextlib.contextmanager
def restarting(scene: Scene) -> Iterator[None]:
    scene.start_all("--max-restarts", "1", worker=["ignore"])
    scene.bed.running()
    scene.bed.order(0, "exit 7", when="g0")
    scene.bed.event("restarting")
    yield


@contextlib.contextmanager
def saving(scene: Scene) -> Iterator[None]:
    for host in ("h1", "h2"):
        scene.start(host, nodes="2", program=[SAVER, str(scene.bed.folder)])
    until(lambda: len(list(scene.bed.folder.glob("saving-*"))) == 2, "both save", 120)
    yield


@contextlib.contextmanager
def stopping(scene: Scene) -> Iterator[None]:
    scene.start_all(worker=["ignore"])
    scene.bed.running()
    scene.bed.order(0, "exit 7")
    scene.bed.event("stopping")
    yield


@contextlib.contextmanager
def verdict(scene: Scene) -> Iterator[None]:
    """It has been given, and h2 does not know it."""
    scene.start_all()
    scene.bed.running()
    scene.bed.cluster.one_way("h1", "h2")
    scene.bed.order("all", "exit 0")
    scene.bed.event("verdict")
    yield
    scene.bed.cluster.heal()


IN_PHASE = (meeting, assigned, starting, running, restarting, saving, stopping, verdict)


@dataclass(frozen=True)
class Case:
    """A process, a signal, a phase, and what must follow."""

    victim: str
    signal: signal.Signals
    phase: Callable[[Scene], contextlib.AbstractContextManager[None]]
    codes: tuple[int, int, int]
    """Of h1, h2 and h3; the code of an agent that is killed is -9."""
    words: str
    """A pattern of what nodes that are left print; empty: what happened changes nothing."""
    seconds: float
    """From the fault, or from the order to exit, to the last exit code, on a quiet machine."""
    other_codes: tuple[int, int, int] | None = None
    """As right as the codes: it is chance which a node hears of first."""

    @property
    def name(self) -> str:
        word = "killed" if self.signal == signal.SIGKILL else "stopped"
        return f"{self.victim}_{word}_while_{self.phase.__name__}"

    @property
    def continues(self) -> bool:
        """The job runs on, and must be ended."""
        return not set(self.codes) - {0, -9, 130} and self.phase is not verdict


def make_cases() -> Iterator[Case]:
    """Yield every case; a phase without the victim has none."""
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    early = (assigned, starting, running, saving)
    lost = "node h2 was lost: "
    for phase in IN_PHASE:
        seven = 7 if phase is stopping else 0
        code = 130 if phase is saving else seven  # of a job to which the fault makes no difference
        same = (code,) * 3
        # the scheduler's process is replaced
        back = "" if phase is verdict else "the scheduler process .*(died|did not answer)"
        yield Case("scheduler", kill, phase, same, back, 5)
        yield Case("scheduler", stop, phase, same, back, 14)
        # the agent of another node
        if phase is verdict:
            yield Case("agent", kill, phase, (0, -9, 0), "", 2)
            yield Case("agent", stop, phase, (0, 69, 0), "", 18, other_codes=(0, 0, 0))
        elif phase is stopping:
            yield Case("agent", kill, phase, (7, -9, 7), f"note: {lost}", 5)
            late = "note: h2 did not report the end of its workers in time"
            yield Case("agent", stop, phase, (7, 69, 7), late, 18)
        elif phase is restarting:
            yield Case("agent", kill, phase, (69, -9, 69), "1 more node did not join", 16)
            late = "not restarted: a node did not report the end .*\n(.*\n)*.*note: h2 did not"
            yield Case("agent", stop, phase, (7, 69, 7), late, 18)
        else:
            gone = lost if phase in early else "1 more node did not join"
            yield Case("agent", kill, phase, (69, -9, 69), gone, 16)
            # h3 may come before h2 counts as lost: the generation forms, and h2 is missed in it
            gone = f"{gone}|node h2 was lost: no message" if phase is meeting else gone
            yield Case("agent", stop, phase, (69, 69, 69), gone, 26)
        # the agent of the scheduler's node
        code = {stopping: 7, verdict: 0}.get(phase, 69)
        gone = "" if phase is verdict else "the agent of the scheduler's node .*has ended"
        gone = "no scheduler|the scheduler" if phase is meeting else gone
        yield Case("first-agent", kill, phase, (-9, code, code), gone, 16)
        gone = "node h1 was lost: " if code == 69 else ""
        gone = f"did not join|{gone}no message" if phase is meeting else gone
        yield Case("first-agent", stop, phase, (code,) * 3, gone, 20)
        # the parent of the workers
        code = {stopping: 7, restarting: 0, verdict: 0}.get(phase, 137)
        how = "" if phase is verdict else "the supervisor process .*was killed by SIGKILL"
        three = (69, 137, 69) if phase in (meeting, assigned) else (code,) * 3
        yield Case("supervisor", kill, phase, three, how, 16)
        how = "" if phase is verdict else "the supervisor process .*did not answer for 6 s"
        yield Case("supervisor", stop, phase, (code,) * 3, how, 12)
        # a worker
        if phase in (starting, running, saving):
            killed = "rank 1 on h2 failed: killed by SIGKILL"
            yield Case("worker", kill, phase, (137,) * 3, killed, 2)
            yield Case("worker", stop, phase, (130,) * 3, "", 5)
        elif phase in (restarting, stopping):
            yield Case("worker", kill, phase, (seven,) * 3, "", 5)
            yield Case("worker", stop, phase, (seven,) * 3, "", 5)


def play(bed: Bed, case: Case) -> None:
    """Bring a job into the phase, let the fault happen, and judge the end."""
    scene = Scene(bed, case.victim)
    with case.phase(scene):
        until(lambda: bool(scene.find()), f"the {case.victim} runs", 10)
        began = time.monotonic()
        os.kill(scene.find(), case.signal)
    if case.continues:
        began = end(scene, case)
    is_still = case.signal == signal.SIGSTOP and case.victim.endswith("agent")
    others = [job for host, job in scene.jobs.items() if not is_still or host != scene.host]
    bed.codes(*others, timeout=PATIENCE)
    if is_still:
        scene.jobs[scene.host].resume()
    bed.codes(timeout=PATIENCE)
    took = time.monotonic() - began
    codes = tuple(
        scene.jobs[host].process.returncode for host in ("h1", "h2", "h3")[: len(scene.jobs)]
    )
    right = [each[: len(codes)] for each in (case.codes, case.other_codes) if each]
    assert codes in right, (codes, bed.said())
    said = "\n".join(job.err for job in scene.jobs.values())
    assert re.search(case.words, said), (case.words, bed.said())
    assert not re.search(r"^pdrun.*(Traceback|a bug of pdrun)", said, re.MULTILINE), bed.said()
    assert took < case.seconds + MARGIN, (took, bed.said())
    bed.clean()
    if case.phase is saving:
        command = [sys.executable, SAVER, str(bed.folder), "check"]
        env = bed.environment("h1", {})
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=env)
        assert done.returncode == 0 and done.stdout.startswith("complete: step "), done


def end(scene: Scene, case: Case) -> float:
    """End a job that runs on; return when."""
    bed = scene.bed
    if case.victim == "scheduler":
        bed.event("resumed")
    if case.codes[0] == 130:
        return scene.jobs["h1"].signal(signal.SIGINT)
    bed.running(generation=1 if case.phase is restarting else 0)
    return bed.order("all", "exit 0")


def _fault(case: Case) -> Callable[[Bed], None]:
    def fault(bed: Bed) -> None:
        play(bed, case)

    fault.__name__ = case.name
    return fault


CASES = {case.name: case for case in make_cases()}
FAULTS = [_fault(case) for case in sorted(CASES.values(), key=lambda case: -case.seconds)]
DEFAULT = (
    "first-agent_killed_while_stopping",
    "scheduler_killed_while_verdict",
)


@pytest.mark.slow
@pytest.mark.timeout(1500)  # the first one waits for those before it, four at a time
@pytest.mark.parametrize("fault", [name if name in DEFAULT else thorough(name) for name in CASES])
def test_phase(fault: str, side_by_side: dict[str, Future[None]]) -> None:
    side_by_side[fault].result(timeout=1200)


def test_each_process_has_each_phase_in_which_it_exists() -> None:
    absent = {
        (name, phase)
        for name in VICTIMS
        for phase in IN_PHASE
        for word in ("killed", "stopped")
        if f"{name}_{word}_while_{phase.__name__}" not in CASES
    }
    assert absent == {("worker", phase) for phase in (meeting, assigned, verdict)}
    assert len(CASES) == 74
