"""Which interface collectives use: the one by which the other nodes reach this one."""

from __future__ import annotations

import pytest

from pdrun.topology import (
    choose_interface_variables,
    record_interface_variables,
    recorded_interface_variables,
)

LOOPBACK = ("lo", "127.0.0.1")
ETH0 = ("eth0", "10.0.0.1")
GLOO = {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
ALL = {**GLOO, "NCCL_SOCKET_IFNAME": "eth0"}


@pytest.mark.parametrize(
    ("addresses", "physical", "expected"),
    [
        ([LOOPBACK, ETH0], ["eth0"], ALL),
        ([LOOPBACK, ETH0, ("docker0", "172.17.0.1"), ("virbr0", "192.168.122.1")], ["eth0"], ALL),
        ([LOOPBACK, ETH0, ("eth1", "10.1.0.1")], ["eth0", "eth1"], GLOO),
        ([LOOPBACK, ETH0, ("ib0", "10.2.0.1")], ["eth0"], GLOO),
        ([LOOPBACK, ETH0, ("eth01", "10.1.0.1")], [], {**GLOO, "NCCL_SOCKET_IFNAME": "=eth0"}),
        ([LOOPBACK, ("eth1", "10.1.0.1")], ["eth1"], {}),
    ],
    ids=["alone", "bridges", "two cards", "InfiniBand", "prefix", "unknown address"],
)
def test_interface_of_the_own_address(
    addresses: list[tuple[str, str]], physical: list[str], expected: dict[str, str]
) -> None:
    assert choose_interface_variables("10.0.0.1", addresses, physical, {}) == expected


def test_variables_of_the_user_stay() -> None:
    user = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "^docker"}
    found = choose_interface_variables("10.0.0.1", [LOOPBACK, ETH0], [], user)
    assert found == {"TP_SOCKET_IFNAME": "eth0"}


def test_loopback_is_never_given_to_nccl() -> None:
    found = choose_interface_variables("127.0.0.1", [LOOPBACK, ETH0], [], {}, "npu")
    assert found == {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}


def test_an_additional_address_has_a_label() -> None:
    """getifaddrs, which gloo compares with, shows it; NCCL would read a port behind the colon."""
    found = choose_interface_variables("10.0.0.9", [LOOPBACK, ("eth0:1", "10.0.0.9")], [], {})
    assert found["GLOO_SOCKET_IFNAME"] == "eth0:1"
    assert found["NCCL_SOCKET_IFNAME"] == "eth0"


def test_a_link_local_address_has_a_zone() -> None:
    found = choose_interface_variables("fe80::1%eth0", [LOOPBACK, ("eth0", "fe80::1%eth0")], [], {})
    assert found == ALL


def test_ascend_gets_the_exact_name_unless_the_user_chose_an_address() -> None:
    found = choose_interface_variables("10.0.0.1", [LOOPBACK, ETH0], [], {}, "npu")
    assert found["HCCL_SOCKET_IFNAME"] == "=eth0"
    user = {"HCCL_IF_IP": "10.0.0.1"}
    assert choose_interface_variables("10.0.0.1", [ETH0], [], user, "npu") == ALL


def test_only_unchanged_variables_count_as_recorded() -> None:
    mine = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=eth0"}
    environ = {**mine, **record_interface_variables(mine)}
    assert recorded_interface_variables(environ) == set(mine)
    assert recorded_interface_variables({**environ, "GLOO_SOCKET_IFNAME": "eth0"}) == {
        "NCCL_SOCKET_IFNAME"
    }
    assert recorded_interface_variables(mine) == frozenset()
    assert record_interface_variables({}) == {}
