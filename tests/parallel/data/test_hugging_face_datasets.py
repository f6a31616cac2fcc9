"""Data sets of the datasets library, by index and as streams, with the batches of one process."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import pdrun
from tests.lib.rank_pool import Worlds

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
ROWS = 17


class Table:
    """What a `datasets.Dataset` is for a loader: no class of torch, rows by int or by list."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, key: int) -> dict[str, torch.Tensor]:
        if type(key) is not int:
            raise TypeError(f"wrong key type: {key!r}")
        return {"x": torch.tensor([float(key), 1.0])}

    def __getitems__(self, keys: list[int]) -> list[dict[str, torch.Tensor]]:
        return [self[key] for key in keys]


class TableStream(IterableDataset[Any]):
    """What a shuffled `datasets.IterableDataset` is: a buffer whose order depends on the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rows = list(range(ROWS))
        random.Random(self.epoch).shuffle(rows)
        yield from (Table()[row] for row in rows)


def load_rows(kind: str) -> Any:
    """Return the rows as a data set of a kind."""
    if kind == "table":
        return Table()
    if kind == "stream":
        return TableStream()
    import datasets

    rows = {"x": [[float(row), 1.0] for row in range(ROWS)]}
    # with a fingerprint: with some versions of pyarrow the library cannot pickle one of its types
    memory = datasets.table.InMemoryTable.from_pydict(rows)
    table = datasets.Dataset(memory, fingerprint="rows").with_format("torch")
    if kind == "datasets table":
        return table
    return table.to_iterable_dataset().shuffle(seed=3, buffer_size=8).with_format("torch")


def train(kind: str, stop: int | None, folder: str) -> list[tuple[float, int]]:
    """Train two epochs, with a resume after some steps; return losses and counts."""
    found: list[tuple[float, int]] = []

    def make_run() -> pdrun.Run:
        torch.manual_seed(0)
        return pdrun.parallelize(
            nn.Linear(2, 1),
            lambda params: torch.optim.SGD(params, 1e-6),
            lambda out, batch: ((batch["x"][:, 0] ** 2).sum() + 0 * out.sum(), len(batch["x"])),
            forward=lambda model, batch: model(batch["x"]),
        )

    def go(run: pdrun.Run, until: int) -> None:
        rows = load_rows(kind)
        loader = DataLoader(rows, batch_size=6, shuffle=kind.endswith("table"))
        while run.position.epoch < 2 and len(found) < until:
            for batch in run.data(loader):
                metrics = run.step(batch)
                found.append((metrics.loss, metrics.tokens))
                if len(found) == until:
                    break

    run = make_run()
    if stop is not None:
        go(run, stop)
        run.save(folder)
        run = make_run()
        run.load(folder)
    go(run, 99)
    return found


@pytest.mark.parametrize("kind", ["table", "stream", "datasets table", "datasets stream"])
def test_every_rank_and_a_resumed_run_have_the_batches_of_one_process(
    kind: str, worlds: Worlds, tmp_path: Any
) -> None:
    if kind.startswith("datasets") and importlib.util.find_spec("datasets") is None:
        pytest.skip("the datasets library is not installed")
    want = worlds(1).run(train, kind, None, "")[0]
    assert [count for _, count in want] == [6, 6, 5] * 2
    assert want[:3] != want[3:], "another order in the second epoch"
    for found in worlds(2).run(train, kind, 4, str(tmp_path)):
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in want])
