"""`run.verify()` finds what is not the same, and a hang ends with everybody's place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdrun.parallel.data.loader import Loader
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.report import verify
from tests.lib import small_models as zoo
from tests.lib.rank_pool import Worlds
from tests.lib.small_models import Case
from tests.lib.tiers import thorough
from tests.parallel.test_known_faults import pair, sgd, square_loss

pytestmark = pytest.mark.torch


def proven(level: int) -> Any:
    case = Case(3, level, accumulate=2, tied=True, dropout=True, recompute="full", clip=0.3)
    run = zoo.make(case)
    run.step(zoo.batch_of(24, 0))
    report = run.verify([zoo.batch_of(rows, 9) for rows in (24, 7, 3)])
    after = run.step(zoo.batch_of(24, 1)).loss
    plain = zoo.make(case)
    plain.step(zoo.batch_of(24, 0))
    return report.same_bits, str(report), after == plain.step(zoo.batch_of(24, 1)).loss


@pytest.mark.parametrize("level", [0, thorough(1), thorough(2), 3])
def test_verify_proves_bits_and_changes_nothing(level: int, worlds: Worlds) -> None:
    for same, text, undisturbed in worlds(3).run(proven, level):
        assert same, text
        assert undisturbed
        assert text.count("the same bits") == 3


class Ranked(nn.Module):
    """A model that knows its rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) * (1 + torch.distributed.get_rank())


class Rows(Ranked):
    """A model whose rows see each other."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x - x.mean(0))


class TimeFirst(Ranked):
    """A model with rows on dim 1; with ``mixes`` each place on dim 1 sees those before it."""

    mixes = False

    def forward(self, x: Tensor) -> Tensor:
        if self.mixes:
            x = x + x.cumsum(1)
        return self.out(x).mean(0)


class TimeFirstMixed(TimeFirst):
    mixes = True


def sliced_on_dim_1(kind: Any) -> float:
    torch.manual_seed(3)
    batch = torch.randn(3, 8, 6), torch.randn(8, 1)
    run = parallelize(kind(), sgd, square_loss, dataset_strategy=(1, 0))
    return run.verify([batch]).steps[0].reference_loss


def test_slices_along_another_dim_are_held_against_the_whole_batch(worlds: Worlds) -> None:
    assert worlds(2).run(sliced_on_dim_1, TimeFirst)[0] > 0
    for kind, text in worlds(2).failures(sliced_on_dim_1, TimeFirstMixed):
        assert kind == "ConfigError"
        assert "the whole batch has" in text
        assert "dims (1, 0)" in text


def unequal(kind: Any) -> None:
    parallelize(kind(), sgd, square_loss).verify([pair(12)])


def test_verify_finds_a_model_that_depends_on_its_rank(worlds: Worlds) -> None:
    for kind, text in worlds(2).failures(unequal, Ranked):
        assert kind == "ConfigError"
        assert "batch 1 differs from one process" in text


def synced() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    run = parallelize(model, sgd, square_loss, sync_batchnorm=True, optimizer_level=3)
    data = torch.utils.data.TensorDataset(*pair(24))
    for batch in run.data(Loader(data, 8, shuffle=True)):
        run.step(batch)
    return max(step.max_difference for step in run.verify().steps)


def test_verify_takes_the_loader_s_batches_and_knows_synchronised_norms(worlds: Worlds) -> None:
    assert worlds(2).run(synced)[0] < 1e-5


def nothing_known() -> None:
    zoo.make(Case(2)).verify()


def test_verify_says_what_it_needs(worlds: Worlds) -> None:
    assert (
        "verify needs global batches; run.verify([batch, ...])"
        in worlds(2).failures(nothing_known)[0][1]
    )


def leaves_early(level: int) -> None:
    """Rank 1 makes a step less, and then waits for something else."""
    run = zoo.make(Case(3, level), timeout=6.0)
    run.step(zoo.batch_of(12, 0))
    if torch.distributed.get_rank() == 1:
        torch.distributed.barrier()  # nobody else comes here
    else:
        run.step(zoo.batch_of(12, 1))


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 3])
def test_a_rank_that_stays_away_is_named_in_time(level: int, worlds: Worlds) -> None:
    message = worlds(3).failures(leaves_early, level, bound=60.0)
    late = [text for kind, text in message if kind == "DeadlineExceeded"]
    assert late, message
    assert "no end after 6 s" in late[0]
    assert "rank 1 is at test_verify.py" in late[0], message
    assert "in leaves_early" in late[0]
    assert "in step 2" in late[0]


@pytest.mark.parametrize(("carried", "is_rounding"), [(1e-4, True), (1e-7, False)])
def test_one_process_that_is_exact_by_chance(
    carried: float, is_rounding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How far rounding carries is seen in processes with other last bits."""

    def reference(state: Any, batch: Any, in_fp64: bool = False, noise_seed: int = 0) -> Any:
        weight = torch.ones(2, dtype=torch.float64) * (1 + carried * bool(noise_seed))
        return verify._Reference(1.0, 1.0, {"w": weight}, 0.0)

    monkeypatch.setattr(verify, "_compute_reference", reference)
    step = verify.StepComparison(1.0, 1.0, 1.0, 1.0, 3e-4, "w")
    grads = {"w": torch.full((2,), 1 + 3e-4, dtype=torch.float64)}
    nothing: Any = None
    found = verify._compare_rounding(nothing, nothing, step, grads, reference(None, None))
    assert ("the model amplifies rounding: one process in fp32" in str(found)) == is_rounding
