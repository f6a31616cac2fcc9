"""
What needs no process group: meshes, slices, layouts, fusion, units, and the complaints about wrong
arguments.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pdrun.errors import UsageError
from pdrun.parallel.comm import mesh
from pdrun.parallel.data import batch_slicing as slicing
from pdrun.parallel.data import loader
from pdrun.parallel.model import recompute, weights
from pdrun.parallel.model.find_units import find_units
from pdrun.parallel.rng.hashing import hash_uniform31, mix_bits
from pdrun.parallel.training import loss
from pdrun.parallel.zero import flat_layout as flat
from pdrun.parallel.zero import gradients as grads
from pdrun.parallel.zero import optimizer as retarget
from pdrun.parallel.zero import settings
from tests.lib import small_models as zoo

pytestmark = pytest.mark.torch


# ---- mesh -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "degrees", "want"),
    [
        (4, {"dp": -1}, mesh.make_mesh(dp=4)),
        (1, {"dp": -1, "tp": 1}, mesh.make_mesh()),
        (8, {"dp": 8, "pp": 1}, mesh.make_mesh(dp=8)),
        (8, {"tp": 2, "dp": -1, "pp": 2}, mesh.make_mesh(pp=2, dp=2, tp=2)),
        (8, {"dp": 2, "x": 2, "y": -1}, mesh.make_mesh(dp=2, x=2, y=2)),
    ],
)
def test_degrees_are_solved(world: int, degrees: dict[str, int], want: mesh.Mesh) -> None:
    assert mesh.solve_mesh(world, degrees) == want
    assert want.size == world


@pytest.mark.parametrize(
    ("world", "degrees", "text"),
    [
        (4, {"dp": 0}, "dp=0 is neither"),
        (4, {"dp": -1, "pp": -1}, "both -1"),
        (4, {"dp": True}, "neither -1 nor"),
        (4, {"dp": 3}, r"product of \(dp=3\), 3, is not the number of devices, 4"),
        (4, {"dp": -1, "pp": 3}, "does not divide"),
    ],
)
def test_wrong_degrees_are_refused(world: int, degrees: dict[str, int], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        mesh.solve_mesh(world, degrees)


# ---- slices -----------------------------------------------------------------


@given(st.integers(0, 200), st.integers(1, 9), st.integers(1, 5))
def test_slices_cover_the_rows_once_and_evenly(rows: int, world: int, times: int) -> None:
    cut = slicing.slice_rows(rows, world, times)
    in_order = [cut[rank][a] for a in range(times) for rank in range(world)]
    assert [row for piece in in_order for row in piece] == list(range(rows))
    assert max(map(len, in_order)) - min(map(len, in_order)) <= 1


@given(st.integers(0, 100), st.integers(1, 4), st.integers(1, 4))
def test_slices_do_not_depend_on_who_computes_them(rows: int, world: int, times: int) -> None:
    alone = slicing.slice_rows(rows, 1, world * times)[0]
    cut = slicing.slice_rows(rows, world, times)
    assert [cut[rank][a] for a in range(times) for rank in range(world)] == alone


@pytest.mark.parametrize(
    ("value", "dims"),
    [
        (None, None),
        ("sliced", None),
        ((0, None, 1), (0, None, 1)),
        (((4, 1), (4,), (1, 1)), (0, 0, None)),
    ],
)
def test_dataset_strategies(value: Any, dims: Any) -> None:
    assert slicing.parse_batch_slicing(value, 4).dims == dims


@pytest.mark.parametrize("value", ["fullbatch", 3, ((2, 1),), ((4, 4),), (True,), (-1,), ("dp",)])
def test_wrong_dataset_strategies(value: Any) -> None:
    with pytest.raises(UsageError, match="dataset_strategy"):
        slicing.parse_batch_slicing(value, 4)


def test_batches_are_cut_by_dim() -> None:
    batch = {"image": torch.arange(24).view(2, 3, 4), "label": torch.arange(4), "name": "x"}
    strategy = slicing.parse_batch_slicing((2, 0, None), 2)
    part = slicing.take_rows(batch, range(1, 3), strategy)
    assert slicing.count_rows(batch, strategy) == 4
    assert part["image"].tolist() == batch["image"][:, :, 1:3].tolist()
    assert (part["label"].tolist(), part["name"]) == ([1, 2], "x")


def test_strings_and_arrays_go_with_the_rows() -> None:
    numpy = pytest.importorskip("numpy")
    batch = {
        "x": torch.arange(4),
        "id": ["a", "b", "c", "d"],
        "both": [("a", "b", "c", "d"), (b"e", b"f", b"g", b"h")],
        "array": numpy.arange(8).reshape(4, 2),
        "classes": ("cat", "dog"),
        "other": numpy.arange(3),
        "n": [1, 2, 3, 4],
    }
    part = slicing.take_rows(batch, range(1, 3), slicing.BatchSlicing())
    assert slicing.count_rows(batch, slicing.BatchSlicing()) == 4
    assert (part["x"].tolist(), part["id"], part["both"]) == (
        [1, 2],
        ["b", "c"],
        [("b", "c"), (b"f", b"g")],
    )
    assert (part["array"].tolist(), part["other"].tolist()) == ([[2, 3], [4, 5]], [0, 1, 2])
    assert (part["classes"], part["n"]) == (("cat", "dog"), [1, 2, 3, 4])
    assert slicing.take_rows(batch, range(2), slicing.BatchSlicing(full_batch=True))["id"] == [
        "a",
        "b",
        "c",
        "d",
    ]
    pair = (["a", "b"], numpy.arange(6).reshape(3, 2))
    assert slicing.take_rows(pair, range(1), slicing.BatchSlicing((0, 1)))[1].tolist() == [
        [0],
        [2],
        [4],
    ]
    assert slicing.take_rows(pair, range(1), slicing.BatchSlicing((None, 1)))[0] == ["a", "b"]
    assert slicing.count_rows(["a", "b", "c"], slicing.BatchSlicing()) == 3


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ((torch.ones(3), torch.ones(4)), "different numbers of rows: 3 in leaf 0, 4 in leaf 1"),
        ("x", "no tensor to slice"),
    ],
)
def test_wrong_batches(batch: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        slicing.count_rows(batch, slicing.BatchSlicing())


# ---- flat buffers -----------------------------------------------------------

shapes = st.lists(st.lists(st.integers(0, 70), max_size=3), min_size=1, max_size=8)


@given(shapes, st.integers(1, 5), st.integers(1, 3))
def test_shards_cover_each_weight_once(sizes: list[list[int]], shards: int, copies: int) -> None:
    layout = flat.make_flat_layout(
        [(str(i), shape) for i, shape in enumerate(sizes)], shards, shards * copies
    )
    covered: list[set[int]] = [set() for _ in sizes]
    for shard in range(shards):
        for segment in layout.segments_of(shard):
            mine = set(range(segment.start, segment.stop))
            assert not covered[segment.slot] & mine
            covered[segment.slot] |= mine
            place = shard * layout.shard_numel + segment.offset
            assert place == layout.slots[segment.slot].start + segment.start
            assert segment.start % flat.ALIGN_ELEMENTS == 0
    assert [len(found) for found in covered] == [torch.Size(shape).numel() for shape in sizes]
    assert layout.numel % (shards * copies * flat.ALIGN_ELEMENTS) == 0


# ---- fusion and units -------------------------------------------------------


def bundles(value: Any, level: int = 0) -> list[list[str]]:
    found = weights.collect_weights(
        nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    )
    return [
        [w.name[0] for w in group]
        for group in weights.make_buckets(found, weights.parse_bucket_policy(value, level))
    ]


def test_fusion() -> None:
    """Each weight has 1 MiB; the order is that of gradients, last first."""
    assert bundles("auto") == [["3"], ["2", "1", "0"]]
    assert bundles(2) == [["3", "2"], ["1", "0"]]
    assert bundles(False) == bundles({"openstate": False}) == [["3"], ["2"], ["1"], ["0"]]
    assert (
        bundles([1, 3])
        == bundles({"allreduce": {"mode": "index", "config": [1, 3]}})
        == [["3"], ["2", "1"], ["0"]]
    )
    assert bundles({"reducescatter": {"mode": "size", "config": 2}}, 1) == [["3", "2"], ["1", "0"]]
    assert bundles({"allreduce": {"mode": "auto"}}) == bundles("auto")


@pytest.mark.parametrize(
    "value",
    [
        "size",
        0,
        -1,
        True,
        [0, 2],
        [3, 1],
        {"allreduce": {"mode": "bytes"}},
        {"all_reduce": {}},
        {"allgather": {"mode": "index", "config": [1]}},
        {
            "allgather": {"mode": "size", "config": 1},
            "reducescatter": {"mode": "size", "config": 2},
        },
    ],
)
def test_wrong_fusion(value: Any) -> None:
    with pytest.raises(UsageError, match="comm_fusion"):
        weights.parse_bucket_policy(value, 1)


def test_units_and_ties() -> None:
    model = zoo.build(tied=True)
    assert find_units(model, None) == ["blocks.0", "blocks.1", "blocks.2"]
    assert find_units(model, ["blocks.[01]", "norm"]) == ["blocks.0", "blocks.1", "norm"]
    assert find_units(nn.Bilinear(2, 2, 2), None) == []
    assert weights.tied_names(model) == [["emb.weight", "head.weight"]]
    found = weights.collect_weights(model)
    weights.assign_units(model, found, ["emb", "head", "blocks.0"])
    assert {w.unit for w in found if w.name == "emb.weight"} == {""}  # used by two units
    with pytest.raises(UsageError, match="matches no module"):
        find_units(model, ["block.*"])
    with pytest.raises(UsageError, match="inside another"):
        find_units(model, ["blocks.0", "blocks.0.up"])


def test_weights_that_cannot_be_used() -> None:
    with pytest.raises(UsageError, match=r"has no shape yet; run the lazy module once"):
        weights.collect_weights(nn.LazyLinear(3))
    with pytest.raises(UsageError, match="no weight that requires a gradient"):
        weights.collect_weights(nn.ReLU())
    with pytest.raises(UsageError, match=r"layerwise='heads\.\*' matches no weight"):
        weights.collect_weights(zoo.build(), ["heads.*"])


# ---- optimizers -------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(zoo.OPTIMIZERS))
def test_elementwise_optimizers_are_known_by_trying(name: str) -> None:
    made = zoo.OPTIMIZERS[name]([nn.Parameter(torch.ones(3, 3))])
    retarget.check_elementwise(made, torch.device("cpu"))
    assert not made.state or name == "Adagrad"


class Normed(torch.optim.SGD):
    """A user's own optimizer: normalises each tensor's update."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.data -= group["lr"] * param.grad / param.grad.norm()


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, Normed, torch.optim.Muon])
def test_others_are_refused_by_name(kind: Any) -> None:
    made = kind([nn.Parameter(torch.ones(3, 3))], lr=0.1)
    with pytest.raises(UsageError, match=f"{kind.__name__} cannot be sharded.*optimizer_level=0"):
        retarget.check_elementwise(made, torch.device("cpu"))


def test_wrong_optimizers() -> None:
    params = list(zoo.build().parameters())
    with pytest.raises(UsageError, match="LBFGS is not supported"):
        retarget.build_optimizer(torch.optim.LBFGS, params)
    with pytest.raises(UsageError, match="not a trained weight of the model"):
        retarget.build_optimizer(
            lambda ps: torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0), params
        )
    with pytest.raises(UsageError, match="or a function that returns one, got None"):
        retarget.build_optimizer(lambda ps: None, params)


# ---- the rest ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: settings.check_level(4), "optimizer_level must be 0, 1, 2 or 3, got 4"),
        (
            lambda: settings.check_count("accumulate", 0),
            "accumulate must be an integer of at least 1, got 0",
        ),
        (lambda: settings.check_above_zero("clip", 0), "clip must be a number above 0, got 0"),
        (lambda: settings.parse_compress("int8"), "got 'int8'"),
        (lambda: settings.check_group(3, 4, 1), "must divide the 4"),
        (lambda: settings.check_group(2, 4, 0), "requires optimizer_level"),
        (lambda: recompute.apply_recompute(zoo.build(), "some"), "recompute must be"),
        (
            lambda: recompute.apply_recompute(zoo.build(), ["block.*"]),
            "'block.*' matches no module",
        ),
        (lambda: loader.Loader(iter([1]), 4), "dataset must have __len__"),
    ],
)
def test_wrong_arguments(call: Any, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        call()
    assert text in str(caught.value)


def test_losses() -> None:
    model = nn.Linear(2, 1)
    batch = (torch.ones(4, 2), torch.ones(4, 1))
    for told in (3, None, (torch.ones(2), 1), torch.ones(2)):
        with pytest.raises(UsageError, match="loss"):
            loss.Objective(model, lambda out, b, told=told: told)(model, batch, 4)
    plain = loss.Objective(model, lambda out, b: (out - b[1]).square().mean())
    total, count = plain(model, batch, 4)
    assert (plain.is_mean, float(count)) == (True, 4.0)
    assert float(total.detach()) == pytest.approx(
        float((model(batch[0]) - batch[1]).square().sum().detach())
    )
    assert loss.call_model(model, {"input": batch[0], "label": 1}).shape == (4, 1)
    with pytest.raises(
        UsageError, match=r"the model's forward has none of the batch's keys \(label\)"
    ):
        loss.call_model(model, {"label": 1})


def test_hashes_are_uniform() -> None:
    rows, places = torch.arange(64, dtype=torch.int32), torch.arange(4096, dtype=torch.int32)
    values = hash_uniform31(mix_bits(1, 2), rows, places).double() / 2**31
    counts = torch.histc(values, 64)
    assert (
        float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) < 120
    )  # chi-square, 63 degrees of freedom
    assert abs(float(torch.corrcoef(values[:2])[0, 1])) < 0.08
    assert abs(float(torch.corrcoef(values[:, :2].T)[0, 1])) < 0.6
    assert len({mix_bits(a, b) for a in range(50) for b in range(50)}) == 2500


def test_buffers_come_back_with_zeros_between_their_slots() -> None:
    """Norms look at all of a buffer: what another bundle left in the gaps would count."""
    pool, cpu = grads.BufferPool(), torch.device("cpu")
    long, short = (flat.make_flat_layout([("a", [size])], 1, 4) for size in (200, 100))
    assert long.numel == short.numel == 256
    full = pool.take_buffer(long, torch.float32, cpu)
    full[:200] = 1.0
    pool.return_buffer(long, full)
    again = pool.take_buffer(short, torch.float32, cpu)
    assert again is full
    assert not again[100:].any()
    again[:100] = 2.0
    pool.return_buffer(short, again)
    assert pool.take_buffer(short, torch.float32, cpu)[:100].eq(2.0).all()
