"""Names are resolved without keeping Ctrl-C waiting."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable

import pytest

from pdrun.launcher.common import network


@pytest.mark.parametrize("call", [network.resolve_host, network.find_name_error])
def test_a_slow_resolver_does_not_keep_ctrl_c_waiting(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[str], object]
) -> None:
    asked = threading.Event()
    over = threading.Event()

    def slow(*args: object, **kwargs: object) -> list[object]:
        asked.set()
        assert over.wait(60)
        return []

    def interrupt() -> None:
        assert asked.wait(60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            call("node1.example")
        assert not over.is_set()
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGINT, before)


def test_addresses_are_resolved() -> None:
    assert network.resolve_host("127.0.0.1") == ("127.0.0.1",)
    assert network.resolve_host("nowhere.invalid") == ()
    assert "nowhere.invalid" in network.find_name_error("nowhere.invalid")
