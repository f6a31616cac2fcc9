"""
Weights cut over the data beside stages: the bits of the other levels, what travels, and what is in
memory.
"""

from __future__ import annotations

import dataclasses
import functools
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.lib import pipeline_cases as piped
from tests.lib.pipeline_cases import Case
from tests.lib.tiers import cover_pairs, thorough
from tests.parallel.pipeline.test_schedules_on_ranks import SCHEDULES, check

pytestmark = pytest.mark.torch

GATHERS = pytest.mark.parametrize("gather", ["step", "pass"])


def alternating(cases: list[tuple[Any, ...]], one: str, other: str) -> list[Any]:
    """
    Return each case with both ways of gathering: by default one of them, in turn. Every schedule
    has both, in one of the tests that compare bits.
    """
    ways = [(one, other) if place % 2 else (other, one) for place in range(len(cases))]
    first = [(*case, way) for case, (way, _) in zip(cases, ways, strict=True)]
    second = [thorough(*case, way) for case, (_, way) in zip(cases, ways, strict=True)]
    return [*first, *second]


def at(case: Case, level: int, **more: Any) -> Case:
    """Return a case at a level."""
    return dataclasses.replace(case, run=(*case.run, ("optimizer_level", level), *more.items()))


@functools.cache
def whole_weights(worlds: Any, case: Case) -> list[piped.Result]:
    """
    Return what every rank has at level 0, with which more than one way of gathering is compared.
    """
    found: list[piped.Result] = worlds(case.pp * case.dp).run(piped.train, at(case, 0))
    return found


def same(worlds: Any, case: Case, **more: Any) -> None:
    """Hold level 3 against level 0, bit for bit; norms are sums in fp64 of what a rank holds."""
    want = whole_weights(worlds, case)
    found = worlds(case.pp * case.dp).run(piped.train, at(case, 3, **more))
    for mine, whole in zip(found, want, strict=True):
        assert mine["loss"] == whole["loss"]
        assert mine["norm"] == pytest.approx(whole["norm"], rel=1e-12)
        for kind in ("grads", "weights"):
            assert set(mine[kind]) == set(whole[kind])
            for name, value in whole[kind].items():
                assert np.array_equal(mine[kind][name], value), f"{kind} of {name}"


@pytest.mark.parametrize(
    ("schedule", "gather"),
    [
        *(("gpipe", "step"), ("1f1b", "step"), ("zero-bubble-v", "pass")),
        thorough("gpipe", "pass"),
        thorough("1f1b", "pass"),  # by default in `test_layers_that_some_ranks_leave_out`
        thorough("zero-bubble-v", "step"),
        *(thorough(*pair) for pair in product(("interleaved", "zero-bubble"), ("step", "pass"))),
    ],
)
def test_every_schedule_has_the_bits_of_whole_weights(
    worlds: Any, schedule: str, gather: str
) -> None:
    model = "dropout" if schedule in ("1f1b", "zero-bubble-v") else "tied"
    same(worlds, Case(model, dp=2, rows=(16, 13), more=(("schedule", schedule),)), gather=gather)


KINDS = [
    ("frozen", "interleaved"),
    ("crossed", "1f1b"),
    ("masked", "zero-bubble"),
    ("loose", "zero-bubble-v"),
    ("inplace", "interleaved"),
    ("row", "1f1b"),
]
MORE_KINDS = [("frozen", "zero-bubble"), ("crossed", "zero-bubble-v")]


@pytest.mark.parametrize(
    ("model", "schedule", "gather"),
    [
        *alternating(KINDS, "step", "pass"),
        *(thorough(*kind, gather) for kind in MORE_KINDS for gather in ("step", "pass")),
    ],
)
def test_every_kind_of_model_has_the_bits_of_whole_weights(
    worlds: Any, model: str, schedule: str, gather: str
) -> None:
    shared = (("shared", ("bytes.weight",)),) if model == "loose" else ()
    same(
        worlds,
        Case(model, dp=2, rows=(16, 11), more=(("schedule", schedule), *shared)),
        gather=gather,
    )


@pytest.mark.parametrize(
    ("schedule", "gather"), alternating([("1f1b",), ("zero-bubble-v",)], "step", "pass")
)
def test_layers_that_some_ranks_leave_out(worlds: Any, schedule: str, gather: str) -> None:
    """The ranks of a stage gather alike, whatever their rows make them run."""
    same(
        worlds, Case("skip", dp=2, more=(("schedule", schedule), ("dynamic", True))), gather=gather
    )


OPTIONS: list[dict[str, Any]] = [
    {"recompute": "full", "threshold": 2000},
    {"recompute": "selective", "comm_fusion": 0.01},
    {"offload": "all"},
    {"units": ["blocks.*.up", "head"]},
]


RECOMPUTED_ELSEWHERE = [(0, "zero-bubble", "pass"), (1, "zero-bubble", "pass")]
"""Whose pairs of options are those of compositions and of `test_what_is_sent_over_the_data`."""


@pytest.mark.parametrize(
    "combination",
    [
        thorough(case) if case in RECOMPUTED_ELSEWHERE else case
        for case in cover_pairs(
            product(range(len(OPTIONS)), ["interleaved", "zero-bubble"], ["step", "pass"]),
            list,
        )
    ],
    ids=str,
)
def test_other_options(worlds: Any, combination: tuple[int, str, str]) -> None:
    option, schedule, gather = combination
    more = OPTIONS[option]
    case = Case("dropout", dp=2, rows=(16, 13), more=(("schedule", schedule),))
    if "recompute" in more:  # which has the same bits with and without
        case = dataclasses.replace(case, run=(("recompute", more["recompute"]),))
    same(
        worlds,
        case,
        gather=gather,
        **{key: value for key, value in more.items() if key != "recompute"},
    )


@pytest.mark.parametrize(
    ("schedule", "gather"),
    [("interleaved", "step"), thorough("zero-bubble-v", "pass")]
    + [thorough("interleaved", "pass"), thorough("zero-bubble-v", "step")]
    + [thorough("gpipe", "step"), thorough("gpipe", "pass")],
)
def test_eight_ranks_with_uneven_micro_batches_equal_one_process(
    worlds: Any, schedule: str, gather: str
) -> None:
    run = (("optimizer_level", 3), ("gather", gather), ("exact", gather == "pass"))
    pp = 2 if schedule == "zero-bubble-v" else 4
    check(
        worlds,
        Case("deep", pp, 8 // pp, 5, rows=(13, 4, 47), more=(("schedule", schedule),), run=run),
    )


def test_groups_of_shards_and_narrow_types(worlds: Any) -> None:
    case = Case(
        "tied",
        pp=2,
        dp=4,
        rows=(32, 13),
        run=(("precision", "bf16"), ("shard_group", 2), ("clip", 0.5)),
    )
    found, want = worlds(8).run(piped.train, at(case, 3)), worlds(8).run(piped.train, at(case, 2))
    assert all(one["loss"] == want[0]["loss"] for one in found)


# ---- what travels -----------------------------------------------------------

SENT = [
    (gather, exact, schedule)
    for gather in ("step", "pass")
    for exact in (False, True)
    for schedule in ("1f1b", "interleaved", "zero-bubble-v")
]


@pytest.mark.parametrize("sent", cover_pairs(SENT, list), ids=str)
def test_what_is_sent_over_the_data_is_the_closed_form(
    worlds: Any, sent: tuple[str, bool, str]
) -> None:
    """
    Four micro-batches, two blocks a rank; beside these lie weights of this rank's own and one that
    both hold.
    """
    gather, exact, schedule = sent
    run = (("gather", gather), ("exact", exact), ("recompute", "full"))
    case = at(Case(dp=2, more=(("schedule", schedule),), run=run), 3)
    for counted, predicted in worlds(4).run(piped.sent_by, case):
        assert counted == predicted
        outside = counted["all_gather"][0] - (2 if gather == "step" else 2 * 2 * 4)
        assert outside in ((1, 3) if schedule == "zero-bubble-v" else (2,))
        times = 4 if exact or gather == "pass" else 1
        assert counted["all_to_all" if exact else "reduce_scatter"][0] == times * (2 + outside)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_closed_form_of_the_other_levels(worlds: Any, level: int) -> None:
    group = (("shard_group", 2),) if level else ()
    case = at(Case("tied", pp=1, dp=4, rows=(32, 32), run=group), level)
    for exact in (False, True):
        for counted, predicted in worlds(4).run(
            piped.sent_by, at(case, level, exact=exact, compress="bf16")
        ):
            assert counted == predicted
            assert counted


# ---- what is in memory ------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "gather"), alternating([(name,) for name in SCHEDULES], "step", "pass")
)
def test_as_much_is_gathered_at_once_as_is_predicted(
    worlds: Any, schedule: str, gather: str
) -> None:
    """
    A pass holds two units at most, also where the gradients of weights come later; after a step
    nothing is left.
    """
    case = at(Case("deep", dp=2, more=(("schedule", schedule),), run=(("gather", gather),)), 3)
    for most, predicted, left in worlds(4).run(piped.gathered, case):
        assert (most, left) == (predicted, 0)


def explained(worlds: Any, gather: str | None) -> list[str]:
    found: str = worlds(4).run(piped.explained, at(Case(dp=2, run=(("gather", gather),)), 3))[0]
    return found.split("\n")


def test_explain_tells_how_long_weights_stay(worlds: Any) -> None:
    kept, passed = explained(worlds, None), explained(worlds, "pass")
    assert any("gathered once per step and stay until its last backward" in line for line in kept)
    assert any("for each of its forwards and backwards" in line for line in passed)
    assert any("4 x all_gather of" in line for line in kept)
    assert any("18 x all_gather of" in line for line in passed)
    assert explained(worlds, "step") == kept


# ---- between steps ----------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "gather"),
    [
        *alternating([("interleaved",), ("zero-bubble-v",)], "step", "pass"),
        *(thorough("1f1b", gather) for gather in ("step", "pass")),
    ],
)
def test_evaluation(worlds: Any, schedule: str, gather: str) -> None:
    case = Case("dropout", dp=2, rows=(13,), more=(("schedule", schedule),))
    found, want = (
        worlds(4).run(piped.outputs, at(case, level, **more))
        for level, more in ((3, {"gather": gather}), (0, {}))
    )
    assert sum(output is not None for rank in want for output in rank[:-1]) == 2 * 2 * 4
    for mine, whole in zip(found, want, strict=True):
        for one, other in zip(mine, whole, strict=True):
            assert np.array_equal(one, other) if other is not None else one is None


def test_checkpoints_go_from_and_to_cut_weights(worlds: Any, tmp_path: Any) -> None:
    first = at(Case("tied", dp=2, more=(("schedule", "interleaved"),)), 3)
    worlds(4).run(piped.train_and_save, first, str(tmp_path))
    want = worlds(4).run(piped.go_on, first, str(tmp_path))[0]
    for other in (at(Case("tied", dp=2), 1), at(Case("tied", pp=1, dp=2), 3), Case("tied", pp=4)):
        for found in worlds(other.pp * other.dp).run(piped.go_on, other, str(tmp_path)):
            np.testing.assert_allclose(found, want, rtol=0, atol=2e-6)
    whole = at(Case("tied", dp=2, more=(("schedule", "zero-bubble-v"),)), 0)
    worlds(4).run(piped.train_and_save, whole, str(tmp_path / "whole"))
    found = worlds(4).run(piped.go_on, at(whole, 3), str(tmp_path / "whole"))
    assert found == worlds(4).run(piped.go_on, whole, str(tmp_path / "whole"))


@GATHERS
def test_a_run_proves_itself(worlds: Any, gather: str) -> None:
    case = Case(
        "tied", dp=2, rows=(16, 13), more=(("schedule", "zero-bubble"),), run=(("gather", gather),)
    )
    assert all("step 2" in told for told in worlds(4).run(piped.verified, at(case, 3)))


# ---- refused ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "more", "text"),
    [
        (3, {"gather": "never"}, "gather must be 'pass', 'step' or None, got 'never'"),
        (2, {"gather": "step"}, "gather='step' requires optimizer_level=3, got 2"),
        (3, {"units": ["blocks"]}, "matches blocks, a ModuleList, which is never called"),
        (3, {"units": ["block.*"]}, "units='block.*' matches no module"),
    ],
)
def test_refused(worlds: Any, level: int, more: dict[str, Any], text: str) -> None:
    told = worlds(2).run(piped.refused, at(Case(), level, **more))
    assert all(text in one for one in told), told
