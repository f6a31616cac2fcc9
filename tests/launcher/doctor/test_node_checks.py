"""What nodes measure of each other, and the findings that follow; planted troubles are named."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from pdrun.launcher.doctor.finding import Finding
from pdrun.launcher.doctor.node_checks import judge_nodes

VERSIONS = {"torch": "2.13.0", "pdrun": "0.1.0", "python": "3.12.1", "driver": "580.1"}


def healthy(count: int = 3) -> dict[str, Any]:
    nodes = [
        {
            "node": f"n{rank}",
            "host": f"n{rank}",
            "port": 4000 + rank,
            "addresses": ["127.0.0.1", f"10.0.0.{rank}"],
            "versions": dict(VERSIONS),
            "files": {"a.py": "12"},
            "variables": {"NCCL_DEBUG": "INFO"},
            "local": [],
        }
        for rank in range(count)
    ]
    names = [
        [
            {"of": other, "addresses": [f"10.0.0.{other}"], "error": "", "name": f"n{other}.lan"}
            for other in range(count)
            if other != rank
        ]
        for rank in range(count)
    ]
    pairs = [
        [
            {
                "of": other,
                "to": f"10.0.0.{other}:4000",
                "error": "",
                "stalled_at": 0,
                "latency": 2e-5,
                "bandwidth": 1e9,
                "clock_offset": 0.01,
            }
            if rank < other
            else {"of": other, "error": "", "stalled_at": 0}
            for other in range(count)
            if other != rank
        ]
        for rank in range(count)
    ]
    reduced = [
        [{"of": other, "error": "", "bandwidth": 5e8} for other in range(count) if other != rank]
        for rank in range(count)
    ]
    return {"nodes": nodes, "names": names, "pairs": pairs, "reduced": reduced}


def serious(result: dict[str, Any]) -> list[Finding]:
    found = [one for one in judge_nodes(result) if one.level != "ok"]
    assert all(one.hint for one in found)
    return found


@pytest.mark.parametrize("count", [2, 3, 7])
def test_healthy_nodes(count: int) -> None:
    assert serious(healthy(count)) == []
    checks = {one.check for one in judge_nodes(healthy(count))}
    assert checks == {"differs", "names", "ports", "latency", "bandwidth", "allreduce"}


def plant(path: str, value: object) -> dict[str, Any]:
    result = copy.deepcopy(healthy())
    *keys, last = [int(key) if key.isdecimal() else key for key in path.split(" ")]
    place: Any = result
    for key in keys:
        place = place[key]
    place[last] = value
    return result


@pytest.mark.parametrize(
    ("path", "value", "check", "level", "text"),
    [
        (
            "nodes 2 versions torch",
            "2.12.0",
            "differs",
            "fail",
            "torch differs: 2.13.0 on n0, n1; 2.12.0 on n2",
        ),
        ("nodes 2 versions driver", "570.1", "differs", "warn", "driver differs"),
        ("nodes 1 files a.py", "No such file or directory", "differs", "fail", "a.py differs"),
        (
            "nodes 1 variables",
            {},
            "differs",
            "warn",
            "NCCL_DEBUG differs: INFO on n0, n2; not set on n1",
        ),
        ("names 0 1 error", "Name or service not known", "names", "warn", "n2 cannot be resolved"),
        ("names 0 1 addresses", ["10.9.9.9"], "names", "warn", "n2 is resolved to 10.9.9.9"),
        ("names 0 1 addresses", ["127.0.0.1"], "names", "warn", "n2 is resolved to loopback"),
        ("names 0 1 name", "other.lan", "names", "warn", "resolved back to other.lan"),
        ("pairs 0 1 error", "timed out", "ports", "fail", "no connection to 10.0.0.2:4000"),
        ("pairs 0 1 latency", 0.02, "latency", "warn", "20.00 ms one way"),
        ("pairs 0 1 bandwidth", 1e8, "bandwidth", "warn", "100 MB/s (TCP"),
        ("pairs 0 1 clock_offset", -70.0, "clock", "warn", "the clocks differ by 70.0 s"),
        (
            "reduced 0 1 error",
            "Connection closed by peer",
            "allreduce",
            "fail",
            "an all-reduce fails",
        ),
        ("reduced 0 1 bandwidth", 1e8, "allreduce", "warn", "100 MB/s (all-reduce)"),
    ],
)
def test_planted_troubles(path: str, value: object, check: str, level: str, text: str) -> None:
    found = serious(plant(path, value))
    assert [(one.check, one.level) for one in found] == [(check, level)]
    assert text in found[0].what
    place = found[0].where + found[0].what
    assert "n2" in place or "n1" in place


def test_a_path_that_drops_large_packets() -> None:
    result = plant("pairs 0 1 error", "timed out")
    result["pairs"][0][1]["stalled_at"] = 8900
    (found,) = serious(result)
    assert "messages of 8900 bytes are lost" in found.what and "MTU" in found.hint
    assert found.where == "n0 - n2"


def test_findings_of_each_host_once() -> None:
    result = healthy(2)
    one = {"check": "shm", "level": "warn", "what": "w", "where": "/dev/shm", "hint": "h"}
    for node in result["nodes"]:
        node["local"], node["host"] = [one], "same"
    assert [found.node for found in serious(result)] == ["n0"]


@pytest.mark.parametrize("path", ["nodes 0 local", "names 0 0 addresses", "pairs 0"])
def test_a_result_of_another_form_is_refused(path: str) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, IndexError, AttributeError)):
        judge_nodes(plant(path, 7))
