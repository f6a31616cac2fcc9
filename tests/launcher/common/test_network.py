"""Names of machines: which of them mean this machine, or one machine twice."""

from __future__ import annotations

import threading

import pytest

from pdrun.errors import RendezvousError
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


def test_names_of_pods_are_waited_for_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    left = {"pod-0": 0, "pod-1": 2}

    def find_error(name: str) -> str:
        left[name] -= 1
        return f"the name '{name}' is not known here" if left[name] >= 0 else ""

    monkeypatch.setattr(network, "find_name_error", find_error)
    monkeypatch.setattr(network, "RESOLVE_SECONDS", 0.01)
    printed: list[str] = []
    network.wait_for_host_names(left, 10, printed.append)
    assert printed == ["waiting for pod-1: the name 'pod-1' is not known here"]
    assert left == {"pod-0": -1, "pod-1": -1}


def test_a_name_that_never_exists_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "find_name_error", lambda name: "not known here")
    with pytest.raises(RendezvousError, match="pod-0: not known here; check it"):
        network.wait_for_host_names(["pod-0"], 0, lambda text: None)
