"""Gradients of a step that are pushed together with its end."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pdrun.errors import DeadlineExceeded, UsageError
from pdrun.parallel.servers.client import ServerClient, StepGradient
from pdrun.parallel.servers.settings import dense, rows

from .served import serving

pytestmark = pytest.mark.torch
IDS = torch.arange(6000)
SIZE = 40_000
"""Elements of a weight that is in shared memory, as are the gradients of the ids."""
NAN = float("nan")


class CountedSocket:
    """A socket that counts what is sent."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def sendmsg(self, *arguments: Any) -> Any:
        self.sent += 1
        return self._inner.sendmsg(*arguments)


def add_tables(client: ServerClient) -> None:
    client.add_rows("t", rows(lr=1.0), dim=8, size=len(IDS), scale=0.0)
    client.add_dense("w", dense(lr=1.0), torch.zeros(SIZE))


def gradients(value: float, weight: float | None = None) -> list[StepGradient]:
    """Of all rows and all elements."""
    filled = torch.full((SIZE,), value if weight is None else weight)
    return [
        StepGradient("t", torch.full((len(IDS), 8), value), IDS),
        StepGradient("w", filled),
    ]


def check_values(client: ServerClient, value: float) -> None:
    assert torch.equal(client.rows("t", IDS), torch.full((len(IDS), 8), value))
    assert torch.equal(client.pull("w"), torch.full((SIZE,), value))


@pytest.mark.parametrize("mode", ["sync", "bounded:1", "async"])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_step_is_one_message_per_server(tmp_path: Path, servers: int, mode: str) -> None:
    with serving(tmp_path, servers) as running:
        client = running.connect(mode)
        add_tables(client)
        channels = [link._channel for link in client._links]  # type: ignore[attr-defined]
        for channel in channels:
            channel._socket = CountedSocket(channel._socket)
        for step in range(3):
            client.push_step(gradients(2.0**step), divisor=2.0)
        assert [channel._socket.sent for channel in channels] == [3] * servers
        assert client.step == 3
        check_values(client, -3.5)
        client.close()


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_refused_gradient_leaves_the_step_as_it_was(
    tmp_path: Path, servers: int, bad: int
) -> None:
    with serving(tmp_path, servers) as running:
        client = running.connect("sync")
        add_tables(client)
        for _ in range(3):
            with pytest.raises(UsageError, match="nan or infinite"):
                client.push_step(gradients(NAN, 1.0) if bad == 0 else gradients(1.0, NAN))
        assert client.step == 0
        client.push_step(gradients(1.0))
        check_values(client, -1.0)
        client.close()


def test_a_gradient_that_a_server_refuses_does_not_end_the_step(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        client = running.connect("sync")
        add_tables(client)
        with pytest.raises(UsageError, match="nan or infinite"):
            client.push_step(gradients(NAN)[:1])
        client.push_step(gradients(1.0))
        check_values(client, -1.0)
        client.close()


def test_a_step_that_ends_too_late_has_the_gradients_as_they_were_pushed(tmp_path: Path) -> None:
    with serving(tmp_path, workers=2) as running:
        early = running.connect("sync", 0, seconds=0.5)
        late = running.connect("sync", 1, seconds=20.0)
        for client in (early, late):
            add_tables(client)
        with pytest.raises(DeadlineExceeded, match="worker 1 did not end it"):
            early.push_step(gradients(1.0))
        mailbox = early._links[0]._mapped.mailbox._bytes  # type: ignore[attr-defined]
        mailbox[:] = b"B" * len(mailbox)
        late.push_step(gradients(2.0))
        check_values(late, -3.0)
        early.close()
        late.close()


def test_slots_are_used_again_after_each_step(tmp_path: Path) -> None:
    """While the other worker has not ended the step, nothing in the mailbox changes."""
    steps = 6
    with serving(tmp_path, workers=2) as running:
        clients = [running.connect("sync", worker) for worker in range(2)]

        def work(worker: int) -> None:
            client = clients[worker]
            add_tables(client)
            for step in range(steps):
                client.push_step(gradients(float(10 * step + worker)))
                found[worker].append(client.pull("w")[0].item())

        found: list[list[float]] = [[], []]
        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        want = [-float(sum(20 * one + 1 for one in range(step + 1))) for step in range(steps)]
        assert found == [want, want]
        for client in clients:
            client.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_more_gradients_than_the_mailbox_has_room_for(tmp_path: Path, mode: str) -> None:
    with serving(tmp_path) as running:
        client = running.connect(mode)
        add_tables(client)
        parts = [gradients(float(2**part)) for part in range(5)]
        client.push_step(
            [replace(one, part=part) for part, both in enumerate(parts) for one in both]
        )
        check_values(client, -31.0)
        client.close()
