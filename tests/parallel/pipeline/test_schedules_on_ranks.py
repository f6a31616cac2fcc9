"""Pipelines on real ranks: every schedule, every kind of model, against one process."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.lib import pipeline_cases as piped
from tests.lib.pipeline_cases import Case
from tests.lib.tiers import by_tier, mark_all_but

pytestmark = pytest.mark.torch


@functools.cache
def of_one_process(worlds: Any, case: Case) -> piped.Result:
    """Return what one process computes, once for all schedules."""
    found: piped.Result = worlds(1).run(piped.alone, case)[0]
    return found


def check(worlds: Any, case: Case) -> list[piped.Result]:
    """Compare losses, norms and gradients with those of one process."""
    found = worlds(case.world).run(piped.train, case)
    want = of_one_process(worlds, replace(case, pp=1, tp=1, cut="", more=(), run=()))
    for mine in found:
        tight = 1e-12 if case.double else 2e-6
        np.testing.assert_allclose(mine["loss"], want["loss"], rtol=0, atol=tight)
        np.testing.assert_allclose(mine["norm"], want["norm"], rtol=tight * 5)
        assert set(mine["grads"]) == set(want["grads"])
        for name, grad in want["grads"].items():
            scale = float(np.abs(grad).max()) or 1.0
            np.testing.assert_allclose(
                mine["grads"][name],
                grad,
                rtol=1e-10 if case.double else 1e-5,
                atol=scale * (1e-12 if case.double else 2e-6),
                err_msg=name,
            )
    return found


SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_equals_one_process(worlds: Any, schedule: str) -> None:
    check(worlds, Case(double=True, more=(("schedule", schedule),)))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ["tied", "dropout", "masked", "row", "loose", "inplace"])
def test_every_kind_of_model_equals_one_process(worlds: Any, model: str, schedule: str) -> None:
    shared = (("shared", ["bytes.weight"]),) if model == "loose" else ()
    check(worlds, Case(model, rows=(16, 13), more=(("schedule", schedule), *shared)))


@pytest.mark.parametrize("schedule", mark_all_but(3, SCHEDULES))
def test_four_stages_with_uneven_micro_batches(worlds: Any, schedule: str) -> None:
    check(
        worlds, Case("deep", pp=4, microbatches=5, rows=(13, 4, 17), more=(("schedule", schedule),))
    )


# ---- branches, borrowed values, and what is refused -------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-v"])
def test_layers_that_are_left_out_for_some_micro_batches(worlds: Any, schedule: str) -> None:
    more = (("schedule", schedule), ("dynamic", True))
    check(worlds, Case("skip", pp=4 if schedule == "1f1b" else 2, rows=(16, 16), more=more))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble", "zero-bubble-v"])
def test_results_that_skip_stages(worlds: Any, schedule: str) -> None:
    """Some pass a stage that does not use them, some are used by several."""
    check(worlds, Case("ladder", rows=(16, 13), double=True, more=(("schedule", schedule),)))


def test_what_is_read_beside_the_stages(worlds: Any) -> None:
    """An embedding's result, its weight, and a part of a block are used by the last stage."""
    for model in ("borrow", "loose", "inside"):
        check(worlds, Case(model))


@pytest.mark.parametrize("model", ["direct", "indexed", "rewrites", "writes", "quantised"])
def test_what_forwards_do_between_modules(worlds: Any, model: str) -> None:
    """
    Direct calls of forwards, lists by index, decisions on the batch, and values that are changed in
    place: each is repeated by later stages as the first ones do it.
    """
    more = (("schedule", "interleaved"),)
    check(worlds, Case(model, rows=(16, 13), double=True, more=more))


def refused(worlds: Any, case: Case) -> str:
    """Return the error of the ranks, without what others say of a peer that has gone."""
    told = worlds(case.world).failures(piped.train, case)
    kinds = [text for kind, text in told if kind == "UsageError"]
    assert kinds, told
    return kinds[0]


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (Case("skip"), "dynamic=True"),
        (Case("aliased"), "bytes.weight, which this stage does not have; shared=['bytes.weight']"),
        (
            Case("opaque"),
            "blocks.3 of stage 1 takes a value that an earlier stage computed and does not pass on"
            " (its forward could not be traced for that: DataDependentOutputException",
        ),
        (
            Case("peek"),
            "stage 1 of the model reads a value that stage 0 or an earlier one computed",
        ),
        (
            Case("select"),
            "stage 1 of the model reads a value that stage 0 or an earlier one computed",
        ),
        (Case("backwards"), "blocks.0 is of stage 0"),
        (
            Case("tiny", more=(("stages", {"emb": 1, "blocks.*": 0}),)),
            "stages={glob: stage} in the order in which forward calls them: emb, blocks.0",
        ),
        (Case("odd"), "blocks.0 returns a set"),
        (
            Case("writesunseen"),
            "a stage writes a value that an earlier stage computed into a tensor (aten::copy_)",
        ),
        (Case("early"), "forward ended in stage 0, without a call of a module of a later one"),
    ],
    ids=lambda value: value.model if isinstance(value, Case) else "",
)
def test_models_that_cannot_be_cut_so_are_told_why(worlds: Any, case: Case, told: str) -> None:
    assert told in refused(worlds, case)


# ---- composition ------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "model", "run"),
    [
        ("1f1b", "tied", {"optimizer_level": 1, "clip": 0.5}),
        ("interleaved", "dropout", {"recompute": "full", "optimizer_level": 2}),
        ("zero-bubble", "tied", {"recompute": "selective", "optimizer_level": 1}),
        ("zero-bubble-v", "dropout", {"recompute": ["blocks.1", "blocks.2"], "clip": 0.5}),
        ("gpipe", "tiny", {"exact": False, "comm_fusion": 1}),
    ],
)
def test_stages_beside_a_data_axis(
    worlds: Any, schedule: str, model: str, run: dict[str, Any]
) -> None:
    clipped = {key: value for key, value in run.items() if key != "clip"}
    check(
        worlds,
        Case(
            model, dp=2, rows=(16, 15), more=(("schedule", schedule),), run=tuple(clipped.items())
        ),
    )
    if "clip" in run:  # the norm is that of all stages: the weights move alike
        case = Case(
            model, dp=2, rows=(16, 15), more=(("schedule", schedule),), run=tuple(run.items())
        )
        pieces = worlds(4).run(piped.train, case)
        assert all(piece["norm"] == pieces[0]["norm"] for piece in pieces)
        for name, weight in worlds(1).run(piped.alone_on_pdrun, case)[0]["weights"].items():
            np.testing.assert_allclose(
                pieces[0]["weights"][name], weight, rtol=1e-5, atol=2e-6, err_msg=name
            )


def test_a_schedule_of_the_users_own(worlds: Any) -> None:
    text = "0F0 0F1 0B1 0F2 0B0 0B2\n1F0 1F1 1B1 1B0 1F2 1B2"
    check(worlds, Case(microbatches=3, more=(("schedule", text),)))
    crossed = "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1\n0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1"
    check(worlds, Case(microbatches=2, rows=(7, 8), more=(("schedule", crossed),)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_stage_is_a_pipeline_too(worlds: Any, schedule: str) -> None:
    check(worlds, Case("tied", pp=1, rows=(7, 8), more=(("schedule", schedule),)))


def test_each_rank_holds_its_stage_and_no_more(worlds: Any) -> None:
    found = worlds(2).run(piped.train, Case("tied"))
    assert not any(
        name.startswith(("blocks.2", "blocks.3", "head", "norm")) for name in found[0]["held"]
    )
    assert not any(name.startswith(("blocks.0", "blocks.1", "emb")) for name in found[1]["held"])
    assert {"never", "emb.weight"} <= set(found[0]["held"])
    assert {"never", "head.weight"} <= set(found[1]["held"])


def test_evaluation(worlds: Any) -> None:
    for schedule in ("1f1b", "interleaved", "zero-bubble-v"):
        case = Case(
            "dropout", rows=(3 if schedule == "1f1b" else 13,), more=(("schedule", schedule),)
        )
        found = worlds(2).run(piped.evaluate, case)
        whole = worlds(1).run(piped.evaluate_alone, case)[0]
        last = [piece for piece in found if piece is not None]
        assert len(last) == 1
        np.testing.assert_allclose(last[0], whole, rtol=0, atol=1e-6)


def test_what_travels_is_what_has_to(worlds: Any) -> None:
    """
    Per step and rank: one activation down the line, one gradient back, of each micro-batch;
    announced once.
    """
    for stage, count in enumerate(worlds(2).run(piped.count_sends, Case())):
        size = 4 * 6 * 24 * 4  # rows, length, width, bytes
        assert count == (4, 4 * size), stage


@pytest.mark.parametrize(
    ("schedule", "model"), [("1f1b", "tied"), ("interleaved", "dropout"), ("zero-bubble-v", "tied")]
)
def test_a_run_proves_itself(worlds: Any, schedule: str, model: str) -> None:
    case = Case(model, rows=(16, 13), more=(("schedule", schedule),))
    assert all("step 3" in told or "step 2" in told for told in worlds(2).run(piped.verified, case))


def test_checkpoints_of_one_cut_are_taken_up_by_another(worlds: Any, tmp_path: Any) -> None:
    first = Case("tied", more=(("schedule", "interleaved"),), run=(("optimizer_level", 1),))
    worlds(2).run(piped.train_and_save, first, str(tmp_path))
    others = [
        first,
        Case("tied", dp=2),
        Case("tied", pp=1),
        Case("tied", pp=4, more=(("balance", "parameters"),)),
    ]
    want = worlds(2).run(piped.go_on, others[0], str(tmp_path))[0]
    for other in others[1:]:
        for found in worlds(other.world).run(piped.go_on, other, str(tmp_path)):
            np.testing.assert_allclose(found, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("precision", "schedule"), [("bf16", "interleaved"), ("fp16", "1f1b"), ("fp16", "zero-bubble")]
)
def test_narrow_types(worlds: Any, precision: str, schedule: str) -> None:
    case = Case(
        "tied", rows=(16, 13), more=(("schedule", schedule),), run=(("precision", precision),)
    )
    want = worlds(1).run(piped.alone_on_pdrun, case)[0]
    for found in worlds(2).run(piped.train, case):
        np.testing.assert_allclose(found["loss"], want["loss"], rtol=1e-3)
        np.testing.assert_allclose(found["norm"], want["norm"], rtol=2e-2)


def _sampled(count: int) -> list[Case]:
    """Draw points of the product of everything."""
    dice = random.Random(7)
    found = []
    for _ in range(count):
        schedule, model = (
            dice.choice(SCHEDULES),
            dice.choice(["tiny", "tied", "dropout", "deep", "masked", "inplace"]),
        )
        pp = dice.choice([2, 2, 4]) if model == "deep" else 2
        run = {
            "optimizer_level": dice.choice([0, 1, 2, 3, 3]),
            "recompute": dice.choice([None, "full", "selective"]),
            "comm_fusion": dice.choice(["auto", 1, False]),
        }
        if model == "inplace":
            run["recompute"] = (
                None  # what was changed can't be computed again, on one process neither
            )
        rows = tuple(dice.randrange(3, 20) for _ in range(2))
        micros = dice.randrange(pp, 7)
        found.append(
            Case(
                model,
                pp,
                4 // pp,
                micros,
                rows,
                more=(("schedule", schedule),),
                run=tuple(run.items()),
            )
        )
    return found


@pytest.mark.parametrize("case", _sampled(by_tier(3, 8)), ids=str)
def test_points_of_the_product(worlds: Any, case: Case) -> None:
    check(worlds, case)
