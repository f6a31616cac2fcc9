"""
Built-in topologies: data sheets and experience, marked as guesses. ``pdrun doctor --calibrate``
replaces them.
"""

from __future__ import annotations

import re

from pdrun.errors import ConfigError
from pdrun.parallel.auto.topology import ComputeRate, DeviceRates, LinkLevel, Topology

GIB = 2**30
GPU_PRODUCTS = ((256.0, 0.18), (1024.0, 0.45), (4096.0, 0.66), (16384.0, 0.70))
"""Share of the peak that products on accelerators attain, by size."""
USABLE_SHARE = 0.92
MEMORY_SHARE = 0.75
"""Share of a data sheet's memory bandwidth that operators attain."""
LAUNCH_SECONDS = 3e-6


# NVIDIA's data sheets print tensor cores with sparsity from A30 on: halved here. The B200 is that
# of HGX (1,000 W), the GB200 that of the superchip (1,200 W). Of the MI250X one of its two devices.
# Sums are in fp32, which halves GeForce cards and the L40. Of Ascend 910B that of the cube units,
# as Huawei's own plug-in for torchtitan counts, not the sum with the vector units (400 to 280).
DEVICE_PEAKS: dict[str, dict[str, float]] = {
    "V100": {"fp16": 1.25e14, "fp32": 1.57e13},
    "V100-PCIE": {"fp16": 1.12e14, "fp32": 1.4e13},
    "V100S": {"fp16": 1.3e14, "fp32": 1.64e13},
    "T4": {"fp16": 6.5e13, "fp32": 8.1e12},
    "A10": {"bf16": 1.25e14, "fp16": 1.25e14, "tf32": 6.25e13, "fp32": 3.12e13},
    "A10G": {"bf16": 7.0e13, "fp16": 7.0e13, "tf32": 3.5e13, "fp32": 3.5e13},
    "A30": {"bf16": 1.65e14, "fp16": 1.65e14, "tf32": 8.2e13, "fp32": 1.03e13},
    "A40": {"bf16": 1.497e14, "fp16": 1.497e14, "tf32": 7.48e13, "fp32": 3.74e13},
    "A100": {"bf16": 3.12e14, "fp16": 3.12e14, "tf32": 1.56e14, "fp32": 1.95e13},
    "A800": {"bf16": 3.12e14, "fp16": 3.12e14, "tf32": 1.56e14, "fp32": 1.95e13},
    "L4": {"bf16": 1.21e14, "fp16": 1.21e14, "tf32": 6.0e13, "fp32": 3.03e13},
    "L20": {"bf16": 1.195e14, "fp16": 1.195e14, "tf32": 5.98e13, "fp32": 5.98e13},
    "L40": {"bf16": 1.8105e14, "fp16": 1.8105e14, "tf32": 9.05e13, "fp32": 9.05e13},
    "L40S": {"bf16": 3.6205e14, "fp16": 3.6205e14, "tf32": 1.83e14, "fp32": 9.16e13},
    "H20": {"bf16": 1.48e14, "fp16": 1.48e14, "tf32": 7.4e13, "fp32": 4.4e13},
    "H100": {"bf16": 9.89e14, "fp16": 9.89e14, "tf32": 4.95e14, "fp32": 6.7e13},
    "H100 PCIe": {"bf16": 7.56e14, "fp16": 7.56e14, "tf32": 3.78e14, "fp32": 5.1e13},
    "H100 80GB HBM2e": {"bf16": 7.56e14, "fp16": 7.56e14, "tf32": 3.78e14, "fp32": 5.1e13},
    "H100 NVL": {"bf16": 8.35e14, "fp16": 8.35e14, "tf32": 4.18e14, "fp32": 6.0e13},
    "H200": {"bf16": 9.89e14, "fp16": 9.89e14, "tf32": 4.95e14, "fp32": 6.7e13},
    "H200 NVL": {"bf16": 8.36e14, "fp16": 8.36e14, "tf32": 4.18e14, "fp32": 6.0e13},
    "GH200": {"bf16": 9.89e14, "fp16": 9.89e14, "tf32": 4.95e14, "fp32": 6.7e13},
    "B200": {"bf16": 2.25e15, "fp16": 2.25e15, "tf32": 1.1e15, "fp32": 8.0e13},
    "GB200": {"bf16": 2.5e15, "fp16": 2.5e15, "tf32": 1.25e15, "fp32": 9.0e13},
    "RTX 3090": {"bf16": 7.1e13, "fp16": 7.1e13, "tf32": 3.56e13, "fp32": 3.56e13},
    "RTX 3090 Ti": {"bf16": 8.0e13, "fp16": 8.0e13, "tf32": 4.0e13, "fp32": 4.0e13},
    "RTX 4090": {"bf16": 1.652e14, "fp16": 1.652e14, "tf32": 8.26e13, "fp32": 8.26e13},
    "RTX 4090 D": {"bf16": 1.471e14, "fp16": 1.471e14, "tf32": 7.35e13, "fp32": 7.35e13},
    "RTX 5090": {"bf16": 2.095e14, "fp16": 2.095e14, "tf32": 1.048e14, "fp32": 1.048e14},
    "MI250X": {"bf16": 1.915e14, "fp16": 1.915e14, "fp32": 4.79e13},
    "MI300A": {"bf16": 9.806e14, "fp16": 9.806e14, "tf32": 4.903e14, "fp32": 1.226e14},
    "MI300X": {"bf16": 1.307e15, "fp16": 1.307e15, "tf32": 6.537e14, "fp32": 1.634e14},
    "MI325X": {"bf16": 1.307e15, "fp16": 1.307e15, "tf32": 6.537e14, "fp32": 1.634e14},
    "Ascend910B1": {"bf16": 3.74e14, "fp16": 3.74e14},
    "Ascend910B2": {"bf16": 3.54e14, "fp16": 3.54e14},
    "Ascend910B3": {"bf16": 2.95e14, "fp16": 2.95e14},
    "Ascend910B4": {"bf16": 2.46e14, "fp16": 2.46e14},
}
"""
FLOP per second of dense products by a part of torch's name of the device, from data sheets: fp32
sums, without sparsity; of GeForce and T4 at boost clock.
"""
PART_OF_A_DEVICE = re.compile(r"\b(MIG|GRID|Laptop|Max-Q)\b", re.IGNORECASE)
"""In the names of slices of a card and of slower cards that share its name: no peak is known."""


def find_device_peaks(device_name: str) -> tuple[str, dict[str, float]] | None:
    """
    Return the entry of `DEVICE_PEAKS` for torch's name of a device: the longest that fits as whole
    words, so that a card whose name only begins like another one's (A10M, T4G) has no peak.
    """
    fitting = [
        name
        for name in DEVICE_PEAKS
        if re.search(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", device_name, re.IGNORECASE)
    ]
    if not fitting or PART_OF_A_DEVICE.search(device_name):
        return None
    name = max(fitting, key=len)
    return name, DEVICE_PEAKS[name]


def _make_accelerator(
    name: str, peaks: dict[str, float], memory_gib: int, memory_rate: float, links: float
) -> Topology:
    """Return nodes of eight accelerators on a network of 400 Gbit/s per device."""
    kinds = {
        "bf16": ComputeRate(peaks["bf16"], GPU_PRODUCTS),
        "fp16": ComputeRate(peaks["fp16"], GPU_PRODUCTS),
        "fp32": ComputeRate(peaks["tf32"], GPU_PRODUCTS),
    }
    device = DeviceRates(
        memory_gib * GIB, USABLE_SHARE, memory_rate * MEMORY_SHARE, LAUNCH_SECONDS, kinds
    )
    levels = (LinkLevel("node", 2e-5, links, 8), LinkLevel("network", 4e-5, 4e10))
    return Topology(name, device, levels, is_guess=True, made="data sheet")


def _make_cpu() -> Topology:
    rate = ComputeRate(1e11, ((64.0, 0.2), (256.0, 0.5), (1024.0, 0.6)))
    device = DeviceRates(8 * GIB, 0.8, 1e10, 5e-6, {"fp32": rate})
    levels = (LinkLevel("node", 1e-4, 2e9, 8), LinkLevel("network", 2e-4, 1e9))
    return Topology("cpu", device, levels, is_guess=True, made="experience")


BUILTIN_TOPOLOGIES: dict[str, Topology] = {
    topology.name: topology
    for topology in (
        _make_cpu(),
        _make_accelerator("a100x8", DEVICE_PEAKS["A100"], 80, 2.0e12, 2.4e11),
        _make_accelerator("h100x8", DEVICE_PEAKS["H100"], 80, 3.35e12, 3.3e11),
        _make_accelerator("h200x8", DEVICE_PEAKS["H200"], 141, 4.8e12, 3.3e11),
        _make_accelerator(
            "910bx8", {**DEVICE_PEAKS["Ascend910B2"], "tf32": 7.5e13}, 64, 1.6e12, 1.5e11
        ),
    )
}
DEVICE_NAMES = {"H200": "h200x8", "H100": "h100x8", "A100": "a100x8", "Ascend910B": "910bx8"}
"""Built-in topology by a part of the name that torch gives to a device."""


def find_topology(device_name: str) -> Topology:
    """
    Return the built-in topology of a device by torch's name of it.

    Raises:
        ConfigError: no built-in topology has such a device.
    """
    if device_name == "cpu":
        return BUILTIN_TOPOLOGIES["cpu"]
    for part, name in DEVICE_NAMES.items():
        if part.lower() in device_name.lower():
            return BUILTIN_TOPOLOGIES[name]
    raise ConfigError(
        f"no built-in topology for the device {device_name!r}",
        where="topology",
        hint="measure one with pdrun doctor --calibrate --save topology.json, or name one with"
        f" topology= ({', '.join(BUILTIN_TOPOLOGIES)})",
    )
