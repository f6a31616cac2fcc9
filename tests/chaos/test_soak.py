"""Minutes of the soak (`scripts/soak` runs ten), and that its checks see what they look for."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.jobs import Bed
from tests.chaos.soak import soak
from tests.chaos.soak_checks import violations
from tests.chaos.soak_round import Round, has_met_scheduler, may_be_given_up

Story = dict[str, Any]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_random_faults(possible: None, tmp_path: Path) -> None:
    """
    Three minutes; scripts/soak runs ten.

    A search for faults that no test is about yet: the same seed has another story on each machine.
    """
    found = soak(minutes=3.0, seed=20261128, hosts=4, folder=tmp_path)
    assert not found.wrong, found.report()
    assert sum(found.counts.values()) >= 24, found.report()


def told(folder: Path) -> Story:
    """A job of two nodes with a restart, of which nothing is wrong."""

    def start(host: str, rank: int, generation: int, at: float) -> Story:
        return {
            "what": "start",
            "at": at,
            "wall": at,
            "host": host,
            "rank": rank,
            "pid": 10 + generation,
            "generation": generation,
            "restarts": generation,
            "world": 2,
        }

    def assigned(generation: int) -> Story:
        return {
            "kind": "assigned",
            "time": 0.0,
            "generation": generation,
            "nodes": [["h1", 0, 1], ["h2", 1, 1]],
        }

    return {
        "starts": [
            start("h1", 0, 0, 1.0),
            start("h2", 1, 0, 1.1),
            start("h1", 0, 1, 9.0),
            start("h2", 1, 1, 9.1),
        ],
        "lives": {"h1-0-0-10": 8.0, "h2-1-0-10": 8.5, "h1-0-1-11": 20.0, "h2-1-1-11": 20.0},
        "events": [assigned(0), assigned(1), {"kind": "verdict", "time": 1.0, "code": 0}],
    }


def found_in(folder: Path, story: Story, thawed: dict[str, list[float]]) -> list[str]:
    """Write a story down as workers and scheduler would; return what the checks say."""
    for name in ("notes", "alive", "pdrun-logs/run"):
        (folder / name).mkdir(parents=True)
    (folder / "notes/all.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in story["starts"])
    )
    (folder / "pdrun-logs/run/events.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in story["events"])
    )
    for name, last in story["lives"].items():
        (folder / "alive" / name).write_text(str(last))
    return list(violations(Bed(Cluster("none"), folder), thawed, ended=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda story: None, []),
        (
            lambda story: story["lives"].update({"h2-1-0-10": 10.0}),
            ["ran 1.00 s into generation 1"],
        ),
        (lambda story: story["starts"][1].update(rank=0), ["generation 0 has a rank twice"]),
        (
            lambda story: story["starts"][3].update(restarts=2),
            ["does not agree on size and restarts"],
        ),
        (lambda story: story["starts"][3].update(world=3), ["does not agree on size and restarts"]),
        (
            lambda story: story["events"].pop(0),
            ["generation 0 of 2 is not the one that the log tells"],
        ),
        (
            lambda story: [line.update(restarts=-line["generation"]) for line in story["starts"]],
            ["restart count fell"],
        ),
        (lambda story: story["events"].pop(), ["0 verdicts", "the log ends with a job that is"]),
    ],
)
def test_the_checks_see_what_is_wrong(
    tmp_path: Path, change: Callable[[Story], object], words: list[str]
) -> None:
    story = told(tmp_path)
    change(story)
    found = found_in(tmp_path, story, {})
    assert len(found) == len(words) and all(
        word in text for word, text in zip(words, found, strict=True)
    ), found


def test_a_host_that_was_frozen_has_a_moment_to_end_its_workers(tmp_path: Path) -> None:
    story = told(tmp_path)
    story["lives"]["h2-1-0-10"] = 15.0
    assert found_in(tmp_path / "a", story, {"h2": [12.0]}) == []
    assert len(found_in(tmp_path / "b", story, {"h2": [2.0]})) == 1


def test_a_worker_may_run_while_its_host_is_being_thawed(tmp_path: Path) -> None:
    lives: list[float] = []

    def thaw() -> None:
        """A worker writes its sign of life before the hand that thaws continues."""
        lives.append(time.monotonic())
        time.sleep(0.002)

    found: Any = SimpleNamespace(chance=None)
    played = Round(found, SimpleNamespace(folder=tmp_path))  # type: ignore[arg-type]
    played.frozen["h2"] = 0.0
    played._thaw(SimpleNamespace(name="h2", thaw=thaw))  # type: ignore[arg-type]
    story = told(tmp_path)
    story["lives"]["h2-1-0-10"] = lives[0]
    assert found_in(tmp_path / "a", story, played.thawed) == []


@pytest.mark.parametrize(
    ("losses", "code", "is_wrong"),
    [
        ([0.0, 20.0, 40.0, 59.0], 69, False),
        ([0.0, 20.0, 40.0, 63.5], 69, False),  # the first one stood still; it was ended later
        ([0.0, 20.0, 40.0, 80.0], 69, True),
        ([0.0, 20.0, 40.0], 69, True),
        ([0.0, 20.0, 40.0, 59.0], 70, True),
        ([], 69, True),
        ([5.0, 0.0, 100.0, 110.0, 120.0, 130.0], 69, False),
    ],
)
def test_a_scheduler_lost_too_often_may_be_given_up(
    tmp_path: Path, losses: list[float], code: int, is_wrong: bool
) -> None:
    found: Any = SimpleNamespace(
        cluster=[SimpleNamespace(name="h1", up=True)], wrong=[], jobs=1, chance=None
    )
    played = Round(found, SimpleNamespace(folder=tmp_path))  # type: ignore[arg-type]
    process = SimpleNamespace(poll=lambda: code, returncode=code)
    played.agents = {"h1": SimpleNamespace(process=process)}  # type: ignore[dict-item]
    played.scheduler_losses = losses
    played._revive(131.0)
    assert (bool(found.wrong), played.over) == (is_wrong, not is_wrong)
    assert may_be_given_up(losses) or is_wrong


@pytest.mark.parametrize(
    ("said", "met"),
    [
        ("pdrun: waiting for the scheduler at h1:7777: it does not answer", False),
        ("pdrun: 2 of 4 nodes have joined (h2, h3); the job starts in 2.0 s", True),
        ("pdrun: 4 workers on 4 nodes, cpu, logs in pdrun-logs/x", True),
    ],
)
def test_an_agent_that_never_met_the_scheduler_has_its_start_timeout(said: str, met: bool) -> None:
    """It was started beside a cut link, and then the first node was lost."""
    job: Any = SimpleNamespace(err=said)
    assert has_met_scheduler(job) is met
