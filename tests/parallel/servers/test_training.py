"""`parallelize(servers=...)`: the bits of data parallel training, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pdrun
from pdrun.errors import ConfigError, UsageError
from pdrun.parallel.parallelize import parallelize
from pdrun.parallel.servers import served_model
from pdrun.parallel.servers.client import ServerClient
from pdrun.parallel.servers.embedding import LookupFunction
from pdrun.parallel.servers.links.in_process import TablesInProcess
from pdrun.parallel.servers.links.remote import RemoteLink, WorkerIdentity
from pdrun.parallel.servers.settings import parse_mode
from tests.lib.rank_pool import Worlds

from .served import KEY, serving

pytestmark = pytest.mark.torch


class Recommender(nn.Module):
    """Two tables and a small network; the first id of the items is padding."""

    def __init__(self, served: bool = False) -> None:
        super().__init__()
        self.users = nn.Embedding(50, 8)
        self.items = nn.Embedding(30, 8, padding_idx=0)
        self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        if served:
            self.users = pdrun.ServedEmbedding("people", 8)  # type: ignore[assignment]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.users(ids[:, 0]), self.items(ids[:, 1])], 1)
        return self.head(both).squeeze(1)


def squares(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return ((output - batch[1]) ** 2).sum(), torch.tensor(float(len(output)))


def make_batches(count: int = 6, rows: int = 23) -> list[Any]:
    made = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, 30, (rows, 2), generator=made), torch.randn(rows, generator=made))
        for _ in range(count)
    ]


def make_optimizer(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    return {
        "sgd": lambda params: torch.optim.SGD(params, 0.1),
        "momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
        "adagrad": lambda params: torch.optim.Adagrad(params, 0.1),
        "adamw": lambda params: torch.optim.AdamW(params, 0.1),
    }[name]


def use_servers(addresses: list[str], rank: int) -> None:
    """Have this process's runs use servers of the test."""

    def connect(mode: str, *, timeout: float) -> ServerClient:
        identity = WorkerIdentity(rank, parse_mode(mode), 7, timeout)
        links = [RemoteLink(n, KEY, identity, lambda a=a: [a]) for n, a in enumerate(addresses)]
        return ServerClient(links, rank, is_local=False)

    served_model.connect = connect


def train(
    addresses: list[str] | None,
    tables: dict[str, tuple[str, str]] | None = None,
    mode: str = "sync",
    optimizer: str = "sgd",
    folder: str = "",
    load: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train for some steps; return losses and final weights."""
    torch.manual_seed(0)
    model = Recommender()
    if addresses is not None:
        use_servers(addresses, torch.distributed.get_rank())
    if tables is not None:
        kinds = {"rows": pdrun.rows, "dense": pdrun.dense}
        made = {glob: kinds[kind](name, lr=0.1) for glob, (kind, name) in tables.items()}
        options["servers"] = pdrun.Servers(made, mode=mode)
    run = parallelize(model, make_optimizer(optimizer), squares, **options)
    if load:
        run.load(folder)
    losses, stale = [], []
    for step, batch in enumerate(make_batches()):
        if folder and step == 3:
            if load:
                continue
            run.save(folder)
        metrics = run.step(batch)
        losses.append(metrics.loss)
        stale.append(metrics.staleness)
    output = run.evaluate(make_batches(1)[0])
    found = {"losses": losses, "stale": stale, "output": output[0]}
    found["weights"] = {name: value.clone() for name, value in run.full_weights().items()}
    if tables is not None and addresses is not None and mode == "sync":
        users = "users" if any(glob.startswith("users") for glob in tables) else ""
        if users:
            found["weights"]["users.weight"] = run.state.served.client.rows(
                "users", torch.arange(50)
            )
    return found


ROWS_AND_DENSE = {"users|items": ("rows", "sgd"), "head.0.*": ("dense", "sgd")}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_sync_with_sgd_has_the_bits_of_data_parallel(worlds: Worlds, tmp_path, accumulate) -> None:
    want = worlds(2).run(train, None, accumulate=accumulate)
    with serving(tmp_path, 2, workers=2) as running:
        got = worlds(2).run(train, running.addresses, ROWS_AND_DENSE, accumulate=accumulate)
    for one, other in zip(got, want, strict=True):
        assert one["losses"] == other["losses"]
        assert one["stale"] == [0] * 6
        assert torch.equal(one["output"], other["output"])
        for name in ("head.0.weight", "head.0.bias", "head.2.weight", "users.weight"):
            assert torch.equal(one["weights"][name], other["weights"][name]), name


@pytest.mark.parametrize("optimizer", ["momentum", "adagrad", "adamw"])
def test_other_optimizers_agree(worlds: Worlds, tmp_path, optimizer) -> None:
    """Dense momentum and adamw, and adagrad also by rows, where rows without gradient stay."""
    tables = {"head.*": ("dense", optimizer)}
    if optimizer == "adagrad":
        tables["users|items"] = ("rows", "adagrad")
    want = worlds(2).run(train, None, optimizer=optimizer)
    with serving(tmp_path, 1, workers=2) as running:
        got = worlds(2).run(train, running.addresses, tables, optimizer=optimizer)
    assert got[0]["losses"] == pytest.approx(want[0]["losses"], rel=1e-6)


@pytest.mark.parametrize("mode", ["async", "bounded:2", "bounded:0"])
def test_all_weights_on_servers_in_every_mode(worlds: Worlds, tmp_path, mode) -> None:
    tables = {"users|items": ("rows", "sgd"), "*": ("dense", "sgd")}
    want = worlds(2).run(train, None)
    with serving(tmp_path, 2, workers=2) as running:
        got = worlds(2).run(train, running.addresses, tables, mode)
    if mode == "bounded:0":
        assert got[0]["losses"] == want[0]["losses"]
    else:
        assert got[0]["losses"] == pytest.approx(want[0]["losses"], rel=0.2)


@pytest.mark.parametrize("level", [1, 3])
def test_the_other_weights_may_be_sharded(worlds: Worlds, tmp_path, level) -> None:
    want = worlds(2).run(train, None)
    tables = {"users|items": ("rows", "sgd")}
    with serving(tmp_path, 1, workers=2) as running:
        got = worlds(2).run(train, running.addresses, tables, optimizer_level=level)
    assert got[0]["losses"] == want[0]["losses"]


def test_one_process_without_servers_runs_the_same_program(tmp_path) -> None:
    tables = {"users|items": ("rows", "adagrad"), "*": ("dense", "adagrad")}
    want = train(None, optimizer="adagrad")["losses"]
    assert train(None, tables)["losses"] == pytest.approx(want, rel=1e-6)
    assert train(None, ROWS_AND_DENSE)["losses"] == train(None)["losses"]


def test_checkpoints_contain_the_tables_for_any_number_of_servers(worlds: Worlds, tmp_path) -> None:
    tables = {"users|items": ("rows", "adagrad"), "*": ("dense", "momentum")}
    folder = str(tmp_path / "saved")
    with serving(tmp_path, 2, workers=2) as running:
        want = worlds(2).run(train, running.addresses, tables, folder=folder)
    saved = tmp_path / "saved" / "step-00000003" / "served"
    assert len(list(saved.glob("server-*.safetensors"))) == 2
    with serving(tmp_path, 3, workers=2) as running:
        again = worlds(2).run(train, running.addresses, tables, folder=folder, load=True)
    for name, value in want[0]["weights"].items():
        if "head" in name or "users" in name:
            assert value.shape == again[0]["weights"][name].shape
    # the second run trains batches 0 to 2 and 4, 5 from the third step's weights
    assert again[0]["losses"][0] < want[0]["losses"][0]


def test_served_embeddings_have_any_id_and_need_a_glob() -> None:
    torch.manual_seed(0)
    model = Recommender(served=True)
    with pytest.raises(UsageError, match="belongs to no run"):
        model.users(torch.tensor([1]))
    with pytest.raises(UsageError, match="users is a ServedEmbedding that no glob"):
        parallelize(
            model, make_optimizer("sgd"), squares, servers=pdrun.Servers({"items": pdrun.rows()})
        )
    run = parallelize(
        model,
        make_optimizer("sgd"),
        squares,
        servers=pdrun.Servers({"people": pdrun.rows("adagrad", lr=0.1)}),
    )
    batch = make_batches(1)[0]
    far = (batch[0] * torch.tensor([2**40, 1]), batch[1])
    losses = [run.step(far).loss for _ in range(5)]
    assert losses[-1] < losses[0]
    assert "servers: 0 dense weight(s) and the rows of people in this process" in run.explain()
    with pytest.raises(UsageError, match=r"nan or infinite"):
        run.step((far[0], far[1] * float("nan")))


def test_verify_compares_sync_and_refuses_async() -> None:
    for mode, served in (("sync", {"users": pdrun.rows()}), ("async", {"users": pdrun.rows()})):
        torch.manual_seed(0)
        run = parallelize(
            Recommender(),
            make_optimizer("sgd"),
            squares,
            servers=pdrun.Servers(served, mode=mode),
        )
        if mode == "sync":
            assert run.verify(make_batches(1)).same_bits
        else:
            with pytest.raises(UsageError, match="order of their arrival"):
                run.verify(make_batches(1))


class Tied(Recommender):
    """Both tables are one."""

    def __init__(self) -> None:
        super().__init__()
        self.users.weight = self.items.weight


@pytest.mark.parametrize(
    ("servers", "options", "text"),
    [
        (lambda: pdrun.Servers({"nothing": pdrun.rows()}), {}, "'nothing' matches no embedding"),
        (lambda: pdrun.Servers({"heads*": pdrun.dense()}), {}, "'heads.' matches no weight"),
        (lambda: pdrun.Servers({"users": pdrun.rows()}), {"clip": 1.0}, "clip= is not supported"),
        (lambda: pdrun.Servers({"users": pdrun.rows()}), {"precision": "bf16"}, "precision="),
        (lambda: pdrun.Servers({"users": pdrun.rows()}), {"compile": True}, "compile="),
        (lambda: "sync", {}, "must be a pdrun.Servers"),
        (lambda: pdrun.Servers({}), {}, "needs globs"),
        (lambda: pdrun.Servers({"users": "rows"}), {}, "pdrun.rows"),
        (lambda: pdrun.Servers({"users": pdrun.rows("adamw")}), {}, "must be one of sgd"),
        (lambda: pdrun.Servers({"users": pdrun.rows()}, mode="later"), {}, "mode must be"),
    ],
)
def test_refused(servers, options, text) -> None:
    model = Recommender()
    with pytest.raises(UsageError, match=text):
        parallelize(model, make_optimizer("sgd"), squares, servers=servers(), **options)
    # the model is as before, and can be used
    assert set(dict(model.named_parameters())) == set(dict(Recommender().named_parameters()))
    parallelize(model, make_optimizer("sgd"), squares).step(make_batches(1)[0])


def test_tied_and_limited_tables_are_refused() -> None:
    servers = pdrun.Servers({"users": pdrun.rows()})
    with pytest.raises(UsageError, match="is tied"):
        parallelize(Tied(), make_optimizer("sgd"), squares, servers=servers)
    model = Recommender()
    model.users.max_norm = 1.0
    with pytest.raises(UsageError, match="max_norm"):
        parallelize(model, make_optimizer("sgd"), squares, servers=servers)


def refuse(what: str) -> None:
    if what == "servers":
        pdrun.servers.connect()
    rank = torch.distributed.get_rank()
    served = pdrun.rows() if rank == 0 else pdrun.rows("adagrad")
    servers = pdrun.Servers({"users": served})
    parallelize(Recommender(), make_optimizer("sgd"), squares, servers=servers)


def test_ranks_that_differ_and_missing_servers_are_named(worlds: Worlds) -> None:
    for kind, text in worlds(2).failures(refuse, "servers"):
        assert kind == ConfigError.__name__ and "no parameter servers" in text
    kind, text = worlds(2).failure(1, refuse, "tables")
    assert kind == UsageError.__name__ and "servers" in text


@pytest.mark.parametrize("padding", [None, 3])
def test_the_gradient_of_a_lookup_has_the_bits_of_torch(padding) -> None:
    made = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 9, (4, 5), generator=made)
    weight = torch.randn(9, 3, generator=made, requires_grad=True)
    outer = torch.randn(4, 5, 3, generator=made)
    functional.embedding(ids, weight, padding).backward(outer)
    client = ServerClient([TablesInProcess(parse_mode("sync"))], 0, is_local=True)
    client.add_rows("t", pdrun.rows(), dim=3, size=9, values=weight)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    lookup = LookupFunction(
        client, "t", 3, torch.device("cpu"), lambda _table, _ids, *pair: found.append(pair), padding
    )
    output = lookup(ids)
    assert torch.equal(output, functional.embedding(ids, weight))
    output.backward(outer)
    mine, rows = found[0]
    assert rows.grad is not None and weight.grad is not None
    assert torch.equal(rows.grad, weight.grad[mine])


@pytest.mark.parametrize(("bad", "first"), [(9, 2), (-3, 2)])
def test_an_id_out_of_range_is_named_with_its_row_of_the_batch(bad, first) -> None:
    client = ServerClient([TablesInProcess(parse_mode("sync"))], 0, is_local=True)
    client.add_rows("t", pdrun.rows(), dim=3, size=9)
    lookup = LookupFunction(client, "t", 3, torch.device("cpu"), lambda *_: None)
    ids = torch.zeros(4, 5, dtype=torch.int64)
    ids[2, 1] = ids[3, 0] = bad
    with pytest.raises(UsageError, match=f"row {first} of the ids.*got {bad}"):
        lookup(ids)
