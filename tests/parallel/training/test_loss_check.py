"""Means of slices have the right weight, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdrun.parallel.parallelize import parallelize
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
