"""
Faults that pipelines of other systems have had, each with the right behaviour.

The numbers are those of the list that the project keeps of such faults.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdrun.errors import UsageError
from pdrun.parallel.pipeline.describe import describe_pipeline
from pdrun.parallel.pipeline.pipeline import Pipeline
from pdrun.parallel.pipeline.schedules.builders import make_schedule
from pdrun.parallel.pipeline.split import split_model
from tests.lib import pipeline_cases as piped
from tests.lib.pipeline_cases import Case
from tests.lib.small_models import Tiny
from tests.lib.tiers import thorough
from tests.parallel.pipeline.test_schedules_on_ranks import check

pytestmark = pytest.mark.torch


def test_the_norm_is_that_of_all_stages(worlds: Any) -> None:
    """Fault 5: clipping by the norm of one's own stage."""
    case = Case(pp=4, rows=(16, 16, 16), run=(("clip", 0.1),))
    found, want = worlds(4).run(piped.train, case), worlds(1).run(piped.alone_on_pdrun, case)[0]
    assert len({tuple(piece["norm"]) for piece in found}) == 1
    for name, weight in want["weights"].items():
        np.testing.assert_allclose(
            found[0]["weights"][name], weight, rtol=1e-5, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize("pp", [2, thorough(4)])
def test_a_module_without_weights_on_a_stage_has_a_type(worlds: Any, pp: int) -> None:
    """``next(module.parameters())`` is empty on a stage that has none of the weights."""
    check(worlds, Case("typed", pp=pp, rows=(16, 16)))


@pytest.mark.parametrize(
    ("schedule", "level"),
    [
        *(("1f1b", 0), ("zero-bubble", 1), ("1f1b", 2)),
        *(thorough("zero-bubble", 0), thorough("1f1b", 1), thorough("zero-bubble", 2)),
    ],
)
def test_tied_weights_stay_equal_bit_by_bit(worlds: Any, schedule: str, level: int) -> None:
    """
    Faults 9 and 10: the sum over the stages of a tie comes too late, or not at all when transfers
    overlap.
    """
    case = Case(
        "tied",
        dp=2,
        rows=(16, 15, 16, 9),
        more=(("schedule", schedule),),
        run=(("optimizer_level", level),),
    )
    held = worlds(4).run(piped.held_after, case)
    for first, last in ((held[0], held[2]), (held[1], held[3])):
        np.testing.assert_array_equal(first["emb.weight"], last["head.weight"])
        assert "head.weight" not in first
        assert "emb.weight" not in last


def test_a_smaller_last_micro_batch(worlds: Any) -> None:
    """Fault 21: micro-batches that don't divide the rows, among them ones without any."""
    check(worlds, Case(microbatches=4, rows=(7, 3, 9)))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble", "zero-bubble-v"])
def test_too_few_micro_batches_are_refused_by_name(schedule: str) -> None:
    """Fault 22: fewer micro-batches than stages hang, or fail with a riddle."""
    with pytest.raises(
        UsageError, match=r"microbatches=3 is less than pp=4.*microbatches=4 or more"
    ):
        Pipeline(3, schedule=schedule).plan(4)
    assert Pipeline(3, schedule="gpipe").plan(4).microbatch_count == 3


def test_an_output_meets_its_own_target(worlds: Any) -> None:
    """Fault 23: a queue pairs one micro-batch's output with another's target."""
    text = "0F2 0F0 0B0 0F1 0B2 0B1\n1F0 1B0 1F2 1F1 1B2 1B1"
    check(worlds, Case(microbatches=3, rows=(9, 9), more=(("schedule", text),)))


def test_a_stage_that_stays_away_is_named(worlds: Any) -> None:
    """No wait without a bound."""
    world = worlds(2)
    (kind, text), other = world.failures(piped.stay_away, Case(run=(("timeout", 3.0),)))
    assert kind == "DeadlineExceeded"
    assert "rank 0 waits for stage 1's gradients for micro-batch 0" in text
    assert other == ("", "")


# ---- what is said before anything runs --------------------------------------


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"microbatches": 0}, "microbatches must be an integer of at least 1, got 0"),
        ({"microbatches": 2.0}, "microbatches must be an integer of at least 1, got 2.0"),
        ({"chunks": 0}, "chunks must be an integer of at least 1, got 0"),
        ({"dynamic": "yes"}, "dynamic must be a bool, got 'yes'"),
        ({"schedule": "2f2b"}, "there is no schedule '2f2b'"),
        ({"schedule": "1f1b", "chunks": 2}, "chunks=2, and 1f1b has 1 a rank"),
        ({"schedule": "0F0 0B0\n1F0 1B0"}, "microbatches=4, the schedule has 1"),
        ({"schedule": "0F0 0B0", "microbatches": 1}, "pp=2, the schedule has 1"),
        ({"schedule": "0F0 0B0 2F0 2B0\n1F0 1B0 3F0 3B0", "microbatches": 1}, "would deadlock"),
    ],
)
def test_refusals(more: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        Pipeline(**{"microbatches": 4, **more}).plan(2)
    assert told in str(caught.value)


def test_a_pipeline_in_words(worlds: Any) -> None:
    told = worlds(2).run(piped.explained, Case("tied"))
    assert "stage 1 of 2" in told[1]
    assert "pipeline: 2 stages on 2 ranks, schedule 1f1b, 4 micro-batches" in told[0]
    assert "bubble 20.0% of the ranks' time for stages of equal size" in told[0]
    assert ": emb, blocks.0 to blocks.1" in told[0]
    assert "never is on stages 0, 1" in told[0]
    assert "rank 1  .  F0 B0 -" in told[0]


def test_what_the_manual_shows_is_what_is_said() -> None:
    told = describe_pipeline(make_schedule("zero-bubble", 2, 4), split_model(Tiny(layers=3), 2))
    manual = (Path(__file__).parents[3] / "docs/pipeline.md").read_text(encoding="utf-8")
    assert textwrap.indent(told, "    ") in manual
