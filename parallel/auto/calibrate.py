"""
``pdrun doctor --calibrate``: measures a topology. A script of an ordinary job: every rank runs it.

Products, copies and the start of operators are measured on rank 0's device, all-reduce and
all-gather inside of a node and between nodes. Latency and bandwidth of a level are fitted by least
squares. One device has no links: those of the built-in topology of its kind are taken.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import pdrun
from pdrun.errors import UsageError
from pdrun.parallel.auto.auto import detect_topology
from pdrun.parallel.auto.topology import ComputeRate, DeviceRates, LinkLevel, Topology
from pdrun.parallel.startup.init import Context, init

REPEATS = 7
"""Timed repetitions; the median counts."""
PRODUCT_SIZES = {"cpu": (64, 256, 1024), "": (256, 1024, 4096, 8192)}
"""Sizes of square products by kind of device; the empty name is any accelerator."""
COPY_BYTES = {"cpu": 2**26, "": 2**29}
MESSAGE_BYTES = {"cpu": (2**12, 2**16, 2**20, 2**23), "": (2**16, 2**20, 2**24, 2**27)}
MANY_OPERATIONS = 2e10
"""
Operations of a product on an accelerator: smaller ones are measured in batches, because starting
one takes longer than computing it.
"""
LAUNCHES = 200
"""Small operators in the loop that measures the start of one."""
MAX_RESIDUAL = 0.15
"""Relative difference of a measured and a fitted time that is reported."""
CPU_MEMORY_SHARE = 0.8


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print or save the topology on rank 0."""
    parser = argparse.ArgumentParser(prog="pdrun doctor --calibrate")
    parser.add_argument("--save", default="")
    parser.add_argument("--name", default="measured")
    options = parser.parse_args(argv)
    context = init()
    topology, remarks = measure_topology(context, options.name)
    if context.rank == 0:
        print("\n".join(remarks), flush=True)
        if options.save:
            try:
                Path(options.save).write_text(topology.to_json(), encoding="utf-8")
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise UsageError(f"cannot be written: {reason}", where=options.save) from None
            print(f"saved {options.save}", flush=True)
        else:
            print(topology.to_json(), end="", flush=True)


def measure_topology(context: Context, name: str) -> tuple[Topology, list[str]]:
    """
    Return the topology of this job's devices, and remarks about the fit; every rank calls it.

    Raises:
        ConfigError: there is one device, and no built-in topology has links for it.
    """
    device = torch.device(context.device)
    known = detect_topology() if context.world_size == 1 else None
    rates = _measure_device(device, context.local_world_size)
    levels: list[LinkLevel] = []
    remarks: list[str] = []
    local = context.local_world_size
    if local > 1:
        groups = [
            dist.new_group(list(range(node * local, (node + 1) * local)))
            for node in range(context.world_size // local)
        ]
        level, text = _measure_level("node", groups[context.node_rank], local, device)
        levels.append(level)
        remarks += text
    if context.nodes > 1:
        across = [
            dist.new_group(list(range(place, context.world_size, local))) for place in range(local)
        ]
        level, text = _measure_level("network", across[context.local_rank], context.nodes, device)
        levels.append(LinkLevel("network", level.latency, level.bandwidth))
        remarks += text
    elif known is not None:
        levels = list(known.levels)
        remarks.append(
            f"links are those of {known.name}, a guess: --devices 2 or more, or a job of several"
            " nodes, measures them"
        )
    else:
        levels[-1] = LinkLevel("node", levels[-1].latency, levels[-1].bandwidth)
    remarks.append("overlap 0.9 is assumed, not measured")
    day = time.strftime("%Y-%m-%d", time.gmtime())
    made = f"measured on {day} by version {pdrun.__version__}"
    if known is not None:
        made += f", but for its links, which are those of {known.name}"
    return Topology(name, rates, tuple(levels), made=made), remarks


def _by_kind(table: Mapping[str, tuple[int, ...]], device: torch.device) -> tuple[int, ...]:
    return table.get(device.type, table[""])


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call, after two that are not counted."""
    times = []
    for repeat in range(REPEATS + 2):
        _synchronize(device)
        start = time.perf_counter()
        call()
        _synchronize(device)
        if repeat >= 2:
            times.append(time.perf_counter() - start)
    return max(statistics.median(times), 1e-9)


def _measure_device(device: torch.device, sharing: int) -> DeviceRates:
    """Return the rates of this rank's device; ``sharing`` ranks share the memory of a host."""
    types = {"fp32": torch.float32}
    if device.type != "cpu":
        types |= {"bf16": torch.bfloat16, "fp16": torch.float16}
    kinds = {}
    for kind, dtype in types.items():
        rates = []
        for size in _by_kind(PRODUCT_SIZES, device):
            count = _batch_of_products(size, device)
            a, b = (torch.randn(count, size, size, device=device).to(dtype) for _ in range(2))
            seconds = _median_seconds(functools.partial(torch.matmul, a, b), device)
            rates.append((float(size), 2.0 * count * size**3 / seconds))
        peak = max(rate for _, rate in rates)
        kinds[kind] = ComputeRate(peak, tuple((size, rate / peak) for size, rate in rates))
    nbytes = COPY_BYTES.get(device.type, COPY_BYTES[""])
    block = torch.empty(nbytes, dtype=torch.uint8, device=device)
    copied = torch.empty_like(block)
    bandwidth = 2 * nbytes / _median_seconds(lambda: copied.copy_(block), device)
    small = torch.zeros(8, device=device)

    def launch_many() -> None:
        for _ in range(LAUNCHES):
            small.add_(1)

    launch = _median_seconds(launch_many, device) / LAUNCHES
    return DeviceRates(
        _memory_of(device, sharing),
        CPU_MEMORY_SHARE if device.type == "cpu" else 0.92,
        bandwidth,
        launch,
        kinds,
    )


def _batch_of_products(size: int, device: torch.device) -> int:
    """Return how many products of a size are measured at one time."""
    if device.type == "cpu":
        return 1
    return max(1, math.ceil(MANY_OPERATIONS / (2.0 * size**3)))


def _memory_of(device: torch.device, sharing: int) -> int:
    """Return the bytes of a device; of the host, each rank's part."""
    if device.type == "cpu":
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024 // sharing
    module = torch.get_device_module(device)
    return int(module.mem_get_info(device)[1])


def _measure_level(
    name: str, group: dist.ProcessGroup, parts: int, device: torch.device
) -> tuple[LinkLevel, list[str]]:
    """Return latency and bandwidth of the links of a group, and remarks about the fit."""
    points: list[tuple[str, float, float]] = []
    for nbytes in _by_kind(MESSAGE_BYTES, device):
        x = torch.zeros(nbytes // 4, device=device)
        pieces = [torch.empty_like(x) for _ in range(parts)]
        calls: dict[str, tuple[float, Callable[[], object]]] = {
            "all-reduce": (
                2 * nbytes * (parts - 1) / parts,
                functools.partial(dist.all_reduce, x, group=group),
            ),
            "all-gather": (
                nbytes * (parts - 1),
                functools.partial(dist.all_gather, pieces, x, group=group),
            ),
        }
        for kind, (sent, call) in calls.items():
            dist.barrier(group)
            seconds = torch.tensor([_median_seconds(call, device)], device=device)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
            points.append((f"{kind} of {nbytes:,} bytes", sent, float(seconds)))
    latency, bandwidth = fit_line([(sent, seconds) for _, sent, seconds in points])
    remarks = [
        f"{name}: {parts} devices, latency {latency * 1e6:,.1f} us,"
        f" {bandwidth / 1e9:,.2f} GB/s per device"
    ]
    for text, sent, seconds in points:
        difference = (latency + sent / bandwidth) / seconds - 1
        if abs(difference) > MAX_RESIDUAL:
            remarks.append(f"  {text}: {seconds * 1e6:,.1f} us, {difference:+.0%} in the fit")
    return LinkLevel(name, latency, bandwidth, parts), remarks


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """
    Return latency and bandwidth: seconds = latency + bytes / bandwidth.

    Least squares of the relative difference, so that small messages count as much as large ones.
    """
    weights = [1.0 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = (
        sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
        / spread
    )
    if slope <= 0:  # latency hides the bytes: the largest message bounds the bandwidth
        largest = max(points)
        slope = largest[1] / largest[0]
        return 0.0, 1 / slope
    latency = mean_y - slope * mean_x
    if latency < 0:
        slope = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / sum(
            w * x * x for w, (x, _) in zip(weights, points, strict=True)
        )
        latency = 0.0
    return latency, 1 / slope


if __name__ == "__main__":
    main()
