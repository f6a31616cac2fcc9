"""
Checkpoints without a job: written by a placement, laid out for another one, read with no more files
than needed.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.checkpoint import describe as offline_words
from pdrun.parallel.checkpoint import storage
from pdrun.parallel.checkpoint import transform as offline
from pdrun.parallel.checkpoint.reader import CheckpointReader
from pdrun.parallel.checkpoint.regions import Region, count_elements, full_region
from pdrun.parallel.checkpoint.storage import TensorPiece
from pdrun.parallel.comm import mesh as meshes
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.placement import Placement, WeightLayout
from pdrun.parallel.layouts.redistribute import plan_redistribution
from pdrun.parallel.layouts.view import View
from tests.lib import pipeline_cases as piped
from tests.lib import small_models as zoo
from tests.lib.manual_sharding import Megatron

pytestmark = pytest.mark.torch

SHAPES = {"w": (8, 6), "b": (8,), "qkv": (12, 4), "n": (3,)}


def values() -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint; every element is another."""
    found: dict[str, torch.Tensor] = {}
    for name, shape in SHAPES.items():
        for key in (f"weights/{name}", f"state/{name}/exp_avg"):
            size = torch.Size(shape).numel()
            found[key] = torch.arange(size, dtype=torch.float32).view(shape) + 1000 * len(found)
        found[f"state/{name}/step"] = torch.tensor(7.0, dtype=torch.float64)
    found["buffers/mean"] = torch.arange(5)
    return found


def write(folder: Path, placement: Placement) -> Path:
    """Write a checkpoint as a run with this placement does."""
    made = folder / "step-00000007"
    made.mkdir(parents=True)
    ranks = range(placement.grid.size)
    own: dict[int, list[tuple[TensorPiece, torch.Tensor]]] = {rank: [] for rank in ranks}
    for turn, (name, value) in enumerate(values().items()):
        shape = SHAPES.get(offline.weight_name_of(name))
        if shape is None or tuple(value.shape) != shape:
            own[0].append(
                (TensorPiece.for_region(name, value.dtype, full_region(value.shape)), value)
            )
            continue
        for part, holders in placement.holders_of(offline.weight_name_of(name), shape).items():
            box = Region(shape, part, 0, count_elements(part))
            data = value
            for dim, ranges in enumerate(part):
                data = torch.cat([data.narrow(dim, low, high - low) for low, high in ranges], dim)
            own[holders[turn % len(holders)]].append(
                (TensorPiece.for_region(name, value.dtype, box), data.contiguous())
            )
    for rank in ranks:
        state = torch.tensor([rank], dtype=torch.uint8)
        own[rank].append(
            (TensorPiece.for_region(f"rng/{rank}", state.dtype, full_region(state.shape)), state)
        )
        storage.write_rank(made, rank, own[rank])
    names = [f"rank-{rank:05d}.json" for rank in ranks]
    plain = {
        "format": storage.FORMAT_VERSION,
        "steps": 7,
        "position": [1, 2],
        "seed": 3,
        "world": len(ranks),
    }
    storage.write_json(made / "run.json", {**plain, "indices": names})
    return made


def random_placement(dice: random.Random) -> Placement:
    degrees = {"pp": (1, 2), "dp": (1, 2), "x": (1, 2, 3), "y": (1, 2)}
    grid = meshes.make_mesh(**{axis: dice.choice(found) for axis, found in degrees.items()}).grid
    weights = {}
    for name, shape in SHAPES.items():
        stacks: list[list[str]] = [[] for _ in shape]
        for axis in dice.sample(("x", "y"), 2):
            place = dice.randint(-1, len(shape) - 1)
            if place >= 0:
                stacks[place].append(axis)
        stages = None if dice.random() < 0.5 else (dice.randrange(grid.degree("pp")),)
        blocks = {0: (6, 3, 3)} if name == "qkv" and dice.random() < 0.7 else {}
        weights[name] = WeightLayout(L(*map(tuple, stacks)), stages, blocks)
    return Placement(grid, weights)


@pytest.mark.parametrize("seed", range(30))
def test_any_mesh_to_any_other(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    source, target = random_placement(dice), random_placement(dice)
    folder = write(tmp_path / "old", source)
    done = offline.transform_checkpoint(tmp_path / "old", tmp_path / "new", target)
    assert done.folder == tmp_path / "new" / folder.name
    reader = CheckpointReader(done.folder)
    for name, value in values().items():
        torch.testing.assert_close(
            reader.read_tensor(name).view(value.shape), value, rtol=0, atol=0
        )
    assert [int(reader.read_tensor(f"rng/{rank}")) for rank in range(source.grid.size)] == list(
        range(source.grid.size)
    )
    assert {
        "steps": 7,
        "position": [1, 2],
        "seed": 3,
        "world": source.grid.size,
    }.items() <= reader.run_json.items()
    for (
        name,
        shape,
    ) in (
        SHAPES.items()
    ):  # each part of the new mesh is one piece, in the file of a rank that holds it
        held = target.holders_of(name, shape)
        pieces = reader.pieces_of(f"weights/{name}")
        assert {piece.region.ranges for piece in pieces} == set(held)
        assert all(offline.rank_of_piece(piece) in held[piece.region.ranges] for piece in pieces)
    assert not list((tmp_path / "new").glob(".*"))


@pytest.mark.parametrize("seed", range(8))
def test_the_list_of_ranks_is_enough_and_tight(tmp_path: Path, seed: int) -> None:
    """With the files of the list every part can be read, without any one of them not all."""
    dice = random.Random(100 + seed)
    source, target = random_placement(dice), random_placement(dice)
    folder = write(tmp_path, source)
    reader = CheckpointReader(folder)
    lists = offline.needed_ranks(reader, target)
    files = {
        rank: (folder / f"rank-{rank:05d}.bin").read_bytes() for rank in range(source.grid.size)
    }

    def readable(rank: int, ranks: set[int]) -> bool:
        for other in files:
            path = folder / f"rank-{other:05d}.bin"
            path.write_bytes(files[other]) if other in ranks else path.unlink(missing_ok=True)
        try:
            for share in offline.place_tensors(reader, target):
                if rank in share.ranks and not share.name.startswith("rng/"):
                    reader.read_tensor(share.name, share.region)
        except (ConfigError, OSError):
            return False
        return True

    for rank, needed in lists.items():
        assert readable(rank, set(needed))
        assert not any(readable(rank, set(needed) - {one}) for one in needed)


def test_a_rank_reads_no_more_than_what_it_holds(tmp_path: Path) -> None:
    four = Placement(
        meshes.make_mesh(tp=4).grid, {"w": WeightLayout(L("tp", None)), "b": WeightLayout(L("tp"))}
    )
    two = Placement(meshes.make_mesh(tp=2).grid, four.weights)
    reader = CheckpointReader(write(tmp_path, four))
    named = {rank: set() for rank in range(2)}
    for share in offline.place_tensors(reader, two):
        if share.name == "weights/w":
            for rank in share.ranks:
                named[rank] |= {
                    offline.rank_of_piece(p)
                    for p, _ in storage.find_sources(reader.pieces_of(share.name), share.region)
                }
    assert named == {0: {0, 1}, 1: {2, 3}}


def test_a_format_1_checkpoint_is_taken(tmp_path: Path) -> None:
    """Ranges of flattened tensors, as runs on the data axis alone saved them."""
    folder = tmp_path / "step-00000007"
    folder.mkdir()
    value = torch.arange(48.0).view(8, 6)
    for rank, (low, high) in enumerate(((0, 20), (20, 48))):
        piece = TensorPiece("weights/w", "float32", (8, 6), low, high)
        storage.write_rank(folder, rank, [(piece, value.view(-1)[low:high].contiguous())])
        index = json.loads((folder / f"rank-{rank:05d}.json").read_text())
        for entry in index:
            entry.pop("ranges")
        (folder / f"rank-{rank:05d}.json").write_text(json.dumps(index))
    plain = {"format": 1, "steps": 7, "position": [0, 0], "seed": 0, "world": 2}
    storage.write_json(
        folder / "run.json", {**plain, "indices": ["rank-00000.json", "rank-00001.json"]}
    )
    target = Placement(meshes.make_mesh(tp=2).grid, {"w": WeightLayout(L(None, "tp"))})
    done = offline.transform_checkpoint(folder, tmp_path / "new", target)
    reader = CheckpointReader(done.folder)
    assert reader.run_json["format"] == storage.FORMAT_VERSION
    torch.testing.assert_close(reader.read_tensor("weights/w").view(8, 6), value)
    part = Region((8, 6), (((0, 8),), ((3, 6),)), 0, 24)
    torch.testing.assert_close(reader.read_tensor("weights/w", part).view(8, 3), value[:, 3:])


# ---- with runs --------------------------------------------------------------

CASE = zoo.Case(4, 0, 1, None, True, True, (24, 24), None)


def run_on(folder: str, degrees: dict[str, int], level: int, steps: range, take: bool) -> Any:
    """Train, or take a checkpoint up and train on; return losses and the plan's file."""
    names = [name for name in degrees if name not in ("pp", "dp", "cp")]
    world = torch.distributed.get_world_size()
    case = zoo.Case(world, level, 1, None, True, True, (24, 24), None)
    run = zoo.make(case, mesh=meshes.make_mesh(**degrees), strategy=Megatron(*names))
    if take:
        run.load(folder)
    losses = [run.step(zoo.batch_of(24, step)).loss for step in steps]
    if not take:
        run.save(folder)
    return losses, run.plan.to_json()


@pytest.mark.slow
def test_a_run_goes_on_from_a_transformed_checkpoint(worlds: Any, tmp_path: Path) -> None:
    """
    (dp=2, tp=2) at level 2 to (dp=1, tp=4): the losses are those of the run that went on by itself.
    """
    before, plan = worlds(4).run(
        run_on, str(tmp_path / "old"), {"dp": 2, "tp": 2}, 2, range(2), False
    )[0]
    (tmp_path / "plan.json").write_text(plan)
    placement = offline.placement_for("dp=1,tp=4", str(tmp_path / "plan.json"))
    assert placement.weights["blocks.0.qkv.weight"].layout == L("tp", None)
    assert len(placement.weights["blocks.0.qkv.weight"].blocks[0]) == 3
    offline.transform_checkpoint(tmp_path / "old", tmp_path / "new", placement)
    wide = worlds(4).run(run_on, str(tmp_path / "new"), {"dp": 1, "tp": 4}, 0, range(2, 4), True)[
        0
    ][0]
    same = worlds(4).run(run_on, str(tmp_path / "old"), {"dp": 2, "tp": 2}, 2, range(2, 4), True)[
        0
    ][0]
    assert len(before) == 2
    assert wide == pytest.approx(same, rel=2e-5)


def staged(folder: str) -> Any:
    """
    Train a model in two stages that share the embedding; return the plan's file, the weights, and
    what is held.
    """
    run = piped.make(piped.Case(model="tied"))
    run.step(zoo.batch_of(16, 0))
    run.save(folder)
    held = [weight.name for weight in run.state.engine.weights]
    return (
        run.plan.to_json(),
        {name: value.clone() for name, value in run.full_weights().items()},
        held,
    )


def test_stages_are_told_and_kept_apart(worlds: Any, tmp_path: Path) -> None:
    """
    Each stage's file has that stage's weights, and only these files are needed there; one rank gets
    all.
    """
    message = worlds(2).run(staged, str(tmp_path / "old"))
    (tmp_path / "plan.json").write_text(message[0][0])
    assert json.loads(message[1][0])["weights"] == json.loads(message[0][0])["weights"]
    placement = offline.placement_for("", str(tmp_path / "plan.json"))
    for rank, (_, _, held) in enumerate(message):
        there = [
            name
            for name, one in placement.weights.items()
            if one.stages is None or rank in one.stages
        ]
        assert sorted(there) == sorted(held)
    again = offline.transform_checkpoint(tmp_path / "old", tmp_path / "again", placement)
    lists = offline.needed_ranks(CheckpointReader(again.folder), placement)
    assert 0 in lists[0] and 1 in lists[1]
    alone = offline.transform_checkpoint(
        tmp_path / "old", tmp_path / "alone", offline.placement_for("dp=1", "")
    )
    reader = CheckpointReader(alone.folder)
    for name, value in message[0][1].items():
        torch.testing.assert_close(
            reader.read_tensor(f"weights/{name}").view(value.shape), value, rtol=0, atol=0
        )


# ---- the command ------------------------------------------------------------


def pdrun(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pdrun", "checkpoint", *words]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    four = Placement(
        meshes.make_mesh(tp=4).grid, {"w": WeightLayout(L("tp", None)), "b": WeightLayout(L("tp"))}
    )
    write(tmp_path / "old", four)
    four.save(tmp_path / "plan.json")
    done = pdrun(
        "transform", "old", "new", "--mesh", "tp=2", "--strategy", "plan.json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    head, columns, *rows = done.stdout.splitlines()
    assert head == "new/step-00000007: 2 ranks (pp=1, dp=1, cp=1, tp=2)"
    assert (
        columns.split() == ["rank", "bytes", "from", "the", "files", "of", "ranks"]
        and len(rows) == 2
    )
    shown = pdrun("show", "new", "--mesh", "tp=1", cwd=tmp_path).stdout.splitlines()
    assert shown[0] == "new/step-00000007: step 7, epoch 1, saved by 2 ranks"
    row = next(line.split() for line in shown if line.startswith("weights/w "))
    assert row == ["weights/w", "float32", "8", "x", "6", "2", "0-1"]
    assert shown[-1].split() == ["0", "0-1"]


def test_what_is_shown_as_data(tmp_path: Path) -> None:
    four = Placement(meshes.make_mesh(tp=4).grid, {"w": WeightLayout(L("tp", None))})
    write(tmp_path / "old", four)
    four.save(tmp_path / "plan.json")
    plain = json.loads(
        offline_words.show_checkpoint(
            str(tmp_path / "old"), "tp=2", str(tmp_path / "plan.json"), as_json=True
        )
    )
    assert plain["tensors"]["weights/w"]["parts"] == 4 and plain["steps"] == 7
    assert plain["needs"].keys() == {"0", "1"}


def test_another_of_that_name_is_not_replaced(tmp_path: Path) -> None:
    write(tmp_path, Placement(meshes.make_mesh(tp=2).grid, {}))
    with pytest.raises(UsageError, match=r"step-00000007 exists"):
        offline_words.transform_and_report(str(tmp_path), str(tmp_path), "tp=4", "")


def test_strategy_files_are_converted(tmp_path: Path) -> None:
    Placement(Grid(("tp",), (4,)), {"w": WeightLayout(L("tp", None))}).save(tmp_path / "plan.json")
    there = offline_words.convert_layout_file(str(tmp_path / "plan.json"), "mindspore")
    assert json.loads(there)["parallel_layout_item"]["w"]["tensor_map"] == [0, -1]
    (tmp_path / "ms.json").write_text(there)
    back = json.loads(offline_words.convert_layout_file(str(tmp_path / "ms.json"), "pdrun"))
    assert back == {"mesh": {"d0": 4}, "weights": {"w": {"layout": ["d0", None]}}}


@pytest.mark.parametrize(
    ("mesh", "strategy", "message"),
    [
        ("", "", "a mesh or a layout file is required"),
        ("tp", "", "must be a list of AXIS=COUNT, got 'tp'"),
        ("tp=0", "", "must be a list of AXIS=COUNT, got 'tp=0'"),
        ("tp=-1", "", "must be a list of AXIS=COUNT, got 'tp=-1'"),
        ("tp=2,tp=2", "", "axis tp is listed twice"),
        (
            "dp=2",
            '{"mesh": {"x": 2}, "weights": {"w": {"layout": ["x", null]}}}',
            "w: is cut over 'x', and the mesh",
        ),
        (
            "tp=2",
            '{"mesh": {"tp": 2}, "weights": {"wx": {"layout": ["tp", null]}}}',
            "has no weight wx",
        ),
        (
            "tp=2",
            '{"mesh": {"tp": 2}, "weights": {"w": {"layout": ["tp"]}}}',
            "w: L('tp') is for 1 dims",
        ),
        ("tp=2", "{", "cannot be read as JSON"),
    ],
)
def test_what_is_refused(tmp_path: Path, mesh: str, strategy: str, message: str) -> None:
    write(tmp_path / "old", Placement(meshes.make_mesh(tp=2).grid, {}))
    path = tmp_path / "plan.json"
    path.write_text(strategy)
    with pytest.raises((UsageError, ConfigError)) as caught:
        offline_words.transform_and_report(
            str(tmp_path / "old"), str(tmp_path / "new"), mesh, str(path) if strategy else ""
        )
    assert message in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_nothing_is_left_where_a_file_is_damaged(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "old", Placement(meshes.make_mesh(tp=2).grid, {"w": WeightLayout(L("tp", None))})
    )
    data = bytearray((folder / "rank-00001.bin").read_bytes())
    data[:] = b"\xff" * len(data)
    (folder / "rank-00001.bin").write_bytes(data)
    with pytest.raises(ConfigError, match="wrong checksum"):
        offline.transform_checkpoint(
            folder, tmp_path / "new", Placement(meshes.make_mesh(dp=1).grid, {})
        )
    assert list((tmp_path / "new").iterdir()) == []


def test_an_empty_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no complete checkpoint"):
        offline_words.show_checkpoint(str(tmp_path))


def test_the_steps_between_two_placements_of_a_weight() -> None:
    """What a job that goes on with other layouts does in memory is what the layouts say, too."""
    grid = meshes.make_mesh(tp=4).grid
    plan = plan_redistribution(
        View(grid, L("tp", None), SHAPES["w"]), View(grid, L(None, "tp"), SHAPES["w"])
    )
    assert [step.kind for step in plan.steps] == ["all_to_all"]


@pytest.mark.parametrize("name", ["run.json", "rank-00000.json"])
@pytest.mark.parametrize("text", ["3", "null", '["x"]', '{"format": 99}', "[" * 100000])
def test_files_with_other_json_in_them_are_no_checkpoint(
    tmp_path: Path, name: str, text: str
) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    (folder / "run.json").write_text('{"format": 2, "indices": ["rank-00000.json"]}')
    (folder / "rank-00000.json").write_text("[]")
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match="is not a complete checkpoint"):
        CheckpointReader(folder)


@pytest.mark.parametrize(
    "weight",
    [
        {"layout": "tp"},
        {"layout": None, "stages": []},
        {"layout": ["tp"], "blocks": {"0": [-4, 8]}},
    ],
)
def test_a_file_of_layouts_with_nonsense_in_it(weight: object) -> None:
    with pytest.raises(ConfigError, match="no file of layouts"):
        Placement.from_plain({"mesh": {"tp": 2}, "weights": {"w": weight}})


def test_a_mesh_of_more_ranks_than_any_job_has_is_refused() -> None:
    with pytest.raises(UsageError, match="99999999 ranks"):
        offline.placement_for("tp=99999999", "")


def test_a_target_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    folder = tmp_path / "source" / "step-00000001"
    folder.mkdir(parents=True)
    plain = {"format": 2, "indices": [], "steps": 1, "position": [0, 0], "seed": 1, "world": 1}
    (folder / "run.json").write_text(json.dumps(plain))
    with pytest.raises(ConfigError, match="cannot create a folder"):
        offline.transform_checkpoint(folder, tmp_path / "target", offline.placement_for("tp=2", ""))
