"""Names of machines: which of them mean this machine, or one machine twice."""

from __future__ import annotations

import threading

import pytest

from pdrun.launcher.common import network


def test_two_names_of_one_address_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"a": ("10.0.0.1",), "b": ("10.0.0.2",), "a.net": ("fd00::1", "10.0.0.1")}
    monkeypatch.setattr(network, "resolve_host", lambda name: addresses.get(name, ()))
    assert network.find_same_machine(["a", "b", "a.net"]) == ("a", "a.net", "10.0.0.1")
    assert network.find_same_machine(["a", "b", "unknown", "unknown.net"]) == ()


def test_a_name_server_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release = threading.Event()

    def resolve(name: str) -> tuple[str, ...]:
        if name == "slow":
            release.wait(20)
        return ("10.0.0.1",)

    monkeypatch.setattr(network, "resolve_host", resolve)
    try:
        assert network.find_same_machine(["slow", "b"], wait=0.05) == ()
    finally:
        release.set()
