"""
Two copies of a step that take turns: what one process computes, and one computes while the other
communicates.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pdrun.errors import UsageError
from pdrun.parallel.comm import mesh
from pdrun.parallel.pipeline.pipeline import Pipeline
from pdrun.parallel.run import Run
from pdrun.parallel.zero.offload import Offload
from tests.lib import pipeline_cases as piped
from tests.lib import small_models as zoo
from tests.lib.manual_sharding import Megatron
from tests.lib.small_models import Case
from tests.lib.tiers import thorough
from tests.parallel.context_parallel import test_context_runs as long

pytestmark = pytest.mark.torch


def make(case: Case, degrees: dict[str, int], copies: int, **more: Any) -> Run:
    """Return a run over tensor axes."""
    names = [name for name in degrees if name not in ("pp", "dp", "cp")]
    return zoo.make(
        case, mesh=mesh.make_mesh(**degrees), strategy=Megatron(*names), copies=copies, **more
    )


def train(case: Case, degrees: dict[str, int], copies: int) -> Any:
    """Train; return losses and norms, the last step's gradients, and how often a copy took over."""
    run = make(case, degrees, copies)
    assert f"{copies} slices at a time" in run.explain() and run.plan.copies == copies
    kept = zoo.watched(run)
    message = [run.step(zoo.batch_of(rows, step)) for step, rows in enumerate(case.rows)]
    grads = {name: grad.numpy().copy() for name, grad in kept[0].items()}
    return (
        [m.loss for m in message],
        [m.grad_norm for m in message],
        grads,
        run.state.driver.switches,
    )


OFFLOAD = Offload(activations=True, least=0)
CASES = [
    (Case(2, optimizer="SGD"), {"dp": 1, "tp": 2}),
    (
        Case(2, 2, tied=True, dropout=True, rows=(24, 7, 1), recompute="full", optimizer="SGD"),
        {"dp": 1, "tp": 2},
    ),
    thorough(Case(4, 1, 2, dropout=True, clip=0.3, optimizer="SGD"), {"dp": 2, "tp": 2}),
    thorough(
        Case(4, 2, 1, dropout=True, recompute="selective", optimizer="SGD"), {"dp": 2, "tp": 2}
    ),
    (Case(4, 3, 2, dropout=True, recompute="full", clip=0.3, optimizer="SGD"), {"dp": 2, "tp": 2}),
    thorough(Case(4, 3, 1, tied=True, rows=(24, 7, 1), optimizer="SGD"), {"dp": 2, "tp": 2}),
    (
        Case(
            2,
            dropout=True,
            optimizer="SGD",
            more=(("offload", Offload(activations=True, least=0)),),
        ),
        {"dp": 1, "tp": 2},
    ),
]


@pytest.mark.parametrize(("case", "degrees"), CASES, ids=str)
def test_copies_compute_what_one_process_does(
    worlds: Any, case: Case, degrees: dict[str, int]
) -> None:
    found = worlds(case.world).run(train, case, degrees, 2)
    slices = degrees["dp"] * case.accumulate * 2
    alone = Case(1, 0, slices, None, case.tied, case.dropout, case.rows, case.clip, "SGD")
    wanted = worlds(1).run(zoo.train, alone)[0]
    for losses, norms, grads, turns in found:
        assert losses == pytest.approx(wanted["loss"], rel=2e-6)
        assert norms == pytest.approx(wanted["norm"], rel=2e-5)
        for name, grad in grads.items():
            assert abs(grad - wanted["grads"][name]).max() < 2e-5, name
        assert turns == found[0][3] > 0


def test_three_copies(worlds: Any) -> None:
    found = worlds(2).run(train, Case(2, optimizer="SGD", dropout=True), {"dp": 1, "tp": 2}, 3)
    wanted = worlds(1).run(zoo.train, Case(1, accumulate=3, optimizer="SGD", dropout=True))[0]
    assert found[0][0] == pytest.approx(wanted["loss"], rel=2e-6)


def test_copies_of_cut_sequences(worlds: Any) -> None:
    """Shifts of rings and all-to-alls are waited for in turns too."""
    lengths, settings = (16, 13), {"ulysses": 2}
    found = worlds(4).run(long.train, {"dp": 1, "cp": 4}, settings, 0.2, lengths, copies=2)
    wanted = worlds(1).run(long.train, {"dp": 1}, None, 0.2, lengths, accumulate=2)[0]
    for losses, norms, weights in found:
        assert losses == pytest.approx(wanted[0], rel=2e-6)
        assert norms == pytest.approx(wanted[1], rel=1e-5)
        for name, weight in weights.items():
            assert abs(weight - wanted[2][name]).max() < 5e-6, name


# ---- overlap ----------------------------------------------------------------


def overlap(copies: int) -> tuple[int, int, list[str]]:
    """
    Make one step and write down what happens to collectives.

    Returns:
        How many there were, during how many another copy started one of its own, and the names in order of start.
    """
    run = make(Case(2), {"dp": 1, "tp": 2}, copies)
    events: list[tuple[str, int]] = []
    names: list[str] = []
    count, wait = run.axes.state.count_collective, run.axes.watchdog.wait

    def counted(name: str, axes: tuple[str, ...], nbytes: int) -> None:
        if axes == ("tp",):
            events.append(("start", threading.get_ident()))
            names.append(name)
        count(name, axes, nbytes)

    def waited(work: Any, label: str) -> None:
        if "along tp" in label:
            events.append(("wait", threading.get_ident()))
        wait(work, label)

    run.axes.state.count_collective = counted  # type: ignore[method-assign]
    run.axes.watchdog.wait = waited  # type: ignore[method-assign]
    run.step(zoo.batch_of(8, 0))
    covered = 0
    for place, (what, who) in enumerate(events):
        if what == "start":
            end = next(i for i in range(place, len(events)) if events[i] == ("wait", who))
            covered += any(event == "start" and other != who for event, other in events[place:end])
    return len(names), covered, names


def test_one_copy_computes_while_the_other_communicates(worlds: Any) -> None:
    """
    All collectives but the last of each phase are under way while the other copy goes on to its
    next one.
    """
    alone, (calls, covered, names) = worlds(2).run(overlap, 1)[0], worlds(2).run(overlap, 2)[0]
    assert alone[1] == 0
    assert calls == 2 * alone[0]
    assert covered >= calls - 2
    assert names == worlds(2).run(overlap, 2)[1][2]


# ---- refused, and failing ---------------------------------------------------


def refused(level: int, **more: Any) -> str:
    """Return what is said to copies that can't be."""
    try:
        make(Case(1, level), {"dp": 1, "tp": 1}, 2, **more)
    except UsageError as error:
        return str(error)
    return ""


def test_copies_beside_what_gathers_or_schedules_are_refused(worlds: Any) -> None:
    assert (
        "gather='pass' is not supported with copies=2"
        in worlds(1).run(refused, 3, gather="pass")[0]
    )
    assert (
        "not supported with pipeline="
        in worlds(1).run(refused, 0, pipeline=Pipeline(microbatches=2))[0]
    )


def at_level(level: int) -> Any:
    """
    Train two copies; return losses, and what travels over the data in the last step, counted and
    predicted.
    """
    run = make(Case(4, level, 2), {"dp": 2, "tp": 2}, 2)
    losses = [run.step(zoo.batch_of(rows, step)).loss for step, rows in enumerate((24, 7))]
    return losses, piped.sent(run, [zoo.batch_of(24, 2)])


def test_copies_of_cut_weights_gather_each_once(worlds: Any) -> None:
    """
    The bits of level 2; of each unit and of what lies outside one gather a step, and a sum a pair
    of copies.
    """
    want, found = worlds(4).run(at_level, 2), worlds(4).run(at_level, 3)
    for (losses, (counted, predicted)), (whole, _) in zip(found, want, strict=True):
        assert losses == whole
        assert counted == predicted
        assert counted["all_to_all"][0] == 2 * counted["all_gather"][0] > 0


def failing() -> None:
    """Make a step whose second copy fails between two collectives."""
    run = make(Case(2), {"dp": 1, "tp": 2}, 2)
    judge, seen = run.state.objective.loss, []

    def loss(output: Any, batch: Any) -> Any:
        seen.append(batch)
        if len(seen) == 2:
            raise ValueError("the second copy")
        return judge(output, batch)

    run.state.objective.loss = loss
    run.step(zoo.batch_of(8, 0))


def test_an_error_of_one_copy_is_the_steps(worlds: Any) -> None:
    assert worlds(2).failures(failing) == [("ValueError", "the second copy")] * 2
