"""What a loop attaches to a run, against plain torch in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils

import pdrun
from pdrun.errors import UsageError
from pdrun.parallel.comm.mesh import make_mesh
from pdrun.parallel.zero.optimizer import compose_optimizers
from tests.lib import small_models as zoo
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch
STEPS = 5


def run_of(level: int, optimizer: Any = None, degrees: Any = None, **options: Any) -> pdrun.Run:
    if degrees:
        options["mesh"] = make_mesh(**degrees)
        if degrees.get("pp", 1) > 1:
            options["pipeline"] = pdrun.Pipeline(microbatches=2)
    return pdrun.parallelize(
        zoo.build(),
        optimizer or zoo.OPTIMIZERS["SGD"],
        zoo.token_loss,
        optimizer_level=level,
        **options,
    )


def train_plain(
    optimizer: Any = None, before: Any = None, after: Any = None, steps: int = STEPS
) -> tuple[nn.Module, list[float]]:
    """Train in plain torch, a batch in two slices; ``before`` is called before each step."""
    model = zoo.build()
    made = (optimizer or zoo.OPTIMIZERS["SGD"])(model.parameters())
    losses = []
    for step in range(steps):
        for each in made if isinstance(made, list) else [made]:
            each.zero_grad()
        sums = []
        for rows in (slice(0, 4), slice(4, 8)):  # the slices of two ranks
            part = tuple(column[rows] for column in zoo.batch_of(8, step))
            total, tokens = zoo.token_loss(model(part[0]), part)
            total.backward()
            sums.append((float(total.detach()), float(tokens)))
        loss, count = map(sum, zip(*sums, strict=True))
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= count
        if before:
            before(step, model)
        for each in made if isinstance(made, list) else [made]:
            each.step()
        losses.append(loss / count)
        if after:
            after(step, model, made)
    return model, losses


def check_weights(found: dict[str, Any], model: nn.Module, atol: float = 5e-6) -> None:
    want = dict(model.named_parameters())
    assert found and set(found) <= set(want)
    for name, value in found.items():
        torch.testing.assert_close(
            torch.tensor(value),
            want[name].detach(),
            rtol=1e-4,
            atol=atol,
            msg=partial("{}: {}".format, name),
        )


def weights_of(run: pdrun.Run) -> dict[str, Any]:
    return {name: value.tolist() for name, value in run.full_weights().items()}


# ---- moving average ---------------------------------------------------------


def averaged(level: int, degrees: Any, stop: int | None, folder: str) -> Any:
    """Average the weights, perhaps with a resume; return averages, weights before and after."""
    run = run_of(level, degrees=degrees)
    average = pdrun.MovingAverage(run, decay=0.7)
    for step in range(STEPS):
        run.step(zoo.batch_of(8, step))
        if step == stop:
            run.save(folder)
            run = run_of(level, degrees=degrees)
            run.load(folder)
            average = pdrun.MovingAverage(run, decay=0.7)
    before = weights_of(run)
    with average.weights():
        found = weights_of(run)
        loss = run.evaluate([zoo.batch_of(8, 9)], metrics={}).loss
    assert weights_of(run) == before
    run.step(zoo.batch_of(8, STEPS))
    return found, before, loss


@pytest.mark.parametrize(
    ("level", "degrees", "stop"),
    [(0, None, None), (3, None, 2), (1, {"pp": 2, "dp": 1}, None)],
)
def test_the_moving_average_is_torch_s(
    level: int, degrees: Any, stop: int | None, worlds: Worlds, tmp_path: Any
) -> None:
    averages: list[Any] = []

    def update(step: int, model: nn.Module, optimizer: Any) -> None:
        if not averages:
            averages.append(
                swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.7))
            )
        averages[0].update_parameters(model)

    model, _ = train_plain(after=update)
    batch = zoo.batch_of(8, 9)
    total, count = zoo.token_loss(averages[0](batch[0]), batch)
    for found, before, loss in worlds(2).run(averaged, level, degrees, stop, str(tmp_path)):
        check_weights(found, averages[0].module)
        check_weights(before, model)
        assert loss == pytest.approx(float(total / count), rel=1e-4)


def test_uses_of_an_average_that_are_refused() -> None:
    run = run_of(0)
    average = pdrun.MovingAverage(run)
    with pytest.raises(UsageError, match="has no average yet"), average.weights():
        pass
    run.step(zoo.batch_of(8, 0))
    with average.weights(), pytest.raises(UsageError, match="step inside of weights"):
        run.step(zoo.batch_of(8, 0))
    for bad, text in (({"decay": 2}, "between 0 and 1"), ({"every": 0}, "every must be")):
        with pytest.raises(UsageError, match=text):
            pdrun.MovingAverage(run, **bad)
    with pytest.raises(UsageError, match="is attached already: a MovingAverage"):
        pdrun.MovingAverage(run)


# ---- values -----------------------------------------------------------------


def stopping(folder: str) -> Any:
    run = run_of(1)
    stop = pdrun.EarlyStop(run, patience=2)
    best = pdrun.BestCheckpoint(run, f"{folder}/best", mode="max")
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer, patience=0, factor=0.5)
    run.attach("plateau", plateau)
    told = []
    for step, value in enumerate([3.0, 2.0, float("nan")]):
        run.step(zoo.batch_of(8, step))
        plateau.step(value)
        told.append((stop.update(value), best.update(-value)))
    run.save(f"{folder}/last")
    again = run_of(1)
    again.load(f"{folder}/last")
    stop = pdrun.EarlyStop(again, patience=2)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(again.optimizer, patience=0, factor=0.5)
    again.attach("plateau", plateau)
    told.append((stop.update(2.5), stop.best, stop.best_step, plateau.best))
    rate = again.optimizer.param_groups[0]["lr"]
    again.load(f"{folder}/best")
    return told, again.steps, rate


def test_early_stop_best_checkpoint_and_plateau_go_on_after_a_resume(
    worlds: Worlds, tmp_path: Any
) -> None:
    for told, steps, rate in worlds(2).run(stopping, str(tmp_path)):
        assert told[:3] == [(False, True), (False, True), (False, False)]
        assert told[3] == (True, 2.0, 2, 2.0)
        assert steps == 2
        assert rate == pytest.approx(0.05), "one bad value"


def differing() -> None:
    pdrun.EarlyStop(run_of(0)).update(float(torch.distributed.get_rank()))


def test_a_value_that_differs_between_ranks_is_refused(worlds: Worlds) -> None:
    for kind, text in worlds(2).failures(differing):
        assert kind == "UsageError" and "0 on rank 0, 1 on rank 1; use run.evaluate" in text


class Counts:
    def state_dict(self) -> dict[str, int]:
        return {"n": 1}


def test_what_cannot_be_attached_or_watched_is_refused() -> None:
    run = run_of(0)
    for call, text in (
        (lambda: run.attach("x", Counts()), "Counts has no load_state_dict"),
        (lambda: run.attach("", torch.Generator()), "no state_dict"),
        (lambda: pdrun.EarlyStop(run, 0), "patience must be at least 1"),
        (lambda: pdrun.EarlyStop(run, mode="least"), 'must be "min" or "max"'),
        (lambda: pdrun.EarlyStop(run, min_delta=-1), "min_delta must be at least 0"),
        (lambda: pdrun.EarlyStop(run).update("low"), "must be a number, got str"),
        (lambda: pdrun.StepReport(run, 3), "function or have add_scalar, got int"),
        (lambda: pdrun.StepReport(run, print, every=0), "every must be at least 1"),
    ):
        with pytest.raises(UsageError, match=text):
            call()


# ---- reports ----------------------------------------------------------------


class Board:
    """As TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.told.append((name, value, step))


def reported() -> Any:
    run, board, told = run_of(0, norm=True), Board(), []
    pdrun.StepReport(run, board, every=2)
    report = pdrun.StepReport(run, lambda step, values: told.append((step, values)), every=2)
    losses = [run.step(zoo.batch_of(8, step)).loss for step in range(4)]
    report.write({"validation": torch.tensor(2.0)})
    return board.told, told, losses


def test_the_main_rank_reports(worlds: Worlds) -> None:
    (board, told, losses), other = worlds(2).run(reported)
    assert [step for step, _ in told] == [2, 4, 4]
    assert [values["loss"] for _, values in told[:2]] == [losses[1], losses[3]]
    assert sorted(told[0][1]) == ["grad_norm", "loss", "lr", "tokens"]
    assert told[2][1] == {"validation": 2.0}
    assert ("loss", losses[1], 2) in board and len(board) == 8
    assert other[:2] == ([], [])


# ---- optimizers and gradients -----------------------------------------------


def composed(params: Any) -> list[Any]:
    """Muon for the matrices of the blocks, SGD for the rest."""
    params = list(params)
    wide = [param for param in params if param.dim() == 2 and param.shape[0] != zoo.WORDS]
    rest = [param for param in params if all(param is not other for other in wide)]
    return [torch.optim.Muon(wide, lr=1e-2), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]


def trained(kind: str, level: int, degrees: Any, folder: str) -> Any:
    """Train with one of the features; return weights and losses."""
    options: dict[str, Any] = {"optimizer": composed} if kind == "composed" else {}
    if kind == "clipped":
        options["clip_value"] = 2e-3
    run = run_of(level, degrees=degrees, **options)
    losses = []
    for step in range(STEPS):
        if kind == "thawed":
            freeze(step, run.model)
        losses.append(run.step(zoo.batch_of(8, step)).loss)
        if step == 2 and folder:
            run.save(folder)
            run = run_of(level, degrees=degrees, **options)
            run.load(folder)
    shards = sum(len(bucket.weights) for bucket in run.state.engine.sharded_buckets)
    return weights_of(run), losses, shards


def freeze(step: int, model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(step >= 2 or not name.startswith(("emb", "blocks.0")))


def clip(step: int, model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 2e-3)


def hide(step: int, model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if step < 2 and name.startswith(("emb", "blocks.0")):
            param.grad = None


@pytest.mark.parametrize(
    ("kind", "level", "degrees"),
    [
        ("composed", 1, None),
        ("composed", 3, None),
        ("composed", 2, {"pp": 2, "dp": 1}),
        ("clipped", 0, None),
        ("clipped", 3, None),
        ("thawed", 1, None),
        ("thawed", 3, None),
    ],
)
def test_steps_are_those_of_plain_torch(
    kind: str, level: int, degrees: Any, worlds: Worlds, tmp_path: Any
) -> None:
    before = {"clipped": clip, "thawed": hide}.get(kind)
    model, losses = train_plain(composed if kind == "composed" else None, before)
    folder = str(tmp_path) if (kind, level) == ("composed", 3) else ""
    for weights, found, shards in worlds(2).run(trained, kind, level, degrees, folder):
        assert found == pytest.approx(losses, rel=1e-4)
        # Muon computes in bf16, which makes more of another order of sums
        check_weights(weights, model, 1e-3 if kind == "composed" else 5e-6)
        assert (not degrees and level == 0) or shards > 0, "the other weights are sharded"


def alone_above_zero() -> None:
    run_of(1, lambda params: torch.optim.Muon([x for x in params if x.dim() == 2]))


def test_an_optimizer_that_shards_nothing_is_refused(worlds: Worlds) -> None:
    for kind, text in worlds(2).failures(alone_above_zero):
        assert kind == "UsageError"
        assert "Muon cannot be sharded" in text and "a list of optimizers" in text


def test_optimizers_that_cannot_be_combined() -> None:
    weight: Tensor = nn.Parameter(torch.ones(2))
    one = torch.optim.SGD([weight], 0.1)
    with pytest.raises(UsageError, match="each weight in one optimizer"):
        compose_optimizers([one, torch.optim.SGD([weight], 0.1)])
    with pytest.raises(UsageError, match="has a int in its list"):
        compose_optimizers([one, 3])
    made = compose_optimizers([one, torch.optim.AdamW([nn.Parameter(torch.ones(1))])])
    assert type(made).__qualname__ == "SGD+AdamW"
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.5)
    assert one.param_groups[0]["lr"] == 0.05 and schedule.get_last_lr()[0] == 0.05
