"""A server that is lost in mode async or bounded continues alone, from the tables that it wrote."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest
import torch

from pdrun.errors import PeerLost
from pdrun.parallel.servers.client import ServerClient
from pdrun.parallel.servers.settings import dense, rows
from pdrun.parallel.servers.tables.recovery import SnapshotNote

from .served import ServerThreads, serving

pytestmark = pytest.mark.torch

IDS = torch.arange(40) * 2**33
"""Both of two servers have some."""


def add_tables(client: ServerClient) -> None:
    client.add_rows("t", rows("adagrad", lr=0.5), dim=3, keep=100)
    client.add_dense("w", dense("momentum", lr=1.0), torch.zeros(10))


def train(client: ServerClient, steps: int) -> None:
    for _ in range(steps):
        client.push_rows("t", IDS, torch.ones(len(IDS), 3))
        client.push("w", torch.ones(10))
        client.clock()


def read(client: ServerClient) -> tuple[torch.Tensor, torch.Tensor]:
    return client.rows("t", IDS), client.pull("w").clone()


def lose_and_return(running: ServerThreads, server: int, seconds: float = 0.0) -> None:
    running.lose_server(server)
    running.start_again(server, seconds)


@pytest.mark.parametrize("tcp", [False, True])
def test_a_lost_server_goes_back_to_its_tables_and_the_others_go_on(tmp_path, tcp) -> None:
    with serving(tmp_path, 2, tcp=tcp) as running:
        client = running.connect("async", patience=10.0)
        add_tables(client)
        train(client, 3)
        client.save(tmp_path / "saved")
        saved = read(client)
        train(client, 2)
        late = read(client)
        lose_and_return(running, 1, 41.0)
        now = read(client)
        has_moved = (now[0] != saved[0]).all(1)
        assert torch.equal(now[0][has_moved], late[0][has_moved])
        assert has_moved.any()
        assert not has_moved.all()
        assert any(torch.equal(now[1], one) for one in (saved[1], late[1]))
        assert re.match(r"went back to version \d+: 41.\d s of updates are lost", running.lines[0])
        # state of the optimizers is back, too: both servers continue as they would have
        lose_and_return(running, 0)
        train(client, 2)
        assert torch.equal(client.pull("w"), late[1])
        torch.testing.assert_close(client.rows("t", IDS), late[0])
        client.close()


def test_requests_without_a_reply_are_used_once(tmp_path: Path) -> None:
    """A push that is part of the written tables is not used again when it is repeated."""
    with serving(tmp_path) as running:
        client = running.connect("async", patience=10.0)
        client.add_dense("w", dense(lr=1.0), torch.zeros(4))
        client.push("w", torch.ones(4))
        client.save(tmp_path / "saved")
        link = client._links[0]
        store = running.services[0].store
        assert store is not None
        requests = {"0": (link._client, link._request + 2)}  # type: ignore[attr-defined]
        store.resume_requests(requests, 0)
        client.save(tmp_path / "saved")
        running.lose_server(0)
        starting = threading.Timer(0.2, running.start_again, (0,))
        starting.start()
        client.push("w", torch.ones(4))
        assert torch.equal(client.pull("w"), -torch.ones(4))
        client.push("w", torch.ones(4))
        assert torch.equal(client.pull("w"), -2 * torch.ones(4))
        starting.join()
        client.close()


def test_bounded_waits_for_workers_that_are_back(tmp_path: Path) -> None:
    with serving(tmp_path, 1, workers=2) as running:
        fast = running.connect("bounded:1", 0, seconds=0.3, patience=10.0)
        slow = running.connect("bounded:1", 1, seconds=5.0, patience=10.0)
        for client in (fast, slow):
            client.add_dense("w", dense(lr=1.0), torch.zeros(4))
        fast.save(tmp_path / "saved")
        for _ in range(3):
            slow.clock()
            fast.clock()
        lose_and_return(running, 0)
        slow.pull("w")
        assert running.services[0].store is not None
        assert running.services[0].store._clocks._ended == {1: 2}
        fast.clock()
        with pytest.raises(Exception, match="worker 1 did not end it"):
            fast.clock()
        fast.close()
        slow.close()


def test_a_server_that_does_not_come_back_is_an_error_in_time(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        client = running.connect("async", patience=0.3)
        client.add_dense("w", dense(lr=1.0), torch.zeros(4))
        running.lose_server(0)
        began = time.monotonic()
        with pytest.raises(PeerLost, match="parameter server 0 is lost"):
            client.pull("w")
        assert time.monotonic() - began < 10.0


def test_the_note_names_the_folder_and_its_later_name(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        client = running.connect("async", patience=10.0)
        add_tables(client)
        train(client, 1)
        client.save(tmp_path / "hidden", later=tmp_path / "step-1")
        (tmp_path / "hidden").rename(tmp_path / "step-1")
        want = read(client)
        lose_and_return(running, 0)
        for one, other in zip(read(client), want, strict=True):
            assert torch.equal(one, other)
        client.close()


def test_sync_writes_no_note(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        client = running.connect("sync")
        client.add_dense("w", dense(lr=1.0), torch.zeros(4))
        client.save(tmp_path / "saved")
        client.close()
    assert not (tmp_path / "note-0").exists()
    SnapshotNote(("/nowhere",), "async", 1.0, 0.0).write(tmp_path / "note-0")
    with serving(tmp_path) as running, pytest.raises(Exception, match="has no tables of server 0"):
        running.services[0].continue_alone(0.0)
