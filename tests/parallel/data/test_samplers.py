"""Samplers and streams: the rows of one process in its order, on any ranks and after a resume."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import pdrun
from pdrun.errors import UsageError
from pdrun.parallel.data.loader import Loader, Position, read_batches
from pdrun.parallel.data.torch_loaders import describe_loader, from_torch
from tests.lib.rank_pool import Worlds

pytestmark = pytest.mark.torch

ROWS = 23
DATA = TensorDataset(torch.arange(ROWS))


class Buckets(Sampler[list[int]]):
    """Batches of other sizes, in a random order from Python's generator."""

    def __iter__(self) -> Iterator[list[int]]:
        rows = [[0, 1, 2, 3, 4], [5], [6, 7], list(range(8, 23))]
        random.shuffle(rows)
        return iter(rows)

    def __len__(self) -> int:
        return 4


class Stateful(Sampler[int]):
    """Goes on where its last pass has ended."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        self.at += 1
        return iter([(self.at + row) % ROWS for row in range(ROWS)])

    def __len__(self) -> int:
        return ROWS


class Endless(Sampler[int]):
    """Never ends, but has the length of an epoch."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(ROWS).tolist()

    def __len__(self) -> int:
        return ROWS


def weights() -> list[float]:
    return [float(row % 3) for row in range(ROWS)]


def loaders() -> dict[str, DataLoader[Any]]:
    own = torch.Generator()
    split = DistributedSampler(DATA, num_replicas=2, rank=1, seed=4)
    return {
        "weighted": DataLoader(DATA, 6, sampler=WeightedRandomSampler(weights(), 31)),
        "subset": DataLoader(DATA, 6, sampler=SubsetRandomSampler([5, 3, 1, 9, 11, 20, 21, 2])),
        "generator": DataLoader(DATA, 6, sampler=RandomSampler(DATA, True, 40, generator=own)),
        "batches": DataLoader(DATA, batch_sampler=Buckets()),
        "lists": DataLoader(DATA, batch_sampler=[[3, 4], [1], [torch.tensor(2), 0, 5]]),
        "drop": DataLoader(
            DATA, batch_sampler=BatchSampler(WeightedRandomSampler(weights(), 31), 6, True)
        ),
        "distributed": DataLoader(DATA, 3, sampler=split),
        "endless": DataLoader(DATA, 6, sampler=Endless()),
    }


def epoch(loader: Loader, world: int, times: int, number: int = 0, first: int = 0) -> list[Any]:
    """Return the rows of each batch of an epoch, put together from all ranks."""
    found: dict[int, list[Any]] = {}
    for rank in range(world):
        position = Position(number, first)
        for index, (batch, shard) in enumerate(
            read_batches(loader, 7, position, world, rank, times), first
        ):
            parts = batch[0].split(list(shard.sizes)) if sum(shard.sizes) else []
            for a, part in enumerate(parts):
                found.setdefault(index, []).append((a * world + rank, part.tolist()))
    return [
        [row for _, part in sorted(found[index]) for row in part]
        for index in range(first, first + len(found))
    ]


@pytest.mark.parametrize("kind", list(loaders()))
def test_the_rows_of_a_sampler_do_not_depend_on_the_ranks(kind: str) -> None:
    """Each call makes the loaders anew, as a resumed run does."""
    torch.manual_seed(random.randrange(1000))
    one = from_torch(loaders()[kind])
    assert one is not None
    want = epoch(one, 1, 1, 3)
    torch.manual_seed(random.randrange(1000))
    other = from_torch(loaders()[kind])
    assert other is not None
    assert epoch(other, 2, 2, 3) == want
    assert epoch(other, 3, 1, 3, first=1) == want[1:], "from the middle of an epoch"
    if kind not in ("lists",):
        assert epoch(one, 1, 1, 4) != want
    if kind not in ("batches", "lists"):
        assert len(want) == len(other)


def test_what_samplers_draw() -> None:
    made = {kind: from_torch(loader) for kind, loader in loaders().items()}
    rows = {
        kind: [row for batch in epoch(loader, 2, 1) for row in batch]
        for kind, loader in made.items()
        if loader is not None
    }
    assert len(rows["weighted"]) == 31 and not any(row % 3 == 0 for row in rows["weighted"])
    assert len(rows["drop"]) == 30
    assert sorted(rows["subset"]) == [1, 2, 3, 5, 9, 11, 20, 21]
    assert rows["lists"] == [3, 4, 1, 2, 0, 5]
    assert sorted(rows["batches"]) == list(range(ROWS))
    assert len(rows["endless"]) == ROWS


@pytest.mark.parametrize("drop", [False, True])
def test_a_distributed_sampler_is_taken_apart(drop: bool) -> None:
    """A step has the rows that its replicas would have together; padding is left out."""
    samplers = [
        DistributedSampler(DATA, num_replicas=2, rank=rank, seed=4, drop_last=drop)
        for rank in range(2)
    ]
    loader = from_torch(DataLoader(DATA, 3, sampler=samplers[1]))
    assert loader is not None and loader.batch == 6
    for number in range(2):
        per_rank = []
        for sampler in samplers:
            sampler.set_epoch(number)
            per_rank.append(list(sampler))
        steps = [
            Counter(row for rows in per_rank for row in rows[at : at + 3])
            for at in range(0, len(per_rank[0]), 3)
        ]
        found = [Counter(batch) for batch in epoch(loader, 2, 1, number)]
        assert found[:-1] == steps[:-1]
        assert (steps[-1] - found[-1]).total() == (0 if drop else 1)
        assert sum(map(len, epoch(loader, 2, 1, number))) == (22 if drop else ROWS)


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(1)


def test_a_row_that_is_drawn_again_gets_other_random_numbers() -> None:
    loader = Loader(Noisy(), 4, sampler=[5, 5, 6, 5])
    ((batch, _),) = read_batches(loader, 7, Position(), 1, 0, 1)
    ((first, _),) = read_batches(Loader(Noisy(), 4, sampler=[5]), 7, Position(), 1, 0, 1)
    assert batch.unique().numel() == 4
    assert batch[0] == first[0]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: from_torch(DataLoader(DATA, 4, sampler=Stateful())), "it has other state"),
        (lambda: Loader(DATA, None, sampler=[1, 2]), "must yield lists of indices, got 1"),
        (lambda: Loader(DATA, None, sampler=[[]]), r"must yield lists of indices, got \[\]"),
        (lambda: Loader(DATA, None), "batch=None needs a sampler"),
        (lambda: Loader(DATA, 4, True, sampler=[1]), "defines the order, so does shuffle"),
        (lambda: Loader(DATA, 4, sampler=3), "sampler must be an iterable of indices, got int"),
    ],
)
def test_what_is_no_order_is_refused(make: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        epoch(make(), 1, 1)


def test_options_of_a_loader_are_kept() -> None:
    def begin(worker: int) -> None: ...

    loader = DataLoader(DATA, 4, num_workers=1, worker_init_fn=begin, prefetch_factor=3)
    made = from_torch(loader)
    assert made is not None
    assert made.options["worker_init_fn"] is begin and made.options["prefetch_factor"] == 3


# ---- streams ----------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """A stream with a shuffle buffer of Python's random numbers; knows its epoch, as datasets'."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        rows = list(range(self.rows))
        random.shuffle(rows)
        for row in rows:
            yield torch.tensor([100.0 * self.epoch + row, random.random()])


def make_run(**options: Any) -> pdrun.Run:
    torch.manual_seed(0)
    return pdrun.parallelize(
        nn.Linear(2, 1),
        lambda params: torch.optim.SGD(params, 1e-6, momentum=0.9),
        lambda out, batch: (batch[:, 0].sum() + 0 * out.sum(), len(batch)),
        **options,
    )


def stream_losses(stop: int | None, folder: str) -> list[Any]:
    """Train two epochs of a stream, with a resume after some steps; return losses and counts."""
    run, found = make_run(), []
    random.seed(torch.distributed.get_rank())  # the program's own generators may differ

    def go(until: int) -> None:
        while run.position.epoch < 2 and len(found) < until:
            for batch in run.data(DataLoader(Stream(), batch_size=6)):
                metrics = run.step(batch)
                found.append((metrics.loss, metrics.tokens))
                if len(found) == until:
                    break

    if stop is not None:
        go(stop)
        run.save(folder)
        run = make_run()
        run.load(folder)
    go(99)
    return found


def test_a_stream_gives_every_rank_the_same_batches(worlds: Worlds, tmp_path: Any) -> None:
    want = worlds(1).run(stream_losses, None, "")[0]
    assert [count for _, count in want] == [6, 6, 6, 5] * 2
    assert want[0] != want[4] and want[4][0] > 100, "another order in the second epoch"
    for found in worlds(2).run(stream_losses, 6, str(tmp_path)):
        assert found == want


def own_rows(sized: bool) -> Any:
    """Train on own rows of which rank 1 has fewer."""
    rank = torch.distributed.get_rank()
    run = make_run(dataset_strategy="data_parallel", accumulate=2)
    batches = [torch.full((3, 2), 10.0 * rank + step) for step in range(4 - 2 * rank)]
    for _ in range(2):  # the same tensors again
        source = batches if sized else iter(batches)
        found = [(m.loss, m.tokens) for batch in run.data(source) for m in [run.step(batch)]]
    return found


@pytest.mark.parametrize("sized", [True, False])
def test_a_rank_whose_rows_have_ended_takes_part_without_rows(sized: bool, worlds: Worlds) -> None:
    for found in worlds(2).run(own_rows, sized):
        assert found == [(5.0, 6), (6.0, 6), (2.0, 3), (3.0, 3)]


def rank_order() -> None:
    """Read an order that each rank has made for itself."""
    rank = torch.distributed.get_rank()
    list(make_run().data(DataLoader(DATA, 4, sampler=list(range(rank, ROWS, 2)))))


def test_a_sampler_of_one_rank_s_rows_is_refused(worlds: Worlds) -> None:
    (kind, text) = worlds(2).failure(1, rank_order)
    assert kind == "UsageError" and "the sampler of all rows" in text


def said() -> str:
    import contextlib
    import io

    with contextlib.redirect_stderr(io.StringIO()) as told:
        run = make_run()
        for _ in range(2):
            list(run.data(DataLoader(TensorDataset(torch.ones(8)), batch_size=4)))
    return told.getvalue()


def test_what_a_batch_size_means_is_said_once(worlds: Worlds) -> None:
    lines = worlds(2).run(said)
    assert lines == ["pdrun: DataLoader(batch_size=4): 4 rows per step over 2 ranks\n", ""]
    texts = {
        kind: describe_loader(loader, from_torch(loader), 2, False)
        for kind, loader in loaders().items()
    }
    assert "6 rows per step over 2 ranks, each row once" in texts["distributed"]
    assert "a Buckets: one of its batches per step" in texts["batches"]
    stream = DataLoader(Stream(), 4)
    assert "every rank reads all of the stream" in describe_loader(stream, None, 2, False)
    assert "each rank's own rows" in describe_loader(stream, None, 2, True)
