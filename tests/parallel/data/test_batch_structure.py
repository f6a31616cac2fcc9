"""Batches of every structure are cut into their rows; what cannot be told apart is refused."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from pdrun.errors import UsageError
from pdrun.parallel.data.batch_slicing import BatchSlicing, count_rows, take_rows, to_device
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.training.loss import call_model
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch

SAME = [torch.arange(6) + 10 * index for index in range(4)]
RAGGED = [torch.arange(length) for length in (3, 5, 3, 3)]
IMAGES = [torch.full((3, 8, 8), float(index)) for index in range(4)]
TARGETS = [{"boxes": torch.ones(3, 4) * i, "labels": torch.ones(3)} for i in range(4)]


@dataclasses.dataclass
class Pair:
    """A batch of a user's class."""

    x: Tensor
    name: str
    y: Tensor


def middle(batch: Any, slicing: BatchSlicing | None = None) -> Any:
    """Return rows 1 and 2 of a batch of four, moved as for a step."""
    slicing = slicing or BatchSlicing()
    assert count_rows(batch, slicing) == 4
    return to_device(take_rows(batch, range(1, 3), slicing), torch.device("cpu"))


def equal(found: Any, wanted: Any) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def test_lists_of_samples_are_rows() -> None:
    whole = BatchSlicing(forward=lambda model, batch: model(batch))
    assert equal(middle(SAME, whole), SAME[1:3])
    assert equal(middle(RAGGED, whole), RAGGED[1:3])
    assert equal(middle(tuple(RAGGED), whole), RAGGED[1:3])
    stacked = BatchSlicing(forward=lambda model, batch: model(rnn.pad_sequence(batch)))
    assert equal(middle(RAGGED, stacked), RAGGED[1:3])
    assert equal([one["boxes"] for one in middle(TARGETS)], [one["boxes"] for one in TARGETS[1:3]])
    assert isinstance(middle(tuple(RAGGED), whole), tuple)
    # rows of a list of samples stay samples, also where all of them have one length
    last = take_rows(RAGGED, range(2, 4), whole)
    assert equal(last, RAGGED[2:4])
    assert count_rows(last, BatchSlicing()) == 2
    with pytest.raises(UsageError, match="different numbers of rows"):
        count_rows(RAGGED, BatchSlicing())  # the model would get the first entry only


def test_samples_beside_other_parts_of_a_batch() -> None:
    images, targets = middle((IMAGES, TARGETS))
    assert equal(images, IMAGES[1:3])
    assert [int(one["boxes"][0, 0]) for one in targets] == [1, 2]
    part = middle({"images": IMAGES, "y": torch.arange(4), "kept": 7})
    assert equal(part["images"], IMAGES[1:3])
    assert part["y"].tolist() == [1, 2]
    assert part["kept"] == 7
    columns = middle(([torch.ones(4, 2), torch.zeros(4, 3)], torch.arange(4)))
    assert [tuple(one.shape) for one in columns[0]] == [(2, 2), (2, 3)]


def test_columns_stay_columns() -> None:
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    for forward in (None, lambda model, batch: model(batch[0][:, :-1])):
        part = middle([x, y], BatchSlicing(forward=forward))
        assert equal(part, [x[1:3], y[1:3]])
    assert equal(middle((x, y), BatchSlicing(forward=lambda m, b: m(b))), (x[1:3], y[1:3]))
    kept = BatchSlicing(forward=lambda model, batch: model(torch.stack(batch)), rows=4)
    assert equal(middle([x, y], kept), [x[1:3], y[1:3]])
    six = [torch.arange(4) for _ in range(6)]
    known = BatchSlicing(rows=6, forward=lambda model, batch: model(batch))
    assert count_rows(six, known) == 6


def test_containers_of_other_kinds() -> None:
    pair = middle(Pair(torch.arange(4), "a", torch.arange(4) * 2))
    assert (pair.x.tolist(), pair.name, pair.y.tolist()) == ([1, 2], "a", [2, 4])
    part = middle(UserDict(ids=torch.arange(8).view(4, 2), names=["a", "b", "c", "d"]))
    assert isinstance(part, UserDict)
    assert part["ids"].tolist() == [[2, 3], [4, 5]]
    assert part["names"] == ["b", "c"]
    packed = rnn.pack_sequence(RAGGED, enforce_sorted=False)
    assert equal(rnn.unpack_sequence(middle(packed)), RAGGED[1:3])
    nested = torch.nested.nested_tensor([one.float() for one in RAGGED], layout=torch.jagged)
    assert equal(middle(nested).unbind(), [one.float() for one in RAGGED[1:3]])


@pytest.mark.parametrize(
    ("batch", "forward"),
    [
        (SAME, lambda model, batch: model(torch.stack(batch))),
        (([torch.ones(4, 2) for _ in range(4)], torch.arange(4)), None),
        ({"images": IMAGES}, None),
    ],
)
def test_what_could_be_both_is_refused(batch: Any, forward: Any) -> None:
    with pytest.raises(UsageError, match=r"can be 4 samples, or columns of \d rows") as caught:
        count_rows(batch, BatchSlicing(forward=forward))
    assert "a list of dicts" in str(caught.value)


class Recurrent(nn.Module):
    """Takes a list of sequences."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, sequences: list[Tensor]) -> Tensor:
        return self.head(torch.stack([self.emb(one).mean(0) for one in sequences]))


def train_on_samples(batch: Any) -> Any:
    run = parallelize(
        Recurrent(),
        lambda p: torch.optim.SGD(p, 0.1),
        lambda output, part: (output.square().sum(), len(output)),
        forward=lambda model, part: model(part),
        norm=True,
    )
    report = run.verify([batch])
    m = run.step(batch)
    return report.steps[0].same_bits, m.loss, m.tokens, m.grad_norm


def test_a_step_on_a_list_of_samples_has_the_numbers_of_one_process(worlds: Worlds) -> None:
    for batch in (SAME, RAGGED):
        output = Recurrent()(batch)
        want = float(output.detach().square().sum()) / 4
        for same, loss, tokens, norm in worlds(2).run(train_on_samples, batch):
            assert same
            assert loss == pytest.approx(want, rel=1e-6)
            assert tokens == 4
            assert norm > 0


class Doubled(nn.Module):
    """Takes one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_columns_of_different_lengths_are_not_given_to_the_model_as_a_list() -> None:
    x, y = torch.ones(3, 4, 2), torch.ones(4, 3, 2)  # rows are dim 1 of x, and dim 0 of y
    for batch in ((x, y), [x, y]):
        for slicing in (BatchSlicing(dims=(1, 0)), BatchSlicing(full_batch=True)):
            part = take_rows(batch, range(1, 3), slicing)
            assert call_model(Doubled(), part).shape[0] == 3
    assert call_model(nn.Identity(), take_rows(TARGETS, range(2), BatchSlicing())) == TARGETS[:2]


def test_forward_is_watched_once_a_run() -> None:
    calls = []

    def forward(model: Any, batch: Any) -> Any:
        calls.append(1)
        return model(batch)

    slicing = BatchSlicing(forward=forward)
    for batch in (SAME, RAGGED, SAME, tuple(RAGGED)):
        middle(batch, slicing)
    assert len(calls) == 2  # of one length, and of several
