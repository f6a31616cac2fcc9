"""Listening sockets in a range of ports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from pdrun.endpoint import Endpoint, parse_port_range, port_for_job
from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.common.network import find_local_address, is_loopback
from pdrun.rendezvous.transport import listen
from pdrun.rendezvous.transport.listen import bind_listener, use_port_range, use_port_range_of


@pytest.fixture
def address() -> Iterator[str]:
    """An address of this machine that others reach."""
    found = find_local_address(None)
    if not found or is_loopback(found):
        pytest.skip("this machine has no address other than loopback")
    yield found
    use_port_range(None)


def free_ports(address: str, count: int) -> tuple[int, int]:
    """Return a range of so many ports that are free."""
    for first in range(21100, 29000, count):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(bind_listener(Endpoint(address, port)))
            except ConfigError:
                continue
        return first, first + count - 1
    pytest.skip("no free ports")


def test_sockets_without_a_port_take_one_of_the_range(address: str) -> None:
    first, last = free_ports(address, 2)
    use_port_range((first, last))
    with bind_listener(Endpoint(address, 0)) as one, bind_listener(Endpoint(address, 0)) as other:
        assert {one.getsockname()[1], other.getsockname()[1]} == {first, last}
        with pytest.raises(ConfigError, match=f"no port of {first}-{last} is free") as error:
            bind_listener(Endpoint(address, 0))
        assert error.value.where == "--port-range"
        with bind_listener(Endpoint("127.0.0.1", 0)) as loopback:
            assert not first <= loopback.getsockname()[1] <= last


def test_who_holds_the_ports_of_a_range_is_not_looked_up(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = free_ports(address, 2)
    asked: list[int] = []
    monkeypatch.setattr(listen, "describe_port_holder", lambda port: asked.append(port) or "")
    use_port_range((first, last))
    with bind_listener(Endpoint(address, 0)), bind_listener(Endpoint(address, 0)):
        assert asked == []  # a look at the descriptors of all processes, for each port


def test_a_fixed_port_may_be_outside(address: str) -> None:
    first, last = free_ports(address, 2)
    use_port_range((first, first))
    with bind_listener(Endpoint(address, last)) as listener:
        assert listener.getsockname()[1] == last


def test_the_variable_of_a_dynamic_cluster(address: str) -> None:
    first, last = free_ports(address, 1)
    assert use_port_range_of({"PDRUN_PORT_RANGE": f"{first}-{last}"}) == (first, last)
    with bind_listener(Endpoint(address, 0)) as listener:
        assert listener.getsockname()[1] == first
    assert use_port_range_of({}) is None


@pytest.mark.parametrize("text", ["", "20000", "3-2", "0-5", "1-70000", "a-b", "1-2-3", "-5"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="range of ports"):
        parse_port_range(text, "--port-range")


def test_the_port_of_a_job_is_in_the_range() -> None:
    ports = {port_for_job(f"job-{number}", (20000, 20003)) for number in range(60)}
    assert ports == {20000, 20001, 20002, 20003}
    assert parse_port_range("20000-20100", "x") == parse_port_range(" 20000:20100 ", "x")
