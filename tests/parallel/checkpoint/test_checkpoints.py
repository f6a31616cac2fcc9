"""
Checkpoints: whole or not there, for any number of ranks, and training that goes on bit for bit.
"""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdrun.errors import ConfigError
from pdrun.parallel.checkpoint import storage
from pdrun.parallel.checkpoint.plain_values import decode_value, encode_value
from pdrun.parallel.checkpoint.reader import CheckpointReader
from tests.lib import small_models as zoo
from tests.lib.rank_pool import RankError, Worlds
from tests.lib.small_models import Case
from tests.parallel.test_transparency import same

pytestmark = pytest.mark.torch

MOVES = [  # world, level, accumulate before -> after; six slices throughout
    ((1, 0, 6), (3, 3, 2)),
    ((2, 1, 3), (3, 2, 2)),
    ((3, 3, 2), (1, 0, 6)),
    ((3, 2, 2), (2, 3, 3)),
    ((2, 3, 3), (1, 1, 6)),
]


@pytest.mark.parametrize(("before", "after"), MOVES, ids=str)
def test_saved_on_some_ranks_resumed_on_others(
    before: Any, after: Any, worlds: Worlds, tmp_path: Path
) -> None:
    rows = (24, 18, 23, 24)
    one, two = (
        Case(w, level, a, tied=True, dropout=True, rows=rows, clip=0.3)
        for w, level, a in (before, after)
    )
    worlds(one.world).run(zoo.train_and_save, one, str(tmp_path), 2)
    found = worlds(two.world).run(zoo.resume_and_train, two, str(tmp_path))
    want = worlds(1).run(zoo.train, one.alone())[0]
    for message in found:
        same(message, want, steps=2)


def many_saves(folder: str) -> list[list[str]]:
    run = zoo.make(Case(2, 1))
    names = []
    for step in range(4):
        run.step(zoo.batch_of(8, step))
        run.save(folder, keep=2, wait=step == 3)
        names.append(sorted(path.name for path in Path(folder).glob("step-*")) if step == 3 else [])
    return names


def test_keep_and_saving_in_the_background(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds(2).run(many_saves, str(tmp_path))[0][-1] == ["step-00000003", "step-00000004"]
    assert not list(tmp_path.glob(".*"))


def changed_while_saving(folder: str) -> Any:
    run = zoo.make(Case(1))
    run.step(zoo.batch_of(8, 0))
    want = run.full_weights()["emb.weight"].clone()
    started = run.save(folder, wait=False)
    run.step(zoo.batch_of(8, 1))  # changes every weight
    reader = CheckpointReader(started.wait())
    return bool(torch.equal(reader.read_tensor("weights/emb.weight").view(want.shape), want))


def test_a_save_in_the_background_holds_the_weights_of_its_moment(
    worlds: Worlds, tmp_path: Path
) -> None:
    assert worlds(1).run(changed_while_saving, str(tmp_path)) == [True]


def save_twice(folder: str, point: int) -> int:
    """Save twice, and die at a write of the second save; return how many writes are left to it."""
    run = zoo.make(Case(1))
    run.step(zoo.batch_of(8, 0))
    run.save(folder)
    run.step(zoo.batch_of(8, 1))
    left = point

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for place, name in (
            (storage.os, "fsync"),
            (storage.zlib, "crc32"),
            (storage.json, "dump"),
            (storage.Path, "rename"),
            (storage.Path, "mkdir"),
            (storage.Path, "unlink"),
            (storage.shutil, "rmtree"),
        ):
            patch.setattr(place, name, counted(getattr(place, name)))
        run.save(folder, keep=1)
    return left


@pytest.mark.slow
def test_killed_at_a_write_the_last_whole_checkpoint_stays(worlds: Worlds, tmp_path: Path) -> None:
    """Points are spread over all writes; each leaves the first checkpoint or the second, whole."""
    points = 10**6 - worlds(1).run(save_twice, str(tmp_path / "through"), 10**6)[0]
    assert points > 50
    for point in [1, points // 2, *range(points - 5, points + 1)]:
        folder = tmp_path / str(point)
        world = worlds(1)
        assert world.failures(save_twice, str(folder), point)[0][0] == "Died"
        world.processes[0].join()
        assert world.processes[0].exitcode == -signal.SIGKILL
        found = storage.list_checkpoints(folder)
        assert found, point
        reader = CheckpointReader(found[-1])
        assert all(reader.read_tensor(name) is not None for name in reader.tensor_names())
        assert reader.run_json["steps"] in (1, 2)


def one_checkpoint(folder: str) -> None:
    run = zoo.make(Case(1))
    run.step(zoo.batch_of(8, 0))
    run.save(folder)


def test_a_flipped_bit_is_found(worlds: Worlds, tmp_path: Path) -> None:
    worlds(1).run(one_checkpoint, str(tmp_path))
    (data,) = tmp_path.glob("step-*/rank-00000.bin")
    content = bytearray(data.read_bytes())
    content[1000] ^= 1
    data.write_bytes(content)
    with pytest.raises(RankError, match="wrong checksum"):
        worlds(1).run(zoo.resume_and_train, Case(1), str(tmp_path))


def test_another_model_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    worlds(1).run(one_checkpoint, str(tmp_path))
    (index,) = tmp_path.glob("step-*/rank-00000.json")
    entries = json.loads(index.read_text())
    index.write_text(json.dumps([e for e in entries if e["name"] != "weights/norm.weight"]))
    with pytest.raises(RankError, match=r"has no weights/norm\.weight"):
        worlds(1).run(zoo.resume_and_train, Case(1), str(tmp_path))


def test_an_index_cannot_lead_out_of_its_folder(worlds: Worlds, tmp_path: Path) -> None:
    worlds(1).run(one_checkpoint, str(tmp_path))
    (index,) = tmp_path.glob("step-*/rank-00000.json")
    index.write_text(index.read_text().replace("rank-00000.bin", "../../secret"))
    with pytest.raises(ConfigError, match="outside of the folder"):
        CheckpointReader(index.parent)


def test_nothing_to_resume(worlds: Worlds, tmp_path: Path) -> None:
    (tmp_path / "step-00000009").mkdir()  # no run.json: not whole
    assert worlds(2).run(resumed, str(tmp_path)) == [False, False]
    failures = worlds(2).failures(load_only, str(tmp_path))
    assert [kind for kind, _ in failures] == ["ConfigError"] * 2
    assert "has no complete checkpoint" in failures[0][1]


def resumed(folder: str) -> bool:
    return zoo.make(Case(2)).resume(folder)


def load_only(folder: str) -> None:
    zoo.make(Case(2)).load(folder)


def save_nowhere(folder: str) -> None:
    run = zoo.make(Case(2))
    run.step(zoo.batch_of(8, 0))
    run.save(folder)


def test_a_folder_that_cannot_be_written_fails_on_every_rank(
    worlds: Worlds, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    failures = worlds(2).failures(save_nowhere, str(tmp_path / "file" / "below"))
    assert [kind for kind, _ in failures] == ["ConfigError"] * 2
    assert all("rank 0" in text for _, text in failures)


@pytest.mark.parametrize(
    "value",
    [
        {"lr": 0.1, "betas": (0.9, 0.99), "none": None, "list": [1, True]},
        {1: 2, "nested": {"a": {3: "b"}}},
        [],
        {},
    ],
)
def test_plain_values_come_back(value: Any) -> None:
    assert decode_value(json.loads(json.dumps(encode_value(value)))) == value
