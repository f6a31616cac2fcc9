"""How many connections may say nothing: a number per address, and half of all descriptors."""

from __future__ import annotations

import pytest

from pdrun.rendezvous.transport import listen
from pdrun.rendezvous.transport.listen import PendingHandshakes

DESCRIPTORS = 64
PER_ADDRESS = DESCRIPTORS // 8


@pytest.fixture
def closed(monkeypatch):
    """Descriptors that are shut down. The hundreds of a descriptor are its address."""
    found = []
    monkeypatch.setattr(listen.resource, "getrlimit", lambda which: (DESCRIPTORS, DESCRIPTORS))
    monkeypatch.setattr(listen, "remote_address", lambda fd: (f"h{fd // 100}", 1))
    monkeypatch.setattr(listen, "socket_inode", lambda fd: fd + 1)
    monkeypatch.setattr(listen, "shut_down_socket", lambda fd, inode: found.append((fd, inode)))
    return found


def test_the_oldest_of_an_address_makes_room(closed):
    pending = PendingHandshakes(0)
    for fd in range(100, 100 + PER_ADDRESS + 2):
        pending.add_connection(fd)
    assert closed == [(100, 101), (101, 102)]
    pending.add_connection(200)
    assert len(closed) == 2, "another address has its own room"


def test_a_crowd_that_is_expected_has_room(closed):
    pending = PendingHandshakes(10)
    for fd in range(100, 100 + PER_ADDRESS + 10):
        pending.add_connection(fd)
    assert closed == []


def test_many_addresses_take_half_of_the_descriptors(closed):
    pending = PendingHandshakes(0)
    for host in range(1, 20):
        for fd in range(host * 100, host * 100 + PER_ADDRESS - host % 2):
            pending.add_connection(fd)
    assert len(pending) == DESCRIPTORS // 2
    assert closed[0] == (200, 201), "the oldest one of the address that has most"


def test_who_has_spoken_does_not_count(closed):
    pending = PendingHandshakes(0)
    for fd in range(100, 100 + 2 * PER_ADDRESS):
        pending.add_connection(fd)
        pending.prove_connection(fd, fd + 1)
    assert (closed, len(pending)) == ([], 0)


def test_a_new_connection_of_a_number_stays_proven_when_the_end_of_the_old_one_is_read(closed):
    pending = PendingHandshakes(0)
    pending.prove_connection(100, 101)  # its message was read before the monitor's events
    pending.remove_connection(100)  # of the connection before
    pending.add_connection(100)
    assert len(pending) == 0


def test_a_crowd_may_exceed_half_of_the_descriptors(closed):
    pending = PendingHandshakes(DESCRIPTORS)
    for fd in range(100, 100 + DESCRIPTORS):
        pending.add_connection(fd)
    assert closed == []
