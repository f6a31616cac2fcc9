from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdrun.errors import ConfigError, UsageError
from pdrun.launcher.hosts.selection import parse_hosts
from pdrun.launcher.ranktables import write
from pdrun.launcher.ranktables.check import check_table
from pdrun.launcher.ranktables.make import make_table, merge_tables, parse_addresses
from tests.launcher.ranktables.test_verdicts import good

CONF = "address_0=10.1.0.1\nnetmask_0=255.255.255.0\nnetdetect_0=10.1.0.254\naddress_1=10.1.0.2\n"
TOOL = (
    "hccn_tool -i 4 -ip -g\nipaddr:10.1.0.3\nnetmask:255.255.255.0\nhccn_tool -i 5 -ip"
    " -g\nipaddr:10.1.0.4\n"
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (CONF, {0: "10.1.0.1", 1: "10.1.0.2"}),
        (TOOL, {4: "10.1.0.3", 5: "10.1.0.4"}),
        ("ipaddr:10.1.0.3\nnetmask:255.0.0.0\nipaddr:10.1.0.4\n", {0: "10.1.0.3", 1: "10.1.0.4"}),
        ("device 3\nipaddr: fd00::1\n", {3: "fd00::1"}),
        ("address_10=10.0.0.1\r\naddress_2=10.0.0.2\r\n", {10: "10.0.0.1", 2: "10.0.0.2"}),
    ],
)
def test_addresses_are_read_from_both_sources(text: str, found: dict[int, str]) -> None:
    assert parse_addresses(text, "hccn.conf") == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "hccn.conf: contains no address"),
        ("netmask_0=255.255.255.0", "contains no address"),
        (
            "address_0=-.-.-.-",
            "hccn.conf:1: the address of device 0 must be an IP address, got '-.-.-.-'",
        ),
        ("address_0=", "the address of device 0 must be an IP address"),
        (
            "address_0=10.0.0.1\naddress_0=10.0.0.2",
            "hccn.conf:2: device 0 already has the address 10.0.0.1",
        ),
    ],
)
def test_invalid_addresses_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_addresses(text, "hccn.conf")
    assert words in str(caught.value)


def test_a_new_table_is_good_and_counts_ranks_through() -> None:
    cards = {"a": parse_addresses(CONF, "a"), "b": parse_addresses(TOOL, "b")}
    table = make_table(parse_hosts("a,b", "--hosts"), cards)
    assert check_table(table) == []
    assert [(one.rank, one.device_id, one.ips) for one in table.devices] == [
        (0, 0, ("10.1.0.1",)),
        (1, 1, ("10.1.0.2",)),
        (2, 4, ("10.1.0.3",)),
        (3, 5, ("10.1.0.4",)),
    ]
    data = json.loads(write.format_table(table))
    assert data["server_count"] == "2"
    assert data["server_list"][1]["device"][0] == {
        "device_id": "4",
        "device_ip": "10.1.0.3",
        "rank_id": "2",
    }


def test_devices_are_in_the_order_of_their_numbers_not_of_their_text() -> None:
    text = "".join(f"address_{number}=10.0.0.{number + 1}\n" for number in (10, 2, 0, 1, 11))
    table = make_table(parse_hosts("a", "--hosts"), {"a": parse_addresses(text, "a")})
    assert [one.device_id for one in table.devices] == [0, 1, 2, 10, 11]


def test_one_host_needs_no_addresses_and_several_do() -> None:
    assert len(make_table(parse_hosts("a:8", "--hosts"), {}).devices) == 8
    assert len(make_table(parse_hosts("a", "--hosts"), {}, 4).devices) == 4
    with pytest.raises(UsageError, match="the address of device 0 of a is missing"):
        make_table(parse_hosts("a:2,b:2", "--hosts"), {})
    with pytest.raises(UsageError, match="the devices of a are unknown"):
        make_table(parse_hosts("a", "--hosts"), {})
    with pytest.raises(UsageError, match="the address of device 2 of a is missing"):
        make_table(parse_hosts("a:4", "--hosts"), {"a": parse_addresses(CONF, "a")})


def test_merging_renumbers_ranks_and_keeps_everything() -> None:
    one, two = good("04_v1.0_8p_hcomm_example.json"), good("07_v1.0_16p_two_servers.json")
    table = merge_tables([("one.json", one), ("two.json", two)])
    assert check_table(table) == []
    assert [one.rank for one in table.devices] == list(range(24))
    assert [server.id for server in table.servers] == [
        "SERVER_ID_SV1",
        "10.136.181.171",
        "10.136.181.173",
    ]


def test_merging_refuses_duplicates_and_other_dialects() -> None:
    one = good("04_v1.0_8p_hcomm_example.json")
    with pytest.raises(
        ConfigError, match=r"^two.json: server SERVER_ID_SV1 is in one.json already"
    ):
        merge_tables([("one.json", one), ("two.json", one)])
    with pytest.raises(ConfigError, match=r"dialect 2.0, but one.json has 1.0"):
        merge_tables([("one.json", one), ("two.json", good("22_v2.0_2p_hcomm_example.json"))])


def test_an_example_of_the_templates_is_good() -> None:
    import pdrun.templates
    from pdrun.launcher.ranktables.files import wait_for_table

    table = wait_for_table(str(Path(pdrun.templates.__path__[0]) / "ranktable.json"))
    assert (table.dialect, len(table.servers), len(table.devices)) == ("1.0", 2, 4)
