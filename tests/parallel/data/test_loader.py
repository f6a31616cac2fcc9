"""Batches by global index: the same samples for any number of ranks, from any position."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import pdrun
from pdrun.errors import UsageError
from pdrun.parallel.data import loader, torch_loaders
from pdrun.parallel.data.batch_slicing import parse_batch_slicing
from pdrun.parallel.data.loader import Loader, Position
from tests.lib import small_models as zoo
from tests.lib.rank_pool import Worlds
from tests.lib.small_models import Case
from tests.lib.tiers import thorough

pytestmark = pytest.mark.torch


class Noisy(Dataset[Any]):
    """Samples with noise from both generators."""

    def __init__(self, rows: int = 29) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        return torch.tensor([float(index), float(torch.rand(()))]), random.random()


def epoch(world: int, times: int, position: Position, **options: Any) -> dict[int, list[Any]]:
    """
    Return the samples of each batch of an epoch, in global order, put together from all ranks.
    """
    found: dict[int, list[Any]] = {}
    source = Loader(Noisy(), 8, shuffle=True, **options)
    for rank in range(world):
        place = Position(position.epoch, position.batch)
        for index, (batch, shard) in enumerate(
            loader.read_batches(source, 7, place, world, rank, times), position.batch
        ):
            parts = batch[0].split(list(shard.sizes)) if sum(shard.sizes) else []
            for a, part in enumerate(parts):
                found.setdefault(index, []).append((a * world + rank, part.tolist()))
    return {
        index: [row for _, part in sorted(parts) for row in part] for index, parts in found.items()
    }


@pytest.mark.parametrize(("world", "times"), [(1, 1), (2, 1), (3, 2), (4, 3)])
def test_the_samples_do_not_depend_on_the_ranks(world: int, times: int) -> None:
    want = epoch(1, 1, Position())
    assert epoch(world, times, Position()) == want
    assert sorted(int(row[0]) for batch in want.values() for row in batch) == list(range(29))
    assert epoch(1, 1, Position(1)) != want
    assert epoch(world, times, Position(0, 2)) == {2: want[2], 3: want[3]}
    assert len(epoch(world, times, Position(), drop_last=True)) == 3


def test_processes_that_read_ahead_read_the_same() -> None:
    assert epoch(2, 1, Position(), workers=1) == epoch(1, 1, Position())


def test_a_dataset_leaves_the_program_s_own_randomness_alone() -> None:
    torch.manual_seed(3)
    random.seed(3)
    epoch(1, 1, Position())
    after = torch.rand(()), random.random()
    torch.manual_seed(3)
    random.seed(3)
    assert after == (torch.rand(()), random.random())


def test_loaders_of_torch() -> None:
    data = TensorDataset(torch.arange(10))
    made = torch_loaders.from_torch(DataLoader(data, batch_size=4, shuffle=True, drop_last=True))
    assert made == Loader(data, 4, True, True, made.collate if made else None)

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(range(3))

    assert torch_loaders.from_torch(DataLoader(Stream())) is None


def words(rows: int) -> TensorDataset:
    batch = zoo.batch_of(rows, 0)
    return TensorDataset(*batch)


def train(world: int, times: int, kind: str, stop: int | None, folder: str) -> list[float]:
    """Train two epochs of 4 batches, stopping and going on in another run after some steps."""
    losses: list[float] = []

    def go(run: Any, until: int) -> None:
        while run.position.epoch < 2 and len(losses) < until:
            for batch in run.data(source()):
                losses.append(run.step(batch).loss)
                if len(losses) == until:
                    break

    def source() -> Any:
        if kind == "Loader":
            return Loader(words(29), 8, shuffle=True)
        if kind == "DataLoader":
            return DataLoader(words(29), batch_size=8, shuffle=True)
        return [zoo.batch_of(rows, 3) for rows in (8, 8, 8, 5)]

    case = Case(world, 1, accumulate=times, dropout=True)
    run = zoo.make(case)
    if stop is not None:
        go(run, stop)
        run.save(folder)
        run = zoo.make(case)
        run.load(folder)
    go(run, 99)
    return losses


@pytest.mark.parametrize("kind", ["Loader", "DataLoader", thorough("list")])
def test_an_interrupted_epoch_goes_on_where_it_was(
    kind: str, worlds: Worlds, tmp_path: Any
) -> None:
    want = worlds(1).run(train, 1, 6, kind, None, "")[0]
    assert len(want) == 8
    for stop, (world, times) in ((3, (3, 2)), (4, (2, 3))):
        assert (
            worlds(world).run(train, world, times, kind, stop, str(tmp_path / str(stop)))[-1]
            == want
        )


def strategies(value: Any, rows: int) -> float:
    run = zoo.make(Case(2), dataset_strategy=value)
    batch = zoo.batch_of(8, 0)
    if value == "data_parallel":
        rank = torch.distributed.get_rank()
        batch = tuple(part[rank * rows : (rank + 1) * rows] for part in batch)
    return run.step(batch).loss


@pytest.mark.parametrize(
    "value", ["data_parallel", "full_batch", (0, 0), thorough(None), thorough(((2, 1), (2, 1)))]
)
def test_dataset_strategies_give_the_same_loss(value: Any, worlds: Worlds) -> None:
    want = worlds(2).run(strategies, None, 4)[0]
    assert worlds(2).run(strategies, value, 4)[0] == pytest.approx(want, rel=1e-6)


def empty() -> None:
    zoo.make(Case(2)).step(
        (torch.ones(0, zoo.LENGTH, dtype=torch.int64), torch.ones(0, zoo.LENGTH, dtype=torch.int64))
    )


def counts_of_nothing() -> None:
    batch = zoo.batch_of(8, 0)
    zoo.make(Case(2)).step((batch[0], batch[1].fill_(-100)))


def test_batches_of_nothing_are_refused_on_every_rank(worlds: Worlds) -> None:
    assert all("the batch has no rows" in text for _, text in worlds(2).failures(empty))
    assert all(
        "counts must be above 0, got 0" in text for _, text in worlds(2).failures(counts_of_nothing)
    )


def evaluating(nested: bool) -> tuple[list[float], list[list[float]], tuple[int, int]]:
    """
    Train two epochs, evaluating inside the loop before the step; return losses, outputs and the
    position.
    """
    run, losses, seen = zoo.make(Case(2, 1, accumulate=2)), [], []
    train, other = Loader(words(29), 8, shuffle=True), Loader(words(11), 4, shuffle=True)
    for _ in range(2):
        for batch in run.data(train):
            if nested and run.steps % 3 == 0:
                found = [run.evaluate(part) for part in run.data(other, training=False)]
                seen.append(
                    [
                        float(len(found)),
                        float(sum(x.shape[0] for y in found for x in y if x is not None)),
                    ]
                )
                assert run.source is train
            losses.append(run.step(batch).loss)
    return losses, seen, (run.position.epoch, run.position.batch)


def test_evaluation_inside_a_training_loop_changes_nothing(worlds: Worlds) -> None:
    plain, nested = worlds(2).run(evaluating, False), worlds(2).run(evaluating, True)
    assert [message[0] for message in plain] == [message[0] for message in nested]
    assert nested[0][2] == (2, 0)
    for one, other in zip(nested[0][1], nested[1][1], strict=True):
        assert (one[0], one[1] + other[1]) == (3, 11)


def simple() -> pdrun.Run:
    def loss(output: Any, batch: Any) -> Any:
        return (output**2).sum(), len(output)

    return pdrun.parallelize(
        torch.nn.Linear(2, 1), lambda params: torch.optim.SGD(params, 0.1), loss
    )


def tensors(count: int) -> Iterator[torch.Tensor]:
    yield from torch.ones(count, 4, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (
            Loader(TensorDataset(torch.ones(16, 2)), 4),
            Loader(TensorDataset(torch.ones(8, 2)), 4),
        ),
        lambda: (list(tensors(4)), list(tensors(2))),
    ],
)
@pytest.mark.parametrize("at", [1, 4])
def test_another_source_in_the_middle_of_an_epoch_is_refused(make: Any, at: int) -> None:
    run, (train, other) = simple(), make()
    with pytest.raises(UsageError, match="training=False"):
        for _, _batch in zip(range(at), run.data(train), strict=False):
            if _ == at - 1:
                next(run.data(other))


def test_a_source_is_left_and_taken_up_again() -> None:
    run, data = simple(), TensorDataset(torch.ones(16, 2))

    def begin(source: Any) -> None:
        for batch in run.data(source):
            run.step(batch)
            break

    begin(Loader(data, 4))
    assert len(list(run.data(Loader(data, 4)))) == 3
    begin(tensors(4))
    assert len(list(run.data(tensors(4)))) == 3
    begin(tensors(4))
    run.position.batch = 0
    assert len(list(run.data(Loader(data, 8)))) == 2


def test_a_loop_whose_position_another_one_has_moved_ends() -> None:
    run, loader = simple(), Loader(TensorDataset(torch.ones(16, 2)), 4)
    with pytest.raises(UsageError, match="another loop over training data"):
        for _ in run.data(loader):
            list(run.data(loader))


@pytest.mark.parametrize(
    ("value", "dims"),
    [
        (((1, 1, 1, 4), (1,)), ""),
        (((1, 4), (1, 4)), "(1, 1)"),
        (((1, 4, 1), (4,)), "(1, 0)"),
    ],
)
def test_counts_slice_rows_only(value: Any, dims: str) -> None:
    with pytest.raises(UsageError, match="slices dim") as caught:
        parse_batch_slicing(value, 4)
    assert f"name their dims: {dims}" in caught.value.hint or not dims
    assert "use strategy=pdrun.Operators" in caught.value.hint
