"""Pushes, pulls and clocks over real sockets."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import pdrun
from pdrun.errors import AuthenticationError, ConfigError, DeadlineExceeded, PdrunError, UsageError
from pdrun.parallel.servers.client import ServerClient
from pdrun.parallel.servers.links.in_process import TablesInProcess
from pdrun.parallel.servers.settings import dense, parse_mode, rows
from pdrun.parallel.servers.sharding import PIECE_ELEMENTS

from .served import KEY, serving

pytestmark = pytest.mark.torch


def local_client(mode="sync"):
    return ServerClient([TablesInProcess(parse_mode(mode))], 0, is_local=True)


def train(client, optimizer, kind, steps=5):
    """Push fixed gradients; return what is left."""
    made = torch.Generator().manual_seed(3)
    if kind == "rows":
        client.add_rows("t", rows(optimizer, lr=0.1), dim=5)
    else:
        client.add_dense("t", dense(optimizer, lr=0.1), torch.randn(1000, generator=made))
    for _ in range(steps):
        if kind == "rows":
            ids = torch.randint(0, 1 << 40, (50,), generator=made) % 97 * 2**33
            client.push_rows("t", ids, torch.randn(50, 5, generator=made))
        else:
            client.push("t", torch.randn(1000, generator=made))
        client.clock()
    if kind == "rows":
        return client.rows("t", torch.arange(97) * 2**33)
    return client.pull("t")


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adagrad", "lazy_adam", "ftrl"])
@pytest.mark.parametrize("servers", [1, 3])
def test_rows_are_equal_for_any_number_of_servers(tmp_path, optimizer, servers):
    with serving(tmp_path, servers) as running:
        client = running.connect()
        there = train(client, optimizer, "rows")
        client.close()
    assert torch.equal(there, train(local_client(), optimizer, "rows"))
    assert torch.equal(there, train(local_client("async"), optimizer, "rows"))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, 0.1)),
        ("momentum", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        ("adagrad", lambda p: torch.optim.Adagrad(p, 0.1)),
        ("adamw", lambda p: torch.optim.AdamW(p, 0.1)),
        ("lazy_adam", lambda p: torch.optim.Adam(p, 0.1)),
    ],
)
def test_dense_optimizers_have_the_bits_of_torch(name, make):
    made = torch.Generator().manual_seed(3)
    weight = torch.randn(1000, generator=made).requires_grad_()
    optimizer = make([weight])
    for _ in range(5):
        weight.grad = torch.randn(1000, generator=made)
        optimizer.step()
    assert torch.equal(train(local_client(), name, "dense"), weight.detach())


def test_ftrl_follows_its_paper():
    client = local_client()
    client.add_dense("t", dense("ftrl", lr=0.5, l1=0.1, l2=0.2, accumulator=0.1), torch.zeros(3))
    n, z, w = torch.full((3,), 0.1), torch.zeros(3), torch.zeros(3)
    for step in range(4):
        g = torch.tensor([0.03, -2.0, 1.0]) * (step + 1)
        client.push("t", g)
        client.clock()
        sigma = ((n + g * g).sqrt() - n.sqrt()) / 0.5
        z = z + g - sigma * w
        n = n + g * g
        w = torch.where(z.abs() <= 0.1, 0.0, -(z - z.sign() * 0.1) / (n.sqrt() / 0.5 + 0.4))
        torch.testing.assert_close(client.pull("t"), w, rtol=1e-6, atol=1e-6)
    assert client.pull("t")[1] != 0


def test_sync_adds_the_workers_in_rank_order(tmp_path):
    made = torch.Generator().manual_seed(0)
    size = PIECE_ELEMENTS + 77  # two pieces
    grads = [torch.randn(size, generator=made) for _ in range(3)]
    with serving(tmp_path, 2, workers=3) as running:
        clients = [running.connect("sync", worker) for worker in range(3)]

        def work(worker):
            client = clients[worker]
            client.add_dense("w", dense(lr=0.5), torch.full((size,), float(worker == 0)))
            time.sleep(0.02 * (2 - worker))  # the last rank comes first
            client.push("w", grads[worker], divisor=3.0)
            client.clock()
            results[worker] = client.pull("w")

        results = {}
        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        for client in clients:
            client.close()
    total = (grads[0] + grads[1]).add_(grads[2]).div_(torch.tensor(3.0, dtype=torch.float64))
    expected = torch.ones(size).add_(total, alpha=-0.5)
    for worker in range(3):
        assert torch.equal(results[worker], expected)


def test_sync_waits_for_everybody_and_names_who_is_late(tmp_path):
    with serving(tmp_path, 1, workers=3) as running:
        client = running.connect("sync", 1, seconds=0.3)
        with pytest.raises(DeadlineExceeded, match="worker 0, 2 did not end it"):
            client.clock()
        client.close()


def test_bounded_waits_for_the_slowest_only(tmp_path):
    with serving(tmp_path, 1, workers=2) as running:
        fast = running.connect("bounded:2", 0, seconds=0.3)
        slow = running.connect("bounded:2", 1, seconds=0.3)
        slow.clock()
        for _ in range(3):
            fast.clock()
        with pytest.raises(DeadlineExceeded, match="worker 1"):
            fast.clock()
        slow.clock()
        assert fast.step == 3
        fast.clock()
        slow.close()  # nobody waits for a worker that has left
        fast.clock()
        fast.clock()
        fast.close()


def test_between_hosts_the_channel_is_encrypted(tmp_path):
    with serving(tmp_path, tcp=True) as running:
        client = running.connect("async")
        assert client._links[0]._channel._socket.version() == "TLSv1.3"
        there = train(client, "adagrad", "dense")
        client.close()
    assert torch.equal(there, train(local_client(), "adagrad", "dense"))


@pytest.mark.parametrize("tcp", [False, True])
def test_another_key_is_refused(tmp_path, tcp):
    with serving(tmp_path, tcp=tcp) as running:
        with pytest.raises(AuthenticationError, match="another key"):
            running.connect(key=bytes(32))
        running.connect(key=KEY).close()


def test_another_generation_is_refused(tmp_path):
    with serving(tmp_path) as running:
        with pytest.raises(PdrunError, match="generation 6 is over"):
            running.connect(generation=6)


def test_rows_are_made_by_id_and_stored_on_first_use():
    one, other = local_client(), local_client()
    ids = torch.tensor([5, -7, 1 << 62, 5])
    one.add_rows("t", rows(lr=1.0), dim=4, scale=0.5, seed=1)
    other.add_rows("t", rows(lr=1.0), dim=4, scale=0.5, seed=1)
    first = one.rows("t", ids)
    assert torch.equal(first[0], first[3])
    assert not torch.equal(first[0], first[1])
    assert first.abs().max() <= 0.5 < first.abs().max() * 2
    assert one._links[0].store.describe_tables()["tables"]["t"]["rows"] == 0
    one.push_rows("t", ids, torch.ones(4, 4))
    one.clock()
    assert one._links[0].store.describe_tables()["tables"]["t"]["rows"] == 3
    assert torch.equal(one.rows("t", ids)[0], first[0] - 2)
    assert torch.equal(other.rows("t", ids.flip(0)), first.flip(0))


def test_admission_and_limit_of_rows():
    client = local_client("async")
    client.add_rows("t", rows(lr=1.0), dim=1, admit=3, scale=0.0)
    ids = torch.tensor([4, 9])
    for _ in range(2):
        client.push_rows("t", ids, torch.ones(2, 1))
    assert torch.equal(client.rows("t", ids), torch.zeros(2, 1))
    client.push_rows("t", ids[:1], torch.ones(1, 1))
    assert torch.equal(client.rows("t", ids), torch.tensor([[-1.0], [0.0]]))
    client.add_rows("few", rows(lr=1.0), dim=1, keep=8, scale=0.0)
    for first in range(0, 40, 4):
        client.push_rows("few", torch.arange(first, first + 4), torch.ones(4, 1))
    count = client._links[0].store.describe_tables()["tables"]["few"]["rows"]
    assert 4 <= count <= 8
    assert torch.equal(client.rows("few", torch.tensor([39, 0])), torch.tensor([[-1.0], [0.0]]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(tmp_path, value):
    with serving(tmp_path) as running:
        client = running.connect("async")
        client.add_rows("t", rows(), dim=2, scale=0.0)
        client.add_dense("w", dense(), torch.zeros(4))
        bad = torch.ones(3, 2)
        bad[1, 1] = value
        with pytest.raises(UsageError, match="table t: a gradient is nan or infinite"):
            client.push_rows("t", torch.arange(3), bad)
        with pytest.raises(UsageError, match="table w: a gradient is nan or infinite"):
            client.push("w", torch.tensor([1.0, value, 1.0, 1.0]))
        huge = torch.full((4,), 3e38)  # its sum is infinite, itself it is not
        client.push("w", huge)
        assert torch.equal(client.rows("t", torch.arange(3)), torch.zeros(3, 2))
        assert torch.equal(client.pull("w"), torch.zeros(4).add_(huge, alpha=-0.01))
        client.close()


def test_wrong_calls_are_refused_with_the_name(tmp_path):
    with serving(tmp_path, workers=2) as running:
        client = running.connect("async")
        client.add_rows("t", rows(), dim=2, size=10)
        for ids in ([3, -1], [3, 10]):
            with pytest.raises(UsageError, match=r"table t has the ids 0 to 9.*|.*element 1"):
                client.rows("t", torch.tensor(ids))
        with pytest.raises(UsageError, match="whole numbers"):
            client.rows("t", torch.tensor([0.5]))
        with pytest.raises(UsageError, match=r"\(2, 3\), not \(2, 2\)"):
            client.push_rows("t", torch.tensor([1, 2]), torch.ones(2, 3))
        with pytest.raises(UsageError, match="did you mean"):
            client.rows("tt", torch.tensor([1]))
        other = running.connect("async", 1)
        with pytest.raises(ConfigError, match=r"served table t: .* dim is 2 and 3"):
            other.add_rows("t", rows(), dim=3, size=10)
        with pytest.raises(ConfigError, match="async and sync"):
            running.connect("sync", 1)
        with pytest.raises(UsageError, match="workers 0 to 1"):
            running.connect("async", 2)
        with pytest.raises(UsageError, match="'lazy_adam'"):
            rows("adam")
        with pytest.raises(UsageError, match=r"sgd has no option 'betas'|no option 'beta1'"):
            rows("sgd", betas=(0.9, 0.99))
        with pytest.raises(UsageError, match="mode must be"):
            pdrun.parallel.servers.settings.parse_mode("bounded")
        client.close()
        other.close()


def test_checkpoints_go_from_any_number_of_servers_to_any(tmp_path):
    made = torch.Generator().manual_seed(3)
    ids = torch.randint(-(1 << 60), 1 << 60, (300,), generator=made)
    size = 3 * PIECE_ELEMENTS + 5

    def prepare(client):
        client.add_rows("t", rows("adagrad", lr=0.1), dim=3)
        client.add_dense("w", dense("momentum", lr=0.1), torch.zeros(size))

    def push(client, scale):
        client.push_rows("t", ids, torch.ones(300, 3) * scale)
        client.push("w", torch.full((size,), scale))
        client.clock()

    found = []
    counts = [3, 5, 3, 1]
    for turn, servers in enumerate(counts):
        with serving(tmp_path, servers) as running:
            client = running.connect()
            prepare(client)
            if turn:
                client.load(tmp_path / f"saved-{turn - 1}")
            else:
                push(client, 1.0)
            client.save(tmp_path / f"saved-{turn}")
            push(client, 2.0)
            found.append((client.rows("t", ids), client.pull("w")))
            client.close()
    for one in found[1:]:
        assert torch.equal(one[0], found[0][0])
        assert torch.equal(one[1], found[0][1])
    (tmp_path / "saved-0" / "server-00001.json").unlink()
    client = local_client()
    prepare(client)
    with pytest.raises(ConfigError, match="not a complete checkpoint"):
        client.load(tmp_path / "saved-0")


def test_a_lost_connection_neither_loses_nor_doubles_a_push(tmp_path):
    with serving(tmp_path) as running:
        client = running.connect("async", patience=10.0)
        client.add_dense("w", dense(lr=1.0), torch.zeros(3 * PIECE_ELEMENTS))
        for cut in range(6):
            link = client._links[0]
            if cut % 2:
                link._channel.shut_down()  # before the request
            else:
                send = link._channel.send_frame

                def cut_after(frame, *parts, send=send, link=link, **options):
                    send(frame, *parts, **options)
                    link._channel.shut_down()  # its reply is lost

                link._channel.send_frame = cut_after
            client.push("w", torch.ones(3 * PIECE_ELEMENTS))
        assert torch.equal(client.pull("w"), torch.full((3 * PIECE_ELEMENTS,), -6.0))
        client.close()
