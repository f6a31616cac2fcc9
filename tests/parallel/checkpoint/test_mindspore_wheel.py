"""
MindSpore's own transform agrees with ours: random pairs of strategy files, optimizer shards and
stages included. Its CPU wheel is looked for beside torch, and in the folder of
PYTEST_PDRUN_FRAMEWORKS.
"""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdrun.errors import ConfigError
from pdrun.parallel.layouts.common_grid import axis_spans
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.layouts.mindspore import from_mindspore, to_mindspore
from pdrun.parallel.layouts.placement import Placement, WeightLayout, rank_list

PAIRS = 200
SHAPES = {"emb.weight": (16, 8), "norm.weight": (32,), "mid.weight": (8, 16, 4)}

WHEEL = """
import json, os, shutil, sys
import numpy as np
import mindspore as ms

def full(shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

def cut(shape, ranges):
    return full(shape)[np.ix_(*[[i for low, high in dim for i in range(low, high)] for dim in ranges])]

found = []
for number, case in enumerate(json.load(open(sys.argv[1]))):
    folder = f"{sys.argv[2]}/{number}"
    for rank, parts in enumerate(case["parts"]):
        os.makedirs(f"{folder}/src/rank_{rank}")
        data = [{"name": n, "data": ms.Tensor(cut(case["shapes"][n], r))} for n, r in parts.items()]
        ms.save_checkpoint(data, f"{folder}/src/rank_{rank}/net.ckpt")
    files = {}
    for side in ("src", "dst"):
        files[side] = f"{folder}/{side}.json"
        json.dump(case[side], open(files[side], "w"))
    result = {"lists": [], "parts": []}
    for rank in range(case["ranks"]):
        ranks = [int(one) for one in ms.rank_list_for_transform(rank, files["src"], files["dst"])]
        result["lists"].append(ranks)
        sources = {r: f"{folder}/src/rank_{r}/net.ckpt" for r in ranks}
        out = f"{folder}/dst_{rank}.ckpt"
        ms.transform_checkpoint_by_rank(rank, sources, out, files["src"], files["dst"])
        loaded = ms.load_checkpoint(out)
        result["parts"].append({n: p.asnumpy().ravel().tolist() for n, p in loaded.items()})
    shutil.rmtree(folder)
    found.append(result)
json.dump(found, open(sys.argv[3], "w"))
"""


def find_wheel() -> str | None:
    """Return the folder of MindSpore's package, or None."""
    for folder in (os.environ.get("PYTEST_PDRUN_FRAMEWORKS", ""), *sys.path):
        if folder and (Path(folder) / "mindspore").is_dir():
            return folder
    return None


def make_strategy(dice: random.Random, devices: int, stages: int) -> dict[str, Any]:
    """Return a random strategy file of a number of devices and stages."""
    while True:
        sizes = dice.choice(
            {2: [(2,)], 4: [(4,), (2, 2)], 8: [(8,), (2, 4), (4, 2), (2, 2, 2)]}[devices // stages]
        )
        names = ("a", "b", "c")[: len(sizes)]
        grid = Grid(names, sizes)
        weights = {}
        order = dice.sample(range(stages), stages)
        for number, (name, shape) in enumerate(SHAPES.items()):
            dims: list[list[str]] = [[] for _ in shape]
            for axis in names:
                if dice.random() < 0.6:
                    dims[dice.randrange(len(shape))].append(axis)
            layout = L(*map(tuple, dims))
            stage = None if stages == 1 else (order[number % stages],)
            weights[name] = WeightLayout(layout, stage)
        whole = Grid(("pp", *names), (stages, *sizes)) if stages > 1 else grid
        if any(
            size % grid.group_size(axes)
            for name, one in weights.items()
            for size, axes in zip(SHAPES[name], (one.layout or L()).dims, strict=True)
        ):
            continue
        try:
            value = to_mindspore(Placement(whole, weights))
        except ConfigError:
            continue
        for key, item in value["parallel_layout_item"].items():
            shape = SHAPES[key.split("-", 1)[-1]]
            shard_optimizer(dice, item, shape)
        return value


def shard_optimizer(dice: random.Random, item: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Give a parameter an optimizer shard over all devices that hold the same, or some."""
    used = {
        one
        for entry in item["tensor_map"]
        for one in ([entry] if isinstance(entry, int) else entry)
    }
    matrix = Grid(
        tuple(f"m{at}" for at in range(len(item["dev_matrix"]))), tuple(item["dev_matrix"])
    )
    free = [
        axis
        for at, axis in enumerate(matrix.names)
        if len(matrix.names) - 1 - at not in used and matrix.degree(axis) > 1
    ]
    if item["opt_weight_shard_size"] or not free or dice.random() < 0.4:
        return
    size = matrix.group_size(tuple(free))
    first = item["tensor_map"][0]
    parts = 1 if first == -1 else matrix.sizes[len(matrix.sizes) - 1 - first]
    if shape[0] % (parts * size):
        return
    item["opt_weight_shard_size"] = dice.choice([-1, size])
    item["opt_weight_shard_step"] = axis_spans(matrix)[free[-1]][0]


def make_case(dice: random.Random) -> dict[str, Any]:
    """Return a pair of strategies with the parts of the source's ranks."""
    source, target = dice.choice([(8, 8), (8, 4), (4, 8), (4, 4)])
    stages = [dice.choice([1, 1, 2]) for _ in range(2)]
    src = make_strategy(dice, source, stages[0])
    dst = make_strategy(dice, target, stages[1])
    parts = parts_of(from_mindspore(src), source)
    return {"src": src, "dst": dst, "ranks": target, "parts": parts, "shapes": SHAPES}


def parts_of(placement: Placement, ranks: int) -> list[dict[str, Any]]:
    found = []
    for rank in range(ranks):
        held = {name: placement.shard_ranges(name, shape, rank) for name, shape in SHAPES.items()}
        found.append({name: ranges for name, ranges in held.items() if ranges is not None})
    return found


@functools.cache
def elements(shape: tuple[int, ...], ranges: Any) -> list[float]:
    """Return the numbers of a part of a tensor that counts its elements."""
    found = [0]
    for size, dim in zip(shape, ranges, strict=True):
        found = [base * size + at for base in found for low, high in dim for at in range(low, high)]
    return [float(one) for one in found]


def is_enough(case: dict[str, Any], ranks: list[int], target: Placement, rank: int) -> bool:
    """Return whether some ranks of the source have all that a rank of the target needs."""
    for name, shape in SHAPES.items():
        ranges = target.shard_ranges(name, shape, rank)
        if ranges is not None:
            held = [case["parts"][one][name] for one in ranks if name in case["parts"][one]]
            here = {number for part in held for number in elements(shape, part)}
            if not here >= set(elements(shape, ranges)):
                return False
    return True


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_wheel() is None, reason="MindSpore is not installed")
def test_transforms_and_rank_lists_agree(tmp_path: Path) -> None:
    dice = random.Random(16)
    cases = [make_case(dice) for _ in range(PAIRS)]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    (tmp_path / "wheel.py").write_text(WHEEL)
    files = [str(tmp_path / name) for name in ("wheel.py", "cases.json", "work", "found.json")]
    subprocess.run(
        [sys.executable, *files],
        env={**os.environ, "PYTHONPATH": str(find_wheel()), "GLOG_v": "3"},
        cwd=tmp_path,
        check=True,
        timeout=1800,
    )
    found = json.loads((tmp_path / "found.json").read_text())
    compared = 0
    for case, result in zip(cases, found, strict=True):
        source, target = from_mindspore(case["src"]), from_mindspore(case["dst"])
        for rank in range(case["ranks"]):
            for name, shape in SHAPES.items():
                ranges = target.shard_ranges(name, shape, rank)
                if ranges is not None:
                    assert result["parts"][rank][name] == elements(shape, ranges), (
                        case,
                        rank,
                        name,
                    )
                    compared += 1
            theirs = result["lists"][rank]
            assert is_enough(case, theirs, target, rank), (case, rank, theirs)
            ours = rank_list(source, target, SHAPES, rank)
            assert is_enough(case, ours, target, rank) and len(ours) <= len(theirs), (case, rank)
    print(f"{PAIRS} pairs, {compared} parts")
    assert compared > 5 * PAIRS
