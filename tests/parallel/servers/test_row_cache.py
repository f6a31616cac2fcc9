"""The cache of rows: the same values as without one, fewer bytes, rows fetched ahead."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pdrun
from pdrun.errors import UsageError
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.servers.client import ServerClient
from pdrun.parallel.servers.frames import Op
from pdrun.parallel.servers.links.in_process import TablesInProcess
from pdrun.parallel.servers.settings import parse_mode, rows

from .served import serving

pytestmark = pytest.mark.torch


def connect(running, mode, worker):
    client = running.connect(mode, worker, patience=10.0)
    client._mode = parse_mode(mode)
    return client


def local_client(mode="async", store=None):
    link = TablesInProcess(parse_mode(mode))
    link.store = store or link.store
    return ServerClient([link], 0, is_local=True, mode=parse_mode(mode))


def pushed(count):
    return torch.ones(count, 2)


@settings(max_examples=60, deadline=None)
@given(
    limit=st.integers(1, 9),
    keep=st.sampled_from([0, 6]),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["read", "push", "other", "ahead", "clear", "clock"]),
            st.lists(st.integers(-4, 8), min_size=1, max_size=8),
        ),
        max_size=25,
    ),
)
def test_any_order_of_requests_has_the_values_of_the_tables(limit, keep, steps) -> None:
    """Another worker pushes between the requests of this one; mode async always asks."""
    client = local_client()
    client.add_rows("t", rows("adagrad", lr=0.5, cache=limit), dim=2, keep=keep)
    store = client._links[0].store
    other = local_client(store=store)
    other.add_rows("t", rows("adagrad", lr=0.5), dim=2, keep=keep)
    for what, numbers in steps:
        ids = torch.tensor(numbers)
        if what == "read":
            assert torch.equal(client.rows("t", ids), other.rows("t", ids))
        elif what == "push":
            client.push_rows("t", ids, pushed(len(ids)))
        elif what == "other":
            unique = torch.unique(ids)
            with store._tables[0].lock:
                store._tables[0].rows.update_rows(unique, pushed(len(unique)))
        elif what == "ahead":
            client.prefetch("t", ids)
        elif what == "clear":
            store._tables[0].rows.clear()
        else:
            client.clock()


@pytest.mark.parametrize("mode", ["sync", "bounded:0"])
def test_sync_sees_what_others_have_changed_after_each_step(tmp_path, mode) -> None:
    ids = torch.arange(6)
    with serving(tmp_path, 2, workers=2) as running:
        clients = [connect(running, mode, worker) for worker in range(2)]
        for client in clients:
            client.add_rows("t", rows(lr=1.0, cache=100), dim=2, scale=0.0)
        for step in range(3):
            for client in clients:
                assert torch.equal(client.rows("t", ids)[:3], torch.full((3, 2), -1.0 * step))
                client.prefetch("t", torch.arange(10))
            clients[1].push_rows("t", ids[:3], pushed(3))
            clients[0]._questions.take_answers(0)
            first = clients[0]._links
            for link in first:
                link.begin_order(Op.CLOCK, step=step)  # both workers are in one thread
            clients[1].clock()
            for link in first:
                link.finish()
            clients[0].step += 1
        for client in clients:
            client.close()


def test_bounded_uses_a_row_for_at_most_k_steps() -> None:
    client = local_client("bounded:3")
    client.add_rows("t", rows(lr=1.0, cache=10), dim=2, scale=0.0)
    table = client._links[0].store._tables[0].rows
    ids = torch.tensor([7])
    client.rows("t", ids)
    seen = []
    for _ in range(5):
        table.update_rows(ids, pushed(1))
        client.clock()
        seen.append(-int(client.rows("t", ids)[0, 0]))
    assert seen == [0, 0, 3, 3, 3]
    client.push_rows("t", ids, pushed(1))
    assert client.rows("t", ids)[0, 0] == -6.0  # its own gradient is seen at once


def test_only_what_has_changed_travels(tmp_path) -> None:
    ids = torch.arange(1000)
    with serving(tmp_path) as running:
        client = connect(running, "async", 0)
        client.add_rows("t", rows(lr=1.0, cache=2000), dim=64)
        link = client._links[0]
        received = []
        receive = link._channel.receive_tensor
        link._channel.receive_tensor = lambda tensor: (
            received.append(tensor.numel()) or receive(tensor)
        )
        client.prefetch("t", ids)
        assert not received
        client.rows("t", ids)
        assert sum(received) == 1000 * 65
        client.push_rows("t", ids[:10], torch.ones(10, 64))
        received.clear()
        want = client.rows("t", ids)
        assert sum(received) == 10 * 65
        assert torch.equal(want, client._fetch_rows(client._tables["t"], ids))
        client.close()


def test_a_server_that_went_back_is_asked_again(tmp_path) -> None:
    ids = torch.arange(50)
    with serving(tmp_path) as running:
        client = connect(running, "async", 0)
        client.add_rows("t", rows(lr=1.0, cache=100), dim=2)
        client.push_rows("t", ids, pushed(50))
        client.save(tmp_path / "saved")
        want = client.rows("t", ids)
        client.push_rows("t", ids, pushed(50))
        assert torch.equal(client.rows("t", ids), want - 1)
        running.lose_server(0)
        running.start_again(0)
        assert torch.equal(client.rows("t", ids), want)
        client.push_rows("t", ids, pushed(50))
        client.load(tmp_path / "saved")
        assert torch.equal(client.rows("t", ids), want)
        client.close()


class Towers(nn.Module):
    """Two tables."""

    def __init__(self) -> None:
        super().__init__()
        self.users = pdrun.ServedEmbedding("users", 4)
        self.items = nn.Embedding(30, 4, padding_idx=0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.users(ids[:, 0]) * self.items(ids[:, 1])).sum(1)


def train(cache: int, ahead: bool) -> list[float]:
    torch.manual_seed(0)
    model = Towers()
    served = pdrun.rows("adagrad", lr=0.1, cache=cache)
    run = parallelize(
        model,
        lambda params: torch.optim.SGD(params, 0.1),
        lambda output, batch: ((output - 1.0).square().sum(), torch.tensor(float(len(output)))),
        servers=pdrun.Servers({"users|items": served}),
        accumulate=2,
    )
    made = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 30, (12, 2), generator=made) for _ in range(6)]
    losses = []
    for batch, following in itertools.pairwise(batches):
        if ahead:
            model.users.prefetch(following[:, 0])
        losses.append(run.step(batch).loss)
    return losses


def test_a_run_has_the_same_losses_with_a_cache() -> None:
    want = train(0, False)
    assert train(3, False) == want
    assert train(100, True) == want


class Clicks(torch.utils.data.Dataset):
    """Rows of two ids, as {"ids": [user, item], "weight": float}."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(index)
        return {"weight": torch.rand(2), "ids": torch.randint(0, 30, (2,), generator=made)}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("is_offset", [False, True])
def test_rows_of_the_next_batch_are_fetched_without_being_asked_for(
    monkeypatch, accumulate, is_offset
) -> None:
    """In the second step and later; not where the model computes ids of its own."""
    asked: list[tuple[str, torch.Tensor]] = []
    prefetch = ServerClient.prefetch

    def note(self: ServerClient, name: str, ids: torch.Tensor) -> None:
        asked.append((name, ids.sort().values))
        prefetch(self, name, ids)

    monkeypatch.setattr(ServerClient, "prefetch", note)

    def train(cache: int) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(0)
        served = pdrun.rows("adagrad", lr=0.1, cache=cache)
        run = parallelize(
            Towers(),
            lambda params: torch.optim.SGD(params, 0.1),
            lambda output, batch: ((output - 1.0).square().sum(), torch.tensor(float(len(output)))),
            servers=pdrun.Servers({"users|items": served}),
            accumulate=accumulate,
            forward=lambda model, batch: model(batch["ids"] * (2 if is_offset else 1) // 1 % 30),
        )
        losses, batches = [], []
        for batch in run.data(pdrun.Loader(Clicks(), batch=12)):
            batches.append(batch["ids"])
            losses.append(run.step(batch).loss)
            assert run.position.batch == len(losses) % 5
        return losses, batches

    want, _ = train(0)
    assert not asked
    losses, batches = train(100)
    assert losses == want
    expected = [
        (name, ids[:, column].sort().values)
        for ids in batches[2:]
        for column, name in enumerate(["users", "items"])
    ]
    if is_offset:
        expected = []
    assert [name for name, _ in asked] == [name for name, _ in expected]
    assert all(
        torch.equal(*pair)
        for pair in zip([ids for _, ids in asked], [ids for _, ids in expected], strict=True)
    )


def test_a_loop_that_is_left_continues_with_the_batch_that_no_step_has_used() -> None:
    """A batch that was read ahead was not handed out."""
    served = pdrun.rows("adagrad", lr=0.1, cache=9)
    run = parallelize(
        Towers(),
        lambda params: torch.optim.SGD(params, 0.1),
        lambda output, batch: output.square().mean(),
        servers=pdrun.Servers({"users|items": served}),
        forward=lambda model, batch: model(batch["ids"]),
    )
    loader = pdrun.Loader(Clicks(), batch=12)
    seen = []
    for epoch in range(2):
        for number, batch in enumerate(run.data(loader)):
            seen.append(batch["ids"])
            if epoch == 0 and number == 2:
                break  # not used
            run.step(batch)
    assert run.position.epoch == 1 and run.position.batch == 0
    assert torch.equal(seen[2], seen[3])
    assert len(seen) == 6


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="cache must be a number of rows"):
        pdrun.rows(cache=-1)
    client = local_client()
    client.add_rows("t", rows(), dim=2)
    with pytest.raises(UsageError, match="has no cache"):
        client.prefetch("t", torch.tensor([1]))
    with pytest.raises(UsageError, match="belongs to no run"):
        pdrun.ServedEmbedding("users", 4).prefetch(torch.tensor([1]))


@pytest.mark.parametrize("size", [0, 100])
def test_another_table_is_read_while_rows_are_fetched_ahead(tmp_path, size):
    with serving(tmp_path, 2) as running:
        client = connect(running, "async", 0)
        client.add_rows("ahead", rows(lr=1.0, cache=50), dim=2)
        client.add_rows("other", rows(lr=1.0), dim=3, size=size)
        ids = torch.arange(40)
        want = client.rows("ahead", ids), client.rows("other", ids)
        client.clear_caches()
        client.prefetch("ahead", ids)
        assert torch.equal(client.rows("other", ids), want[1])
        assert torch.equal(client.rows("ahead", ids), want[0])
        client.close()
