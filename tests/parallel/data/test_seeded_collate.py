"""Random numbers of a collate function do not depend on the ranks that read the rows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdrun.parallel.data.loader import Loader, Position, read_batches
from pdrun.parallel.data.seeded import SlicedBatch
from pdrun.parallel.parallelize import parallelize
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch

ROWS, WORDS = 22, 30


class Words:
    """Rows of words; row i has ``length(i)`` words."""

    def __init__(self, ragged: bool) -> None:
        self.ragged = ragged

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(3 + index % 4 if self.ragged else 5) + 3 + index % 7


def mask_words(samples: list[Tensor]) -> dict[str, Tensor]:
    """Pad and mask at random, as a collator for masked language models does."""
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    hidden = torch.rand(ids.shape) < 0.3
    hidden[:, 0] = True
    labels = ids.masked_fill(~hidden | (ids == 0), -100)
    return {"ids": ids.masked_fill(hidden, random.randrange(1, 3)), "labels": labels}


class Model(nn.Module):
    """Predicts words."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.emb(ids))


def loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    total = nn.functional.cross_entropy(
        output.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    return total, (labels != -100).sum()


def train(accumulate: int, ragged: bool) -> list[float]:
    run = parallelize(
        Model(), lambda p: torch.optim.SGD(p, 0.1), loss, accumulate=accumulate, norm=True
    )
    source = Loader(Words(ragged), 8, shuffle=True, collate=mask_words)
    return [run.step(batch).loss for batch in run.data(source)]


@pytest.mark.parametrize("ragged", [False, True])
def test_masks_are_those_of_the_slices(ragged: bool, worlds: Worlds) -> None:
    want = worlds(1).run(train, 4, ragged)[0]
    assert len(want) == 3
    assert worlds(2).run(train, 2, ragged) == [want, want]
    assert worlds(1).run(train, 1, ragged)[0] != want  # other slices


def read(collate: Any, accumulate: int, workers: int = 0) -> list[Any]:
    source = Loader(Words(True), 8, collate=collate, workers=workers)
    return [batch for batch, _ in read_batches(source, 1, Position(), 1, 0, accumulate)]


def test_slices_are_collated_apart_only_if_that_draws_numbers() -> None:
    calls = []

    def pad(samples: list[Tensor]) -> Tensor:
        calls.append(len(samples))
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    assert [tuple(batch.shape) for batch in read(pad, 2)] == [(8, 6), (8, 6), (6, 6)]
    assert calls[-2:] == [8, 6]
    assert all(isinstance(batch, SlicedBatch) for batch in read(mask_words, 4)[:1])
    alone, ahead = read(mask_words, 4), read(mask_words, 4, workers=1)
    for one, other in zip(alone, ahead, strict=True):
        assert all(torch.equal(a["ids"], b["ids"]) for a, b in zip(one, other, strict=True))
    state = torch.get_rng_state(), random.getstate()
    read(mask_words, 2)
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == random.getstate()
