"""The outer search: degrees, savers, memory, and the text about them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pdrun.errors import UsageError
from pdrun.parallel.auto.auto import Auto, _take_part, cast_graph
from pdrun.parallel.auto.builtin_topologies import BUILTIN_TOPOLOGIES
from pdrun.parallel.auto.degrees.choices import StepChoice
from pdrun.parallel.auto.degrees.condense import HEAD, LAYER, TAIL
from pdrun.parallel.auto.degrees.guide import describe_choice
from pdrun.parallel.auto.degrees.memory import TrainingBytes, list_saved_tensors, resident_bytes
from pdrun.parallel.auto.degrees.pass_costs import PartCost, PassCost
from pdrun.parallel.auto.degrees.planner import PlanReport, plan_of
from pdrun.parallel.auto.degrees.step_costs import balance_stages, cost_step
from pdrun.parallel.auto.inputs import describe_start
from pdrun.parallel.auto.plan_file import parse_plan
from pdrun.parallel.layouts.grid import Grid
from tests.lib.tiers import thorough
from tests.parallel.auto import rank_runs
from tests.parallel.auto.golden_models import Chain, Decoder
from tests.parallel.auto.random_graphs import make_topology
from tests.parallel.auto.test_goldens import NODE, export_meta

pytestmark = pytest.mark.torch


def plan_decoder(devices: int = 4, rows: int = 8, layers: int = 4, **options: Any) -> PlanReport:
    """Plan a decoder 512 wide; without tensor axes, which take most of the time."""
    options.setdefault("fixed", {"tp": 1})
    with torch.device("meta"):
        model = Decoder(layers, 512, 8000, heads=8, groups=4, wide=2048)
    tokens = torch.zeros(rows, 256, dtype=torch.long)
    options.setdefault("topology", "h100x8")
    return plan_of(model, (tokens, tokens), devices=devices, gather=False, **options)


def test_best_candidate_fits_and_is_the_fastest() -> None:
    report = plan_decoder(memory="400MiB", fixed={})
    result = report.result
    assert result.fitting
    assert result.too_large
    seconds = [one.cost.total for one in result.fitting]
    assert seconds == sorted(seconds)
    assert all(one.cost.peak <= 400 * 2**20 for one in result.fitting)
    assert all(one.cost.peak > 400 * 2**20 for one in result.too_large)
    text = str(report)
    assert text.startswith("4 devices, 0.39 GiB each, 8 rows per step; topology h100x8, a guess")
    assert f"{len(result.fitting)} fit, {len(result.too_large)} need more memory" in text
    assert f"\nchosen: {describe_choice(report.choice)}; compared with it\n" in text
    assert "with tensor parallel:" in text or "without tensor parallel:" in text


@pytest.mark.thorough
def test_same_request_gives_the_same_bytes_and_more_memory_is_never_slower() -> None:
    limits = ("200MiB", "400MiB", "2GiB")
    reports = [plan_decoder(memory=limit) for limit in limits]
    seconds = [report.result.chosen.cost.total for report in reports]
    assert seconds == sorted(seconds, reverse=True)
    assert plan_decoder(memory=limits[0]).to_json() == reports[0].to_json()


@pytest.mark.thorough
def test_twelve_devices_are_planned_as_twelve() -> None:
    report = plan_decoder(devices=12, rows=24)
    choice = report.choice
    assert choice.pp * choice.dp * choice.tp == 12
    assert {one.choice.dp for one in report.result.fitting} >= {3, 6, 12}


def test_what_is_given_is_fixed_and_reaches_the_file() -> None:
    report = plan_decoder(
        8, 16, fixed={"tp": 2, "pp": 2, "level": 1, "microbatches": 4}, recompute=False
    )
    assert report.choice.options == {"optimizer_level": 1}
    assert {(one.choice.pp, one.choice.tp) for one in report.result.fitting} == {(2, 2)}
    plan = parse_plan(json.loads(report.to_json()))
    pipeline = plan.make_pipeline()
    assert pipeline is not None
    assert pipeline.microbatches == 4
    assert plan.make_mesh(32).dp == 8
    assert plan.operators is not None
    assert any(name.startswith("layers.*.") for name in plan.operators)


def test_errors_say_what_would_fit_or_what_is_wrong() -> None:
    with pytest.raises(UsageError, match=r"no plan fits into 0.0 GiB: the smallest needs"):
        _ = plan_decoder(memory="1MiB").choice
    with pytest.raises(UsageError, match="tp=3 does not divide the 4 devices"):
        plan_decoder(fixed={"tp": 3})
    with pytest.raises(UsageError, match="cp cannot be fixed"):
        plan_decoder(fixed={"cp": 2})
    with pytest.raises(UsageError, match="ep=2: the model has no experts that a plan can cut"):
        _ = plan_decoder(fixed={"ep": 2}).choice


def _one_layer_cost(elements: int = 1000, saved: int = 0) -> PassCost:
    part = PartCost(1.0, 2.0, elements=elements, saved=saved)
    return PassCost({HEAD: PartCost(), LAYER: part, TAIL: PartCost()}, 8, 0, 0, 0)


@pytest.mark.parametrize(
    ("schedule", "bubble"), [("1f1b", 1.0), ("interleaved", 0.5), ("zero-bubble", 1 / 3)]
)
def test_bubble_is_the_closed_form(schedule: str, bubble: float) -> None:
    """(p - 1) / (m + p - 1) of the time of 1f1b: 1/9 for 2 stages and 8 micro-batches."""
    choice = StepChoice(2, 1, 1, 0, None, None, 8, 1, schedule)
    topology = make_topology(1e12, latency=0.0, bandwidth=1e30)
    cost = cost_step(choice, _one_layer_cost(0), TrainingBytes(), topology, 4)
    assert cost.seconds["compute"] == pytest.approx(8 * 12)
    share = cost.seconds["bubble"] / (cost.seconds["compute"] + cost.seconds["bubble"] / bubble)
    assert share == pytest.approx(bubble / 9)


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        (StepChoice(1, 1, 1, 0, None, None, 1, 4), "one device does everything"),
        (
            StepChoice(1, 64, 1, 3, "step", None, 1, 4),
            "64 devices work on 4 rows each (dp); optimizer state, gradients and weights are"
            " sharded over them (level 3), weights are gathered once per step",
        ),
        (
            StepChoice(1, 2, 1, 0, None, None, 1, 4, ep=4),
            "8 devices work on 4 rows each (dp, ep); each of them has all weights, gradients and"
            " optimizer state, but for experts; the experts of a layer are divided over 4 of them,"
            " and tokens travel to their experts (ep)",
        ),
        (
            StepChoice(2, 2, 4, 1, None, "full", 4, 2, "1f1b"),
            "2 groups of 8 devices work on 8 rows each (dp); optimizer state is sharded over them"
            " (level 1); each operator is split over 4 devices (tp); the layers are split into 2"
            " stages (pp); a step has 4 micro-batches of 2 rows; activations are computed again in"
            " the backward pass",
        ),
    ],
)
def test_choice_is_a_sentence(choice: StepChoice, text: str) -> None:
    assert describe_choice(choice) == text


def test_start_of_a_saved_plan_names_nodes() -> None:
    text = describe_start("p.json", 64, BUILTIN_TOPOLOGIES["h100x8"])
    assert text.startswith('saved; run it with parallelize(..., mesh="p.json", strategy="p.json")')
    assert " and pdrun --nodes 8 --devices 8 " in text
    assert " and pdrun --devices 4 " in describe_start("p", 4, BUILTIN_TOPOLOGIES["h100x8"])
    assert " and pdrun --devices 3 " in describe_start("p", 3, BUILTIN_TOPOLOGIES["cpu"])


@pytest.mark.parametrize(("pp", "recompute"), [(3, None), (4, "full"), (7, None)])
@pytest.mark.parametrize(("head", "tail"), [(0.5, 9.0), (20.0, 1.0), (3.0, 3.0)])
def test_busiest_stage_has_the_least_possible(
    pp: int, recompute: str | None, head: float, tail: float
) -> None:
    layer = PartCost(1.0, 2.0, moves=(0.5, 0.0))
    parts = {HEAD: PartCost(head), LAYER: layer, TAIL: PartCost(0.0, tail)}
    cost = PassCost(parts, 7, 0, 0, 0)
    choice = StepChoice(pp, 1, 1, 0, None, recompute, 8, 1, "1f1b")
    topology = make_topology(1e12)
    own = 3.5 if recompute is None else 5.0

    def busiest(counts: tuple[int, ...]) -> float:
        ends = [head, *[0.0] * (pp - 2), tail]
        return max(own * count + end for count, end in zip(counts, ends, strict=True))

    counts = balance_stages(choice, cost, topology)
    every = [one for one in product(range(1, 8), repeat=pp) if sum(one) == 7]
    assert busiest(counts) == pytest.approx(min(map(busiest, every)))
    step = cost_step(replace(choice, stage_layers=counts), cost, TrainingBytes(), topology, 4)
    assert step.seconds["compute"] + step.seconds["tensor axes"] == pytest.approx(
        8 * busiest(counts)
    )


def test_layers_that_do_not_divide_become_uneven_stages() -> None:
    report = plan_decoder(devices=4, rows=16, layers=6, fixed={"tp": 1, "pp": 4})
    assert report.choice.stage_layers == (1, 2, 2, 1)
    pipeline = report.to_plain()["pipeline"]
    assert pipeline["stages"] == {"layers.0": 0, "layers.1": 1, "layers.3": 2, "layers.5": 3}
    assert "; layers 1+2+2+1" in str(report)
    with pytest.raises(UsageError, match="pp=8: the model has 6 equal layers"):
        _ = plan_decoder(devices=8, rows=16, layers=6, fixed={"tp": 1, "pp": 8}).choice


@pytest.mark.thorough
def test_stages_are_chosen_if_nothing_else_fits() -> None:
    """One row per step: dp=1. Weights of all layers need more than the memory of a device."""
    report = plan_decoder(
        devices=4, rows=4, memory="260MiB", fixed={"tp": 1, "dp": 1}, recompute=False
    )
    assert report.choice.pp == 4
    free = plan_decoder(devices=4, rows=4, fixed={"tp": 1, "dp": 1, "pp": 4}, recompute=False)
    assert free.result.chosen.cost.total <= report.result.chosen.cost.total


def test_bubble_is_avoided_unless_memory_is_the_limit() -> None:
    """As many micro-batches as stages: the bubble of 1f1b would be the largest part."""
    options: dict[str, Any] = {
        "rows": 4,
        "layers": 8,
        "fixed": {"tp": 1, "dp": 1, "pp": 4, "microbatches": 4},
    }
    fast = plan_decoder(**options)
    assert fast.choice.schedule in ("zero-bubble", "interleaved")
    least = min(one.cost.peak for one in fast.result.fitting)
    assert plan_decoder(**options, memory=least).choice.schedule == "1f1b"


def test_little_memory_shards_weights_over_data_ranks_beside_tensor_axes() -> None:
    """Both axes are given, and a device has memory for a shard only: level 3 over dp."""
    options: dict[str, Any] = {
        "topology": rank_runs.TOPOLOGIES["node"],
        "fixed": {"dp": 2, "tp": 2, "pp": 1},
        "recompute": False,
    }
    free = plan_decoder(**options)
    least = min(one.cost.peak for one in free.result.fitting)
    report = plan_decoder(**options, memory=least)
    assert report.choice.level == 3
    entries = report.to_plain()["operators"]
    assert any("tp" in json.dumps(entry) for entry in entries.values())


def test_recomputation_is_chosen_if_activations_do_not_fit() -> None:
    options: dict[str, Any] = {"devices": 1, "rows": 1, "layers": 8}
    full = plan_decoder(**options)
    assert full.choice.recompute is None
    needed = full.result.chosen.cost.peak
    small = min(one.cost.peak for one in full.result.fitting)
    assert small < needed
    report = plan_decoder(**options, memory=needed - 1)
    assert report.choice.recompute == "full"


def test_saved_tensors_are_those_of_autograd() -> None:
    """A pass on real tensors holds the same bytes."""
    model = Decoder(2, 64, 100, heads=4, groups=2, wide=96)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    held: dict[int, int] = {}
    alive = []
    params = {param.untyped_storage().data_ptr() for param in model.parameters()}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in params and saved.is_floating_point():
            held[storage.data_ptr()] = storage.nbytes()
            alive.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        model(tokens)
    small = export_meta(lambda: Decoder(2, 64, 100, heads=4, groups=2, wide=96), tokens.to("meta"))
    roots = {one.root: one.nbytes for one in list_saved_tensors(small)}
    assert sum(roots.values()) == pytest.approx(sum(held.values()), rel=0.05)


@pytest.mark.parametrize(
    ("level", "accumulate", "gather"),
    [
        (3, 2, "pass"),
        thorough(0, 1, None),
        thorough(1, 2, None),
        thorough(2, 2, None),
        thorough(3, 2, "step"),
    ],
)
def test_resident_bytes_are_those_of_a_run(
    worlds: Any, level: int, accumulate: int, gather: str | None
) -> None:
    found = worlds(2).run(rank_runs.estimate_resident, level, accumulate, gather)[0]
    elements = found.pop("elements")
    units = 2 * elements // 8
    wanted = resident_bytes(
        elements, units, TrainingBytes(), level, 2, gather == "step", accumulate > 1
    )
    assert wanted["state"] == found["state"]
    for name in ("weights", "masters", "gradients"):
        assert wanted[name] == pytest.approx(found[name], rel=0.02), (name, wanted, found)


@pytest.mark.parametrize("devices", [thorough(64)])
def test_llama_on_64_devices(devices: int) -> None:
    """The case of the benchmark: the best plan trains at more than half of the attained peak."""
    with torch.device("meta"):
        model = Decoder(32)
    tokens = torch.zeros(256, 4096, dtype=torch.long)
    report = plan_of(
        model,
        (tokens,),
        devices=devices,
        topology=NODE,
        memory="72GiB",
        precision="bf16",
        gather=False,
    )
    assert len(report.result.fitting) > 500
    assert report.choice.pp == 1


def test_search_prices_the_rows_of_one_pass() -> None:
    batch = (torch.zeros(8, 2), torch.zeros(8))
    assert [leaf.shape[0] for leaf in _take_part(batch, 4)] == [2, 2]
    assert _take_part(batch, 3) is batch
    assert _take_part({"x": torch.zeros(6, 2)}, 2)["x"].shape[0] == 3


PROGRAM = """
import torch
from tests.parallel.auto.test_degrees import plan_decoder
print(plan_decoder(fixed={"tp": 2}, memory="400MiB").to_json())
"""


@pytest.mark.parametrize("seeds", [thorough((1, 2, 3))])
def test_plan_files_do_not_depend_on_hashes(seeds: tuple[int, ...]) -> None:
    texts = set()
    for seed in seeds:
        environ = {**os.environ, "PYTHONHASHSEED": str(seed)}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environ, check=True, capture_output=True
        )
        texts.add(done.stdout)
    assert len(texts) == 1
    assert b'"operators": {' in texts.pop()


def test_search_prices_the_type_in_which_a_run_computes() -> None:
    graph = export_meta(lambda: Chain(2, 64), torch.zeros(32, 64, device="meta"))
    auto = Auto(topology="h100x8")
    wide, narrow = (
        auto.for_step(1, precision).search_graph(graph, Grid(("dp", "tp"), (1, 2)), {})
        for precision in (None, "bf16")
    )
    assert narrow.seconds <= wide.seconds
    assert narrow.plan.graph is graph
    assert cast_graph(graph, torch.bfloat16).tensors[0].dtype == torch.bfloat16


class CastByAnother(nn.Module):
    """Products of a table in bf16, cast to the type of another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("table", torch.ones(32, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add a product that has been cast."""
        h = self.up(x)
        return self.down(F.silu((h * self.table).to(h.dtype) + h))


@pytest.mark.parametrize("precision", [None, "bf16", "fp16"])
def test_casts_of_a_model_are_planned_in_every_type(precision: str | None) -> None:
    """An export has the fp32 of its weights in the arguments of its casts."""
    report = plan_of(
        nn.Sequential(CastByAnother()),
        torch.zeros(8, 16),
        devices=1,
        topology="h100x8",
        precision=precision,
    )
    activations = report.result.chosen.cost.memory["activations"]
    assert activations > 8 * 32 * 2 * report.result.request.itemsize


def test_kernels_of_their_own_cost_more_than_compiled_ones() -> None:
    """A step in eager mode: products cost the same, what is between them twice as much."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    topology = make_topology(1e12, 1e9)
    seconds = [
        plan_of(
            model, torch.zeros(8, 64), devices=1, topology=topology, compiled=compiled
        ).result.chosen.cost.seconds["compute"]
        for compiled in (False, True)
    ]
    relu = 3 * 2 * 8 * 64 * 4 / 1e9  # forward and backward, read and written
    assert seconds[0] - seconds[1] == pytest.approx(relu)


def test_attention_of_torch_is_planned() -> None:
    """Its views need the `contiguous` that a graph leaves out."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    report = plan_of(layer, torch.zeros(8, 4, 16), devices=1, topology="h100x8")
    assert report.result.chosen.cost.memory["activations"] > 8 * 4 * 32 * 4
