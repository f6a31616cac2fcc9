"""One fault each: what is said, and where."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrun.errors import ConfigError
from pdrun.launcher.ranktables import files, jsontext
from pdrun.launcher.ranktables.check import check_table
from pdrun.launcher.ranktables.read import read_table

Data = dict[str, Any]


def table(servers: int = 2, each: int = 2) -> Data:
    """Return a good table of version 1.0."""
    return {
        "status": "completed",
        "version": "1.0",
        "server_count": str(servers),
        "server_list": [
            {
                "server_id": f"10.0.0.{server + 1}",
                "device": [
                    {
                        "device_id": str(device),
                        "device_ip": f"10.1.{server}.{device + 1}",
                        "rank_id": str(server * each + device),
                    }
                    for device in range(each)
                ],
            }
            for server in range(servers)
        ],
    }


def device(data: Data, server: int, at: int) -> Data:
    """Return one device of a table."""
    found: Data = data["server_list"][server]["device"][at]
    return found


def pods(data: Data) -> None:
    """Make a super pod table of it."""
    data["version"] = "1.2"
    members = [{"server_id": "10.0.0.1"}, {"server_id": "10.0.0.2"}]
    data["super_pod_list"] = [{"super_pod_id": "0", "server_list": members}]
    for server in range(2):
        for at in range(2):
            device(data, server, at)["super_device_id"] = str(100 * server + at)


def faults_of(data: Any) -> str:
    """Return the first fault of a table, its path in front; empty for a good one."""
    found, faults = read_table(data)
    faults = faults or (check_table(found) if found is not None else [])
    return f"{jsontext.format_path(faults[0].path)}: {faults[0].what}" if faults else ""


def set_to(*path: Any) -> Callable[[Data], None]:
    """Return a change: the value at a path becomes the last argument; None takes it out."""
    *where, key, value = path

    def change(data: Data) -> None:
        for part in where:
            data = data[part]
        if value is None:
            del data[key]
        else:
            data[key] = value

    return change


D = ("server_list", 1, "device", 0)
CASES: list[tuple[str, Callable[[Data], None], str]] = [
    ("good", lambda data: None, ""),
    ("good super pod", pods, ""),
    ("version missing", set_to("version", None), "version: is missing"),
    ("version unknown", set_to("version", "9.9"), "version: '9.9' is not a version"),
    ("version as number", set_to("version", 1), "version: '1' is not a version"),
    ("status missing", set_to("status", None), "status: is missing"),
    (
        "status unknown",
        set_to("status", "done"),
        "status: must be completed or initializing, got 'done'",
    ),
    (
        "count differs",
        set_to("server_count", "3"),
        "server_count: is 3, but server_list has 2 entries",
    ),
    ("count as number", set_to("server_count", 2), "server_count: must be text, got the number 2"),
    ("no servers", set_to("server_list", []), "server_list: is empty"),
    ("servers no list", set_to("server_list", {}), "server_list: must be a list"),
    ("server no object", set_to("server_list", 0, "x"), "server_list[0]: must be an object"),
    (
        "server id long",
        set_to("server_list", 0, "server_id", "x" * 65),
        "server_id: has 65 characters",
    ),
    (
        "server id empty",
        set_to("server_list", 0, "server_id", ""),
        "server_list[0].server_id: is empty",
    ),
    (
        "server id twice",
        set_to("server_list", 1, "server_id", "10.0.0.1"),
        "[1].server_id: 10.0.0.1 is listed twice",
    ),
    ("no devices", set_to("server_list", 0, "device", []), "server_list[0].device: is empty"),
    ("rank missing", set_to(*D, "rank_id", None), "server_list[1].device[0].rank_id: is missing"),
    (
        "no rank 0",
        set_to("server_list", 0, "device", 0, "rank_id", "9"),
        "rank_id: the lowest rank is 1: rank 0 is missing",
    ),
    ("rank gap", set_to(*D, "rank_id", "7"), "rank_id: 3 follows 1: rank 2 is missing"),
    (
        "rank twice",
        set_to(*D, "rank_id", "0"),
        "server_list[1].device[0].rank_id: 0 is listed twice",
    ),
    (
        "rank negative",
        set_to(*D, "rank_id", "-1"),
        "rank_id: must be a whole number as text, got '-1'",
    ),
    (
        "rank padded",
        set_to(*D, "rank_id", "02"),
        "rank_id: must be a whole number as text, got '02'",
    ),
    ("rank bool", set_to(*D, "rank_id", True), "rank_id: must be text"),
    ("rank digits of another script", set_to(*D, "rank_id", "\u0662"), "must be a whole number"),
    ("device id high", set_to(*D, "device_id", "64"), "device_id: must be at most 63, got 64"),
    (
        "device twice",
        set_to(*D, "device_id", "1"),
        "server_list[1].device[1].device_id: 1 is listed twice",
    ),
    (
        "ip twice",
        set_to(*D, "device_ip", "10.1.0.1"),
        "server_list[1].device[0].device_ip: 10.1.0.1 is listed twice",
    ),
    (
        "ip missing",
        set_to(*D, "device_ip", None),
        "server_list[1].device[0].device_ip: is missing, but several",
    ),
    ("ip none", set_to(*D, "device_ip", "-.-.-.-"), "device_ip: '-.-.-.-' is not an IP address"),
    ("ip family", set_to(*D, "device_ip", "fd00::1"), "device_ip: is of another family"),
    (
        "ip number",
        set_to(*D, "device_ip", "10.1.0.1,10.1.9.9"),
        "device_ip: 10.1.0.1 is listed twice",
    ),
    ("port zero", set_to(*D, "device_port", "0"), "device_port: must be a port"),
    (
        "sample value",
        set_to("server_list", 0, "server_id", "xx.xx.xx.xx"),
        "'xx.xx.xx.xx' is a placeholder",
    ),
    (
        "pod address of the machine itself",
        set_to("server_list", 1, "pod_ip", "127.0.0.1"),
        "server_list[1].pod_ip: 127.0.0.1 is a loopback address, but there are 2 servers",
    ),
    (
        "host address localhost",
        set_to("server_list", 0, "host_ip", "localhost"),
        "server_list[0].host_ip: localhost is a loopback address",
    ),
    ("placeholder", set_to("server_list", 0, "server_id", "${HOST}"), "'${HOST}' is a placeholder"),
]


@pytest.mark.parametrize(("name", "change", "words"), CASES, ids=[case[0] for case in CASES])
def test_a_fault_is_named_with_its_path(
    name: str, change: Callable[[Data], None], words: str
) -> None:
    data = table()
    change(data)
    assert words in faults_of(data)
    assert bool(words) == bool(faults_of(data))


def test_two_servers_with_one_address_are_refused() -> None:
    data = table()
    for server in data["server_list"]:
        server["pod_ip"] = "10.9.9.9"
    assert "server_list[1].pod_ip: 10.9.9.9 is listed twice" in faults_of(data)


def test_two_pods_of_one_host_have_addresses_of_their_own() -> None:
    data = table()
    for at, server in enumerate(data["server_list"]):
        server |= {"host_ip": "10.9.9.9", "pod_ip": f"172.16.0.{at}"}
    assert faults_of(data) == ""


def test_the_address_of_a_single_server_is_not_used() -> None:
    data = table(1, 2)
    data["server_list"][0]["pod_ip"] = "127.0.0.1"
    assert faults_of(data) == ""


def test_ranks_of_a_server_are_consecutive() -> None:
    data = table()
    for (server, at), rank in {(0, 0): "0", (0, 1): "3", (1, 0): "1", (1, 1): "2"}.items():
        device(data, server, at)["rank_id"] = rank
    assert "server_list[0]: has the ranks 0,3" in faults_of(data)


def test_servers_may_be_listed_in_any_order() -> None:
    data = table()
    data["server_list"].reverse()
    found, faults = read_table(data)
    assert found is not None
    assert not faults and not check_table(found)
    assert [server.id for server in found.servers_by_rank] == ["10.0.0.1", "10.0.0.2"]


def test_one_server_needs_no_addresses_and_host_ip_replaces_them() -> None:
    data = table(1, 2)
    for at in range(2):
        del device(data, 0, at)["device_ip"]
    assert faults_of(data) == ""
    data = table()
    for server in range(2):
        data["server_list"][server]["host_ip"] = f"10.9.0.{server}"
        for at in range(2):
            del device(data, server, at)["device_ip"]
    assert faults_of(data) == ""


SUPER_PODS: list[tuple[str, Callable[[Data], None], str]] = [
    (
        "sdid twice",
        set_to(*D, "super_device_id", "0"),
        "super_device_id: ('0', '0') is listed twice",
    ),
    ("sdid empty", set_to(*D, "super_device_id", ""), "super_device_id: is empty"),
    ("sdid missing", set_to(*D, "super_device_id", None), "super_device_id: is missing"),
    (
        "stranger",
        set_to("super_pod_list", 0, "server_list", 1, "server_id", "x"),
        "server 10.0.0.2 is in no",
    ),
    (
        "server missing",
        set_to("super_pod_list", 0, "server_list", [{"server_id": "10.0.0.1"}]),
        "is in no super pod",
    ),
]


@pytest.mark.parametrize(
    ("name", "change", "words"), SUPER_PODS, ids=[case[0] for case in SUPER_PODS]
)
def test_super_pods_are_complete(name: str, change: Callable[[Data], None], words: str) -> None:
    data = table()
    pods(data)
    change(data)
    assert words in faults_of(data)


def test_the_heterogeneous_dialect_is_read() -> None:
    data = {
        "version": "1.1",
        "collective_id": "c",
        "node_list": [
            {
                "node_addr": "10.0.0.1",
                "ranks": [{"rank_id": "0", "device_id": "0"}, {"rank_id": "1", "device_id": "1"}],
            },
            {"node_addr": "10.0.0.2", "ranks": [{"rank_id": "2"}]},
        ],
    }
    assert faults_of(data) == ""


def flat(**changes: Any) -> Data:
    """Return a good table of version 2.0 with changes to its second rank."""
    level = {
        "net_layer": 0,
        "net_instance_id": "r0",
        "net_type": "TOPO_FILE_DESC",
        "rank_addr_list": [{"addr_type": "IPV4", "addr": "10.0.0.1", "ports": ["0/0"]}],
    }
    ranks = [
        {"rank_id": at, "device_id": at, "local_id": at, "level_list": [copy.deepcopy(level)]}
        for at in range(2)
    ]
    ranks[1].update(changes)
    return {"version": "2.0", "rank_count": 2, "rank_list": ranks}


def test_a_server_of_dialect_2_ends_with_its_instance_of_layer_0() -> None:
    data = flat()
    found, _ = read_table(data)
    assert found is not None and len(found.servers) == 1
    data["rank_list"][1]["level_list"][0]["net_instance_id"] = "r1"
    found, _ = read_table(data)
    assert found is not None
    assert [[one.rank for one in server.devices] for server in found.servers] == [[0], [1]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"rank_id": "1"}, "rank_list[1].rank_id: must be a number in dialect 2.0, got '1'"),
        ({"rank_id": 0}, "rank_list[1].rank_id: 0 is listed twice"),
        ({"rank_id": True}, "rank_id: must be a number in dialect 2.0, got 'True'"),
        ({"device_id": 65}, "device_id: must be between 0 and 64, got 65"),
        ({"level_list": []}, "rank_list[1].level_list: is empty"),
        (
            {"level_list": [{"net_layer": 0, "net_type": "CLOS"}]},
            "net_type: must be TOPO_FILE_DESC in layer 0",
        ),
        (
            {"level_list": [{"net_layer": 1, "net_type": "X"}]},
            "net_type: must be TOPO_FILE_DESC or CLOS, got 'X'",
        ),
        ({"level_list": [{"level": 0}]}, "level_list[0].level: is a name of a draft"),
    ],
)
def test_dialect_2_has_its_own_rules(changes: Data, words: str) -> None:
    assert words in faults_of(flat(**changes))
    assert bool(words) == bool(faults_of(flat(**changes)))


HOSTILE = {
    "": "t.json: is empty",
    "   ": "t.json: is empty",
    "{": "t.json:1:2: ends in the middle",
    '{"a": [1, 2': "ends in the middle",
    '{"a": 1,}': "there is a comma before }",
    '{"a": [1,]}': "there is a comma before ]",
    '{"a": 1} x': "is not JSON",
    '// table\n{"a": 1}': "t.json:1:1: JSON has no comments",
    "{\n# x\n}": "JSON has no comments",
    "{'a': 1}": "single quotes",
    '{"a": 1, "b": 2, "a": 3}': "t.json:1: the key 'a' is twice in an object",
    '{"a": NaN}': "NaN is not a number of JSON",
    '{"a": Infinity}': "Infinity is not a number of JSON",
    '{"a": 1e999}': "must be whole numbers, got 1e999",
    '{"a": 1.5}': "must be whole numbers, got 1.5",
    '{"a": ' + "9" * 5000 + "}": "at most 18 digits, got 5000",
    "[" * 100_000: "is nested too deeply",
    '{"a":' * 100_000: "is nested too deeply",
    '{"a": "\\ud800"}': "is not valid Unicode",
    '{"\\udfff": "x"}': "is not valid Unicode",
    '{"n": "{count}", "l": [{items}]}': "{items} is not filled in",
    '{"a": "\t"}': "is not JSON",
}


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:16])
def test_hostile_json_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        jsontext.parse_json(text, "t.json")
    assert HOSTILE[text] in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "data", [[], 1, "x", None, True, {}, {"status": "initializing"}, {"group_list": 3}]
)
def test_data_of_any_shape_is_refused(data: Any) -> None:
    assert faults_of(data)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 99)
    | st.text(max_size=4)
    | st.sampled_from(["1.0", "0", "completed"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["server_id", "device", "rank_id", "device_id", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(
    st.sampled_from(["1.0", "1.1", "1.2", "2.0", None]),
    st.sampled_from(["server_list", "node_list", "rank_list", "group_list", "super_pod_list"]),
    JSON,
    JSON,
)
def test_no_shape_crashes_the_reader(version: str | None, key: str, inner: Any, other: Any) -> None:
    data = {"status": "completed", key: inner, "super_pod_list": other}
    if version is not None:
        data["version"] = version
    found, faults = read_table(data)
    assert found is not None or faults
    if found is not None and not faults:
        check_table(found)


@given(JSON)
def test_the_place_of_every_value_is_found(data: Any) -> None:
    text = json.dumps(data, indent=1)

    def walk(value: Any, path: jsontext.JsonPath) -> None:
        at = jsontext.find_offset(text, path)
        assert text[at:].startswith(json.dumps(value)[:1])
        pairs = (
            value.items()
            if isinstance(value, dict)
            else enumerate(value)
            if isinstance(value, list)
            else ()
        )
        for part, inner in pairs:
            walk(inner, (*path, part))

    walk(data, ())


def test_a_table_that_others_may_write_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(table()))
    path.chmod(0o666)
    loaded = files.load_table(str(path))
    assert loaded.errors == ()
    assert "every user of this machine can write" in loaded.format_fault(loaded.warnings[0])
