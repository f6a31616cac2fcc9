"""A rank of an earlier generation completes no save after a later one has claimed the folder."""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdrun.errors import ConfigError
from pdrun.parallel.checkpoint import storage
from pdrun.parallel.checkpoint.fencing import (
    FORGET_SECONDS,
    GENERATION_VARIABLE,
    RUN_VARIABLE,
    GenerationFence,
)
from tests.lib import small_models as zoo
from tests.lib.rank_pool import Worlds
from tests.lib.small_models import Case

pytestmark = pytest.mark.torch

OPERATIONS = (
    (storage.Path, "mkdir"),
    (storage.Path, "rename"),
    (storage.Path, "glob"),
    (storage.Path, "is_file"),
    (storage.os, "fsync"),
)


def complete(folder: Path) -> list[str]:
    """The checkpoints that a reader finds."""
    return [path.name for path in storage.list_checkpoints(folder)]


def claimed_before(run: Any, folder: Path, point: int) -> tuple[list[str], list[str], str, int]:
    """
    Save in generation 0, and have generation 1 claim the folder before an operation of the save.

    Returns:
        the checkpoints at the claim and at the end, the error, and the operations left until it.
    """
    shutil.copytree(folder.parent / "first", folder)
    at_claim: list[str] = []
    left = point

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                with pytest.MonkeyPatch.context() as patch:
                    # a claim that is about to remove what it has taken away
                    patch.setattr(storage.shutil, "rmtree", lambda *_, **__: None)
                    GenerationFence(folder, "run-7", 1).claim()
                at_claim.extend(complete(folder))
            return call(*args, **kwargs)

        return wrapper

    run.steps = 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_VARIABLE, "run-7")
        patch.setenv(GENERATION_VARIABLE, "0")
        patch.setattr(storage.os, "fsync", lambda number: None)  # the disk may be slow
        for place, name in OPERATIONS:
            patch.setattr(place, name, counted(getattr(place, name)))
        try:
            run.save(folder)
            error = ""
        except ConfigError as caught:
            error = str(caught)
    return at_claim, complete(folder), error, left


def claimed_at_every_point(root: str) -> list[tuple[list[str], list[str], str, int]]:
    run = zoo.make(Case(1))
    run.step(zoo.batch_of(8, 0))
    run.save(Path(root) / "first")
    found: list[tuple[list[str], list[str], str, int]] = []
    point = 1
    while not found or found[-1][3] <= 0:
        found.append(claimed_before(run, Path(root) / str(point), point))
        point += 1
    return found


def test_nothing_is_published_after_a_claim_at_any_moment_of_the_save(
    worlds: Worlds, tmp_path: Path
) -> None:
    found = worlds(1).run(claimed_at_every_point, str(tmp_path))[0]
    assert len(found) > 12
    published = 0
    for at_claim, at_end, error, left in found[:-1]:
        assert left <= 0
        assert at_end == at_claim, "a checkpoint appeared after the claim"
        assert "step-00000001" in at_end, "the one before is complete"
        published += "step-00000002" in at_end
        is_refused = "generation 1 of this job has begun" in error
        assert is_refused == bool(error) == ("step-00000002" not in at_end), error
    assert 0 < published < len(found) - 1
    assert found[-1][1] == ["step-00000001", "step-00000002"], "no claim, no fence"


def save_as(run: Any, folder: Path, generation: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_VARIABLE, "run-7")
        patch.setenv(GENERATION_VARIABLE, str(generation))
        run.save(folder)


def load_as(run: Any, folder: Path, generation: int, name: str = "run-7") -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RUN_VARIABLE, name)
        patch.setenv(GENERATION_VARIABLE, str(generation))
        return bool(run.resume(folder))


def two_generations(root: str) -> tuple[str, list[str], list[str]]:
    folder = Path(root)
    old = zoo.make(Case(1))
    old.step(zoo.batch_of(8, 0))
    save_as(old, folder, 0)
    quiet = [path.name for path in folder.glob(".*")]
    new = zoo.make(Case(1))
    assert load_as(new, folder, 2)
    old.step(zoo.batch_of(8, 1))
    try:
        save_as(old, folder, 0)
        error = ""
    except ConfigError as caught:
        error = str(caught)
    del old
    for step in (1, 2):
        new.step(zoo.batch_of(8, step))
    save_as(new, folder, 2)
    return error, complete(folder), quiet


def test_a_later_generation_claims_what_it_loads(worlds: Worlds, tmp_path: Path) -> None:
    error, names, quiet = worlds(1).run(two_generations, str(tmp_path))[0]
    assert "generation 2 of this job has begun, and this worker belongs to generation 0" in error
    assert names == ["step-00000001", "step-00000003"]
    assert quiet == [], "a first generation needs no marker"


def hidden_folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".new-*"))


def test_other_runs_are_not_fenced(tmp_path: Path) -> None:
    trainer = GenerationFence(tmp_path, "trainer", 0)
    trainer.claim()
    trainer.hidden_folder("step-00000005").mkdir()
    GenerationFence(tmp_path, "evaluation", 4).claim_to_load()
    trainer.check()
    assert len(hidden_folders(tmp_path)) == 1, "a reader does not revoke what another run saves"
    GenerationFence(tmp_path, "trainer", 1).claim_to_load()
    assert hidden_folders(tmp_path) == []
    with pytest.raises(ConfigError, match="generation 1 of this job has begun"):
        trainer.check()


def test_an_earlier_generation_removes_nothing_of_a_later_one(tmp_path: Path) -> None:
    later = GenerationFence(tmp_path, "run", 3)
    later.claim()
    later.hidden_folder("step-00000009").mkdir()
    with pytest.raises(ConfigError, match="generation 3"):
        GenerationFence(tmp_path, "run", 2).claim()
    GenerationFence(tmp_path, "run", 2).claim_to_load()  # loading raises nothing
    assert len(hidden_folders(tmp_path)) == 1
    later.check()


def test_markers_that_decide_nothing_are_removed(tmp_path: Path) -> None:
    for generation in (1, 2, 5):
        GenerationFence(tmp_path, "run", generation).claim()
    assert len(list(tmp_path.glob(".generation-*"))) == 1
    (marker,) = tmp_path.glob(".generation-*")
    past = time.time() - 2 * FORGET_SECONDS
    GenerationFence(tmp_path, "other", 1).claim()
    assert marker.exists()
    os.utime(marker, (past, past))
    GenerationFence(tmp_path, "other", 2).claim()
    assert not marker.exists()


def test_without_pdrun_nothing_is_fenced_or_marked(tmp_path: Path) -> None:
    fence = GenerationFence(tmp_path, "", 3)
    fence.claim()
    fence.claim_to_load()
    assert list(tmp_path.iterdir()) == []
    assert fence.hidden_folder("step-00000001").name == ".new-step-00000001"
    GenerationFence(tmp_path / "missing", "run", 0).claim_to_load()
    assert not (tmp_path / "missing").exists()
