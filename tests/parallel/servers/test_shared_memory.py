"""Workers of a server's host read tables in its memory, and lose nothing by that."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import threading

import pytest
import torch

from pdrun.errors import PeerLost, UsageError
from pdrun.parallel.servers.channel import open_channel
from pdrun.parallel.servers.client import ServerClient
from pdrun.parallel.servers.frames import MAILBOX, SHARED_VALUES, Frame, Op, encode_json
from pdrun.parallel.servers.links.in_process import TablesInProcess
from pdrun.parallel.servers.settings import dense, parse_mode, rows
from pdrun.parallel.servers.sharding import PIECE_ELEMENTS
from pdrun.parallel.servers.tables import memory

from .served import KEY, serving

pytestmark = pytest.mark.torch
SIZE = 18 * PIECE_ELEMENTS + 33  # more pieces than a slot of the mailbox has


@pytest.fixture
def sent(monkeypatch):
    """The operations of all frames that this process sends."""
    found = []
    send = __import__("pdrun.parallel.servers.channel", fromlist=["Channel"]).Channel.send_frame

    def note(self, frame, *parts, **options):
        found.append((frame.op, sum(map(len, parts))))
        send(self, frame, *parts, **options)

    monkeypatch.setattr("pdrun.parallel.servers.channel.Channel.send_frame", note)
    return found


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("servers", [1, 2])
def test_dense_values_are_in_no_frame(tmp_path, sent, mode, servers):
    with serving(tmp_path, servers) as running:
        client = running.connect(mode)
        client.add_dense("w", dense("momentum", lr=0.5, weight_decay=0.1), torch.ones(SIZE))
        made = torch.Generator().manual_seed(0)
        weight = torch.ones(SIZE).requires_grad_()
        optimizer = torch.optim.SGD([weight], 0.5, momentum=0.9, weight_decay=0.1)
        sent.clear()
        for _ in range(2):
            grad = torch.randn(SIZE, generator=made)
            client.push("w", grad)
            client.clock()
            weight.grad = grad.clone()
            optimizer.step()
            assert torch.equal(client.pull("w"), weight.detach())
        assert max(size for op, size in sent if op in (Op.PUSH, Op.PULL)) == 0
        client.close()


@pytest.mark.parametrize("servers", [1, 3])
def test_rows_are_read_without_a_request(tmp_path, sent, servers):
    with serving(tmp_path, servers) as running:
        client, other = (running.connect("async") for _ in range(2))
        for one in (client, other):
            one.add_rows("t", rows(lr=1.0), dim=3, size=1000, scale=0.5, admit=2, keep=90)
            one.add_rows("any", rows(lr=1.0), dim=3, scale=0.5)
        ids = torch.arange(0, 1000, 7)
        first = client.rows("t", ids)
        assert first.abs().max() > 0
        sent.clear()
        for turn in range(3):
            other.push_rows("t", ids[:20], torch.ones(20, 3))
            expected = first.clone()
            expected[:20] -= max(0, turn)  # its first gradient is not admitted
            torch.testing.assert_close(client.rows("t", ids), expected)
        other.push_rows("t", ids[20:], torch.ones(len(ids) - 20, 3))
        other.push_rows("t", ids[20:], torch.ones(len(ids) - 20, 3))  # more rows than are kept
        stored = [service.store.read_rows(0, ids) for service in running.services]
        found = client.rows("t", ids)
        assert all(any(torch.equal(row, one[i]) for one in stored) for i, row in enumerate(found))
        assert Op.ROWS not in {op for op, _ in sent}
        with pytest.raises(UsageError, match="got 1000"):
            client.rows("t", torch.tensor([1, 1000]))
        client.rows("any", ids)
        assert Op.ROWS in {op for op, _ in sent}
        client.close()
        other.close()


def test_a_reader_sees_whole_updates_only(tmp_path):
    with serving(tmp_path, workers=2) as running:
        writer, reader = running.connect("async", 0), running.connect("async", 1)
        for one in (writer, reader):
            one.add_rows("t", rows(lr=1.0), dim=8, size=20_000, scale=0.0)
        ids = torch.arange(20_000)
        grads = torch.ones(20_000, 8)
        writer.push_rows("t", ids, grads)
        end = threading.Event()

        def write():
            for _ in range(60):
                writer.push_rows("t", ids, grads)
            end.set()

        thread = threading.Thread(target=write)
        thread.start()
        while not end.is_set():
            found = reader.rows("t", ids[::50])
            assert bool((found == found[0, 0]).all())
        thread.join(30)
        assert torch.equal(reader.rows("t", ids[:1]), torch.full((1, 8), -61.0))
        writer.close()
        reader.close()


def test_rows_wait_for_first_values_and_for_a_checkpoint(tmp_path):
    with serving(tmp_path, workers=2) as running:
        late, early = running.connect("async", 0), running.connect("async", 1)
        values = torch.randn(50, 2)
        early.add_rows("t", rows(lr=1.0), dim=2, size=50, scale=0.0, values=values)
        found = []
        ids = torch.arange(50)
        thread = threading.Thread(target=lambda: found.append(early.rows("t", ids)))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        late.add_rows("t", rows(lr=1.0), dim=2, size=50, scale=0.0, values=values)
        thread.join(20)
        assert torch.equal(found[0], values)
        late.save(tmp_path / "saved")
        late.push_rows("t", ids, torch.ones(50, 2))
        assert torch.equal(early.rows("t", ids), values - 1)
        late.load(tmp_path / "saved")
        assert torch.equal(early.rows("t", ids), values)
        late.close()
        early.close()


def test_a_lost_server_is_noticed_by_a_reader(tmp_path):
    with serving(tmp_path) as running:
        client = running.connect("async")
        client.add_rows("t", rows(), dim=2, size=10)
        client.rows("t", torch.tensor([1]))
        running.lose_server(0)
        with pytest.raises(PeerLost, match="server 0 is lost"):
            client.rows("t", torch.tensor([1]))


def test_a_refused_gradient_frees_its_slot(tmp_path):
    with serving(tmp_path) as running:
        client = running.connect("async")
        client.add_dense("w", dense(lr=1.0), torch.zeros(SIZE))
        bad = torch.ones(SIZE)
        bad[-1] = float("nan")  # in the second request
        for _ in range(5):
            with pytest.raises(UsageError, match="nan or infinite"):
                client.push("w", bad)
        client.push("w", torch.ones(SIZE))
        found = client.pull("w")
        assert float(found[-1]) == -1.0 and float(found[0]) == -6.0
        client.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_gradients_of_rows_are_in_no_frame(tmp_path, sent, mode):
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(-(1 << 40), 1 << 40, (4000,), generator=made).unique()
    with serving(tmp_path, 2) as running:
        client = running.connect(mode, patience=10.0)
        local = ServerClient([TablesInProcess(parse_mode(mode))], 0, is_local=True)
        for one in (client, local):
            one.add_rows("t", rows("adagrad", lr=0.1), dim=9)
        for cut in range(3):
            grads = torch.randn(len(ids), 9, generator=made)
            sent.clear()
            if cut == 1:
                client._links[0]._channel.shut_down()
            for one in (client, local):
                one.push_rows("t", ids, grads)
                one.clock()
            sizes = [size for op, size in sent if op == Op.PUSH_ROWS]
            assert (max(sizes) > 0) == (cut == 1)  # what is repeated is in a frame
        assert torch.equal(client.rows("t", ids), local.rows("t", ids))
        client.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_lost_connection_repeats_what_was_in_the_mailbox(tmp_path, mode):
    with serving(tmp_path) as running:
        client = running.connect(mode, patience=10.0)
        client.add_dense("w", dense(lr=1.0), torch.zeros(SIZE))
        link = client._links[0]
        for cut in range(4):
            if cut % 2:
                link._channel.shut_down()  # before the request
            else:
                send = link._channel.send_frame

                def cut_after(frame, *parts, send=send, channel=link._channel, **options):
                    send(frame, *parts, **options)
                    channel.shut_down()  # its reply is lost

                link._channel.send_frame = cut_after
            client.push("w", torch.ones(SIZE))
            client.clock()
        assert link._mapped.mailbox is not None
        assert torch.equal(client.pull("w"), torch.full((SIZE,), -4.0))
        client.close()


@pytest.mark.parametrize("missing", ["memfd_create", "seals"])
def test_without_shared_memory_values_are_sent(tmp_path, monkeypatch, sent, missing):
    if missing == "memfd_create":
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(memory, "_FUTURE_WRITE", 1 << 20)  # an old kernel refuses it
        monkeypatch.setattr(memory, "_FIXED_SIZE", fcntl.F_SEAL_SHRINK | 1 << 20)
    with serving(tmp_path) as running:
        client = running.connect("async")
        client.add_dense("w", dense(lr=1.0), torch.zeros(SIZE))
        client.add_rows("t", rows(lr=1.0), dim=2, size=10, scale=0.0)
        client.push("w", torch.ones(SIZE))
        client.push_rows("t", torch.tensor([3]), torch.ones(1, 2))
        assert torch.equal(client.pull("w"), torch.full((SIZE,), -1.0))
        assert client.rows("t", torch.tensor([3])).tolist() == [[-1.0, -1.0]]
        assert Op.ROWS in {op for op, _ in sent}
        client.close()


def test_a_table_can_be_neither_written_nor_cut_by_a_worker():
    made = memory.make_shared(1 << 16)
    assert made is not None
    view = memory.map_shared(os.dup(made.fd), 1 << 16)
    assert view is not None
    with pytest.raises(TypeError):
        view[0] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(made.fd, 1 << 16)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(made.fd, size)


def test_memory_that_could_shrink_is_not_mapped():
    before = len(os.listdir("/proc/self/fd"))
    fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)
    assert memory.map_shared(os.dup(fd), 4096) is None
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    assert memory.map_shared(os.dup(fd), 1 << 20) is None
    assert memory.map_shared(os.dup(fd), 4096) is not None
    os.close(fd)
    read, write = os.pipe()
    assert memory.map_shared(read, 4096) is None
    os.close(write)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_hostile_worker_cannot_harm_the_server_by_its_mailbox(tmp_path):
    rng = random.Random(2)
    with serving(tmp_path, workers=2) as running:
        client = running.connect("async")
        client.add_dense("w", dense(lr=1.0), torch.zeros(SIZE))
        client.add_rows("t", rows(lr=1.0), dim=4, size=100)
        hello = {"worker": 1, "client": "y", "mode": "async", "seconds": 5}
        for has_mailbox in (False, True):
            for turn in range(12):
                channel = open_channel(running.addresses[0], KEY, 5.0)
                channel.send_frame(Frame(Op.HELLO, flags=1, generation=7), encode_json(hello))
                channel.receive_header()
                if has_mailbox:
                    channel.send_frame(Frame(Op.MAP, MAILBOX, generation=7))
                    _, fd = channel.receive_descriptor()
                    for size in (0, 1 << 40):
                        with pytest.raises(PermissionError):
                            os.ftruncate(fd, size)
                    buffer = memory.map_shared(fd, writable=True)
                    buffer[: 1 << 16] = rng.randbytes(1 << 16)
                frame = Frame(Op.PUSH, rng.choice([0, 1]), flags=SHARED_VALUES, generation=7)
                frame.place, frame.count = (
                    rng.choice([0, 17, 18, 19, 2**63]),
                    rng.choice([0, 2, 16]),
                )
                frame.slot, frame.request = rng.choice([0, 1]), turn + 1
                channel.send_frame(frame)
                channel.receive_header()
                channel.close()
        client.push("w", torch.ones(SIZE))
        assert bool(client.pull("w").isfinite().all())
        client.close()
