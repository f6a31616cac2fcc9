"""
What nodes have measured of each other -> findings. Pure.

`pdrun.parallel.startup.node_check` measures, on all nodes of a job.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pdrun.launcher.doctor.finding import LEVELS, Finding
from pdrun.text import plural

NEEDED_EQUAL = ("torch", "pdrun", "nccl", "cuda")
"""Versions that must be the same on all nodes; others may differ."""
MAX_CLOCK_SECONDS = 1.0
SLOW_SHARE = 0.5
"""A pair below this part of the median is slow."""
MIN_BYTES_PER_SECOND = 50e6
SLOW_LATENCY_FACTOR = 5.0
MIN_SLOW_LATENCY_SECONDS = 1e-3
MAX_SIZE_OF_SMALL_PACKETS = 1_400


def judge_nodes(result: Mapping[str, Any]) -> list[Finding]:
    """
    Return the findings between nodes, and those of each node itself.

    Raises:
        KeyError, TypeError, ValueError, IndexError: the result has another form.
    """
    names = _name_nodes(result["nodes"])
    return [
        *_local_findings(result["nodes"], names),
        *_judge_differences(result["nodes"], names),
        *_judge_names(result, names),
        *_judge_links(result["pairs"], names),
        *_judge_speeds("allreduce", result["reduced"], names),
    ]


def _name_nodes(nodes: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a name for each node that no other node has."""
    found: list[str] = []
    for rank, node in enumerate(nodes):
        name = str(node["node"])
        found.append(name if name not in found else f"{name} ({rank})")
    return found


def _local_findings(nodes: list[Mapping[str, Any]], names: list[str]) -> Iterator[Finding]:
    """Yield what each node has found by itself; simulated nodes of one host only once."""
    hosts: set[str] = set()
    for node, name in zip(nodes, names, strict=True):
        if node["host"] in hosts:
            continue
        hosts.add(node["host"])
        for item in node["local"]:
            if item["level"] not in LEVELS:
                raise ValueError(item["level"])
            yield Finding(
                str(item["check"]),
                item["level"],
                str(item["what"]),
                str(item["where"]),
                str(item["hint"]),
                name,
            )


def _judge_differences(nodes: list[Mapping[str, Any]], names: list[str]) -> Iterator[Finding]:
    """Yield versions, files and variables that differ."""
    is_equal = True
    for kind in ("versions", "files", "variables"):
        keys = sorted({key for node in nodes for key in node[kind]})
        for key in keys:
            values: dict[str, list[str]] = {}
            for node, name in zip(nodes, names, strict=True):
                values.setdefault(str(node[kind].get(key, "not set")), []).append(name)
            if len(values) > 1:
                is_equal = False
                yield _describe_difference(kind, key, values)
    if is_equal:
        torch = nodes[0]["versions"].get("torch", "")
        yield Finding("differs", "ok", f"the same on {plural(len(nodes), 'node')}: torch {torch}")


def _describe_difference(kind: str, key: str, values: Mapping[str, list[str]]) -> Finding:
    texts = []
    for value, holders in values.items():
        more = f" and {len(holders) - 3} more" if len(holders) > 3 else ""
        texts.append(f"{value} on {', '.join(holders[:3])}{more}")
    what = f"{key} differs: {'; '.join(texts)}"
    if kind == "versions":
        is_needed = key in NEEDED_EQUAL
        hint = f"install the same {key} on every node"
        return Finding("differs", "fail" if is_needed else "warn", what, hint=hint)
    if kind == "files":
        hint = "copy it to every node, or put it on a shared disk"
        return Finding("differs", "fail", what, hint=hint)
    hint = f"set {key} to the same on every node, for example with --env {key}=..."
    return Finding("differs", "warn", what, hint=hint)


def _judge_names(result: Mapping[str, Any], names: list[str]) -> Iterator[Finding]:
    nodes = result["nodes"]
    is_well = True
    for rank, entries in enumerate(result["names"]):
        for entry in entries:
            other = nodes[entry["of"]]
            if other["host"] == nodes[rank]["host"]:
                continue
            problem = _find_name_problem(entry, other)
            if problem:
                is_well = False
                hint = (
                    f"add {other['host']} to DNS or /etc/hosts of {names[rank]}, or use addresses"
                )
                yield Finding("names", "warn", problem, f"on {names[rank]}", hint)
    if is_well:
        yield Finding("names", "ok", "every node resolves the names of the others")


def _find_name_problem(entry: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    host = other["host"]
    if entry["error"]:
        return f"{host} cannot be resolved: {entry['error']}"
    wrong = [text for text in entry["addresses"] if text not in other["addresses"]]
    if wrong:
        own = ", ".join(other["addresses"])
        return f"{host} is resolved to {', '.join(wrong)}, but its addresses are {own}"
    if all(text.startswith("127.") for text in entry["addresses"]):
        return f"{host} is resolved to loopback"
    back = str(entry["name"])
    is_name = any(char.isalpha() for char in back)
    if is_name and back.partition(".")[0] != str(host).partition(".")[0]:
        return f"the address of {host} is resolved back to {back}"
    return ""


def _judge_links(pairs: list[list[Mapping[str, Any]]], names: list[str]) -> Iterator[Finding]:
    """Yield what is wrong with connections, round trips, speeds and clocks of pairs."""
    is_well = True
    latencies: dict[str, float] = {}
    for rank, entries in enumerate(pairs):
        for entry in entries:
            if entry["of"] < rank:
                continue  # the lower rank has measured
            pair = f"{names[rank]} - {names[entry['of']]}"
            problem = _find_link_problem(entry, pair)
            if problem is not None:
                is_well = False
                yield problem
            elif "latency" in entry:
                latencies[pair] = float(entry["latency"])
            offset = float(entry.get("clock_offset", 0.0))
            if abs(offset) > MAX_CLOCK_SECONDS:
                what = f"the clocks differ by {abs(offset):.1f} s"
                hint = "start chrony or systemd-timesyncd on both"
                yield Finding("clock", "warn", what, pair, hint)
    if is_well:
        yield Finding(
            "ports", "ok", f"all nodes connect to each other, {len(latencies)} pairs tried"
        )
    if latencies:
        middle = statistics.median(latencies.values())
        limit = max(MIN_SLOW_LATENCY_SECONDS, SLOW_LATENCY_FACTOR * middle)
        for pair, seconds in latencies.items():
            if seconds > limit:
                what = f"{seconds * 1e3:.2f} ms one way, {middle * 1e3:.2f} ms in the middle"
                hint = "look for another route, a loaded switch or a power-saving NIC"
                yield Finding("latency", "warn", what, pair, hint)
        yield Finding("latency", "ok", f"{middle * 1e6:,.0f} us one way in the middle")
    yield from _judge_speeds("bandwidth", pairs, names)


def _find_link_problem(entry: Mapping[str, Any], pair: str) -> Finding | None:
    if not entry["error"]:
        return None
    stalled = int(entry["stalled_at"])
    if stalled > MAX_SIZE_OF_SMALL_PACKETS:
        what = f"messages of {stalled} bytes are lost, smaller ones arrive"
        hint = "the path drops large packets (MTU): set the MTU of the interfaces to the smallest"
        hint += " of the path, or allow ICMP 'fragmentation needed'"
        return Finding("ports", "fail", what, pair, hint)
    what = f"no connection to {entry.get('to', 'the other node')}: {entry['error']}"
    hint = "open the ports between the nodes, choose --interface, or set --port-range"
    return Finding("ports", "fail", what, pair, hint)


def _judge_speeds(
    check: str, pairs: list[list[Mapping[str, Any]]], names: list[str]
) -> Iterator[Finding]:
    speeds: dict[str, float] = {}
    for rank, entries in enumerate(pairs):
        for entry in entries:
            if entry["of"] < rank:
                continue
            pair = f"{names[rank]} - {names[entry['of']]}"
            if check == "allreduce" and entry["error"]:
                hint = "the nodes cannot run collectives: look at the findings of names and ports"
                yield Finding(check, "fail", f"an all-reduce fails: {entry['error']}", pair, hint)
            elif float(entry.get("bandwidth", 0.0)) > 0:
                speeds[pair] = float(entry["bandwidth"])
    if not speeds:
        return
    middle = statistics.median(speeds.values())
    what = "all-reduce" if check == "allreduce" else "TCP, one connection"
    hint = "look at the link of that node (ethtool, switch), or leave the node out"
    for pair, speed in speeds.items():
        if speed < max(MIN_BYTES_PER_SECOND, SLOW_SHARE * middle):
            text = f"{speed / 1e6:,.0f} MB/s ({what}), {middle / 1e6:,.0f} MB/s in the middle"
            yield Finding(check, "warn", text, pair, hint)
    yield Finding(check, "ok", f"{middle / 1e6:,.0f} MB/s in the middle ({what})")
