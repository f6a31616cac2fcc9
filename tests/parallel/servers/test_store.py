"""No update is lost or doubled, and every wait ends, in any order of requests."""

from __future__ import annotations

import threading

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from pdrun.errors import DeadlineExceeded, UsageError
from pdrun.parallel.servers.settings import TableSpec, parse_mode
from pdrun.parallel.servers.sharding import PIECE_ELEMENTS, SHARDS, find_owners, shard_owners
from pdrun.parallel.servers.tables.clocks import StepClocks
from pdrun.parallel.servers.tables.grouped_ids import group_ids
from pdrun.parallel.servers.tables.index import DIRECT_IDS, DistinctIds, SlotArray, SlotLists
from pdrun.parallel.servers.tables.optimizers import OptimizerSettings
from pdrun.parallel.servers.tables.store import TableStore
from pdrun.parallel.servers.tables.tables import first_rows
from tests.lib.tiers import by_tier

pytestmark = pytest.mark.torch

ROWS = TableSpec("t", "rows", OptimizerSettings(lr=1.0), 0, 1)
WORKERS = 3
EXAMPLES = by_tier(60, 1000)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    mode=st.sampled_from(["sync", "async", "bounded:1", "bounded:3"]),
    order=st.lists(st.integers(0, WORKERS - 1), max_size=60),
    repeats=st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_each_push_counts_once_in_any_interleaving(mode, order, repeats):
    """Workers push and end steps in turn as hypothesis says; some requests are sent twice."""
    store = TableStore(parse_mode(mode), workers=WORKERS, seconds=0.0, clock=lambda: 0.0)
    number = store.declare_table(ROWS)
    steps = [0] * WORKERS
    requests = [0] * WORKERS
    sent = torch.zeros(WORKERS, 64, 4)
    for worker in range(WORKERS):
        store.join_worker(worker, "c")
    for worker, twice in zip(order, repeats, strict=False):
        requests[worker] += 1
        ids = torch.tensor([0, worker + 1])
        grads = torch.ones(2, 1) * (worker + 1)
        push = {"worker": worker, "client": "c", "request": requests[worker]}
        for _ in range(1 + twice):
            store.push_rows(number, ids, grads.clone(), step=steps[worker], **push)
        sent[worker, steps[worker], ids] += worker + 1.0
        requests[worker] += 1
        try:
            store.end_step(steps[worker], worker=worker, client="c", request=requests[worker])
        except DeadlineExceeded:
            pass  # it would wait for another worker
        steps[worker] += 1
    used = sent.sum((0, 1))
    if mode == "sync":
        used = sent[:, : min(steps)].sum((0, 1))
    assert torch.equal(store.read_rows(number, torch.arange(4)).squeeze(1), -used)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    bound=st.integers(0, 3),
    order=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=80),
)
def test_bounded_workers_are_never_further_apart_and_somebody_can_go_on(bound, order):
    """A worker ends its next step only if it need not wait; one may be lost and come back."""
    clocks = StepClocks(parse_mode(f"bounded:{bound + 1}"), 3)
    limit = bound + 1
    alive = {0: -1, 1: -1, 2: -1}
    for worker, is_lost in order:
        if is_lost and worker in alive and len(alive) > 1:
            clocks.remove_worker(worker)
            del alive[worker]
            continue
        if worker not in alive:
            clocks.join_worker(worker)
            alive[worker] = clocks._ended[worker]
        if clocks.find_blocking(worker, alive[worker]):
            assert alive[worker] > min(alive.values()) + limit
            continue
        alive[worker] += 1
        clocks.end_step(worker, alive[worker])
        assert max(alive.values()) - min(alive.values()) <= limit + 1
    slowest = min(alive, key=alive.__getitem__)
    assert not clocks.find_blocking(slowest, alive[slowest])


@pytest.mark.parametrize("mode", ["sync", "bounded:1"])
def test_a_worker_that_connects_late_is_waited_for(mode):
    store = TableStore(parse_mode(mode), workers=2, seconds=0.0, clock=lambda: 0.0)
    store.join_worker(0, "a")
    for step in range(3):
        try:
            store.end_step(step, worker=0, client="a", request=step + 1)
            assert mode != "sync"
        except DeadlineExceeded:
            assert step > (mode != "sync") - 1
    store.join_worker(1, "b")
    assert store._clocks.find_blocking(0, 2) == [1]


def test_threads_of_all_modes_end_with_every_update():
    for mode in ("sync", "async", "bounded:1"):
        store = TableStore(parse_mode(mode), workers=4, seconds=20.0)
        number = store.declare_table(ROWS)

        def work(worker, store=store, number=number):
            store.join_worker(worker, "c")
            for step in range(25):
                push = {"worker": worker, "client": "c"}
                for part in range(2):
                    request = 3 * step + part + 1
                    store.push_rows(
                        number,
                        torch.tensor([7]),
                        torch.ones(1, 1),
                        step=step,
                        part=part,
                        request=request,
                        **push,
                    )
                store.end_step(step, request=3 * step + 3, **push)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert store.read_rows(number, torch.tensor([7])).item() == -200.0


def test_a_replaced_worker_is_refused_and_its_successor_joins_at_the_slowest():
    store = TableStore(parse_mode("bounded:1"), workers=2, seconds=0.0, clock=lambda: 0.0)
    number = store.declare_table(ROWS)
    store.join_worker(0, "old")
    store.join_worker(1, "b")
    store.end_step(0, worker=0, client="old", request=1)
    store.leave_worker(0, "old")
    for step in range(5):
        store.end_step(step, worker=1, client="b", request=step + 1)
    assert store.join_worker(0, "new") == 0
    with pytest.raises(UsageError, match="another process has taken the place of worker 0"):
        store.push_rows(
            number, torch.tensor([1]), torch.ones(1, 1), worker=0, client="old", request=9
        )
    store.end_step(5, worker=1, client="b", request=9)
    with pytest.raises(DeadlineExceeded, match="worker 0"):
        store.end_step(6, worker=1, client="b", request=10)


@settings(max_examples=by_tier(30, 300), deadline=None)
@given(batches=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=20), max_size=12))
def test_both_indices_are_dictionaries(batches):
    indices = [SlotArray(torch.full((100,), -1, dtype=torch.int32)), SlotLists()]
    known: dict[int, int] = {}
    for batch in batches:
        ids = torch.tensor(sorted(set(batch) - known.keys()), dtype=torch.int64)
        for index in indices:
            index.add_ids(ids, len(known))
        known |= {number: len(known) + place for place, number in enumerate(ids.tolist())}
        asked = torch.tensor(batch)
        for index in indices:
            assert index.find_slots(asked).tolist() == [known[number] for number in batch]
            assert int(index.find_slots(torch.arange(100)).ge(0).sum()) == len(known)


def test_few_shards_move_when_a_server_is_added():
    four, five = shard_owners(4), shard_owners(5)
    moved = four != five
    assert bool((five[moved] == 4).all())  # only to the new one
    assert 0.1 * SHARDS < int(moved.sum()) < 0.3 * SHARDS
    ids = torch.cat([torch.arange(20_000), torch.arange(20_000) * -(2**40)])
    counts = torch.bincount(find_owners(ids, "t", 5))
    assert int(counts.min()) > 0.6 * len(ids) / 5
    assert not torch.equal(find_owners(ids, "t", 5), find_owners(ids, "u", 5))


def test_memory_is_linear_in_the_rows_in_use():
    store = TableStore(parse_mode("async"))
    number = store.declare_table(TableSpec("t", "rows", OptimizerSettings("adagrad"), 0, 8))
    for first in range(0, 4_000, 400):
        ids = torch.arange(first, first + 400) * 2**30
        store.push_rows(number, ids, torch.ones(400, 8), request=first + 1)
        table = store._tables[number].rows
        assert table.count == first + 400
        assert len(table._values) <= max(1024, 2 * table.count)
        assert len(table._states[0]) <= max(1024, 2 * table.count)


@pytest.mark.parametrize("used", [0, 1, 2, 3])
def test_pieces_of_one_request_are_used_once_each(used):
    """A server that went back has used some of them; the worker repeats each by itself, or all."""
    size = 2 * PIECE_ELEMENTS + 5
    spec = TableSpec("w", "dense", OptimizerSettings(lr=1.0), size)
    for repeats_all in (False, True):
        store = TableStore(parse_mode("async"), seconds=0.0)
        store.join_worker(0, "")
        number = store.declare_table(spec)
        grads = {piece: torch.ones(count) for piece, count in store.list_pieces(number, 0, 3)}
        for piece in range(used):
            store.push_piece(number, piece, grads[piece].clone(), request=10 + piece)
        if repeats_all:
            store.push_pieces(number, grads, request=12)
        for piece in range(3):
            store.push_piece(number, piece, grads[piece].clone(), request=10 + piece)
        for piece in range(3):
            assert bool((store.read_piece(number, piece) == -1.0).all())
        assert store.updates == 3


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    size=st.sampled_from([0, 1, 7, 8, 9, 1000, DIRECT_IDS + 1]),
    lists=st.lists(st.lists(st.integers(0, 999), max_size=30), min_size=1, max_size=4),
)
def test_merged_lists_have_the_ids_of_all(size, lists):
    """Whether an array or a sort finds them, again and again."""
    distinct = DistinctIds(size)
    tensors = [torch.tensor(ids, dtype=torch.int64) % (size or 1000) for ids in lists]
    shuffled = [ids.unique().flip(0) for ids in tensors]
    merged, merged_places = distinct.merge(shuffled)
    assert torch.equal(merged.sort().values, torch.cat(shuffled).unique())
    for ids, at in zip(shuffled, merged_places, strict=True):
        assert torch.equal(merged[: len(ids)] if at is None else merged[at], ids)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    ids=st.lists(
        st.sampled_from([-(2**63), -(2**31) - 1, -(2**31), -1, 0, 5, 2**31 - 1, 2**31, 2**63 - 1])
        | st.integers(0, 99),
        max_size=60,
    ),
    times=st.sampled_from([1, 150, 600]),
)
def test_grouped_ids_are_those_of_a_sort_and_sums_have_its_order(ids, times):
    """For lists that are sorted as they are, filled up, or long enough."""
    tensor = torch.tensor(ids * times, dtype=torch.int64).view(-1, 1)
    groups = group_ids(tensor)
    assert torch.equal(groups.distinct, tensor.unique())
    assert torch.equal(groups.distinct[groups.places], tensor)
    rows = torch.randn(len(tensor), 3)
    expected = torch.zeros(len(groups.distinct), 3)
    for row, place in zip(rows.tolist()[:500], groups.places.view(-1).tolist()[:500], strict=True):
        expected[place] += torch.tensor(row)
    rows[500:] = 0.0
    assert torch.equal(groups.sum_rows(rows), expected)


@pytest.mark.parametrize("ids", [torch.arange(20_000), torch.arange(20_000) * 2**33 - 2**40])
def test_first_values_are_uniform_and_independent(ids):
    spec = TableSpec("t", "rows", OptimizerSettings(), 0, 8, scale=0.5)
    values = first_rows(spec, ids).double() * 2
    assert float(values.min()) >= -1 and float(values.max()) <= 1
    assert abs(float(values.mean())) < 0.01 and abs(float(values.var()) - 1 / 3) < 0.01
    columns = torch.corrcoef(values.T).fill_diagonal_(0)
    assert float(columns.abs().max()) < 0.05
    for lag in (1, 2, 8, 64):
        assert abs(float((values[:-lag] * values[lag:]).mean())) < 0.01
    assert len(values[:, 0].unique()) > 19_900


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("repeated", range(4))
def test_pieces_of_one_request_count_once_beside_their_repetition(mode, repeated):
    """After a lost connection they come one by one, while the first request may be in work."""
    store = TableStore(parse_mode(mode))
    spec = TableSpec("w", "dense", OptimizerSettings(lr=1.0), 3 * PIECE_ELEMENTS)
    number = store.declare_table(spec)
    store.join_worker(0, "c")
    ones = torch.ones(PIECE_ELEMENTS)

    def repeat(pieces: range) -> None:
        for piece in pieces:
            store.push_piece(number, piece, ones.clone(), client="c", request=5 + piece)

    repeat(range(repeated))
    store.push_pieces(number, {piece: ones.clone() for piece in range(3)}, client="c", request=7)
    repeat(range(repeated, 3))
    store.end_step(0, client="c", request=8)
    assert store.updates == 4
    for piece in range(3):
        assert torch.equal(store.read_piece(number, piece), -ones)


@pytest.mark.parametrize("size", [0, 50])
def test_a_step_adds_rows_in_the_order_of_the_workers(size):
    """For tables with an array of slots, and for any ids; the lists overlap."""
    made = torch.Generator().manual_seed(5)
    store = TableStore(parse_mode("sync"), workers=3)
    number = store.declare_table(TableSpec("t", "rows", OptimizerSettings(lr=1.0), size, 3))
    total = torch.zeros(50, 3)
    for worker in range(3):
        store.join_worker(worker, f"c{worker}")
        ids = torch.randperm(50, generator=made)[:20].sort().values
        grads = torch.randn(20, 3, generator=made)
        total.index_add_(0, ids, grads)
        who = {"worker": worker, "client": f"c{worker}"}
        store.push_rows(number, ids, grads, **who, request=1)
    threads = [
        threading.Thread(
            target=store.end_step, args=(0,), kwargs={"worker": n, "client": f"c{n}", "request": 2}
        )
        for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert torch.equal(store.read_rows(number, torch.arange(50)), -total)
