"""
The operator engine inside of pipeline stages: the numbers of one process, what travels, and what is
told.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pdrun.errors import UsageError
from pdrun.parallel.layouts.grid import Grid
from pdrun.parallel.layouts.layout import L
from pdrun.parallel.operators.explain import explain_plan
from pdrun.parallel.operators.graph.export import export_graph
from pdrun.parallel.operators.module import Operators
from pdrun.parallel.operators.plan import OperatorPlan
from pdrun.parallel.operators.stages import assign_stages, assign_weights, stage_plans
from pdrun.parallel.pipeline.split import StageSplit, split_model
from tests.lib import compositions as mixed
from tests.lib import pipeline_cases as piped
from tests.lib import tiers
from tests.lib.compositions import Place, Task
from tests.lib.pipeline_cases import Case
from tests.lib.small_models import LENGTH, WIDTH, WORDS
from tests.parallel.pipeline.test_schedules_on_ranks import SCHEDULES, check, refused
from tests.parallel.test_compositions import COUNT, SEED
from tests.parallel.test_compositions import check as compare

pytestmark = pytest.mark.torch

CUTS = {"tied": "tied", "masked": "masked", "row": "row", "loose": "loose", "inplace": "inplace"}
"""How each model is cut; the others by `megatron`."""


# ---- the numbers of one process ---------------------------------------------


@pytest.mark.parametrize(
    "schedule",
    [name if name == "interleaved" else tiers.thorough(name) for name in SCHEDULES],
)
def test_every_schedule_equals_one_process(worlds: Any, schedule: str) -> None:
    """In double precision; the other schedules are those of the kinds of models."""
    check(worlds, Case(tp=2, cut="words", double=True, more=(("schedule", schedule),)))


@pytest.mark.parametrize(
    "model",
    ["tied", "borrow", *map(tiers.thorough, ("dropout", "loose", "masked", "row", "inplace"))],
)
def test_every_kind_of_model_equals_one_process(worlds: Any, model: str) -> None:
    """
    Micro-batches of two shapes, too; `loose` needs no word of which stages share the embedding.
    """
    schedule = {"tied": "interleaved", "borrow": "zero-bubble", "loose": "zero-bubble-v"}.get(
        model, "1f1b"
    )
    cut = CUTS.get(model, "megatron")
    check(worlds, Case(model, tp=2, cut=cut, rows=(16, 13), more=(("schedule", schedule),)))


@pytest.mark.parametrize(
    "case",
    [
        tiers.thorough(  # `test_compositions` has its axes, level and recomputation
            Case(
                "tied",
                pp=2,
                dp=2,
                tp=2,
                cut="tied",
                rows=(16, 15),
                run=(("optimizer_level", 2), ("recompute", "full")),
            )
        ),
        tiers.thorough(
            Case(
                "dropout",
                pp=4,
                tp=2,
                cut="sequence",
                rows=(16, 13),
                more=(("schedule", "zero-bubble"),),
            )
        ),
        tiers.thorough(Case("masked", pp=2, tp=4, cut="wide", rows=(16, 13))),
        tiers.thorough(Case("tiny", tp=4, cut="grid", double=True, rows=(16, 13))),
        Case("tiny", pp=1, tp=4, cut="grid", double=True, more=(("schedule", "zero-bubble-v"),)),
        Case(
            "dropout",
            tp=2,
            cut="sequence",
            rows=(16, 13),
            run=(("recompute", ["blocks.1", "blocks.2"]),),
        ),
        Case("tied", pp=1, tp=2, cut="tied", rows=(7, 8), more=(("schedule", "zero-bubble-v"),)),
        Case("tied", pp=2, tp=1, cut="nothing", run=(("optimizer_level", 1),)),
    ],
    ids=str,
)
def test_stages_beside_other_axes_and_savers(worlds: Any, case: Case) -> None:
    check(worlds, case)


def test_each_rank_holds_its_stages_part_of_its_weights(worlds: Any) -> None:
    found = worlds(4).run(piped.train, Case("loose", tp=2, cut="loose"))
    for place, piece in enumerate(found):
        assert any(name.startswith("blocks.0") for name in piece["held"]) == (place < 2)
        assert any(name.startswith("blocks.3") for name in piece["held"]) == (place >= 2)
        assert "bytes.weight" in piece["held"]


def test_evaluation(worlds: Any) -> None:
    case = Case("dropout", tp=2, cut="words", rows=(13,), more=(("schedule", "interleaved"),))
    found = worlds(4).run(piped.evaluate, case)
    whole = worlds(1).run(piped.evaluate_alone, case)[0]
    last = [piece for piece in found if piece is not None]
    assert len(last) == 2
    for piece in last:
        np.testing.assert_allclose(piece, whole, rtol=0, atol=1e-6)


def test_narrow_types(worlds: Any) -> None:
    case = Case("tied", tp=2, cut="tied", run=(("precision", "bf16"),))
    want = worlds(1).run(piped.alone_on_pdrun, case)[0]
    for found in worlds(4).run(piped.train, case):
        np.testing.assert_allclose(
            found["loss"], want["loss"], rtol=1e-2
        )  # terms of sums are rounded to 8 bits each
        np.testing.assert_allclose(found["norm"], want["norm"], rtol=2e-2)


def drawn(seed: int, count: int) -> list[mixed.Case]:
    """
    Draw runs of operators in stages, each saved for a run of another kind and mesh, or taken up
    from one.
    """
    found: list[mixed.Case] = []
    for turn in range(count):
        dice = random.Random(seed * 1000 + turn)
        task = replace(mixed.draw_task(dice), layers=dice.choice((2, 4)), precision=None)
        pp, dp, tp = dice.choice(((2, 1, 2), (2, 2, 2), (2, 1, 4), (2, 1, 2)))
        schedules = ["gpipe", "1f1b", "zero-bubble"] + ["interleaved", "zero-bubble-v"] * (
            task.layers == 4
        )
        more: dict[str, Any] = {}
        if dice.random() < 0.4:
            more["recompute"] = dice.choice(("full", "selective"))
        if dice.random() < 0.3:
            more["offload"] = dice.choice(("optimizer", "activations"))
        mine = Place(
            pp,
            dp,
            1,
            tp,
            kind=dice.choice(("operators", "words", "parts", "heads")),
            schedule=dice.choice(schedules),
            level=dice.choice((0, 1, 2)),
            accumulate=dice.choice((2, 3)),
            more=tuple(more.items()),
        )
        other = mixed.draw(dice, task)
        found.append((task, mine, other) if turn % 2 else (task, other, mine))
    return found


@pytest.mark.parametrize(
    "case", drawn(SEED, tiers.by_tier(1, COUNT // 4)), ids=lambda case: "+".join(map(str, case[1:]))
)
def test_compositions(case: mixed.Case, worlds: Any, tmp_path: Path) -> None:
    """
    Proven by `verify`, saved on one mesh and taken up on another; losses and norms are those of one
    process.
    """
    compare(case, worlds, tmp_path)


# ---- what travels -----------------------------------------------------------


def test_parts_of_sequences_travel_as_parts(worlds: Any) -> None:
    """
    Each rank sends its part of an activation, forward and backward, once for each micro-batch.
    """
    whole = 4 * LENGTH * WIDTH * 4
    assert worlds(4).run(piped.count_sends, Case(tp=2, cut="megatron")) == [(4, 4 * whole)] * 4
    assert worlds(4).run(piped.count_sends, Case(tp=2, cut="sequence")) == [(4, 4 * whole // 2)] * 4


def located(
    model: nn.Module, entries: Any, stages: int, *args: Tensor, **by: Any
) -> tuple[OperatorPlan, StageSplit]:
    """Return the plan of a model in stages, on no device."""
    cut = split_model(model, stages, **by)
    graph = export_graph(model, args)
    assign_stages(graph, cut)
    return Operators(entries).plan_of(graph, Grid(("pp", "dp", "tp"), (stages, 1, 2)), {}), cut


def words(rows: int = 4) -> Tensor:
    return torch.zeros(rows, LENGTH, dtype=torch.long)


def sent_layouts(plan: OperatorPlan) -> list[dict[str, L]]:
    """Return what each stage gives, by name."""
    return [
        {plan.graph.tensors[index].name: layout for index, layout in part.sent.items()}
        for part in stage_plans(plan)
    ]


def test_terms_of_sums_are_added_up_before_they_travel() -> None:
    """Scattered where the next stage takes a part, all-reduced where it takes the whole."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.last = (
                nn.Linear(8, 12, False),
                nn.Linear(12, 8, False),
                nn.Linear(8, 8),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.down(torch.relu(self.up(x))))

    by = {"by": {"up": 0, "down": 0, "last": 1}}
    entries = {"up.weight": L("tp", None), "down.weight": L(None, "tp")}
    plan, _ = located(Two(), entries, 2, torch.zeros(4, 8), **by)
    assert sent_layouts(plan) == [{"down.linear": L(None, None)}, {}]
    plan, _ = located(Two(), entries | {"last": (L("tp", None),)}, 2, torch.zeros(4, 8), **by)
    assert sent_layouts(plan) == [{"down.linear": L("tp", None)}, {}]


def test_what_a_later_stage_needs_travels_through_those_between() -> None:
    plan, _ = located(piped.Borrow(layers=4), piped.MEGATRON, 4, words())
    names = [sorted(one) for one in sent_layouts(plan)]
    assert names == [
        ["blocks.0.add_1", "emb.embedding"],
        ["blocks.1.add_1", "emb.embedding"],
        ["add"],
        [],
    ]


def test_what_comes_from_the_batch_does_not_travel() -> None:
    """Masks and positions are computed by every stage that needs them."""
    plan, cut = located(piped.Masked(), {}, 2, words())
    masks = {
        place
        for place, operator in enumerate(plan.graph.operators)
        if operator.kind in ("remainder", "ne")
    }
    assert len(masks) == 2
    assert all(masks <= set(part.operators) for part in stage_plans(plan))
    assert [sorted(one) for one in sent_layouts(plan)] == [["emb.embedding", "layers.1.add_2"], []]
    names = {name: [name] for name, _ in piped.Masked().named_parameters()}
    assert assign_weights(plan, cut, names).loose_weights == {"places": (0, 1)}


def test_weights_are_held_by_the_stages_that_use_them() -> None:
    model = piped.Loose()
    plan, cut = located(model, {}, 4, words())
    found = assign_weights(plan, cut, {name: [name] for name, _ in model.named_parameters()})
    assert found.holders_of("bytes.weight") == (0, 3)
    plan, cut = located(piped.Inplace(), {}, 4, words())
    found = assign_weights(
        plan, cut, {name: [name] for name, _ in piped.Inplace().named_parameters()}
    )
    assert found.loose_weights["places"] == (0,)
    assert found.loose_weights["never"] == (
        0,
        1,
        2,
        3,
    ), "nobody uses it: everybody keeps it, as without operators"


def test_explain_shows_the_operators_of_each_stage() -> None:
    plan, _ = located(piped.Tiny(layers=4), piped.CUTS["sequence"], 2, words())
    lines = explain_plan(plan).splitlines()
    assert lines[:2] == ["operators over (tp=2)", "stage 0"]
    border = lines.index("stage 1")
    size = f"{4 * LENGTH * WIDTH * 4 // 2 / 1024:.1f} KiB"
    sent = (
        f"    to stage 1: blocks.1.add_1 [4, {LENGTH}, {WIDTH}] as [-, tp, -] ({size} forward,"
        f" {size} backward)"
    )
    assert lines[border - 1] == sent
    assert any(line.startswith("blocks.1.up.linear") for line in lines[:border])
    assert any(line.startswith("blocks.2.up.linear") for line in lines[border:])


def test_explain_lists_stages_and_shards(worlds: Any) -> None:
    case = Case("tied", tp=2, cut="tied")
    for rank, text in enumerate(worlds(4).run(piped.explained, case)):
        assert "pipeline: 2 stages on 2 ranks, schedule 1f1b, 4 micro-batches" in text
        assert f"stage {rank // 2} of 2: " in text
        assert "shared by stages 0, 1: emb.weight" in text
        assert f"sharded by L('tp', None): {'emb.weight, ' if rank < 2 else ''}" in text


# ---- what is told -----------------------------------------------------------


class Strange(piped.Tiny):
    """Its third block has an operator without a rule."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.blocks[2].drop = Exponential()


class Exponential(nn.Module):
    """Has no rule."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(x @ x.transpose(-1, -2)) @ x


def test_a_plan_that_fails_names_stage_and_operator() -> None:
    with pytest.raises(
        UsageError, match=r"linalg_matrix_exp \(blocks.2.drop.linalg_matrix_exp of stage 1\)"
    ):
        located(Strange(), {"blocks.2.drop.linalg_matrix_exp": (L("tp"),)}, 2, words())
    with pytest.raises(
        UsageError, match=r"layer_norm \(blocks.3.norm1.layer_norm of stage 1\) at .* cannot take"
    ):
        located(piped.Tiny(layers=4), {"blocks.3.norm1.weight": L("tp")}, 2, words())


@pytest.mark.parametrize(
    ("model", "by", "text"),
    [
        (
            piped.Backwards(layers=4),
            {},
            r"blocks.0.norm1.layer_norm_1 of stage 0 takes blocks.3.add_1, which stage 1",
        ),
        (
            piped.Early(layers=4),
            {},
            r"stage 1 computes nothing: forward calls none of blocks.2, blocks.3, norm, head",
        ),
        (
            piped.Tiny(p=0.2, layers=4),
            {"by": {"emb": 0, "blocks.0": 1, "blocks.[123]": 0, "norm": 1}},
            "which stage 1 com",
        ),
    ],
)
def test_stages_that_are_impossible_are_refused_with_the_reason(
    model: nn.Module, by: Any, text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        located(model, {}, 2, words(), **by)


class Beside(nn.Module):
    """Two branches that meet at the end; each drops."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        late = self.one(x)
        return self.drop(self.two(x)) + late


def test_dropouts_in_another_order_than_that_of_the_stages_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"drop.dropout of stage 0 draws its mask after a dropout of stage 1"
    ):
        located(Beside(), {}, 2, torch.zeros(4, 4), by={"two": 0, "one": 1})
    plan, _ = located(Beside().eval(), {}, 2, torch.zeros(4, 4), by={"two": 0, "one": 1})
    assert sent_layouts(plan) == [
        {"drop.dropout": L(None, None)},
        {},
    ], "nothing drops: the branches may lie as one likes"


def test_impossible_stages_are_refused_on_every_rank(worlds: Any) -> None:
    text = refused(worlds, Case("backwards", tp=2, cut="megatron"))
    assert (
        "blocks.0.norm1.layer_norm_1 of stage 0 takes blocks.3.add_1, which stage 1 computes"
        in text
    )
    assert WORDS > 1


# ---- sequences over a tensor axis, and logits that stay cut -----------------


@pytest.mark.parametrize(
    ("kind", "inputs"), [("parts", "[tp, -, -, -]"), ("heads", "[-, tp, -, -]")]
)
def test_sequences_are_cut_over_a_tensor_axis(worlds: Any, kind: str, inputs: str) -> None:
    """
    The layout of the words is enough; causal attention has rows or, if one says so, heads instead
    of positions.
    """
    task = Task(p=0.2, rows=(12, 7, 12, 12))
    for text in worlds(2).run(mixed.laid_out, task, Place(tp=2, kind=kind)):
        assert f"scaled_dot_product_attention: {inputs}, {inputs}, {inputs} -> {inputs}" in text
        assert "all-to-all, backward all-to-all over tp" in text


def test_logits_that_stay_cut_are_never_gathered(worlds: Any) -> None:
    whole, cut = [
        worlds(2).run(mixed.collectives, Task(), Place(tp=2, kind=kind))
        for kind in ("gathered", "words")
    ]
    assert all(one["all_gather"] == 1 for one in whole)
    assert all("all_gather" not in one for one in cut)


def test_logits_may_stay_cut_over_two_axes(worlds: Any) -> None:
    """37 words over y, then x: 10, 9, 9, 9. The rank at x=1, y=0 has the second part."""
    assert worlds(4).run(mixed.words_over_two_axes) == [(0, 10), (19, 28), (10, 19), (28, 37)]


def test_results_that_are_not_cut_cannot_stay_so() -> None:
    with pytest.raises(
        UsageError, match="gather=False, but no result of the model is sharded on its last dim"
    ):
        Operators({}, gather=False).plan(piped.Tiny(), Grid(("tp",), (2,)), (words(),))
    with pytest.raises(UsageError, match="gather must be True or False, got 'no'"):
        Operators({}, gather="no")  # type: ignore[arg-type]
