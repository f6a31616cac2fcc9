"""Means of slices have the right weight, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdrun.errors import DeadlineExceeded, UsageError
from pdrun.parallel.data.seeded import SlicedBatch
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.training.loss import Objective
from pdrun.parallel.training.loss_check import MeanCheck, check_loss_form
from pdrun.parallel.training.loss_graph import read_terms
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch

WORDS = 12


def batch_of(uneven: bool) -> dict[str, Tensor]:
    """Eight rows of labels, of which the last rows have fewer if ``uneven``."""
    dice = torch.Generator().manual_seed(3)
    ids = torch.randint(WORDS, (8, 6), generator=dice)
    labels = ids.clone()
    labels[:, :2] = -100
    if uneven:
        labels[5:, 2:5] = -100
        labels[7] = -100
    return {"input_ids": ids, "labels": labels}


class Output:
    """A model's own loss beside its logits."""

    def __init__(self, loss: Tensor, logits: Tensor) -> None:
        self.loss, self.logits = loss, logits


class Config:
    """What makes a model one of the transformers library."""

    model_type = "tiny"
    is_encoder_decoder = False


class TinyForCausalLM(nn.Module):
    """Computes the mean loss over labels that are not -100, shifted by one."""

    config = Config()
    first = 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        logits = self.head(self.emb(input_ids))
        end = logits.shape[1] - self.first
        loss = F.cross_entropy(logits[:, :end].flatten(0, 1), labels[:, self.first :].flatten())
        return Output(loss, logits)


class TinyForMaskedLM(TinyForCausalLM):
    """Its labels are not shifted."""

    first = 0


class Plain(TinyForCausalLM):
    """A model of the user's own."""

    config = None  # type: ignore[assignment]


KINDS = {kind.__name__: kind for kind in (TinyForCausalLM, TinyForMaskedLM, Plain)}


def own_loss(kind: str, uneven: bool, **options: Any) -> tuple[float, float, float]:
    run = parallelize(
        KINDS[kind](),
        lambda p: torch.optim.SGD(p, 0.1),
        lambda output, batch: output.loss,
        norm=True,
        **options,
    )
    m = run.step(batch_of(uneven))
    return m.loss, m.tokens, m.grad_norm


def in_one_process(kind: str, uneven: bool) -> tuple[float, float]:
    model = KINDS[kind]()
    loss = model(**batch_of(uneven)).loss
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return float(loss), float(norm)


@pytest.mark.parametrize("kind", ["TinyForCausalLM", "TinyForMaskedLM"])
def test_a_models_own_mean_counts_labels(kind: str, worlds: Worlds) -> None:
    loss, norm = in_one_process(kind, uneven=True)
    first = KINDS[kind].first
    tokens = int((batch_of(True)["labels"][:, first:] != -100).sum())
    for found in worlds(2).run(own_loss, kind, True, accumulate=2, optimizer_level=2):
        assert found == pytest.approx((loss, tokens, norm), rel=1e-5)


def verify_own_loss() -> str:
    run = parallelize(
        TinyForCausalLM(),
        lambda p: torch.optim.SGD(p, 0.1),
        lambda output, batch: output.loss,
        accumulate=2,
    )
    return str(run.verify([batch_of(uneven=True)]))


def test_a_models_own_mean_is_verified() -> None:
    """The losses that verify computes without a backward have their counts, too."""
    assert "the same bits" in verify_own_loss()


def test_another_mean_over_uneven_rows_is_refused(worlds: Worlds) -> None:
    loss, norm = in_one_process("Plain", uneven=False)
    for found in worlds(2).run(own_loss, "Plain", False):
        assert found == pytest.approx((loss, 8, norm), rel=1e-5)
    for kind, text in worlds(2).failures(own_loss, "Plain", True):
        assert kind == "UsageError"
        assert "rows of batch['labels'] have" in text
        assert "return (sum, count)" in text
    loss, norm = in_one_process("Plain", uneven=True)
    found = worlds(1).run(own_loss, "Plain", True)[0]  # one slice: the mean is that of the batch
    assert (found[0], found[2]) == pytest.approx((loss, norm), rel=1e-5)


def mean_and_count(form: str) -> float:
    def loss(output: Tensor, batch: Any) -> Any:
        count = batch[1].numel()
        mean = F.cross_entropy(output.flatten(0, 1), batch[1].flatten())
        return (mean, count) if form == "mean" else (mean * count, count)

    run = parallelize(
        nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)),
        lambda p: torch.optim.SGD(p, 0.1),
        loss,
        accumulate=2,
    )
    ids = batch_of(False)["input_ids"]
    return float(run.step((ids, ids)).loss)


def test_a_mean_beside_a_count_is_noticed(worlds: Worlds) -> None:
    kind, text = worlds(1).failures(mean_and_count, "mean")[0]
    assert kind == "UsageError"
    assert "loss returns (mean, count), and must return (sum, count)" in text
    assert worlds(1).run(mean_and_count, "sum")[0] > 0


class Classifier(nn.Module):
    """One answer for each row, of any length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.emb(input_ids).mean(1))


def row_means() -> list[float]:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch["y"])

    run = parallelize(Classifier(), lambda p: torch.optim.SGD(p, 0.0), loss, accumulate=2)
    y = torch.arange(8) % 3
    return [
        float(run.step({"input_ids": batch_of(False)["input_ids"][:, :n], "y": y}).loss)
        for n in (4, 6, 5)
    ]


def test_batches_of_other_lengths_have_rows_of_equal_weight(worlds: Worlds) -> None:
    model, y = Classifier(), torch.arange(8) % 3
    ids = batch_of(False)["input_ids"]
    want = [float(F.cross_entropy(model(ids[:, :n]), y)) for n in (4, 6, 5)]
    assert worlds(1).run(row_means)[0] == pytest.approx(want, rel=1e-5)


def weigh_classes(form: str, accumulate: int) -> float:
    weight = torch.tensor([0.2, 1.0, 3.0])
    options: dict[str, Any] = {"ignored": {"ignore_index": 2}}.get(form, {"weight": weight})

    def loss(output: Tensor, batch: Any) -> Any:
        if form == "sum":
            total = F.cross_entropy(output, batch["y"], reduction="sum", **options)
            return total, weight[batch["y"]].sum()
        return F.cross_entropy(output, batch["y"], **options)

    run = parallelize(Classifier(), lambda p: torch.optim.SGD(p, 0.0), loss, accumulate=accumulate)
    y = torch.tensor([0, 1, 2, 0, 2, 2, 2, 2])
    return float(run.step({"input_ids": batch_of(False)["input_ids"], "y": y}).loss)


@pytest.mark.parametrize("form", ["weighted", "ignored"])
def test_a_mean_over_weighted_labels_is_refused(form: str) -> None:
    """Slices divide by other numbers: the loss was wrong, or nan in a slice without a label."""
    with pytest.raises(UsageError, match="labels whose weights add up to"):
        weigh_classes(form, 4)
    assert weigh_classes("sum", 4) == pytest.approx(weigh_classes("weighted", 1), rel=1e-5)


class TinyXLNetLMHeadModel(TinyForCausalLM):
    """Does not shift its labels, though its name says that it is a language model."""

    first = 0


class TinyForPreTraining(TinyForCausalLM):
    """Judges the words that are not padding, as Electra's discriminator does."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        judged = self.head(self.emb(input_ids))[..., 0]
        active = labels != -100
        wanted = (labels[active] % 2).float()
        return Output(F.binary_cross_entropy_with_logits(judged[active], wanted), judged)


class TinyForTwoTasks(TinyForCausalLM):
    """Adds a mean over labels and a mean over rows, as BertForPreTraining does."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        made = super().forward(input_ids, labels)
        rows = F.cross_entropy(made.logits[:, 0, :2], input_ids[:, 0] % 2)
        return Output(made.loss + rows, made.logits)


class TinyWithPenalty(TinyForCausalLM):
    """Adds a term that is no mean over the rows, as the load balance of experts is."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        made = super().forward(input_ids, labels)
        share = made.logits.softmax(-1).flatten(0, 1).mean(0)
        return Output(made.loss + 0.1 * (share * share).sum(), made.logits)


class TinyForCTC(TinyForCausalLM):
    """Its loss is a sum."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        logits = self.head(self.emb(input_ids))
        return Output(F.cross_entropy(logits[:, 0], input_ids[:, 0], reduction="sum"), logits)


class TinyForMultipleChoice(TinyForCausalLM):
    """Has as many classes as a slice has rows, and all of them are right once."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        logits = self.head(self.emb(input_ids)).mean(1)[:, :2]
        return Output(F.cross_entropy(logits, torch.arange(len(logits)) % 2), logits)


class TinyContrastive(TinyForCausalLM):
    """Compares the rows of a batch, as CLIP does."""

    def forward(self, input_ids: Tensor, labels: Tensor, return_loss: bool | None = None) -> Output:
        rows = self.head(self.emb(input_ids)).mean(1)
        return Output(F.cross_entropy(rows @ rows.T, torch.arange(len(rows))), rows)


class TinyForPrediction(TinyForMaskedLM):
    """Returns its loss unless it is told not to, as PatchTSMixer does: rows are not compared."""

    def forward(self, input_ids: Tensor, labels: Tensor, return_loss: bool = True) -> Output:
        return super().forward(input_ids, labels)


REFUSED = {
    "TinyForTwoTasks": "adds means over different numbers of elements",
    "TinyWithPenalty": "is a mean and another term",
    "TinyForCTC": "is a sum",
    "TinyContrastive": "compares each row with all rows of a slice",
}
WEIGHED = (TinyXLNetLMHeadModel, TinyForPreTraining, TinyForMultipleChoice, TinyForPrediction)
OTHERS = (TinyForTwoTasks, TinyWithPenalty, TinyForCTC, TinyContrastive)
KINDS |= {kind.__name__: kind for kind in (*WEIGHED, *OTHERS)}


@pytest.mark.parametrize("kind", [kind.__name__ for kind in WEIGHED])
def test_the_weight_of_an_own_mean_is_what_it_divides_by(kind: str, worlds: Worlds) -> None:
    loss, norm = in_one_process(kind, uneven=True)
    tokens = 8
    if "Choice" not in kind:
        tokens = int((batch_of(True)["labels"] != -100).sum())
    for found in worlds(2).run(own_loss, kind, True, accumulate=2, optimizer_level=3):
        assert found == pytest.approx((loss, tokens, norm), rel=1e-5)


@pytest.mark.parametrize("kind", REFUSED)
def test_an_own_loss_that_slices_do_not_add_up_to_is_refused(kind: str, worlds: Worlds) -> None:
    for error, text in worlds(2).failures(own_loss, kind, True):
        assert error == "UsageError"
        assert f"the own loss of {kind} {REFUSED[kind]}" in text
        assert "return (sum, count)" in text
    loss, norm = in_one_process(kind, uneven=True)
    found = worlds(1).run(own_loss, kind, True)[0]
    assert (found[0], found[2]) == pytest.approx((loss, norm), rel=1e-5)


def test_terms_of_a_loss_are_read_from_its_graph() -> None:
    x = torch.randn(6, 5, requires_grad=True)
    y = torch.tensor([0, 1, -100, 2, 3, 4])
    other = x.detach() + 1
    means = {
        F.cross_entropy(x, y): 5,
        F.cross_entropy(x, y, weight=torch.full((5,), 2.0)) / 3: 10,
        (F.cross_entropy(x, y) + F.nll_loss(x, y)) / 2: 5,
        F.mse_loss(x, other): 30,
        F.smooth_l1_loss(x, other).to(torch.float64): 30,
        F.multi_margin_loss(x, y.clamp(min=0)): 6,
        F.l1_loss(x[1:3], other[1:3]): 10,
        x.mean(1).mean(): 6,
        torch.stack([x.mean(), x.mean()]).mean(): 30,
        sum([x.mean(), x.mean()]): 30,
    }
    for loss, count in means.items():
        assert {int(term.count or 0) for term in read_terms(loss)} == {count}, loss.grad_fn
    sums = [x.sum(), F.huber_loss(x, other, reduction="sum"), -x.sum() * 2]
    assert all(term.is_sum for loss in sums for term in read_terms(loss))
    unknown = [x.sum() / 3, x.max(), F.cross_entropy(x, y, reduction="sum") / (y >= 0).sum()]
    for loss in unknown:
        assert [(term.count, term.is_sum) for term in read_terms(loss)] == [(None, False)]
    assert read_terms(torch.zeros(())) == []


def count_calls(rows: int) -> int:
    """Return how often this rank calls the loss in two steps."""
    calls = []

    def loss(output: Tensor, batch: Any) -> Any:
        calls.append(len(output))
        return F.cross_entropy(output, batch["y"], reduction="sum"), len(output)

    run = parallelize(Classifier(), lambda p: torch.optim.SGD(p, 0.0), loss, accumulate=2)
    batch = {"input_ids": batch_of(False)["input_ids"][:rows], "y": torch.arange(rows) % 3}
    run.step(batch)
    run.step(batch)
    return len(calls)


@pytest.mark.parametrize("rows", [3, 8])
def test_every_rank_calls_a_loss_equally_often(rows: int, worlds: Worlds) -> None:
    """A loss that communicates would pair with another call: ranks have other numbers of rows."""
    assert worlds(2).run(count_calls, rows) == [2 * 3 + 2] * 2


def test_a_lost_peer_in_a_loss_is_not_hidden() -> None:
    output, batch = torch.ones(4, 3), {"y": torch.arange(4) % 3}

    def lose(output: Tensor, batch: Any) -> Any:
        raise DeadlineExceeded("no end")

    def refuse(output: Tensor, batch: Any) -> Any:
        raise ValueError("needs four rows")

    with pytest.raises(DeadlineExceeded):
        check_loss_form(lose, output, batch, 4, (torch.ones(()), 4))
    check_loss_form(refuse, output, batch, 4, (torch.ones(()), 4))


def test_rows_are_compared_over_the_slices_of_a_batch() -> None:
    ids = torch.ones(2, 6, dtype=torch.long)
    shorter = torch.ones(2, 4, dtype=torch.long)
    masked = ids.clone()
    masked[:, :3] = -100
    MeanCheck().check_rows(SlicedBatch([{"x": ids}, {"x": shorter}]))  # padded to other lengths
    MeanCheck().check_rows(SlicedBatch([{"x": masked}, {"x": masked}]))
    with pytest.raises(UsageError, match="have 3 and 6 entries"):
        MeanCheck().check_rows(SlicedBatch([{"x": ids}, {"x": masked}]))


def test_rows_are_compared_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(MeanCheck, "check_rows", lambda self, batch: calls.append(batch))
    objective = Objective(Classifier(), lambda output, batch: output.mean(), is_split=True)
    batch = {"input_ids": batch_of(False)["input_ids"]}
    for _ in range(2):
        objective.begin_step(batch)
        for _ in range(3):
            objective(objective.model, batch, 8)
        objective.end_step()
    assert len(calls) == 2


def test_rows_are_compared_outside_of_a_step_too() -> None:
    objective = Objective(Classifier(), lambda output, batch: output.mean(), is_split=True)
    even, uneven = batch_of(False), batch_of(True)
    objective.begin_step(even)
    objective.compute_loss(torch.ones(8, 3), even, 8)
    objective.end_step()
    objective.step_batch = uneven  # an evaluation
    with pytest.raises(UsageError, match="rows of batch"):
        objective.compute_loss(torch.ones(8, 3), uneven, 8)
