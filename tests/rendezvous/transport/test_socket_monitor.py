"""A socket's monitor: it holds whatever comes, so that its end never waits for a reader."""

from __future__ import annotations

import threading
import time

import pytest
import zmq

from pdrun.rendezvous.transport.zmq_util import open_monitor, read_monitor_event

CONNECTIONS = 1200
"""Each has three events or more; libzmq's own limit is 2,000 of them."""


def test_monitoring_ends_while_thousands_of_events_are_unread() -> None:
    ours: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    theirs: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    theirs.set(zmq.MAX_SOCKETS, CONNECTIONS + 10)
    router = ours.socket(zmq.ROUTER)
    reader = open_monitor(router)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    for _ in range(CONNECTIONS):
        dealer = theirs.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 10_000)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(b"")
    end = time.monotonic() + 60.0
    for _ in range(CONNECTIONS):
        assert router.poll(max(0, int(1000 * (end - time.monotonic())))), "all connect and speak"
        router.recv_multipart()
    ended = threading.Thread(target=router.monitor, args=(None, 0), daemon=True)
    ended.start()
    ended.join(20.0)
    assert not ended.is_alive(), (
        "libzmq's thread waits for room in the monitor, and we for that thread"
    )
    found = []
    while reader.poll(0):
        found.append(read_monitor_event(reader)[0])
    assert found.count(zmq.EVENT_HANDSHAKE_SUCCEEDED) == CONNECTIONS and len(found) > 2000
    for one in (reader, router):
        one.close(linger=0)
    theirs.destroy(linger=0)
    ours.term()


def test_only_the_events_asked_for_come() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        reader = open_monitor(router, zmq.EVENT_LISTENING)
        router.bind_to_random_port("tcp://127.0.0.1")
        assert reader.poll(5000) and read_monitor_event(reader)[0] == zmq.EVENT_LISTENING
        router.monitor(None, 0)
        reader.close(linger=0)
        with pytest.raises(zmq.ZMQError):
            reader.poll(0)
