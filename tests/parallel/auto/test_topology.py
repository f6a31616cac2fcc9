"""Topologies: links by the ranks that they connect, files, and the measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pdrun.errors import ConfigError
from pdrun.parallel.auto.builtin_topologies import BUILTIN_TOPOLOGIES, find_topology
from pdrun.parallel.auto.calibrate import _batch_of_products, fit_line
from pdrun.parallel.auto.topology import ComputeRate
from pdrun.parallel.auto.topology_file import load_topology, parse_size, parse_topology
from tests.parallel.auto import rank_runs

pytestmark = pytest.mark.torch
H100 = BUILTIN_TOPOLOGIES["h100x8"]


def test_links_of_a_group_follow_from_its_stride() -> None:
    inside, outside = H100.levels
    assert H100.link_seconds(1, 1, 1e9) == 0
    assert H100.link_seconds(1, 8, 1e9) == inside.latency + 1e9 / inside.bandwidth
    assert H100.link_seconds(8, 4, 1e9) == outside.latency + 1e9 / outside.bandwidth
    assert H100.link_seconds(2, 8, 0) == inside.latency + outside.latency


def test_two_levels_share_the_bytes_of_a_ring() -> None:
    """16 ranks in nodes of 8: 7/8 of the data inside, and 1/16 of it between two nodes."""
    inside, outside = H100.levels
    sent = 15 / 16 * 1e9
    wanted = inside.latency + 7 / 8 * 1e9 / inside.bandwidth
    wanted += outside.latency + 1 / 16 * 1e9 / outside.bandwidth
    assert H100.link_seconds(1, 16, sent) == pytest.approx(wanted)


def test_rates_are_interpolated_in_the_logarithm() -> None:
    rate = ComputeRate(100.0, ((256.0, 0.2), (4096.0, 0.6)))
    assert rate.attained(1) == 20
    assert rate.attained(1024) == pytest.approx(40)
    assert rate.attained(1e9) == 60


def test_file_gives_the_same_topology(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(H100.to_json())
    assert load_topology(str(path)) == H100
    assert load_topology("h100x8") is H100
    assert find_topology("NVIDIA H200").name == "h200x8"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latencies": 1}, "unknown key 'latencies'"),
        ({"format": 2}, "format must be 1, got 2"),
        ({"levels": []}, "levels must be a list"),
        ({"levels": [{"name": "a", "latency": -1, "bandwidth": 1}]}, "latency must be a number"),
        ({"levels": [{"name": "a", "latency": 0, "bandwith": 1}]}, "did you mean 'bandwidth'"),
        ({"levels": [{"name": "a", "latency": 0, "bandwidth": 0}]}, "bandwidth must be above 0"),
        ({"overlap": 2}, "overlap must be a number from 0 to 1"),
        ({"device": {}}, "device lacks bandwidth, kinds, launch, memory"),
    ],
)
def test_errors_of_files_name_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"mine\.json") as caught:
        parse_topology({**json.loads(H100.to_json()), **change}, "mine.json")
    assert message in str(caught.value)


def test_unknown_names_and_sizes() -> None:
    with pytest.raises(ConfigError, match="did you mean 'h100x8'"):
        load_topology("h100x")
    with pytest.raises(ConfigError, match="no built-in topology for the device 'Other'"):
        find_topology("Other")
    assert parse_size("1.5GiB", "memory", "x") == 3 * 2**29
    for wrong in ("72GB", "-1GiB", "", True):
        with pytest.raises(ConfigError, match="memory must be a size such as 80GiB"):
            parse_size(wrong, "memory", "x")


def test_fit_finds_latency_and_bandwidth() -> None:
    points = [(x, 2e-5 + x / 3e9) for x in (1e3, 1e5, 1e7, 1e9)]
    latency, bandwidth = fit_line(points)
    assert latency == pytest.approx(2e-5, rel=1e-6)
    assert bandwidth == pytest.approx(3e9, rel=1e-6)
    assert fit_line([(1e3, 1e-3), (1e6, 1e-4)]) == (0.0, pytest.approx(1e10))


def test_measured_topology_is_a_file(worlds: Any) -> None:
    text, remarks = worlds(2).run(rank_runs.measure)[0]
    topology = parse_topology(json.loads(text))
    assert not topology.is_guess
    assert topology.levels[0].devices is None
    assert topology.device.bandwidth > 1e7
    assert topology.device.rate_of("fp32").attained(256) > 1e7
    assert remarks[0].startswith("node: 2 devices, latency ")


def test_links_of_one_device_are_the_built_in_ones(worlds: Any) -> None:
    text, remarks = worlds(1).run(rank_runs.measure)[0]
    topology = parse_topology(json.loads(text))
    assert topology.levels == BUILTIN_TOPOLOGIES["cpu"].levels
    assert topology.device != BUILTIN_TOPOLOGIES["cpu"].device
    assert remarks[0].startswith("links are those of cpu, a guess: --devices 2 or more")
    assert topology.made.endswith("but for its links, which are those of cpu")


@pytest.mark.parametrize(
    ("size", "device", "count"),
    [(8192, "cuda", 1), (4096, "cuda", 1), (1024, "cuda", 10), (256, "cuda", 597), (64, "cpu", 1)],
)
def test_small_products_are_measured_in_batches(size: int, device: str, count: int) -> None:
    """Otherwise their start is measured: 1,024 on an H200 had a tenth of what it attains."""
    assert _batch_of_products(size, torch.device(device)) == count
