"""Each role is lost at each operation: nothing is used twice, every wait ends, errors name it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdrun.errors import DeadlineExceeded, PeerLost
from pdrun.parallel.servers import session
from pdrun.parallel.servers.client import ServerClient
from pdrun.parallel.servers.frames import Frame, Op
from pdrun.parallel.servers.settings import dense, rows

from .served import ServerThreads, serving

pytestmark = pytest.mark.torch

IDS = torch.arange(5) * 2**33
ONES = torch.ones(len(IDS), 2)
Call = Callable[[ServerClient, Path], object]
OPERATIONS: dict[str, tuple[Op, Call, tuple[float, float]]] = {
    # name: its request, the call, and afterwards the weight and the rows
    "push": (Op.PUSH, lambda client, _: client.push("w", torch.ones(4)), (-2.0, -1.0)),
    "pull": (Op.PULL, lambda client, _: client.pull("w"), (-1.0, -1.0)),
    "push_pull": (
        Op.CLOCK,
        lambda client, _: client.push_pull({"w": torch.ones(4)}),
        (-1.0, -1.0),
    ),
    "rows": (Op.ROWS, lambda client, _: client.rows("t", IDS), (-1.0, -1.0)),
    "cached rows": (Op.ROWS_SINCE, lambda client, _: client.rows("c", IDS), (-1.0, -1.0)),
    "push_rows": (Op.PUSH_ROWS, lambda client, _: client.push_rows("t", IDS, ONES), (-1.0, -2.0)),
    "clock": (Op.CLOCK, lambda client, _: client.clock(), (-1.0, -1.0)),
    "save": (Op.SNAPSHOT, lambda client, folder: client.save(folder / "more"), (-1.0, -1.0)),
}


def add_tables(client: ServerClient) -> None:
    client.add_dense("w", dense(lr=1.0), torch.zeros(4))
    client.add_rows("t", rows(lr=1.0), dim=2, scale=0.0)
    client.add_rows("c", rows(lr=1.0, cache=10), dim=2, scale=0.0)


def lose_at(monkeypatch, running: ServerThreads, op: Op, moment: str, returns: bool) -> list[bool]:
    """Have the server lost at its next request of this kind, before or after it is used."""
    answer = session.WorkerSession._answer_frame
    lost: list[bool] = []

    def replace_server() -> None:
        running.lose_server(0)
        if returns:
            running.start_again(0)

    def answer_frame(self: session.WorkerSession, frame: Frame) -> None:
        if frame.op != op or lost:
            answer(self, frame)
            return
        lost.append(True)
        if moment == "after":
            monkeypatch.setattr(self._channel, "send_frame", lambda *_, **__: None)
            answer(self, frame)
        running.services[0]._is_closed = True  # it accepts no other connection
        thread = threading.Thread(target=replace_server)
        threads.append(thread)
        thread.start()
        raise ConnectionError

    threads: list[threading.Thread] = []
    monkeypatch.setattr(session.WorkerSession, "_answer_frame", answer_frame)
    return lost


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_server_that_returns_has_used_each_request_once(
    tmp_path: Path, monkeypatch, name, moment
) -> None:
    op, call, (weight, row) = OPERATIONS[name]
    with serving(tmp_path) as running:
        client = running.connect("async", patience=20.0)
        add_tables(client)
        client.push("w", torch.ones(4))
        client.push_rows("t", IDS, ONES)
        client.save(tmp_path / "saved")
        lost = lose_at(monkeypatch, running, op, moment, returns=True)
        call(client, tmp_path)
        assert lost
        assert torch.equal(client.pull("w"), torch.full((4,), weight))
        assert torch.equal(client.rows("t", IDS), torch.full((5, 2), row))
        client.close()


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_server_that_does_not_return_is_named_at_once(tmp_path: Path, monkeypatch, name) -> None:
    op, call, _ = OPERATIONS[name]
    with serving(tmp_path) as running:
        client = running.connect("sync")
        add_tables(client)
        lose_at(monkeypatch, running, op, "after", returns=False)
        began = time.monotonic()
        with pytest.raises(PeerLost, match="parameter server 0 is lost"):
            call(client, tmp_path)
        client.close()
        assert time.monotonic() - began < 10.0


@pytest.mark.parametrize("op", [Op.HELLO, Op.DECLARE, Op.BYE])
def test_a_server_that_is_lost_at_the_start_or_the_end(tmp_path: Path, monkeypatch, op) -> None:
    with serving(tmp_path) as running:
        if op is Op.BYE:
            client = running.connect("sync")
            running.lose_server(0)
            client.close()  # both sides are at their end
            return
        lose_at(monkeypatch, running, op, "before", returns=False)
        with pytest.raises(PeerLost):
            add_tables(running.connect("sync"))


@pytest.mark.parametrize("mode", ["sync", "bounded:1", "async"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_lost_worker_holds_others_no_longer_than_the_limit(
    tmp_path: Path, monkeypatch, name, mode
) -> None:
    """It is lost between its request and the reply. In sync mode the others cannot go on."""
    op, call, _ = OPERATIONS[name]
    with serving(tmp_path, workers=2) as running:
        other = running.connect(mode, 0, seconds=1.0)
        add_tables(other)
        worker = running.connect(mode, 1, seconds=1.0)
        add_tables(worker)
        channel = worker._links[0]._channel  # type: ignore[attr-defined]
        send = channel.send_frame

        def send_and_end(frame: Frame, *parts: object, **options: bool) -> None:
            send(frame, *parts, **options)
            if frame.op == op:
                channel.shut_down()

        monkeypatch.setattr(channel, "send_frame", send_and_end)
        with contextlib.suppress(PeerLost):  # the reply may have come first
            call(worker, tmp_path)
        began = time.monotonic()
        if mode == "sync" and op is not Op.CLOCK:
            with pytest.raises(DeadlineExceeded, match="worker 1 did not end it"):
                other.clock()
        else:
            for _ in range(1 if mode == "sync" else 4):
                other.clock()
        assert time.monotonic() - began < 10.0
        other.close()
        worker.close()
